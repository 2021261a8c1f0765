"""Numbers of a run by what they are of: medians, pairs, and how far `perf.mirror` is off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from perf.cases import MAIN
from perf.peer_list import CHAINED
from perf.runs import commit_of, shares_gpus

Times: TypeAlias = dict[tuple[int, str], float]
"""(tokens of a rank, format) -> microseconds."""
TIE = 0.01
"""A smaller share is no difference."""


def faster(theirs: float, ours: float) -> bool:
    """Whether another library's time is less by TIE or more."""
    return theirs <= (1 - TIE) * ours


def by_point(cases: Iterable[dict]) -> dict[tuple[str, str, int, str], dict[str, dict]]:
    """(shape, routing, tokens, format) -> operation -> case, in the order of first appearance."""
    found: dict[tuple[str, str, int, str], dict[str, dict]] = {}
    for case in cases:
        key = (case["shape"], case["routing"], case["tokens"], case["format"])
        found.setdefault(key, {})[case["operation"]] = case
    return found


def ratio(case: dict) -> float:
    """Median over the floor."""
    return case["p50_us"] / case["floor_us"]


def medians(run: dict, operation: str, of: str = "p50_us") -> Times:
    """What there is `of` an operation of the main shape, uniform routing."""
    return {
        (case["tokens"], case["format"]): case[of]
        for case in run["cases"]
        if (case["shape"], case["routing"], case["operation"]) == (MAIN.text, "uniform", operation) and of in case
    }


def ranked_pairs(run: dict) -> Times:
    """A partial pair of rows by source rank, as other libraries have them."""
    return {
        (one["tokens"], one["format"]): one["p50_us"]
        for one in run["orders"]
        if (one["order"], one["operation"]) == ("rank_major", "pair")
    }


def budget_times(run: dict, operation: str, sms: int) -> tuple[int, Times]:
    """The least number of SMs, at least `sms`, on which a run has measured itself, and its times of an operation."""
    budget = min((case["sms"] for case in run["sweep"] if case["sms"] >= sms), default=sms)
    cases = (case for case in run["sweep"] if (case["sms"], case["operation"]) == (budget, operation))
    return budget, {(case["tokens"], case["format"]): case["p50_us"] for case in cases}


def queued(rows: Iterable[dict]) -> list[dict]:
    """Pairs without a graph whose host time is known: what takes longer counts, the GPUs or the host that queues."""
    known = (row for row in rows if row["operation"] == CHAINED and "host_us" in row)
    return [row | {"p50_us": max(row["p50_us"], row["host_us"])} for row in known]


def exact_pairs(run: dict) -> Times:
    """`medians` of dispatch and exact combine: measured as pairs, or else the sums of two that were measured alone."""
    dispatch, combine = medians(run, "dispatch"), medians(run, "combine_exact")
    sums = {key: dispatch[key] + time for key, time in combine.items() if key in dispatch}
    return sums | medians(run, "pair_exact")


def swiglu_key(row: dict) -> tuple:
    """What a SwiGLU time is of: rows, width, format, groups, and whether gate and up are interleaved."""
    return row["rows"], row["width"], row["format"], row.get("groups", 1), row["interleaved"]


def mirror_bias(run: dict, runs: Iterable[dict]) -> list[dict]:
    """What GPUs of their own took over what a mirror took, with the same kernels on the same kind of GPU: "ratio" for
    each "operation", "format" and "tokens", with the "commit" and "date" that they are of.

    They come from two of `runs`, or this one and one of `runs`, of its own commit if there are any, or else from when
    `run` was kept. [] where nothing is known, and for a run without a mirror.
    """
    every = list(runs)
    for mirrored in [run, *every] if run["mirror"] else ():
        for real in every:
            if not _compare(run, mirrored, real):
                continue
            about = {"commit": commit_of(real), "date": real["machine"]["date"]}
            found = []
            for case in mirrored["mirror"]:
                time = medians(real, case["operation"]).get((case["tokens"], case["format"]))
                if time is not None:
                    own = {key: case[key] for key in ("operation", "format", "tokens")}
                    found.append(own | {"ratio": time / case["p50_us"]} | about)
            return found
    return run.get("mirror_bias", [])


def _compare(run: dict, mirrored: dict, real: dict) -> bool:
    """Whether `mirrored` and `real` say how far the mirror of `run` is off."""
    ranks = {one["mirror"][0]["ranks"] for one in (run, mirrored) if one["mirror"]}
    gpus = {name for one in (run, mirrored, real) for name in one["machine"]["gpus"].values()}
    return (
        bool(mirrored["mirror"])
        and ranks == {len(real["machine"]["gpus"])}
        and commit_of(mirrored) == commit_of(real)
        and not shares_gpus(real)
        and len(gpus) == 1
    )
