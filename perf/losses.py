"""Where a run loses: to another library, and against its own floors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from perf.cases import MAIN
from perf.peer_list import CHAINED, PEERS
from perf.peer_tables import fastest_ways, name_of
from perf.values import (
    budget_times,
    by_point,
    exact_pairs,
    faster,
    medians,
    queued,
    ranked_pairs,
    ratio,
    swiglu_key,
)

WORST = 1
"""Operations farthest from their floor that the text names."""
BYTES_TOKENS = 128
"""From this many tokens on a ratio to the floor says something about bytes; below, about latency."""
CHANGES = {
    "partial pair, no graph": "less of each call in Python",
    "partial pair": "order `rank_major`, which writes each row once, as theirs",
    "rank-major pair": "fewer instructions and flags a token",
    "exact pair": "mode `partial`, for every expert's row crosses the link",
    "dispatch": "order `rank_major`, which writes each row once, as theirs",
    "combine": "fewer instructions a row",
    "SwiGLU": "unknown",
}
"""What would change a loss as far as analysis says, not shown; by how the name of its case begins."""
LATENCY = "a launch without counts and tables"
"""What would change pairs of fewer than BYTES_TOKENS tokens."""


def change_of(case: str, sizes: Iterable[int]) -> str:
    """What would make a case faster that is lost at some sizes."""
    text = next(text for start, text in CHANGES.items() if case.startswith(start))
    if case != PARTIAL:
        return text
    every = list(sizes)
    few, many = min(every) < BYTES_TOKENS, max(every) >= BYTES_TOKENS
    return " and ".join([LATENCY] * few + [text] * many)


@dataclass(frozen=True)
class Loss:
    """An operation in which another library is faster.

    Attributes:
        case: which one.
        other: the library and its format.
        points: (tokens per rank, its microseconds, ours) wherever it is faster.
    """

    case: str
    other: str
    points: tuple[tuple[int, float, float], ...]


PARTIAL, EXACT = "partial pair", "exact pair"
RANKED = "rank-major pair"
"""A partial one, of rows as other libraries have them."""
UNQUEUED = "partial pair, no graph, longer of GPU and host time"


def lost_to(case: str, rows: Iterable[dict], operation: str, own: Mapping[tuple[int, str], float]) -> Iterator[Loss]:
    """What is lost of an operation: wherever a library's takes less than `own`, to the fastest of its peers, by peer
    and format."""
    fastest: dict[tuple, dict] = {}
    for row in fastest_ways(row for row in rows if row["operation"] == operation):
        ours = own.get((row["tokens"], row["format"]))
        key = PEERS[row["peer"]].library, row["format"], row["tokens"]
        if ours is not None and faster(row["p50_us"], ours):
            fastest[key] = min(row, fastest.get(key, row), key=lambda one: one["p50_us"])
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in fastest.values():
        point = row["tokens"], row["p50_us"], own[row["tokens"], row["format"]]
        name = f"{name_of(row)} ({row['way']})" if row["way"] else name_of(row)
        found.setdefault(name, []).append(point)
    yield from (Loss(case, name, tuple(sorted(points))) for name, points in found.items())


def losses(run: dict) -> Iterator[Loss]:
    """Where another library is faster: pairs with either combine and without a graph, operations on at least as many
    SMs as it takes, SwiGLU."""
    yield from lost_to(PARTIAL, run["peers"], "pair", medians(run, "pair"))
    yield from lost_to(RANKED, run["peers"], "pair", ranked_pairs(run))
    yield from lost_to(EXACT, run["peers"], "pair", exact_pairs(run))
    own = medians({"cases": queued(run["cases"])}, CHAINED)
    yield from lost_to(UNQUEUED, queued(run["peers"]), CHAINED, own)
    for sms in sorted({peer.sms for peer in PEERS.values() if peer.sms is not None}):
        theirs = [row for row in run["peers"] if PEERS[row["peer"]].sms == sms]
        for operation, ours in (("dispatch", "dispatch"), ("combine", "combine_partial")):
            budget, own = budget_times(run, ours, sms)
            yield from lost_to(f"{ours.replace('_', ' ')}, {sms} SMs (ours {budget})", theirs, operation, own)
    own = {swiglu_key(row): row["p50_us"] for row in run["swiglu"]}
    taken = " of another run" if {"swiglu", "compiled"} & set(run.get("taken_from", ())) else ""
    for row in run["compiled"]:
        ours = own.get(swiglu_key(row))
        if ours is not None and faster(row["p50_us"], ours):
            about = f"SwiGLU, rows of {row['width']}, {'interleaved' if row['interleaved'] else 'plain'}"
            other = f"torch.compile {row['format']}{taken}"
            yield Loss(about, other, ((row["rows"], row["p50_us"], ours),))


def farthest_text(run: dict, routing: str) -> str:
    """Which operations are farthest from their floors."""
    far = sorted(
        (ratio(case), tokens, fmt, name)
        for (shape, chosen, tokens, fmt), every in by_point(run["cases"]).items()
        for name, case in every.items()
        if (shape, chosen) == (MAIN.text, routing) and tokens >= BYTES_TOKENS and not name.startswith("pair")
    )
    worst = (f"{name.replace('_', ' ')} {fmt} {tokens}: {times:.2f}" for times, tokens, fmt, name in far[-WORST:])
    return ", ".join(reversed(list(worst)))
