"""The vocabulary of synchronisation: every signal, wait and kernel exit in this package is one of these. The last two
are in `atoms`, their waits in `lamport`. Only pipelines of combine have more, between warps of a CTA
(`kernels/combine/ring.py`, `consume.py`).

Flags are 64-bit epochs that only grow, stored by exactly one rank and never reset, so a wait is `flag >= epoch`. LL
words (the name is NCCL's) carry a 32-bit value below the low 32 bits of its epoch, in one 64-bit store: the value needs
no ordering. (A word that no round has written for exactly 2^32 rounds would pass for a new one.)

| word           | PTX                                   | orders                                           |
| -------------- | ------------------------------------- | ------------------------------------------------ |
| `signal`       | st.release.sys                        | all that happens before it -> the flag           |
| `wait_signal`  | ld.acquire.sys loop                   | the flag -> all that happens after it            |
| `load_flag`    | ld.acquire.sys                        | as `wait_signal`, for the epoch that it returns  |
| `store_ll`     | st.relaxed.sys                        | nothing: the value is in the word                |
| `wait_ll`      | ld.relaxed.sys loop                   | nothing: the value is in the word                |
| `block_all`    | barrier.cta.red.and.aligned           | one thread's wait -> the whole CTA, and verdict  |
| `twin_all`     | the same, with a number               | the same within a twin (`twins`)                 |
| `warp_all`     | vote, bar.warp.sync                   | one lane's wait -> the whole warp, and verdict   |
| `count_exit`   | atom.relaxed                          | publication -> retraction, if a wait failed      |
| `grid_barrier` | atom.release.gpu, ld.acquire.sys loop | all of every CTA before it -> all after it       |
| `take_ticket`  | atom.relaxed.gpu                      | nothing: a ticket goes to one warp or CTA        |
| `send`         | st.relaxed.sys.v4.b32                 | nothing: a word that is not SENTINEL has arrived |
| `poll`         | ld.relaxed.sys.v4.b32                 | nothing: the value is in the word                |

`signal` covers stores of other lanes of the warp, or threads of the CTA, when a warp or CTA barrier stands between
(causality order is transitive).
None of these is a proxy fence: data moved by the async proxy needs its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import nvvm

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.divide import remainder
from cute_ep.kernels.device.memory import pointer, row_address, vectors_at
from cute_ep.kernels.device.twins import twin_barrier
from cute_ep.layouts.maps.arena import LL_BYTES
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.routing import INPUT_ERRORS, Phase, StatusWord, pack_phase
from cute_ep.layouts.maps.scales import WORD_BYTES

if TYPE_CHECKING:
    from cute_ep.kernels.device.context import Context


def word_address(words: Int64, index: Int32 | int) -> Int64:
    """Address of one of an array of flags, or of LL words."""
    return row_address(words, index, LL_BYTES)


def signal(flag: Int64, epoch: Int64) -> None:
    """Publish `epoch` at address `flag` (own or peer memory), after everything that happened before."""
    cute.arch.store(pointer(flag, Int64), epoch, sem="release", scope="sys")


def load_flag(flag: Int64) -> Int64:
    """The epoch in the flag at address `flag`. What happened before it was signaled happens before what follows."""
    return cute.arch.load(pointer(flag, Int64), Int64, sem="acquire", scope="sys")


def store_ll(word: Int64, value: Int32, epoch: Int64) -> None:
    """Publish a 32-bit value of round `epoch` at address `word` (own or peer memory)."""
    content = (epoch << 32) | Int64(Uint32(value))
    cute.arch.store(pointer(word, Int64), content, sem="relaxed", scope="sys")


def now_ns() -> Int64:
    """Nanoseconds of the device's global timer."""
    return Int64(cute.arch.globaltimer())


@dataclass(frozen=True)
class WaitContext:
    """What bounded waits and reports need: the longest time, the host-visible records, this rank's abort word."""

    timeout_ns: Int64
    status: Int64
    abort: Int64


@dataclass(frozen=True)
class Awaited:
    """What a wait waits for, as a status record tells it.

    Attributes:
        peer: the rank that brings it, by whose number the record is found.
        phase: the kind of wait.
        index: which one of the phase's.
        token: that it belongs to.
        slices_log2: in place of `token`, where `index` counts slices: base-2 logarithm of those of a token. A kernel's
            argument takes no register during the wait.
    """

    peer: Int32
    phase: Phase
    index: Int32
    token: Int32 | int = 0
    slices_log2: Int32 | None = None


