"""Dispatch and combine around vLLM's batched experts: each local expert has a block of rows, which the receiving kernel
fills. Shapes depend on no routing, so no host waits and CUDA graphs capture every call. Combine applies the router's
weights, where the experts are, or in mode `exact` at a token's own rank."""

from __future__ import annotations

from functools import partial

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from cute_ep import Dispatched, EPConfig, EPConfigError
from cute_ep.api.types import FormatName
from cute_ep.integrations.common.blocks import PACKED_COLUMNS, Blocks, block_config
from cute_ep.integrations.common.checks import demand
from cute_ep.integrations.vllm.layer import CuteEPLayer, PrepareInput, Sending, quantize
from cute_ep.integrations.vllm.manager import NAMES
from cute_ep.layouts.maps.formats import BF16

SLOTS = 4
"""Blocks with packed scale factors have a multiple of so many rows: DeepGEMM reads words at strides of 16 bytes."""


class CuteEPBatched(CuteEPLayer):
    """A block of S = R * max_tokens rows for each of L local experts.

    Rows for experts that take blocks of 128 in FP8 are quantised while they are sent; where experts read exponents
    (UE8M0) scale factors are powers of two. All other rows travel in bfloat16, and vLLM quantises them, except to
    NVFP4. A format that it does not quantise in blocks is refused.

    `prepare` returns rows [L, S, hidden], by source rank, then token; behind the last row a block holds anything. Their
    scale factors: None, of blocks of 128 [L, S, hidden / 128] float32 or [L, S, hidden / 512] int32 with four exponents
    each, neighbours along S, of other formats [L, n, m] as vLLM makes them. [L] int32 rows of each expert. None, None:
    experts read no ids and weights.
    """

    _made = staticmethod(partial(block_config, dispatch_format="bf16"))
    _reducer = TopKWeightAndReduceDelegate
    _packed = False

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """`max_tokens`: experts have memory for blocks of R times as many rows."""
        return self._cfg.max_tokens_per_rank

    def _config_for(self, fused_experts: mk.FusedMoEExperts, fp8: bool) -> EPConfig:
        quant, cfg = fused_experts.quant_config, self._cfg
        if not fp8:
            good = fused_experts.expects_unquantized_inputs or quant.quant_dtype == "nvfp4"
            good = good or not isinstance(quant.quant_dtype, str)
            demand(good, "quant_dtype = {!r}: has no batched format; use --all2all-backend cute_ep", quant.quant_dtype)
            return cfg
        ranks, tokens = cfg.world_size, cfg.max_tokens_per_rank
        self._packed = fused_experts.supports_packed_ue8m0_act_scales()
        if self._packed:
            rule, columns = "{} = {}: must be a multiple of {} on this GPU", PACKED_COLUMNS
            demand(cfg.hidden % columns == 0, rule, "hidden", cfg.hidden, columns)
            made, slots = f"{ranks} ranks x {tokens} tokens", ranks * tokens
            rule += "; change --max-num-batched-tokens"
            demand(slots % SLOTS == 0, rule, made, slots, SLOTS)
        kind: FormatName = "fp8_pow2" if self._packed else "fp8"
        sizes = cfg.hidden, cfg.num_experts, cfg.top_k, tokens, ranks
        options = {"timeout_s": cfg.timeout_s, "ranks_per_node": cfg.ranks_per_node}
        return block_config(NAMES, sizes, kind, error=EPConfigError, **options)

    def _sending(self, given: PrepareInput, rows: Tensor, weights: Tensor, tokens: int) -> Sending:
        cfg, quant = self._cfg, given.quant_config
        assert cfg.block_rows is not None
        blocks = Blocks(self._connected(), cfg.block_rows, packed=self._packed)
        left = given.defer_input_quant or quant.quant_dtype in (None, "nvfp4")  # experts quantise to NVFP4 themselves
        as_it_is = cfg.format is not BF16 or left

        def result(batch: Dispatched) -> mk.PrepareResultType:
            blocks.received()
            made = (blocks.rows, blocks.scales) if as_it_is else _quantized(blocks, quant)
            return *made, mk.ExpertTokensMetadata(batch.row_counts, None), None, None

        return (rows, given.topk_ids.contiguous(), weights), None, blocks.out, result


def _quantized(blocks: Blocks, quant: FusedMoEQuantConfig) -> tuple[Tensor, Tensor | None]:
    """Blocks of bfloat16 as the experts take them: [L, S, hidden], and [L, n, m] scale factors."""
    experts, slots, hidden = blocks.rows.shape
    if quant.a1_scale is None and not quant.per_act_token_quant and quant.block_shape is None:
        # one scale factor for all, in which what is behind the last row must not take part
        place = torch.arange(slots, device=blocks.rows.device)
        blocks.rows.masked_fill_((place >= blocks.out.row_counts[:, None])[:, :, None], 0)
    rows, scales = quantize(blocks.rows.view(-1, hidden), quant, quant.a1_scale)
    if scales is not None and scales.dim() < 3:
        one = scales.numel() == 1
        scales = scales.reshape(1, 1, 1).repeat(experts, 1, 1) if one else scales.view(experts, -1, scales.shape[-1])
    return rows.view(experts, slots, -1), scales
