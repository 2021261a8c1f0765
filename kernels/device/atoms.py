"""How bytes move: every copy in a kernel is one of these atoms, 16 bytes a thread unless it says words.

| atom                    | PTX                                | for                                               |
| ----------------------- | ---------------------------------- | ------------------------------------------------- |
| `weak`                  | ld / st.global.v4, ld / st.shared  | what only this launch touches, or a wait protects |
| `send`, `send_word`     | st.relaxed.sys.global              | an arena, in which somebody may be polling        |
| `poll`, `poll_word`     | ld.relaxed.sys.global              | Lamport words that may be on their way            |
| `clear`, `clear_word`   | st.global                          | Lamport words that this rank has taken            |
| `load_row`              | ld.global or ld.global.cs          | expert rows, which may be the first to leave L2   |
| `fetch`, `fetch_word`   | cp.async.cg / .ca.shared.global    | rows and words on their way into shared memory    |

`poll` and `load_row` are PTX: with a memory order (CopyG2ROp) combine spills 8 bytes a thread on sm_90a, and the cache
hint of a copy atom cannot be chosen at run time (DSL 4.8.1). `send`, the store that `poll` waits for, is PTX like it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cute_ep.layouts.maps.arena import SENTINEL
from cute_ep.layouts.maps.formats import VECTOR_BYTES

WORDS = VECTOR_BYTES // 4


def weak() -> cute.CopyAtom:
    """Copy atom of one plain access."""
    return cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=8 * VECTOR_BYTES)


def send(rWord: cute.Tensor, gWord: cute.Tensor) -> None:
    """Store a vector into own or peer memory."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[gWord.iterator.toint(), *(Uint32(rWord[index]) for index in range(WORDS))],
    )


def send_word(word: Uint32, place: cute.Pointer) -> None:
    """Store a word at a pointer into own or peer memory."""
    cute.arch.store(place, word, sem="relaxed", scope="sys")


def poll(gWord: cute.Tensor, rWord: cute.Tensor) -> None:
    """Load a vector."""
    _load(rWord, f"ld.relaxed.sys.global.{FOUR_WORDS};", gWord)


def poll_word(place: cute.Pointer) -> Uint32:
    """Load the word at a pointer."""
    return cute.arch.load(place, Uint32, sem="relaxed", scope="sys")


def clear(gWord: cute.Tensor) -> None:
    """Store SENTINEL in all words of a vector."""
    rWord = cute.make_rmem_tensor(WORDS, Uint32)
    rWord.fill(SENTINEL)
    cute.copy(weak(), rWord, gWord)


def clear_word(place: cute.Pointer) -> None:
    """Store SENTINEL at a pointer."""
    cute.arch.store(place, Uint32(SENTINEL))


def load_row(gWord: cute.Tensor, rWord: cute.Tensor, once: Boolean) -> None:
    """Load a vector; with `once` it is the first to leave the caches."""
    loads = f"@once ld.global.cs.{FOUR_WORDS}; @!once ld.global.{FOUR_WORDS};"
    _load(rWord, f"{{ .reg .pred once; setp.ne.u32 once, {{$r1}}, 0; {loads} }}", gWord, Int32(once))


def fetch(gWord: cute.Tensor, sWord: cute.Tensor, inside: Boolean) -> None:
    """Begin to copy a vector into shared memory, or zeros if it is not `inside`."""
    size = cutlass.select_(inside, Int32(VECTOR_BYTES), Int32(0))
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[sWord.iterator.toint(), gWord.iterator.toint(), size],
    )


def fetch_word(place: cute.Pointer, sWord: cute.Pointer) -> None:
    """Begin to copy the word at a pointer into shared memory."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[sWord.toint(), place.toint()]
    )


FOUR_WORDS = "v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]"
"""Operands of a load of `_load`."""


def _load(rWord: cute.Tensor, ptx: str, gWord: cute.Tensor, *arguments: Int32) -> None:
    """Run PTX that leaves four words, from an address that is its first argument."""
    read = [gWord.iterator.toint(), *arguments]
    seen = cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * WORDS, read_only_args=read)
    for index in range(WORDS):
        rWord[index] = seen[index]