def not_aborted(abort: Int64) -> Boolean:
    """Whether no wait of the rank with this abort word has failed."""
    return cute.arch.load(pointer(abort, Int64), Int64, sem="relaxed", scope="gpu") == 0


@cute.jit
def report(wait_context: WaitContext, awaited: Awaited, expected: Int32 | Int64, seen: Int32 | Int64) -> None:
    """Write one host-visible status record in a single 16-byte store, and unless it is about input, raise this rank's
    abort word. Of a peer the first report is kept (of several at the same moment any), of a kind of input the last."""
    record = row_address(wait_context.status, awaited.peer, len(StatusWord) * WORD_BYTES)
    unwritten = Boolean(True)
    if cutlass.const_expr(awaited.phase not in INPUT_ERRORS):
        unwritten = cute.arch.load(pointer(record, Int32), Int32, sem="relaxed", scope="gpu") == int(Phase.NONE)
    if unwritten:
        token = Int32(awaited.token)
        if cutlass.const_expr(awaited.slices_log2 is not None):
            token = opaque(Int32(awaited.index)) >> awaited.slices_log2
        words = cute.make_rmem_tensor(len(StatusWord), Uint32)
        words[StatusWord.PHASE] = Uint32(pack_phase(int(awaited.phase), token))
        words[StatusWord.INDEX] = Uint32(Int32(awaited.index))
        words[StatusWord.EXPECTED] = Uint32(expected)
        words[StatusWord.SEEN] = Uint32(seen)
        move(plain, [words], vectors_at(record, 0))
        cute.arch.fence_acq_rel_sys()
    if cutlass.const_expr(awaited.phase not in INPUT_ERRORS):
        cute.arch.store(pointer(wait_context.abort, Int64), Int64(1), sem="relaxed", scope="gpu")


POLLS_PER_TIME_CHECK = 64
"""Polls between two checks of the clock and the abort word, which cost more than a poll."""


@cute.jit
def wait_signal(wait_context: WaitContext, flag: Int64, epoch: Int64, awaited: Awaited) -> Boolean:
    """One thread polls `flag`, which the peer signals, until it holds at least `epoch`.

    False after `timeout_ns`: then the status record of the peer says what was missing. False without a record when
    another wait of this rank has failed, now or in an earlier launch.
    """
    _, arrived = _poll(wait_context, flag, epoch, awaited, False)
    return arrived


@cute.jit
def wait_ll(wait_context: WaitContext, word: Int64, epoch: Int64, awaited: Awaited) -> tuple[Int32, Boolean]:
    """One thread polls an LL word, which the peer stores, until it is of round `epoch`: (value, whether it is).

    Fails as `wait_signal` does.
    """
    content, arrived = _poll(wait_context, word, epoch, awaited, True)
    return Int32(content), arrived


@cute.jit
def wait_two_ll(
    wait_context: WaitContext, first: Int64, second: Int64, epoch: Int64, awaited: Awaited
) -> tuple[Int32, Int32, Boolean]:
    """`wait_ll` for two words, whose latencies overlap: (value, value, whether both arrived)."""
    value = cute.arch.load(pointer(first, Int64), Int64, sem="relaxed", scope="sys")
    other = cute.arch.load(pointer(second, Int64), Int64, sem="relaxed", scope="sys")
    came = _has_arrived(value, epoch, True)
    if not came:
        value, came = _poll(wait_context, first, epoch, awaited, True)
    if came and not _has_arrived(other, epoch, True):
        other, came = _poll(wait_context, second, epoch, awaited, True)
    return Int32(value), Int32(other), came


def _has_arrived(seen: Int64, epoch: Int64, tagged: bool) -> Boolean:
    return Uint32(seen >> 32) == Uint32(epoch) if tagged else seen >= epoch


@cute.jit
def _poll(
    wait_context: WaitContext, word: Int64, epoch: Int64, awaited: Awaited, tagged: cutlass.Constexpr
) -> tuple[Int64, Boolean]:
    """(last content seen, whether it is what was waited for and this rank is healthy)."""
    order = "relaxed" if cutlass.const_expr(tagged) else "acquire"
    where = pointer(word, Int64)
    running = not_aborted(wait_context.abort)
    seen = cute.arch.load(where, Int64, sem=order, scope="sys")
    arrived = _has_arrived(seen, epoch, tagged)
    if not arrived:
        limit = now_ns() + wait_context.timeout_ns
        in_time = Boolean(True)
        while not arrived and running and in_time:
            polls = Int32(0)
            while not arrived and polls < POLLS_PER_TIME_CHECK:
                seen = cute.arch.load(where, Int64, sem=order, scope="sys")
                arrived = _has_arrived(seen, epoch, tagged)
                polls += 1
            if not arrived:
                running = not_aborted(wait_context.abort)
                in_time = now_ns() < limit
        if not arrived and running:
            epoch_seen = seen
            if cutlass.const_expr(tagged):
                epoch_seen = seen >> 32
            report(wait_context, awaited, epoch, epoch_seen)
    return seen, arrived & running


