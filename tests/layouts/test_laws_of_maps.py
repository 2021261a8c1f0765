"""Laws of the layout algebra on random layouts: evaluation, coalesce, composition, complement, inverses.

The laws: Cecka, arXiv 2603.02298; Carlisle, Shah, Stern, VanKoughnett, arXiv 2601.05972 (tractable layouts).
"""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_layouts import POWERS, cute_context, law, layouts, offsets, pair

from cute_ep.layouts.algebra.algebra import (
    Layout,
    LayoutError,
    coalesce,
    complement,
    composition,
    idx2crd,
    is_injective,
    left_inverse,
    right_inverse,
)
from cute_ep.layouts.algebra.guards import inexact_composition

L = Layout.parse


# ---- index


@law
@given(layouts("broadcast"), st.integers(1, 3))
def test_all_coordinate_forms_of_an_index_agree(layout, beyond):
    for index in range(layout.size):
        coord = idx2crd(index, layout.shape)
        flat = idx2crd(index, layout.flatten().shape)
        assert layout(index) == layout(coord) == layout.flatten()(flat)
        if layout.rank > 1:
            modes = idx2crd(index, tuple(mode.size for mode in layout))
            assert layout(modes) == layout(index) == sum(map(Layout.__call__, layout, modes))
    last_extent, last_stride = layout.modes[-1]
    tail = layout.size - 1
    assert layout(tail + beyond * layout.size) == layout(tail) + beyond * last_extent * last_stride


@law
@given(layouts("tractable"))
def test_offsets_of_an_injective_layout_give_back_coordinates(layout):
    for index, offset in enumerate(offsets(layout)):
        if is_injective(layout):
            assert layout.offset2crd(offset) == idx2crd(index, layout.shape)


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


# ---- coalesce


@law
@given(layouts("broadcast"))
def test_coalesce_keeps_the_map_and_is_idempotent(layout):
    simple = coalesce(layout)
    assert offsets(simple) == offsets(layout)
    assert simple.depth <= 1
    assert coalesce(simple) == simple
    assert all(extent > 1 for extent, _ in simple.modes) or simple.size == 1


@law
@given(layouts("broadcast"))
def test_coalesce_by_mode_keeps_the_rank(layout):
    assume(isinstance(layout.shape, tuple))
    simple = coalesce(layout, (1,) * layout.rank)
    assert simple.rank == layout.rank and simple.depth <= 2
    assert [offsets(mode) for mode in simple] == [offsets(mode) for mode in layout]


# ---- composition. Powers of two always compose; other extents compose exactly or are refused.


@law
@given(layouts("broadcast", POWERS), layouts("tractable", POWERS, largest=32))
def test_composition_is_the_composed_map(outer, inner):
    assume(inner.cosize <= outer.size)
    result = composition(outer, inner)
    assert offsets(result) == [outer(inner(index)) for index in range(inner.size)]
    assert [mode.size for mode in result] == [mode.size for mode in inner] or inner.rank == 1


@settings(law, max_examples=250)
@given(layouts("broadcast"), layouts("broadcast", largest=48))
def test_composition_is_exact_or_refused(outer, inner):
    exact = inexact_composition(outer.modes, inner.modes) is None and inner.cosize <= outer.size
    # CuTe reads, and may refuse, the stride of a leaf of extent 1, which no coordinate ever uses.
    unused_stride = any(extent == 1 and stride for extent, stride in inner.modes)
    try:
        result = composition(outer, inner)
    except LayoutError:
        assert not exact or unused_stride, "the conditions hold: CuTe must have the right answer"
    else:
        assert offsets(result) == [outer(inner(index)) for index in range(inner.size)]


@law
@given(layouts("broadcast"))
def test_composition_with_the_identity_keeps_the_map(layout):
    assert offsets(composition(layout, Layout(layout.size))) == offsets(layout)


