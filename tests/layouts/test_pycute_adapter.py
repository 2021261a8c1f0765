"""The conventions in which the `pycute` adapter differs from our own names; the algebra behind it is ours."""

import pycute
import pytest

from cute_ep.layouts.algebra import algebra


def test_default_strides_are_products_even_for_extent_1():
    assert str(pycute.Layout((2, (1, 3)))) == "(2, (1, 3)):(1, (2, 2))"
    assert str(algebra.Layout((2, (1, 3)))) == "(2,(1,3)):(1,(0,2))"


def test_layouts_have_methods_modes_and_equality():
    layout = pycute.Layout((4, (2, 3)), (6, (1, 2)))
    assert (
        (layout.size(), layout.cosize(), len(layout)) == (24, 24, 2) == (pycute.size(layout), pycute.cosize(layout), 2)
    )
    assert layout[1] == pycute.Layout((2, 3), (1, 2)) and list(layout) == [layout[0], layout[1]]
    assert pycute.make_layout(layout[0], layout[1]) == pycute.make_layout(iter(layout)) == layout
    assert layout(1, 3) == layout((1, (1, 1))) == layout(13) == 9
    assert pycute.size((2, (3, 4))) == 24
    assert pycute.is_layout(layout) and not pycute.is_layout(layout.shape)


def test_algebra_takes_and_returns_pycute_layouts():
    layout = pycute.Layout((8, 12), (12, 1))
    calls = {
        "coalesce": (layout,),
        "composition": (layout, pycute.Layout((2, 3))),
        "complement": (layout, 200),
        "right_inverse": (layout,),
        "left_inverse": (layout,),
        "logical_divide": (layout, (2, 4)),
        "zipped_divide": (layout, (2, 4)),
        "tiled_divide": (layout, (2, 4)),
        "logical_product": (layout, pycute.Layout((2, 3))),
    }
    for name, arguments in calls.items():
        ours = tuple(argument.ours if pycute.is_layout(argument) else argument for argument in arguments)
        assert getattr(pycute, name)(*arguments).ours == getattr(algebra, name)(*ours), name


def test_composition_may_reach_past_the_outer_layout():
    assert pycute.composition(pycute.Layout(4), pycute.Layout(4, 2)) == pycute.Layout(4, 2)
    with pytest.raises(algebra.LayoutError):
        algebra.composition(algebra.Layout(4), algebra.Layout(4, 2))
    assert pycute.complement(4, 8) == pycute.Layout(2, 4)


def test_guards_stay_on():
    with pytest.raises(algebra.LayoutError):
        pycute.composition(pycute.Layout((8, 8), (8, 1)), pycute.Layout(8, 6))
    with pytest.raises(algebra.LayoutError):
        pycute.complement(pycute.Layout((2, 3), (1, 1)), 24)


def test_integer_tuples():
    assert [pycute.is_int(value) for value in (1, True, 1.0, (1,))] == [True, False, False, False]
    assert pycute.is_tuple((1,)) and not pycute.is_tuple(1)
    assert pycute.flatten(((1, 2), 3)) == (1, 2, 3) and pycute.flatten(4) == (4,)
    assert [pycute.signum(value) for value in (-3, 0, 5)] == [-1, 0, 1]
    assert pycute.product(((2, 3), 4)) == 24 and pycute.tuple_max(((2, 9), 4)) == 9
    assert pycute.inner_product(((2, 3), 4), ((2, 1), 2)) == 15
    assert pycute.elem_scale((2, 3), ((2, 5), 7)) == (20, 21)
    assert pycute.prefix_product(((2, 3), (1, 4))) == ((1, 2), (6, 6))
    assert pycute.prefix_product((2, (3, 4)), (10, (1, 7))) == (10, (1, 7))
    assert pycute.shape_div(((3, 4), 6), 36) == ((1, 1), 2) and pycute.shape_div((6, 8), (2, 4)) == (3, 2)
    assert pycute.idx2crd(17, (4, (2, 3))) == (1, (0, 2)) and pycute.crd2idx((1, (0, 2)), (4, (2, 3))) == 17
    with pytest.raises(AssertionError):
        pycute.shape_div(6, 4)
