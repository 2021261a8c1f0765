"""What a communicator on a GPU refuses before it launches anything, each with the name, the value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import CFG, HOOKS, SHARED_EXPERT, Launches, MakeRank, expert_rows, inputs

BF16 = replace(CFG, dispatch_format="bf16")
FAR = torch.zeros(3, device="meta")


@pytest.fixture
def batch(rank: Communicator) -> Dispatched:
    """A batch of `rank`."""
    return rank.dispatch(*inputs())


# ---- types


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"x": [1.0]}, "x = list: must be a torch.Tensor", id="x"),
        pytest.param({"topk_ids": [1]}, "topk_ids = list", id="topk_ids"),
        pytest.param({"router_weights": [1.0]}, "router_weights = list", id="router_weights"),
        pytest.param({"scales": [1.0]}, "x", id="scales, while x is not quantised"),
        pytest.param({"out": [1.0]}, "out = list: must be a DispatchBuffers", id="out"),
    ],
)
def test_dispatch_takes_no_list_for_a_tensor(
    rank: Communicator, launches: Launches, change: dict[str, Any], rule: str
) -> None:
    x, ids, weights = inputs()
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.dispatch(**{"x": x, "topk_ids": ids, "router_weights": weights} | change)


def test_hooks_and_formats_without_scales_take_no_list_for_a_tensor(make_rank: MakeRank, launches: Launches) -> None:
    x, ids, _ = inputs()
    with launches.forbidden(), pytest.raises(EPInputError, match="router_weights = list"):
        make_rank(hooks=HOOKS).dispatch(x, ids, [1.0])
    with launches.forbidden(), pytest.raises(EPInputError, match="scales = list: must be None, bf16 has no scale fact"):
        make_rank(BF16).dispatch(x, ids, scales=[1.0])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"rows": [1.0]}, "rows = list", id="rows"),
        pytest.param({"dispatched": [1.0]}, "dispatched = list", id="dispatched"),
        pytest.param({"out": [1.0]}, "out = list: must be a torch.Tensor", id="out"),
        pytest.param({"dtype": float}, "dtype = <class 'float'>: must be one of", id="a type of Python"),
        pytest.param(
            {"dtype": torch.int32}, "dtype = torch.int32: must be one of torch.bfloat16, torch.float16", id="int32"
        ),
        pytest.param({"out": torch.empty(5, 64)}, r"out\.shape", id="shape of out"),
    ],
)
def test_combine_takes_no_other_types(
    rank: Communicator, launches: Launches, batch: Dispatched, change: dict[str, Any], rule: str
) -> None:
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(**{"rows": expert_rows(batch), "dispatched": batch} | change)


@pytest.mark.parametrize(
    ("capacity", "rule"),
    [
        (-1, r"capacity = -1: must be an integer in \[0, 1073741824\]"),
        (True, r"capacity = True: must be an integer in \[0, 1073741824\]"),
        (2.5, "capacity = 2.5"),
    ],
)
def test_a_capacity_is_a_number_of_rows(rank: Communicator, capacity: Any, rule: str) -> None:
    with pytest.raises(EPInputError, match=rule):
        rank.allocate(capacity)


# ---- tokens


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 2.0**101, True])
def test_a_global_scale_is_a_positive_number_within_bounds(
    rank: Communicator, launches: Launches, value: float
) -> None:
    with launches.forbidden(), pytest.raises(EPInputError, match=r"input_scale = .*: must be a number in"):
        rank.dispatch(*inputs(), value)


def test_bf16_has_no_scale_factors(make_rank: MakeRank, launches: Launches) -> None:
    with launches.forbidden(), pytest.raises(EPInputError, match="bf16 has no scale factors"):
        make_rank(BF16).dispatch(*inputs()[:2], scales=torch.ones(5, 8))


@pytest.mark.parametrize("fmt", [name for name, record in FORMATS.items() if record.scale])
def test_quantised_rows_must_be_whole_and_come_with_their_own_scales_only(
    make_rank: MakeRank, launches: Launches, fmt: str
) -> None:
    rank, (x, ids, _) = make_rank(replace(CFG, dispatch_format=fmt)), inputs()
    ready = reference.quantize(x, fmt)
    given = {"scales": ready.scales, "row_scales": ready.row_scales}
    with launches.forbidden(), pytest.raises(EPInputError, match="x"):
        rank.dispatch(x, ids, **given)
    with launches.forbidden(), pytest.raises(EPInputError, match=r"scales\.shape"):
        rank.dispatch(ready.payload, ids, **given | {"scales": ready.scales[:4]})
    with launches.forbidden(), pytest.raises(EPInputError, match="input_scale = tensor: must be None"):
        rank.dispatch(ready.payload, ids, input_scale=torch.ones(1), **given)
    missing_or_too_many = None if FORMATS[fmt].row_scale else torch.ones(5).bfloat16()
    with launches.forbidden(), pytest.raises(EPInputError, match="row_scales = "):
        rank.dispatch(ready.payload, ids, **given | {"row_scales": missing_or_too_many})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(lambda scales: scales[:4], r"row_scales\.shape = \(4,\): must be \(5\)", id="too few"),
        pytest.param(lambda scales: scales[:, None], r"row_scales\.shape = \(5, 1\)", id="a column"),
        pytest.param(
            lambda scales: scales.half(), r"row_scales\.dtype = torch.float16: must be torch.bfloat16", id="type"
        ),
        pytest.param(lambda scales: scales.to("meta"), r"row_scales\.device", id="device"),
        pytest.param(lambda scales: scales.repeat_interleave(2)[::2], r"row_scales\.stride", id="stride"),
    ],
)
def test_row_scales_are_one_bfloat16_for_each_row(
    make_rank: MakeRank, launches: Launches, change: Callable, rule: str
) -> None:
    rank = make_rank(replace(CFG, dispatch_format="nvfp4_row"))
    x, ids, _ = inputs()
    ready = reference.quantize(x, "nvfp4_row")
    for call in (rank.dispatch, rank.dispatch_async):
        with launches.forbidden(), pytest.raises(EPInputError, match=rule):
            call(ready.payload, ids, scales=ready.scales, row_scales=change(ready.row_scales))


# ---- rows and sums


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(lambda rows: rows[:, :64], r"rows\.shape", id="narrow"),
        pytest.param(lambda rows: rows.float(), r"rows\.dtype", id="type"),
        pytest.param(lambda rows: rows.to("meta"), r"rows\.device", id="device"),
        pytest.param(lambda rows: [1.0], r"rows", id="list"),
    ],
)
def test_rows_are_bfloat16_of_the_hidden_size_on_the_device(
    rank: Communicator, launches: Launches, batch: Dispatched, change: Callable, rule: str
) -> None:
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(change(expert_rows(batch)), batch)


def test_unweighted_combine_takes_no_weights_and_exact_combine_needs_them(
    rank: Communicator, launches: Launches
) -> None:
    x, ids, _ = inputs()
    batch = rank.dispatch(x, ids)
    with launches.forbidden(), pytest.raises(EPInputError, match="must be None in unweighted mode"):
        rank.combine(expert_rows(batch), batch, torch.ones(5, 2), "unweighted")
    rule = "exact combine needs them, give them to dispatch or combine"
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), batch, mode="exact")


def test_with_a_shared_expert_there_is_no_unweighted_combine(make_rank: MakeRank, launches: Launches) -> None:
    """The sending half says so, too: nobody could receive that round."""
    rank = make_rank(SHARED_EXPERT)
    batch = rank.dispatch(*inputs())
    for call in (rank.combine, rank.combine_async):
        with launches.forbidden(), pytest.raises(EPInputError, match="mode = 'unweighted'"):
            call(expert_rows(batch), batch, mode="unweighted")
    rule = "no sum that a fused shared expert could be added to"
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), batch, mode="unweighted")
    assert rank.combine(expert_rows(batch), batch).shape == (5, 128)


# ---- what hooks read


@pytest.mark.parametrize(
    ("hooks", "mode", "data", "rule"),
    [
        pytest.param(None, "exact", torch.zeros(3), "exact combine has no epilogue here", id="no hook"),
        pytest.param(HOOKS, "unweighted", torch.zeros(3), "unweighted combine has no epilogue here", id="no sum"),
        pytest.param(HOOKS, "exact", FAR, r"epilogue_data\.device", id="device"),
        pytest.param(HOOKS, "exact", torch.zeros(4, 4).T, r"epilogue_data\.stride", id="stride"),
        pytest.param(HOOKS, "exact", 3.0, "epilogue_data = float", id="number"),
        pytest.param(
            *(HOOKS, "exact", torch.zeros(9, dtype=torch.bfloat16)[1:], "must be a multiple of 16 bytes"),
            id="not aligned",
        ),
    ],
)
def test_epilogue_data_is_contiguous_on_the_device_and_a_hook_reads_it(
    make_rank: MakeRank, launches: Launches, hooks: Any, mode: str, data: Any, rule: str
) -> None:
    rank = make_rank(hooks=hooks) if hooks else make_rank()
    batch = rank.dispatch(*inputs())
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), batch, mode=mode, epilogue_data=data)


def test_the_scale_that_a_hook_reads_is_on_the_device(make_rank: MakeRank, launches: Launches) -> None:
    with launches.forbidden(), pytest.raises(EPInputError, match=r"input_scale\.device"):
        make_rank(hooks=HOOKS).dispatch(*inputs(), input_scale=FAR)


# ---- memory


@pytest.mark.parametrize("name", ["x", "rows", "out"])
def test_rows_begin_at_a_multiple_of_16_bytes(make_rank: MakeRank, launches: Launches, name: str) -> None:
    """Kernels move them 16 bytes at a time."""
    rank, (x, ids, weights) = make_rank(BF16), inputs()
    batch = rank.dispatch(x, ids, weights)
    call = {
        "x": lambda one: rank.dispatch(one, ids, weights),
        "rows": lambda one: rank.combine(one, batch),
        "out": lambda one: rank.combine(x, batch, out=one),
    }[name]
    raw = torch.empty(x.numel() + 16, dtype=torch.bfloat16)
    begin = -raw.data_ptr() % 16 // 2
    aligned, two_bytes_behind = (raw[begin + shift :][: x.numel()].view(x.shape) for shift in (0, 1))
    call(aligned)
    rule = rf"^{name}\.data_ptr\(\) = .*: must be a multiple of 16 bytes"
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        call(two_bytes_behind)


@pytest.mark.parametrize("name", ["tokens", "scales", "headers"])
def test_output_buffers_begin_at_a_multiple_of_16_bytes(rank: Communicator, launches: Launches, name: str) -> None:
    out = rank.allocate(16)
    tensor = getattr(out, name)
    raw = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    shifted = raw[-raw.data_ptr() % 16 + 8 :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    with launches.forbidden(), pytest.raises(EPInputError, match=rf"out\.{name}.*16"):
        rank.dispatch(*inputs(), out=replace(out, **{name: shifted}))


def cut(out: DispatchBuffers, rows: int) -> DispatchBuffers:
    """The first rows of buffers."""
    return replace(out, tokens=out.tokens[:rows], src_info=out.src_info[:rows])


def test_output_buffers_have_whole_groups_of_rows(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(replace(CFG, row_alignment=16))
    out = rank.allocate(100)
    assert out.tokens.shape[0] == 112
    rule = r"out.tokens.shape\[0\] = 100: must be a multiple of row_alignment = 16"
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.dispatch(*inputs(), out=cut(out, 100))
    with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.row_counts"):
        rank.dispatch(*inputs(), out=replace(out, row_counts=out.row_counts[:-1]))


def test_an_output_overlaps_nothing_that_the_call_reads(make_rank: MakeRank, launches: Launches) -> None:
    plain, (_, ids, weights) = make_rank(BF16), inputs()
    buffers = plain.allocate()
    with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.tokens: shares memory with x"):
        plain.dispatch(buffers.tokens[3:8], ids, weights, out=buffers)
    rank = make_rank()
    batch = rank.dispatch(*inputs())
    rows = expert_rows(batch)
    with launches.forbidden(), pytest.raises(EPInputError, match="out: shares memory with rows"):
        rank.combine(rows, batch, out=rows[4:9])
    rank.combine(rows[5:], batch, out=rows[:5])


def test_output_buffers_of_inference_mode_are_refused_outside_of_it(rank: Communicator, launches: Launches) -> None:
    """Also where they were checked before."""
    with torch.inference_mode():
        buffers = rank.allocate()
        rank.dispatch(*inputs(), out=buffers)
    with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.tokens.*inference"):
        rank.dispatch(*inputs(), out=buffers)
