"""Arguments of the kernels that involve one GPU only, as `layouts.maps.arguments` has those of the others."""

from __future__ import annotations

from typing import NamedTuple

from cute_ep.layouts.maps.arguments import Address, Ids, Real, Scales, Size, Word


class RowsArgs(NamedTuple):
    """Parameters of quantise and of gates: docs/numerics.md has the formulas.

    Attributes:
        x: [rows, D] bfloat16, with a gate [rows, columns * D].
        out: [rows, payload bytes].
        row_scales: [rows] bfloat16.
        global_scales: float32[1], or float32[groups] when per_group is 1.
        row_offsets: int32[groups + 1], ascending from 0, its last element the number of valid rows; none: all are.
        scales_offsets: int32[groups], for scales in the atom layout.
        rows: capacity of all tensors.
        width: D.
        alpha, limit: of the gate; limit 0 for SwiGLU's plain form, infinity for another gate without a limit.
        cubic, offset: of the gate; SwiGLU reads only those before.
        bias: [groups, columns * D] bfloat16, added to the rows of each group.
        columns: 2, or 1 for relu squared.
        interleaved: 1 where gate and up columns alternate, else 0.
    """

    scales: Scales
    x: Address
    out: Address
    row_scales: Address
    global_scales: Address
    row_offsets: Address
    scales_offsets: Address
    per_group: Size
    groups: Size
    rows: Size
    width: Size
    alpha: Real
    limit: Real
    cubic: Real
    offset: Real
    bias: Address
    columns: Size
    interleaved: Size


class CopyArgs(NamedTuple):
    """Parameters of copy: both addresses and num_bytes are multiples of 16."""

    source: Address
    destination: Address
    num_bytes: Address


class CountArgs(NamedTuple):
    """Parameters of count_routes, of T tokens with top_k entries each.

    Attributes:
        ids: [T, top_k] expert ids.
        counts: [words] int32, tokens by rank, entries by expert, T, and zeros; `words` are `count_words`.
        goes: [T, ranks] of one byte, 1 where a token goes to a rank.
        ids_out: [T, top_k] int32, the ids; with `mask` 1 those that are no expert's are -1.
        last_ids: [T, top_k] int32, the ids of entries that are the last of their token on their rank, else -1.
        weights: [T, top_k] bfloat16 router weights, read if there is weights_out: [T, top_k] float32, their values.
        local_experts: experts of one rank, with the `division_magic` of it; the last ranks may have fewer.
    """

    ids: Ids
    counts: Address
    goes: Address
    ids_out: Address
    last_ids: Address
    weights: Address
    weights_out: Address
    tokens: Size
    top_k: Size
    ranks: Size
    experts: Size
    words: Size
    mask: Size
    local_experts: Size
    local_experts_magic: Word


TOLD_BESIDE_ENTRIES = 2
"""Words that the host is told behind the entries by expert: the most tokens of a rank, and those that come here."""


class TellArgs(NamedTuple):
    """Parameters of tell_counts, for one of R ranks over so many nodes.

    Attributes:
        table: [ranks, words] int32, `counts` of count_routes, of each rank: rank r of p on each node has row r % p *
            nodes + r // p.
        num_rows: int32[1], how many rows of the table have come. Unless these are R, nothing is written.
        told: [local_experts + TOLD_BESIDE_ENTRIES] LL words of host memory, of epoch `epoch`; 0: none.
        ends: [ranks, ranks] int32, element [s, d]: tokens that sources 0 .. s send to rank d; 0: none.
        tokens: which word of a row is its rank's number of tokens.
    """

    table: Address
    num_rows: Address
    told: Address
    ends: Address
    ranks: Size
    nodes: Size
    words: Size
    rank: Size
    local_experts: Size
    tokens: Size
    epoch: Word


class LabelArgs(NamedTuple):
    """Parameters of label_rows, of a batch with so many groups.

    Attributes:
        row_offsets, row_counts: int32, of the batch.
        experts: [rows] int32, or int64 if `wide` is 1: first + the row's group, `elsewhere` where no token has the row.
        ones: [rows] float32; 0: none.
        first, elsewhere: not negative.
    """

    row_offsets: Address
    row_counts: Address
    experts: Address
    ones: Address
    rows: Size
    groups: Size
    first: Size
    elsewhere: Size
    wide: Size


class MarkArgs(NamedTuple):
    """Parameters of mark_entries, of a batch with so many entries of rank-major rows.

    Attributes:
        row_expert_ids: [entries] int32, of the batch.
        row_weights: [entries] float32, of the batch.
        experts: [entries] int32: first + the local expert, `elsewhere` where the entry is not of this rank.
        weights: [entries] float32, 0 there; 0: none.
        elsewhere: may be negative.
    """

    row_expert_ids: Address
    row_weights: Address
    experts: Address
    weights: Address
    entries: Size
    first: Size
    elsewhere: Size


class SumArgs(NamedTuple):
    """Parameters of sum_rows, of a batch with R sources of at most T tokens with top_k entries each.

    Attributes:
        rows: [capacity, 8 * vectors] bfloat16.
        sums: [room, 8 * vectors] bfloat16; a row for each token of all sources if `by_token` is 1, else for each row.
        row_map, last_map: [R, T, top_k] int32.
        headers: [R, 4] int32.
        sources: R, with the `division_magic` of it.
        slices_log2: a row has 2^slices_log2 slices.
    """

    rows: Address
    sums: Address
    row_map: Address
    last_map: Address
    headers: Address
    capacity: Size
    room: Size
    by_token: Size
    vectors: Size
    sources: Size
    sources_magic: Word
    max_tokens: Size
    top_k: Size
    slices_log2: Size
