"""Codecs: the device code of every token format, found by its number formats."""

from __future__ import annotations

from typing import Any

from cute_ep.kernels.codec.base import Codec
from cute_ep.kernels.codec.bf16 import Bf16Codec
from cute_ep.kernels.codec.fp8 import Fp8Codec
from cute_ep.kernels.codec.mx import Mxfp4Codec, Mxfp6Codec, Mxfp8Codec
from cute_ep.kernels.codec.nvfp4 import Nvfp4Codec
from cute_ep.layouts.maps.formats import BFLOAT16, E2M1, E2M3, E3M2, E4M3, E8M0, FLOAT32, Element, Format

_CODECS: dict[tuple[Element, Element | None], Any] = {
    (BFLOAT16, None): Bf16Codec,
    (E4M3, FLOAT32): Fp8Codec,
    (E4M3, E8M0): Mxfp8Codec,
    (E2M3, E8M0): Mxfp6Codec,
    (E3M2, E8M0): Mxfp6Codec,
    (E2M1, E8M0): Mxfp4Codec,
    (E2M1, E4M3): Nvfp4Codec,
}
"""By the number formats of elements and scale factors."""


def codec_for(fmt: Format, arch: str) -> Codec:
    """The codec of `fmt` for a compilation target such as "sm_90a": from sm_100 on with the e2m1 instruction."""
    hardware_fp4 = int(arch.removeprefix("sm_").rstrip("af")) >= 100
    return _CODECS[fmt.element, fmt.scale](fmt, hardware_fp4)
