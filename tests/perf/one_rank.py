"""One rank of other libraries on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from perf.cases import Shape
from perf.peer_timing import SETS, Inputs, Rank, Work
from perf.peers import MAX_ERROR

SHAPE = Shape(256, 8, 2)
TOKENS = (3, 16)
STREAM = 7
"""The current stream."""


class OnCpu(TorchFunctionMode):
    """Tensors of a GPU are on the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return func(*args, **options)


class Here(Rank):
    """The only rank, on the CPU."""

    def inputs(self, tokens: int) -> list[Inputs]:
        found = []
        for number in range(SETS):
            made = torch.Generator().manual_seed(number)
            scores = torch.rand(tokens, self.shape.num_experts, generator=made)
            weights, ids = scores.softmax(dim=1).topk(self.shape.top_k)
            x = torch.randn(tokens, self.shape.hidden, generator=made).bfloat16()
            found.append(Inputs(x, ids, weights / weights.sum(dim=1, keepdim=True), ids[None]))
        return found


def check(works: Iterator[Work], formats: tuple[str, ...], alone: bool = True) -> list[Work]:
    """Every format and batch size once; errors within bounds, also of the pairs of all input sets in turn."""
    found = []
    for work in works:
        found.append(work)
        assert work.error is not None and work.error <= MAX_ERROR[work.format] and work.alone == alone
        for index in (0, 1, 2, 3, 0):
            work.dispatch(index)
            work.combine(index)
    assert [(work.tokens, work.format) for work in found] == [(size, fmt) for size in TOKENS for fmt in formats]
    return found
