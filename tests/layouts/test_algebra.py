"""Layouts, their evaluation and each algebra function on worked examples; what is refused and why."""

import subprocess
import sys

import pytest

from cute_ep.layouts.algebra import eager
from cute_ep.layouts.algebra.algebra import (
    Layout,
    LayoutError,
    Swizzle,
    blocked_product,
    coalesce,
    col_major,
    complement,
    composition,
    flat_divide,
    idx2crd,
    is_injective,
    left_inverse,
    logical_divide,
    logical_product,
    raked_product,
    recast_layout,
    right_inverse,
    row_major,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)

L = Layout.parse


@pytest.mark.parametrize(
    "text", ["4:1", "(4):(1)", "(8,12):(12,1)", "((2,4),3):((1,6),2)", "(4,(1,(2,3))):(0,(7,(1,2)))"]
)
def test_text_round_trips(text):
    assert str(Layout.parse(text)) == text
    assert hash(L(text)) == hash(Layout(L(text).shape, L(text).stride))


@pytest.mark.parametrize("text", ["", "4", "():()", "4:1:2", "(4,2):1", "(0,2):(1,1)", "(2,2):(1,-1)", "x:1", "2.5:1"])
def test_malformed_text_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), None),
        ((4, True), None),
        ((2, 3), (1,)),
        ((2, (3,)), (1, 2)),
        (2**62, 8),
        ("4", None),
        ((2, 0), None),
    ],
    ids=str,
)
def test_invalid_layouts_are_refused(shape, stride):
    with pytest.raises(LayoutError):
        Layout(shape, stride)


def test_defaults_are_column_major_with_stride_0_for_extent_1():
    assert str(Layout((2, (1, 3)))) == "(2,(1,3)):(1,(0,2))"
    assert str(col_major((1, 4), (64, 512))) == "((1,4),(64,512)):((0,1),(4,256))"
    assert str(row_major((4, 16), (8, 2))) == "((4,16),(8,2)):((256,16),(2,1))"
    assert row_major((8, 12)) == row_major(8, 12)
    assert str(row_major(8)) == "(8):(1)"


def test_coordinate_forms():
    layout = L("(4,(3,2)):(6,(2,1))")
    assert [layout(i) for i in range(8)] == [0, 6, 12, 18, 2, 8, 14, 20]
    assert layout(1, (2, 1)) == layout((1, (2, 1))) == layout(1, 5) == layout(1, 2, 1) == 11
    assert layout(24) == 2, "past the size, the last leaf goes on"
    for coord in [(1,), (1, 2, 3, 4), (1, (1, 1, 1)), ((1, 1), 0), -1, (0, -1), 1.5]:
        with pytest.raises(LayoutError):
            layout(coord)


def test_facts():
    layout = L("((2,4),3):((1,6),2)")
    assert (layout.rank, layout.depth, layout.size, layout.cosize) == (2, 2, 24, 24)
    assert (L("4:1").rank, L("4:1").depth) == (1, 0)
    assert layout.modes == ((2, 1), (4, 6), (3, 2))
    assert str(layout.flatten()) == "(2,4,3):(1,6,2)"
    assert [str(mode) for mode in layout] == ["(2,4):(1,6)", "3:2"]
    assert str(layout[-1]) == "3:2"
    with pytest.raises(LayoutError):
        layout[2]


def test_coordinates_from_numbers_and_from_offsets():
    assert idx2crd(5, ((2, 2), 3)) == ((1, 0), 1)
    assert row_major(3, 4).offset2crd(7) == (1, 3)
    with pytest.raises(LayoutError):
        idx2crd(12, ((2, 2), 3))
    with pytest.raises(LayoutError, match="offset 3"):
        L("(2,2):(1,10)").offset2crd(3)


def test_injectivity():
    assert is_injective(L("(3,2):(2,3)")), "interleaved, yet every offset once"
    assert not is_injective(L("(4,2):(1,0)"))
    assert not is_injective(L("(2,3):(1,1)"))
    with pytest.raises(LayoutError, match="cannot decide"):
        is_injective(L("(1000,1000):(7,5)"))


