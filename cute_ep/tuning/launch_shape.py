"""How a launch is shaped: CTAs, their roles, slices of a row; every choice gives the same bytes, so ranks may choose
differently.

A communicator holds one `Tuning`: the one that it was given, else the one of `cute_ep.tuning.file.find_tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from cute_ep.api.config import EPConfig, is_integer, is_number
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, LAMPORT_TOKENS, MANY_SLICES, MAX_SLICES, SEGMENT_BYTES
from cute_ep.layouts.maps.launch import (
    CONSUMER_SEGMENTS,
    CONSUMERS,
    CTAS_PER_SM,
    LEAST_STAGES,
    PIPELINES,
    THREADS,
    WIDE_THREADS,
)
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK

MANY = 1 << 30
"""More than any number of tokens or CTAs."""
WIDE_TOKENS = 2
"""Tokens for each CTA from which on CTAs fill SMs of which they have one each: combine with 1024 threads, dispatch with
twins. Partial combine of 128 tokens on 64 and 124 SMs takes 16.0 and 12.3 us so, else 16.8 and 11.6, of 1024 on 24 and
124 SMs 140 and 57.5, else 220 and 64.7 (2 x H200, 2026-11-26); FP8 dispatch by source rank of 16 tokens on 8 and 24 SMs
10.8 and 7.9, else 13.4 and 7.1 (2 x H200, 2026-11-27)."""
TWIN_CTAS = 66
"""Most CTAs of dispatches whose CTAs may have twins. On 56 SMs dispatch of 4096 BF16 / FP8 / NVFP4 tokens takes 210 /
155 / 119 us with twins and their tables and 230 / 168 / 139 without, of BF16 ones by source rank 180 and 206. On 88 SMs
it takes 205 / 152 / 108 and 205 / 142 / 114, and 180 and 177 (2 x H200, 2026-11-27)."""
PIPED_TOKENS = 11
"""Most tokens for each CTA whose rows come home as Lamport rows where CTAs may have pipelines, which take others.
Partial combine of 64 / 128 tokens on 8 SMs takes 32.8 / 43.7 us by pipelines and 28.5 / 48.9 as Lamport rows, of 256 /
512 on 24 SMs 37.8 / 55.7 and 36.7 / 67.1, on 44 SMs 31.5 / 44.0 and 25.0 / 43.6; of four ranks on 24 SMs 52.7 / 87.2
and 51.9 / 95.6. Exact combine of 128 to 512 tokens takes 0.44 to 0.96 of the time by pipelines on 8 and 24 SMs (2 and
4 x H200, 2026-11-27)."""
FAMILIES = ("dispatch", "combine")
"""Operations that have a table; halves and modes share it."""


def has_twins(ctas: int, ring_bytes: int) -> bool:
    """Whether CTAs of dispatch may have twins, with so many CTAs at most. ring_bytes: as of `built_in`."""
    return ctas <= TWIN_CTAS and ring_bytes > 0


def has_pipelines(cfg: EPConfig, ring_bytes: int) -> bool:
    """Whether pipelines of combine carry rows, with so much shared memory for stages: rows are not too long for them,
    and calls of more than LAMPORT_TOKENS tokens are possible, since the arena has room for flagged rows of any number
    of tokens or of none."""
    row_bytes = cfg.hidden * COMBINE_ITEMSIZE
    few = row_bytes <= CONSUMERS * CONSUMER_SEGMENTS * SEGMENT_BYTES
    fits = few and ring_bytes >= (LEAST_STAGES + 1) * PIPELINES * row_bytes
    return fits and cfg.max_tokens_per_rank > LAMPORT_TOKENS


def most_lamport_tokens(ctas: int, pipelines: bool) -> int:
    """Most tokens whose rows come home as Lamport rows, with so many CTAs at most. pipelines: `has_pipelines`."""
    return min(PIPED_TOKENS * ctas, LAMPORT_TOKENS) if pipelines else LAMPORT_TOKENS


def slices_for(tokens: int) -> tuple[int, ...]:
    """Numbers of slices that a row may have in a call of `tokens` tokens: the arena has a flag for each of them."""
    most = MAX_SLICES if tokens <= LAMPORT_TOKENS else MANY_SLICES
    return tuple(1 << log2 for log2 in range(most.bit_length()))


def log2_of(slices: int) -> int:
    """Base-2 logarithm of a number of slices, as headers and kernels have it."""
    return slices.bit_length() - 1


@dataclass(frozen=True)
class Entry:
    """What was fastest up to a number of tokens a rank.

    Attributes:
        tokens: the entry holds up to this many.
        grid: CTAs at most.
        senders: share of the CTAs that send while the others receive; 0: every CTA first sends and then receives.
        slices: slices of a message (dispatch) or of a returned row (combine).
        packed: whether senders share SMs with each other instead of with receivers, which their stores hold up while
            links are busy (dispatch only).
        most_senders: CTAs, or twins, that send at most: more would not fill the links better, but begin to receive
            later, or never.
        split_from: CTAs, or twins, from which on some send and the others receive; of fewer, every one does both.
        joins: whether senders receive, too, when they have sent (dispatch only); then `packed` has no effect.

    Raises:
        EPConfigError: a field breaks its rule.
    """

    tokens: int
    grid: int
    senders: float
    slices: int
    packed: bool = False
    most_senders: int = MANY
    split_from: int = 4
    joins: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "grid", "most_senders", "split_from"):
            value = getattr(self, name)
            if not is_integer(value) or value <= 0:
                raise EPConfigError(f"{name} = {value!r}: must be a positive integer")
        if not is_number(self.senders) or not 0 <= self.senders < 1:
            raise EPConfigError(f"senders = {self.senders!r}: must be a number in [0, 1)")
        allowed = slices_for(self.tokens)
        if not is_integer(self.slices) or self.slices not in allowed:
            names = ", ".join(map(str, allowed))
            raise EPConfigError(f"slices = {self.slices!r}: must be one of {names} for {self.tokens} tokens")


class Shape(NamedTuple):
    """The choice for one call: grid, CTAs below `send_ctas` send, CTAs from `receive_from` receive; slices of each
    message (dispatch), or of each row that is to come back (combine; decided and published by the dispatch before);
    `Entry.packed`; threads of a CTA; whether CTAs have twins (`kernels/device/twins.py`), which then count as CTAs."""

    grid: int
    send_ctas: int
    receive_from: int
    slices: int
    packed: bool = False
    threads: int = THREADS
    twins: bool = False

    @property
    def ctas(self) -> int:
        """CTAs of the launch."""
        return self.grid // CTAS_PER_SM if self.twins else self.grid

    @property
    def joins(self) -> bool:
        """Whether some CTAs send and then receive, while the others receive."""
        return self.receive_from == 0 < self.send_ctas < self.grid

    @property
    def slices_log2(self) -> int:
        """`log2_of` the slices."""
        return log2_of(self.slices)


@dataclass(frozen=True)
class Tuning:
    """The tables of one deployment.

    Attributes:
        dispatch, combine: entries with ascending tokens, the last one's at least MAX_TOKENS_PER_RANK (say, MANY);
            EPConfigError otherwise.
    """

    dispatch: tuple[Entry, ...]
    combine: tuple[Entry, ...]

    def __post_init__(self) -> None:
        for family in FAMILIES:
            table = self.table(family)
            if not isinstance(table, tuple) or not all(isinstance(entry, Entry) for entry in table):
                raise EPConfigError(f"{family} = {table!r}: must be a tuple of Entry")
            ends = [entry.tokens for entry in table]
            if not ends or ends != sorted(set(ends)) or ends[-1] < MAX_TOKENS_PER_RANK:
                raise EPConfigError(f"tokens of {family} = {ends}: must ascend to at least {MAX_TOKENS_PER_RANK}")

    def table(self, operation: str) -> tuple[Entry, ...]:
        """The table of "dispatch", "dispatch_async", ..., "combine_wait" (mode and format do not matter)."""
        return self.dispatch if operation.startswith("dispatch") else self.combine

    def entry(self, operation: str, tokens: int) -> Entry:
        """The entry for `tokens` tokens."""
        for entry in self.table(operation):
            if tokens <= entry.tokens:
                return entry
        raise AssertionError("unreachable")

    def shape(
        self,
        operation: str,
        tokens: int,
        max_ctas: int,
        *,
        whole_rows: bool = False,
        pairs: bool = False,
        whole_sms: bool = False,
        ring_bytes: int = 0,
    ) -> Shape:
        """Shape of one launch.

        Args:
            operation: as `table`.
            tokens: this rank's tokens; the other ranks' numbers may differ.
            max_ctas: CTAs that are resident together.
            whole_rows: combine returns rows, not partial sums. There is more to add up: at most a quarter of the CTAs
                send (2 x H200, 2026-11-26, 1024 and 4096 tokens: 173 and 676 us, by half of them 184 and 701).
            pairs: the CTAs come in pairs, so their number is even unless it is 1.
            whole_sms: each CTA of combine may fill an SM, from WIDE_TOKENS on.
            ring_bytes: as of `built_in`. CTAs of dispatch that may have twins (`has_twins`) do from WIDE_TOKENS on.
        """
        entry, dispatches = self.entry(operation, tokens), operation.startswith("dispatch")
        ctas = min(max_ctas, entry.grid)
        if pairs and ctas > 1:
            ctas -= ctas % 2
        wide = (has_twins(max_ctas, ring_bytes) if dispatches else whole_sms) and tokens >= WIDE_TOKENS * ctas
        twins = wide and dispatches
        grid, threads = ctas * CTAS_PER_SM if twins else ctas, WIDE_THREADS if wide else THREADS
        shape = partial(Shape, grid, slices=entry.slices, threads=threads, twins=twins)
        if operation.endswith("_async"):
            return shape(grid, grid)
        if operation.endswith("_wait"):
            return shape(0, 0)
        most = min(entry.most_senders, grid - 1, max(1, grid // 4) if whole_rows else grid)
        senders = min(round(grid * entry.senders), most)
        if not senders or grid < entry.split_from:
            return shape(grid, 0)
        if entry.joins and dispatches:
            return shape(senders, 0)
        return shape(senders, senders, packed=entry.packed and not twins)

    def revised(self, family: str, found: Mapping[int, Entry]) -> Tuning:
        """This with what was found at some numbers of tokens. A finding holds up to its number, the one of the most
        tokens in a range of the table up to the range's end; ranges without any stay as they are."""
        table: list[Entry] = []
        below = 0
        for end in sorted({LAMPORT_TOKENS, *(entry.tokens for entry in self.table(family))}):
            inside = sorted(tokens for tokens in found if below < tokens <= end)
            entries = [found[tokens] for tokens in inside] or [self.entry(family, end)]
            table += [replace(one, tokens=to) for one, to in zip(entries, [*inside[:-1], end], strict=True)]
            below = end
        return replace(self, **{family: tuple(table)})
