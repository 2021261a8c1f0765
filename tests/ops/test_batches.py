"""What the functions over the ops return: the library's own bytes, with nothing undefined behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_ep
import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import COMBINE_MODES, CombineMode
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.fake_gpu import CFG as GPU_CFG
from tests.fake_gpu import Launches, MakeRank, inputs

from .ranks import ALONE, CFG, on_all_ranks

TOKENS = (9, 0, 7)


@pytest.mark.parametrize("fmt", FORMATS)
def test_dispatch_returns_what_the_communicator_does(fmt: Any) -> None:
    """Bit for bit; the tensors that a format has not are empty."""
    cfg = replace(ALONE, dispatch_format=fmt, hidden=128, row_alignment=None)
    (ep,), (one,) = connect_local(cfg, ["cpu"]), make_inputs(cfg, (7,), "masked", 1)
    arguments = one.x, one.topk_ids, one.router_weights
    scale = torch.tensor([3.0]) if fmt == "nvfp4" else None
    want = connect_local(cfg, ["cpu"])[0].dispatch(*arguments, scale)  # its first round, too
    batch = cute_ep.ops.dispatch(*arguments, cute_ep.ops.register(ep), input_scale=scale)
    rows = int(want.num_rows)
    for name in BUFFERS:
        value, got = getattr(want, name), getattr(batch, name)
        if value is None:
            assert got.numel() == 0
        elif name in ("tokens", "row_scales", "src_info", "row_weights"):
            assert_bits(got[:rows], value[:rows], name)
        elif name != "scales":
            assert_bits(got, value, name)
    own = () if scale is None else (scale,)
    table = [cute_ep.dequantize(one, fmt, *own)[:rows] for one in (want, batch.dispatched())]
    assert torch.equal(*table)


def test_rows_behind_the_last_can_be_cleared() -> None:
    """In memory that held something before, too."""
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (3,), "uniform", 1)
    for _ in range(3):
        dirty = torch.full((1 << 16,), torch.nan)
        del dirty
        comm = cute_ep.ops.register(ep)
        batch = cute_ep.ops.dispatch(one.x, one.topk_ids, one.router_weights, comm, clear=True)
        rows = int(batch.num_rows)
        assert (
            not batch.tokens[rows:].any() and (batch.src_info[rows:] == -1).all() and (batch.row_map[:, 3:] < 0).all()
        )


def test_rows_behind_the_last_keep_what_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of tokens are the same."""
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (3,), "uniform", 1)
    arguments = one.x, one.topk_ids, one.router_weights, cute_ep.ops.register(ep)
    want, buffers = cute_ep.ops.dispatch(*arguments), ep.allocate()
    buffers.tokens.fill_(7)
    monkeypatch.setattr(ep, "allocate", lambda capacity=None: buffers)
    batch, rows = cute_ep.ops.dispatch(*arguments), int(want.num_rows)
    assert_bits(batch.tokens[:rows], want.tokens[:rows], "rows")
    assert (batch.tokens[rows:] == 7).all() and rows < len(batch.tokens)


def test_a_batch_has_as_many_rows_as_are_asked_for() -> None:
    """Rounded up to the alignment."""
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (2,), "uniform", 1)
    comm = cute_ep.ops.register(ep)
    assert len(cute_ep.ops.dispatch(one.x, one.topk_ids, None, comm, capacity=33).tokens) == 40
    assert len(cute_ep.ops.dispatch(one.x, one.topk_ids, None, comm).tokens) == ALONE.max_rows
    with pytest.raises(EPInputError, match="capacity = -1"):
        cute_ep.ops.dispatch(one.x, one.topk_ids, None, comm, capacity=-1)


@pytest.mark.parametrize("into", [False, True], ids=["new memory", "given memory"])
@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_a_round_of_several_ranks_is_the_communicators_own(mode: CombineMode, into: bool) -> None:
    given = make_inputs(CFG, TOKENS, "masked", 2)
    ranks = connect_local(CFG, ["cpu"] * 3)
    batches = [ep.dispatch(one.x, one.topk_ids, one.router_weights) for ep, one in zip(ranks, given, strict=True)]
    want = [ep.combine(batch.tokens, batch, mode=mode) for ep, batch in zip(ranks, batches, strict=True)]

    def program(rank: int, comm: str) -> torch.Tensor:
        one = given[rank]
        arguments = one.x, one.topk_ids, one.router_weights, comm
        if not into:
            batch = cute_ep.ops.dispatch(*arguments)
            return cute_ep.ops.combine(batch.tokens, batch, mode)
        buffers = cute_ep.DispatchBuffers.allocate(CFG, "cpu")
        batch, out = cute_ep.ops.dispatch_into(*arguments, buffers), torch.empty_like(want[rank])
        assert batch.tokens is buffers.tokens
        assert cute_ep.ops.combine_into(batch.tokens, batch, out, mode) is out
        return out

    for rank, out in enumerate(on_all_ranks(CFG, program)[0]):
        assert_bits(out, want[rank], f"rank {rank}")


