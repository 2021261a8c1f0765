"""Bit-exact model of dispatch and combine in plain torch: every output byte that a communicator must produce.

Slow and obvious on purpose, for any torch device. Float32 arithmetic is IEEE round-to-nearest-even with
subnormals and without fused multiply-add: every multiplication and every addition is its own torch call.

Sources: the formulas of NVFP4 quantisation and of the scale-factor addresses are those of the public MAX
`ep_comm` kernels, with true divisions in place of approximate reciprocals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cute_ep.config import EPConfig
from cute_ep.dispatched import Dispatched
from cute_ep.errors import EPInputError
from cute_ep.layouts.formats import Format, format_named
from cute_ep.validate import (
    check_global_scale,
    check_input_scale,
    check_mode,
    check_router_weights,
    check_rows,
    check_tensor,
    check_tokens,
)

CHUNK_ELEMENTS = 1 << 20
"""Elements that one step of a row loop handles: bounds temporary memory, changes no result."""

E4M3_MAX = 448.0
BFLOAT16_NAN = 0x7FFF
"""The one NaN that combine returns: what the hardware conversion from float32 gives for every NaN."""


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _as_format(fmt: Format | str) -> Format:
    try:
        return format_named(fmt) if isinstance(fmt, str) else fmt
    except ValueError as error:
        raise EPInputError(str(error)) from None


def encode_e2m1(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes 0..15 of e2m1, round to nearest even, saturating at 6; NaN gives 0x7 (+6).

    Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 have codes 0..7 and bit 3 is the sign, kept for zero. A magnitude's
    code is the number of midpoints below it; of a midpoint itself the even code wins.
    """
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32)
    goes_down = torch.tensor([True, False] * 3 + [True])  # the tie between codes i and i + 1 goes to even i
    first_above = torch.where(goes_down, midpoints.nextafter(torch.tensor(torch.inf)), midpoints).to(value.device)
    code = torch.bucketize(value.abs(), first_above, out_int32=True, right=True)  # NaN counts as above all
    negative = value.signbit() & ~value.isnan()
    return (code + 8 * negative).to(torch.uint8)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 -> float32, exact."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes], dtype=torch.float32, device=code.device)
    return table[code.int()]


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int32 exponents of normal numbers -> float32 powers, by bits: exact everywhere."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """float32 >= +0 (no NaN) -> uint8 bits of e4m3fn, round to nearest even, saturating at 448 (0x7E).

    Values of one binade are multiples of 2**(exponent - 3); below 2**-6 all share that binade's step 2**-9.
    """
    value = value.clamp(max=E4M3_MAX)
    exponent = (torch.frexp(value).exponent - 1).clamp(min=-6)
    exponent = torch.where(value == 0, -6, exponent)  # frexp gives zero the exponent 0
    steps = (value * _power_of_two(3 - exponent)).round()  # exact scaling, then half to even: 0..16
    return (8 * (exponent + 7) + steps.int() - 8).to(torch.uint8)


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """uint8 bits of e4m3fn -> float32, exact (0x7F and 0xFF are NaN)."""
    bits = torch.arange(128, dtype=torch.int32)
    exponent, fraction = bits >> 3, bits & 7
    steps = torch.where(exponent == 0, fraction, fraction + 8).float()
    magnitude = steps * _power_of_two(exponent.clamp(min=1) - 10)
    magnitude[127] = torch.nan
    return torch.cat([magnitude, -magnitude]).to(code.device)[code.int()]


def to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    """float32 -> bfloat16, round to nearest even; every NaN becomes BFLOAT16_NAN."""
    nan = torch.tensor(BFLOAT16_NAN, dtype=torch.int16, device=value.device).view(torch.bfloat16)
    return torch.where(value.isnan(), nan, value.to(torch.bfloat16))


def _global_scale(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    check_global_scale(value.item() if isinstance(value, torch.Tensor) else value)
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())


def quantize(
    x: torch.Tensor, fmt: Format | str, global_scale: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode rows of tokens.

    nvfp4, all in float32 with G = global_scale: for every block of 16 elements
        amax = max |x|, NaN elements counting as 0;    sf8 = e4m3(G * (amax * (1/6)));
        inv = 0 if sf8 is zero, else 1 / (f32(sf8) * (1 / G));    q = e2m1(x * inv).

    Args:
        x: [T, hidden] bfloat16.
        fmt: a format or its name.
        global_scale: G, a number or a float32 tensor of one element; unused by bf16.

    Returns:
        bf16: (x itself, None). nvfp4: payload [T, hidden / 2] uint8, element 2i in the low nibble of byte i,
        and scales [T, hidden / 16] uint8, the bits of e4m3fn, row-major.

    Raises:
        EPInputError: shape, type or format is wrong, or G is outside [2**-100, 2**100].
    """
    fmt = _as_format(fmt)
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    rows, hidden = x.shape
    try:
        fmt.check_hidden(hidden)
    except ValueError as error:
        raise EPInputError(str(error)) from None
    scale = _global_scale(global_scale, x.device)
    if fmt.scale is None:
        return x, None
    one = torch.ones((), dtype=torch.float32, device=x.device)
    sixth = one / 6
    payload = torch.empty(rows, fmt.payload_bytes(hidden), dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, fmt.scale_bytes(hidden), dtype=torch.uint8, device=x.device)
    for part in _row_chunks(rows, hidden):
        values = x[part].float().unflatten(1, (-1, fmt.block))
        magnitude = values.abs()
        amax = torch.where(magnitude.isnan(), 0, magnitude).amax(dim=2)
        scale8 = encode_e4m3(scale * (amax * sixth))
        decoded = decode_e4m3(scale8)
        inverse = torch.where(decoded == 0, 0, torch.div(one, decoded * torch.div(one, scale)))
        codes = encode_e2m1(values * inverse[:, :, None]).flatten(1)
        payload[part] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        scales[part] = scale8
    return payload, scales


