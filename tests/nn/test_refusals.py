"""What is wrong with a layer or its arguments is said before anything is launched: name, value, rule."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep import connect_local
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.nn import GatedMLP, MoELayer, Router, connect
from tests.ops.ranks import counted

from .layers import INNER, config

CFG = config(1)


@pytest.fixture
def layer() -> MoELayer:
    (ep,) = connect_local(CFG, ["cpu"])
    made = MoELayer(CFG, INNER)
    made.attach(ep)
    made.kept, made.calls = ep, counted(ep)
    return made


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([1.0], "x = list: must be a torch.Tensor"),
        (zeros(32), "x.shape = (32,): must be [..., hidden = 32]"),
        (zeros(2, 31), "x.shape = (2, 31): must be [..., hidden = 32]"),
        (zeros(2, 32, dtype=torch.float64), "x.dtype = torch.float64: must be one of torch.bfloat16, torch.float16"),
        (zeros(2, 32, dtype=torch.int32), "x.dtype = torch.int32: must be one of"),
        (zeros(2, 32, device="meta"), "x.device = meta: must be cpu, where the layer's parameters are"),
        (zeros(2, 5, 32), "x.shape = (2, 5, 32): 10 tokens must not exceed max_tokens_per_rank = 9; split the batch"),
    ],
    ids=["no tensor", "one token", "width", "float64", "integers", "device", "too many tokens"],
)
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_tokens(layer: MoELayer, x: Any, said: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients), pytest.raises(EPInputError, match=re.escape(said)):
        layer(x)
    assert layer.calls == []
    assert layer(zeros(9, 32)).shape == (9, 32)


@pytest.mark.parametrize(
    ("x", "ids", "weights", "said"),
    [
        (zeros(1, 2, 32), zeros(2, 3), zeros(2, 3), "x.shape = (1, 2, 32): must be [tokens, hidden]"),
        (zeros(2, 32), zeros(2, 2).int(), zeros(2, 3), "topk_ids.shape = (2, 2): must be (2, 3), [tokens, top_k]"),
        (zeros(2, 32), zeros(2, 3).int(), zeros(1, 3), "router_weights.shape = (1, 3): must be (2, 3)"),
        (zeros(2, 32), zeros(2, 3), zeros(2, 3), "topk_ids.dtype = torch.bfloat16: must be torch.int32 or torch.int64"),
        (zeros(2, 32), [[0] * 3] * 2, zeros(2, 3), "topk_ids = list: must be a torch.Tensor"),
        (zeros(2, 32), zeros(2, 3).int(), None, "weights = NoneType: must be a torch.Tensor, ones for a plain sum"),
    ],
    ids=["flat", "ids", "weights", "type of ids", "list", "no weights"],
)
def test_routings(layer: MoELayer, x: torch.Tensor, ids: Any, weights: Any, said: str) -> None:
    with torch.no_grad(), pytest.raises(EPInputError, match=re.escape(said)):
        layer.experts(x, ids, weights)
    assert layer.calls in ([], ["dispatch"])  # the communicator refuses, and nothing is sent
    assert layer.kept._dispatches.sent == 0


def test_frames(layer: MoELayer) -> None:
    """Of layers and of their experts; the communicator refuses them, and nothing is sent."""
    routing = zeros(2, 3).int(), zeros(2, 3)
    for call in (lambda: layer(zeros(2, 32), frame=1), lambda: layer.experts(zeros(2, 32), *routing, frame=1)):
        with torch.no_grad(), pytest.raises(EPInputError, match=r"^frame = 1: must be an integer from"):
            call()
    assert layer.kept._dispatches.sent == 0


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_more_rows_than_the_capacity_are_told_by_synchronize(layer: MoELayer, gradients: bool) -> None:
    layer.capacity = 4
    with torch.set_grad_enabled(gradients):
        assert layer(zeros(9, 32) + 1).isnan().all()
    with pytest.raises(EPInputError, match="out holds 4 rows, but those that arrived take 27"):
        layer.communicator.synchronize()


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        (
            {"dispatch_format": "nvfp4", "scale_layout": "atom128x4"},
            {},
            "scale_layout = 'atom128x4': must be linear or None for a layer",
        ),
        ({}, {"input_scale": 2.0}, "input_scale = 2.0: must be None, format bf16 has no global scale"),
        (
            {"dispatch_format": "nvfp4"},
            {"input_scale": 0.0},
            "input_scale = 0.0: must be a number in [2**-100, 2**100]",
        ),
        ({"fused_shared_expert": True}, {}, "fused_shared_expert = True: must be False for a layer"),
        ({"skip_a2a": True}, {}, "skip_a2a = True: must be False for a layer"),
        ({"row_order": "rank_major"}, {}, "row_order = 'rank_major': must be 'expert_major' for a layer"),
        ({"block_rows": 9}, {}, "block_rows = 9: must be None for a layer"),
        ({"zero_padding": False}, {}, "zero_padding = False: must be True for a layer with gradients"),
        ({}, {"inner": 12}, "inner = 12: must be a positive multiple of 8"),
        ({}, {"inner": 0}, "inner = 0: must be a positive multiple of 8"),
        ({}, {"gate": "gelu"}, "gate = 'gelu': must be one of swiglu, swiglu_clamped, geglu_tanh, relu2, or a"),
        ({}, {"mode": "unweighted"}, "mode = 'unweighted': must be one of partial, exact"),
        ({}, {"overlap_shared": 1}, "overlap_shared = 1: must be True or False"),
        ({}, {"capacity": -1}, "capacity = -1: must be an integer in [0, 1073741824]"),
        ({}, {"router": Router(32, 6, 2)}, "router.top_k = 2: must be cfg.top_k = 3"),
        ({}, {"router": Router(16, 6, 3)}, "router.hidden = 16: must be cfg.hidden = 32"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_configurations(changes: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(EPConfigError, match=re.escape(said)):
        MoELayer(replace(CFG, **changes), **{"inner": INNER, **options})


def test_sizes_of_a_shared_expert() -> None:
    with pytest.raises(EPConfigError, match="inner = 4: must be a positive multiple of 8"):
        GatedMLP(32, 4)


def test_what_is_no_configuration() -> None:
    with pytest.raises(EPConfigError, match="cfg = dict: must be an EPConfig"):
        MoELayer({"hidden": 32}, INNER)  # type: ignore[arg-type]


def test_modules_without_a_layer() -> None:
    with pytest.raises(EPConfigError, match="module = Linear: must be or contain a MoELayer"):
        connect(torch.nn.Linear(1, 1))
