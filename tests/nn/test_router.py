"""Routers against the formulas that models publish, token by token in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.nn import Router

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 12, 3, 40
DEEPSEEK_V3 = dict(score="sigmoid", correction=True, renormalize=True, n_group=4, topk_group=2, scale=2.5)
DEEPSEEK_V2 = dict(n_group=4, topk_group=2, scale=16.0)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mixtral": {"renormalize": True},
    "gpt-oss": {"renormalize": True, "bias": True},
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1},
    "llama-4": {"score": "sigmoid"},
}


def router_of(options: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Router:
    torch.manual_seed(3)
    router = Router(HIDDEN, EXPERTS, TOP_K, dtype=dtype, **options)
    with torch.no_grad():
        for vector in (router.bias, router.correction):
            if vector is not None:
                vector.normal_()
    return router


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def published(logits: list[float], correction: list[float], model: str) -> dict[int, float]:
    """{expert: weight} of one token, as each model's own code says it."""
    order = sorted(range(EXPERTS), key=lambda e: -logits[e])
    if model == "qwen2":
        return {e: softmax(logits)[e] for e in order[:TOP_K]}
    if model in ("mixtral", "gpt-oss"):  # softmax of the chosen logits only
        return dict(zip(order, softmax([logits[e] for e in order[:TOP_K]]), strict=False))
    if model == "llama-4":
        return {e: 1 / (1 + math.exp(-logits[e])) for e in order[:TOP_K]}
    groups = 1 if model == "kimi-k2" else 4
    size = EXPERTS // groups
    if model == "deepseek-v2":
        scores = choice = softmax(logits)
        value = [max(choice[g * size : (g + 1) * size]) for g in range(groups)]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        choice = [score + extra for score, extra in zip(scores, correction, strict=True)]
        value = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -value[g])[: max(1, groups // 2)]
    allowed = [e for e in range(EXPERTS) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:TOP_K]
    if model == "deepseek-v2":
        return {e: 16.0 * scores[e] for e in chosen}
    return {e: 2.5 * scores[e] / sum(scores[o] for o in chosen) for e in chosen}


@pytest.mark.parametrize("model", MODELS)
def test_experts_and_weights_are_those_of_the_model(model: str) -> None:
    router, x = router_of(MODELS[model]), tokens()
    ids, weights = router(x)
    bias = 0 if router.bias is None else router.bias.double()
    logits = (x.double() @ router.weight.double().T + bias).tolist()
    correction = [0.0] * EXPERTS if router.correction is None else router.correction.tolist()
    for token in range(TOKENS):
        want = published(logits[token], correction, model)
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert list(got) == list(want)
        assert list(got.values()) == pytest.approx(list(want.values()), rel=1e-5)


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    """It gets no gradient; weights and their gradients are those of the experts that it chose."""
    router, x = router_of(DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1}), tokens()
    before = router(x).topk_ids
    router.correction.zero_()[7] = 100.0
    ids, weights = router(x)
    assert (ids[:, 0] == 7).all() and not torch.equal(ids, before)
    assert weights.sum(1).tolist() == pytest.approx([2.5] * TOKENS)
    assert not router.correction.requires_grad and "correction" in router.state_dict()


def test_experts_of_groups_that_are_left_out_are_never_chosen_also_with_negative_scores() -> None:
    router = router_of(DEEPSEEK_V3)
    router.correction.fill_(-50.0)
    for group in (1, 3):
        router.correction[group * 3 : group * 3 + 3] = -40.0
    ids = router(tokens()).topk_ids
    assert set((ids // 3).flatten().tolist()) == {1, 3}
    assert all(len(set(row)) == TOP_K for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_float32_whatever_the_types_and_autocast(dtype: torch.dtype) -> None:
    router, x = router_of(MODELS["gpt-oss"], dtype=dtype), tokens(dtype)
    wide = router_of(MODELS["gpt-oss"])
    wide.load_state_dict(router.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        narrow = router(x)
    want = wide(x.float())
    assert narrow.router_weights.dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(narrow, want, strict=True))


def test_a_correction_stays_float32_when_the_module_changes_its_type() -> None:
    router = router_of(DEEPSEEK_V3)
    before = router.correction.clone()
    router.bfloat16().half()
    assert router.weight.dtype == torch.float16
    assert router.correction.dtype == torch.float32 and torch.equal(router.correction, before)
    assert router.to_empty(device="cpu").correction.dtype == torch.float32


def test_no_tokens_have_no_experts() -> None:
    ids, weights = router_of(DEEPSEEK_V3)(tokens()[:0])
    assert ids.shape == weights.shape == (0, TOP_K) and ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"score": "relu"}, r"score = 'relu': must be one of softmax, sigmoid"),
        ({"n_group": 5}, r"n_group = 5: must divide num_experts = 12 into groups of at least 1"),
        ({"n_group": 12, "correction": True}, r"n_group = 12: must divide .* groups of at least 2"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group = 5: must be an integer in \[1, n_group = 4\]"),
        ({"n_group": 6}, r"top_k = 3: must be an integer in \[1, 2\], the experts that may be chosen"),
        ({"n_group": 0}, r"n_group = 0: must be a positive integer"),
        ({"scale": 0}, r"scale = 0: must be a positive number"),
        ({"scale": math.nan}, r"scale = nan: must be a positive number"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(map(str, value.items())),
)
def test_options_that_break_a_rule_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EPConfigError, match=said):
        Router(HIDDEN, EXPERTS, TOP_K, **options)


def test_tokens_of_another_width_are_refused() -> None:
    with pytest.raises(EPInputError, match=r"x\.shape = \(2, 8\): must be \[tokens, hidden = 16\]"):
        router_of({})(torch.zeros(2, 8))