def dequantize(
    payload: torch.Tensor,
    scales: torch.Tensor | None,
    fmt: Format | str,
    global_scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Decode rows to [T, hidden] float32: nvfp4 is f32(fp4) * f32(sf8) / G, the product exact.

    Args:
        payload, scales: as `quantize` returns them (scales row-major, not swizzled).
        global_scale: the G that `quantize` was given.

    Raises:
        EPInputError: unknown format, or G is outside [2**-100, 2**100].
    """
    fmt = _as_format(fmt)
    scale = _global_scale(global_scale, payload.device)
    if fmt.scale is None:
        return payload.float()
    values = decode_e2m1(torch.stack([payload & 15, payload >> 4], dim=2).flatten(1))
    blocks = values.unflatten(1, (-1, fmt.block)) * decode_e4m3(scales)[:, :, None]
    return torch.div(blocks, scale).flatten(1)


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


def swizzle_scales(scales: torch.Tensor, row_counts: Sequence[int]) -> torch.Tensor:
    """Row-major scale factors to the 128x4 atom layout; padding rows and padding columns are zero.

    With tiles = ceil(columns / 4), scale factor c of row r of an expert that begins at block B is at byte
    ((B + r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4;
    an expert of n rows owns ceil(n / 128) blocks.

    Args:
        scales: [rows, columns] uint8, grouped by expert.
        row_counts: rows of each expert; their sum must be `rows`.

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


def check_expert_ids(cfg: EPConfig, topk_ids: torch.Tensor) -> None:
    """EPInputError unless every id is -1 (masked) or in [0, num_experts). Reads the tensor."""
    bad = (topk_ids < -1) | (topk_ids >= cfg.num_experts)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        value = topk_ids[token, slot].item()
        raise EPInputError(f"topk_ids[{token}, {slot}] = {value}: must be -1 or in [0, {cfg.num_experts})")


def _per_rank(name: str, values: Sequence | None, ranks: int) -> list:
    if values is None:
        return [None] * ranks
    if len(values) != ranks:
        raise EPInputError(f"len({name}) = {len(values)}: must be world_size = {ranks}")
    return list(values)


def dispatch(
    cfg: EPConfig,
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    input_scales: Sequence[float | torch.Tensor | None] | None = None,
    router_weights: Sequence[torch.Tensor | None] | None = None,
) -> list[Dispatched]:
    """What every rank receives, rows ordered by (expert, source rank, token, slot).

    Duplicate experts of a token make one row each. A masked slot (-1) makes none.

    Args:
        xs: per rank [T_r, hidden] bfloat16, T_r <= max_tokens_per_rank.
        topk_ids: per rank [T_r, top_k] int32, -1 or a global expert id.
        input_scales: per rank the global scale of its own tokens (see `quantize`); None: 1.0 everywhere.
        router_weights: per rank [T_r, top_k] float32 or None; None: no weights anywhere.

    Returns:
        One `Dispatched` a rank, all tensors with exactly `num_rows` rows (scales: exactly the blocks in use),
        `tokens_per_chunk` 1. `weights` is None when no rank gave any, else 0 where this rank has no row or
        the source gave none.

    Raises:
        EPInputError: an argument of some rank breaks its rule, or an expert id is out of range.
    """
    fmt, ranks, local = cfg.format, cfg.world_size, cfg.local_experts
    xs, topk_ids = _per_rank("xs", xs, ranks), _per_rank("topk_ids", topk_ids, ranks)
    scales_of, weights_of = (
        _per_rank("input_scales", input_scales, ranks),
        _per_rank("router_weights", router_weights, ranks),
    )
    encoded = []
    for x, ids, scale, weights in zip(xs, topk_ids, scales_of, weights_of, strict=True):
        check_tokens(cfg, x, ids, weights)
        check_expert_ids(cfg, ids)
        check_input_scale(fmt, scale)
        encoded.append(quantize(x, fmt, 1.0 if scale is None else scale))
    device = xs[0].device
    first_token = [sum(x.shape[0] for x in xs[:rank]) for rank in range(ranks)]
    payload = torch.cat([rows for rows, _ in encoded])
    linear_scales = torch.cat([scales for _, scales in encoded]) if fmt.scale else None
    header = [[x.shape[0], 1, int(weights is not None), x.shape[0]] for x, weights in zip(xs, weights_of, strict=True)]

    results = []
    for rank in range(ranks):
        entries = [torch.empty(0, 4, dtype=torch.int64, device=device)]
        for source, ids in enumerate(topk_ids):
            token, slot = ((ids >= 0) & (ids // local == rank)).nonzero(as_tuple=True)  # token-major, slots ascending
            expert = ids[token, slot].long() - rank * local
            entries.append(torch.stack([expert, torch.full_like(token, source), token, slot], dim=1))
        table = torch.cat(entries)
        expert, source, token, slot = table[table[:, 0].argsort(stable=True)].unbind(1)
        num_rows = expert.numel()

        counts = torch.bincount(expert, minlength=local)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        block_counts = (counts + 127) // 128
        first_block = block_counts.cumsum(0) - block_counts
        row_map = torch.full((ranks, cfg.max_tokens_per_rank, cfg.top_k), -1, dtype=torch.int32, device=device)
        row_map[source, token, slot] = torch.arange(num_rows, dtype=torch.int32, device=device)
        travelled = None
        if any(weights is not None for weights in weights_of):
            travelled = torch.zeros(row_map.shape, dtype=torch.float32, device=device)
            for peer, weights in enumerate(weights_of):
                if weights is not None:
                    travelled[peer, : weights.shape[0]] = torch.where(
                        row_map[peer, : weights.shape[0]] >= 0, weights, 0
                    )
        gather = token + torch.tensor(first_token, device=device)[source]
        results.append(
            Dispatched(
                tokens=payload[gather],
                scales=swizzle_scales(linear_scales[gather], counts.tolist()) if fmt.scale else None,
                row_offsets=offsets.to(torch.uint32),
                scales_offsets=(first_block - offsets[:-1] // 128).to(torch.uint32) if fmt.scale else None,
                expert_ids=torch.arange(local, dtype=torch.int32, device=device),
                src_info=torch.stack([token, slot], dim=1).int(),
                num_rows=torch.tensor([num_rows], dtype=torch.int32, device=device),
                row_map=row_map,
                headers=torch.tensor(header, dtype=torch.int32, device=device),
                weights=travelled,
                topk_ids=topk_ids[rank],
                router_weights=weights_of[rank],
                tokens_per_chunk=1,
            )
        )
    return results


def _combine_weights(
    cfg: EPConfig, dispatched: Sequence[Dispatched], router_weights: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor]:
    given = _per_rank("router_weights", router_weights, cfg.world_size)
    chosen = []
    for rank, (batch, argument) in enumerate(zip(dispatched, given, strict=True)):
        weights = batch.router_weights if argument is None else argument
        if weights is None:
            raise EPInputError(f"router_weights[{rank}] = None: must be given to dispatch or to combine")
        check_router_weights(cfg, weights, batch.topk_ids.shape[0])
        chosen.append(weights)
    return chosen


def _check_combine(cfg: EPConfig, rows: Sequence[torch.Tensor], dispatched: Sequence[Dispatched]) -> None:
    _per_rank("rows", rows, cfg.world_size)
    _per_rank("dispatched", dispatched, cfg.world_size)
    for rank, (outputs, batch) in enumerate(zip(rows, dispatched, strict=True)):
        check_rows(cfg, outputs, batch)
        if outputs.shape[0] < (need := batch.num_rows.item()):
            raise EPInputError(f"rows[{rank}].shape[0] = {outputs.shape[0]}: must be at least num_rows = {need}")


def combine(
    cfg: EPConfig,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    router_weights: Sequence[torch.Tensor | None] | None = None,
    mode: str = "exact",
) -> list[torch.Tensor]:
    """Weighted sums of the expert outputs of every token, back in token order.

    All sums are float32, start at +0 and round after each multiplication and each addition:
    exact: over the unmasked slots k ascending, acc += w[t, k] * f32(row); one cast to bfloat16.
    partial: every rank sums the slots that it owns as above and casts to bfloat16; the source rank adds these
    over the ranks that own any of the token's experts, ascending, and casts once more.
    A token without unmasked slots gives +0. A NaN result is BFLOAT16_NAN.

    Args:
        rows: per rank [>= num_rows, hidden] bfloat16, in the row order of `dispatched`.
        dispatched: what `dispatch` returned (or a communicator's outputs of the same round).
        router_weights: per rank [T_r, top_k] float32; None (list or entry): those that dispatch was given.
        mode: "exact" or "partial".

    Returns:
        Per rank [T_r, hidden] bfloat16.

    Raises:
        EPInputError: unknown mode, a rank without weights, or a wrong shape, type or list length.
    """
    check_mode(mode)
    _check_combine(cfg, rows, dispatched)
    chosen = _combine_weights(cfg, dispatched, router_weights)
    return [combine_source(cfg, source, rows, dispatched, weights, mode) for source, weights in enumerate(chosen)]


def combine_source(
    cfg: EPConfig,
    source: int,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    weights: torch.Tensor,
    mode: str,
) -> torch.Tensor:
    """`combine` for the tokens of rank `source` alone, with its [T, top_k] weights; checks nothing."""
    ids, everyone = dispatched[source].topk_ids, range(cfg.world_size)
    out = torch.empty(ids.shape[0], cfg.hidden, dtype=torch.bfloat16, device=ids.device)
    for part in _row_chunks(ids.shape[0], cfg.hidden):
        total = torch.zeros(out[part].shape, dtype=torch.float32, device=ids.device)
        if mode == "exact":
            for token, product in _products(cfg, everyone, ids, rows, dispatched, source, weights, part):
                total[token] = total[token] + product
        for rank in everyone if mode == "partial" else ():
            partial = torch.zeros_like(total)
            for token, product in _products(cfg, [rank], ids, rows, dispatched, source, weights, part):
                partial[token] = partial[token] + product
            token = ((ids[part] >= 0) & (ids[part] // cfg.local_experts == rank)).any(dim=1)
            total[token] = total[token] + to_bfloat16(partial[token]).float()
        out[part] = to_bfloat16(total)
    return out


def _products(
    cfg: EPConfig,
    ranks: Sequence[int],
    ids: torch.Tensor,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    source: int,
    weights: torch.Tensor,
    part: slice,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens within `part`, w * row in the type of `weights`) of the slots that `ranks` own, k ascending."""
    for slot in range(cfg.top_k):
        expert = ids[part, slot]
        for rank in ranks:
            token = ((expert >= 0) & (expert // cfg.local_experts == rank)).nonzero()[:, 0]
            if token.numel():
                row = dispatched[rank].row_map[source, part, slot][token].long()
                yield token, weights[part, slot][token, None] * rows[rank][row].to(weights.dtype)


def combine_error_bound(
    cfg: EPConfig,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    router_weights: Sequence[torch.Tensor | None] | None = None,
    mode: str = "exact",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank (value, bound), both [T_r, hidden] float64, such that |combine's output - value| <= bound.

    `value` is S = sum_k w_k * row_k in float64. With M = sum_k |w_k * row_k|, K = top_k; u = 2**-24 and
    v = 2**-8 the unit roundoffs of float32 and bfloat16 (24 and 8 significant bits);
    gamma_n = n*u / (1 - n*u); nothing overflows:

    Float32 sum: a product is w*x*(1 + d) + h, |d| <= u, |h| <= 2**-150 (half a subnormal step); an addition
    multiplies by (1 + d), and is exact where it underflows. A term passes one product and at most K - 1
    additions (0 + first is exact), so |acc - S| <= F(M) = gamma_K * M + K * 2**-150 * (1 + gamma_K).
    Cast to bfloat16: |cast(a) - a| <= v*|a| + 2**-134, and |a| <= |S| + F(M).
        exact:  F(M) + v * (|S| + F(M)) + 2**-134.
    Partial: P = min(R, K) ranks at most take part, with sums S_p and M_p; sum M_p = M and |S_p| <= M_p.
    A partial is off by F(M_p) + v * (M_p + F(M_p)) + 2**-134, and their sum by
    B = F(M) + v * (M + F(M)) + P * 2**-134 (the ranks' terms are K together). Adding P values in float32 adds
    D = gamma_(P-1) * (M + B) at most. The last cast sees |a| <= |S| + B + D.
        partial:  B + D + v * (|S| + B + D) + 2**-134.
    Products of float32 and bfloat16 are exact in float64; K * 2**-52 * M covers its sums and the bound's own.

    Args and Raises: as `combine`.
    """
    check_mode(mode)
    _check_combine(cfg, rows, dispatched)
    u, v, half_step = 2.0**-24, 2.0**-8, 2.0**-134
    terms, parts = cfg.top_k, min(cfg.world_size, cfg.top_k)

    def gamma(count: int) -> float:
        return count * u / (1 - count * u)

    everyone, results = range(cfg.world_size), []
    for source, weights in enumerate(_combine_weights(cfg, dispatched, router_weights)):
        ids = dispatched[source].topk_ids
        value, bound = torch.zeros(2, ids.shape[0], cfg.hidden, dtype=torch.float64, device=ids.device)
        for part in _row_chunks(ids.shape[0], cfg.hidden):
            magnitude = torch.zeros_like(value[part])
            doubles = weights.double()
            for token, product in _products(cfg, everyone, ids, rows, dispatched, source, doubles, part):
                value[part][token] += product
                magnitude[token] += product.abs()
            error = gamma(terms) * magnitude + terms * 2.0**-150 * (1 + gamma(terms))
            if mode == "partial":
                error = error + v * (magnitude + error) + parts * half_step
                error = error + gamma(parts - 1) * (magnitude + error)
            error = error + v * (value[part].abs() + error) + half_step
            bound[part] = error + terms * 2.0**-52 * magnitude
        results.append((value, bound))
    return results