def test_rows_are_dispatched_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is 16-byte aligned; others are copied."""
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (5,), "uniform", 1)
    comm, sent, dispatch = cute_ep.ops.register(ep), [], ep.dispatch
    monkeypatch.setattr(
        ep, "dispatch", lambda x, *given, **named: [sent.append(x.data_ptr()), dispatch(x, *given, **named)][1]
    )
    wide = torch.cat([one.x, one.x, one.x], 1)
    for first, copied in ((0, False), (8, False), (1, True)):
        x = wide[:, first : first + ALONE.hidden]
        got = cute_ep.ops.dispatch(x, one.topk_ids, one.router_weights, comm)
        want = dispatch(x.contiguous(), one.topk_ids, one.router_weights)
        assert_bits(got.tokens[: int(got.num_rows)], want.tokens[: int(want.num_rows)], f"from column {first}")
        assert (sent[-1] != x.data_ptr()) == copied


def test_strided_arguments_are_taken_or_copied() -> None:
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (5,), "uniform", 1)
    comm, wide = cute_ep.ops.register(ep), [torch.cat([part, part], 1) for part in (one.x, one.topk_ids)]
    strided = wide[0][:, : ALONE.hidden], wide[1][:, : ALONE.top_k], one.router_weights.t().contiguous().t()
    batch, want = cute_ep.ops.dispatch(*strided, comm), ep.dispatch(one.x, one.topk_ids, one.router_weights)
    rows = torch.cat([batch.tokens, batch.tokens], 1)[:, : ALONE.hidden]
    assert_bits(cute_ep.ops.combine(rows, batch), ep.combine(want.tokens, want), "sums")


# ---- on a GPU


def test_combine_returns_rows_in_the_slices_of_its_dispatch(make_rank: MakeRank, launches: Launches) -> None:
    """Those that its number of tokens has in the tuning; the header of the dispatch has told them to the peers."""
    cfg = replace(GPU_CFG, hidden=7168, max_tokens_per_rank=64)
    rank = make_rank(cfg)
    comm, batches = cute_ep.ops.register(rank), []
    for tokens in (1, 64):
        _, ids, weights = inputs(tokens)
        x = torch.zeros(tokens, cfg.hidden).bfloat16()
        batches.append(cute_ep.ops.dispatch_into(x, ids, weights, comm, rank.allocate(8)))
    for batch in reversed(batches):
        cute_ep.ops.combine(torch.zeros(8, cfg.hidden).bfloat16(), batch)
    sent = [launch.arguments["input.returns"] for launch in launches.of("dispatch")]
    returned = [launch.arguments["sums.return_slices_log2"] for launch in launches.of("combine")]
    assert returned == sent[::-1] and len(set(sent)) == 2


def test_what_a_kernel_leaves_alone_is_defined_in_a_cleared_batch(rank: Communicator) -> None:
    """Of tokens that do not exist it writes no `row_map`, and nothing behind the last row. This one writes nothing."""
    for _ in range(2):
        dirty = torch.full((1 << 16,), torch.nan)
        del dirty
        batch = cute_ep.ops.dispatch(*inputs(5), cute_ep.ops.register(rank), clear=True)
        assert (batch.row_map == -1).all() and (batch.src_info == -1).all()
        assert not any(one.any() for one in (batch.tokens, batch.scales, batch.weights))


def test_given_buffers_are_those_of_the_launch(rank: Communicator, launches: Launches) -> None:
    """Nothing is copied, and a communicator that has seen them binds its kernel to them."""
    comm, buffers, out = cute_ep.ops.register(rank), rank.allocate(), torch.empty(5, rank.cfg.hidden).bfloat16()
    for _ in range(2):
        batch = cute_ep.ops.dispatch_into(*inputs(5), comm, buffers)
        cute_ep.ops.combine_into(torch.zeros(9, rank.cfg.hidden).bfloat16(), batch, out)
    for launch in launches.of("dispatch"):
        assert launch.values("out.tokens", "out.row_map") == (buffers.tokens.data_ptr(), buffers.row_map.data_ptr())
    for launch in launches.of("combine"):
        assert launch.values("sums.out", "batch.row_map") == (out.data_ptr(), buffers.row_map.data_ptr())
