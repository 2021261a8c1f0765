"""Tiny models of transformers with random weights, made from configurations, and what transport in bfloat16 does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

EXPERTS = 6
"""No multiple of 4 ranks, so that the last rank has none."""
COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    moe_num_experts=EXPERTS,
    num_experts_per_tok=2,
    top_k_experts=2,
    moe_topk=2,
    moe_k=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=0,
    max_position_embeddings=64,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
"""What configurations call the same things; each takes what it knows."""
ATTENTION = ["full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "aria_text": {},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4},
    "deepseek_v3": {"head_dim": 8, "num_key_value_heads": 4},
    "deepseek_v4": {},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "layer_types": ATTENTION,
    },
    "glm4_moe": {},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoe": {},
    "hunyuan_v1_moe": {},
    "inkling2_text": {},
    "jamba": {
        "expert_layer_offset": 0,
        "expert_layer_period": 1,
        "attn_layer_offset": 0,
        "attn_layer_period": 1,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"num_dense_layers": 0, "layer_types": ATTENTION},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": {
        "layers_block_type": ["moe", "attention"],
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""By model type, with what only this one calls so. Experts have other gates in deepseek_v4, gemma4_text, inkling2_text;
biases and interleaved, transposed weights in gpt_oss; transposed ones in aria_text; no gate in nemotron_h."""


def is_served(kind: str) -> bool:
    """Whether the installed transformers has a model type, and experts in it that its experts interface calls."""
    if kind not in CONFIG_MAPPING:
        return False
    name = model_type_to_module_name(kind)
    source = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    return "@use_experts_implementation" in source.read_text()


SERVED = [kind for kind in MODELS if is_served(kind)]
"""Those of MODELS that the installed transformers serves."""

SEEDS = {"olmoe": 0, "qwen3_next": 0}
"""Where the usual one gives weights with which a rounding of the first layer changes an expert of the second."""


def build(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal language model of a type in MODELS, the same each time. Its experts' weights are large, so that mistakes
    in them show in the logits."""
    config = AutoConfig.for_model(kind, **COMMON | MODELS[kind] | changes)
    torch.manual_seed(SEEDS.get(kind, 1))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.mul_(5)
    return model.to(dtype)


def text(batch: int = 2, length: int = 9) -> Tensor:
    """[batch, length] token ids, the same each time."""
    return torch.randint(3, COMMON["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(2))


def trained(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits, gradient of every parameter that has one) of a step."""
    model.zero_grad()
    logits = model(ids).logits
    logits.float().square().mean().backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return logits.detach(), gradients


def distance(one: Tensor, other: Tensor, scale: float = 0.0) -> float:
    """Norm of the difference, relative to the second's norm or to `scale` if that is larger."""
    return ((one.double() - other.double()).norm() / max(other.double().norm().item(), scale, 1e-30)).item()


class _Round(torch.autograd.Function):
    """To bfloat16 what goes forward, or the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.rounds = not forward
        return x.bfloat16().to(x.dtype) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.bfloat16().to(grad.dtype) if ctx.rounds else grad, None


def rounded(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, ranks: int) -> Tensor:
    """The module's own experts as ranks compute them in partial mode, in one process: tokens, experts' outputs, each
    rank's sums of these, and the gradients of all are rounded to bfloat16, and sums are made in float32. Two slots a
    token, whose sums do not depend on the order."""
    tokens, slots = ids.shape
    assert slots == 2
    eager: Any = type(module).forward.__wrapped__
    of_ranks = torch.stack([_Round.apply(hidden, False) for _ in range(ranks)])  # each sums gradients of its slots
    server = ids // -(-module.num_experts // ranks)
    each = of_ranks[server, torch.arange(tokens, device=ids.device)[:, None]].flatten(0, 1)
    rows = eager(module, each.bfloat16().to(hidden.dtype), ids.reshape(-1, 1), weights.new_ones(tokens * slots, 1))
    rows, wide = rows.bfloat16().float().view(tokens, slots, -1), weights.float()
    products, out = rows * wide.detach()[..., None], torch.zeros_like(rows[:, 0])
    for rank in range(ranks):
        out = out + _Round.apply((products * (server == rank)[..., None]).sum(1), True)
    through_weights = (rows.detach() * (wide - wide.detach())[..., None]).sum(1)  # zeros, with the weights' gradient
    return (_Round.apply(out, False) + through_weights).to(hidden.dtype)


for ranks in range(1, 9):
    ALL_EXPERTS_FUNCTIONS.register(f"rounded on {ranks}", partial(rounded, ranks=ranks))
