"""A run as the suite writes it, with times that follow the model exactly."""

from __future__ import annotations

from typing import Any

from cute_ep.bench.ceilings import Ceilings, floors
from cute_ep.bench.measure import PARTS
from cute_ep.bench.timing import summary
from perf import model
from perf.cases import MAIN

CEILINGS = Ceilings(4e11, 3.5e11, 3.9e11, 3.9e12, 4.2e12, 1.2e-6, 1.0e-6)
RANKS = 2


def case(operation: str, fmt: str, tokens: int, p50: float, parts: list, **other: Any) -> dict:
    """A result as the suite writes it."""
    times = summary([1e-6 * p50] * 3)
    about = {"shape": MAIN.text, "routing": "uniform", "operation": operation, "format": fmt, "tokens": tokens}
    return about | {"rounds": 8, "parts": parts} | times | floors(parts, CEILINGS) | other


def synthetic(overhead: float = 5.0, link: float = 0.8, memory: float = 0.5) -> list[dict]:
    """Cases that follow the model exactly."""
    cases = []
    fits = {
        model.key_of(name, fmt): model.Fit(overhead, link, memory) for name in model.LAUNCHES for fmt in ("bf16", "fp8")
    }
    for fmt, message in (("bf16", 14336), ("fp8", 7392)):
        for tokens in (1, 16, 128, 4096):
            for operation, launches in PARTS.items():
                parts = [[3 * tokens * message, (4 if tokens == 128 else 40) * tokens * message] for _ in launches]
                one = case(operation, fmt, tokens, 1.0, parts)
                time = model.predict(one, fits, CEILINGS)
                assert time is not None
                cases.append(case(operation, fmt, tokens, time, parts))
    return cases


def example_run() -> dict:
    machine = {"gpus": {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200"}, "devices": ["cuda:0", "cuda:1"]}
    machine |= {
        "links": [["X", "NV18"], ["NV18", "X"]],
        "driver": "580",
        "cuda": "13.0",
        "torch": "2.11",
        "python": "3",
    }
    machine |= {"date": "2026-11-21T00:00:00", "commit": "abc", "command": "python -m perf.suite"}
    pair = {"operation": "pair", "peer": "nccl_ag_rs", "format": "bf16", "error": 0.0}
    silu = {"format": "bf16", "rows": 64, "width": 2048, "p50_us": 4.0, "share": 0.5}
    ragged = silu | {"groups": 64, "p50_us": 6.0}
    return {
        "machine": machine,
        "ceilings": vars(CEILINGS),
        "cases": synthetic(),
        "orders": [
            case("dispatch", "bf16", 128, time, [[64, 128]], order=order)
            for order, time in (("expert_major", 30.0), ("rank_major", 20.0))
        ],
        "sweep": [case("dispatch", "bf16", 128, 30.0, [[1, 1]], sms=sms) for sms in (8, 132)],
        "sm_ceilings": [],
        "swiglu": [one | {"interleaved": kind} for one in (silu, ragged) for kind in (False, True)],
        "peers": [pair | {"tokens": 1, "p50_us": 50.5}, pair | {"tokens": 4096, "p50_us": 1.5}],
        "notes": ["deepep_normal: not present: no module deep_ep"],
        "quick": False,
        "mirror": [],
        "mirror_bias": [],
        "compiled": [],
    }


def with_gpus(run: dict, count: int, **machine_facts: str) -> dict:
    """The run with as many GPUs and ranks."""
    devices = [f"cuda:{number}" for number in range(count)]
    facts = {"gpus": dict.fromkeys(devices, "NVIDIA H200"), "devices": devices}
    return run | {"machine": run["machine"] | facts | machine_facts}
