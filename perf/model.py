"""Predicts a time from ceilings and bytes, and says how far off it is.

    t = launch + flag + overhead + max(link bytes / push, memory bytes / copy) / efficiency

for each launch of a round. Launch, flag, push and copy are the run's ceilings. Overhead (the chain of waits and tables
that no byte explains) and efficiency are fitted: one pair for each format of dispatch, one for each mode of combine,
by least squares of relative errors over the main shape with uniform routing. A pair is the sum of its two launches;
its errors, those of other shapes and of Zipf routing test the model and are not fitted.

python -m perf.model perf/results/<run>...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_ep.ceilings import Ceilings
from cute_ep.traffic import count_routing, traffic
from cute_ep.workloads import ROUTINGS
from perf.cases import MAIN
from perf.tables import markdown

FITTED = ("dispatch", "combine_exact", "combine_partial")
NOMINAL = {"H100": (450e9, 3.35e12), "H200": (450e9, 4.8e12), "B200": (900e9, 8e12)}
"""By a word of the GPU's name: bytes per second of its NVLinks one way and of its memory."""
ELSEWHERE = (("8 x H200", "H200", 8), ("NVL72 (Blackwell), 8 ranks", "B200", 8), ("NVL72, 32 ranks", "B200", 32))
"""Machines to predict for; 32 ranks is the most that the package serves."""
PREDICTED_TOKENS = (1, 128, 4096)
PREDICTED = (("dispatch", "bf16"), ("dispatch", "nvfp4"), ("combine_partial", "bf16"))


@dataclass(frozen=True)
class Fit:
    """Constants of one operation: microseconds, and the share of the ceiling that is reached."""

    overhead_us: float
    efficiency: float


Key = tuple[str, str | None]
"""Operation and, for dispatch, the format."""


def key_of(operation: str, fmt: str) -> Key:
    """Under which key the constants of an operation are."""
    return operation, fmt if operation == "dispatch" else None


def work_us(part: Sequence[int], ceilings: Ceilings) -> float:
    """Microseconds that the bytes of one launch take at the ceilings."""
    return 1e6 * max(part[0] / ceilings.push, part[1] / ceilings.memory)


def latency_us(ceilings: Ceilings) -> float:
    """Launch and flag of one launch."""
    return 1e6 * (ceilings.launch + ceilings.flag)


def fit_line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> Fit:
    """y = overhead + x / efficiency by weighted least squares, with overhead >= 0."""
    total = sum(weights)
    sums = [
        sum(w * value for w, value in zip(weights, values, strict=True))
        for values in (
            [x for x, _ in points],
            [y for _, y in points],
            [x * x for x, _ in points],
            [x * y for x, y in points],
        )
    ]
    by_x, by_y, by_xx, by_xy = sums
    spread = total * by_xx - by_x * by_x
    slope = (total * by_xy - by_x * by_y) / spread if spread > 1e-12 * total * by_xx else 1.0
    overhead = (by_y - slope * by_x) / total
    if overhead < 0 and by_xx:
        overhead, slope = 0.0, by_xy / by_xx
    return Fit(max(0.0, overhead), 1 / slope if slope > 0 else float("inf"))


def fit_model(cases: Iterable[dict], ceilings: Ceilings) -> dict[Key, Fit]:
    """The constants of every operation among the cases of the main shape with uniform routing."""
    points: dict[Key, list[tuple[float, float]]] = {}
    weights: dict[Key, list[float]] = {}
    for case in cases:
        if (case["shape"], case["routing"]) != (MAIN.text, "uniform") or case["operation"] not in FITTED:
            continue
        key = key_of(case["operation"], case["format"])
        work = work_us(case["parts"][0], ceilings)
        points.setdefault(key, []).append((work, case["p50_us"] - latency_us(ceilings)))
        weights.setdefault(key, []).append(case["p50_us"] ** -2)
    return {key: fit_line(points[key], weights[key]) for key in points}


def operations_of(case: dict) -> tuple[str, ...]:
    """The launches of a case's round, as FITTED names them."""
    return ("dispatch", "combine_partial") if case["operation"].startswith("pair") else (case["operation"],)


