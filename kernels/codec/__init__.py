"""Codecs: the device code of every token format, found by the format's name."""

from __future__ import annotations

from cute_ep.kernels.codec.base import Codec
from cute_ep.kernels.codec.bf16 import Bf16Codec
from cute_ep.kernels.codec.nvfp4 import Nvfp4Codec
from cute_ep.layouts.formats import BF16, NVFP4, Format


def codec_for(fmt: Format, arch: str) -> Codec:
    """The codec of `fmt` for a compilation target such as "sm_90a"."""
    hardware_fp4 = int(arch.removeprefix("sm_").rstrip("af")) >= 100
    codecs = {BF16: lambda: Bf16Codec(), NVFP4: lambda: Nvfp4Codec(hardware_fp4)}
    return codecs[fmt]()
