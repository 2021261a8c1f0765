"""The README's first numbers: pairs as users call them, beside the fastest other library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple, TypeAlias

from perf.cases import MAIN
from perf.cells import markdown, time_cell
from perf.peer_list import CHAINED, NORMAL_SMS, PEERS, family_of
from perf.values import Times, budget_times, exact_pairs, faster, medians, queued, ranked_pairs

TOKENS = (1, 128, 1024, 4096)
FORMAT = "bf16"
Found: TypeAlias = Mapping[int, tuple[float, str]]
"""Tokens of a rank -> microseconds of a pair, and of which library."""


class Condition(NamedTuple):
    """How pairs are called.

    Attributes:
        ours: columns with times of the default mode, by name.
        theirs: of the fastest library.
        note: what else to know.
    """

    ours: Mapping[str, Times]
    theirs: Found
    note: str


def headline(run: dict) -> str:
    """A table of pairs, and how mode `exact` stands to the same libraries; "" without pairs or peers."""
    measured = [one._replace(ours={name: own for name, own in one.ours.items() if own}) for one in conditions(run)]
    shown = [one for one in measured if one.ours]
    if not shown or not run["peers"]:
        return ""
    rows = []
    for tokens in TOKENS:
        cells = [
            [*(time_cell(own.get((tokens, FORMAT))) for own in one.ours.values()), _their_cell(one.theirs.get(tokens))]
            for one in shown
        ]
        rows.append((str(tokens), *chain(*cells)))
    head = ("tokens per rank", *chain(*([*one.ours, "fastest other"] for one in shown)))
    gpus = list(run["machine"]["gpus"].values())
    notes = [one.note for one in shown if one.note]
    parts = [
        f"A dispatch and a combine on {len(gpus)} x {gpus[0]}, in us: BF16 tokens of {MAIN.hidden} elements, "
        f"{MAIN.num_experts} experts, top-{MAIN.top_k}, the default mode, each beside the fastest other library of the "
        "same run.",
        markdown(head, [row for row in rows if any(row[1:])]).strip(),
        " ".join(filter(None, (*notes, _exact_text(run), "[Speed](#speed) has the conditions."))),
    ]
    return "\n\n".join(parts)


def conditions(run: dict) -> list[Condition]:
    """On the SMs that a layer may leave beside its matmuls, on all of them, and without a graph."""
    _, dispatch = budget_times(run, "dispatch", NORMAL_SMS)
    sms, combine = budget_times(run, "combine_partial", NORMAL_SMS)
    few = {key: dispatch[key] + time for key, time in combine.items() if key in dispatch}
    limited = [row for row in run["peers"] if PEERS[row["peer"]].sms == NORMAL_SMS]
    unqueued, ranked = medians({"cases": queued(run["cases"])}, CHAINED), ranked_pairs(run)
    alone = (
        "On few SMs a dispatch and a combine were timed alone and added; others are those that take a number of SMs, "
        "so not DeepEP V2, whose epilogues take all."
    )
    order = "Others leave rows by source rank, as `rank_major` does; by default a grouped matmul can take ours."
    longer = "Without a graph the longer of the GPUs' and the host's time counts."
    return [
        Condition({f"{sms} SMs": few}, _fastest(_sums(limited)), alone),
        Condition(
            {"all SMs": medians(run, "pair"), "`rank_major`": ranked},
            _fastest(_of(run["peers"], "pair")),
            order if ranked else "",
        ),
        Condition({"no graph": unqueued}, _fastest(queued(run["peers"])), longer),
    ]


def _exact_text(run: dict) -> str:
    """Whether pairs in mode `exact` lose to a library with most tokens."""
    exact, theirs = exact_pairs(run), _fastest(_of(run["peers"], "pair"))
    most = max((tokens for tokens in TOKENS if (tokens, FORMAT) in exact), default=0)
    if not most:
        return ""
    text = "Mode `exact`, for sums that do not depend on where experts are, takes "
    text += f"{exact[most, FORMAT]:.0f} us with {most} tokens on all SMs"
    if most in theirs and faster(theirs[most][0], exact[most, FORMAT]):
        text += f", so it loses to {theirs[most][1]}"
    return f"{text}."


def _their_cell(found: tuple[float, str] | None) -> str:
    return "" if found is None else f"{time_cell(found[0])} ({found[1]})"


def _of(rows: Iterable[dict], operation: str) -> list[dict]:
    return [row for row in rows if row["operation"] == operation]


def _sums(rows: Iterable[dict]) -> list[dict]:
    """A row of each dispatch and combine of the same peer and tokens."""
    every = list(rows)
    combines = {(row["peer"], row["format"], row["tokens"]): row["p50_us"] for row in _of(every, "combine")}
    pairs = ((row, combines.get((row["peer"], row["format"], row["tokens"]))) for row in _of(every, "dispatch"))
    return [row | {"p50_us": row["p50_us"] + other} for row, other in pairs if other is not None]


def _fastest(rows: Iterable[dict]) -> Found:
    found: dict[int, tuple[float, str]] = {}
    for row in rows:
        time, tokens = row["p50_us"], row["tokens"]
        if row["format"] == FORMAT and (tokens not in found or time < found[tokens][0]):
            found[tokens] = time, family_of(row["peer"])
    return found
