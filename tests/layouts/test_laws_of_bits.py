"""Layouts of power-of-two extents and strides map bits to bits: linear layouts over two elements.

As in arXiv 2505.23819.
"""

from hypothesis import given
from hypothesis import strategies as st
from random_layouts import (
    POWERS,
    law,
    layouts,
    offsets,
    swizzles,
)

from cute_ep.layouts.tiles.layout import Layout, Swizzle, is_injective, row_major


def bit_matrix(function, bits):
    """Column k is the image of bit k."""
    return [function(1 << bit) for bit in range(bits)]


def apply(matrix, index):
    result = 0
    for bit, column in enumerate(matrix):
        result ^= column if index >> bit & 1 else 0
    return result


def binary_rank(columns):
    """Rank over two elements: columns with a new leading bit."""
    basis = []
    for column in columns:
        for pivot in basis:
            column = min(column, column ^ pivot)
        if column:
            basis.append(column)
    return len(basis)


@law
@given(layouts("broadcast", POWERS))
def test_power_of_two_layouts_are_bit_matrices(layout):
    bits = layout.size.bit_length() - 1
    matrix = bit_matrix(layout, bits)
    assert offsets(layout) == [apply(matrix, index) for index in range(layout.size)]
    rank = binary_rank(matrix)
    assert is_injective(layout) == (rank == bits)
    assert len(set(offsets(layout))) == 2**rank


@law
@given(st.integers(5, 8).flatmap(lambda bits: st.permutations(range(bits))), swizzles())
def test_bank_conflicts_are_a_rank(order, swizzle):
    """32 lanes reading 4-byte words hit 2**rank distinct banks, rank taken over the five bank bits."""
    layout = Layout((2,) * len(order), tuple(1 << bit for bit in order))
    words = [swizzle(layout(lane)) for lane in range(32)]
    columns = [word % 32 for word in bit_matrix(lambda lane: swizzle(layout(lane)), 5)]
    assert len({word % 32 for word in words}) == 2 ** binary_rank(columns)


def test_the_128_byte_swizzle_has_no_conflicts_down_a_column():
    """Eight rows of 128 bytes, one 16-byte vector of each: all on the same banks, or on all of them."""
    tile = row_major(8, 64)
    column = [tile(row, 0) // 8 % 8 for row in range(8)]
    swizzled = [Swizzle(3, 3, 3)(tile(row, 0)) // 8 % 8 for row in range(8)]
    assert (column, sorted(swizzled)) == ([0] * 8, list(range(8)))
