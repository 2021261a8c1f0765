"""`DeviceTile` against `TileTensor`: the same verbs, traced and run on the CPU, and compiled for a GPU.

`@cute.jit` functions run on the CPU without a GPU; each test copies a view's elements and compares which
ones moved with the host's offsets.
"""

import re

import pytest
import torch

from cute_ep.layouts.algebra.algebra import Layout, LayoutError, Swizzle, col_major, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
from cutlass.cute.runtime import from_dlpack, make_fake_tensor  # noqa: E402
from cutlass.cutlass_dsl import CuTeDSL  # noqa: E402

from cute_ep.layouts.tiles.device_tile import DeviceTile  # noqa: E402

ROWS, COLUMNS = 8, 16


def fresh():
    """Source with distinct non-zero elements and an empty target, both 8x16 row-major."""
    source = torch.arange(1, ROWS * COLUMNS + 1, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return source, torch.zeros_like(source)


def argument(tensor):
    return from_dlpack(tensor, assumed_align=16)


def assert_moved(source, target, offsets):
    """Exactly the elements at `offsets` were copied, to the same places."""
    assert sorted(offsets) == target.flatten().nonzero().flatten().tolist()
    assert torch.equal(target.flatten()[offsets], source.flatten()[offsets])


@cute.jit
def copy_view(source: cute.Tensor, target: cute.Tensor, coord, verbs: cutlass.Constexpr):
    verbs(DeviceTile(target), coord).copy_from(verbs(DeviceTile(source), coord))


SHARED_VERBS = {
    "tile": lambda view, at: view.tile((4, 8), (at, 1)),
    "tile of a tile": lambda view, at: view.tile((4, 8), (at, 1)).tile((2, 2), (at, 3)),
    "vectorize": lambda view, at: view.tile((4, 8), (at, 0)).vectorize(1, 4),
    "distribute row-major": lambda view, at: view.distribute(row_major(4, 2), at),
    "distribute column-major": lambda view, at: view.distribute(col_major(2, 4), at),
    "vectorize, distribute": lambda view, at: view.vectorize(1, 4).distribute(row_major(4, 2), at),
    "vectorize, distribute, swizzle": lambda view, at: view.vectorize(1, 4).distribute(
        row_major(4, 2), at, Swizzle(1, 0, 2)
    ),
    "slice": lambda view, at: view.slice(slice(2, 5), slice(4, 12)),
    "slice, index": lambda view, at: view.slice(at, slice(-8, None)).vectorize(4),
    "split": lambda view, at: view.split(4, axis=1)[2],
    "split part": lambda view, at: view.split_part(2, 3),
    "reshape": lambda view, at: view.reshape(4, 2, 16).slice(at, slice(0, 1), slice(3, 9)),
    "coalesce": lambda view, at: view.coalesce().tile((8,), (at,)).vectorize(4),
    "transpose": lambda view, at: view.transpose().tile((8, 4), (1, at)).vectorize(4, 1),
}


@pytest.mark.parametrize("name", SHARED_VERBS)
def test_verbs_move_what_the_host_lists(name):
    """With a run-time coordinate, and one known while tracing."""
    verbs = SHARED_VERBS[name]
    for at in (0, 1):
        expected = verbs(TileTensor(row_major(ROWS, COLUMNS)), at).offsets()
        for coord in (cutlass.Int32(at), at):
            source, target = fresh()
            copy_view(argument(source), argument(target), coord, verbs)
            assert_moved(source, target, expected)


@cute.jit
def copy_thread(source: cute.Tensor, target: cute.Tensor, tid: cutlass.Int32):
    views = [
        DeviceTile(t).tile((8, 8), (0, 1)).vectorize(1, 4).distribute(row_major(4, 2), tid) for t in (source, target)
    ]
    values = views[0].registers()
    values.copy_from(views[0])
    views[1].copy_from(values)


def test_the_threads_together_copy_a_tile_through_registers():
    source, target = fresh()
    for tid in range(8):
        copy_thread(argument(source), argument(target), cutlass.Int32(tid))
    assert_moved(source, target, TileTensor(row_major(ROWS, COLUMNS)).tile((8, 8), (0, 1)).offsets())


@cute.jit
def copy_elements(source: cute.Tensor, target: cute.Tensor, row: cutlass.Int32):
    scalars = DeviceTile(source), DeviceTile(target)
    scalars[1].store((row, 3), scalars[0].load(row, 3))
    vectors = scalars[0].vectorize(1, 4), scalars[1].vectorize(1, 4)
    vectors[1].store((row, 2), vectors[0].load(row, 2))


def test_load_and_store_one_element():
    source, target = fresh()
    copy_elements(argument(source), argument(target), cutlass.Int32(5))
    host = TileTensor(row_major(ROWS, COLUMNS)).slice(5, slice(None))
    assert_moved(source, target, [host.offsets()[3], *host.vectorize(4).tile((1,), (2,)).offsets()])


@cute.jit
def copy_nested(source: cute.Tensor, target: cute.Tensor, block: cutlass.Int32):
    layout = row_major((2, 4), (4, 4))
    nested = cute.make_layout(layout.shape, stride=layout.stride)
    views = [DeviceTile(cute.make_tensor(t.iterator, nested)).tile((4, 4), (1, block)) for t in (source, target)]
    views[1].copy_from(views[0])


def test_tile_of_a_nested_parent():
    source, target = fresh()
    copy_nested(argument(source), argument(target), cutlass.Int32(2))
    assert_moved(source, target, TileTensor(row_major((2, 4), (4, 4))).tile((4, 4), (1, 2)).offsets())


def test_run_time_extents_are_tiled_too():
    source, target = fresh()
    dynamic = [argument(tensor).mark_layout_dynamic(leading_dim=1) for tensor in (source, target)]
    copy_view(*dynamic, cutlass.Int32(1), lambda view, at: view.tile((4, 8), (at, 1)).slice(0, slice(None)))
    assert_moved(source, target, TileTensor(row_major(ROWS, COLUMNS)).tile((4, 8), (1, 1)).offsets()[:8])


REFUSED = {
    "tile that does not divide": (lambda view, at: view.tile((3, 8), (at, 0)), "does not divide"),
    "lanes across rows": (lambda view, at: view.vectorize(4, 1), "not 4 contiguous"),
    "threads that do not divide": (lambda view, at: view.distribute(row_major(5, 2), at), "does not divide"),
    "threads with gaps": (lambda view, at: view.distribute(Layout((2, 2), (1, 4)), at), "does not number"),
    "swizzle of the fragment": (
        lambda view, at: view.vectorize(1, 4).distribute(row_major(4, 2), at, Swizzle(1, 1, 3)),
        "touch the bits",
    ),
    "slice outside": (lambda view, at: view.slice(slice(0, 9), at), "outside"),
    "slice of nothing": (lambda view, at: view.slice(0, at), "does not leave a view"),
    "reshape of a transpose": (lambda view, at: view.transpose().reshape(128), "not row-major"),
    "vectors of vectors": (lambda view, at: view.vectorize(1, 4).vectorize(1, 2), "already vectors"),
    "split that does not divide": (lambda view, at: view.split(3), "3 parts do not divide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_the_host(name):
    verbs, message = REFUSED[name]
    with pytest.raises(LayoutError, match=message):
        verbs(TileTensor(row_major(ROWS, COLUMNS)), 0)
    source, target = fresh()
    with pytest.raises(LayoutError, match=message):
        copy_view(argument(source), argument(target), cutlass.Int32(0), verbs)


def test_copy_between_shapes_is_refused():
    @cute.jit
    def copy_transposed(source: cute.Tensor, target: cute.Tensor):
        DeviceTile(target).copy_from(DeviceTile(source).transpose())

    source, target = fresh()
    with pytest.raises(LayoutError, match="copy_from"):
        copy_transposed(argument(source), argument(target))


@cute.jit
def offset_of_row(source: cute.Tensor, out: cute.Tensor, row: cutlass.Int32, columns: cutlass.Constexpr):
    """Element offset of (row, 0) in a row-major tensor of `columns`, over memory that is never touched."""
    start = source.iterator.toint()
    big = cute.make_tensor(source.iterator, cute.make_layout((2**20, columns), stride=(columns, 1)))
    views = (
        DeviceTile(big).tile((1, columns), (row, 0)),
        DeviceTile(big).slice(row, slice(None)),
        DeviceTile(big).distribute(row_major(2**20, 1), row),
    )
    for index, view in enumerate(views):
        out[index] = cutlass.Int64(view.tensor.iterator.toint() - start) // 4


def test_offsets_past_two_to_the_31_are_64_bits():
    source, _ = fresh()
    ours = torch.zeros(3, dtype=torch.int64)
    offset_of_row(argument(source), from_dlpack(ours), cutlass.Int32(700_000), 4096)
    assert ours.tolist() == [700_000 * 4096] * 3


def test_cute_keeps_32_bits_past_two_to_the_31():
    """Why coordinates are widened: a 32-bit coordinate times a static stride is a 32-bit product."""
    widths = []

    @cute.jit
    def trace(row: cutlass.Int32):
        layout = cute.make_layout((2**20, 4096), stride=(4096, 1))
        for coord in (row, cutlass.Int64(row)):
            widths.append(type(layout((coord, 0))).width)

    trace(cutlass.Int32(700_000))
    assert widths == [32, 64]


THREADS = row_major(4, 8)


@cute.kernel
def copy_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    views = [
        DeviceTile(t).tile((8, 128), (block, 0)).vectorize(1, 8).distribute(THREADS, thread) for t in (source, target)
    ]
    views[1].copy_from(views[0])


@cute.jit
def launch_copy(source: cute.Tensor, target: cute.Tensor):
    copy_kernel(source, target).launch(grid=(8, 1, 1), block=(32, 1, 1))


STRIDES = {
    "static": lambda: ((64, 128), (128, 1)),
    "past two to the 31": lambda: ((2**20, 4096), (4096, 1)),
    "run-time rows and row stride": lambda: ((cute.sym_int(), 128), (cute.sym_int64(divisibility=8), 1)),
}


def compile_copy(monkeypatch, directory, shape, stride):
    # What is kept is also written to this directory, by default the working directory.
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "dump_dir", str(directory))
    tensors = [make_fake_tensor(cutlass.BFloat16, shape, stride, assumed_align=16) for _ in range(2)]
    return cute.compile[cute.KeepPTX, cute.KeepCUBIN, cute.GPUArch("sm_90a")](launch_copy, *tensors)


@pytest.mark.parametrize("strides", STRIDES)
def test_a_kernel_for_sm_90a_moves_128_bits_at_a_time(monkeypatch, tmp_path, strides):
    compiled = compile_copy(monkeypatch, tmp_path, *STRIDES[strides]())
    assert ".target sm_90a" in compiled.__ptx__
    accesses = re.findall(r"(?:ld|st)\.global\S*", compiled.__ptx__)
    assert sorted(accesses) == ["ld.global.v4.b32"] * 4 + ["st.global.v4.b32"] * 4
    assert compiled.__cubin__[:4] == b"\x7fELF"


def test_a_run_time_stride_must_promise_its_divisibility(monkeypatch, tmp_path):
    """CuTe refuses by itself: 128-bit accesses over a row stride that may be odd."""
    with pytest.raises(Exception, match="alignment"):
        compile_copy(monkeypatch, tmp_path, (cute.sym_int(), 128), (cute.sym_int64(), 1))
