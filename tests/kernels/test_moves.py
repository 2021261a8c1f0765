"""`move` on the CPU: what a thread has of a row gets there, and nothing else is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int32, Int64, Uint32, cute

from cute_ep.kernels.device.atoms import fill, move, plain, poll
from cute_ep.kernels.device.memory import Share, row_at, share, words_at
from cute_ep.layouts.maps.arena import SENTINEL

POISON = 0x5A5A5A5A
TURNS, LANES, VECTORS = 3, 4, 16


@cute.jit
def load_one(source: Int64, target: Int64, vectors: Int32, first: Int32):
    rX = cute.make_rmem_tensor((4, TURNS), Uint32)
    rX.fill(7)
    move(plain, share(row_at(source, vectors), first, TURNS, LANES), rX, outside=9)
    move(plain, rX, share(row_at(target, VECTORS), Int32(0), TURNS, LANES))


@cute.jit
def load_kept(source: Int64, target: Int64, vectors: Int32, first: Int32):
    rX = cute.make_rmem_tensor((4, TURNS), Uint32)
    rX.fill(7)
    move(plain, share(row_at(source, vectors), first, TURNS, LANES), rX)
    move(plain, rX, share(row_at(target, VECTORS), Int32(0), TURNS, LANES))


@cute.jit
def store_filled(source: Int64, target: Int64, vectors: Int32, first: Int32):
    fill(SENTINEL, share(row_at(target, vectors), first, TURNS, LANES))


@cute.jit
def store_words(source: Int64, target: Int64, vectors: Int32, first: Int32):
    fill(3, share(words_at(target, vectors, 2), first, TURNS, LANES))


def run(function, vectors: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, target), words by vector."""
    source = torch.arange(1, 1 + 4 * VECTORS, dtype=torch.int32)
    target = torch.full((4 * VECTORS,), POISON, dtype=torch.int32)
    function(Int64(source.data_ptr()), Int64(target.data_ptr()), Int32(vectors), Int32(first))
    return tuple(one.numpy().view(np.uint32).reshape(-1, 4) for one in (source, target))


CASES = pytest.mark.parametrize(
    "vectors, first", [(16, 0), (16, 3), (9, 1), (5, 1), (5, 0), (1, 0), (1, 1), (0, 0), (4, 9)]
)


@CASES
@pytest.mark.parametrize("function, outside", [(load_one, 9), (load_kept, 7)], ids=["outside", "kept"])
def test_a_load_takes_what_the_row_has(function, outside: int, vectors: int, first: int) -> None:
    source, target = run(function, vectors, first)
    for turn in range(TURNS):
        place = first + turn * LANES
        want = source[place] if place < vectors else [outside] * 4
        np.testing.assert_array_equal(target[turn * LANES], want)
    others = [vector for vector in range(VECTORS) if vector % LANES or vector >= TURNS * LANES]
    assert (target[others] == POISON).all()


def _move(gRow: Share, rX: cute.Tensor) -> None:
    move(plain, gRow, rX)


def _move_turn(gRow: Share, rX: cute.Tensor) -> None:
    move(plain, gRow, rX, turns=[0])


def _move_back(gRow: Share, rX: cute.Tensor) -> None:
    move(plain, [rX[None, 0], rX[None, 1]], gRow)


def _poll(gRow: Share, rX: cute.Tensor) -> None:
    poll(gRow, rX)


@pytest.mark.parametrize("one", [_move, _move_turn, _move_back, _poll])
def test_a_share_has_no_more_turns_than_registers(one) -> None:
    """The DSL would compile it."""

    @cute.jit
    def compiled(address: Int64):
        one(share(row_at(address, VECTORS), Int32(0), 3, LANES), cute.make_rmem_tensor((4, 2), Uint32))

    with pytest.raises(Exception, match="turns of the row = 3: must be at most 2"):
        compiled(Int64(0))


@CASES
def test_a_store_ends_with_the_row(vectors: int, first: int) -> None:
    _, target = run(store_filled, vectors, first)
    places = {first + turn * LANES for turn in range(TURNS)} & set(range(vectors))
    for vector in range(VECTORS):
        assert (target[vector] == (SENTINEL if vector in places else POISON)).all(), vector


@CASES
def test_words_lie_a_step_apart(vectors: int, first: int) -> None:
    _, target = run(store_words, vectors, first)
    places = {2 * (first + turn * LANES) for turn in range(TURNS) if first + turn * LANES < vectors}
    for word, found in enumerate(target.ravel()):
        assert found == (3 if word in places else POISON), word
