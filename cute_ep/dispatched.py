"""What dispatch returns and combine needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_ep.config import EPConfig
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.scales import ATOM_COLUMNS, ATOM_ROWS, scale_blocks, scale_columns


@dataclass(frozen=True)
class DispatchBuffers:
    """Memory of one dispatch output, to be reused call after call (see `Communicator.allocate`).

    Attributes:
        tokens: [capacity, hidden] bfloat16, or [capacity, payload bytes] uint8 (nvfp4: element 0 in the low nibble).
        scales: block scale factors in the 128x4 atom layout, [blocks, column tiles, 32, 4, 4] uint8 (bits of the
            format's scale type); rows that pad an expert's last block are zero. None when the format has none.
        row_offsets: [L + 1] uint32; local expert e owns rows [row_offsets[e], row_offsets[e + 1]).
        scales_offsets: [L] uint32; the first 128-row scale block of expert e is
            row_offsets[e] // 128 + scales_offsets[e]. None when the format has no scales.
        expert_ids: [L] int32, 0 .. L-1.
        src_info: [capacity, 2] int32, (token index on its source rank, top-k slot) of each row.
        num_rows: [1] int32.
        row_map: [R, Tmax, K] int32, the row of entry (source, token, k), -1 where this rank has none.
        headers: [R, 4] int32, one header a source (`cute_ep.layouts.arena.HeaderWord`).
        weights: [R, Tmax, K] float32, the router weights that travelled; defined where `row_map` has a row and the
            source gave weights. None from `reference.dispatch` when no rank gave any.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    row_offsets: torch.Tensor
    scales_offsets: torch.Tensor | None
    expert_ids: torch.Tensor
    src_info: torch.Tensor
    num_rows: torch.Tensor
    row_map: torch.Tensor
    headers: torch.Tensor
    weights: torch.Tensor | None

    @classmethod
    def allocate(cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None) -> DispatchBuffers:
        """Uninitialised buffers for `capacity` rows (default `cfg.max_rows`, which no routing can exceed)."""
        rows = cfg.max_rows if capacity is None else capacity
        fmt, experts = cfg.format, cfg.local_experts
        routed = (cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        scales = scales_offsets = None
        if fmt.scale:
            tiles = scale_columns(fmt.scale_bytes(cfg.hidden))
            scales = empty(scale_blocks(rows, experts), tiles, 32, ATOM_ROWS // 32, ATOM_COLUMNS, dtype=torch.uint8)
            scales_offsets = empty(experts, dtype=torch.uint32)
        return cls(
            tokens=empty(rows, cfg.hidden, dtype=torch.bfloat16)
            if fmt.bits == 16
            else empty(rows, fmt.payload_bytes(cfg.hidden), dtype=torch.uint8),
            scales=scales,
            row_offsets=empty(experts + 1, dtype=torch.uint32),
            scales_offsets=scales_offsets,
            expert_ids=empty(experts, dtype=torch.int32),
            src_info=empty(rows, 2, dtype=torch.int32),
            num_rows=empty(1, dtype=torch.int32),
            row_map=empty(*routed, dtype=torch.int32),
            headers=empty(cfg.world_size, len(HeaderWord), dtype=torch.int32),
            weights=empty(*routed, dtype=torch.float32),
        )


@dataclass(frozen=True)
class Dispatched(DispatchBuffers):
    """One rank's share of a dispatched batch, expert-major. N = `num_rows` rows are valid, all on the device.

    Attributes (besides those of the buffers that hold it):
        topk_ids: this rank's own [T, K] int32 argument.
        router_weights: this rank's own [T, K] float32 argument, or None.
        tokens_per_chunk: tokens that share one completion flag; the same number in this rank's header.
    """

    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    tokens_per_chunk: int
