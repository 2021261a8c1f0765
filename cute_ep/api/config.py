"""EPConfig: one frozen description of a deployment, the same on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from cute_ep.api.errors import EPConfigError
from cute_ep.api.types import ROW_IDS, FormatName, RowIds, RowOrder, ScaleLayout
from cute_ep.layouts.maps.arena import MAX_SCALED, MAX_STRIDE, Arena, message_of, return_slots
from cute_ep.layouts.maps.formats import FORMATS, Format
from cute_ep.layouts.maps.mail import Mail
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
MAX_ROWS = 1 << 30
"""Rows of a rank, times their `id_words`, of blocks also times the scale words of a row: kernels count them in 32
bits."""
LONGEST_S = 3600
"""The most that `EPConfig.timeout_s` may be."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, of NumPy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, of NumPy too; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_in(value: object, names: Container[str]) -> bool:
    return isinstance(value, str) and value in names


@dataclass(frozen=True)
class EPConfig:
    """Shapes and limits of one expert-parallel group.

    Attributes:
        hidden: elements of a token row, at most 65536; a multiple of 8 (bf16), 128 (fp8,
            fp8_pow2), 64 (mxfp6_e2m3, mxfp6_e3m2) or 32 (the others).
        num_experts: experts of all ranks together, at most 1024, a multiple of `world_size`; rank r owns [r * E/R,
            (r + 1) * E/R).
        top_k: experts a token chooses (entries of one row of `topk_ids`), at most 32 and those of one node.
        max_tokens_per_rank: most tokens of one rank in one call; times `nodes` at most 32768. Memory grows with it
            (`memory_bytes`).
        world_size: number of ranks, at most 32 on a node.
        dispatch_format: name of the wire and output format of dispatched rows (`cute_ep.layouts.maps.formats`).
        timeout_s: seconds that a kernel waits for a peer before it gives up, at most 3600.
        scale_layout: how the scale factors of the output are laid out (`cute_ep.layouts.maps.scales`); None: the
            format's default.
        row_alignment: multiple to which each expert's rows are padded; None: the format's default.
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
        row_ids: type of elements of `DispatchBuffers.row_expert_ids`; "int64" in rank-major order only.
        zero_padding: whether tokens of padding are zeros, as sums over all rows of an expert need them (gradients of
            weights); else they hold anything. What lies beside them is the same.
        ranks_per_node: ranks of one node, at most 32 that divide `world_size`; rank r is on node r // ranks_per_node.
            The ranks with one r % ranks_per_node, one on each node, are a rail: a token travels along its rail to the
            nodes that have its experts, and within each from the rail's rank (docs/nodes.md). None, also where it is
            `world_size`: all ranks are on one node.

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
    ranks_per_node: int | None = None
    row_ids: RowIds = "int32"
    zero_padding: bool = True

    def __post_init__(self) -> None:
        """Check each field after those that its rule depends on, so a rule holds whatever is mended afterwards."""
        self._require("dispatch_format", _is_in(self.dispatch_format, FORMATS), f"one of {', '.join(FORMATS)}")
        self._require("row_order", _is_in(self.row_order, ROW_ORDERS), f"one of {', '.join(ROW_ORDERS)}")
        ids = ROW_IDS if self.is_rank_major else ROW_IDS[:1]
        self._require("row_ids", _is_in(self.row_ids, ids), f"one of {', '.join(ids)} for {self.row_order} rows")
        self._require("zero_padding", isinstance(self.zero_padding, bool), "True or False")
        self._check_nodes()
        over = "" if self.nodes == 1 else f" over {self.nodes} nodes"
        allowed = (False,) if over else (True, False)
        rule = f"False{over}" if over else "True or False"
        self._require("skip_a2a", isinstance(self.skip_a2a, bool) and self.skip_a2a in allowed, rule)
        self._check_shared_expert(over)
        fmt, ranks = self.format, self.world_size
        most, why = MAX_EXPERTS // ranks * ranks, "" if ranks == 1 else f" (world_size = {ranks})"
        self._check_integer("num_experts", most, ranks, why)
        experts = self.num_experts // self.nodes
        why = f" (num_experts = {self.num_experts}{over})" if experts < MAX_TOP_K else ""
        self._check_integer("top_k", min(MAX_TOP_K, experts), why=why)
        self._check_integer("hidden", MAX_HIDDEN, fmt.multiple, f" for {fmt.name}")
        in_time = is_number(self.timeout_s) and 1e-9 <= self.timeout_s <= LONGEST_S
        self._require("timeout_s", in_time, f"a number in [1e-9, {LONGEST_S}] seconds")
        object.__setattr__(self, "timeout_s", float(self.timeout_s))
        try:
            fmt.scale_layout(self.scale_layout)
        except ValueError as error:
            raise EPConfigError(str(error)) from None
        self._check_tokens()
        self._check_rows_of_groups()

    def _require(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise EPConfigError(f"{name} = {getattr(self, name)!r}: must be {rule}")

    def _check_integer(self, name: str, most: int, multiple: int = 1, why: str = "") -> None:
        """Make a field that is an integer a plain one. EPConfigError unless it is a multiple of `multiple` up to
        `most`."""
        value = getattr(self, name)
        kind = "an integer" if multiple == 1 or not is_integer(value) else "a"
        kind += f" multiple of {multiple}" if multiple > 1 else ""
        ok = is_integer(value) and multiple <= value <= most and value % multiple == 0
        self._require(name, ok, f"{kind} in [{multiple}, {most}]{why}")
        object.__setattr__(self, name, int(value))

    def _check_nodes(self) -> None:
        """EPConfigError unless `world_size` ranks make nodes of `ranks_per_node`; these become plain integers."""
        if self.ranks_per_node is None:
            self._check_integer("world_size", MAX_RANKS, why=" on one node; set ranks_per_node for several")
            return
        self._check_integer("world_size", MAX_EXPERTS)
        self._check_integer("ranks_per_node", MAX_RANKS)
        if self.world_size % self.ranks_per_node:
            raise EPConfigError(f"ranks_per_node = {self.ranks_per_node}: must divide world_size = {self.world_size}")
        if self.nodes == 1:
            object.__setattr__(self, "ranks_per_node", None)

    def _check_shared_expert(self, over_nodes: str) -> None:
        allowed: tuple[bool, ...] = (True, False)
        rule = "True or False"
        if over_nodes:
            allowed, rule = (False,), f"False{over_nodes}"
        elif self.block_rows is not None:
            allowed, rule = (False,), "False with block_rows"
        elif self.is_rank_major:
            allowed, rule = (False,), "False with rank-major rows"
        given = self.fused_shared_expert
        self._require("fused_shared_expert", isinstance(given, bool) and given in allowed, rule)

    def _check_tokens(self) -> None:
        """EPConfigError unless a rank has memory for `max_tokens_per_rank`, which becomes a plain integer."""
        message, most, why = message_of(self.format, self.hidden).pitch, MAX_TOKENS_PER_RANK, ""
        if most * message >= MAX_STRIDE:
            most = (MAX_STRIDE - 1) // message
            why = f": the messages of a rank, {message} bytes each, must stay below 2 GiB"
        if self.format.scale is not None and self._arena_of(most).nbytes > MAX_SCALED:
            most = bisect_right(range(1, most), MAX_SCALED, key=lambda tokens: self._arena_of(tokens).nbytes)
            why = ": the arena of a rank must stay within 64 GiB"
        given, nodes = self.max_tokens_per_rank, self.nodes
        if nodes > 1 and is_integer(given) and given >= 1 and nodes * given > most:
            raise EPConfigError(
                f"max_tokens_per_rank = {given}: must leave nodes * max_tokens_per_rank = {nodes * given} within "
                f"{most}{why}"
            )
        self._check_integer("max_tokens_per_rank", most // nodes, why=why)

    def _check_rows_of_groups(self) -> None:
        """EPConfigError unless groups can have blocks of `block_rows`, or begin at multiples of `row_alignment`; these
        become plain integers."""
        allowed = [alignment for alignment in ROW_ALIGNMENTS if alignment % self.format.row_alignment == 0]
        names = ", ".join(map(str, allowed))
        if self.block_rows is not None:
            multiple = ATOM_ROWS if self.scales_as == ATOM else 1
            words = max(scale_words(self.format.scale_bytes(self.hidden)), self.id_words)
            most = MAX_ROWS // (self.groups * words) // multiple * multiple
            good = is_integer(self.block_rows) and multiple <= self.block_rows <= most
            kind = f"a multiple of {multiple}" if multiple > 1 else "an integer"
            rule = f"None or {kind} in [{multiple}, {most}]"
            self._require("block_rows", good and self.block_rows % multiple == 0, rule)
            self._require("row_alignment", self.row_alignment is None, "None with block_rows")
            object.__setattr__(self, "block_rows", int(self.block_rows))
        elif self.row_alignment is not None:
            good = is_integer(self.row_alignment) and self.row_alignment in allowed
            self._require("row_alignment", good, f"None or one of {names} for {self.dispatch_format}")
            object.__setattr__(self, "row_alignment", int(self.row_alignment))

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
    def id_words(self) -> int:
        """Words of the local experts beside a row, and at least one."""
        return self.top_k * (2 if self.row_ids == "int64" else 1) if self.is_rank_major else 1

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
    def nodes(self) -> int:
        """Number of nodes."""
        return 1 if self.ranks_per_node is None else self.world_size // self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node of rank `rank`."""
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node

    @property
    def peers(self) -> int:
        """Ranks that exchange messages: those of a node, or with `skip_a2a` each one alone."""
        return 1 if self.skip_a2a else self.ranks_per_node or self.world_size

    @property
    def max_tokens_per_peer(self) -> int:
        """Most tokens that a peer brings in one call: its own, and over nodes those of its rail."""
        return self.nodes * self.max_tokens_per_rank

    def frame_rows(self, frame: int | None) -> int:
        """Rows of a frame that a dispatch was given as `frame`."""
        return self.max_tokens_per_rank if frame is None else frame

    def place(self, source: int, frame: int | None = None) -> tuple[int, int]:
        """(peer, first token) of the tokens of rank `source`, in the order in which a rank's peers bring them; over
        nodes each node's are a frame, given as `frame`."""
        return source % self.peers, self.node(source) * self.frame_rows(frame)

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
        rows = self.peers * self.max_tokens_per_peer * (1 if self.is_rank_major else self.top_k)
        shared = self.shared_slice(self.max_tokens_per_rank, 0)[1]
        return max_rows(rows + shared, self.groups, self.alignment)

    @property
    def arena(self) -> Arena:
        """Byte map of one rank's symmetric memory."""
        return self._arena_of(self.max_tokens_per_peer)

    @property
    def mail(self) -> Mail:
        """Byte map of what one rank exchanges with the ranks of other nodes."""
        return Mail(
            nodes=self.nodes,
            max_tokens=self.max_tokens_per_rank,
            top_k=self.top_k,
            fmt=self.format,
            hidden=self.hidden,
        )

    def _arena_of(self, tokens: int) -> Arena:
        """For so many tokens of a peer."""
        return Arena(
            ranks=self.peers,
            local_experts=self.local_experts,
            top_k=self.top_k,
            max_tokens=tokens,
            message=message_of(self.format, self.hidden),
            hidden=self.hidden,
            slots=return_slots(self.peers, self.top_k),
        )
