"""DeepEP's normal mode on CPU ranks: rows, entries and sums against loops over tokens, and as DeepEP's tests check."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api import carving
from cute_ep.api.config import EPConfig
from cute_ep.integrations.deep_ep import Buffer, Config, EventOverlap, layout, topk_idx_t
from cute_ep.integrations.deep_ep.layout import GivenLayout
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .groups import calc_diff, entries, on_buffers, wide_ids

HIDDEN, EXPERTS, SLOTS = 256, 12, 3
TOKENS = {2: (9, 5), 3: (9, 0, 7), 4: (9, 0, 7, 3)}
NODES = pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (3, None), (3, 1), (4, 2)])
RANKS = pytest.mark.parametrize("ranks", [2, 3])

Patch = pytest.MonkeyPatch


def inputs(ranks: int, routing: str, tokens: tuple[int, ...] | None = None) -> list[RankInputs]:
    counts = TOKENS[ranks] if tokens is None else tokens
    return make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, max(counts), ranks), counts, routing, 7)


def layout_of(buffer: Buffer, ids: torch.Tensor) -> dict[str, Any]:
    by_rank, by_node, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    return {
        "num_tokens_per_rank": by_rank,
        "num_tokens_per_rdma_rank": by_node,
        "num_tokens_per_expert": by_expert,
        "is_token_in_rank": goes,
    }


def fp8(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 bits that travel, with scale factors: any bits do. As DeepEP's tests have them, column-major."""
    payload = x.view(torch.float8_e4m3fn)[:, : x.shape[1]].contiguous()
    words = x[:, : 2 * (HIDDEN // 128)].contiguous().view(torch.int32)
    if kind == "packed":
        return payload, words[:, : HIDDEN // 256].contiguous()
    return payload, words.view(torch.float32).t().contiguous().t()


def assert_rows(got: Any, want: Any, name: str) -> None:
    for one, other in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        assert_bits(one, other, name)


# ---- layout


@RANKS
@pytest.mark.parametrize("routing", ["masked", "repeated"])
def test_layout_counts_tokens_by_rank_and_entries_by_expert(monkeypatch: Patch, ranks: int, routing: str) -> None:
    ids = wide_ids(inputs(ranks, routing))
    got = on_buffers(monkeypatch, ranks, lambda buffer: buffer.get_dispatch_layout(ids[buffer.rank], EXPERTS))
    for rank, (by_rank, by_node, by_expert, goes, event) in enumerate(got):
        want = torch.zeros(len(ids[rank]), ranks, dtype=torch.bool)
        for token, chosen in enumerate(ids[rank].tolist()):
            for expert in chosen:
                if expert >= 0:
                    want[token, expert * ranks // EXPERTS] = True
        assert_bits(goes, want, "is_token_in_rank")
        assert by_rank.dtype == by_expert.dtype == torch.int32 and by_node is None and event.event is None
        assert by_rank.tolist() == want.sum(0).tolist()
        assert by_expert.tolist() == [int((ids[rank] == expert).sum()) for expert in range(EXPERTS)]


@pytest.mark.parametrize(("ranks", "per_node"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("routing", ["masked", "repeated"])
def test_layout_counts_tokens_by_node(monkeypatch: Patch, ranks: int, per_node: int, routing: str) -> None:
    """Once each, however many of the node's experts they chose; with no tokens zeros."""
    ids, each = wide_ids(inputs(ranks, routing)), EXPERTS // ranks * per_node

    def program(buffer: Buffer) -> torch.Tensor | None:
        return buffer.get_dispatch_layout(ids[buffer.rank], EXPERTS)[1]

    for own, by_node in zip(ids, on_buffers(monkeypatch, ranks, program, ranks_per_node=per_node), strict=True):
        nodes = [{expert // each for expert in chosen if expert >= 0} for chosen in own.tolist()]
        assert by_node.dtype == torch.int32
        assert by_node.tolist() == [sum(node in one for one in nodes) for node in range(ranks // per_node)]


# ---- dispatch


@NODES
@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "packed"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatch_brings_each_token_once_to_a_rank(
    monkeypatch: Patch, ranks: int, per_node: int | None, routing: str, kind: str
) -> None:
    """By source, then token; with top-k entries, with room for any routing, and again with the handle."""
    given = inputs(ranks, routing)
    ids, most = wide_ids(given), max(TOKENS[ranks]) * ranks

    def program(buffer: Buffer) -> list:
        own = given[buffer.rank]
        x = own.x if kind == "bfloat16" else fp8(own.x, kind)
        arguments: dict[str, Any] = {"x": x, **layout_of(buffer, ids[buffer.rank]), "config": Config(24, 8, 256)}
        entry = {"topk_idx": ids[buffer.rank], "topk_weights": own.router_weights}
        plain = buffer.dispatch(**arguments)
        full = buffer.dispatch(**arguments, **entry, expert_alignment=4)
        worst = buffer.dispatch(**arguments, **entry, num_worst_tokens=most)
        again = [buffer.dispatch(x, one[4]) for one in (plain, full, worst)]
        return [plain, full, worst, *again]

    results = on_buffers(monkeypatch, ranks, program, ranks_per_node=per_node)
    wanted = [entries(EXPERTS, ranks, rank, ids) for rank in range(ranks)]
    for rank, (plain, full, worst, *again) in enumerate(results):
        places, count = wanted[rank], len(wanted[rank])
        x = torch.stack([given[s].x[t] for s, t, _ in places]) if places else given[0].x[:0]
        rows = (x,) if kind == "bfloat16" else fp8(x, kind)
        for one in (plain, full, again[0], again[1]):
            assert_rows(one[0], [part.contiguous() for part in rows], f"rank {rank}")
        for one in (worst, again[2]):
            parts = one[0] if isinstance(one[0], tuple) else (one[0],)
            assert [len(part) for part in parts] == [most] * len(parts)
            assert_rows(tuple(part[:count] for part in parts), [part.contiguous() for part in rows], "worst")
        assert all(one[1:5] == (None, None, None, None) for one in again)
        assert plain[1] is plain[2] is None
        want_ids, want_weights = torch.full((most, SLOTS), -1), torch.zeros(most, SLOTS)
        for row, (s, t, own) in enumerate(places):
            for slot, expert in own.items():
                want_ids[row, slot], want_weights[row, slot] = expert, given[s].router_weights[t, slot]
        for one, size in ((full, count), (worst, most)):
            assert one[1].dtype == topk_idx_t
            assert_bits(one[1], want_ids[:size], "ids")
            assert_bits(one[2], want_weights[:size], "weights")
        local = [sum(e == expert for _, _, own in places for e in own.values()) for expert in range(EXPERTS // ranks)]
        assert plain[3] == local and full[3] == [-(-n // 4) * 4 for n in local] and worst[3] == []
        prefix = torch.tensor([[sum(s <= last for s, _, _ in by) for by in wanted] for last in range(ranks)])
        for one in (plain, full, worst):
            matrix, _, _, sources, goes, _ = handle = one[4]
            assert len(handle) == 6 and handle[1:3] == (None, None) and handle[-2] is goes
            assert_bits(matrix, prefix.int(), "rank_prefix_matrix")
            assert sources[:count].tolist() == [t for _, t, _ in places] and len(goes) == TOKENS[ranks][rank]


@pytest.mark.parametrize("per_node", [None, 1], ids=["one node", "nodes"])
def test_a_handle_tells_tokens_of_its_dispatch(monkeypatch: Patch, per_node: int | None) -> None:
    """On one node as a view, which follows replays of a graph; over nodes by what the graph has captured."""
    given = inputs(2, "uniform")

    def program(buffer: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        own = given[buffer.rank]
        *_, handle, _ = buffer.dispatch(own.x, **layout_of(buffer, own.topk_ids.long()))
        before = handle[3].clone()
        handle.route.sent.batch.buffers.src_info.fill_(-7)
        return before, handle[3]

    for before, after in on_buffers(monkeypatch, 2, program, ranks_per_node=per_node):
        assert torch.equal(after, torch.full_like(before, -7) if per_node is None else before)


def test_weights_behind_the_last_row_are_zero(monkeypatch: Patch) -> None:
    """Whatever the memory held."""
    given = inputs(2, "masked")
    garbage = {"empty": lambda words, **options: torch.full((words,), -1, **options)}  # NaNs, as float32
    monkeypatch.setattr(carving, "torch", SimpleNamespace(**{**vars(torch), **garbage}))

    def program(buffer: Buffer) -> tuple:
        own = given[buffer.rank]
        ids = own.topk_ids.long()
        entry = {"topk_idx": ids, "topk_weights": own.router_weights}
        return buffer.dispatch(own.x, **layout_of(buffer, ids), **entry, num_worst_tokens=20)[1:3]

    for ids, weights in on_buffers(monkeypatch, 2, program):
        assert (weights[ids < 0] == 0).all() and (ids[-1] == -1).all()


@pytest.mark.parametrize("per_node", [None, 1], ids=["one node", "nodes"])
@pytest.mark.parametrize("worst", [0, 18], ids=["counted", "worst"])
def test_tokens_go_where_is_token_in_rank_says(monkeypatch: Patch, worst: int, per_node: int | None) -> None:
    """Not where their experts are: entries only say what the ids are there."""
    given = inputs(2, "masked")
    ids = wide_ids(given)
    goes = [torch.arange(2 * len(own)).view(-1, 2) % 3 > 0 for own in ids]

    def program(buffer: Buffer) -> tuple:
        own, to = given[buffer.rank], goes[buffer.rank]
        layout = layout_of(buffer, ids[buffer.rank]) | {"num_tokens_per_rank": to.sum(0), "is_token_in_rank": to}
        entry = {"topk_idx": ids[buffer.rank], "topk_weights": own.router_weights}
        alone, *_ = buffer.dispatch(own.x, **layout)
        rows, local, weights, _, handle, _ = buffer.dispatch(own.x, **layout, **entry, num_worst_tokens=worst)
        assert_bits(alone, rows[: len(alone)], "without entries")
        return rows, local, weights, *buffer.combine(rows, handle, weights)[:2]

    homes = [torch.zeros(own.shape) for own in ids]
    results = on_buffers(monkeypatch, 2, program, ranks_per_node=per_node)
    for rank, (rows, local, weights, *_) in enumerate(results):
        places = [(s, t) for s in range(2) for t in goes[s][:, rank].nonzero().flatten().tolist()]
        assert len(rows) == (worst or len(places)) and (local[len(places) :] == -1).all()
        for row, (source, token) in enumerate(places):
            here = ids[source][token] // (EXPERTS // 2) == rank
            assert_bits(rows[row], given[source].x[token], f"rank {rank} row {row}")
            assert_bits(local[row], torch.where(here, ids[source][token] % (EXPERTS // 2), -1), "ids")
            assert_bits(weights[row], torch.where(here, given[source].router_weights[token], 0), "weights")
            homes[source][token] += weights[row]
    for rank, (*_, out, total) in enumerate(results):
        assert_bits(out, given[rank].x * goes[rank].sum(1, keepdim=True).bfloat16() + 0.0, f"rank {rank}")
        assert_bits(total + 0.0, homes[rank], f"rank {rank} weights")


def test_a_later_dispatch_may_have_more_tokens(monkeypatch: Patch) -> None:
    """And handles of the earlier ones still combine."""
    small, large = inputs(2, "uniform", (3, 5)), inputs(2, "uniform", (3, 90))

    def program(buffer: Buffer) -> list:
        handles = []
        for given in (small, large, small):
            own = given[buffer.rank]
            rows, *_, handle, _ = buffer.dispatch(own.x, **layout_of(buffer, own.topk_ids.long()))
            handles.append((rows, handle))
        return [buffer.combine(*one)[0] for one in reversed(handles)]

    for rank, (last, middle, first) in enumerate(on_buffers(monkeypatch, 2, program)):
        assert_bits(first, last, "small")
        for given, out in ((small, first), (large, middle)):
            goes = torch.stack([(given[rank].topk_ids // (EXPERTS // 2) == r).any(1) for r in range(2)], 1).sum(1)
            assert torch.equal(out, given[rank].x * goes[:, None])


# ---- combine


@NODES
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_combine_adds_rows_and_weights_over_ranks(
    monkeypatch: Patch, ranks: int, per_node: int | None, routing: str, biases: int
) -> None:
    """Bit for bit, in float32 by rank, over nodes rounded for each; also of slots that the rank does not have."""
    given = inputs(ranks, routing)
    ids = wide_ids(given)
    wanted = [entries(EXPERTS, ranks, rank, ids) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(1)
    outputs = [torch.randn(len(one), HIDDEN, generator=generator).bfloat16() for one in wanted]
    weights = [torch.randn(len(one), SLOTS, generator=generator) for one in wanted]
    bias = [torch.randn(count, HIDDEN, generator=generator).bfloat16() for count in TOKENS[ranks]]

    def program(buffer: Buffer) -> list:
        own, rank = given[buffer.rank], buffer.rank
        layout = layout_of(buffer, ids[rank])
        given_bias = (None, bias[rank], (bias[rank], bias[rank]))[biases]
        got = []
        for entry in ({"topk_idx": ids[rank], "topk_weights": own.router_weights}, {}):
            *_, handle, _ = buffer.dispatch(own.x, **layout, **entry)
            got.append(buffer.combine(outputs[rank], handle, weights[rank], given_bias))
            got.append(buffer.combine(outputs[rank], handle, bias=given_bias))
        return got

    sums = [torch.zeros(count, HIDDEN) for count in TOKENS[ranks]]
    totals = [torch.zeros(count, SLOTS) for count in TOKENS[ranks]]
    for first in range(0, ranks, per_node or ranks):
        of_node = [torch.zeros_like(one) for one in sums]
        for rank in range(first, first + (per_node or ranks)):
            for row, (source, token, _) in enumerate(wanted[rank]):
                of_node[source][token] += outputs[rank][row].float()
                totals[source][token] += weights[rank][row]
        for one, other in zip(sums, of_node, strict=True):
            one += other if per_node is None else other.bfloat16().float()
    for rank, got in enumerate(on_buffers(monkeypatch, ranks, program, ranks_per_node=per_node)):
        want = sums[rank]
        for _ in range(biases):
            want = want + bias[rank].float()
        for number, (out, total, event) in enumerate(got):
            assert_bits(out, want.bfloat16(), f"rank {rank}")
            assert event.event is None and (total is None) == (number % 2 == 1)
            if total is not None:
                assert_bits(total + 0.0, totals[rank] + 0.0, f"rank {rank} weights")


@RANKS
@pytest.mark.parametrize("later", [False, True], ids=["", "previous_event"])
@pytest.mark.parametrize("wait", [False, True], ids=["", "async_finish"])
@pytest.mark.parametrize("kind", ["random", "rank", "fp8"])
def test_a_round_trip_passes_the_checks_of_deep_eps_tests(
    monkeypatch: Patch, ranks: int, kind: str, wait: bool, later: bool
) -> None:
    given = inputs(ranks, "uniform")
    ids = wide_ids(given)

    def program(buffer: Buffer) -> None:
        rank = buffer.rank
        x = given[rank].x if kind == "random" else torch.full_like(given[rank].x, rank)
        sent = (x.to(torch.float8_e4m3fn), torch.ones(len(x), HIDDEN // 128)) if kind == "fp8" else x
        options = {"async_finish": wait, **({"previous_event": buffer.capture()} if later else {})}
        layout = layout_of(buffer, ids[rank])
        entry = {"topk_idx": ids[rank], "topk_weights": given[rank].router_weights}
        got, own_ids, weights, counts, handle, event = buffer.dispatch(sent, **layout, **entry, **options)
        assert (event.event is not None) == wait
        if wait:
            event.current_stream_wait()
        rows = got[0].bfloat16() if isinstance(got, tuple) else got
        prefix, start = handle[0], 0
        for source in range(ranks if kind != "random" else 0):
            end = int(prefix[source][rank])
            assert (rows[start:end].int() == source).all()
            start = end
        assert [int((own_ids == expert).sum()) for expert in range(EXPERTS // ranks)] == counts
        out, total, event = buffer.combine(rows, handle, weights, **options)
        with event:
            pass
        times = layout["is_token_in_rank"].sum(1, keepdim=True)
        assert calc_diff(out.float() / times, x) < 5e-6
        assert calc_diff(total, given[rank].router_weights) < 1e-9

    on_buffers(monkeypatch, ranks, program)


def test_arguments_may_require_gradients(monkeypatch: Patch) -> None:
    """As in a model; the results have none."""
    given = inputs(2, "uniform")

    def program(buffer: Buffer) -> tuple:
        own = given[buffer.rank]
        x, weights = own.x.clone().requires_grad_(), own.router_weights.clone().requires_grad_()
        ids = own.topk_ids.long()
        rows, _, received, _, handle, _ = buffer.dispatch(
            x, **layout_of(buffer, ids), topk_idx=ids, topk_weights=weights
        )
        return buffer.combine(rows.requires_grad_(), handle, received)

    for out, total, _ in on_buffers(monkeypatch, 2, program):
        assert not out.requires_grad and not total.requires_grad


# ---- parts


def test_an_event_is_waited_for_once_and_calls_its_hook_once() -> None:
    calls: list[int] = []
    event = Buffer.capture()
    event.register_hook_after_wait(lambda: calls.append(1))
    with event(release_handle=True):
        assert not calls
    assert calls == [1] and event.event is None
    with pytest.raises(AssertionError, match="async_finish=False"):
        EventOverlap().current_stream_wait()


def test_calls_leave_no_garbage_that_refers_to_itself(monkeypatch: Patch) -> None:
    """It would keep memory of a GPU until Python collects garbage."""
    given = inputs(2, "uniform")

    def program(buffer: Buffer) -> None:
        own = given[buffer.rank]
        ids = own.topk_ids.long()
        layout = layout_of(buffer, ids)
        rows, *_, handle, _ = buffer.dispatch(own.x, **layout, topk_idx=ids, topk_weights=own.router_weights)
        tensors = [weakref.ref(one) for one in (layout["is_token_in_rank"], handle[3], rows)]
        del layout, rows, handle, _
        assert [one() for one in tensors] == [None] * 3

    gc.disable()
    try:
        on_buffers(monkeypatch, 2, program)
    finally:
        gc.enable()


def test_a_layout_is_taken_only_as_long_as_its_tensors_are_the_same() -> None:
    """Else tokens go where the tensors say that were given."""
    ids = torch.tensor([[0, 5], [3, -1]])
    routes, goes = GivenLayout.of(ids, 6, 2)
    own = routes.by_rank, goes, routes.by_expert
    assert GivenLayout.known((*own, ids), 2) == routes
    assert GivenLayout.known((*own, ids), 3) is GivenLayout.known((*own, ids.clone()), 2) is None
    assert GivenLayout.known((*own, None), 2) == routes  # tokens go the same ways without their entries
    for position in range(3):
        first, second, third = (one.clone() if place == position else one for place, one in enumerate(own))
        assert GivenLayout.known((first, second, third, ids), 2) is None
    for change in (lambda *_: ids, lambda routes, goes: goes, lambda routes, goes: routes.by_rank):
        routes, goes = GivenLayout.of(ids, 6, 2)
        change(routes, goes)[0] = 1
        assert GivenLayout.known((routes.by_rank, goes, routes.by_expert, ids), 2) is None
    with torch.inference_mode():
        entries = ids.clone()
        routes, goes = GivenLayout.of(entries, 6, 2)
        assert GivenLayout.known((routes.by_rank, goes, routes.by_expert, entries), 2) == routes


def test_a_layout_is_kept_no_longer_than_its_tensors() -> None:
    kept = len(layout._GIVEN)
    made = GivenLayout.of(torch.tensor([[0, 5]]), 6, 2)
    assert len(layout._GIVEN) == kept + 1
    del made
    assert len(layout._GIVEN) == kept
