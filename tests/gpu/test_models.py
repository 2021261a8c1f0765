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