def block_all(verdict: Boolean) -> Boolean:
    """CTA barrier that returns whether `verdict` held in every thread. All threads of the CTA come here."""
    result = nvvm.barrier(  # `cute.arch.barrier` has no reduction
        reduction_op=nvvm.BarrierReduction.AND, reduction_predicate=Int32(verdict).ir_value(), results=[Int32.mlir_type]
    )
    return opaque(result) != 0  # a number: a predicate that lives long is spilled


def twin_all(verdict: Boolean) -> Boolean:
    """`block_all` of a twin. PTX, since the DSL's barrier that reduces has no number."""
    result = cute.arch.inline_ptx(
        "{ .reg .pred own, every; setp.ne.u32 own, {$r0}, 0; "
        f"barrier.cta.red.and.aligned.pred every, {{$r1}}, {THREADS}, own; selp.u32 {{$w0}}, 1, 0, every; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(verdict), twin_barrier()],
    )
    return result != 0


def warp_all(verdict: Boolean) -> Boolean:
    """Warp barrier that returns whether `verdict` held in every lane; orders memory among the lanes."""
    result = cute.arch.vote_all_sync(verdict)
    cute.arch.sync_warp()
    return result


PATIENCE = 8
"""Times `timeout_ns` that a CTA waits for the others of its launch: they may have several waits before them."""


@cute.jit
def grid_barrier(ctx: Context, counter: Int64, ctas: Int32, alive: Boolean) -> Boolean:
    """Barrier of `ctas` CTAs of a launch, which must be resident together; `counter` begins at 0.

    False, in every thread, if this CTA is not alive, or when another one is not: that has raised the abort word.
    """
    alive = ctx.block_all(alive)
    if alive:
        if ctx.tid == 0:
            cute.arch.atomic_add(pointer(counter, Int64), Int64(1), sem="release", scope="gpu")
            hasty = ctx.wait_context
            patient = WaitContext(hasty.timeout_ns * PATIENCE, hasty.status, hasty.abort)
            alive = wait_signal(patient, counter, Int64(ctas), Awaited(ctx.rank, Phase.GRID, Int32(0)))
        alive = ctx.block_all(alive)
    return alive


def take_ticket(counter: Int64) -> Int32:
    """The next of the tickets 0, 1, ...; `counter` begins a launch at 0."""
    return cute.arch.atomic_add(pointer(counter, Int32), Int32(1), sem="relaxed", scope="gpu")


def reset_counter(counter: Int64) -> None:
    """Reset a counter of `grid_barrier` or `take_ticket` that no CTA of this launch still reads."""
    cute.arch.store(pointer(counter, Int64), Int64(0), sem="relaxed", scope="gpu")


FAILED = 1 << 16
"""Added to the exit counter by a CTA whose wait timed out; a grid has fewer CTAs than this."""


@cute.jit
def count_exit(counter: Int64, ctas: Int32, alive: Boolean, publishes: Boolean, tid: Int32) -> tuple[Boolean, Boolean]:
    """Count this CTA out of the launch; thread 0 of the last one gets (True, whether every CTA was alive).

    Comes after a CTA barrier. Orders nothing in a round that succeeds: the end of the launch does that for whatever
    comes after it on the stream, and the epoch words are read before (their values were used) and written after, by the
    last CTA only. In a round where some CTA failed, the stores of the CTA that `publishes` outputs happen before the
    last one's retraction: that CTA fences before it counts itself out, the last one after.
    """
    last = Boolean(False)
    complete = Boolean(False)
    if tid == 0:
        if publishes:
            cute.arch.fence_acq_rel_gpu()
        word = pointer(counter, Int32)
        mine = cutlass.select_(alive, Int32(1), Int32(1 + FAILED))
        after = cute.arch.atomic_add(word, mine, sem="relaxed", scope="gpu") + mine
        last = remainder(after, FAILED) == ctas
        complete = after == ctas
        if last:
            if not complete:
                cute.arch.fence_acq_rel_gpu()
            cute.arch.store(word, Int32(0), sem="relaxed", scope="gpu")
    return last, complete
