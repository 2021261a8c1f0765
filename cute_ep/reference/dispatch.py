"""Bit-exact model of dispatch: every byte of every rank's output, in plain torch, slow and obvious on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cute_ep.api.buffers import DispatchBuffers, routed_shape
from cute_ep.api.calls import DispatchInput
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes
from cute_ep.api.row_tensors import QuantizedRows, as_own_types
from cute_ep.api.tensors import check_tensor
from cute_ep.api.validate import check_input_scale, check_tokens, check_unscaled
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, pack_messages, pack_returns
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED
from cute_ep.reference.formats import join_rows, quantize

# ---- layouts of scale factors


def _atom_offsets(row_counts: Sequence[int], columns: int, device: torch.device) -> tuple[torch.Tensor, int, int]:
    """([rows, columns] int64 byte offsets of the expert-major scale factors, blocks, column tiles)."""
    tiles, first_block, parts = -(-columns // 4), 0, [torch.empty(0, dtype=torch.int64)]
    for count in row_counts:
        row = torch.arange(count)
        parts.append((first_block + row // 128) * tiles * 512 + row % 32 * 16 + row % 128 // 32 * 4)
        first_block += -(-count // 128)
    column = torch.arange(columns)
    offsets = torch.cat(parts)[:, None] + (column // 4 * 512 + column % 4)[None, :]
    return offsets.to(device), first_block, tiles


@no_modes()
def swizzle_scales(scales: torch.Tensor, row_counts: Sequence[int]) -> torch.Tensor:
    """Row-major scale factors to the 128x4 atom layout; padding rows and padding columns are zero.

    With tiles = ceil(columns / 4), scale factor c of row r of a group that begins at block B is at byte
    ((B + r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4;
    a group of n rows owns ceil(n / 128) blocks.

    Args:
        scales: [rows, columns] uint8, grouped.
        row_counts: rows of each group; their sum must be `rows`.

    Returns:
        [blocks, tiles, 32, 4, 4] uint8.

    Raises:
        EPInputError: shape or type is wrong.
    """
    check_tensor("scales", scales, shape=(sum(row_counts), None), dtype=torch.uint8)
    offsets, blocks, tiles = _atom_offsets(row_counts, scales.shape[1], scales.device)
    atoms = torch.zeros(blocks * tiles * 512, dtype=torch.uint8, device=scales.device)
    atoms[offsets] = scales
    return atoms.view(blocks, tiles, 32, 4, 4)


@no_modes()
def unswizzle_scales(atoms: torch.Tensor, row_counts: Sequence[int], columns: int) -> torch.Tensor:
    """Inverse of `swizzle_scales`: [sum(row_counts), columns] uint8. Blocks beyond those needed are not read.

    Raises:
        EPInputError: shape or type is wrong, or there are too few blocks.
    """
    offsets, blocks, tiles = _atom_offsets(row_counts, columns, atoms.device)
    check_tensor("atoms", atoms, shape=(None, tiles, 32, 4, 4), dtype=torch.uint8)
    if atoms.shape[0] < blocks:
        raise EPInputError(f"atoms.shape[0] = {atoms.shape[0]}: rows {list(row_counts)} need {blocks} blocks")
    return atoms.flatten()[offsets]


@no_modes()
def arrange_scales(scales: torch.Tensor, layout: str, row_counts: Sequence[int]) -> torch.Tensor:
    """Row-major scale factors [rows, columns], uint8 or float32, in a layout of `cute_ep.layouts.maps.scales`.

    Args:
        row_counts: rows of each group, padding included; their sum is `rows`.

    Returns:
        atom128x4: `swizzle_scales`. transposed: [columns, rows]. linear: [rows, columns], uint8 padded with zero
        columns to a multiple of 4.
    """
    if layout == ATOM:
        return swizzle_scales(scales, row_counts)
    if layout == TRANSPOSED:
        return scales.t().contiguous()
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] * scales.itemsize % 4))


def rows_first(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Scale factors of blocks as a view whose first axes are, one within the other, the rows."""
    if layout == ATOM:
        return scales.permute(0, 3, 2, 1, 4)
    return scales.transpose(1, 2) if layout == TRANSPOSED else scales


# ---- dispatch


def lower_halves(topk_ids: torch.Tensor) -> torch.Tensor:
    """What readers take ids for: int32, of int64 the lower half (`find_wrong_id` tells where that is not the id)."""
    return topk_ids.to(torch.int32)


def find_wrong_id(cfg: EPConfig, topk_ids: torch.Tensor) -> tuple[int, int] | None:
    """(index, id) of the first of `topk_ids.flatten()` that is neither -1 (masked) nor in [0, num_experts)."""
    flat = topk_ids.flatten()
    wrong = ((flat < -1) | (flat >= cfg.num_experts)).nonzero().flatten()
    return (int(wrong[0]), int(flat[wrong[0]])) if wrong.numel() else None


def check_expert_ids(cfg: EPConfig, topk_ids: torch.Tensor) -> None:
    """EPInputError unless every id is -1 (masked) or in [0, num_experts). Reads the tensor."""
    if found := find_wrong_id(cfg, topk_ids):
        index, value = found
        token, slot = divmod(index, cfg.top_k)
        raise EPInputError(f"topk_ids[{token}, {slot}] = {value}: must be -1 or in [0, {cfg.num_experts})")


def per_rank(name: str, values: Sequence | None, ranks: int) -> list:
    """`values` as a list of one entry a rank, None for None; EPInputError when it has another length."""
    if values is None:
        return [None] * ranks
    if len(values) != ranks:
        raise EPInputError(f"len({name}) = {len(values)}: must be world_size = {ranks}")
    return list(values)


@dataclass(frozen=True, eq=False)
class Source:
    """What one rank brings to a dispatch: its T encoded tokens, [T, top_k] ids and weights (or None), and the rows that
    it sends to other nodes (or None)."""

    rows: QuantizedRows
    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    frame: int | None = None

    @property
    def tokens(self) -> int:
        return self.topk_ids.shape[0]


@no_modes()
def encode_source(cfg: EPConfig, given: DispatchInput) -> Source:
    """Check and encode what one rank is given, with `scales` rows that are quantised already. Ids are not read: one out
    of range is as -1."""
    check_tokens(cfg, given)
    if given.scales is not None:
        check_unscaled(given.input_scale)
    check_input_scale(cfg.format, given.input_scale)
    return encode_checked(cfg, given)


def encode_checked(cfg: EPConfig, given: DispatchInput) -> Source:
    """As `encode_source`, of arguments that were checked."""
    if given.scales is None:
        rows = quantize(given.x.contiguous(), cfg.format, 1.0 if given.input_scale is None else given.input_scale)
    else:
        rows = QuantizedRows(given.x, given.scales, given.row_scales)
    return Source(as_own_types(rows, cfg.format), given.topk_ids, given.router_weights, given.frame)


@no_modes()
def dispatch(
    cfg: EPConfig,
    xs: Sequence[torch.Tensor | None],
    topk_ids: Sequence[torch.Tensor],
    input_scales: Sequence[float | torch.Tensor | None] | None = None,
    router_weights: Sequence[torch.Tensor | None] | None = None,
    prequantized: Sequence[QuantizedRows | None] | None = None,
    frame: int | None = None,
) -> list[Dispatched]:
    """What every rank receives, rows ordered by (group, source rank, token, slot); over nodes by (group, peer, node,
    token, slot), of sources (node, peer), and a token of `src_info` is node * max_tokens_per_rank + its index.

    Duplicate experts of a token make one row each. A masked slot (-1) makes none. With `skip_a2a` every rank is its
    only source, and an expert of another rank makes no row. The rows that pad a group are zeros in every tensor, with
    src_info (-1, -1), also without `zero_padding`. With blocks each ends in such rows.

    Args:
        xs: per rank [T_r, hidden] bfloat16, T_r <= max_tokens_per_rank.
        topk_ids: per rank [T_r, top_k] int32 or int64, -1 or a global expert id.
        input_scales: per rank the global scale of its own tokens (see `quantize`); None: 1.0 everywhere.
        router_weights: per rank [T_r, top_k] float32 or None; None: no weights anywhere.
        prequantized: per rank tokens that are encoded already, whose bytes travel as they are (then `xs` of this rank
            is not read and may be None), or None; None: no rank's are.
        frame: as of `EPCommunicator.dispatch`; the token in `src_info` counts nodes in frames.

    Returns:
        One `Dispatched` a rank, all tensors with exactly `num_rows` rows (scales: exactly the rows or blocks in use),
        `return_slices_log2` 0, and headers of an unknown round. `weights` is 0 where this rank has no row.

    Raises:
        EPInputError: an argument of some rank breaks its rule, or an expert id is out of range.
    """
    named = {
        "xs": xs,
        "topk_ids": topk_ids,
        "input_scales": input_scales,
        "router_weights": router_weights,
        "prequantized": prequantized,
    }
    columns = [per_rank(name, values, cfg.world_size) for name, values in named.items()]
    sources = {}
    for rank, (x, ids, input_scale, weights, ready) in enumerate(zip(*columns, strict=True)):
        payload, scales, row_scales = (x, None, None) if ready is None else ready
        sources[rank] = encode_source(cfg, DispatchInput(payload, ids, weights, input_scale, scales, row_scales, frame))
    for source in sources.values():
        check_expert_ids(cfg, source.topk_ids)
    return [receive(cfg, rank, sources) for rank in range(cfg.world_size)]


def _brought(cfg: EPConfig, rank: int, sources: Mapping[int, Source]) -> list[Source]:
    """What each peer of rank `rank` brings to it: its own tokens, over nodes those of all ranks of its rail."""
    if cfg.nodes == 1:
        return [sources[rank]] if cfg.skip_a2a else [sources[peer] for peer in range(cfg.world_size)]
    return [_rail(cfg, [sources[one] for one in range(peer, cfg.world_size, cfg.peers)]) for peer in range(cfg.peers)]


def _rail(cfg: EPConfig, sources: Sequence[Source]) -> Source:
    """The tokens of a rail's ranks, for each a frame, at its end without entries."""
    ids, weights, rows = [], [], []
    for source in sources:
        more, given = cfg.frame_rows(source.frame) - source.tokens, source.router_weights
        if given is None:
            given = torch.ones(source.topk_ids.shape, dtype=torch.float32, device=source.topk_ids.device)
        ids.append(_extended(lower_halves(source.topk_ids), more, -1))
        weights.append(_extended(given, more, 1))
        rows.append(QuantizedRows(*(None if field is None else _extended(field, more, 0) for field in source.rows)))
    return Source(join_rows(rows), torch.cat(ids), torch.cat(weights))


def _extended(field: torch.Tensor, more: int, value: int) -> torch.Tensor:
    """A tensor with `more` rows of `value` at its end."""
    rows = torch.zeros(more, *field.shape[1:], dtype=field.dtype, device=field.device)
    if value:
        rows.fill_(value)
    return torch.cat([field, rows])


def _entries(cfg: EPConfig, rank: int, sources: Sequence[Source], tokens_of_rank: int) -> torch.Tensor:
    """[rows, 4] int64 (group, index of the source, token, slot) of the rows of `rank`, which has given
    `tokens_of_rank`, in their order; in rank-major order the slot is the token's last of this rank."""
    device, shared = sources[0].topk_ids.device, int(cfg.fused_shared_expert)
    first, count = cfg.shared_slice(tokens_of_rank, rank)
    token = torch.arange(first, first + count, device=device)
    own_index = torch.full_like(token, cfg.place(rank)[0])
    of_shared = torch.stack([torch.zeros_like(token), own_index, token, torch.full_like(token, cfg.top_k)], dim=1)
    ids = torch.cat([lower_halves(source.topk_ids) for source in sources])
    tokens = torch.cat([torch.arange(source.tokens, device=device) for source in sources])
    index = torch.cat([torch.full((source.tokens,), number, device=device) for number, source in enumerate(sources)])
    mine = (ids >= 0) & (ids // cfg.local_experts == rank)
    if cfg.is_rank_major:
        line = mine.any(1).nonzero().flatten()
        slot = cfg.top_k - 1 - mine.int().flip(1).argmax(1)[line]
        group = index[line]
    else:
        line, slot = mine.nonzero(as_tuple=True)  # source-major, then token-major, slots ascending
        group = ids[line, slot].long() - rank * cfg.local_experts + shared
    table = torch.cat([of_shared, torch.stack([group, index[line], tokens[line], slot], dim=1)])
    return table[table[:, 0].argsort(stable=True)]


def count_rows(cfg: EPConfig, rank: int, sources: Mapping[int, Source]) -> torch.Tensor:
    """[G] int64 rows that arrive for each group of rank `rank`, also those that a block has no room for."""
    entries = _entries(cfg, rank, _brought(cfg, rank, sources), sources[rank].tokens)
    return torch.bincount(entries[:, 0], minlength=cfg.groups)


def _arranged(cfg: EPConfig, scales: torch.Tensor, layout: str, row_counts: Sequence[int]) -> torch.Tensor:
    """`arrange_scales`; of transposed blocks each by itself, [G, columns, block_rows]."""
    if cfg.block_rows is None or layout != TRANSPOSED:
        return arrange_scales(scales, layout, row_counts)
    return scales.view(-1, cfg.block_rows, scales.shape[1]).transpose(1, 2).contiguous()


def _indexable(field: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every device can index."""
    return field.view(torch.uint8) if field.dtype.itemsize == 1 else field


def _header_of(source: Source) -> list[int]:
    """The words of `HeaderWord`: rows in one slice, of an unknown round."""
    messages = pack_messages(0, int(source.router_weights is not None))
    return [source.tokens, messages, 0, pack_returns(0, int(source.tokens > LAMPORT_TOKENS))]


@no_modes()
def receive(cfg: EPConfig, rank: int, sources: Mapping[int, Source]) -> Dispatched:
    """The output of `dispatch` of one rank, from every rank's source (with `skip_a2a` only its own is read)."""
    own = sources[rank]
    device = own.topk_ids.device
    peers = _brought(cfg, rank, sources)
    group, source, token, slot = _entries(cfg, rank, peers, own.tokens).unbind(1)

    counts = torch.bincount(group, minlength=cfg.groups)
    padded = (counts + cfg.alignment - 1) // cfg.alignment * cfg.alignment
    if cfg.block_rows is not None:
        padded = torch.full_like(counts, cfg.block_rows)
    offsets = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    num_rows = int(offsets[-1])
    in_group = torch.arange(group.numel(), device=device) - (counts.cumsum(0) - counts)[group]
    row = torch.where(in_group < padded[group], offsets[group] + in_group, LOST_ROW)
    held = (row != LOST_ROW).nonzero().flatten()
    to = row[held]

    def padded_rows(field: torch.Tensor | None) -> torch.Tensor | None:
        """The rows of all sources, one field of them, in output order with zeros in between."""
        if field is None:
            return None
        placed = torch.zeros(num_rows, *field.shape[1:], dtype=field.dtype, device=device)
        _indexable(placed)[to] = _indexable(field)[(first_token[source] + token)[held]]
        return placed

    first_token = torch.tensor([sum(one.tokens for one in peers[:index]) for index in range(len(peers))], device=device)
    joined = join_rows([one.rows for one in peers])
    scales, layout = padded_rows(joined.scales), cfg.scales_as
    src_info = torch.full((num_rows, 2), -1, dtype=torch.int32, device=device)
    src_info[to] = torch.stack([token, slot], dim=1)[held].int()

    is_entry = slot < cfg.top_k  # else a row of the shared expert
    routed = is_entry.nonzero().flatten()
    row_map = torch.full(routed_shape(cfg), -1, dtype=torch.int32, device=device)
    row_map[source[routed], token[routed], slot[routed]] = row[routed].int()
    given = torch.ones(row_map.shape, dtype=torch.float32, device=device)
    for index, one in enumerate(peers):
        if one.router_weights is not None:
            given[index, : one.tokens] = one.router_weights
    weights = torch.where(row_map >= 0, torch.ones_like(given) if cfg.is_rank_major else given, 0)
    row_weights = torch.zeros(num_rows, dtype=torch.float32, device=device)
    of_entry = given[source, token, slot.clamp(max=cfg.top_k - 1)]
    row_weights[to] = torch.where(is_entry, of_entry, 1)[held]
    row_expert_ids = source_ranges = None
    if cfg.is_rank_major:
        ids = torch.full(row_map.shape, -1, dtype=torch.int32, device=device)
        for index, one in enumerate(peers):
            ids[index, : one.tokens] = lower_halves(one.topk_ids)
        local = torch.where((ids >= 0) & (ids // cfg.local_experts == rank), ids - rank * cfg.local_experts, -1)
        row_expert_ids = torch.full((num_rows, cfg.top_k), -1, dtype=getattr(torch, cfg.row_ids), device=device)
        row_expert_ids[to] = local[source[held], token[held]].to(row_expert_ids.dtype)
        row_weights = torch.zeros(num_rows, cfg.top_k, dtype=torch.float32, device=device)
        row_weights[to] = torch.where(local >= 0, given, 0)[source[held], token[held]]
    else:
        pair = (group * cfg.peers + source)[held]
        rows_of = torch.bincount(pair, minlength=cfg.groups * cfg.peers).view(cfg.groups, cfg.peers)
        source_ranges = torch.stack([rows_of, rows_of.cumsum(1) - rows_of], dim=2).int()

    frame_ids = None
    if cfg.nodes > 1:
        ids, experts = lower_halves(peers[cfg.place(rank)[0]].topk_ids), cfg.num_experts // cfg.nodes
        here = (ids >= 0) & (ids // experts == cfg.node(rank))
        frame_ids = torch.where(here, ids - cfg.node(rank) * experts, -1).int()

    blocks = (padded + 127) // 128
    first_block = blocks.cumsum(0) - blocks
    header = [_header_of(one) for one in peers]
    buffers = DispatchBuffers(
        tokens=padded_rows(joined.payload),
        scales=None if scales is None or layout is None else _arranged(cfg, scales, layout, padded.tolist()),
        row_scales=padded_rows(joined.row_scales),
        row_offsets=offsets.int(),
        row_counts=counts.minimum(padded).int(),
        scales_offsets=(first_block - offsets[:-1] // 128).int() if layout == ATOM else None,
        expert_ids=torch.arange(cfg.groups, dtype=torch.int32, device=device),
        src_info=src_info,
        num_rows=torch.tensor([num_rows], dtype=torch.int32, device=device),
        row_map=row_map,
        headers=torch.tensor(header, dtype=torch.int32, device=device),
        weights=weights,
        row_weights=row_weights,
        row_expert_ids=row_expert_ids,
        source_ranges=source_ranges,
        frame_ids=frame_ids,
    )
    return Dispatched(buffers, rank, own.topk_ids, own.router_weights, return_slices_log2=0, frame=own.frame)
