"""EPConfig: one frozen description of a deployment, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TypeGuard

from cute_ep.api.errors import EPConfigError
from cute_ep.api.types import FormatName, RowOrder, ScaleLayout
from cute_ep.layouts.maps.arena import MAX_SCALED, MAX_STRIDE, Arena, message_of, return_slots
from cute_ep.layouts.maps.formats import FORMATS, Format
from cute_ep.layouts.maps.routing import (
    EXPERT_MAJOR,
    MAX_EXPERTS,
    MAX_RANKS,
    MAX_TOKENS_PER_RANK,
    MAX_TOP_K,
    RANK_MAJOR,
    ROW_ALIGNMENTS,
    ROW_ORDERS,
    max_rows,
    shared_slice,
)
from cute_ep.layouts.maps.scales import ATOM, ATOM_ROWS, scale_block, scale_row_alignment, scale_words

MAX_HIDDEN = 65536
MAX_BLOCK_ROWS = 1 << 30
"""Rows of all blocks of a rank, times the scale words, or local experts, of a row: kernels count them in 32 bits."""
LONGEST_S = 3600
"""The most that `EPConfig.timeout_s` may be."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, of NumPy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, of NumPy too; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class EPConfig:
    """Shapes and limits of one expert-parallel group.

    Attributes:
        hidden: elements of a token row, at most 65536; a multiple of 8 (bf16), 128 (fp8, fp8_pow2) or 32 (the others).
        num_experts: experts of all ranks together, at most 1024, a multiple of `world_size`; rank r owns [r * E/R,
            (r + 1) * E/R).
        top_k: experts a token chooses (entries of one row of `topk_ids`), at most 32.
        max_tokens_per_rank: most tokens of one rank in one call, at most 32768. Memory grows with it (`memory_bytes`).
        world_size: number of ranks, at most 32.
        dispatch_format: name of the wire and output format of dispatched rows (`cute_ep.layouts.maps.formats`).
        timeout_s: seconds that a kernel waits for a peer before it gives up, at most 3600.
        scale_layout: how the scale factors of the output are laid out (`cute_ep.layouts.maps.scales`); None: the
            format's default.
        row_alignment: multiple to which each expert's rows are padded with zeros; None: the format's default.
        fused_shared_expert: group 0 of every dispatch output is a shared expert with this rank's own tokens, and
            combine adds its rows.
        skip_a2a: every rank is given all tokens, serves its own experts only, and combine returns partial sums that
            the caller adds over the `world_size` ranks. Nothing travels. The shared expert's tokens are shared out.
        block_rows: S, where each group has a block of S rows, as each local expert has in DeepEP's low-latency mode:
            rows of group g begin at row g * S and `row_counts` says how many there are; behind them a block holds
            anything. With the `atom128x4` layout a multiple of 128. Combine returns NaN for tokens with a row that its
            block had no room for. In expert-major order with S = world_size * max_tokens_per_rank that takes a token
            that has an expert twice; in rank-major order S = max_tokens_per_rank has room for all. A call whose buffers
            have fewer rows has smaller blocks. None: groups' rows follow one another.
        row_order: "expert_major": a row for each (token, expert), grouped by local expert. "rank_major": a row for each
            (token, rank), grouped by source rank, as DeepEP's normal mode has them; beside it stand the token's local
            experts and router weights (`DispatchBuffers.row_expert_ids`, `row_weights`). Then the caller's experts
            weight and sum, and combine only takes mode "partial", which adds a token's rows over ranks.

    Raises:
        EPConfigError: a field breaks its rule.
    """

    hidden: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    world_size: int
    dispatch_format: FormatName = "bf16"
    timeout_s: float = 60.0
    scale_layout: ScaleLayout | None = None
    row_alignment: int | None = None
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    block_rows: int | None = None
    row_order: RowOrder = EXPERT_MAJOR

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise EPConfigError(f"{name} = {getattr(self, name)!r}: {rule}")

        for name, low, high in (
            ("hidden", 1, MAX_HIDDEN),
            ("world_size", 1, MAX_RANKS),
            ("num_experts", 1, MAX_EXPERTS),
            ("top_k", 1, MAX_TOP_K),
            ("max_tokens_per_rank", 1, MAX_TOKENS_PER_RANK),
        ):
            value = getattr(self, name)
            require(is_integer(value) and low <= value <= high, name, f"must be an integer in [{low}, {high}]")
            object.__setattr__(self, name, int(value))
        require(
            self.num_experts % self.world_size == 0,
            "num_experts",
            f"must be a multiple of world_size = {self.world_size}",
        )
        require(self.top_k <= self.num_experts, "top_k", f"must not exceed num_experts = {self.num_experts}")
        in_time = is_number(self.timeout_s) and 1e-9 <= self.timeout_s <= LONGEST_S
        require(in_time, "timeout_s", f"must be a number in [1e-9, {LONGEST_S}] seconds")
        object.__setattr__(self, "timeout_s", float(self.timeout_s))
        for name in ("fused_shared_expert", "skip_a2a"):
            require(isinstance(getattr(self, name), bool), name, "must be True or False")
        known = isinstance(self.row_order, str) and self.row_order in ROW_ORDERS
        require(known, "row_order", f"must be one of {', '.join(ROW_ORDERS)}")
        known = isinstance(self.dispatch_format, str) and self.dispatch_format in FORMATS
        require(known, "dispatch_format", f"must be one of {', '.join(FORMATS)}")
        try:
            self.format.check_hidden(self.hidden)
            self.format.scale_layout(self.scale_layout)
        except ValueError as error:
            raise EPConfigError(str(error)) from None
        size = message_of(self.format, self.hidden).pitch
        require(
            self.max_tokens_per_rank * size < MAX_STRIDE,
            "max_tokens_per_rank",
            f"must leave the messages of a rank, {size} bytes each, below 2 GiB",
        )
        if self.format.scale is not None:
            size = self.arena.nbytes
            require(
                size <= MAX_SCALED,
                "max_tokens_per_rank",
                f"must leave the arena of a rank, {size} bytes, within 64 GiB",
            )
        allowed = [alignment for alignment in ROW_ALIGNMENTS if alignment % self.format.row_alignment == 0]
        require(
            self.row_alignment is None or (is_integer(self.row_alignment) and self.row_alignment in allowed),
            "row_alignment",
            f"must be one of {', '.join(map(str, allowed))} for {self.dispatch_format}",
        )
        if self.row_alignment is not None:
            object.__setattr__(self, "row_alignment", int(self.row_alignment))
        if self.block_rows is not None:
            multiple = ATOM_ROWS if self.scales_as == ATOM else 1
            words = max(1, scale_words(self.format.scale_bytes(self.hidden)), self.is_rank_major * self.top_k)
            most = MAX_BLOCK_ROWS // (self.groups * words)
            good = is_integer(self.block_rows) and 1 <= self.block_rows <= most and self.block_rows % multiple == 0
            kind = f"a multiple of {multiple}" if multiple > 1 else "an integer"
            require(good, "block_rows", f"must be None or {kind} in [1, {most}]")
            require(self.row_alignment is None, "row_alignment", "must be None with block_rows")
            require(not self.fused_shared_expert, "fused_shared_expert", "must be False with block_rows")
            object.__setattr__(self, "block_rows", int(self.block_rows))
        if self.is_rank_major:
            require(not self.fused_shared_expert, "fused_shared_expert", "must be False with rank-major rows")

    @property
    def format(self) -> Format:
        """The record of `dispatch_format`."""
        return FORMATS[self.dispatch_format]

    @property
    def local_experts(self) -> int:
        """Experts that each rank owns."""
        return self.num_experts // self.world_size

    @property
    def is_rank_major(self) -> bool:
        """Whether `row_order` is "rank_major"."""
        return self.row_order == RANK_MAJOR

    @property
    def groups(self) -> int:
        """Groups of rows in a dispatch output: the local experts, after the shared one if there is one; in rank-major
        order the source ranks."""
        return self.peers if self.is_rank_major else self.local_experts + self.fused_shared_expert

    @property
    def alignment(self) -> int:
        """Multiple at which the rows of a group start: `block_rows`, `row_alignment`, or the format's default."""
        if self.block_rows is not None:
            return self.block_rows
        return self.format.row_alignment if self.row_alignment is None else self.row_alignment

    @property
    def scales_as(self) -> str | None:
        """`scale_layout`, or the format's default; None when the format has no scale factors."""
        return self.format.scale_layout(self.scale_layout)

    @property
    def scale_alignment(self) -> int:
        """Multiple at which the scale rows of a group start; from one block to the next, where there are blocks."""
        if self.block_rows is not None:
            return scale_block(self.scales_as, self.format.scale_bytes(self.hidden), self.block_rows)
        return scale_row_alignment(self.scales_as, self.alignment)

    @property
    def peers(self) -> int:
        """Ranks that exchange messages: all, or with `skip_a2a` each one alone."""
        return 1 if self.skip_a2a else self.world_size

    def shared_slice(self, tokens: int, rank: int) -> tuple[int, int]:
        """(first, number) of the `tokens` tokens that rank `rank` gives to the shared expert; (0, 0) without one."""
        if not self.fused_shared_expert:
            return 0, 0
        return shared_slice(tokens, rank, self.world_size) if self.skip_a2a else (0, tokens)

    @property
    def max_rows(self) -> int:
        """Rows to allocate for one dispatch output in the worst case; those of all blocks, where there are blocks."""
        if self.block_rows is not None:
            return self.groups * self.block_rows
        shared = self.shared_slice(self.max_tokens_per_rank, 0)[1]
        rows = 1 if self.is_rank_major else self.top_k
        return max_rows(self.peers, rows, self.max_tokens_per_rank, self.groups, self.alignment, shared)

    @property
    def arena(self) -> Arena:
        """Byte map of one rank's symmetric memory."""
        return Arena(
            ranks=self.peers,
            local_experts=self.local_experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens_per_rank,
            message=message_of(self.format, self.hidden),
            hidden=self.hidden,
            slots=return_slots(self.peers, self.top_k),
        )


