"""Compiled models of several layers make the calls of eager ones, whatever the number of tokens."""

from __future__ import annotations

import pytest
import torch

from cute_ep import connect_local
from cute_ep.nn import MoELayer
from tests.ops.patterns import SIZES, recorded
from tests.ops.test_order import fresh_compiler  # noqa: F401, a fixture

from .layers import INNER, config

CFG = config(1)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_parallel_layers_keep_their_order(backend: str) -> None:
    """Two layers, which torch could compute in either order, in training."""
    torch.manual_seed(0)
    (ep,), layers = connect_local(CFG, ["cpu"]), [MoELayer(CFG, INNER) for _ in range(2)]
    for layer in layers:
        layer.attach(ep)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + layers[0](x) + layers[1](x.relu())

    def calls_of(call: object, tokens: int) -> list[str]:
        x = torch.randn(tokens, CFG.hidden).bfloat16().requires_grad_()
        with recorded([ep]) as calls:
            out = call(x)  # type: ignore[operator]
            calls.append("backward")
            out.sum().backward()
        return calls

    want, compiled = calls_of(block, SIZES[-1]), torch.compile(block, backend=backend, fullgraph=True)
    assert len(want) == 11
    for tokens in SIZES:
        assert calls_of(compiled, tokens) == want, f"{tokens} tokens"
