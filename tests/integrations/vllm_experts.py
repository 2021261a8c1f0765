"""Experts in vLLM's kernel: our own, whose outputs are exact, and vLLM's Triton experts. Imports vLLM itself."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from tests.integrations.vllm_parts import HIDDEN, apply_blocks, apply_experts

INNER = 64
if not hasattr(torch.Stream, "is_capturing"):  # vLLM's version of torch has it
    fused_batched_moe._is_capturing_or_compiling = torch.cuda.is_current_stream_capturing


class Experts(mk.FusedMoEExpertsModular):
    """Weights and reduces itself, as most of vLLM's experts do."""

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
    _supports_quant_scheme = _supports_parallel_config = _supports_no_act_and_mul = staticmethod(lambda *_: True)
    _supports_activation = _supports_current_device = staticmethod(lambda *_: True)

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *_: Any) -> tuple:
        return (M, K), (M, N), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
        global_num_experts: int, expert_map: Any, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        assert topk_ids.shape == (len(hidden_states), 1) and topk_ids.min() >= 0
        rows = apply_experts(hidden_states, topk_ids, expert_map >= 0)
        output.copy_(rows * topk_weights.bfloat16())


class Batched(Experts):
    """Leaves weights and sums to finalize, as vLLM's batched experts do."""

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.BatchedExperts)

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, experts: int, local: int, *_: Any) -> tuple:
        assert self.max_num_tokens is not None and self.num_dispatchers is not None
        slots = self.max_num_tokens * self.num_dispatchers
        return (local, slots, K), (local, slots, N), (local, slots, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def apply(self, output: Any, hidden_states: Any, *_: Any, expert_map: Any, **named: Any) -> None:
        assert hidden_states.shape == output.shape
        first = int((expert_map >= 0).int().argmax())
        output.copy_(apply_blocks(hidden_states, named["expert_tokens_meta"].expert_num_tokens, first))


class Triton(fused_batched_moe.BatchedTritonExperts):
    """vLLM's, with SwiGLU in torch: vLLM's is `torch.ops._C.masked_moe_activation`, all that these experts would need
    of its compiled operations."""

    def activation(self, activation: Any, output: Tensor, input: Tensor, **_: Any) -> None:
        gate, up = input.float().chunk(2, dim=-1)
        output.copy_(silu(gate) * up)  # behind the last row of a block this is of anything, and nobody reads it


def expert_weights(experts: int) -> tuple[Tensor, Tensor]:
    """[E, 2 * INNER, HIDDEN] and [E, HIDDEN, INNER] bfloat16, the same on all ranks."""
    random = torch.Generator().manual_seed(1)
    w1 = torch.randn(experts, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
    w2 = torch.randn(experts, HIDDEN, INNER, generator=random) / INNER**0.5
    return w1.bfloat16(), w2.bfloat16()


def swiglu_loop(x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """A layer of SwiGLU experts in float32, and how far one may be from it that rounds to bfloat16 what `Triton` does.

    Each rounding moves a number by at most u = 2^-8 of it: both halves of the first matmul, of which SiLU has a slope
    of at most 1.1, their product, the second matmul, each rank's sum, the sum. Matmuls add in float32: n products may
    be n * 2^-23 of the sum of their magnitudes off. Products of errors are within another tenth.

    Args:
        x: [T, HIDDEN] bfloat16.
        weights, ids: [T, K]; -1 masks an entry.

    Returns:
        [T, HIDDEN] float32 outputs and bounds.
    """
    unit, add = 2.0**-8, 2.0**-23
    want, bound = torch.zeros(x.shape), torch.zeros(x.shape)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert, weight, row = int(ids[token, slot]), weights[token, slot], x[token].float()
        first, second = w1[expert].float(), w2[expert].float()
        gate, up = (first @ row).chunk(2)
        off_gate, off_up = (unit * (first @ row).abs() + HIDDEN * add * (first.abs() @ row.abs())).chunk(2)
        inner = silu(gate) * up
        off = 1.1 * off_gate * up.abs() + silu(gate).abs() * off_up + unit * inner.abs()
        made = second @ inner
        want[token] += weight * made
        bound[token] += weight * (second.abs() @ (off + INNER * add * inner.abs()) + 2 * unit * made.abs())
    return want, 1.1 * (bound + unit * want.abs())
