"""Models of transformers with their experts on 1, 2 and 4 ranks, against transformers' own experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from cute_ep.integrations.transformers import attach
from tests.integrations.models import SERVED, build, distance, text, trained

ROUNDING = 2.0**-8
"""Most that rounding to bfloat16 changes a number, and so the norm of a tensor, relatively."""
LAYERS = 2


def check(got: Any, wanted: Any, tolerance: float) -> None:
    """Logits and gradients. A gradient that is small beside the others is compared with their norm: it is what is left
    of larger terms."""
    (logits, gradients), (true_logits, true_gradients) = got, wanted
    assert distance(logits, true_logits) <= tolerance
    assert gradients.keys() == true_gradients.keys()
    scale = max(one.norm().item() for one in true_gradients.values())
    for name, gradient in true_gradients.items():
        assert distance(gradients[name], gradient, 1e-3 * scale) <= tolerance, name


@pytest.mark.parametrize("kind", SERVED)
def test_logits_and_gradients_are_those_of_eager_experts(kind: str) -> None:
    """Within what travel in bfloat16 explains: nearly exactly those of eager experts with the same roundings, and those
    without within the roundings of a layer, which are of tokens, rows, sums of a rank and the gradients of these."""
    model, ids = build(kind), text()
    model.set_experts_implementation("eager")
    eager = trained(model, ids)
    for ranks in (1, 2, 4):
        model.set_experts_implementation(f"rounded on {ranks}")
        rounded = trained(model, ids)
        model.set_experts_implementation("eager")
        with attach(model, devices=["cpu"] * ranks, max_tokens=ids.numel()):
            got = trained(model, ids)
            with torch.no_grad():
                inferred = model(ids).logits
        check(got, rounded, 1e-5)
        check(got, eager, 6 * LAYERS * ROUNDING)
        assert distance(inferred, got[0]) <= 1e-5
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_are_as_near_to_float32_as_their_own_experts(kind: str, dtype: torch.dtype) -> None:
    """Logits against a float32 model with the same weights: sums in float32 are no worse than transformers', up to the
    rounding of tokens that a float16 model has besides."""
    model, ids = build(kind, dtype), text()
    with torch.no_grad():
        own = model(ids).logits
        with attach(model, devices=["cpu"] * 2, max_tokens=ids.numel()):
            got = model(ids).logits
        true = model.float()(ids).logits
    assert got.dtype == own.dtype
    more = LAYERS * ROUNDING if dtype == torch.float16 else 0.0
    assert distance(got, true) <= 1.5 * distance(own, true) + more


@pytest.mark.parametrize("kind", ["mixtral", "jamba", "gpt_oss"])
def test_generate_gives_the_same_tokens(kind: str) -> None:
    """Greedy, also where two tokens come to 4 ranks; with and without sampling's cache of keys."""
    model, ids = build(kind), text(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False}
    model.set_experts_implementation("rounded on 4")
    wanted = model.generate(ids, **options)
    with attach(model, devices=["cpu"] * 4, max_tokens=10):
        assert torch.equal(model.generate(ids, **options), wanted)
        assert torch.equal(model.generate(ids, use_cache=False, **options), wanted)


def test_a_step_of_training_with_checkpointing_is_the_step_without() -> None:
    model, ids = build("mixtral").train(), text()
    with attach(model, devices=["cpu"] * 2, max_tokens=ids.numel()):
        wanted = trained(model, ids)
        newer, older = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, newer if hasattr(model, newer) else older)()
        check(trained(model, ids), wanted, 0.0)


def test_compiled_models_run_behind_graph_breaks() -> None:
    model, ids = build("mixtral"), text()
    with attach(model, devices=["cpu"] * 2, max_tokens=ids.numel()), torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(torch.compile(model, backend="eager")(ids).logits, wanted)


def test_autocast_changes_neither_travel_nor_sums() -> None:
    model, ids = build("mixtral"), text()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(ids).logits
        with attach(model, devices=["cpu"] * 2, max_tokens=ids.numel()):
            assert distance(model(ids).logits, wanted) <= 4 * LAYERS * ROUNDING
