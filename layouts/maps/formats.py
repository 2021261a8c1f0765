"""Token formats: one frozen record of facts a format. The codec and the reference read them from here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import lcm

from cute_ep.layouts.maps.record import Int

VECTOR_BYTES = 16
"""Widest access of one thread: payload rows and message fields are multiples of it."""
ROW_SCALE_BYTES = 2
"""Bytes of a row's own global scale (bfloat16), in formats that have one."""


@dataclass(frozen=True)
class Format:
    """How one token row is stored on the wire and in the output.

    Attributes:
        name: key in manifests, test ids and on the command line.
        element: number format of the payload: "bf16", "e4m3" or "e2m1".
        block: elements that share one scale factor (1: the format has none).
        scale: number format of a scale factor: "f32", "e4m3", "e8m0", or None.
        power_of_two: whether float32 scale factors are rounded up to powers of two.
        global_scale: whether a float32 scale given by the caller multiplies the block scales.
        row_scale: whether each row has a global scale of its own, found from the row and stored beside it.
        scale_layouts: how the scale factors of an output may be laid out (`layouts/maps/scales.py`), the default first.
        row_alignment: default for the multiple to which each expert's rows are padded.
    """

    name: str
    element: str
    block: int = 1
    scale: str | None = None
    power_of_two: bool = False
    global_scale: bool = False
    row_scale: bool = False
    scale_layouts: tuple[str, ...] = ()
    row_alignment: int = 1

    @property
    def bits(self) -> int:
        """Bits of one payload element."""
        return {"bf16": 16, "e4m3": 8, "e2m1": 4}[self.element]

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale factor; 0 when the format has none."""
        return {None: 0, "f32": 4}.get(self.scale, 1)

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
        return lcm(self.block, VECTOR_BYTES * 8 // self.bits)

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


_BYTE_SCALES = ("atom128x4", "linear")
_FLOAT_SCALES = ("transposed", "linear")

BF16 = Format("bf16", "bf16")
FP8 = Format("fp8", "e4m3", 128, "f32", scale_layouts=_FLOAT_SCALES, row_alignment=4)
FP8_POW2 = Format("fp8_pow2", "e4m3", 128, "f32", power_of_two=True, scale_layouts=_FLOAT_SCALES, row_alignment=4)
MXFP8 = Format("mxfp8", "e4m3", 32, "e8m0", scale_layouts=_BYTE_SCALES)
MXFP4 = Format("mxfp4", "e2m1", 32, "e8m0", scale_layouts=_BYTE_SCALES)
NVFP4 = Format("nvfp4", "e2m1", 16, "e4m3", global_scale=True, scale_layouts=_BYTE_SCALES)
NVFP4_ROW = Format("nvfp4_row", "e2m1", 16, "e4m3", row_scale=True, scale_layouts=_BYTE_SCALES)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (BF16, FP8, FP8_POW2, MXFP8, MXFP4, NVFP4, NVFP4_ROW)}


def formats_of(hidden: int, formats: Iterable[str] = FORMATS) -> list[str]:
    """Those of the formats that rows of `hidden` elements fit."""
    fits = []
    for fmt in formats:
        with suppress(ValueError):
            FORMATS[fmt].check_hidden(hidden)
            fits.append(fmt)
    return fits
