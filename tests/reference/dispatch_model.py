"""A scalar model of dispatch, which places one row at a time, and small deployments."""

from __future__ import annotations

import numpy as np
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.scales import scale_shape
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs

Entry = tuple[int, int, int]
"""(index of the source among the rank's sources, token, slot)."""


def groups_in_order(cfg: EPConfig, topk_ids: list[torch.Tensor], rank: int) -> list[list[Entry]]:
    """The rows of every group of `rank`, by the definition of the row order."""
    local = cfg.num_experts // cfg.world_size
    ids = [tensor.tolist() for tensor in topk_ids]
    sources = [rank] if cfg.skip_a2a else list(range(cfg.world_size))
    groups: list[list[Entry]] = []
    if cfg.fused_shared_expert:
        own = range(len(ids[rank]))
        if cfg.skip_a2a:
            own = np.array_split(own, cfg.world_size)[rank].tolist()
        groups.append([(sources.index(rank), token, cfg.top_k) for token in own])
    for expert in range(rank * local, rank * local + local):
        groups.append([
            (index, token, slot)
            for index, source in enumerate(sources)
            for token in range(len(ids[source]))
            for slot in range(cfg.top_k)
            if ids[source][token][slot] == expert
        ])  # fmt: skip
    return groups


def up_to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def check_scales(cfg: EPConfig, batch: Dispatched, want: torch.Tensor, padded: list[int], name: str) -> None:
    """Compare with the row-major scale factors [rows, columns] of the rows of all groups, padding included."""
    rows, columns = want.shape
    if cfg.scales_as == "atom128x4":
        first_block = [sum(-(-count // 128) for count in padded[:group]) for group in range(len(padded) + 1)]
        assert batch.scales.shape[0] == first_block[-1] <= scale_shape("atom128x4", columns, 1, rows, len(padded))[0]
        offsets, blocks = batch.row_offsets.tolist(), batch.scales_offsets
        assert blocks.dtype == torch.int32
        assert [offsets[g] // 128 + block for g, block in enumerate(blocks.tolist())] == first_block[:-1]
        atoms, row = batch.scales.clone(), 0
        for group, count in enumerate(padded):
            for at in range(count):
                block = atoms[first_block[group] + at // 128, :, at % 32, at % 128 // 32]
                assert_bits(block.flatten()[:columns], want[row], name + f"scales of row {row}")
                block.view(-1, 4)[...] = 0
                row += 1
        assert not atoms.any(), "padding must be zero"
        return
    assert batch.scales_offsets is None
    if cfg.scales_as == "transposed":
        assert_bits(batch.scales, want.T.contiguous(), name + "scales")
        return
    assert_bits(batch.scales[:, :columns], want, name + "scales")
    assert not batch.scales[:, columns:].any()
    assert batch.scales.shape == (rows, columns if want.dtype == torch.float32 else up_to_multiple(columns, 4))


def range_of(group: list[tuple[int, int, int]], source: int) -> tuple[int, int]:
    """(rows of a source in a group, rows of sources before it)."""
    of = [entry[0] for entry in group]
    return of.count(source), sum(one < source for one in of)


def check_dispatch(
    cfg: EPConfig,
    xs: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    input_scales: list | None = None,
    router_weights: list | None = None,
) -> list[Dispatched]:
    """Compare `reference.dispatch` with a model that places one row at a time."""
    results = reference.dispatch(cfg, xs, topk_ids, input_scales, router_weights)
    assert len(results) == cfg.world_size
    factors = [1.0 if scale is None else scale for scale in input_scales or [1.0] * cfg.world_size]
    encoded = [reference.quantize(x, cfg.format, factor) for x, factor in zip(xs, factors, strict=True)]
    given_weights = router_weights or [None] * cfg.world_size
    for rank, batch in enumerate(results):
        name = f"rank {rank} "
        sources = [rank] if cfg.skip_a2a else list(range(cfg.world_size))
        groups = groups_in_order(cfg, topk_ids, rank)
        counts = [len(group) for group in groups]
        padded = [up_to_multiple(count, cfg.alignment) for count in counts]
        rows = [entry for group in groups for entry in group + [None] * (-len(group) % cfg.alignment)]
        assert len(groups) == cfg.groups
        assert batch.num_rows.tolist() == [len(rows)] and len(rows) <= cfg.max_rows
        starts = [sum(padded[:group]) for group in range(cfg.groups + 1)]
        assert_bits(batch.row_offsets, torch.tensor(starts).int(), name + "row_offsets")
        assert_bits(batch.row_counts, torch.tensor(counts, dtype=torch.int32), name + "row_counts")
        assert_bits(batch.expert_ids, torch.arange(cfg.groups).int(), name + "expert_ids")
        info = [(-1, -1) if entry is None else entry[1:] for entry in rows]
        assert_bits(batch.src_info, torch.tensor(info, dtype=torch.int32).reshape(-1, 2), name + "src_info")
        row_map = torch.full((cfg.peers, cfg.max_tokens_per_rank, cfg.top_k), -1, dtype=torch.int32)
        for row, entry in enumerate(rows):
            if entry is not None and entry[2] < cfg.top_k:
                row_map[entry] = row
        assert_bits(batch.row_map, row_map, name + "row_map")

        def gathered(field: str, rows=rows, sources=sources) -> torch.Tensor | None:
            values = [getattr(one, field) for one in encoded]
            if values[0] is None:
                return None
            zero = torch.zeros_like(torch.empty(1, *values[0].shape[1:], dtype=values[0].dtype))
            taken = [zero if entry is None else values[sources[entry[0]]][entry[1] : entry[1] + 1] for entry in rows]
            return torch.cat([values[0][:0], *taken])

        assert_bits(batch.tokens, gathered("payload"), name + "tokens")
        assert (batch.row_scales is None) == (not cfg.format.row_scale)
        if cfg.format.row_scale:
            assert_bits(batch.row_scales, gathered("row_scales"), name + "row_scales")
        if cfg.format.scale is None:
            assert batch.scales is None and batch.scales_offsets is None
        else:
            check_scales(cfg, batch, gathered("scales"), padded, name)
        counts = [xs[source].shape[0] for source in sources]
        header = [
            [counts[at], given_weights[source] is not None, 0, 8 * (counts[at] > 1024)]
            for at, source in enumerate(sources)
        ]
        assert_bits(batch.headers, torch.tensor(header, dtype=torch.int32), name + "headers")
        assert batch.return_slices_log2 == 0, "rows in one slice"
        weights, row_weights = torch.zeros(row_map.shape), torch.zeros(len(rows))
        for row, entry in enumerate(rows):
            if entry is not None:
                row_weights[row] = 1
                if entry[2] < cfg.top_k:
                    given = given_weights[sources[entry[0]]]
                    weights[entry] = row_weights[row] = 1 if given is None else given[entry[1:]]
        assert_bits(batch.weights, weights, name + "weights")
        assert_bits(batch.row_weights, row_weights, name + "row_weights")
        assert batch.row_expert_ids is None
        ranges = [range_of(group, source) for group in groups for source in range(len(sources))]
        assert_bits(batch.source_ranges.flatten(0, 1), torch.tensor(ranges, dtype=torch.int32), name + "source_ranges")
        assert batch.topk_ids is topk_ids[rank] and batch.router_weights is given_weights[rank]
    return results


def small(**changes) -> EPConfig:
    values = dict(hidden=32, num_experts=4, top_k=2, max_tokens_per_rank=3, world_size=2, dispatch_format="nvfp4")
    return EPConfig(**(values | changes))


def arguments(cfg: EPConfig, tokens: int = 2) -> tuple[list, list, list]:
    inputs = make_inputs(cfg, [tokens] * cfg.world_size, "uniform", 0)
    return [i.x for i in inputs], [i.topk_ids for i in inputs], [i.router_weights for i in inputs]
