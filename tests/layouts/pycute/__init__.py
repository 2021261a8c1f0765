"""`cute_ep.layouts` under the names and conventions of NVIDIA's pycute, for pycute's own tests to judge.

NVIDIA publishes the tests in the CUTLASS repository (test/python/pycute); they are run from a checkout,
unchanged, and are not part of this one. From the root of this repository:

    PYTHONPATH=tests/layouts python CUTLASS/test/python/pycute/run_all_tests.py

where CUTLASS is a checkout of github.com/NVIDIA/cutlass (4.x) without its python/ folder on the path. All
10 tests pass (commit 7107b055 of 2026-08-20, whose pycute is 4.7.0).

What differs from `cute_ep.layouts`: sizes are methods, layouts of extent 1 get product strides, nothing is
checked on construction, and `composition` may reach past the outer layout (`partial=True`), which two of
the tests do. The algebra itself is `cute_ep.layouts.algebra.algebra`, guards included. Integer-tuple functions that
our library has no use for are written here, from their documented meaning.
"""

from abc import ABCMeta
from math import prod

from cute_ep.layouts.algebra import algebra

__all__ = [
    "Integer",
    "Layout",
    "LayoutBase",
    "coalesce",
    "complement",
    "composition",
    "cosize",
    "crd2idx",
    "elem_scale",
    "flatten",
    "idx2crd",
    "inner_product",
    "is_int",
    "is_layout",
    "is_tuple",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "make_layout",
    "prefix_product",
    "product",
    "right_inverse",
    "shape_div",
    "signum",
    "size",
    "tiled_divide",
    "tuple_max",
    "zipped_divide",
]


class _IntegerMeta(ABCMeta):
    def __subclasscheck__(cls, other):
        return issubclass(other, int) and other is not bool

    def __instancecheck__(cls, value):
        return cls.__subclasscheck__(type(value))


class Integer(metaclass=_IntegerMeta):
    """Ints that count: int and its subclasses, but not bool."""


def is_int(value):
    """Whether `value` is an integer leaf."""
    return isinstance(value, Integer)


def is_tuple(value):
    """Whether `value` is a tuple of leaves or tuples."""
    return isinstance(value, tuple)


def flatten(value):
    """The leaves, leftmost first, as a tuple."""
    return tuple(leaf for item in value for leaf in flatten(item)) if is_tuple(value) else (value,)


def signum(value):
    """-1, 0 or 1."""
    return (value > 0) - (value < 0)


def product(value):
    """Product of all leaves."""
    return prod(flatten(value))


def inner_product(left, right):
    """Sum of the products of corresponding leaves."""
    return sum(a * b for a, b in zip(flatten(left), flatten(right), strict=True))


def tuple_max(value):
    """Largest leaf."""
    return max(flatten(value))


def elem_scale(left, right):
    """Each leaf of `left` times the product of what stands in its place in `right`."""
    if is_tuple(left):
        return tuple(map(elem_scale, left, right))
    return left * product(right)


def prefix_product(value, init=1):
    """For each leaf, `init` times the product of the leaves to its left; nested as `value`."""
    if is_tuple(init):
        return tuple(map(prefix_product, value, init))
    if not is_tuple(value):
        return init
    result = []
    for item in value:
        result.append(prefix_product(item, init))
        init *= product(item)
    return tuple(result)


def shape_div(shape, divisor):
    """`shape` with `divisor` divided out from the left; leaf by leaf where both are tuples."""
    if is_tuple(shape):
        if is_tuple(divisor):
            return tuple(map(shape_div, shape, divisor))
        result = []
        for item in shape:
            result.append(shape_div(item, divisor))
            divisor = shape_div(divisor, product(item))
        return tuple(result)
    divisor = product(divisor)
    if shape % divisor and divisor % shape:
        raise AssertionError(f"shape_div: {shape} and {divisor} do not divide")
    return -(-shape // divisor)


def idx2crd(index, shape, stride=None):
    """Leaf by leaf (index // stride) % shape; strides are compact unless given."""
    stride = prefix_product(shape) if stride is None else stride
    if is_tuple(shape):
        entries = index if is_tuple(index) else (index,) * len(shape)
        return tuple(map(idx2crd, entries, shape, stride))
    return index // stride % shape


def crd2idx(coord, shape, stride=None):
    """The offset of a coordinate; strides are compact unless given."""
    return Layout(shape, stride)(coord)


class LayoutBase:
    """Marks layouts for `is_layout`."""


def is_layout(value):
    """Whether `value` is a layout."""
    return isinstance(value, LayoutBase)


class Layout(LayoutBase):
    """pycute's Layout over ours: product strides by default, `size` and `cosize` as methods."""

    def __init__(self, shape, stride=None):
        self.shape = shape
        self.stride = prefix_product(shape) if stride is None else stride

    @property
    def ours(self):
        """The same layout as `cute_ep.layouts` has it."""
        return algebra.Layout(self.shape, self.stride)

    def __eq__(self, other):
        return (self.shape, self.stride) == (other.shape, other.stride)

    def __hash__(self):
        return hash((self.shape, self.stride))

    def __len__(self):
        return self.ours.rank

    def __call__(self, *coord):
        return self.ours(*coord)

    def __getitem__(self, index):
        return _theirs(self.ours[index])

    def __iter__(self):
        return map(_theirs, self.ours)

    def size(self):
        """Number of coordinates."""
        return self.ours.size

    def cosize(self):
        """One more than the largest offset."""
        return self.ours.cosize

    def __str__(self):
        return f"{self.shape}:{self.stride}"

    def __repr__(self):
        return f"Layout({self.shape},{self.stride})"


def _theirs(layout):
    return Layout(layout.shape, layout.stride)


def _ours(value):
    if is_tuple(value):
        return tuple(map(_ours, value))
    return value.ours if is_layout(value) else value


def make_layout(*layouts):
    """One mode per layout; a single iterable of layouts counts as its items."""
    modes = layouts if is_layout(layouts[0]) else tuple(layouts[0])
    return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))


def size(value):
    """Number of coordinates of a layout, or product of a shape."""
    return value.size() if is_layout(value) else product(value)


def cosize(layout):
    """One more than the largest offset."""
    return layout.cosize()


def coalesce(layout, profile=None):
    """`algebra.coalesce`."""
    return _theirs(algebra.coalesce(layout.ours, profile))


def composition(outer, inner):
    """`algebra.composition`, which may reach past `outer`."""
    return _theirs(algebra.composition(outer.ours, _ours(inner), partial=True))


def complement(layout, max_idx=1):
    """`algebra.complement`; an int n is the layout n:1."""
    return _theirs(algebra.complement(_ours(Layout(layout) if is_int(layout) else layout), max_idx))


def right_inverse(layout):
    """`algebra.right_inverse`."""
    return _theirs(algebra.right_inverse(layout.ours))


def left_inverse(layout):
    """`algebra.left_inverse`."""
    return _theirs(algebra.left_inverse(layout.ours))


def logical_divide(layout, tiler):
    """`algebra.logical_divide`."""
    return _theirs(algebra.logical_divide(layout.ours, _ours(tiler)))


def zipped_divide(layout, tiler):
    """`algebra.zipped_divide`."""
    return _theirs(algebra.zipped_divide(layout.ours, _ours(tiler)))


def tiled_divide(layout, tiler):
    """`algebra.tiled_divide`."""
    return _theirs(algebra.tiled_divide(layout.ours, _ours(tiler)))


def logical_product(block, tiler):
    """`algebra.logical_product`."""
    return _theirs(algebra.logical_product(block.ours, _ours(tiler)))
