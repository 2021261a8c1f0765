"""Copy role of a receiving warp: one slice of a message to the token's rows, with its scale factors.

Words of Lamport rows are polled until they have arrived, and cleared; other rows have been waited for by the flag of
their chunk. What a warp copies, it holds in registers in between, so a row of several experts is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import clear, move, plain, poll
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.lamport import is_lamport, region_of, wait_lamport
from cute_ep.kernels.device.memory import LANES, WORDS, Row, Share, array, row_address, row_at, share, words_at
from cute_ep.kernels.device.scale_rows import scale_row, scale_row_address
from cute_ep.kernels.device.slices import SEGMENT, RowSlice, from_lane, lowest, vectors_of, without_lowest
from cute_ep.kernels.device.sync import Awaited, wait_signal, warp_all
from cute_ep.kernels.dispatch.given_rows import given_row, given_row_scale, given_scale_word
from cute_ep.kernels.dispatch.message import message_row_scale, message_scales
from cute_ep.kernels.dispatch.row_tables import Tables
from cute_ep.layouts.maps.arena import SENTINEL, HeaderWord, chunk_of
from cute_ep.layouts.maps.routing import Phase

SCALES_IN_FLIGHT = 2
"""Scale words that a lane loads before it stores the first."""


@dataclass(frozen=True)
class Targets:
    """The rows that a slice is copied to; NO_ROW stands for none. Lane k holds output and scale row of entry k, all
    lanes hold the shared expert's row. Bit k of `wanted` is set where entry k has one."""

    row: Int32
    scale_row: Int32
    shared_row: Int32
    wanted: Uint32


