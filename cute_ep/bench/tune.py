"""The search for launch shapes: one field of a table's entry after the other, each choice timed on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from cute_ep.api.config import EPConfig
from cute_ep.bench.measure import InputSets, measure
from cute_ep.bench.timing import Runner
from cute_ep.runtime.communicator import Communicator
from cute_ep.tuning.builtin import ONE_A_SM, built_in, segments_of
from cute_ep.tuning.launch_shape import MANY, Entry, Shape, Tuning, slices_for

GRIDS = (32, 64, ONE_A_SM, MANY)
SENDERS = {"dispatch": (0, 1 / 8, 1 / 4, 3 / 8, 1 / 2), "combine": (0, 1 / 2, 13 / 24, 2 / 3, 208 / 264)}
JOINING = (1 / 4, 1 / 2, 5 / 8, 7 / 8)
"""Shares of a dispatch's senders that receive when they have sent: the longer they send, the more of them."""
MOST_SENDERS = {"dispatch": (28, 44, 64), "combine": (MANY,)}
SAMPLES, FINAL_SAMPLES = 40, 120
MARGIN = 0.02
"""Part by which a shape must be faster than the built-in one to take its place."""


@dataclass(frozen=True)
class Outcome:
    """What `choose` has kept, and the medians of the built-in choice and of this one, measured one after the other."""

    entry: Entry
    default_us: float
    us: float


def choices(family: str, cfg: EPConfig, tokens: int) -> list[list[dict[str, Any]]]:
    """Changes of an Entry to try, one of each list. Slices are at most the segments of a row, rounded up."""
    segments = segments_of(family, cfg)
    slices = tuple(count for count in slices_for(tokens) if count == 1 or count < 2 * segments)
    dispatches = family == "dispatch"
    fields: dict[str, Sequence] = {
        "split_from": (Entry.split_from,),
        "packed": (False, True) if dispatches else (False,),
        "slices": slices,
        "most_senders": MOST_SENDERS[family],
    }
    tried = [[{name: value} for value in values] for name, values in fields.items()]
    apart = [{"senders": share, "joins": False} for share in SENDERS[family]]
    joining = [{"senders": share, "joins": True} for share in JOINING] if dispatches else []
    return [*tried, apart + joining, [{"grid": grid} for grid in GRIDS]]


def choose(
    default: Entry,
    changes: Iterable[Sequence[Mapping[str, Any]]],
    shape: Callable[[Entry], Shape],
    time: Callable[[Entry, int], float],
) -> Outcome:
    """Try one list of changes after the other, beginning with the default and going on from the fastest so far.

    Args:
        default: the built-in choice, kept unless another one is faster by more than MARGIN, twice.
        changes: as of `choices`, in the order in which they are tried.
        shape: what an entry comes to; a shape is timed once.
        time: microseconds of an entry, from so many samples.
    """
    best, times = default, {shape(default): time(default, SAMPLES)}
    for tried in changes:
        for entry in [replace(best, **change) for change in tried]:
            if shape(entry) not in times:
                times[shape(entry)] = time(entry, SAMPLES)
                if times[shape(entry)] < times[shape(best)]:
                    best = entry
    before, after = times[shape(default)], times[shape(best)]
    if after < (1 - MARGIN) * before:
        before, after = time(default, FINAL_SAMPLES), time(best, FINAL_SAMPLES)
        if after < (1 - MARGIN) * before:
            return Outcome(best, before, after)
    return Outcome(default, before, before)


def tune_size(
    communicators: Sequence[Communicator],
    sets: InputSets,
    family: str,
    lanes: Runner,
    operations: Sequence[str],
) -> Outcome:
    """`choose` for one number of tokens, beside the built-in tables, by the times of some of the family's operations on
    all ranks, which keep the launch shapes of the last try."""
    first = communicators[0]
    base = built_in(sets.cfg, first.max_ctas, ring_bytes=first.ring_bytes)

    def with_entry(entry: Entry) -> Tuning:
        return base.revised(family, {sets.tokens: entry})

    def shape(entry: Entry) -> Shape:
        shape = with_entry(entry).shape(family, sets.tokens, first.max_ctas, ring_bytes=first.ring_bytes)
        most = first.most_slices(sets.tokens) if family == "combine" else shape.slices
        return shape._replace(slices=min(shape.slices, most))

    def time(entry: Entry, samples: int) -> float:
        for communicator in communicators:
            communicator.tuning = with_entry(entry)
        cases = measure(communicators, sets, operations, samples, lanes)
        return geometric_mean(case["p50_us"] for case in cases)

    default = replace(base.entry(family, sets.tokens), tokens=sets.tokens)
    return choose(default, choices(family, sets.cfg, sets.tokens), shape, time)
