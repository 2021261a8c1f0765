"""How much each operation loses with fewer SMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cute_ep.bench.measure import make_sets, measure
from cute_ep.runtime.connection import connected
from cute_ep.runtime.gpus import sm_budget
from perf.cases import CEILING_TOKENS, MAIN, SWEEP_OPERATIONS, SWEEP_SMS, SWEEP_TOKENS
from perf.sm_ceiling import measure_sm_ceilings, ranks_on_a_gpu

SAMPLES = 60
CEILING_FORMAT = "bf16"


def sweep_budgets(device: str) -> list[int]:
    """SWEEP_SMS as numbers, without those that a GPU does not have."""
    have = sm_budget(device, None)
    return [sms or have for sms in SWEEP_SMS if sms is None or sms < have]


def measure_sweep(devices: Sequence[str], library: str | None, say: Callable[[str], None]) -> list[dict]:
    """`cute_ep.bench.measure.measure` of each operation, batch size and SM budget, with "sms" in every result."""
    results = []
    for fmt, operations in SWEEP_OPERATIONS.items():
        cfg = MAIN.config(fmt, len(devices), max(SWEEP_TOKENS))
        inputs = [make_sets(cfg, devices, tokens) for tokens in SWEEP_TOKENS]
        for sms in sweep_budgets(devices[0]):
            with connected(cfg, devices, sms=sms, library=library) as communicators:
                for sets in inputs:
                    for case in measure(communicators, sets, operations, SAMPLES):
                        results.append(case | {"sms": sms})
            say(f"sweep {fmt}, {sms} SMs")
        del inputs
    return results


def measure_sweep_ceilings(devices: Sequence[str], say: Callable[[str], None]) -> list[dict]:
    """`measure_sm_ceilings` for what `measure_sweep` measures, where all ranks of a GPU have SMs of their own."""
    most = sm_budget(devices[0], None) // ranks_on_a_gpu(devices)
    budgets = [sms for sms in sweep_budgets(devices[0]) if sms <= most]
    return measure_sm_ceilings(devices, SWEEP_OPERATIONS[CEILING_FORMAT], CEILING_TOKENS, budgets, say)
