"""How a span of combine is dealt out to warps: device code, run on the CPU."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Boolean, Int32, Uint32, cute

from cute_ep.kernels.combine.piped_schedule import PipelineSchedule
from cute_ep.kernels.combine.schedule import span_of
from cute_ep.kernels.device.divide import Divisor
from cute_ep.kernels.device.slices import SEGMENT, item_of, segments_of, static_first
from cute_ep.layouts.maps.arena import CHUNK, MAX_SLICES
from cute_ep.layouts.maps.launch import PIPELINES, WARPS, WIDE_THREADS, WIDE_WARPS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_TOP_K

from .host import host_mul_hi, run_map


@pytest.mark.parametrize("warps", sorted({WARPS, WIDE_WARPS, CHUNK, 2 * CHUNK, 4 * CHUNK}))
def test_spans_have_every_segment_of_every_token_once(warps: int) -> None:
    """And spans beyond the last one have no tokens. Those of pipelines are some chunks."""
    cases = list(product(range(MAX_SLICES.bit_length()), (0, 1, 15, 33, 64), (1, 40, 28 * SEGMENT, 8192)))
    counts = [-(-(tokens << log2) // warps) + 3 for log2, tokens, _ in cases]
    given = [(number, *case) for case, count in zip(cases, counts, strict=True) for number in range(count)]

    def fields(number, log2, tokens, vectors):
        span = span_of(Int32(0), number, tokens, log2, vectors, Int32(warps))
        return tuple(map(Int32, (span.index, span.token, span.tokens, span.first, span.last)))

    spans = np.stack(run_map(fields, *np.array(given, np.int32).T, outputs=5)).view(np.int32).T
    for (_, tokens, vectors), own in zip(cases, np.split(spans, np.cumsum(counts)[:-1]), strict=True):
        assert (own[:, 0] == np.arange(len(own)) * warps).all() and not own[-3:, 2].any()
        taken = np.zeros((tokens, segments_of(vectors)), np.int32)
        for _, token, covered, first, last in own.tolist():
            assert 0 <= covered <= warps
            taken[token : token + covered, first:last] += int(covered > 0)
        assert (taken == 1).all(), (tokens, vectors)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("ctas", [1, 2, 5, 24])
def test_pipelines_have_every_span_once(ctas: int, ranks: int, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One each, of which one may have none; then those of tickets, which pipelines share that start with the same
    source. Where they add up, every ranks-th does not begin with spans."""
    monkeypatch.setattr(cute.arch, "mul_hi", host_mul_hi)
    pipelines, sources = ctas * PIPELINES, ranks - adds
    schedule = PipelineSchedule(Region("", 0, 8, (1,), (1,)), RegionMap(16), True, lambda ctx: Boolean(adds))
    ctx = SimpleNamespace(ranks=Int32(ranks), by_ranks=Divisor(Int32(ranks), Uint32(-(-(2**32) // ranks) % 2**32)))

    def places(pipeline):
        sender = schedule.sender(ctx, pipeline, Int32(pipelines))
        return Int32(sender.begins), sender.number, sender.senders, sender.start

    sends, sender, all_senders, start = (
        one.view(np.int32) for one in run_map(places, np.arange(pipelines, dtype=np.int32), outputs=4)
    )
    assert (sends == [not adds or number % ranks != ranks - 1 for number in range(pipelines)]).all()
    senders, starts = int(sends.sum()), set(start[sends != 0].tolist())
    assert (all_senders == senders).all()
    others = np.bincount(start[sends == 0], minlength=1) if sources else np.zeros(1)
    assert len(others) <= max(1, len(starts)) and others.max() - others.min() <= 1, "others may draw of each counter"
    sender, start = sender[sends != 0], start[sends != 0]
    assert (sender == np.arange(senders)).all() and (not sources or (start == sender % sources).all())
    for spans in (0, 1, senders - 1, senders, senders + 1, 3 * senders + 2) if senders else ():

        def first(number, spans=spans):
            return Int32(static_first(Int32(spans), number, Int32(senders), Int32(0), warps=1))

        def drawn(ticket, start):
            return Int32(item_of(Int32(senders), ticket, Int32(min(sources, senders)), start))

        (own,) = run_map(first, sender)
        tickets = np.array(list(product(range(spans), sorted(starts))), np.int32)
        more = run_map(drawn, *tickets.T)[0].view(np.int32).tolist() if spans else []
        found = [item for item in [*own.view(np.int32).tolist(), *more] if item < spans]
        assert sorted(found) == list(range(spans)), spans


def test_entries_of_a_span_are_a_word_a_thread() -> None:
    """The most tokens of a span, one a warp, have at most as many entries as the warps have threads; and a stage has a
    word for each thread, which writes a zero where the span has no entry."""
    assert MAX_TOP_K <= 32
    assert WIDE_THREADS <= WIDE_WARPS * MAX_TOP_K
