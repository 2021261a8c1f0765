"""Arguments of the kernels: a record for each thing that a launch is told, the same on host and device.

A kernel's parameters are the numbers of its records in order, field after field (`layouts.maps.parameters`). On the
host a field holds an int, in a kernel the DSL's number of that type.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

Address: TypeAlias = Annotated[int, "Int64"]
"""A device address, 0: none; or a number that needs 64 bits."""
Size: TypeAlias = Annotated[int, "Int32"]
"""A count or an index."""
Word: TypeAlias = Annotated[int, "Uint32"]
"""32 bits without a sign."""
Real: TypeAlias = Annotated[int, "Float32"]
"""A float32; on the host its bits."""


class Group(NamedTuple):
    """What all launches of a rank share.

    Attributes:
        arena: this rank's arena.
        status: host-visible records, (ranks + len(INPUT_ERRORS)) x 16 bytes.
        rank, ranks: this rank's number, and how many there are.
        experts: those that the ranks own together, ids first_expert .. first_expert + experts - 1 out of all_experts:
            all of them, except with `skip_a2a`, where each rank is a group of its own.
        local_experts: experts of one rank.
        hidden: elements of a token.
        *_magic: `division_magic` of the count.
    """

    arena: Address
    status: Address
    timeout_ns: Address
    rank: Size
    ranks: Size
    ranks_magic: Word
    experts: Size
    first_expert: Size
    all_experts: Size
    local_experts: Size
    local_experts_magic: Word
    top_k: Size
    top_k_magic: Word
    max_tokens: Size
    hidden: Size


class Region1D(NamedTuple):
    """Where a region of one mode is: bytes from the arena's start. The last mode's stride is the element."""

    at: Address


class Region2D(NamedTuple):
    """A region of two modes; strides are bytes."""

    at: Address
    stride0: Address


class Region3D(NamedTuple):
    """A region of three modes."""

    at: Address
    stride0: Address
    stride1: Size


class Region4D(NamedTuple):
    """A region of four modes."""

    at: Address
    stride0: Address
    stride1: Size
    stride2: Size


class Regions(NamedTuple):
    """Where the regions of every arena are: `layouts.maps.arena` says what they hold.

    Computed once on the host, so the address of an element is a few products. The first stride may reach any size, the
    others stay below MAX_STRIDE: a product of 32 bits is one instruction, one of 64 bits three.
    """

    state: Region1D
    peers: Region1D
    combine_tickets: Region4D
    dispatch_consumed: Region1D
    combine_consumed: Region1D
    message_ready: Region2D
    return_ready: Region2D
    return_rounds: Region3D
    table: Region3D
    entries: Region4D
    weights: Region4D
    returns: Region4D
    messages: Region4D
    lamport_returns: Region4D
    lamport_messages: Region4D
    staged_scales: Region3D


class Grid(NamedTuple):
    """How a launch shares its work among CTAs.

    Attributes:
        pdl: 1 where the next launch may start while this one runs, to wait for its end.
        send_ctas: CTAs below it send; here and below twins count as CTAs (`kernels/device/twins.py`).
        packed: 1 for CTA numbers of `packed_cta`, 0 for those of the blocks.
        receive_from: CTAs from it on receive.
        warps: of a CTA; those of dispatch with WIDE_WARPS have twins, others have WARPS.
        ring_bytes: of shared memory for the stages of pipelines.
    """

    pdl: Size
    send_ctas: Size
    packed: Size
    receive_from: Size
    warps: Size
    ring_bytes: Size


class Ids(NamedTuple):
    """data: [T, top_k] expert ids, of 32 bits, or of 64 where wide is 1 (else it is 0)."""

    data: Address
    wide: Size


class SharedExpert(NamedTuple):
    """The shared expert's part: tokens first .. first + rows - 1 of this rank are the rows of output group 0.

    groups: 1 with a shared expert, else 0 (then rows is 0 too).
    """

    groups: Size
    first: Size
    rows: Size


class Wire(NamedTuple):
    """Bytes of one row, on the wire and in the output; 0 for what its format lacks.

    Attributes:
        scales_at, row_scale_at: where scale factors and the row's own scale are in a message.
        segment_words: scale words of a segment, 32 vectors of payload.
    """

    payload_bytes: Size
    scale_bytes: Size
    row_scale_bytes: Size
    scales_at: Size
    row_scale_at: Size
    segment_words: Size


class Input(NamedTuple):
    """What a rank dispatches.

    Attributes:
        x: [T, hidden] bfloat16, or rows that need no encoding.
        x_stride: 16-byte vectors from one of these rows to the next, fewer than MAX_STRIDE; 0: all are the same row.
        scales, row_scales: [T, scale_bytes] bytes and [T] bfloat16 of such rows.
        router_weights: [T, top_k] float32.
        global_scale: float32[1].
        tokens: T.
        message_slices_log2: base-2 logarithm of the slices of a message.
        returns: as of `HeaderWord`.
    """

    x: Address
    x_stride: Size
    scales: Address
    row_scales: Address
    router_weights: Address
    global_scale: Address
    tokens: Size
    message_slices_log2: Size
    returns: Size


class Output(NamedTuple):
    """Where a rank receives: `DispatchBuffers`, but its scales.

    Attributes:
        blocks: 1 where each group has a block of row_alignment rows, whatever it receives, else 0.
        row_alignment: a power of two without blocks, at multiples of which the rows of a group start.
        aligned: 0 where the rows of groups follow one another, else 1.
        capacity: rows of tokens and src_info.
        has_tiles: `layouts.maps.scales.has_tiles` of the scales.
        wide_ids: 1 where elements of row_expert_ids have 64 bits, else 0.
        zeroed: 1 where tokens of rows that pad a group are zeros, 0 where they stay as they are.
    """

    tokens: Address
    row_scales: Address
    row_offsets: Address
    row_counts: Address
    scales_offsets: Address
    expert_ids: Address
    src_info: Address
    num_rows: Address
    row_map: Address
    headers: Address
    weights: Address
    row_weights: Address
    row_expert_ids: Address
    source_ranges: Address
    blocks: Size
    row_alignment: Size
    aligned: Size
    capacity: Size
    has_tiles: Size
    wide_ids: Size
    zeroed: Size


class Scales(NamedTuple):
    """Where a launch writes scale factors: `layouts.maps.scales.ScaleMap` over a tensor.

    Attributes:
        inner, middle, outer, step: strides of the map, in words.
        words: 4-byte words of one row.
        alignment: multiple at which the scale rows of a group start; with blocks, from one to the next.
    """

    data: Address
    inner: Size
    middle: Size
    outer: Size
    step: Size
    words: Size
    alignment: Size

    @property
    def is_atom(self) -> bool:
        """Whether the layout is the 128x4 atom, in which four rows have their words side by side."""
        return self.middle == 1


class DispatchArgs(NamedTuple):
    """Parameters of dispatch. A half reads only its own: dispatch_async no `out` and `scales`, dispatch_wait no `ids`
    and `input`."""

    scales: Scales
    shared: SharedExpert
    ids: Ids
    arena: Regions
    group: Group
    wire: Wire
    input: Input
    grid: Grid
    out: Output


DISPATCH_CALL = ("grid", "shared", "ids", "input", "out", "scales")
"""Records that each launch of dispatch is told; all else is bound to the kernel, and perhaps the last two."""


def dispatch_numbers(
    grid: Grid, shared: SharedExpert, ids: Ids, input: Input, out: Output | tuple[()], scales: Scales | tuple[()]
) -> tuple[int, ...]:
    """The numbers of DISPATCH_CALL."""
    return (*grid, *shared, *ids, *input, *out, *scales)


class Batch(NamedTuple):
    """What dispatch has left for combine_send."""

    row_map: Address
    headers: Address
    weights: Address


class Rows(NamedTuple):
    """data: [capacity, hidden] bfloat16, the experts' outputs."""

    data: Address
    capacity: Size


