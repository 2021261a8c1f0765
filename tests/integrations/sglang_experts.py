"""Experts for SGLang's processes on machines without a GPU, as another plugin of SGLang: torch computes them from the
rows of cute_ep's dispatcher, where SGLang has only DeepGEMM. All else is SGLang's."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

RUNNER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core"


def run_experts(layer: Any, dispatch_output: Any) -> Any:
    """In the place of SGLang's method of a layer: combine's input, from bfloat16 rows; rows of nobody become NaN."""
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput

    rows, alignment = dispatch_output.hidden_states, dispatch_output.expert_alignment
    out, begin = torch.full_like(rows, float("nan")), 0
    for number, end in enumerate(dispatch_output.psum_num_recv_tokens_per_expert.tolist()):
        gate, up = (rows[begin:end] @ layer.w13_weight[number].T).float().chunk(2, dim=1)
        inner = (silu(gate) * up).bfloat16()
        out[begin:end] = inner @ layer.w2_weight[number].T
        begin = -(-end // alignment) * alignment
    return DeepEPv2CombineInput(out * dispatch_output.topk_weights[:, None].to(out.dtype), None)


def plugin() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # batches that are padded for other ranks' sake ask for it
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    HookRegistry.register(RUNNER, run_experts, HookType.REPLACE)
