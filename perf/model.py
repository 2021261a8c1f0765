"""Predicts a time from ceilings and bytes, and says how far off it is.

    t = launch + flag + overhead + max(link bytes / (push * link share), memory bytes / (copy * memory share))

for each launch of a round. Launch, flag, push and copy are the ceilings of the run that a case is from. Overhead (the
chain of waits and tables that no byte explains) and the two shares are fitted: one triple for each format of dispatch,
one for each mode of combine, by least squares of relative errors over the main shape with uniform routing, for all
given runs together. Ranks that share a GPU are another machine: their runs are fitted by themselves. A pair is the sum
of its two launches; its errors, those of other shapes and of Zipf routing test the model and are not fitted.

python -m perf.model [RUN ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul
from pathlib import Path
from statistics import mean

import torch

from cute_ep.bench.ceilings import Ceilings, latency_us, work_us
from cute_ep.bench.measure import CHAINED, CONDITIONS, PARTS
from cute_ep.bench.traffic import LAUNCHES, count_routing, traffic
from cute_ep.testing.workloads import ROUTINGS
from perf.cases import MAIN
from perf.cells import markdown
from perf.runs import RUN_HELP, commit_of, read_kept, read_run, shares_gpus

GOOD = 0.15
"""An error up to which a case counts as explained."""
NOMINAL = {"H100": (450e9, 3.35e12), "H200": (450e9, 4.8e12), "B200": (900e9, 8e12)}
"""By a word of the GPU's name: bytes per second of its NVLinks one way and of its memory."""
ELSEWHERE = (("8 x H200", "H200", 8), ("NVL72 (Blackwell), 8 ranks", "B200", 8), ("NVL72, 32 ranks", "B200", 32))
"""Machines to predict for; 32 ranks is the most that the package serves."""
PREDICTED_TOKENS = (1, 128, 4096)
PREDICTED = (("dispatch", "bf16"), ("dispatch", "nvfp4"), ("combine_partial", "bf16"))


@dataclass(frozen=True)
class Fit:
    """Constants of one operation: microseconds, and the shares of the two ceilings that it reaches."""

    overhead_us: float
    link: float
    memory: float


Key = tuple[str, str | None]
"""Operation and, for dispatch, the format."""


def key_of(operation: str, fmt: str) -> Key:
    """Under which key the constants of an operation are."""
    return operation, fmt if operation == "dispatch" else None


Point = tuple[float, float, float, float]
"""Microseconds at the link ceiling and at the memory ceiling, measured without launch and flag, measured."""


def fit_constants(points: Sequence[Point]) -> Fit:
    """The triple with the least squares of relative errors: shares in steps of 0.01 up to 1, overhead >= 0 exactly.

    Points that do not tell the shares apart leave the one that does not matter at the largest value that fits.
    """
    weights = [point[3] ** -2 for point in points]
    total = sum(weights)
    best = (float("inf"), Fit(0.0, 1.0, 1.0))
    for step, reach in ((0.05, 20), (0.01, 5)):
        centre = best[1]
        for link in _around(centre.link, step, reach):
            for memory in _around(centre.memory, step, reach):
                gaps = [point[2] - max(point[0] / link, point[1] / memory) for point in points]
                overhead = max(0.0, sum(map(mul, weights, gaps)) / total)
                squares = sum(weight * (gap - overhead) ** 2 for weight, gap in zip(weights, gaps, strict=True))
                if squares < best[0] * (1 - 1e-9):
                    best = squares, Fit(overhead, link, memory)
    return best[1]


def _around(centre: float, step: float, reach: int) -> list[float]:
    """Shares near one, in (0, 1], largest first."""
    shares = [round(centre + index * step, 2) for index in range(reach, -reach - 1, -1)]
    return [share for share in shares if 0 < share <= 1]


def fit_model(runs: Sequence[dict]) -> dict[Key, Fit]:
    """The constants of every operation among the cases of the main shape with uniform routing."""
    points: dict[Key, list[Point]] = {}
    for run in runs:
        ceilings = Ceilings(**run["ceilings"])
        for case in run["cases"]:
            if is_fitted(case):
                link, memory = work_us(case["parts"][0], ceilings)
                point = link, memory, case["p50_us"] - latency_us(ceilings), case["p50_us"]
                points.setdefault(key_of(case["operation"], case["format"]), []).append(point)
    return {key: fit_constants(own) for key, own in points.items()}


def fit_for(run: dict, runs: Iterable[dict]) -> dict[Key, Fit]:
    """The constants that hold for `run`, from all of `runs` that are of its kind and commit."""
    kind = shares_gpus(run), commit_of(run)
    return fit_model([one for one in runs if (shares_gpus(one), commit_of(one)) == kind])