class Sums(NamedTuple):
    """Where combine_recv sums.

    Attributes:
        out: [T, hidden], unweighted [T, top_k, hidden], of out_type (`OutputType`).
        router_weights: [T, top_k] float32 of this rank's tokens.
        tokens: T.
        return_slices_log2, flagged: what the dispatch has packed as `Input.returns`.
    """

    out: Address
    router_weights: Address
    epilogue_data: Address
    out_type: Size
    tokens: Size
    return_slices_log2: Size
    flagged: Size


class CombineArgs(NamedTuple):
    """Parameters of combine. A half reads only its own: combine_async no `shared`, `ids` and `sums`, combine_wait no
    `batch`."""

    shared: SharedExpert
    ids: Ids
    arena: Regions
    group: Group
    rows: Rows
    batch: Batch
    grid: Grid
    sums: Sums


COMBINE_CALL = ("grid", "shared", "ids", "rows", "batch", "sums")
"""Records that each launch of combine is told; all else is bound to the kernel."""


def combine_numbers(
    grid: Grid, shared: SharedExpert, ids: Ids, rows: Rows, batch: Batch, sums: Sums
) -> tuple[int, ...]:
    """The numbers of COMBINE_CALL."""
    return (*grid, *shared, *ids, *rows, *batch, *sums)