class RowCopy:
    """Waits for a slice and copies it. Knows sizes of rows, not formats.

    direct: whether tokens of the own rank are read from the caller's memory (`given_rows`); no message of them is sent,
    or awaited.
    """

    def __init__(self, tables: Tables, direct: bool) -> None:
        self.tables, self.direct = tables, direct

    @cute.jit
    def run(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, targets: Targets) -> Boolean:
        """By one warp. False after a timeout."""
        alive = Boolean(True)
        lamport, own = is_lamport(self._tokens(source)), self._is_own(ctx, source)
        if not (lamport | own):
            alive = self._wait_slice(ctx, source, row_slice)
        if alive:
            rWord = cute.make_rmem_tensor((1, SCALES_IN_FLIGHT), Uint32)
            rWord.fill(SENTINEL)
            alive = self._copy_payload(ctx, source, row_slice, targets, rWord)
            if alive & (ctx.scales.words != 0) & (lamport | own | ~self.tables.are_tiled()):
                alive = self._copy_scales(ctx, source, row_slice, targets, rWord)
            if alive & (ctx.wire.row_scale_bytes != 0) & (row_slice.first == 0):
                alive = self._copy_row_scale(ctx, source, row_slice, targets)
        return alive

    def _tokens(self, source: Int32) -> Int32:
        """Tokens of a source, from its header."""
        return shared_array(self.tables.headers, Int32)[source, int(HeaderWord.TOKENS)]

    def _message(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice) -> Int64:
        """Address of the message that the slice belongs to; of a token of the own rank, of its row."""
        regions = ctx.arena.lamport_messages, ctx.arena.messages
        coord = ctx.epoch & 1, opaque(source), opaque(row_slice.token)
        message = ctx.here(region_of(is_lamport(self._tokens(source)), *regions), *coord)
        if cutlass.const_expr(self.direct):
            message = cutlass.select_(self._is_own(ctx, source), given_row(ctx, row_slice.token), message)
        return message

    def _is_own(self, ctx: DispatchContext, source: Int32) -> Boolean:
        return source == ctx.rank if self.direct else Boolean(False)

    def _are_polled(self, ctx: DispatchContext, source: Int32) -> Boolean:
        """Whether the source's words are awaited, and then cleared, one by one."""
        return is_lamport(self._tokens(source)) & ~self._is_own(ctx, source)

    @cute.jit
    def _wait_lamport(
        self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, poll: Callable[[Uint32], Uint32]
    ) -> Boolean:
        """Poll words of the slice until they have arrived; rows that are not Lamport rows have been waited for."""
        flagged = Uint32(~self._are_polled(ctx, source))
        check = partial(self._has_signaled, ctx, source, row_slice)
        return wait_lamport(
            ctx, poll, check, flagged, Awaited(source, Phase.MESSAGE_WORDS, row_slice.index, row_slice.token)
        )

    def _has_signaled(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice) -> Uint32:
        """Whether the source has signaled the slice's flag."""
        flag = ctx.here(ctx.arena.message_ready, opaque(source), opaque(row_slice.index))
        return Uint32(ctx.has_signaled(flag, ctx.epoch))

    @cute.jit
    def _wait_slice(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice) -> Boolean:
        """Warp-wide wait for message_ready[source][chunk], signaled by `DispatchSend.run` on `source`."""
        arrived = Boolean(True)
        if ctx.lane == 0:
            flag = ctx.here(ctx.arena.message_ready, source, chunk_of(row_slice.index))
            awaited = Awaited(source, Phase.MESSAGE, row_slice.index, row_slice.token)
            arrived = wait_signal(ctx.wait_context, flag, ctx.epoch, awaited)
        return warp_all(arrived)

    @cute.jit
    def _copy_payload(
        self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, targets: Targets, rWord: cute.Tensor
    ) -> Boolean:
        """The slice's payload to all its rows; rWord gets a first poll of its scale words, whose latency stores hide.
        False after a timeout."""
        lane = ctx.lane
        end = cutlass.min(row_slice.last * SEGMENT, vectors_of(opaque(ctx.wire.payload_bytes)))
        home = row_address(ctx.out.tokens, targets.row, ctx.wire.payload_bytes)
        shared_home = row_address(ctx.out.tokens, targets.shared_row, ctx.wire.payload_bytes)
        rQ = cute.make_rmem_tensor((WORDS, LOADS_IN_FLIGHT), Uint32)
        alive = Boolean(True)
        base = row_slice.first
        while alive and base < row_slice.last:
            first = base * SEGMENT + lane
            tMessage = share(row_at(self._message(ctx, source, row_slice), end), first, LOADS_IN_FLIGHT)
            alive = self._wait_lamport(ctx, source, row_slice, partial(self._poll, rQ, tMessage))
            if self._are_polled(ctx, source):
                clear(tMessage)
            if (ctx.scales.words != 0) & self._are_polled(ctx, source) & (base + LOADS_IN_FLIGHT >= row_slice.last):
                poll(self._scale_share(ctx, source, row_slice, 0), rWord)
            store = partial(self._store_vectors, rQ, first, end)
            self._to_each(home, shared_home, targets, store)
            base += LOADS_IN_FLIGHT
        return alive

    @cute.jit
    def _to_each(self, home: Int64, shared_home: Int64, targets: Targets, store: cutlass.Constexpr) -> None:
        """Call store(address) for each row that a slice is copied to: those of lanes `wanted`, then the shared
        expert's."""
        copies = Int32(cute.arch.popc(targets.wanted)) + Int32(targets.shared_row >= 0)
        left = targets.wanted
        for _ in cutlass.range(copies, unroll=1):
            target = shared_home
            if left != Uint32(0):
                target = from_lane(home, lowest(left))
                left = without_lowest(left)
            store(target)

    def _store_vectors(self, rQ: cute.Tensor, first: Int32, end: Int32, home: Int64) -> None:
        """A lane's vectors, from number `first` on, to the row at `home`, as far as vector `end`."""
        move(plain, rQ, share(row_at(home, end), first, LOADS_IN_FLIGHT))

    def _poll(self, rX: cute.Tensor, tMessage: Share, flagged: Uint32) -> Uint32:
        return Uint32(poll(tMessage, rX)) & ~flagged

    def _scale_share(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, base: Int32 | int) -> Share:
        """The lane's scale words of a slice, from the slice's word `base` on."""
        message = self._message(ctx, source, row_slice)
        return self._words_of(ctx, message_scales(ctx.wire, message, self._scale_end(ctx, row_slice)), row_slice, base)

    def _words_of(self, ctx: DispatchContext, words: Row, row_slice: RowSlice, base: Int32 | int) -> Share:
        """What the lane has of a slice's scale words, from the slice's word `base` on, in a row of words."""
        return share(words, row_slice.first * ctx.wire.segment_words + ctx.lane + base, SCALES_IN_FLIGHT)

    def _scale_end(self, ctx: DispatchContext, row_slice: RowSlice) -> Int32:
        """The scale word of a row behind the last one of a slice."""
        return cutlass.min(row_slice.last * ctx.wire.segment_words, ctx.scales.words)

    @cute.jit
    def _copy_scales(
        self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, targets: Targets, rWord: cute.Tensor
    ) -> Boolean:
        """The words of the slice's segments, to all its rows or aside for `ScaleTiles`; rWord is what a poll of the
        first of them has seen. False after a timeout."""
        end = self._scale_end(ctx, row_slice)
        count = end - row_slice.first * ctx.wire.segment_words
        alive = Boolean(True)
        base = Int32(0)
        while alive and base < count:
            tScale = self._scale_share(ctx, source, row_slice, base)
            missing = Boolean(base != 0)
            for turn in cutlass.range_constexpr(SCALES_IN_FLIGHT):
                missing = missing | (tScale.has(turn) & (rWord[turn] == Uint32(SENTINEL)))
            if self._is_own(ctx, source):
                self._load_scales(ctx, row_slice, rWord, base)
            elif cute.arch.vote_any_sync(missing):
                alive = self._wait_lamport(ctx, source, row_slice, partial(self._poll, rWord, tScale))
            if self._are_polled(ctx, source):
                clear(tScale)
            if self.tables.are_tiled():
                kept = ctx.here(ctx.arena.staged_scales, opaque(source), opaque(row_slice.token))
                if cutlass.const_expr(self.direct):
                    if ~is_lamport(self._tokens(source)):  # own: where a message would have them
                        message = ctx.here(ctx.arena.messages, ctx.epoch & 1, opaque(source), opaque(row_slice.token))
                        kept = message_scales(ctx.wire, message, end).address
                move(plain, rWord, self._words_of(ctx, words_at(kept, end), row_slice, base))
            else:
                home = scale_row_address(ctx.scales, targets.scale_row)
                shared_home = scale_row_address(ctx.scales, targets.shared_row)
                store = partial(self._store_words, ctx, rWord, row_slice, end, base)
                self._to_each(home, shared_home, targets, store)
            base += 32 * SCALES_IN_FLIGHT
        return alive

    def _store_words(
        self, ctx: DispatchContext, rWord: cute.Tensor, row_slice: RowSlice, end: Int32, base: Int32, home: Int64
    ) -> None:
        """The lane's words, as of `_words_of`, to the scale row whose word 0 is at `home`."""
        move(plain, rWord, self._words_of(ctx, scale_row(ctx.scales, home, end), row_slice, base))

    @cute.jit
    def _load_scales(self, ctx: DispatchContext, row_slice: RowSlice, rWord: cute.Tensor, base: Int32) -> None:
        """The lane's words of a slice of the own rank's, from the slice's word `base` on."""
        if cutlass.const_expr(self.direct):
            first = row_slice.first * ctx.wire.segment_words
            for turn in cutlass.range_constexpr(SCALES_IN_FLIGHT):
                word = base + ctx.lane + LANES * turn
                if first + word < self._scale_end(ctx, row_slice):
                    rWord[turn] = given_scale_word(ctx, row_slice.token, first + word)

    @cute.jit
    def _copy_row_scale(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, targets: Targets) -> Boolean:
        tScale = share(message_row_scale(ctx.wire, self._message(ctx, source, row_slice)), 0, 1)
        rWord = cute.make_rmem_tensor((1, 1), Uint32)
        alive = Boolean(True)
        if self._is_own(ctx, source):
            if cutlass.const_expr(self.direct):
                rWord[0] = given_row_scale(ctx, row_slice.token)
        else:
            alive = self._wait_lamport(ctx, source, row_slice, partial(self._poll, rWord, tScale))
        scale = Uint16(rWord[0])
        gRowScale = array(ctx.out.row_scales, Uint16, ctx.out.capacity)
        if targets.row >= 0:
            gRowScale[targets.row] = scale
        if ctx.lane == 0:
            if targets.shared_row >= 0:
                gRowScale[targets.shared_row] = scale
            if self._are_polled(ctx, source):
                clear(tScale)
        return alive