EXAMPLES = [
    (lambda: coalesce(L("(2,(1,6)):(1,(6,2))")), "12:1"),
    (lambda: coalesce(row_major(2, 4)), "(2,4):(4,1)"),
    (lambda: coalesce(L("((2,2),(2,2)):((1,2),(8,16))"), (1, 1)), "(4,4):(1,8)"),
    (lambda: composition(L("(6,2):(8,2)"), L("(4,3):(3,1)")), "((2,2),3):((24,2),8)"),
    (lambda: composition(row_major(8, 12), (2, None)), "(2,12):(12,1)"),
    (lambda: composition(L("10:1"), L("(4,3):(1,4)"), partial=True), "(4,3):(1,4)"),
    (lambda: composition(L("8:1"), 4), "4:1"),
    (lambda: complement(L("(2,2):(1,6)"), 24), "(3,2):(2,12)"),
    (lambda: complement(L("4:0")), "1:0"),
    (lambda: logical_divide(L("(4,2,3):(2,1,8)"), L("4:2")), "((2,2),(2,3)):((4,1),(2,8))"),
    (lambda: logical_divide(row_major(6, 4), (4, 2), partial=True), "((4,2),(2,2)):((4,16),(1,2))"),
    (lambda: zipped_divide(row_major(8, 12), (2, 4)), "((2,4),(4,3)):((12,1),(24,4))"),
    (lambda: zipped_divide(row_major(8, 12), 4), "(4,(2,12)):(12,(48,1))"),
    (lambda: tiled_divide(row_major(8, 12), (2, 4)), "((2,4),4,3):((12,1),24,4)"),
    (lambda: flat_divide(row_major(8, 12), (2, 4)), "(2,4,4,3):(12,1,24,4)"),
    (lambda: logical_product(L("(2,2):(4,1)"), L("6:1")), "((2,2),(2,3)):((4,1),(2,8))"),
    (lambda: logical_product(L("4:2"), 4), "(4,(2,2)):(2,(1,8))"),
    (lambda: blocked_product(row_major(2, 2), row_major(2, 3)), "((2,2),(2,3)):((2,12),(1,4))"),
    (lambda: raked_product(L("(2,2):(1,2)"), L("(2,2):(1,2)")), "((2,2),(2,2)):((4,1),(8,2))"),
    (lambda: tile_to_shape(L("(2,2):(1,2)"), (4, 6), (1, 0)), "((2,2),(2,3)):((1,12),(2,4))"),
    (lambda: right_inverse(row_major(4, 8)), "(8,4):(4,1)"),
    (lambda: left_inverse(L("(4,2):(1,16)")), "(16,2):(1,4)"),
    (lambda: recast_layout(16, 8, col_major(4, 8)), "(2,8):(1,2)"),
    (lambda: recast_layout(8, 4, row_major(4, 8)), "(4,4):(4,1)"),
    (lambda: recast_layout(4, 8, row_major(4, 8)), "(4,16):(16,1)"),
]


@pytest.mark.parametrize(("call", "answer"), EXAMPLES, ids=[answer for _, answer in EXAMPLES])
def test_worked_examples(call, answer):
    assert str(call()) == answer


def test_large_layouts_are_decided_without_enumeration():
    whole = row_major(2**20, 2**20)
    assert str(composition(whole, L(f"{2**20}:{2**20}"))) == f"{2**20}:1"
    tiles = zipped_divide(whole, (2**10, 2**10))
    assert (tiles.size, tiles.cosize) == (whole.size, whole.cosize)
    with pytest.raises(LayoutError, match="leaves 6, no divisor"):
        composition(L(f"({2**20},{2**20}):({2**20},1)"), L(f"{2**19}:6"))
    with pytest.raises(LayoutError, match="too large to check"):
        recast_layout(16, 8, whole)


