"""Layouts and swizzles: their text, their maps by hand and against CuTe's, and what is refused."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import coordinate, cute_context, law, layouts, offsets

from cute_ep.layouts.tiles.layout import Layout, LayoutError, Swizzle, int_leaves, is_injective, row_major

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
    assert [str(mode) for mode in layout] == ["(2,4):(1,6)", "3:2"]
    assert str(layout[-1]) == "3:2"
    with pytest.raises(LayoutError):
        layout[2]


def test_coordinates_from_offsets():
    assert row_major(3, 4).offset2crd(7) == (1, 3)
    with pytest.raises(LayoutError, match="offset 3"):
        L("(2,2):(1,10)").offset2crd(3)


def test_injectivity():
    assert is_injective(L("(3,2):(2,3)")), "interleaved, yet every offset once"
    assert not is_injective(L("(4,2):(1,0)"))
    assert not is_injective(L("(2,3):(1,1)"))
    with pytest.raises(LayoutError, match="cannot decide"):
        is_injective(L("(1000,1000):(7,5)"))


def test_swizzle():
    swizzle = Swizzle(3, 4, 3)
    assert swizzle(0b1010000000) == 0b1011010000
    assert str(swizzle) == "S<3,4,3>"
    assert swizzle.source_mask == 0b1110000000
    assert Swizzle(2, 0, -3).source_mask == 0b11
    for arguments in [(3, 0, 2), (-1, 0, 1), (1, -1, 1), (2, 0, -1)]:
        with pytest.raises(LayoutError):
            Swizzle(*arguments)


@law
@given(layouts("broadcast"), st.integers(1, 3))
def test_all_coordinate_forms_of_an_index_agree(layout, beyond):
    for index in range(layout.size):
        coord = coordinate(index, layout.shape)
        assert layout(index) == layout(coord) == layout(*int_leaves(coord))
        if layout.rank > 1:
            modes = coordinate(index, tuple(mode.size for mode in layout))
            assert layout(modes) == layout(index) == sum(map(Layout.__call__, layout, modes))
    last_extent, last_stride = layout.modes[-1]
    tail = layout.size - 1
    assert layout(tail + beyond * layout.size) == layout(tail) + beyond * last_extent * last_stride


@law
@given(layouts("tractable"))
def test_offsets_of_an_injective_layout_give_back_coordinates(layout):
    assert is_injective(layout)
    for index, offset in enumerate(offsets(layout)):
        assert layout.offset2crd(offset) == coordinate(index, layout.shape)


def test_the_map_of_a_layout_is_that_of_cute():
    with cute_context() as cute:

        @settings(law, max_examples=25)
        @given(layouts("broadcast", largest=48))
        def same(layout):
            theirs = cute.make_layout(layout.shape, stride=layout.stride)
            assert (cute.size(theirs), cute.cosize(theirs)) == (layout.size, layout.cosize)
            assert str(theirs) == str(layout)
            assert str(cute.make_layout(layout.shape)) == str(Layout(layout.shape))
            for index in range(layout.size + 3):
                assert theirs(index) == layout(index)

        same()


def test_import_needs_neither_the_dsl_nor_torch():
    check = (
        "import sys, cute_ep.layouts, cute_ep.layouts as l;"
        "assert l.TileTensor(l.row_major(4, 8)).tile((2, 4), (1, 0)).offsets();"
        "assert not {'cutlass', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
