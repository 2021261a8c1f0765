"""Which words of a row a lane takes, by the layouts of kernels and by the verbs of `TileTensor`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Int32, Int64

from cute_ep.kernels.device.block import swizzled
from cute_ep.kernels.device.memory import LANES, lane_tile, lane_words, place_of, vector
from cute_ep.layouts import Layout, TileTensor

from .host import run_map

SEGMENTS = 5
WORDS = 4
BASE = 1 << 40
ROW = TileTensor(Layout((SEGMENTS * LANES * WORDS,), (1,)))


def addresses(place, *inputs: np.ndarray) -> np.ndarray:
    """Bytes from BASE to the pointer that `place` finds for each case."""

    def halves(*case):
        offset = Int64(place(*case).toint()) - BASE
        return Int32(offset), Int32(offset >> 32)

    low, high = run_map(halves, *inputs, outputs=2)
    return low.astype(np.int64) + (high.astype(np.int64) << 32)


def test_a_lane_takes_the_vectors_that_vectorize_and_distribute_give_it() -> None:
    first, lane = (axis.ravel().astype(np.int32) for axis in np.mgrid[:SEGMENTS, :LANES])
    for turn in range(SEGMENTS):
        found = addresses(
            lambda first, lane, turn=turn: lane_tile(Int64(BASE), first * LANES + lane, SEGMENTS)[None, turn].iterator,
            first,
            lane,
        )
        for start, thread, offset in zip(first, lane, found, strict=True):
            own = ROW.vectorize(WORDS).distribute(Layout((LANES,), (1,)), int(thread))
            if start + turn < SEGMENTS:
                corner = own.base + own.layout(int(start) + turn)
                assert offset == 4 * corner, (start, thread, turn)


def test_offsets_of_a_row_have_64_bits() -> None:
    far = np.array([(1 << 31) - 1, 1 << 28], np.int32)
    assert addresses(lambda index: vector(Int64(BASE), index).iterator, far).tolist() == [
        16 * int(index) for index in far
    ]
    assert addresses(lambda index: lane_tile(Int64(BASE), index, 2)[None, 1].iterator, far).tolist() == [
        16 * (int(index) + LANES) for index in far
    ]


def test_a_lane_takes_every_32nd_word() -> None:
    words = np.arange(70, dtype=np.int32)
    for turn in (0, 1, 3):
        found = addresses(lambda word, turn=turn: place_of(lane_words(Int64(BASE), word, turn + 1), turn), words)
        assert found.tolist() == [4 * (word + LANES * turn) for word in range(70)]


@pytest.mark.parametrize("apart", [1, 2, 4])
def test_eight_vectors_that_are_moved_together_meet_all_banks(apart: int) -> None:
    for first in range(0, 64, 8 * apart):
        places = {swizzled(first + apart * turn) % 8 for turn in range(8)}
        assert places == set(range(8))
    assert sorted(map(swizzled, range(128))) == list(range(128))