@law
@given(layouts("broadcast", POWERS), layouts("compact", POWERS, largest=32), st.data())
def test_composition_distributes_over_concatenation(outer, inner, data):
    """Parts that do not share bits, so that their sums cannot carry."""
    other = complement(inner, inner.size * data.draw(st.sampled_from(POWERS)))
    both = pair(inner, other)
    assume(both.cosize <= outer.size)
    assert composition(outer, both) == pair(composition(outer, inner), composition(outer, other))


@law
@given(
    layouts("broadcast", POWERS),
    layouts("compact", POWERS, largest=64),
    layouts("compact", POWERS, largest=32),
)
def test_composition_is_associative_inside_the_domains(first, second, third):
    assume(second.cosize <= first.size and third.cosize <= second.size)
    left = composition(composition(first, second), third)
    assert offsets(left) == offsets(composition(first, composition(second, third)))


def test_composition_is_not_associative_outside_the_domains():
    first, second, third = L("(5,3):(1,7)"), L("4:1"), L("2:5")
    with pytest.raises(LayoutError, match="reaches 6, past the 4"):
        composition(second, third)
    beyond = composition(second, third, partial=True)
    assert composition(first, beyond)(1) == 7
    assert composition(composition(first, second), third, partial=True)(1) == 5


# ---- complement


@law
@given(layouts("broadcast"), st.integers(1, 200))
def test_complement_is_ordered_and_disjoint(layout, cotarget):
    rest = complement(layout, cotarget)
    assert offsets(rest) == sorted(set(offsets(rest)))
    assert set(offsets(rest)) & set(offsets(layout)) <= {0}
    assert pair(layout, rest).cosize >= cotarget
    assert complement(pair(layout, rest)).size == 1


@law
@given(layouts("tractable"), st.integers(1, 200))
def test_a_tractable_layout_and_its_complement_fill_an_interval(layout, cotarget):
    rest = complement(layout, cotarget)
    assume(layout.size * rest.size <= 4096)
    whole = pair(layout, rest)
    assert sorted(offsets(whole)) == list(range(whole.size))
    assert complement(complement(rest, layout.cosize), cotarget) == rest


@settings(law, max_examples=200)
@given(layouts("gapped", largest=24), st.integers(1, 60))
def test_a_layout_and_its_complement_have_every_offset_or_it_is_refused(layout, cotarget):
    """Refused is only what CuTe answers with offsets missing."""
    try:
        have = set(offsets(pair(layout, complement(layout, cotarget))))
    except LayoutError as refused:
        with cute_context() as cute:
            theirs = cute.complement(cute.make_layout(layout.shape, stride=layout.stride), cotarget)
            (gap,) = map(int, re.findall(r"has offset (\d+) below", str(refused)))
            found = Layout.parse(str(theirs))
        assert gap < cotarget and gap not in offsets(pair(layout, found))
    else:
        assert set(range(cotarget)) <= have


def test_the_documented_bound_on_the_cosize_is_wrong():
    """cosize(C) <= cotarget rounded up to cosize(A) is stated by CuTe's documentation; 45 > 40."""
    rest = complement(L("(4,2):(1,16)"), 40)
    assert (str(rest), rest.cosize) == ("(4,2):(4,32)", 45)


# ---- inverses


@law
@given(layouts("broadcast"))
def test_the_right_inverse_is_undone_by_the_layout(layout):
    inverse = right_inverse(layout)
    assert [layout(inverse(index)) for index in range(inverse.size)] == list(range(inverse.size))


@law
@given(layouts("tractable"))
def test_the_right_inverse_covers_all_contiguous_offsets(layout):
    assert right_inverse(layout).size not in offsets(layout)


@law
@given(layouts("broadcast"))
def test_the_left_inverse_undoes_the_layout(layout):
    inverse = left_inverse(layout)
    for index, offset in enumerate(offsets(layout)):
        assert layout(inverse(offset)) == offset
        if is_injective(layout):
            assert inverse(offset) == index


@law
@given(layouts("compact"))
def test_compact_layouts_have_one_inverse(layout):
    inverse = left_inverse(layout)
    assert offsets(inverse) == offsets(right_inverse(layout))
    assert str(coalesce(composition(inverse, layout))) in (f"{layout.size}:1", "1:0")
