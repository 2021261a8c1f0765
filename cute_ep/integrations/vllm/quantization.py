"""Which rows travel quantised, and vLLM's quantisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from cute_ep.layouts.maps.formats import FP8


def travels_as_fp8(quant: FusedMoEQuantConfig) -> bool:
    """Whether the experts take rows in cute_ep's format fp8, scale factors row-major."""
    blocks = quant.block_shape
    square = blocks is not None and list(blocks) == [FP8.block, FP8.block]
    return square and quant.quant_dtype == torch.float8_e4m3fn and not quant.is_scale_transposed


def quantize(rows: Tensor, quant: FusedMoEQuantConfig, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows and scale factors as the experts take them, by vLLM's own kernels."""
    return moe_kernel_quantize_input(
        rows,
        scale,
        quant_dtype=quant.quant_dtype,
        per_act_token_quant=quant.per_act_token_quant,
        block_shape=quant.block_shape,
        is_scale_swizzled=quant.is_scale_swizzled,
        is_scale_transposed=quant.is_scale_transposed,
        mx_alignment=quant.mx_alignment,
    )


def one_scale_for_all(quant: FusedMoEQuantConfig) -> bool:
    """Whether all rows that are quantised together get one scale factor, computed from them."""
    return quant.a1_scale is None and not quant.per_act_token_quant and quant.block_shape is None
