"""Records of kernel arguments (`cute_ep.layouts.maps.arguments`) from a configuration and from tensors."""

from __future__ import annotations

import torch

from cute_ep.api.buffers import BUFFERS, DispatchBuffers
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.tensors import row_vectors
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.layouts.maps.arena import message_of, segment_words
from cute_ep.layouts.maps.arguments import Batch, Group, Ids, Input, Output, Rows, Scales, SharedExpert, Sums, Wire
from cute_ep.layouts.maps.routing import division_magic
from cute_ep.layouts.maps.scales import has_tiles, scale_map

OUT_TYPES = {dtype: int(number) for dtype, number in OUTPUT_TYPES.items()}
IS_WIDE = {torch.int32: 0, torch.int64: 1}
NO_IDS = Ids(0, 0)
NO_INPUT = Input(0, 0, 0, 0, 0, 0, 0, 0, 0)
NO_BATCH = Batch(0, 0, 0)
NO_SCALES = Scales(0, 0, 0, 0, 0, 0, 0)
NO_SHARED = SharedExpert(0, 0, 0)
NO_SUMS = Sums(0, 0, 0, 0, 0, 0, 0)


def address(tensor: torch.Tensor | None) -> int:
    """Device address of a tensor, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def group_record(cfg: EPConfig, rank: int, arena: int, status: int) -> Group:
    """What all launches of a rank share; `arena` and `status` are addresses."""
    own, _ = cfg.place(rank)
    return Group(
        arena=arena,
        status=status,
        timeout_ns=int(cfg.timeout_s * 1e9),
        rank=own,
        ranks=cfg.peers,
        ranks_magic=division_magic(cfg.peers),
        experts=cfg.peers * cfg.local_experts,
        first_expert=(rank - own) * cfg.local_experts,
        all_experts=cfg.num_experts,
        local_experts=cfg.local_experts,
        local_experts_magic=division_magic(cfg.local_experts),
        top_k=cfg.top_k,
        top_k_magic=division_magic(cfg.top_k),
        max_tokens=cfg.max_tokens_per_peer,
        hidden=cfg.hidden,
    )


def wire_record(cfg: EPConfig) -> Wire:
    """Bytes of the rows that a group dispatches."""
    fmt, message = cfg.format, message_of(cfg.format, cfg.hidden)
    return Wire(
        payload_bytes=fmt.payload_bytes(cfg.hidden),
        scale_bytes=fmt.scale_bytes(cfg.hidden),
        row_scale_bytes=fmt.row_scale_bytes,
        scales_at=message.scales.offset,
        row_scale_at=message.row_scale.offset,
        segment_words=segment_words(fmt),
    )


def ids_record(topk_ids: torch.Tensor) -> Ids:
    """Expert ids of either type."""
    return Ids(topk_ids.data_ptr(), IS_WIDE[topk_ids.dtype])


def shared_record(cfg: EPConfig, rank: int, tokens: int) -> SharedExpert:
    """The part of the shared expert in a rank's `tokens` tokens."""
    if not cfg.fused_shared_expert:
        return NO_SHARED
    return SharedExpert(1, *cfg.shared_slice(tokens, rank))


def input_record(
    given: DispatchInput, global_scale: torch.Tensor | None, message_slices_log2: int, returns: int
) -> Input:
    """What a rank dispatches; the numbers as of `Input`."""
    x, _, router_weights, _, scales, row_scales, _ = given
    return Input(
        x.data_ptr(),
        row_vectors(x),
        address(scales),
        address(row_scales),
        address(router_weights),
        address(global_scale),
        x.size(0),
        message_slices_log2,
        returns,
    )


WRITTEN = tuple(name for name in BUFFERS if name not in ("scales", "frame_ids"))
"""Tensors of `DispatchBuffers` of which `Output` has the addresses, by the same names."""


def output_record(cfg: EPConfig, out: DispatchBuffers) -> Output:
    """Buffers to receive into, but for their scales."""
    capacity = out.tokens.shape[0]
    alignment = cfg.alignment if cfg.block_rows is None else capacity // cfg.groups
    return Output(
        **out.addresses(WRITTEN),
        blocks=int(cfg.block_rows is not None),
        row_alignment=alignment,
        aligned=int(cfg.block_rows is not None or alignment != 1),
        capacity=capacity,
        has_tiles=int(cfg.block_rows is None and has_tiles(cfg.scales_as, capacity, alignment)),
        wide_ids=int(cfg.is_rank_major and cfg.row_ids == "int64"),
        zeroed=int(out.zeroed_by(cfg)),
    )


def scales_record(
    layout: str | None, scale_bytes: int, scales: torch.Tensor | None, rows: int, alignment: int
) -> Scales:
    """Scale factors of `rows` rows of `scale_bytes`, in a layout; None: there are none. The scale rows of an expert
    start at multiples of `alignment`."""
    if layout is None:
        return NO_SCALES
    places = scale_map(layout, scale_bytes, rows)
    return Scales(address(scales), places.inner, places.middle, places.outer, places.step, places.words, alignment)


def batch_record(dispatched: Dispatched) -> Batch:
    """What dispatch has left for combine_send."""
    return Batch(**dispatched.buffers.addresses(Batch._fields))


def rows_record(rows: torch.Tensor, dispatched: Dispatched, elsewhere: int) -> Rows:
    """Experts' outputs. Rows that dispatch had no room for are lost whatever `rows` holds there. They are read from
    row 0: where there is none, from address `elsewhere`, at which there is as much memory."""
    return Rows(rows.data_ptr() or elsewhere, min(rows.size(0), dispatched.buffers.tokens.size(0)))


def sums_record(
    dispatched: Dispatched, weights: torch.Tensor | None, out: torch.Tensor, options: SumOptions, flagged: bool
) -> Sums:
    """Where a rank sums rows that come home with flags, or as Lamport rows."""
    return Sums(
        out.data_ptr(),
        address(weights),
        address(options.epilogue_data),
        OUT_TYPES[out.dtype],
        dispatched.topk_ids.size(0),
        dispatched.return_slices_log2,
        int(flagged),
    )
