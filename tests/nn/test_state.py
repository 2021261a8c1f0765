"""State dicts: what they hold, and a rank's part of one with all experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.nn import GatedMLP, MoELayer, Router, expert_parameters, shard_state_dict
from tests.project.test_readme import DOCS

from .layers import INNER, config

WORLD = 3
CFG = config(WORLD)
SHAPES = {
    "gate_up": (2, 2 * INNER, 32),
    "down": (2, 32, INNER),
    "gate_up_bias": (2, 2 * INNER),
    "down_bias": (2, 32),
    "router.weight": (6, 32),
    "router.bias": (6,),
    "router.correction": (6,),
    "shared.gate_up": (2 * INNER, 32),
    "shared.down": (32, INNER),
}


def full_layer(world: int = WORLD) -> MoELayer:
    router = Router(32, 6, 3, bias=True, correction=True)
    return MoELayer(config(world), INNER, bias=True, router=router, shared=GatedMLP(32, INNER))


def test_names_and_shapes() -> None:
    assert {name: tuple(value.shape) for name, value in full_layer().state_dict().items()} == SHAPES
    assert set(MoELayer(CFG, INNER, gate="relu2").state_dict()) == {"gate_up", "down", "router.weight"}
    assert MoELayer(CFG, INNER, gate="relu2").gate_up.shape == (2, INNER, 32)


def test_the_page_names_all_of_them() -> None:
    page = (DOCS / "layer.md").read_text()
    assert all(f"`{name}`" in page for name in SHAPES)


@pytest.mark.parametrize("path", ["", "blocks.1.mlp"], ids=["layer", "model"])
def test_each_rank_gets_its_experts_of_a_whole_checkpoint(path: str) -> None:
    def model(world: int) -> torch.nn.Module:
        layer = full_layer(world)
        if not path:
            return layer
        block = torch.nn.ModuleDict({"mlp": layer, "norm": torch.nn.LayerNorm(32)})
        return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(6, 6), block])})

    whole = model(1).state_dict()
    parts = []
    for rank in range(WORLD):
        own = model(WORLD)
        own.load_state_dict(shard_state_dict(own, whole, rank))
        parts.append(own.state_dict())
    prefix = f"{path}." if path else ""
    for name, value in whole.items():
        experts = name.removeprefix(prefix) in ("gate_up", "down", "gate_up_bias", "down_bias")
        got = torch.cat([part[name] for part in parts]) if experts else parts[1][name]
        assert torch.equal(got, value), name


def checkpointed(world: int) -> torch.nn.Module:
    """Parameters have shorter names than the paths of their modules."""
    return torch.nn.Sequential(checkpoint_wrapper(full_layer(world)))


def used_twice(world: int) -> torch.nn.Module:
    """Parameters have two names."""
    layer = full_layer(world)
    return torch.nn.ModuleDict({"first": layer, "second": layer})


@pytest.mark.parametrize("model", [checkpointed, used_twice])
def test_parts_fit_modules_with_other_names(model: Callable[[int], torch.nn.Module]) -> None:
    whole, own = model(1).state_dict(), model(WORLD)
    own.load_state_dict(shard_state_dict(own, whole, 2))
    for name, value in own.state_dict().items():
        assert torch.equal(value, whole[name][-len(value) :]), name


def test_parts_are_views_and_other_names_stay_as_they_are() -> None:
    layer = full_layer()
    whole = full_layer(1).state_dict() | {"more": torch.ones(1)}
    del whole["down"]
    part = shard_state_dict(layer, whole, 1)
    assert list(part) == list(whole) and part["more"] is whole["more"]
    assert part["gate_up"].data_ptr() == whole["gate_up"][2].data_ptr()


def test_a_part_is_not_taken_for_the_whole() -> None:
    layer = full_layer()
    said = "state['gate_up'].shape = (2, 32, 32): must begin with num_experts = 6, all experts"
    with pytest.raises(EPInputError, match=re.escape(said)):
        shard_state_dict(layer, layer.state_dict(), 0)


def test_a_module_that_hides_its_parameters_is_refused() -> None:
    """As FSDP1 does, whose state dict would come back whole."""

    class Copying(torch.nn.Sequential):
        def state_dict(self, *words: Any, **options: Any) -> Any:
            return {name: value.clone() for name, value in super().state_dict(*words, **options).items()}

    whole = Copying(full_layer(1)).state_dict()
    with pytest.raises(EPConfigError, match=r"module = Copying: its state_dict\(\) must have the experts' parameters"):
        shard_state_dict(Copying(full_layer()), whole, 0)


@pytest.mark.parametrize("rank", [-1, 3, "0"])
def test_ranks_that_do_not_exist(rank: int) -> None:
    with pytest.raises(EPInputError, match=rf"rank = {rank!r}: must be an integer in \[0, 3\)"):
        shard_state_dict(full_layer(), full_layer(1).state_dict(), rank)


def test_modules_without_a_layer() -> None:
    with pytest.raises(EPConfigError, match="module = Linear: must be or contain a MoELayer"):
        shard_state_dict(torch.nn.Linear(1, 1), {}, 0)


def test_parameters_of_experts_are_told_from_replicated_ones() -> None:
    model = torch.nn.Sequential(full_layer(), torch.nn.Linear(32, 32), MoELayer(CFG, INNER))
    own = {id(one) for one in expert_parameters(model)}
    names = [name for name, one in model.named_parameters() if id(one) in own]
    assert names == ["0.gate_up", "0.down", "0.gate_up_bias", "0.down_bias", "2.gate_up", "2.down"]
