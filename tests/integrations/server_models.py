"""Tiny models with random weights for servers: like Qwen3-MoE and like DeepSeek-V3. Their experts matter.

Rounding never changes which experts a token goes to, so outputs depend continuously on all that is rounded: routers
read channels of the hidden state that no layer writes, and there a token's experts are far apart. Else a few tokens of
a hundred would go to other experts in bfloat16 than in float32, and everything after them would differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, HIDDEN = 256, 512
EXPERTS, TOP_K = 16, 4
LONGEST = 512
"""Tokens of a prompt and its answer."""
GROUPS = 4
"""Of experts, of which a token's best two are chosen from (DeepSeek-V3)."""
SCORE = 0.25
"""The largest score in an embedding, of which other elements have a standard deviation of 0.05."""
MODELS = "qwen3_moe", "deepseek_v3"


def save_model(kind: str, folder: Path) -> None:
    """One of MODELS in bfloat16, the same each time."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 256,
        "moe_intermediate_size": 256, "num_experts_per_tok": TOP_K, "norm_topk_prob": True,
        "max_position_embeddings": LONGEST, "initializer_range": 0.05, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "qwen3_moe":
        own: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **own))
    elif kind == "deepseek_v3":
        # SGLang's attention takes keys of 512 + 64 elements, as DeepSeek-V3 has, or 256 + 32
        own = {
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_routed_experts": EXPERTS,
            "n_shared_experts": 1, "n_group": GROUPS, "topk_group": 2, "routed_scaling_factor": 1.5, "q_lora_rank": 128,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,  # unset by default
            "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        }  # fmt: skip
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **own))
    else:
        raise ValueError(f"kind = {kind!r}: must be one of {MODELS}")
    with torch.no_grad():
        separate(model)
    model.bfloat16().save_pretrained(folder)


def levels() -> Tensor:
    """[VOCABULARY, EXPERTS] what tokens' experts score, from 1 to -1 in equal steps. The sums of groups' best two are
    apart too."""
    of_group = torch.rand(VOCABULARY, GROUPS).argsort(1)[:, :, None]
    in_group = torch.rand(VOCABULARY, GROUPS, EXPERTS // GROUPS).argsort(2)
    return 1 - (of_group + GROUPS * in_group).view(VOCABULARY, EXPERTS) * (2 / (EXPERTS - 1))


def separate(model: Any) -> None:
    """Have a model's routers read tokens' scores in the first channels, which embeddings have and no layer writes."""
    embedding = model.model.embed_tokens.weight
    embedding[:, :EXPERTS] = SCORE * levels()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:EXPERTS] = 0
        mlp = layer.mlp
        if not hasattr(mlp, "gate"):
            mlp.down_proj.weight[:EXPERTS] = 0
            continue
        mlp.experts.down_proj[:, :EXPERTS] = 0
        if hasattr(mlp, "shared_experts"):
            mlp.shared_experts.down_proj.weight[:EXPERTS] = 0
        mlp.gate.weight.zero_()
        mlp.gate.weight[:, :EXPERTS] = torch.eye(EXPERTS)
