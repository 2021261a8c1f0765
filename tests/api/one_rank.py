"""A group of one rank, on either backend, and inputs for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import EPCommunicator, EPConfig, connect_local
from tests.fake_gpu import CFG

ONE_RANK = replace(CFG, world_size=1, dispatch_format="bf16")


@pytest.fixture(params=["GPU", "CPU"])
def lone_rank(request: pytest.FixtureRequest) -> EPCommunicator:
    """The only rank of ONE_RANK, on either backend; the GPU is that of `tests.fake_gpu`."""
    if request.param == "CPU":
        return connect_local(ONE_RANK, ["cpu"])[0]
    return request.getfixturevalue("make_rank")(ONE_RANK)


def random(*shape: int) -> torch.Tensor:
    """Random bfloat16 on the CPU, whatever device is the default."""
    return torch.randn(shape, device="cpu").bfloat16()


def inputs_of(cfg: EPConfig = ONE_RANK, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and router_weights of one rank; no expert occurs twice in a token."""
    ids = torch.rand(tokens, cfg.num_experts, device="cpu").topk(cfg.top_k).indices
    return random(tokens, cfg.hidden), ids.int(), torch.rand(tokens, cfg.top_k, device="cpu")