def predict(case: dict, fits: dict[Key, Fit], ceilings: Ceilings) -> float | None:
    """Microseconds of a round; None when an operation of it was not fitted."""
    total = 0.0
    for operation, part in zip(operations_of(case), case["parts"], strict=True):
        fit = fits.get(key_of(operation, case["format"]))
        if fit is None:
            return None
        total += latency_us(ceilings) + fit.overhead_us + work_us(part, ceilings) / fit.efficiency
    return total


def ceilings_elsewhere(ceilings: Ceilings, here: str, there: str) -> Ceilings | None:
    """The measured ceilings in proportion to the nominal rates of another GPU; None for a GPU without known rates."""
    known = next((name for name in NOMINAL if name in here), None)
    if known is None:
        return None
    link, memory = (NOMINAL[there][index] / NOMINAL[known][index] for index in range(2))
    return Ceilings(
        ceilings.ring * link,
        ceilings.all_to_all * link,
        ceilings.copy_engine * link,
        ceilings.memory_sm * memory,
        ceilings.memory_engine * memory,
        ceilings.flag,
        ceilings.launch,
    )


def expected_case(operation: str, fmt: str, ranks: int, tokens: int) -> dict:
    """A case of the main shape that was not measured: its bytes, by one draw of uniform routing."""
    cfg = MAIN.config(fmt, ranks, tokens)
    generator = torch.Generator().manual_seed(ranks)
    counts = count_routing(cfg, [ROUTINGS["uniform"](cfg, tokens, generator) for _ in range(ranks)])
    moved = traffic(cfg, counts, operation)
    devices = [f"cuda:{rank}" for rank in range(ranks)]
    part = [moved.busiest_link(devices), moved.busiest_memory(devices)]
    return {"operation": operation, "format": fmt, "tokens": tokens, "parts": [part]}


def constants_table(fits: dict[Key, Fit]) -> str:
    """Overheads and efficiencies."""
    rows = [
        (operation.replace("_", " "), fmt or "any", f"{fit.overhead_us:.1f}", f"{fit.efficiency:.2f}")
        for (operation, fmt), fit in fits.items()
    ]
    return markdown(("operation", "format", "overhead (us)", "efficiency"), rows)


def errors_table(cases: Iterable[dict], fits: dict[Key, Fit], ceilings: Ceilings) -> str:
    """Measured and predicted times of every case."""
    rows = []
    for case in cases:
        predicted = predict(case, fits, ceilings)
        if predicted is None:
            continue
        where = (case["shape"], case["routing"], case["format"], str(case["tokens"]))
        error = predicted / case["p50_us"] - 1
        name = case["operation"].replace("_", " ")
        rows.append((*where, name, f"{case['p50_us']:.1f}", f"{predicted:.1f}", f"{error:+.0%}"))
    return markdown(("shape", "routing", "format", "tokens", "operation", "measured", "model", "error"), rows)


def elsewhere_table(fits: dict[Key, Fit], ceilings: Ceilings, gpu: str) -> str:
    """Predictions for machines that were not measured, "" when this one's nominal rates are not known."""
    rows = []
    for name, there, ranks in ELSEWHERE:
        scaled = ceilings_elsewhere(ceilings, gpu, there)
        for operation, fmt in PREDICTED if scaled else ():
            times = [predict(expected_case(operation, fmt, ranks, count), fits, scaled) for count in PREDICTED_TOKENS]
            if None not in times:
                rows.append((name, operation.replace("_", " "), fmt, *(f"{time:.0f}" for time in times)))
    return markdown(("machine", "operation", "format", *(f"{tokens} tokens" for tokens in PREDICTED_TOKENS)), rows)


def page(run: dict) -> str:
    """Constants, errors and predictions of one run."""
    ceilings = Ceilings(**run["ceilings"])
    fits = fit_model(run["cases"], ceilings)
    gpu = next(iter(run["machine"]["gpus"].values()))
    return "\n".join(
        filter(
            None,
            (constants_table(fits), elsewhere_table(fits, ceilings, gpu), errors_table(run["cases"], fits, ceilings)),
        )
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders with a run.json")
    for folder in parser.parse_args().folders:
        run = json.loads((folder / "run.json").read_text())
        print(f"{folder}\n\n{page(run)}")  # noqa: T201


if __name__ == "__main__":
    main()