def check_config(cfg: object) -> None:
    """EPConfigError unless it is an EPConfig."""
    if not isinstance(cfg, EPConfig):
        raise EPConfigError(f"cfg = {type(cfg).__name__}: must be an EPConfig")


def differing(cfgs: Sequence[EPConfig]) -> dict[str, list]:
    """The fields in which some of the configurations differ, each with the values of all, in their order."""
    values = {field.name: [getattr(cfg, field.name) for cfg in cfgs] for field in fields(EPConfig)}
    return {name: given for name, given in values.items() if any(one != given[0] for one in given)}


def check_alike(cfgs: Sequence[EPConfig]) -> None:
    """EPConfigError unless all ranks, in their order, have the same configuration: names the fields that differ."""
    lines = []
    for name, values in differing(cfgs).items():
        owners: dict[object, list[int]] = {}
        for rank, value in enumerate(values):
            owners.setdefault(value, []).append(rank)
        lines.append(f"{name} = {', '.join(f'{value!r} on rank(s) {ranks}' for value, ranks in owners.items())}")
    if lines:
        raise EPConfigError(f"{'; '.join(lines)}: must be the same on all ranks")


def memory_bytes(cfg: EPConfig) -> int:
    """Bytes of symmetric memory that one rank allocates for `cfg` (device memory, for the communicator's life).

    The regions of `cute_ep.layouts.maps.arena.Arena`, rounded up to whole pages; docs/reference.md has the formula.

    Raises:
        EPConfigError: `cfg` is no EPConfig.
    """
    check_config(cfg)
    return int(cfg.arena.allocation)


