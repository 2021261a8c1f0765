"""Models of transformers with their experts on ranks that share a GPU and on several GPUs; `tests/integrations` has
them on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers 5.17 or newer: pip install '.[transformers]'")

from cute_ep.integrations.transformers import attach
from tests.integrations.models import SERVED, build, text, trained
from tests.integrations.test_models import check

GENERATING = ("mixtral", "gpt_oss", "deepseek_v3", "nemotron_h")


@pytest.mark.parametrize("kind", SERVED)
def test_logits_gradients_and_tokens_are_those_of_experts_in_place(devices: list[str], kind: str) -> None:
    """Of experts with the same roundings. Ranks that share a GPU are one, two and four."""
    model, ids = build(kind).to(devices[0]), text().to(devices[0])
    several = len(set(devices)) > 1
    for ranks in (len(devices),) if several else (1, 2, 4):
        model.set_experts_implementation(f"rounded on {ranks}")
        want = trained(model, ids)
        said = model.generate(ids, max_new_tokens=4, do_sample=False) if kind in GENERATING else None
        model.set_experts_implementation("eager")
        with attach(model, devices=devices[:ranks], max_tokens=ids.numel()):
            check(trained(model, ids), want, 1e-4)
            if said is not None:
                assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), said)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_compiled_models_train_as_eager_ones(devices: list[str], kind: str) -> None:
    """By inductor, whose graphs break at the experts; it rounds what it fuses less often."""
    torch._dynamo.reset()
    model, ids = build(kind).to(devices[0]), text().to(devices[0])
    with attach(model, devices=devices[:2], max_tokens=ids.numel()):
        want = trained(model, ids)
        step = torch.compile(model)
        for rows in (ids, ids[:, :1], ids):
            trained(step, rows)
        logits, gradients = trained(step, ids)
    check((logits, {name.removeprefix("_orig_mod."): one for name, one in gradients.items()}), want, 2.0**-5)
