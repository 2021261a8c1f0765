"""How rows are dealt out to warps, how an LL word is put together, when a Lamport word is there, and division: device
code, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Boolean, Int32, Int64, Uint32, cute

from cute_ep.kernels.codec.base import word_lanes
from cute_ep.kernels.device import atoms, lamport, sync
from cute_ep.kernels.device.divide import Divisor, quotient, remainder
from cute_ep.kernels.device.memory import item_coord
from cute_ep.kernels.device.slices import (
    SEGMENT,
    are_many,
    control_cta,
    first_item,
    has_same_source,
    item_of,
    item_stride,
    packed_cta,
    segments_of,
    slice_of,
    static_first,
    static_stride,
    turned_source,
    whole_chunks,
)
from cute_ep.layouts.maps.arena import CHUNK, COUNTERS, LAMPORT_TOKENS, MANY_SLICES, MAX_SLICES, SEGMENT_BYTES, chunk_of
from cute_ep.layouts.maps.formats import FORMATS, VECTOR_BYTES
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS_PER_RANK, MAX_TOP_K, division_magic

from .host import host_mul_hi, run_map

MOST_LOG2 = MAX_SLICES.bit_length() - 1


def test_pieces_partition_a_row() -> None:
    """Every segment of a row is in exactly one slice, the first slice is never empty, and the empty ones come last.

    Rows of up to 65536 bfloat16, more than any format sends; the token does not matter.
    """
    vectors = np.array([*range(1, 34 * SEGMENT), 65536 // 8 - 1, 65536 // 8], np.int32)
    for log2 in range(MOST_LOG2 + 1):
        slices = 1 << log2
        index, row = np.meshgrid(np.arange(3 * slices, dtype=np.int32), vectors, indexing="ij")

        def fields(index, vectors, log2=log2):
            row_slice = slice_of(index, Int32(log2), vectors)
            return row_slice.index, row_slice.token, row_slice.first, row_slice.last

        results = run_map(fields, index.ravel(), row.ravel(), outputs=4)
        same, token, first, last = (result.view(np.int32).reshape(index.shape) for result in results)
        assert (same == index).all()
        for one in range(3):
            mine = slice(one * slices, (one + 1) * slices)
            assert (token[mine] == one).all()
            ends = np.maximum(first[mine], last[mine])
            assert (first[mine][0] == 0).all() and (last[mine][0] > 0).all(), "the first slice has a segment"
            inside = first[mine] < last[mine]
            assert (inside[1:] <= inside[:-1]).all(), "empty slices come last"
            assert (first[mine][1:][inside[1:]] == ends[:-1][inside[1:]]).all(), "slices follow one another"
            assert (np.where(inside, last[mine], 0).max(axis=0) == segments_of(vectors)).all()


def test_neighbouring_pieces_as_one() -> None:
    """`count` slices of a row begin where the first begins and end where the last ends."""
    vectors = np.array([*range(1, 34 * SEGMENT, 7), 65536 // 8], np.int32)
    for log2 in range(MOST_LOG2 + 1):
        for count in (1 << step for step in range(log2 + 1)):
            first = np.arange(0, 2 << log2, count, dtype=np.int32)
            index, row = (grid.ravel() for grid in np.meshgrid(first, vectors, indexing="ij"))

            def ends(index, vectors, log2=log2, count=count):
                whole, last = (
                    slice_of(index, Int32(log2), vectors, count),
                    slice_of(index + count - 1, Int32(log2), vectors),
                )
                return whole.first, whole.last, slice_of(index, Int32(log2), vectors).first, last.last

            whole_first, whole_last, first_first, last_last = run_map(ends, index, row, outputs=4)
            assert (whole_first == first_first).all() and (whole_last == last_last).all()


@pytest.mark.parametrize("ctas", [1, 2, 7, 264])
def test_every_item_is_taken_once(ctas: int) -> None:
    items = 3 * ctas * WARPS + 5
    taken = [
        item
        for cta in range(ctas)
        for warp in range(WARPS)
        for item in range(first_item(cta, ctas, warp), items, item_stride(ctas))
    ]
    assert sorted(taken) == list(range(items))
    starts = {first_item(cta, ctas, 0) for cta in range(ctas)}
    assert starts == set(range(ctas)), "neighbouring items go to different CTAs"


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 128, 264, 295])
def test_packed_ctas_are_neighbours_on_their_sm(blocks: int) -> None:
    """Every number is given once, and numbers 2 i and 2 i + 1 to blocks that are half a grid apart."""
    block = np.arange(blocks, dtype=np.int32)
    (numbers,) = run_map(lambda block: packed_cta(block, Int32(blocks)), block)
    cta = numbers.view(np.int32)
    assert sorted(cta) == list(range(blocks))
    owner = np.argsort(cta)
    apart = owner[1::2] - owner[: blocks - 1 : 2]
    assert (apart == (blocks + 1) // 2).all()


def all_warps(cases: Iterable[tuple[int, int]]) -> np.ndarray:
    """(items, CTAs, CTA, warp) of every warp of every case (items, CTAs)."""
    rows = [(*case, cta, warp) for case in cases for cta in range(case[1]) for warp in range(WARPS)]
    return np.array(rows, np.int32)


def test_the_static_schedule_has_every_item_once() -> None:
    """And none to the spare CTA, as long as the warps of the others are enough for one each."""
    few = {(items, ctas) for ctas in (1, 2, 3, 7, 40) for items in (0, 1, ctas, (ctas - 1) * WARPS, ctas * WARPS)}
    cases = few | {(items + more, ctas) for items, ctas in few for more in (1, 5 * ctas * WARPS)}
    warps = all_warps(cases)

    def deal(items, ctas, cta, warp):
        return Int32(static_first(items, cta, ctas, warp)), Int32(static_stride(items, ctas))

    starts, strides = run_map(deal, *warps.T, outputs=2)
    taken: dict[tuple, list] = {case: [] for case in cases}
    for (items, ctas, cta, _), start, stride in zip(warps.tolist(), starts.tolist(), strides.tolist(), strict=True):
        mine = range(start, items, stride) if start < items else ()
        assert not mine or cta != control_cta(ctas) or items > (ctas - 1) * WARPS
        taken[items, ctas] += mine
    assert all(sorted(found) == list(range(items)) for (items, _), found in taken.items())


@pytest.mark.parametrize("ranks", range(1, 10))
def test_turned_items_are_each_index_of_each_source_once(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a warp that has many does not have all of one source, whatever ranks and CTAs are."""
    monkeypatch.setattr(lamport.cute.arch, "mul_hi", host_mul_hi)
    magic = division_magic(ranks)
    cases = [(ranks * indices, ctas) for ctas in (1, 2, 3, 4, 7, 48) for indices in (1, 17, 16 * ctas, 40 * ctas + 5)]
    warps = all_warps(cases)

    def deal(items, ctas, cta, warp):
        stride = Int32(static_stride(items, ctas))
        same = has_same_source(stride, Divisor(Int32(ranks), Uint32(magic)))
        return Int32(static_first(items, cta, ctas, warp)), stride, Int32(same)

    def source(item, turned):
        turn, index = turned_source(item, turned, Divisor(Int32(ranks), Uint32(magic)))
        return Int32(turn), Int32(index)

    dealt = zip(warps.tolist(), *(one.tolist() for one in run_map(deal, *warps.T, outputs=3)), strict=True)
    rows = [
        (case, place, item, number % ranks if same else 0)
        for place, ((*case, _, _), start, stride, same) in enumerate(dealt)
        for number, item in enumerate(range(start, case[0], stride))
    ]
    item, turned = np.array([row[2:] for row in rows], np.int32).T
    turns, indices = (one.tolist() for one in run_map(source, item, turned, outputs=2))
    taken: dict[tuple, list] = {case: [] for case in cases}
    sources: dict[int, list] = {}
    for (case, place, _, _), turn, index in zip(rows, turns, indices, strict=True):
        taken[*case].append((index, turn))
        sources.setdefault(place, []).append(turn)
    for (items, _), found in taken.items():
        assert sorted(found) == [(index, turn) for index in range(items // ranks) for turn in range(ranks)]
    many = [found for found in sources.values() if len(found) > 1]
    assert many
    assert ranks == 1 or all(len(set(found)) > 1 for found in many)


def test_tickets_of_a_cta_go_on_where_first_items_end() -> None:
    """Where there are more items than warps, a warp's later items are those of its CTA's numbers from WARPS on."""
    cases = [
        (items, ctas) for ctas in (1, 2, 7, 40) for items in (ctas * WARPS - 1, ctas * WARPS, ctas * WARPS + 1, 5000)
    ]
    warps = all_warps(cases)

    def deal(items, ctas, cta, warp):
        return Int32(static_first(items, cta, ctas, warp)), Int32(are_many(items, ctas))

    starts, many = run_map(deal, *warps.T, outputs=2)
    taken: dict[tuple, list] = {case: [] for case in cases}
    for (items, ctas, _, _), start, more in zip(warps.tolist(), starts.tolist(), many.tolist(), strict=True):
        assert bool(more) == (items > ctas * WARPS)
        taken[items, ctas] += [start] if start < items else []
    for items, ctas in cases:
        if items > ctas * WARPS:
            numbers = range(WARPS, items)
            later = [first_item(cta, ctas, number) for cta in range(ctas) for number in numbers]
            taken[items, ctas] += [item for item in later if item < items]
        assert sorted(taken[items, ctas]) == list(range(items))


def test_slices_of_a_chunk_stay_together() -> None:
    """Each is dealt once, a slice to each warp of one CTA, in the same turn of all: barriers in the loop are met."""
    cases = [(slices, ctas) for ctas in (1, 2, 3, 7, 40) for slices in (1, 15, 16, 17, 16 * ctas, 333, 5000)]
    warps = all_warps(cases)

    def deal(slices, ctas, cta, warp):
        items = whole_chunks(slices)
        return items, Int32(static_first(items, cta, ctas, warp, Boolean(True))), Int32(static_stride(items, ctas))

    items, starts, strides = run_map(deal, *warps.T, outputs=3)
    chunks: dict[tuple, list] = {}
    for (slices, ctas, cta, warp), end, start, stride in zip(warps.tolist(), items, starts, strides, strict=True):
        assert end % CHUNK == 0 and 0 <= end - slices < CHUNK
        mine = list(range(start, end, stride))
        assert [item % CHUNK for item in mine] == [warp] * len(mine)
        turns = [chunk_of(item) for item in mine]
        assert chunks.setdefault((slices, ctas, cta), turns) == turns
    for slices, ctas in cases:
        found = [chunk for cta in range(ctas) for chunk in chunks[slices, ctas, cta]]
        assert sorted(found) == list(range(-(-slices // CHUNK)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 72])
def test_numbers_that_are_taken_go_on_where_dealing_ends(ranks: int) -> None:
    """Each item beyond the dealt ones has one number of one counter, whichever CTAs take them: slices, that the warps
    of a source's CTAs take from several counters; chunks of a combine, a counter a source; chunks of a dispatch."""
    for ctas in (1, 2, 3, 7, 40, 264):
        turns = min(ranks, ctas)
        assert turns == len({cta % ranks for cta in range(ctas)}), "each turn has a CTA"
        for dealt, counters in ((item_stride(ctas), COUNTERS), (ctas, 1)):
            grid = np.meshgrid(np.arange(50), np.arange(counters), np.arange(turns), indexing="ij")
            number, counter, turn = (axis.ravel().astype(np.int32) for axis in grid)
            (items,) = run_map(
                lambda number, turn, dealt=dealt, turns=turns: item_of(Int32(dealt), number, Int32(turns), turn),
                number * counters + counter,
                turn,
            )
            assert sorted(items.view(np.int32)) == list(range(dealt, dealt + len(number)))
            if turns == ranks and dealt % ranks == 0:
                assert (items.view(np.int32) % ranks == turn).all(), "a CTA's items are for one source"
        (chunks,) = run_map(lambda number, ctas=ctas: item_of(Int32(2 * ctas), number), np.arange(9, dtype=np.int32))
        assert chunks.view(np.int32).tolist() == list(range(2 * ctas, 2 * ctas + 9))


def test_a_segment_is_what_a_warp_carries() -> None:
    """One vector a lane, and no scale word lies across two segments, so slices share nothing."""
    assert SEGMENT * VECTOR_BYTES == SEGMENT_BYTES
    for fmt in FORMATS.values():
        if fmt.scale is not None:
            assert SEGMENT % word_lanes(fmt) == 0, fmt.name


EPOCHS = (1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7, 2**40)
VALUES = (0, 1, -1, 0x7FFFFFFF, -0x80000000, 12345)


def halves(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) 32 bits of a 64-bit number, one element each."""
    bits = np.array([number], np.uint64)
    return (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32), (bits >> np.uint64(32)).astype(
        np.uint32
    ).view(np.int32)


def join(low, high) -> Int64:
    return (Int64(high) << 32) | (Int64(low) & Int64(0xFFFFFFFF))


def test_an_ll_word_holds_the_value_and_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value below, the low half of the epoch above, whatever the sign of the value, in one relaxed store."""
    stored = []
    monkeypatch.setattr(sync, "pointer", lambda address, dtype: address)

    def store(address, content, *, sem, scope):
        assert (content.dtype, sem, scope) == (Int64, "relaxed", "sys")
        stored.append(content)

    monkeypatch.setattr(sync.cute.arch, "store", store)

    def post(value, low, high):
        sync.store_ll(Int64(0), value, join(low, high))
        content = stored.pop()
        return Int32(content), Int32(content >> 32)

    for epoch in EPOCHS:
        low, high = halves(epoch)
        values = np.array(VALUES, np.int64).astype(np.int32)
        count = len(values)
        value, date = run_map(post, values, low.repeat(count), high.repeat(count), outputs=2)
        assert (value.view(np.int32) == values).all()
        assert (date == epoch % 2**32).all()


def test_an_ll_word_is_taken_in_its_own_round_only() -> None:
    """A word of an earlier or a later round is not taken for this one's, nor is a word that was never written."""

    def arrived(low, high, epoch_low, epoch_high):
        yes = sync._has_arrived(join(low, high), join(epoch_low, epoch_high), True)
        return Int32(yes)

    for epoch in EPOCHS:
        for date in {*EPOCHS, epoch - 2, epoch + 2, 0}:
            word = (date % 2**32) << 32 | 0xDEADBEEF
            (result,) = run_map(arrived, *halves(word), *halves(epoch))
            assert bool(result[0]) == (date % 2**32 == epoch % 2**32)


def test_a_flag_has_arrived_at_its_epoch_or_a_later_one() -> None:
    def arrived(low, high, epoch_low, epoch_high):
        return Int32(sync._has_arrived(join(low, high), join(epoch_low, epoch_high), False))

    for epoch in (-1, 0, 1, 7, 2**32, 2**40):
        for seen in (0, 6, 7, 8, 2**32 - 1, 2**32 + 1, 2**40):
            (result,) = run_map(arrived, *halves(seen), *halves(epoch % 2**64))
            assert bool(result[0]) == (seen >= epoch)


def test_a_lamport_word_is_the_sentinel_or_it_has_arrived() -> None:
    """One word of four, and no other content of it, makes a vector wait; one token more, and no word does."""
    words = np.array([[0x7FFF7FFF] * 4, [0] * 4, *(np.roll([0xFFFFFFFF, 1, 2, 3], turn) for turn in range(4))])
    words = np.concatenate([words, 0xFFFFFFFF ^ (1 << np.arange(32))[:, None] * np.ones((1, 4), np.int64)])
    columns = words.T.astype(np.uint32).view(np.int32)

    def collides(*row):
        rX = cute.make_rmem_tensor(len(row), Uint32)
        for index, word in enumerate(row):
            rX[index] = Uint32(word)
        return Int32(atoms.has_sentinel(rX))

    (blank,) = run_map(collides, *columns)
    assert blank.tolist() == [0, 0, 1, 1, 1, 1] + [0] * 32
    tokens = np.array([0, 1, LAMPORT_TOKENS, LAMPORT_TOKENS + 1, MAX_TOKENS_PER_RANK], np.int32)
    (few,) = run_map(lambda count: Int32(lamport.is_lamport(count)), tokens)
    assert few.tolist() == [1, 1, 1, 0, 0]


def test_division_by_multiplication_is_exact_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact up to the bound that `Divisor` states, for every extent that can be: near 0, at the bound, where the error
    of the multiplication is largest, and in between. All that kernels split is below the bound."""
    monkeypatch.setattr(lamport.cute.arch, "mul_hi", host_mul_hi)

    def split(item, extent, magic):
        return tuple(map(Int32, Divisor(extent, magic.bitcast(Uint32)).split(item)))

    random, columns = np.random.default_rng(0), []
    for extent in range(1, MAX_EXPERTS + 1):
        bound = min(-(-(1 << 32) // extent), 1 << 31)
        edges = np.concatenate([np.arange(1, 9), (bound - 1) // extent - np.arange(8)]) * extent
        items = np.concatenate([edges - 1, edges, bound - 1 - np.arange(8), random.integers(0, bound, 200)])
        items = items[(items >= 0) & (items < bound)]
        columns.append(np.stack([items, np.full_like(items, extent), np.full_like(items, division_magic(extent))]))
    item, extent, magic = (column.astype(np.uint32).view(np.int32) for column in np.concatenate(columns, axis=1))
    rest, whole = run_map(split, item, extent, magic, outputs=2)
    np.testing.assert_array_equal(whole, item // extent)
    np.testing.assert_array_equal(rest, item % extent)
    slices = max(MAX_TOKENS_PER_RANK * MANY_SLICES, LAMPORT_TOKENS * MAX_SLICES)
    most = {MAX_RANKS: slices * MAX_RANKS, MAX_TOP_K: MAX_TOKENS_PER_RANK * MAX_TOP_K, MAX_EXPERTS: MAX_EXPERTS}
    assert all(items * extent < 1 << 32 for extent, items in most.items())


def test_division_by_powers_of_two_rounds_down() -> None:
    """Of negative numbers too: all round down, so a remainder is not negative."""
    values = np.array([0, 1, 31, 32, 33, 511, 512, 513, 2**31 - 1, -1, -32, -33, -(2**31)], np.int32)
    for power in (1, 2, 16, 32, 128, 512):
        parts = run_map(lambda a, p=power: (quotient(a, p), remainder(a, p), *item_coord(a, p)), values, outputs=4)
        whole, rest, fast, slow = (part.view(np.int32) for part in parts)
        np.testing.assert_array_equal(whole, values // power)
        np.testing.assert_array_equal(rest, values % power)
        assert (fast == rest).all() and (slow == whole).all()
