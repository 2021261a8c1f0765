"""Calls that the compiled launcher makes: the same launches as Python's, and none where Python would refuse."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.variants import NO_HOOKS
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.launcher import missing
from cute_ep.testing.launches import by_python
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning
from tests.compiled_launches import compiled
from tests.fake_gpu import CFG, HOOKS, MAX_CTAS, SHARED_EXPERT, SKIP_A2A, Launch, Launches, MakeRank, expert_rows

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"there is no compiled launcher: {missing()}")

BF16 = replace(CFG, dispatch_format="bf16")
TOKENS = 5


def arguments(cfg: EPConfig, tokens: int = TOKENS, wide: bool = False) -> dict[str, Any]:
    """Of a dispatch, new tensors."""
    ids = torch.randint(0, cfg.num_experts, (tokens, cfg.top_k), dtype=torch.int64 if wide else torch.int32)
    x = torch.randn(tokens, cfg.hidden).bfloat16()
    return {"x": x, "topk_ids": ids, "router_weights": torch.rand(tokens, cfg.top_k)}


def strided(cfg: EPConfig) -> dict[str, Any]:
    """With rows that lie apart."""
    return arguments(cfg) | {"x": torch.zeros(TOKENS, 3 * cfg.hidden, dtype=torch.bfloat16)[:, : cfg.hidden]}


def quantised(cfg: EPConfig) -> dict[str, Any]:
    """With rows that are in the format already."""
    made = arguments(cfg)
    payload = torch.zeros(TOKENS, cfg.hidden // 2, dtype=torch.uint8)
    scales = torch.zeros(TOKENS, cfg.hidden // cfg.format.block, dtype=torch.uint8)
    return made | {"x": payload, "scales": scales}


Arguments = Callable[[EPConfig], dict[str, Any]]
DISPATCHES: dict[str, tuple[EPConfig, Arguments]] = {
    "nvfp4": (CFG, arguments),
    "input scale": (CFG, lambda cfg: arguments(cfg) | {"input_scale": torch.ones(1)}),
    "quantised": (CFG, quantised),
    "bf16": (BF16, arguments),
    "wide ids": (BF16, lambda cfg: arguments(cfg, wide=True)),
    "no weights": (BF16, lambda cfg: arguments(cfg) | {"router_weights": None}),
    "strided": (BF16, strided),
    "one token": (BF16, lambda cfg: arguments(cfg, 1)),
    "rank-major": (replace(CFG, row_order="rank_major"), arguments),
    "blocks": (replace(BF16, block_rows=16), arguments),
    "shared expert": (SHARED_EXPERT, arguments),
    "skip_a2a": (SKIP_A2A, arguments),
}
"""Configurations, and what makes the arguments of a call."""


def without_outputs(launch: Launch) -> Launch:
    """A launch without the addresses of new memory."""
    new = {"scales.data", "sums.out", "batch.row_map", "batch.headers", "batch.weights"}
    new |= {name for name, value in launch.arguments.items() if name.startswith("out.") and value > 1 << 20}
    return replace(launch, arguments={name: value for name, value in launch.arguments.items() if name not in new})


Outputs = Callable[[Communicator], DispatchBuffers | None]
OUTPUTS: dict[str, Outputs] = {
    "given buffers": lambda rank: rank.allocate(),
    "carved buffers": lambda rank: DispatchBuffers.carve(rank.cfg, rank.device),
    "new buffers": lambda rank: None,
}
"""What makes the buffers of a call."""


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "in pairs"])
@pytest.mark.parametrize("name", DISPATCHES)
def test_a_dispatch_is_launched_as_by_python(
    make_rank: MakeRank, launches: Launches, name: str, pairs: bool, output: str
) -> None:
    """With other tensors than those of the calls before, also carved ones; the batches are the same, too."""
    cfg, make = DISPATCHES[name]
    rank = make_rank(cfg, pairs=pairs)
    own, out = output != "new buffers", OUTPUTS[output](rank)
    for _ in range(2):
        rank.dispatch(**make(cfg), out=out)
    if output == "carved buffers":
        out = OUTPUTS[output](rank)
    given = make(cfg)
    with compiled(launches):
        batch = rank.dispatch(**given, out=out)
    got = launches.last()
    if output != "given buffers":
        for part, tensor in vars(batch.buffers).items():
            if isinstance(tensor, torch.Tensor) and part != "frame_ids":
                assert got.arguments["scales.data" if part == "scales" else f"out.{part}"] == tensor.data_ptr(), part
    assert batch.is_whole(rank.origin)
    with by_python(rank):
        again = rank.dispatch(**given, out=out)
    assert (batch.topk_ids, batch.router_weights) == (given["topk_ids"], given["router_weights"])
    if own:
        assert got == launches.last() and batch.buffers is again.buffers is out and not batch.is_whole(rank.origin)
    else:
        assert without_outputs(got) == without_outputs(launches.last())
    for field in ("rank", "return_slices_log2", "row_per_entry", "weighted", "frame"):
        assert getattr(batch, field) == getattr(again, field)


COMBINES: dict[str, tuple[EPConfig, dict[str, Any]]] = {
    "partial": (CFG, {}),
    "exact": (CFG, {"mode": "exact"}),
    "exact, other weights": (CFG, {"mode": "exact", "router_weights": torch.rand(TOKENS, CFG.top_k)}),
    "unweighted": (BF16, {"mode": "unweighted"}),
    "float32": (BF16, {"dtype": torch.float32}),
    "rank-major": (replace(CFG, row_order="rank_major"), {}),
    "blocks": (replace(BF16, block_rows=16), {}),
    "shared expert": (SHARED_EXPERT, {}),
    "epilogue": (CFG, {"epilogue_data": torch.zeros(4, dtype=torch.float32)}),
}


@pytest.mark.parametrize("own", [True, False], ids=["given output", "new output"])
@pytest.mark.parametrize("name", COMBINES)
def test_a_combine_is_launched_as_by_python(make_rank: MakeRank, launches: Launches, name: str, own: bool) -> None:
    """Of batches in new buffers, in allocated and in carved ones, with other tensors than those of the calls before."""
    cfg, options = COMBINES[name]
    rank = make_rank(cfg, hooks=HOOKS if "epilogue_data" in options else NO_HOOKS)
    shape = (TOKENS, cfg.top_k, cfg.hidden) if name == "unweighted" else (TOKENS, cfg.hidden)

    def output() -> torch.Tensor | None:
        return torch.zeros(shape, dtype=options.get("dtype", torch.bfloat16)) if own else None

    for make in (lambda: None, rank.allocate, lambda: DispatchBuffers.carve(cfg, rank.device)):
        first = rank.dispatch(**arguments(cfg), out=make())
        rank.combine(torch.zeros(cfg.max_rows, cfg.hidden, dtype=torch.bfloat16), first, out=output(), **options)
        batch = rank.dispatch(**arguments(cfg), out=make())
        rows, result = torch.zeros(cfg.max_rows, cfg.hidden, dtype=torch.bfloat16), output()
        made = set(vars(batch.buffers))
        with compiled(launches):
            summed = rank.combine(rows, batch, out=result, **options)
        got = launches.last()
        assert set(vars(batch.buffers)) == made, "tensors that only kernels read"
        left = batch.row_map.data_ptr(), batch.headers.data_ptr(), batch.weights.data_ptr()
        assert got.values("batch.row_map", "batch.headers", "batch.weights") == left
        assert got.arguments["sums.out"] == summed.data_ptr() and (summed is result or not own)
        assert (summed.shape, summed.dtype) == (shape, options.get("dtype", torch.bfloat16))
        with by_python(rank):
            rank.combine(rows, batch, out=result, **options)
        assert (got if own else without_outputs(got)) == (launches.last() if own else without_outputs(launches.last()))


@pytest.mark.parametrize("mode", ["partial", "exact", "unweighted"])
def test_a_mode_may_be_computed_each_time(make_rank: MakeRank, launches: Launches, mode: CombineMode) -> None:
    rank = make_rank()
    batch, rows = rank.dispatch(**arguments(rank.cfg)), torch.zeros(rank.cfg.max_rows, rank.cfg.hidden).bfloat16()
    rank.combine(rows, batch, mode="".join(mode))
    rank.combine_wait(rank.combine_async(rows, batch, "".join(mode)))
    with compiled(launches, 3):
        rank.combine(rows, batch, mode="".join([*mode]))
        rank.combine_wait(rank.combine_async(rows, batch, "".join([*mode])))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("mode", ["partial", "exact", "unweighted"])
@pytest.mark.parametrize("name", ["nvfp4", "quantised", "no weights", "strided", "blocks"])
def test_halves_are_launched_as_by_python(
    make_rank: MakeRank, launches: Launches, name: str, mode: str, output: str
) -> None:
    """Into given memory, which may be carved, and into new memory."""
    cfg, make = DISPATCHES[name]
    if name == "no weights" and mode == "partial":
        pytest.skip("partial mode multiplies")
    rank = make_rank(cfg)
    own, out = output != "new buffers", OUTPUTS[output](rank)
    shape = (TOKENS, cfg.top_k, cfg.hidden) if mode == "unweighted" else (TOKENS, cfg.hidden)
    result = torch.zeros(shape, dtype=torch.bfloat16) if own else None
    weights = torch.rand(TOKENS, cfg.top_k) if mode == "exact" else None

    def pair(given: dict[str, Any], rows: torch.Tensor | None = None) -> tuple[Any, ...]:
        pending = rank.dispatch_async(**given)
        batch = rank.dispatch_wait(pending, out)
        rows = expert_rows(batch) if rows is None else rows
        sent = rank.combine_async(rows, batch, mode)
        return pending, batch, rows, sent, rank.combine_wait(sent, weights, result)

    for _ in range(3):
        pair(make(cfg))
    if output == "carved buffers":
        out = OUTPUTS[output](rank)
    given = make(cfg)
    with compiled(launches, 4):
        pending, batch, rows, sent, summed = pair(given)
    got = list(launches)[-4:]
    assert got[1].values("out.tokens", "out.row_map") == (batch.tokens.data_ptr(), batch.row_map.data_ptr())
    assert got[2].arguments["batch.row_map"] == batch.row_map.data_ptr()
    assert got[3].arguments["sums.out"] == summed.data_ptr() and (summed.shape, summed.dtype) == (shape, torch.bfloat16)
    assert pending.topk_ids is given["topk_ids"] is batch.topk_ids and pending.keep_alive[0] is given["x"]
    assert sent.rows is rows and sent.dispatched is batch and batch.is_whole(rank.origin)
    with by_python(rank):
        again = pair(given, rows)
    want = list(launches)[-4:]
    assert again[0].return_slices_log2 == pending.return_slices_log2
    assert (got if own else list(map(without_outputs, got))) == (want if own else list(map(without_outputs, want)))


def test_numbers_of_tokens_are_launched_apart(make_rank: MakeRank, launches: Launches) -> None:
    """Also of a call that has none, which Python launches, and in buffers that are used in turn."""
    rank = make_rank(BF16)
    buffers = rank.allocate(), rank.allocate(32)
    for out in (*buffers, *buffers):
        for tokens in (1, 3, 16, 0):
            rank.dispatch(**arguments(BF16, tokens), out=out)
    for out in buffers:
        for tokens in (16, 1, 3):
            given = arguments(BF16, tokens)
            with compiled(launches):
                rank.dispatch(**given, out=out)
            want = given["x"].data_ptr(), tokens, out.tokens.data_ptr(), out.tokens.shape[0]
            assert launches.last().values("input.x", "input.tokens", "out.tokens", "out.capacity") == want
        before = launches.compiled.count
        rank.dispatch(**arguments(BF16, 0), out=out)
        assert launches.last().arguments["input.tokens"] == 0 and launches.compiled.count == before


def test_calls_with_another_number_of_rows_each_time_are_not_kept(make_rank: MakeRank, launches: Launches) -> None:
    """Only those into as many rows as a call before."""
    rank, given = make_rank(BF16), arguments(BF16)
    for rows in (8, 16, 24, 8, 8, 24):
        rank.dispatch(**given, out=DispatchBuffers.carve(BF16, rank.device, rows))
        assert launches.last().arguments["out.capacity"] == rows
    assert launches.compiled.count == 1


def test_launches_are_early_after_one_that_allows_it(make_rank: MakeRank, launches: Launches) -> None:
    """Whoever has made that one, where two launches fit side by side."""
    rank, given = make_rank(BF16), arguments(BF16)
    few, all_ctas = (Entry(tokens=MANY, grid=grid, senders=0, slices=1) for grid in (MAX_CTAS // 2, MAX_CTAS))
    for entry, allowed in ((few, True), (all_ctas, False)):
        rank.tuning = Tuning((entry,), (entry,))
        rank.dispatch(**given)
        for before in (False, True):
            rank._pdl = before
            with compiled(launches):
                rank.dispatch(**given)
            assert (launches.last().early, rank._pdl) == (allowed and before, allowed)
            rank._pdl = before
            with by_python(rank):
                rank.dispatch(**given)
            assert (launches.last().early, rank._pdl) == (allowed and before, allowed)


def test_threads_launch_their_own_arguments(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(BF16)
    rank.dispatch(**arguments(BF16))
    given = [arguments(BF16) for _ in range(40)]

    def work(some: list[dict[str, Any]]) -> None:
        for one in some:
            rank.dispatch(**one)

    with compiled(launches, len(given)):
        threads = [threading.Thread(target=work, args=(given[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    want = sorted((one["x"].data_ptr(), one["topk_ids"].data_ptr()) for one in given)
    assert sorted(launch.values("input.x", "ids.data") for launch in launches.of("dispatch")[1:]) == want


def test_nothing_is_kept_alive(make_rank: MakeRank, launches: Launches) -> None:
    """Neither the communicator, nor buffers, nor what calls were given."""
    rank = make_rank(BF16)
    out: Any = rank.allocate()
    for _ in range(4):
        given = arguments(BF16)
        batch = rank.dispatch(**given, out=out)
        rows = expert_rows(batch)
        result = rank.combine(rows, batch)
    assert launches.compiled.count == 5
    tensors = [weakref.ref(one) for one in (*given.values(), rows, result)]
    rank.combine(torch.zeros(40, BF16.hidden, dtype=torch.bfloat16), rank.dispatch(**arguments(BF16)))
    buffers, ranks, repeats = weakref.ref(out), weakref.ref(rank), weakref.ref(rank._repeats)
    del given, rows, result, out, batch
    gc.collect()
    assert buffers() is None and not any(one() for one in tensors)
    del rank
    gc.collect()
    assert ranks() is None and repeats() is None


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, KeyboardInterrupt])
def test_what_ends_an_allocation_ends_the_call(
    make_rank: MakeRank, launches: Launches, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Nothing was launched and no round counted; after an interrupt, whenever it came, no call is taken."""
    rank, given = make_rank(BF16), arguments(BF16)
    rank.dispatch(**given)

    def fail(*_: object) -> None:
        raise error

    with launches.forbidden(), monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(DispatchBuffers, "of_shapes", fail)
        rank.dispatch(**given)
    assert (rank._dispatches.sent, rank.failed) == (1, error is KeyboardInterrupt)
    if error is KeyboardInterrupt:
        with launches.forbidden(), pytest.raises(EPError, match="was interrupted"):
            rank.dispatch(**given)
    else:
        with compiled(launches):
            rank.dispatch(**given)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_behind_a_launch_ends_the_communicator(
    make_rank: MakeRank, launches: Launches, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A handler of signals may raise any exception, before the round is counted."""
    rank = make_rank(BF16)
    rank.dispatch(**arguments(BF16))

    def interrupt() -> None:
        raise error

    with compiled(launches), monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(rank._dispatches, "count_fused", interrupt)
        rank.dispatch(**arguments(BF16))
    with launches.forbidden(), pytest.raises(EPError, match="was interrupted"):
        rank.dispatch(**arguments(BF16))


def test_buffers_at_the_place_of_others_are_told_from_them(make_rank: MakeRank, launches: Launches) -> None:
    """Python gives the number of an object that is gone to a new one."""
    rank = make_rank(BF16)
    for capacity in (16, 32) * 10:
        out = rank.allocate(capacity)
        for _ in range(3):
            rank.dispatch(**arguments(BF16), out=out)
            got = launches.last().values("out.capacity", "out.tokens")
            assert got == (out.tokens.shape[0], out.tokens.data_ptr())
        del out