def test_a_composition_whose_strides_do_not_divide_is_accepted_when_a_layout_is_the_map():
    assert str(composition(L("(8,8):(8,1)"), L("2:6"))) == "2:48"


REFUSED = [
    (lambda: composition(L("8:1"), L("9:1")), "reaches 9, past the 8"),
    (lambda: composition(row_major(8, 12), (2,)), "does not fit the modes"),
    (lambda: composition(L("8:1"), (2,)), "does not fit the modes"),
    (lambda: composition(L("8:1"), "2"), "no tiler"),
    (lambda: complement(L("4:1"), 0), "cotarget 0"),
    (lambda: logical_divide(L("8:1"), L("(2,2):(1,0)")), "repeats an offset"),
    (lambda: logical_divide(L("72:1"), L("(4,6):(1,6)")), "no layout beside it has offset 4 below 72"),
    (lambda: logical_divide(L("10:1"), 4), "partial=True"),
    (lambda: logical_product(L("(2,2):(1,0)"), 2), "the block repeats"),
    (lambda: logical_product(L("2:1"), L("2:0")), "the tiler repeats"),
    (lambda: logical_product(L("2:1"), (2, 2)), "no layout or int"),
    (lambda: logical_product(L(f"{2**40}:1"), L(f"{2**40}:1")), "63 bits"),
    (lambda: blocked_product(L("4:1"), row_major(2, 2)), "differ in rank"),
    (lambda: blocked_product(L("(2,2):(4,1)"), row_major(2, 3)), "composition"),
    (lambda: tile_to_shape(L("(2,2):(1,2)"), (4, 5), (1, 0)), "does not tile"),
    (lambda: tile_to_shape(L("(2,2):(1,1)"), (4, 4), (1, 0)), "overlaps"),
    (lambda: left_inverse(L("(2,3):(1,1)")), "starts inside"),
    (lambda: recast_layout(16, 8, L("(4,8):(8,3)")), "straddle"),
    (lambda: recast_layout(4, 8, L("(4,8):(16,2)")), "straddle"),
    (lambda: recast_layout(12, 8, L("4:1")), "neither divides"),
    (lambda: coalesce(L("(2,2):(1,2)"), ((1, 1), 1)), "refused by CuTe"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_say_which_condition_failed(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def test_swizzle():
    swizzle = Swizzle(3, 4, 3)
    assert swizzle(0b1010000000) == 0b1011010000
    assert str(swizzle) == "S<3,4,3>"
    assert swizzle.source_mask == 0b1110000000
    assert Swizzle(2, 0, -3).source_mask == 0b11
    for arguments in [(3, 0, 2), (-1, 0, 1), (1, -1, 1), (2, 0, -1)]:
        with pytest.raises(LayoutError):
            Swizzle(*arguments)


def test_import_needs_neither_the_dsl_nor_torch():
    check = (
        "import sys, cute_ep.layouts, cute_ep.layouts.algebra.algebra as a, cute_ep.layouts.tiles.tile_tensor as t;"
        "assert t.TileTensor(a.row_major(4, 8)).tile((2, 4), (1, 0)).vectorize(1, 4).offsets();"
        "assert not {'cutlass', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_without_the_dsl_the_algebra_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    eager.evaluate.cache_clear()
    with pytest.raises(LayoutError, match=r"pip install nvidia-cutlass-dsl==\d"):
        right_inverse(L("(3,5):(5,1)"))


def test_the_algebra_runs_while_a_kernel_is_traced():
    import cutlass.cute as cute

    seen = []

    @cute.jit
    def traced():
        before = cute.make_layout((2, 2))
        seen.append(str(zipped_divide(row_major(6, 14), (2, 7))))
        seen.append(str(cute.make_layout((2, before.shape))))

    traced()
    assert seen == ["((2,7),(3,2)):((14,1),(28,7))", "(2,(2,2)):(1,(2,4))"]
