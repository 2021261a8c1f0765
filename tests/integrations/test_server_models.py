"""What comparisons of servers rest on: how far rounding moves what the tiny models say."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers 5.17 or newer: pip install '.[transformers]'")

from tests.integrations.server_models import EXPERTS, GROUPS, MODELS, VOCABULARY, levels, save_model
from tests.integrations.server_plan import BOUND


def test_scores_of_a_token_are_far_apart() -> None:
    """Those of groups, sums of their best two, too; every expert is among the best four of some tokens."""
    scores = levels()
    step = 2 / (EXPERTS - 1)
    assert (scores.sort(1).values.diff(dim=1) - step).abs().max() < 1e-6
    sums = scores.view(VOCABULARY, GROUPS, -1).topk(2).values.sum(2)
    assert sums.sort(1).values.diff(dim=1).min() > 1.9 * step
    assert scores.topk(4).indices.flatten().bincount(minlength=EXPERTS).min() > VOCABULARY / 8


@pytest.mark.parametrize("kind", MODELS)
def test_rounding_moves_log_probabilities_by_less_than_half_the_bound(kind: str, tmp_path: Path) -> None:
    """Of the likeliest eight tokens, in bfloat16 against float32; and experts in the wrong order move them further."""
    from transformers import AutoModelForCausalLM

    save_model(kind, tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    prompts = torch.randint(2, VOCABULARY, (16, 120), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = exact(prompts).logits.log_softmax(2)
        likely = want.topk(8).indices
        off = (rounded(prompts).logits.float().log_softmax(2) - want).gather(2, likely).abs()
        assert 0 < off.max() < BOUND / 2
        for layer in exact.model.layers:
            if hasattr(layer.mlp, "experts"):
                for weights in layer.mlp.experts.parameters():
                    weights.copy_(weights.roll(1, 0))
        assert (exact(prompts).logits.log_softmax(2) - want).gather(2, likely).abs().median() > 2 * BOUND
