"""How the last slices are drawn in parts: device code, run on the CPU."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Int32

from cute_ep.kernels.device.slices import PARTS, WHOLE, RowSlice, drawn_items, part_of, split_item

from .host import run_map


@pytest.mark.parametrize(("items", "split"), [(5, 0), (1, 1), (8, 8), (1000, 768), (8192, 768)])
def test_the_last_items_are_drawn_in_parts(items: int, split: int) -> None:
    """The others whole and before them; each once."""
    counts = run_map(lambda one: drawn_items(one, Int32(split)), np.full(2, items, np.int32))
    numbers = np.arange(int(counts[0][0]), dtype=np.int32)

    def fields(number):
        item, part = split_item(number, Int32(items), Int32(split))
        return Int32(item), Int32(part)

    item, part = (result.view(np.int32).tolist() for result in run_map(fields, numbers, outputs=2))
    whole = [(one, WHOLE) for one in range(items - split)]
    parts = [(one, number) for one in range(items - split, items) for number in range(PARTS)]
    assert list(zip(item, part, strict=True)) == whole + parts


def test_parts_partition_a_slice() -> None:
    """Empty ones come last; the whole is one part."""
    ends = np.array([(first, last) for first in (0, 3, 7) for last in range(first, first + 30)], np.int32)
    first, last = (np.repeat(column, PARTS + 1) for column in ends.T)
    parts = np.tile(np.arange(WHOLE, PARTS, dtype=np.int32), len(ends))

    def fields(first, last, part):
        one = part_of(RowSlice(Int32(5), Int32(2), first, last), part)
        return one.index, one.token, Int32(one.first), Int32(one.last)

    index, token, begins, stops = (
        result.view(np.int32).reshape(-1, PARTS + 1) for result in run_map(fields, first, last, parts, outputs=4)
    )
    assert (index == 5).all() and (token == 2).all()
    for (low, high), begin, stop in zip(ends, begins, stops, strict=True):
        assert (begin[0], stop[0]) == (low, high)
        segments = [list(range(one, other)) for one, other in zip(begin[1:], stop[1:], strict=True)]
        assert list(chain(*segments)) == list(range(low, high))
        assert sorted(map(bool, segments), reverse=True) == list(map(bool, segments)), "empty parts come last"
