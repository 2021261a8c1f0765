"""`TileTensor` against Mojo's type and CuTe, where it must refuse, and mutants that the cases must catch."""

import pytest
import tiletensor_golden as golden
from random_layouts import cute_context

from cute_ep.layouts.tiles.layout import Layout, LayoutError, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor


def view(text, **options):
    return TileTensor(Layout.parse(text), **options)


def test_every_kind_of_golden_case_is_interpreted():
    assert len(golden.CASES) == 45
    assert {case.split("/")[0] for case in golden.CASES} == set(golden.KINDS)


@pytest.mark.parametrize("case", golden.CASES)
def test_offsets_equal_mojo(case):
    assert golden.ours(case) == golden.expected(case)


@pytest.mark.parametrize("tile", [(2, 4), (4, 6), (8, 1)])
@pytest.mark.parametrize("parent", ["(8,12):(12,1)", "(8,12):(1,8)", "(8,12):(16,1)"])
def test_tile_is_a_slice_of_zipped_divide(parent, tile):
    layout = Layout.parse(parent)
    with cute_context() as cute:
        divided = cute.zipped_divide(cute.make_layout(layout.shape, stride=layout.stride), tile)
        for row in range(8 // tile[0]):
            for column in range(12 // tile[1]):
                theirs = [divided(((i, j), (row, column))) for i in range(tile[0]) for j in range(tile[1])]
                assert view(parent).tile(tile, (row, column)).offsets() == theirs


def test_distribute_is_a_slice_of_zipped_divide():
    threads, parent = Layout((4, 2)), row_major(8, 16)
    with cute_context() as cute:
        divided = cute.zipped_divide(cute.make_layout(parent.shape, stride=parent.stride), (4, 2))
        for tid in range(8):
            theirs = [divided((threads.offset2crd(tid), (i, j))) for i in range(2) for j in range(8)]
            assert TileTensor(parent).distribute(threads, tid).offsets() == theirs


def test_views_compose_and_keep_their_base():
    tile = view("(8,16):(16,1)", base=1000).tile((4, 8), (1, 1))
    assert (tile.base, str(tile.layout)) == (1000 + 64 + 8, "(4,8):(16,1)")
    assert tile.distribute(row_major(4, 2), 3).offsets() == [1089, 1091, 1093, 1095]


def test_a_nested_parent_is_outer_first_and_nothing_else():
    parent = TileTensor(row_major((2, 4), (3, 5)))
    for shape in [(2, 3), (4, 1), (4, 5, 1)]:
        with pytest.raises(LayoutError, match="the tiles of"):
            parent.tile(shape, (0, 0))
    with pytest.raises(LayoutError, match="outside"):
        parent.tile((4, 5), (0, 3))
    with pytest.raises(LayoutError, match="not all"):
        TileTensor(row_major((2, 4), 15)).tile((4, 5), (0, 0))


# Where Mojo's answer is another one. Its numbers below were printed by the same library as the golden file.


def test_divergence_distribute_rounds_down():
    """Mojo gives each of 4x4 threads one element of 6x6: 20 elements belong to nobody."""
    with pytest.raises(LayoutError, match="4 does not divide the extent 6"):
        view("(6,6):(6,1)").distribute(row_major(4, 4), 0)


def test_divergence_tile_of_a_blocked_product():
    """Mojo takes the block's leaf, which comes first, for the outer one, and reads across blocks."""
    for product, tiler in [
        ("((2,2),(2,2)):((2,8),(1,4))", (2, 2)),
        ("((2,2),(2,2)):((1,4),(2,8))", (2, 2)),
        ("((2,2),(2,3)):((2,12),(1,4))", (2, 3)),
        ("((1,1),(4,4)):((0,0),(1,4))", (1, 4)),
        ("((4,4),(1,1)):((1,4),(0,0))", (4, 1)),
    ]:
        with pytest.raises(LayoutError, match="blocks may come first"):
            view(product).tile(tiler, (0, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: view("(8,12):(12,1)").tile((3, 4), (0, 0)), "3 does not divide"),
        (lambda: view("(8,12):(12,1)").tile((2, 4), (4, 0)), "outside"),
        (lambda: view("(8,12):(12,1)").tile((2, 4), (-1, 0)), "outside"),
        (lambda: view("(8,12):(12,1)").tile((2, 4), (0,)), "does not fit"),
        (lambda: view("(8,12):(12,1)").tile((2,), (0, 0)), "one positive int per mode"),
        (lambda: view("(8,12):(12,1)").distribute(Layout((2, 2), (1, 4)), 0), "does not number its threads"),
        (lambda: view("(8,12):(12,1)").distribute(Layout((2, 2), (1, 0)), 0), "does not number its threads"),
        (lambda: view("(8,12):(12,1)").distribute(row_major(2, 2), 4), "offset 4"),
        (lambda: view("(8,12):(12,1)").distribute(row_major(4), 0), "one positive int per mode"),
        (lambda: view("((2,4),12):((12,24),1)").distribute(row_major(2, 2), 0), "flat modes"),
        (lambda: view("(8,12):(12,1)").distribute(row_major((2, 2), 2), 0), "flat modes"),
    ],
    ids=[
        *("a tile that does not divide", "a tile behind the end", "a tile before the beginning"),
        *("a coordinate of fewer modes", "a tile of fewer modes", "threads with gaps", "threads with one number"),
        *("a thread that is none", "threads of fewer modes", "threads over a nested mode", "threads of a nested mode"),
    ],
)
def test_a_verb_that_cannot_be_right_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


# Wrong variants of the verbs, one mistake each; the golden cases must notice every one.


def moved(verb, change):
    """`verb` with its result's base changed."""
    original = getattr(TileTensor, verb)

    def wrong(self, *arguments):
        result = original(self, *arguments)
        return TileTensor(result.layout, change(self, result, *arguments))

    return wrong


def blocked_fragment(shape, stride, threads):
    """Neighbouring elements to one thread, instead of every threads.shape-th."""
    counts = [mode.size for mode in threads]
    return tuple(extent // count for extent, count in zip(shape, counts, strict=True)), tuple(stride)


def column_major_offsets(self):
    return [self.base + self.layout(index) for index in range(self.layout.size)]


def column_major_threads(self, threads, tid):
    return DISTRIBUTE(self, Layout(threads.shape), tid)


DISTRIBUTE = TileTensor.distribute
MODULE = "cute_ep.layouts.tiles.tile_tensor"

MUTANTS = {
    "tile counts elements": (
        TileTensor,
        "tile",
        moved("tile", lambda self, result, shape, coord: self.base + (self.layout(coord) if any(coord) else 0)),
    ),
    "tile forgets the column": (
        TileTensor,
        "tile",
        moved("tile", lambda self, result, shape, coord: result.base - coord[1] * shape[1]),
    ),
    "distribute deals blocks": (MODULE, "fragment_modes", blocked_fragment),
    "distribute numbers threads column-major": (TileTensor, "distribute", column_major_threads),
    "offsets column-major": (TileTensor, "offsets", column_major_offsets),
    "nested tile takes the first leaf": (
        MODULE,
        "require_inner_tiles",
        lambda layout, shape: tuple(Layout(*zip(*layout.modes[which::2], strict=True)) for which in (1, 0)),
    ),
}


def failing_golden_cases():
    failures = []
    for case in golden.CASES:
        try:
            answer = golden.ours(case)
        except LayoutError:
            answer = None
        if answer != golden.expected(case):
            failures.append(case)
    return failures


@pytest.mark.parametrize("mutant", MUTANTS)
def test_golden_cases_catch_mutants(monkeypatch, mutant):
    owner, name, wrong = MUTANTS[mutant]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", wrong)
    else:
        monkeypatch.setattr(owner, name, wrong)
    assert failing_golden_cases()


def test_golden_cases_pass_without_a_mutant():
    assert failing_golden_cases() == []
