"""How much each operation loses with fewer SMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cute_ep.bench.measure import make_sets, measure
from cute_ep.runtime.connection import connected
from cute_ep.runtime.gpus import sm_budget
from perf.cases import MAIN, SWEEP_OPERATIONS, SWEEP_SMS, SWEEP_TOKENS

SAMPLES = 60


def measure_sweep(devices: Sequence[str], library: str | None, say: Callable[[str], None]) -> list[dict]:
    """`cute_ep.bench.measure.measure` of each operation, batch size and SM budget, with "sms" in every result."""
    have = sm_budget(devices[0], None)
    results = []
    for fmt, operations in SWEEP_OPERATIONS.items():
        cfg = MAIN.config(fmt, len(devices), max(SWEEP_TOKENS))
        inputs = [make_sets(cfg, devices, tokens) for tokens in SWEEP_TOKENS]
        for sms in SWEEP_SMS:
            if sms is not None and sms >= have:
                continue
            with connected(cfg, devices, sms=sms, library=library) as communicators:
                for sets in inputs:
                    for case in measure(communicators, sets, operations, SAMPLES):
                        results.append(case | {"sms": sms or have})
            say(f"sweep {fmt}, {sms or have} SMs")
        del inputs
    return results
