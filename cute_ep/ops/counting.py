"""An op by which an adapter's ranks tell each other how many rows come. Modes see it as they see dispatch, so selective
checkpointing can keep the numbers, and the backward pass does not ask for them again. For eager code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from cute_ep.ops.bypass import needs_op
from cute_ep.ops.library import LIBRARY

OP = "count_rows"
Count = Callable[[Tensor], tuple[Tensor, int]]
"""Answers ids with these as they were counted, and how many rows come for them."""
_ASKED: dict[int, Count] = {}
_NUMBERS = count()


def count_rows(topk_ids: Tensor, call: Count) -> tuple[Tensor, int]:
    """call(topk_ids), which the op makes where a mode sees it: ranks with other modes than others hear the same."""
    if not needs_op(topk_ids=topk_ids):
        return call(topk_ids)
    number = next(_NUMBERS)
    _ASKED[number] = call
    try:
        ids, rows = torch.ops.cute_ep.count_rows(topk_ids, number)
    finally:
        del _ASKED[number]
    return ids, int(rows)


def _run(topk_ids: Tensor, number: int) -> tuple[Tensor, Tensor]:
    ids, rows = _ASKED[number](topk_ids)
    return ids, torch.tensor(rows, device="cpu")


LIBRARY.define(f"{OP}(Tensor topk_ids, int number) -> (Tensor, Tensor)")
LIBRARY.impl(OP, _run, "CompositeExplicitAutograd")
