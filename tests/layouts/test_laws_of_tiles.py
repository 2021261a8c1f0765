"""Laws of swizzles and of views, on random layouts."""

from itertools import chain, product

from hypothesis import given
from hypothesis import strategies as st
from random_layouts import cute_context, law, swizzles, tiled_matrices

from cute_ep.layouts.tiles.layout import Layout, Swizzle, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor

# ---- swizzle


@law
@given(swizzles(), st.integers(0, 2**12), st.integers(0, 2**12))
def test_a_swizzle_is_a_linear_involution(swizzle, left, right):
    assert swizzle(swizzle(left)) == left
    assert swizzle(left ^ right) == swizzle(left) ^ swizzle(right)
    assert swizzle(left) % 2**swizzle.base == left % 2**swizzle.base


@law
@given(swizzles())
def test_a_swizzle_permutes_its_window(swizzle):
    window = 1 << (swizzle.base + abs(swizzle.shift) + swizzle.bits)
    assert sorted(map(swizzle, range(window))) == list(range(window))


def test_a_swizzle_is_that_of_cute():
    with cute_context() as cute:
        for arguments in [(3, 4, 3), (2, 0, -3), (1, 2, 1), (0, 3, 2)]:
            theirs = cute.make_composed_layout(cute.make_swizzle(*arguments), 0, cute.make_layout(1024))
            assert [theirs(index) for index in range(1024)] == [Swizzle(*arguments)(index) for index in range(1024)]


# ---- tiling


@law
@given(tiled_matrices())
def test_tiles_partition_the_tensor(case):
    layout, tile, counts = case
    view = TileTensor(layout)
    tiles = [view.tile(tile, coord).offsets() for coord in product(*map(range, counts))]
    assert sorted(chain(*tiles)) == sorted(view.offsets())


@law
@given(tiled_matrices(), st.booleans())
def test_fragments_partition_the_tensor(case, by_row):
    layout, threads, _ = case
    order = row_major(*threads) if by_row else Layout(threads)
    fragments = [TileTensor(layout).distribute(order, tid).offsets() for tid in range(order.size)]
    assert sorted(chain(*fragments)) == sorted(TileTensor(layout).offsets())


@law
@given(tiled_matrices())
def test_another_thread_order_only_renames_threads(case):
    layout, threads, _ = case
    rows, columns = row_major(*threads), Layout(threads)
    for coord in product(*map(range, threads)):
        left, right = (TileTensor(layout).distribute(order, order(coord)) for order in (rows, columns))
        assert left == right


def test_distribute_over_vectors_is_the_tiled_copy_of_cute():
    """`make_tiled_copy_tv(atom, threads, (1, V))`, partitioned for each thread over the coordinates."""
    with cute_context() as cute:
        import cutlass

        for shape, lanes, threads in [
            ((8, 32), 4, row_major(4, 4)),
            ((8, 32), 4, Layout((4, 8))),
            ((6, 16), 8, row_major(3, 2)),
            ((4, 8), 2, Layout((4, 1))),
        ]:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=32 * lanes)
            order = cute.make_layout(threads.shape, stride=threads.stride)
            copy = cute.make_tiled_copy_tv(atom, order, cute.make_layout((1, lanes), stride=(lanes, 1)))
            layout, vectors = row_major(*shape), Layout((shape[0], shape[1] // lanes), (shape[1], lanes))
            for tid in range(threads.size):
                theirs = copy.get_slice(tid).partition_S(cute.make_identity_tensor(shape))
                coords = [theirs[index] for index in range(cute.size(theirs))]
                corners = TileTensor(vectors).distribute(threads, tid).offsets()
                ours = [corner + lane for corner in corners for lane in range(lanes)]
                assert sorted(layout(coord) for coord in coords) == sorted(ours)
                assert [layout(coord) for coord in coords[:lanes]] == ours[:lanes]
