"""Functions compiled into the kernels: built here where the compiler is, else in build/library beforehand."""

from __future__ import annotations

import pytest
import torch

from cute_ep import Hooks, reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import expert_rows
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import on_device

from .conftest import connected

RESIDUAL = Hooks(epilogue="cute_ep.kernels.hooks:residual_add")
SCALE = Hooks(epilogue="cute_ep.kernels.hooks:scale")
READERS = Hooks(
    router_weights="tests.gpu.hook_examples:bfloat16_weight", input_scale="tests.gpu.hook_examples:reciprocal"
)


def dispatched_rows(cfg: EPConfig, communicators, inputs, **changes) -> tuple[list[Dispatched], list[torch.Tensor]]:
    """A dispatch on every rank, and made-up expert outputs."""
    batches = []
    for communicator, one in zip(communicators, inputs, strict=True):
        given = {"x": one.x, "topk_ids": one.topk_ids, "router_weights": one.router_weights} | changes
        batches.append(communicator.dispatch(**{name: value.to(communicator.device) for name, value in given.items()}))
    for communicator in communicators:
        communicator.synchronize()
    return batches, expert_rows(batches, cfg.hidden, 0)


def combined(communicators, rows, batches, data, mode: str, split: bool) -> list[torch.Tensor]:
    """A combine on every rank, whose epilogue is given its data."""
    if split:
        sent = [c.combine_async(r, b, mode) for c, r, b in zip(communicators, rows, batches, strict=True)]
        return [c.combine_wait(s, epilogue_data=d) for c, s, d in zip(communicators, sent, data, strict=True)]
    return [
        c.combine(r, b, mode=mode, epilogue_data=d)
        for c, r, b, d in zip(communicators, rows, batches, data, strict=True)
    ]


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("hooks", [RESIDUAL, SCALE], ids=["residual_add", "scale"])
@pytest.mark.parametrize(("tokens", "sms"), [(77, None), (LAMPORT_TOKENS + 9, 8)], ids=["", "pipelines"])
def test_epilogues(devices: list[str], tokens: int, sms: int | None, hooks: Hooks, mode: str, split: bool) -> None:
    cfg = EPConfig(2048, 32, 4, tokens, len(devices), "bf16", 20)
    inputs = make_inputs(cfg, [tokens] * len(devices), "uniform", 5)
    with connected(cfg, devices, hooks=hooks, sms=sms) as communicators:
        batches, rows = dispatched_rows(cfg, communicators, inputs)
        residuals = [torch.randn(tokens, 2048, device=c.device).bfloat16() for c in communicators]
        numbers = [torch.tensor([0.3 + rank], device=c.device) for rank, c in enumerate(communicators)]
        here = communicators[0].device
        moved = [on_device(b, here) for b in batches]
        for data in (residuals if hooks is RESIDUAL else numbers, [None] * len(devices)):
            outs = combined(communicators, rows, batches, data, mode, split)
            for communicator in communicators:
                communicator.synchronize()

            def epilogue(rank: int, total: torch.Tensor, data=data) -> torch.Tensor:
                if data[rank] is None:
                    return total
                own = data[rank].to(here).float()
                return total + own if hooks is RESIDUAL else total * own

            wanted = reference.combine(cfg, [row.to(here) for row in rows], moved, None, mode, epilogue=epilogue)
            for rank, (got, want) in enumerate(zip(outs, wanted, strict=True)):
                assert_bits(got, want, f"rank {rank}")


def test_readers() -> None:
    """bfloat16 router weights, and an input scale given as its reciprocal."""
    cfg = EPConfig(2048, 16, 4, 50, 1, "nvfp4", 20)
    (inputs,) = make_inputs(cfg, [50], "uniform", 6)
    halved = inputs.router_weights.bfloat16()
    with connected(cfg, ["cuda:0"], hooks=READERS) as (communicator,):
        changes = {"router_weights": halved, "input_scale": torch.tensor([4.0])}
        (batch,), rows = dispatched_rows(cfg, [communicator], [inputs], **changes)
        x, ids = inputs.x.cuda(), inputs.topk_ids.cuda()
        expected = reference.dispatch(cfg, [x], [ids], [0.25], [halved.float().cuda()])
        assert_bits(batch.tokens[: int(batch.num_rows)], expected[0].tokens, "tokens")
        for mode in ("exact", "partial"):
            got = communicator.combine(rows[0], batch, mode=mode)
            communicator.synchronize()
            (want,) = reference.combine(cfg, rows, expected, None, mode)
            assert_bits(got, want, mode)
