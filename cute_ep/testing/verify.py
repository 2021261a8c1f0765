"""Bit-exact check of one round on communicators against the reference.

Used by the GPU tests and by `cute-ep verify`. Outputs are poisoned before the call, capacities leave a tail that must
stay untouched, and so must memory behind every output; every byte that the contract defines is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS, DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.layouts.maps.arena import HeaderWord, has_weights, return_slices_log2
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.layouts.maps.scales import TRANSPOSED
from cute_ep.layouts.maps.variants import COMBINE_MODES, CombineMode
from cute_ep.reference.results import stay, write_rows
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits, assert_prefix_and_poison, assert_untouched_behind
from cute_ep.testing.workloads import RankInputs

POISON = 0xA5
SPARE_ROWS = 37
"""Rows of output capacity beyond what arrives, which no kernel may touch."""
GUARD_BYTES = 1 << 16
"""Memory behind every output, which no kernel may touch either."""


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill every byte of `tensor` with POISON."""
    if tensor.numel():
        with_plain_strides(tensor).view(torch.uint8).fill_(POISON)
    return tensor


def guarded(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor and, behind it in its allocation, GUARD_BYTES for `assert_untouched_behind`; all POISON."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = poison(torch.empty(nbytes + GUARD_BYTES, dtype=torch.uint8, device=device))
    return memory[:nbytes].view(dtype).view(shape)


def poisoned_buffers(communicator: Communicator, rows: int) -> DispatchBuffers:
    """Output buffers for `rows` rows plus a tail, each tensor `guarded`, all bytes POISON."""
    capacity = None if communicator.cfg.block_rows else rows + SPARE_ROWS
    shapes = DispatchBuffers.allocate(communicator.cfg, torch.device("meta"), capacity)
    named = {name: getattr(shapes, name) for name in BUFFERS}
    device = communicator.device
    return DispatchBuffers(**{name: t if t is None else guarded(t.shape, t.dtype, device) for name, t in named.items()})


def check_dispatched(actual: Dispatched, expected: Dispatched, cfg: EPConfig, rank: int) -> None:
    """Compare one rank's dispatch output with the reference, byte for byte; padding that is not zeroed with POISON.

    Of the headers: tokens, of a source that has some whether it gave weights, and the slices of this rank's own
    returned rows. How many slices others have is their choice, and the round that of all calls before, neither of which
    the reference makes: `check_headers`.
    Memory behind each tensor must be untouched.

    Raises:
        AssertionError: names the field and the first differing coordinate.
    """
    where = f"rank {rank} "
    for name in ("row_offsets", "row_counts", "scales_offsets", "expert_ids", "num_rows", "source_ranges"):
        if getattr(expected, name) is not None:
            assert_bits(getattr(actual, name), getattr(expected, name), where + name)
    for name in ("tokens", "src_info", "scales", "row_scales", "row_weights"):
        got, want = getattr(actual, name), getattr(expected, name)
        if want is None:
            continue
        if stay(cfg, name, zeroed=actual.buffers.zeroed_by(cfg)):
            filled = poison(torch.empty_like(want, device=got.device))
            write_rows(cfg, name, filled, want.to(got.device), expected.src_info)
            want = filled
        if cfg.block_rows is not None:
            assert_bits(got, want, where + name)
        else:
            if name == "scales" and cfg.scales_as == TRANSPOSED:
                got, want = got.T, want.T
            assert_prefix_and_poison(got, want, POISON, where + name)
    # by source, on the CPU: on a GPU each of these small comparisons would be waited for
    headers, row_map, weights = (
        [getattr(one, name).cpu() for one in (actual, expected)] for name in ("headers", "row_map", "weights")
    )
    for source in range(cfg.peers):
        tokens, header = int(headers[1][source, HeaderWord.TOKENS]), f"{where}headers[{source}]"
        got, want = (one[source] for one in headers)
        assert_bits(got[HeaderWord.TOKENS], want[HeaderWord.TOKENS], f"{header}.tokens")
        if tokens:
            got, want = (has_weights(one[HeaderWord.MESSAGES]) for one in (got, want))
            assert_bits(got, want, f"{header}.has_weights")
        got, want = (one[source, :tokens] for one in row_map)
        assert_bits(got, want, f"{where}row_map[{source}]")
        mine = (want >= 0) & (want != LOST_ROW)
        got, want = (one[source, :tokens][mine] for one in weights)
        assert_bits(got, want, f"{where}weights[{source}]")
    if expected.row_expert_ids is not None:
        ids = torch.full(actual.row_expert_ids.shape, -1, dtype=expected.row_expert_ids.dtype)
        ids[: len(expected.row_expert_ids)] = expected.row_expert_ids
        assert_bits(actual.row_expert_ids, ids, f"{where}row_expert_ids")
    if expected.frame_ids is not None:
        assert_prefix_and_poison(actual.frame_ids, expected.frame_ids, POISON, f"{where}frame_ids")
    own = return_slices_log2(headers[0][cfg.place(rank)[0], HeaderWord.RETURNS])
    assert_bits(own, torch.tensor(actual.return_slices_log2, dtype=own.dtype), f"{where}headers.return_slices_log2")
    given = {where + name: tensor for name in BUFFERS if (tensor := getattr(actual, name)) is not None}
    assert_untouched_behind(given, POISON)


def check_headers(actual: Sequence[Dispatched], cfg: EPConfig) -> None:
    """AssertionError unless every rank has of each source the header that the source itself has: of all ranks' batches
    of one round, node by node. Ranks that exchange nothing have nothing to compare."""
    for first in () if cfg.skip_a2a else range(0, cfg.world_size, cfg.peers):
        device, node = actual[first].headers.device, actual[first : first + cfg.peers]
        own = torch.stack([batch.headers[source].to(device) for source, batch in enumerate(node)])
        for rank, batch in enumerate(node, first):
            assert_bits(batch.headers, own, f"rank {rank} headers, as their sources have them, ")


def expert_rows(dispatched: Sequence[Dispatched], hidden: int, seed: int) -> list[torch.Tensor]:
    """Made-up expert outputs: one random bfloat16 row a received row."""
    made = []
    for rank, one in enumerate(dispatched):
        generator = torch.Generator(device=one.tokens.device).manual_seed(1000 * seed + rank)
        shape = (int(one.num_rows), hidden)
        made.append(torch.randn(shape, generator=generator, device=one.tokens.device).bfloat16())
    return made


@dataclass(frozen=True)
class RoundOptions:
    """What one checked round exercises besides its inputs.

    Attributes:
        split: use the async + wait halves.
        modes: combine modes, one combine each; None: all that the configuration allows.
        dtype: element type of combine's output.
        input_scales: per rank the global scale; None: none given.
        prequantized: quantise with the reference and dispatch the quantised rows.
        weights_at: "dispatch" or "combine", the call that is given the router weights; partial combine needs them at
            dispatch, but of rank-major rows.
        seed: of the made-up expert outputs.
        frame: rows that ranks send to other nodes; None: as many as a rank may have tokens.
    """

    split: bool = False
    modes: Sequence[CombineMode] | None = None
    dtype: torch.dtype = torch.bfloat16
    input_scales: Sequence[float] | None = None
    prequantized: bool = False
    weights_at: str = "dispatch"
    seed: int = 0
    frame: int | None = None


def check_round(
    communicators: Sequence[Communicator],
    inputs: Sequence[RankInputs],
    options: RoundOptions = RoundOptions(),
) -> None:
    """Run one dispatch and one combine a mode on all ranks of this process and compare everything.

    Args:
        communicators: all ranks, in order, or the one of this process, as all processes make this call.
        inputs: of every rank, on the CPU; with `skip_a2a` all the same.
        options: what to exercise.

    Raises:
        AssertionError: some byte differs.
        EPTimeout, EPInputError: as the kernels reported.
    """
    cfg, here = communicators[0].cfg, [one.rank for one in communicators]
    oracle = communicators[0].device
    xs, ids, weights = (
        [getattr(one, name).to(oracle) for one in inputs] for name in ("x", "topk_ids", "router_weights")
    )
    scales = options.input_scales
    ready = None
    if options.prequantized:
        ready = [reference.quantize(x, cfg.format, 1.0 if scales is None else scales[r]) for r, x in enumerate(xs)]
    late = options.weights_at == "combine"
    early_weights: list[torch.Tensor | None] = [None] * len(weights) if late else weights
    of_all = reference.dispatch(cfg, xs, ids, None if ready else scales, early_weights, ready, frame=options.frame)
    rows, expected = expert_rows(of_all, cfg.hidden, options.seed), [of_all[rank] for rank in here]
    buffers = [poisoned_buffers(c, int(want.num_rows)) for c, want in zip(communicators, expected, strict=True)]
    arguments: list[dict] = []
    for rank, communicator in zip(here, communicators, strict=True):
        given = {"x": xs[rank], "topk_ids": ids[rank], "router_weights": early_weights[rank]}
        if ready is not None:
            given |= {"x": ready[rank].payload, "scales": ready[rank].scales, "row_scales": ready[rank].row_scales}
        elif scales is not None:
            given["input_scale"] = torch.tensor([scales[rank]])
        arguments.append({name: t if t is None else t.to(communicator.device) for name, t in given.items()})
        arguments[-1]["frame"] = options.frame
    returned = [
        poison(torch.empty(int(want.num_rows) + SPARE_ROWS, cfg.hidden, dtype=torch.bfloat16, device=c.device))
        for c, want in zip(communicators, expected, strict=True)
    ]
    for rank, buffer in zip(here, returned, strict=True):
        buffer[: rows[rank].shape[0]].copy_(rows[rank])
    _synchronize_devices(communicators)
    if options.split:
        pending = [c.dispatch_async(**args) for c, args in zip(communicators, arguments, strict=True)]
        actual = [c.dispatch_wait(p, b) for c, p, b in zip(communicators, pending, buffers, strict=True)]
    else:
        actual = [c.dispatch(**args, out=b) for c, args, b in zip(communicators, arguments, buffers, strict=True)]
    for communicator in communicators:
        communicator.synchronize()
    for rank, got, want in zip(here, actual, expected, strict=True):
        check_dispatched(got, want, cfg, rank)
    if len(here) == cfg.world_size:
        check_headers(actual, cfg)
    never = {"exact": cfg.is_rank_major, "unweighted": cfg.fused_shared_expert or cfg.is_rank_major}
    never["partial"] = late and not cfg.is_rank_major
    for mode in options.modes or [mode for mode in COMBINE_MODES if not never.get(mode)]:
        given_weights = {"unweighted": None, "partial": early_weights}.get(mode, weights)
        sums = reference.combine(cfg, rows, of_all, given_weights, mode=mode, dtype=options.dtype)
        sums = [sums[rank] for rank in here]
        outs = [guarded(want.shape, want.dtype, c.device) for c, want in zip(communicators, sums, strict=True)]
        late_weights = [weights[c.rank].to(c.device) if late and mode == "exact" else None for c in communicators]
        _synchronize_devices(communicators)
        if options.split:
            sent = [c.combine_async(r, d, mode=mode) for c, r, d in zip(communicators, returned, actual, strict=True)]
            for communicator, one, w, out in zip(communicators, sent, late_weights, outs, strict=True):
                communicator.combine_wait(one, w, out)
        else:
            for communicator, r, d, w, out in zip(communicators, returned, actual, late_weights, outs, strict=True):
                communicator.combine(r, d, w, mode=mode, out=out)
        for communicator in communicators:
            communicator.synchronize()
        for rank, got, want in zip(here, outs, sums, strict=True):
            assert_bits(got, want, f"rank {rank} combine {mode}")
            assert_untouched_behind({f"rank {rank} combine {mode}": got}, POISON)


def _synchronize_devices(communicators: Sequence[Communicator]) -> None:
    for device in {communicator.device for communicator in communicators}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
