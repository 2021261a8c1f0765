"""How rows move: `move` takes a thread's share of a row from memory to registers, or back, by one of these atoms, 16
bytes or a word at a time. What a wait polls, `poll` loads.

| atom             | PTX                               | for                                               |
| ---------------- | --------------------------------- | ------------------------------------------------- |
| `plain`          | ld / st.global, ld / st.shared    | what only this launch touches, or a wait protects |
| `send`           | st.relaxed.sys.global             | an arena, in which somebody may be polling        |
| `streamed(once)` | ld.global or ld.global.cs         | expert rows, which may be the first to leave L2   |
| `fetch`          | cp.async.cg / .ca.shared.global   | rows on their way into shared memory              |
| `bulk`           | cp.async.bulk to shared memory    | whole rows, by one thread and without `move`      |
| `poll`           | ld.relaxed.sys.global             | Lamport words that may be on their way            |

`poll` and `streamed` are PTX: with a memory order (CopyG2ROp) combine spills 8 bytes a thread on sm_90a, and the cache
hint of a copy atom cannot be chosen at run time (DSL 4.8.1). `bulk` is PTX since CopyBulkG2SOp takes a number of bytes
that is known when it is compiled. The others are copy atoms; `Share` has what `make_tiled_copy_tv` would make of a row
whose length is known when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import CopyR2GOp, CopyUniversalOp, MemoryOrder, MemoryScope
from cutlass.cute.nvgpu.cpasync import CopyG2SOp, LoadCacheMode

from cute_ep.kernels.device.memory import WORDS, Share, Vectors
from cute_ep.layouts.maps.arena import SENTINEL
from cute_ep.layouts.maps.formats import VECTOR_BYTES

Atom: TypeAlias = Callable[[cute.Tensor, cute.Tensor], None]
"""Moves a vector, or a word, from one tensor to another."""


def move(
    atom: Atom, source: Vectors, target: Vectors, *, outside: int | None = None, turns: Sequence[int] | None = None
) -> None:
    """Move what a thread has of a row, turn by turn; where a `Share` says that the row has ended, nothing.

    Args:
        atom: one of this file.
        source, target: one of them may be a `Share`, whose turns are moved.
        outside: the word that registers get where the row has ended; None: they stay as they are. `fetch` writes 0.
        turns: those to move; by default all.

    Raises:
        ValueError: the row has more turns than what it is moved from or to.
    """
    row, other = (source, target) if isinstance(source, Share) else (target, source)
    count = _turns_within(row, other)
    for turn in range(count) if turns is None else turns:
        vectors = _vector(source, turn), _vector(target, turn)
        inside = row.has(turn) if isinstance(row, Share) else True
        if atom is fetch:
            _fetch(*vectors, inside)
        elif inside is True:
            atom(*vectors)
        else:
            _move_inside(atom, *vectors, inside, outside)


@cute.jit
def _move_inside(
    atom: cutlass.Constexpr, source: cute.Tensor, target: cute.Tensor, inside: Boolean, outside: cutlass.Constexpr
) -> None:
    if cutlass.const_expr(outside is not None):
        target.fill(outside)
    if inside:
        atom(source, target)


def _turns_within(row: Vectors, other: Vectors) -> int:
    """Turns of a row, for which there is room in `other`: the DSL compiles an index beyond a tensor's registers."""
    count, room = _turns(row), _turns(other)
    if count > room:
        raise ValueError(f"turns of the row = {count}: must be at most {room}, for which there is room")
    return count


def _turns(vectors: Vectors) -> int:
    if isinstance(vectors, Share):
        return vectors.turns
    return len(vectors) if isinstance(vectors, Sequence) else cute.size(vectors, mode=[1])


def _vector(vectors: Vectors, turn: int) -> cute.Tensor:
    return vectors[turn] if isinstance(vectors, Share | Sequence) else vectors[None, turn]


def plain(source: cute.Tensor, target: cute.Tensor) -> None:
    """A weak access."""
    weak = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=32 * cute.size(source))
    cute.copy(weak, source, target)


