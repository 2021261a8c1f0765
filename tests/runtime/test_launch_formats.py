"""With which sizes, strides and types of outputs a communicator on a GPU launches kernels, by format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.types import ROW_IDS, RowIds
from cute_ep.layouts.maps.arena import message_map, segment_words
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import ATOM, LINEAR, TRANSPOSED, scale_map
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, DISPATCH_OPERATIONS, NO_HOOKS, PIPED_KERNELS
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.parts import load_kernels
from tests.fake_gpu import CFG, EveryVariant, Launches, MakeRank, address, inputs

SCALED = [name for name, record in FORMATS.items() if record.scale]


@pytest.mark.parametrize(
    ("fmt", "layout"), [(f, l) for f, one in FORMATS.items() for l in one.scale_layouts or (None,)]
)
def test_kernels_are_given_sizes_and_strides_of_the_format(
    make_rank: MakeRank, launches: Launches, fmt: str, layout: str | None
) -> None:
    """Only the kernels that send are made for a format."""
    record = FORMATS[fmt]
    rank = make_rank(replace(CFG, dispatch_format=fmt, scale_layout=layout, row_alignment=16))
    batch = rank.dispatch(*inputs())
    rank.dispatch_wait(rank.dispatch_async(*inputs()))
    assert [launch.variant.format for launch in launches] == [fmt, fmt, None]
    message = message_map(record.payload_bytes(128), record.scale_bytes(128), record.row_scale_bytes)
    offsets = (message.scales.offset, message.row_scale.offset)
    for launch in launches:
        assert launch.arguments["wire.segment_words"] == segment_words(record)
        assert launch.values("wire.payload_bytes", "wire.scale_bytes") == (
            record.payload_bytes(128),
            record.scale_bytes(128),
        )
        assert launch.values("wire.scales_at", "wire.row_scale_at") == offsets
        assert launch.arguments["wire.row_scale_bytes"] == record.row_scale_bytes
    for launch in (launches.only("dispatch_wait"), launches.first()):
        given = launch.arguments
        assert given["out.row_alignment"] == 16
        assert given["out.has_tiles"] == (layout in (ATOM, TRANSPOSED)), "rows of 16 are a multiple of 4"
        if layout is None:
            assert set(launch.record("scales")) == {0}
            continue
        places = scale_map(layout, record.scale_bytes(128), given["out.capacity"])
        strides = ("inner", "middle", "outer", "step", "words")
        assert [given[f"scales.{name}"] for name in strides] == [getattr(places, name) for name in strides]
        assert given["scales.alignment"] == (128 if layout == ATOM else 16)
        assert (given["out.scales_offsets"] != 0) == (layout == ATOM)
    outputs = {"scales.data": batch.scales, "out.row_scales": batch.row_scales, "out.tokens": batch.tokens}
    for name, tensor in outputs.items():
        assert launches.first().arguments.get(name, 0) == address(tensor), name
    assert launches.first().arguments["out.row_counts"] == batch.row_counts.data_ptr()


@pytest.mark.parametrize("ids", ROW_IDS)
@pytest.mark.parametrize("zeros", [False, True])
def test_kernels_are_told_types_of_ids_and_zeros(
    make_rank: MakeRank, launches: Launches, ids: RowIds, zeros: bool
) -> None:
    options = {"row_order": "rank_major", "row_ids": ids, "zero_padding": zeros}
    batch = make_rank(replace(CFG, dispatch_format="bf16", **options)).dispatch(*inputs())
    assert launches.only().values("out.wide_ids", "out.zeroed") == (ids == "int64", zeros)
    assert batch.row_expert_ids is not None and batch.row_expert_ids.dtype == getattr(torch, ids)


@pytest.mark.parametrize("layout", [ATOM, LINEAR, TRANSPOSED])
def test_blocks_are_as_far_apart_as_they_are_large(make_rank: MakeRank, launches: Launches, layout: str) -> None:
    """In rows, and in scale rows; those of a transposed block are of a matrix of its own."""
    fmt, size = ("fp8" if layout == TRANSPOSED else "nvfp4"), 256
    cfg = replace(CFG, dispatch_format=fmt, scale_layout=layout, block_rows=size)
    rank = make_rank(cfg)
    batch = rank.dispatch(*inputs())
    given, words = launches.first().arguments, -(-FORMATS[fmt].scale_bytes(128) // 4)
    assert batch.tokens.shape[0] == given["out.capacity"] == cfg.local_experts * size
    assert (given["out.blocks"], given["out.row_alignment"], given["out.has_tiles"]) == (1, size, 0)
    assert given["scales.alignment"] == (size * words if layout == TRANSPOSED else size)
    assert given["scales.step"] == {ATOM: 128, LINEAR: 1, TRANSPOSED: size}[layout]


@pytest.mark.parametrize("fmt", SCALED)
def test_quantised_rows_are_sent_by_the_kernels_of_bf16_which_only_move(
    make_rank: MakeRank, launches: Launches, fmt: str
) -> None:
    rank, (x, ids, weights) = make_rank(replace(CFG, dispatch_format=fmt)), inputs()
    ready = reference.quantize(x, fmt)
    given = {"x": ready.payload, "scales": ready.scales, "row_scales": ready.row_scales}
    rank.dispatch(topk_ids=ids, router_weights=weights, **given)
    rank.dispatch_wait(rank.dispatch_async(topk_ids=ids, **given))
    assert launches.kernels == ["dispatch", "dispatch_async", "dispatch_wait"]
    assert [launch.variant.format for launch in launches] == ["bf16", "bf16", None]
    for sent in (launches.first(), launches.only("dispatch_async")):
        assert sent.values("input.x", "input.scales") == (ready.payload.data_ptr(), ready.scales.data_ptr())
        assert sent.arguments["input.row_scales"] == address(ready.row_scales)
        assert sent.arguments["wire.payload_bytes"] == FORMATS[fmt].payload_bytes(128)


@pytest.mark.usefixtures("make_rank")
def test_bf16_rows_need_no_second_kernel_that_only_moves() -> None:
    loaded = load_kernels(replace(CFG, dispatch_format="bf16"), torch.device("cpu"), EveryVariant(), NO_HOOKS)
    assert set(loaded) == {*DISPATCH_OPERATIONS, *COMBINE_KERNELS, *PIPED_KERNELS}


def test_a_number_as_global_scale_becomes_a_tensor(rank: Communicator, launches: Launches) -> None:
    rank.dispatch(*inputs(), 2.0)
    assert launches.only().arguments["input.global_scale"] != 0
