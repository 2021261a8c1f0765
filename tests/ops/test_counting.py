"""The op that counts rows: made where a mode sees it, and kept by selective checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cute_ep.ops.counting import OP, count_rows

from .ranks import keep_rounds


class Asked:
    """Counts, which come with ids of another type, and how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, ids: Tensor) -> tuple[Tensor, int]:
        self.times += 1
        return ids.int(), int(ids.sum())


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(function))
        return function(*args, **(kwargs or {}))


def test_it_is_an_op_where_a_mode_sees_it() -> None:
    asked, ids = Asked(), torch.arange(4)
    plain = count_rows(ids, asked)
    with Names() as names:
        seen = count_rows(ids, asked)
    assert f"cute_ep.{OP}.default" in names.found and asked.times == 2
    assert plain[1] == seen[1] == 6 and torch.equal(plain[0], seen[0]) and seen[0].dtype == torch.int32


def test_an_error_comes_out_of_the_op() -> None:
    def fail(ids: Tensor) -> tuple[Tensor, int]:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"), Names():
        count_rows(torch.arange(4), fail)


@pytest.mark.parametrize("kept", [True, False])
def test_a_policy_can_keep_the_numbers(kept: bool) -> None:
    asked, x, ids = Asked(), torch.ones(3, requires_grad=True), torch.arange(3)

    def policy(*arguments: Any, **named: Any) -> CheckpointPolicy:
        return keep_rounds(*arguments, **named) if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(x: Tensor) -> Tensor:
        counted, rows = count_rows(ids, asked)
        return (x * rows * counted).sin()

    out = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out.sum().backward()
    wanted = 3 * ids * torch.cos(3.0 * ids)
    assert asked.times == (1 if kept else 2) and torch.equal(x.grad, wanted)