def predict(case: dict, fits: dict[Key, Fit], ceilings: Ceilings) -> float | None:
    """Microseconds of a round; None when an operation of it was not fitted."""
    total = 0.0
    for operation, part in zip(PARTS[case["operation"]], case["parts"], strict=True):
        fit = fits.get(key_of(operation, case["format"]))
        if fit is None:
            return None
        link, memory = work_us(part, ceilings)
        total += latency_us(ceilings) + fit.overhead_us + max(link / fit.link, memory / fit.memory)
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


@cache
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
    """Overheads and shares."""
    rows = [
        (operation.replace("_", " "), fmt or "any", f"{fit.overhead_us:.1f}", f"{fit.link:.2f}", f"{fit.memory:.2f}")
        for (operation, fmt), fit in fits.items()
    ]
    return markdown(("operation", "format", "overhead (us)", "share of links", "share of memory"), rows)


def is_fitted(case: dict) -> bool:
    """Whether the constants come from cases like this one; all others test the model."""
    return (case["shape"], case["routing"]) == (MAIN.text, "uniform") and case["operation"] in LAUNCHES


def errors(run: dict, fits: dict[Key, Fit]) -> Iterator[tuple[dict, float]]:
    """(case, how far off the model is) of the cases that it knows something of: pairs without a graph (CHAINED) and
    those of CONDITIONS are left out."""
    ceilings = Ceilings(**run["ceilings"])
    for case in run["cases"]:
        predicted = predict(case, fits, ceilings)
        if predicted is not None and case["operation"] not in (CHAINED, *CONDITIONS):
            yield case, abs(predicted / case["p50_us"] - 1)


def summary_table(run: dict, fits: dict[Key, Fit]) -> str:
    """How far off the model is, by shape and routing, for cases that it was fitted to and for those that it was not."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for case, error in errors(run, fits):
        where = case["shape"], case["routing"], "fitted" if is_fitted(case) else "not fitted"
        found.setdefault(where, []).append(error)
    rows = [
        (*where, str(len(own)), str(sum(error <= GOOD for error in own)), f"{mean(own):.0%}", f"{max(own):.0%}")
        for where, own in found.items()
    ]
    return markdown(("shape", "routing", "constants", "cases", f"within {GOOD:.0%}", "mean error", "largest"), rows)


def summary_text(runs: Iterable[tuple[dict, dict[Key, Fit]]]) -> str:
    """How well runs are explained, each with its constants: the cases that those are not fitted to, in a sentence; ""
    without any."""
    found = [error for run, fits in runs for case, error in errors(run, fits) if not is_fitted(case)]
    if not found:
        return ""
    near = sum(error <= GOOD for error in found)
    return (
        f"`python -m perf.model` is within {GOOD:.0%} for {near} of {len(found)} cases of these runs, without those "
        f"that its constants are fitted to; the mean error is {mean(found):.0%}, the largest {max(found):.0%}."
    )


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
    """Predictions of PREDICTED_TOKENS for machines that were not measured, of the operations that were fitted; "" when
    this one's nominal rates are not known."""
    rows, known = [], [one for one in PREDICTED if key_of(*one) in fits]
    for name, there, ranks in ELSEWHERE:
        scaled = ceilings_elsewhere(ceilings, gpu, there)
        if scaled is None:
            return ""
        for tokens in PREDICTED_TOKENS:
            cases = (expected_case(operation, fmt, ranks, tokens) for operation, fmt in known)
            rows.append((name, str(tokens), *(f"{predict(case, fits, scaled):.0f}" for case in cases)))
    return markdown(("machine", "tokens", *(f"{name.replace('_', ' ')} {fmt}" for name, fmt in known)), rows)


def predictions_text(runs: Mapping[str, dict], fits: Mapping[str, dict]) -> str:
    """What the model says of machines that were not measured, by the run on most GPUs; "" where ranks share them, or
    have no known rates. On two GPUs bytes over links and in memory are in proportion, so that unlike shares explain the
    times equally well."""
    name = max(runs, key=lambda one: len(runs[one]["machine"]["gpus"]))
    if shares_gpus(runs[name]):
        return ""
    gpus = runs[name]["machine"]["gpus"]
    table = elsewhere_table(fits[name], Ceilings(**runs[name]["ceilings"]), next(iter(gpus.values())))
    words = f"Predicted, not measured, with the overheads, flags and arithmetic of {name}, in us:"
    return f"{words}\n\n{table}" if table else ""


def page(run: dict, runs: Sequence[dict]) -> str:
    """Constants from all runs of the kind and commit; errors of one run."""
    fits, cases, ceilings = fit_for(run, runs), run["cases"], Ceilings(**run["ceilings"])
    return "\n".join((constants_table(fits), summary_table(run, fits), errors_table(cases, fits, ceilings)))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"{RUN_HELP} (default: all that are kept)")
    runs = {str(path): read_run(path) for path in parser.parse_args().runs} or read_kept()
    every = list(runs.values())
    for name, run in runs.items():
        print(f"{name}\n\n{page(run, every)}")  # noqa: T201
    print(predictions_text(runs, {name: fit_for(run, every) for name, run in runs.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