def send(rWords: cute.Tensor, gWords: cute.Tensor) -> None:
    """Store into own or peer memory."""
    order = {"memory_order": MemoryOrder.RELAXED, "memory_scope": MemoryScope.SYS}
    ordered = cute.make_copy_atom(CopyR2GOp(), Uint32, num_bits_per_copy=32 * cute.size(rWords), **order)
    cute.copy(ordered, rWords, gWords)


def streamed(once: Boolean) -> Atom:
    """Load a vector; with `once` it is the first to leave the caches."""
    loads = f"@once ld.global.cs.{FOUR_WORDS}; @!once ld.global.{FOUR_WORDS};"
    ptx = f"{{ .reg .pred once; setp.ne.u32 once, {{$r1}}, 0; {loads} }}"
    return lambda gWords, rWords: _load(rWords, ptx, gWords, Int32(once))


def fetch(gWords: cute.Tensor, sWords: cute.Tensor) -> None:
    """Begin to copy a vector, or a word, into shared memory, zeros where the row has ended."""
    _fetch(gWords, sWords, True)


def _fetch(gWords: cute.Tensor, sWords: cute.Tensor, inside: Boolean | bool) -> None:
    mode = LoadCacheMode.ALWAYS if cute.size(sWords) == 1 else LoadCacheMode.GLOBAL
    ahead = cute.make_copy_atom(CopyG2SOp(mode), Uint32, num_bits_per_copy=32 * cute.size(sWords))
    rInside = cute.make_rmem_tensor(cute.make_layout(cute.size(sWords), stride=0), Boolean)
    rInside[0] = Boolean(inside)
    cute.copy(ahead, gWords, sWords, pred=rInside)


def bulk(address: Int64, offset: Int32, nbytes: Int32, barrier: cute.Pointer) -> None:
    """Begin to copy bytes, a multiple of 16, to a byte of dynamic shared memory, and tell a barrier that expects them.
    By one thread."""
    place = cute.arch.get_dyn_smem(Uint8, alignment=VECTOR_BYTES) + offset
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[place.toint(), address, nbytes, barrier.toint()],
    )


@cute.jit
def poll(source: Share, rX: cute.Tensor) -> Boolean:
    """Load a thread's share of a row, (word, turn), as far as the row goes; whether one of its words is SENTINEL.
    ValueError as `move`."""
    missing = Boolean(False)
    for turn in cutlass.range_constexpr(_turns_within(source, rX)):
        inside = Boolean(source.has(turn))
        if inside:
            _poll(source[turn], rX[None, turn])
        missing = missing | (inside & has_sentinel(rX[None, turn]))
    return missing


def _poll(gWords: cute.Tensor, rWords: cute.Tensor) -> None:
    if cute.size(rWords) == 1:
        rWords[0] = cute.arch.load(gWords.iterator, Uint32, sem="relaxed", scope="sys")
    else:
        _load(rWords, f"ld.relaxed.sys.global.{FOUR_WORDS};", gWords)


def clear(target: Share) -> None:
    """Store SENTINEL in all words of a thread's share of a row."""
    fill(SENTINEL, target)


def fill(word: int, target: Share) -> None:
    """Store one word everywhere in a thread's share of a row, as `plain` does."""
    width = cute.size(target.tensor, mode=[0])
    rWords = cute.make_rmem_tensor(width, Uint32)
    rWords.fill(word)
    move(plain, [rWords] * target.turns, target)


def word_of(value: Uint32) -> cute.Tensor:
    """One word as registers that `move` takes: (word, turn) : one each."""
    rWord = cute.make_rmem_tensor((1, 1), Uint32)
    rWord[0, 0] = value
    return rWord


def has_sentinel(rWords: cute.Tensor) -> Boolean:
    """Whether one of the words is SENTINEL."""
    largest = rWords[0]
    for index in range(1, cute.size(rWords)):
        largest = cutlass.max(largest, rWords[index])
    return largest == Uint32(SENTINEL)


FOUR_WORDS = "v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]"
"""Operands of a load of `_load`."""


def _load(rWords: cute.Tensor, ptx: str, gWords: cute.Tensor, *arguments: Int32) -> None:
    """Run PTX that leaves four words, from an address that is its first argument."""
    read = [gWords.iterator.toint(), *arguments]
    seen = cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * WORDS, read_only_args=read)
    for index in range(WORDS):
        rWords[index] = seen[index]
