"""Token formats: one frozen record of facts a format. The codec and the reference read them from here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import lcm
from typing import Literal

from cute_ep.layouts.maps.record import Int
from cute_ep.layouts.maps.scales import ATOM, LINEAR, TRANSPOSED, WORD_BYTES

VECTOR_BYTES = 16
"""Widest access of one thread: payload rows and message fields are multiples of it."""
MAX_UNIT = 32
"""Elements of the largest unit (`Format.unit`): what a lane loads of a row at a time."""
ROW_SCALE_BYTES = 2
"""Bytes of a row's own global scale (bfloat16), in formats that have one."""

SwigluFormat = Literal["fp8", "fp8_pow2", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"]
"""Formats with scale factors that `fused_silu` makes."""
ScaledFormat = Literal[SwigluFormat, "nvfp4_row"]
"""Formats with scale factors: what `quantize` makes."""
FormatName = Literal["bf16", ScaledFormat]
"""Formats of dispatched rows: the keys of FORMATS, in its order."""


@dataclass(frozen=True)
class Element:
    """A number format of payload elements or of scale factors: sign, exponent and mantissa, from the highest bit down.

    Numbers with an exponent field of 0 are subnormal, but in `E8M0`, where they are 2**-bias. Elements of fewer than 8
    bits follow each other without gaps, element 0 in the lowest bits of the first byte.

    Attributes:
        name: what documents call it.
        exponent: bits of the exponent.
        mantissa: bits of the mantissa.
        container: the torch type of a tensor of payload, by name; `uint8` holds bits that torch cannot convert.
        torch_name: torch's own type for the same bytes, which callers may give, too; not every torch has it.
        nan: the code of NaN without the sign, in formats that have one and no infinities.
        signed: whether there is a sign bit.
    """

    name: str
    exponent: int
    mantissa: int
    container: str
    torch_name: str | None = None
    nan: int | None = None
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What an exponent field is above the exponent."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def magnitude(self) -> int:
        """All bits of a code but the sign."""
        return (1 << (self.exponent + self.mantissa)) - 1

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest number of a format without infinities."""
        return (self.magnitude >> self.mantissa) - self.bias

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def largest(self) -> float:
        """The largest number of a format without infinities."""
        code = self.magnitude if self.nan is None else self.nan - 1
        exponent, fraction = divmod(code, 1 << self.mantissa)
        return (1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias)

    @property
    def roundoff(self) -> float:
        """Most that rounding to nearest changes a number between the smallest normal and the largest, over it."""
        return 2.0 ** -(self.mantissa + 1)


FLOAT32 = Element("f32", 8, 23, "float32")
BFLOAT16 = Element("bf16", 8, 7, "bfloat16")
E4M3 = Element("e4m3", 4, 3, "float8_e4m3fn", "float8_e4m3fn", nan=0x7F)
E2M3 = Element("e2m3", 2, 3, "uint8")
E3M2 = Element("e3m2", 3, 2, "uint8")
E2M1 = Element("e2m1", 2, 1, "uint8", "float4_e2m1fn_x2")
E8M0 = Element("e8m0", 8, 0, "uint8", "float8_e8m0fnu", nan=0xFF, signed=False)


@dataclass(frozen=True)
class Format:
    """How one token row is stored on the wire and in the output.

    Attributes:
        name: key in manifests, test ids and on the command line.
        element: number format of the payload.
        block: elements that share one scale factor (1: the format has none).
        scale: number format of a scale factor; None: the format has none.
        power_of_two: whether float32 scale factors are rounded up to powers of two.
        global_scale: whether a float32 scale given by the caller multiplies the block scales.
        row_scale: whether each row has a global scale of its own, found from the row and stored beside it.
        scale_layouts: how the scale factors of an output may be laid out (`layouts/maps/scales.py`), the default first.
        row_alignment: default for the multiple to which each expert's rows are padded.
    """

    name: str
    element: Element
    block: int = 1
    scale: Element | None = None
    power_of_two: bool = False
    global_scale: bool = False
    row_scale: bool = False
    scale_layouts: tuple[str, ...] = ()
    row_alignment: int = 1

    def __post_init__(self) -> None:
        """ValueError unless units hold whole blocks, or blocks whole units, and lanes of a warp whole scale words: what
        kernels compute from the record are exact quotients."""
        large, small = max(self.unit, self.block), min(self.unit, self.block)
        if self.unit > MAX_UNIT or self.unit_words % 2:
            rule = f"must have at most {MAX_UNIT}, and an even number of words"
            raise ValueError(f"{self.name}: units of {self.unit} elements in {self.unit_words} words: {rule}")
        if self.scale is None:
            return
        if large % small or large // small & (large // small - 1):
            raise ValueError(f"{self.name}: block of {self.block}: must be a unit of {self.unit} by a power of two")
        if self.unit * self.scale_itemsize > self.block * WORD_BYTES:
            raise ValueError(f"{self.name}: a unit has more scale factors than a word")

    @property
    def bits(self) -> int:
        """Bits of one payload element."""
        return self.element.bits

    @property
    def unit(self) -> int:
        """Elements of a unit, what a lane encodes at a time: the fewest, a power of two, that fill a vector."""
        return 1 << (-(-VECTOR_BYTES * 8 // self.bits) - 1).bit_length()

    @property
    def unit_words(self) -> int:
        """32-bit words of payload of a unit: 4, a vector, or more."""
        return self.unit * self.bits // 32

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale factor; 0 when the format has none."""
        return 0 if self.scale is None else self.scale.bits // 8

    @property
    def row_scale_bytes(self) -> int:
        """Bytes of the row's own scale: ROW_SCALE_BYTES or 0."""
        return ROW_SCALE_BYTES if self.row_scale else 0

    def payload_bytes(self, hidden: Int) -> Int:
        """Bytes of one row's payload; `hidden` may be a Python or a device integer."""
        return hidden * self.bits // 8

    def scale_bytes(self, hidden: Int) -> Int:
        """Bytes of one row's scale factors; 0 when the format has none."""
        return hidden // self.block * self.scale_itemsize

    @property
    def multiple(self) -> int:
        """Least number of elements of a row that are whole blocks and whole 16-byte vectors; rows are multiples."""
        return lcm(self.block, lcm(self.bits, VECTOR_BYTES * 8) // self.bits)

    def check_hidden(self, hidden: int, name: str = "hidden") -> None:
        """Raise ValueError unless `hidden` elements, which the caller calls `name`, can be a row."""
        if hidden <= 0 or hidden % self.multiple:
            raise ValueError(f"{name} = {hidden}: must be a positive multiple of {self.multiple} for {self.name}")

    def scale_layout(self, wanted: str | None) -> str | None:
        """`wanted`, or for None the default (None for a format without scale factors); ValueError unless it is one of
        `scale_layouts`."""
        if wanted is not None and wanted not in self.scale_layouts:
            known = ", ".join(self.scale_layouts)
            rule = f"None or one of {known} for {self.name}" if known else f"None, {self.name} has no scale factors"
            raise ValueError(f"scale_layout = {wanted!r}: must be {rule}")
        return wanted or next(iter(self.scale_layouts), None)


_BYTE_SCALES = (ATOM, LINEAR)
_FLOAT_SCALES = (TRANSPOSED, LINEAR)

BF16 = Format("bf16", BFLOAT16)
FP8 = Format("fp8", E4M3, 128, FLOAT32, scale_layouts=_FLOAT_SCALES, row_alignment=4)
FP8_POW2 = Format("fp8_pow2", E4M3, 128, FLOAT32, power_of_two=True, scale_layouts=_FLOAT_SCALES, row_alignment=4)
MXFP8 = Format("mxfp8", E4M3, 32, E8M0, scale_layouts=_BYTE_SCALES)
MXFP6_E2M3 = Format("mxfp6_e2m3", E2M3, 32, E8M0, scale_layouts=_BYTE_SCALES)
MXFP6_E3M2 = Format("mxfp6_e3m2", E3M2, 32, E8M0, scale_layouts=_BYTE_SCALES)
MXFP4 = Format("mxfp4", E2M1, 32, E8M0, scale_layouts=_BYTE_SCALES)
NVFP4 = Format("nvfp4", E2M1, 16, E4M3, global_scale=True, scale_layouts=_BYTE_SCALES)
NVFP4_ROW = Format("nvfp4_row", E2M1, 16, E4M3, row_scale=True, scale_layouts=_BYTE_SCALES)

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (BF16, FP8, FP8_POW2, MXFP8, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4, NVFP4_ROW)
}


def formats_of(hidden: int, formats: Iterable[str] = FORMATS) -> list[str]:
    """Those of the formats that rows of `hidden` elements fit."""
    fits = []
    for fmt in formats:
        with suppress(ValueError):
            FORMATS[fmt].check_hidden(hidden)
            fits.append(fmt)
    return fits
