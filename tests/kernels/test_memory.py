"""Which words of a row a thread takes, by the layouts of kernels and by `TileTensor`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Int32, Int64, Uint8

from cute_ep.kernels.device.block import swizzled
from cute_ep.kernels.device.memory import (
    LANES,
    DeviceRegion,
    array,
    element,
    pointer,
    row_at,
    share,
    vectors_at,
    words_at,
)
from cute_ep.layouts import Layout, TileTensor
from cute_ep.layouts.maps.record import RegionMap

from .host import run_map

SEGMENTS = 5
WORDS = 4
BASE = 1 << 40
ROW = TileTensor(Layout((SEGMENTS * LANES,), (WORDS,)))
"""First words of a row's vectors."""


def addresses(place, *inputs: np.ndarray) -> np.ndarray:
    """Bytes from BASE to the pointer that `place` finds for each case."""

    def halves(*case):
        offset = Int64(place(*case).toint()) - BASE
        return Int32(offset), Int32(offset >> 32)

    low, high = run_map(halves, *inputs, outputs=2)
    return low.astype(np.int64) + (high.astype(np.int64) << 32)


def test_a_lane_takes_the_vectors_that_distribute_gives_it() -> None:
    first, lane = (axis.ravel().astype(np.int32) for axis in np.mgrid[:SEGMENTS, :LANES])
    for turn in range(SEGMENTS):

        def place(first, lane, turn=turn):
            return share(row_at(Int64(BASE), SEGMENTS * LANES), first * LANES + lane, SEGMENTS)[turn].iterator

        found = addresses(place, first, lane)
        for start, thread, offset in zip(first, lane, found, strict=True):
            own = ROW.distribute(Layout((LANES,), (1,)), int(thread))
            if start + turn < SEGMENTS:
                corner = own.base + own.layout(int(start) + turn)
                assert offset == 4 * corner, (start, thread, turn)


def test_offsets_of_a_row_have_64_bits() -> None:
    far = np.array([(1 << 31) - 1, 1 << 28], np.int32)
    assert addresses(lambda index: vectors_at(Int64(BASE), index)[0].iterator, far).tolist() == [
        16 * int(index) for index in far
    ]
    assert addresses(lambda index: share(row_at(Int64(BASE), 1 << 31), index, 2)[1].iterator, far).tolist() == [
        16 * (int(index) + LANES) for index in far
    ]


@pytest.mark.parametrize("step", [1, 3])
def test_a_lane_takes_every_32nd_word(step: int) -> None:
    words = np.arange(70, dtype=np.int32)
    for turn in (0, 1, 3):
        found = addresses(
            lambda word, turn=turn: share(words_at(Int64(BASE), 256, step), word, turn + 1)[turn].iterator, words
        )
        assert found.tolist() == [4 * step * (word + LANES * turn) for word in range(70)]


@pytest.mark.parametrize("threads", [1, LANES, 512], ids=lambda threads: f"{threads} threads")
@pytest.mark.parametrize("length", [1, 31, 32, 33, 1100])
def test_a_turn_is_in_the_row_where_its_vector_is(threads: int, length: int) -> None:
    first = np.arange(1200, dtype=np.int32)
    for turn in range(3):
        (found,) = run_map(
            lambda place, turn=turn: Int32(share(row_at(Int64(BASE), length), place, 3, threads).has(turn)), first
        )
        assert found.tolist() == [int(place + turn * threads < length) for place in first]


def test_a_row_that_is_not_there_has_no_turn() -> None:
    first = np.arange(4, dtype=np.int32)
    (found,) = run_map(lambda place: Int32(share(row_at(Int64(BASE), 3), place, 1, there=place != 1).has(0)), first)
    assert found.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("apart", [1, 2, 4])
def test_eight_vectors_that_are_moved_together_meet_all_banks(apart: int) -> None:
    for first in range(0, 64, 8 * apart):
        places = {swizzled(first + apart * turn) % 8 for turn in range(8)}
        assert places == set(range(8))
    assert sorted(map(swizzled, range(128))) == list(range(128))


def test_a_region_leads_along_its_modes_and_to_one_that_is_laid_out_alike() -> None:
    regions = RegionMap(alignment=256)
    entries, weights = (regions.add(name, 8, 2, 3, 5, 4) for name in ("entries", "weights"))
    for coord in np.ndindex(*entries.shape):
        home = entries.address(BASE, *coord)
        assert weights.beside(entries, home) == weights.address(BASE, *coord)
        for mode, index in enumerate(coord):
            start = entries.address(BASE, *coord[:mode], 0, *coord[mode + 1 :])
            assert entries.along(mode, start, index) == home


def test_steps_along_a_region_have_64_bits() -> None:
    far = np.array([3, 1 << 12, (1 << 31) - 1], np.int32)

    def place(index):
        region = DeviceRegion("slots", 0, 1, (2, 2), (Int32(1 << 20), 1))
        return pointer(region.along(0, Int64(BASE), index), Uint8)

    assert addresses(place, far).tolist() == [int(index) << 20 for index in far]


def test_an_element_is_found_by_its_number() -> None:
    numbers = np.arange(8, dtype=np.int32)
    found = addresses(lambda number: element(array(Int64(BASE), Int32, 8), number), numbers)
    assert found.tolist() == [4 * int(number) for number in numbers]
