"""The ops over several nodes: on CPUs, and over the communicators of GPUs with emulated kernels between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from tests.reference.ranks import at_once
from tests.runtime.emulated_nccl import over_nccl

from .layer import check, given, gradients
from .ranks import CFG, on_all_ranks

NODES = replace(CFG, world_size=4, num_experts=12, ranks_per_node=2)
ALONE = replace(CFG, world_size=2, num_experts=6, ranks_per_node=1)
TOKENS = {NODES: (9, 0, 7, 2), ALONE: (9, 4)}
EACH = pytest.mark.parametrize("cfg", [NODES, ALONE], ids=["2 x 2", "2 x 1"])


def on_emulated_nodes(cfg: EPConfig, program: Any) -> list:
    """What program(rank, name of its communicator) returns on each rank."""
    with over_nccl(cfg) as (made, _):
        names = [cute_ep.ops.register(ep) for ep in made]
        results = at_once(range(len(made)), lambda rank: program(rank, names[rank]))
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated"])
@pytest.mark.parametrize("emulated", [False, True], ids=["CPUs", "emulated"])
@EACH
def test_gradients_are_those_of_a_dense_layer(cfg: EPConfig, emulated: bool, routing: str, mode: CombineMode) -> None:
    """Tokens', router weights' and experts'."""
    one = given(cfg, TOKENS[cfg], routing)

    def program(rank: int, comm: str) -> list[torch.Tensor]:
        return gradients(one, rank, comm, mode)

    made = on_emulated_nodes(cfg, program) if emulated else on_all_ranks(cfg, program)[0]
    for rank, parts in enumerate(made):
        check(one, rank, parts)