def tokens_per_rank(batch_tokens: int, world_size: int, *, skip_a2a: bool = False) -> int:
    """`max_tokens_per_rank` for a batch whose tokens are shared out evenly to ranks, rounded up.

    4196 tokens over 8 ranks are 525 a rank, 10 over 3 are 4. Some rank has fewer where they do not divide.

    Args:
        batch_tokens: tokens of the largest batch, all ranks together.
        world_size, skip_a2a: as in `EPConfig`; with `skip_a2a` every rank is given all tokens.

    Raises:
        EPConfigError: an argument breaks its rule, or a rank would have more tokens than `EPConfig` takes.
    """
    if not (is_integer(batch_tokens) and batch_tokens >= 1):
        raise EPConfigError(f"batch_tokens = {batch_tokens!r}: must be a positive integer")
    if not (is_integer(world_size) and 1 <= world_size <= MAX_RANKS):
        raise EPConfigError(f"world_size = {world_size!r}: must be an integer in [1, {MAX_RANKS}]")
    if not isinstance(skip_a2a, bool):
        raise EPConfigError(f"skip_a2a = {skip_a2a!r}: must be True or False")
    ranks = 1 if skip_a2a else int(world_size)
    tokens = -(-int(batch_tokens) // ranks)
    if tokens > MAX_TOKENS_PER_RANK:
        raise EPConfigError(
            f"batch_tokens = {batch_tokens}: must not exceed {ranks * MAX_TOKENS_PER_RANK}, {MAX_TOKENS_PER_RANK} for "
            "each rank; split the batch, on all ranks"
        )
    return tokens
