"""What a partial combine makes of router weights: one table for the CPU, the GPU and the fake GPU of `tests.fake_gpu`.

A refusal comes before anything is sent, so all ranks can make their next round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cute_ep import EPCommunicator, EPConfig, EPInputError, reference
from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.distributed import DistributedEPCombine
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs

CFG = EPConfig(hidden=32, num_experts=8, top_k=3, max_tokens_per_rank=9, world_size=2, timeout_s=20.0)
ASKS = r"dispatched\.weighted = False.*give router_weights to dispatch, ones for a plain sum"
"""What is said where the dispatch was given no weights."""
REFUSES = r"router_weights = tensor: .*give them to dispatch, or use mode='exact'"
"""What is said where combine is given some."""

Ranks = Sequence[EPCommunicator]
Batches = Sequence[Dispatched]


def of_tensors(batch: Dispatched, weighted: bool | None = None, *, without: str = "") -> Dispatched:
    """The batch, put together by hand."""
    names = [name for name in (*READ_BY_COMBINE, "weights") if name != without]
    return Dispatched.of_tensors(
        {name: getattr(batch, name) for name in names},
        rank=batch.rank,
        topk_ids=batch.topk_ids,
        router_weights=batch.router_weights,
        return_slices_log2=batch.return_slices_log2,
        weighted=weighted,
    )


@dataclass(frozen=True)
class Made:
    """How the batch of a combine came about.

    Attributes:
        given: whether its dispatch was given router weights.
        change: what is made of it then.
        factors: of a rank's router weights, what partial sums multiply by; None: they are refused.
        rank_major: whether rows come in that order.
    """

    given: bool
    change: Callable[[Dispatched], Dispatched] = lambda batch: batch
    factors: Callable[[Tensor], Tensor] | None = None
    rank_major: bool = False

    @property
    def cfg(self) -> EPConfig:
        return replace(CFG, row_order="rank_major") if self.rank_major else CFG


def same(weights: Tensor) -> Tensor:
    return weights


def doubled(batch: Dispatched) -> Dispatched:
    return batch.derived(weights=torch.full_like(batch.weights, 2))


MADE = {
    "with weights": Made(True, factors=same),
    "with weights, without rows": Made(True, Dispatched.without_rows, same),
    "with weights, derived": Made(True, lambda batch: batch.derived(row_map=batch.row_map.clone()), same),
    "with weights, copied": Made(True, copy.copy, same),
    "with weights, replaced": Made(True, lambda batch: replace(batch, router_weights=None), same),
    "with weights, of tensors": Made(True, of_tensors, same),
    "with weights, derived with others": Made(True, doubled, lambda weights: torch.full_like(weights, 2)),
    "without": Made(False),
    "without, without rows": Made(False, Dispatched.without_rows),
    "without, derived": Made(False, lambda batch: batch.derived(row_map=batch.row_map.clone())),
    "without, derived with weights of the own tokens": Made(
        False, lambda batch: batch.derived(router_weights=torch.ones_like(batch.weights[0, : len(batch.topk_ids)]))
    ),
    "without, copied": Made(False, copy.copy),
    "without, replaced": Made(False, replace),
    "without, without rows and copied": Made(False, lambda batch: copy.copy(batch.without_rows())),
    "without, derived with weights": Made(False, doubled, lambda weights: torch.full_like(weights, 2)),
    "without, of tensors with weights": Made(False, of_tensors, torch.ones_like),
    "without, of tensors that say so": Made(False, lambda batch: of_tensors(batch, False)),
    "rank-major with weights": Made(True, factors=torch.ones_like, rank_major=True),
    "rank-major without": Made(False, factors=torch.ones_like, rank_major=True),
}
"""By test id."""
COMBINES: dict[str, Callable[..., list[Tensor]]] = {
    "combine": lambda ranks, rows, batches: [ep.combine(*one) for ep, *one in zip(ranks, rows, batches, strict=True)],
    "combine, named": lambda ranks, rows, batches: [
        ep.combine(*one, mode="partial") for ep, *one in zip(ranks, rows, batches, strict=True)
    ],
    "plan_combine": lambda ranks, rows, batches: [
        plan.launch() for plan in [ep.plan_combine(*one) for ep, *one in zip(ranks, rows, batches, strict=True)]
    ],
    "halves": lambda ranks, rows, batches: [
        ep.combine_wait(sent)
        for ep, sent in [(ep, ep.combine_async(*one)) for ep, *one in zip(ranks, rows, batches, strict=True)]
    ],
    "all ranks": lambda ranks, rows, batches: DistributedEPCombine(ranks)(rows, batches),
}
"""The calls, on all ranks, by test id; the first rank makes its own first."""
WITH_WEIGHTS: dict[str, Callable[..., object]] = {
    "combine": lambda ranks, rows, batches, weights: ranks[0].combine(rows[0], batches[0], weights[0]),
    "combine, named": lambda ranks, rows, batches, weights: ranks[0].combine(
        rows[0], batches[0], weights[0], "partial"
    ),
    "plan_combine": lambda ranks, rows, batches, weights: ranks[0].plan_combine(rows[0], batches[0], weights[0]),
    "all ranks": lambda ranks, rows, batches, weights: DistributedEPCombine(ranks)(rows, batches, weights),
}
"""Calls that are given weights, which partial sums refuse."""
TOKENS = {"tokens": (9, 4), "none on rank 0": (0, 4), "none": (0, 0)}
"""Of both ranks."""

made = pytest.mark.parametrize("made", MADE.values(), ids=MADE)
combines = pytest.mark.parametrize("combine", COMBINES.values(), ids=COMBINES)
with_weights = pytest.mark.parametrize("combine", WITH_WEIGHTS.values(), ids=WITH_WEIGHTS)
tokens = pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)


class Round:
    """A dispatch by all ranks of `Made.cfg`, and rows to combine.

    Attributes:
        batches: what the dispatches returned; `changed`: what was made of them.
        weights: per rank the router weights, whether dispatch was given them or not.
        rows: per rank made-up outputs of experts, on the CPU too: `rows_here`.
    """

    def __init__(self, ranks: Ranks, one: Made, tokens: Sequence[int]) -> None:
        self.ranks, self.one, cfg = ranks, one, ranks[0].cfg
        self.given: list[RankInputs] = make_inputs(cfg, tokens, "masked", 3)
        self.weights = [own.router_weights.to(ep.device) for ep, own in zip(ranks, self.given, strict=True)]
        self.batches = [
            ep.dispatch(own.x.to(ep.device), own.topk_ids.to(ep.device), weights if one.given else None)
            for ep, own, weights in zip(ranks, self.given, self.weights, strict=True)
        ]
        self.synchronize()
        self.changed = [one.change(batch) for batch in self.batches]
        shapes = [(len(batch.tokens), cfg.hidden) for batch in self.batches]
        self.rows_here = [torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16() for shape in shapes]
        self.rows = [row.to(ep.device) for ep, row in zip(ranks, self.rows_here, strict=True)]

    def synchronize(self) -> None:
        for ep in self.ranks:
            ep.synchronize()

    def check(self, sums: Sequence[Tensor], factors: Callable[[Tensor], Tensor], mode: str) -> None:
        """AssertionError unless they are those of the reference, multiplied by these."""
        self.synchronize()
        cfg, given = self.ranks[0].cfg, self.given
        here = reference.dispatch(cfg, [one.x for one in given], [one.topk_ids for one in given])
        weights = [factors(one.router_weights) for one in given]
        for rank, want in enumerate(reference.combine(cfg, self.rows_here, here, weights, mode)):
            assert_bits(sums[rank].cpu(), want, f"rank {rank}, {mode}")

    def check_next(self) -> None:
        """All ranks can make their next round: nothing of a refused one was sent."""
        mode = "partial" if self.one.rank_major else "exact"
        weights = [None if self.one.rank_major else weights for weights in self.weights]
        given = zip(self.ranks, self.rows, self.batches, weights, strict=True)
        sums = [ep.combine(*one, mode) for ep, *one in given]
        self.check(sums, torch.ones_like if self.one.rank_major else same, mode)


def check_combine(ranks: Ranks, one: Made, tokens: Sequence[int], combine: Callable[..., list[Tensor]]) -> None:
    """Make a round and combine it, or have it refused, and make another combine."""
    own = Round(ranks, one, tokens)
    if one.factors is None:
        with pytest.raises(EPInputError, match=ASKS):
            combine(ranks, own.rows, own.changed)
    else:
        own.check(combine(ranks, own.rows, own.changed), one.factors, "partial")
    own.check_next()


def check_weights_refused(ranks: Ranks, tokens: Sequence[int], combine: Callable[..., object]) -> None:
    """Weights that a partial combine is given; whether dispatch was given them too does not matter."""
    for one in (MADE["with weights"], MADE["without"]):
        own = Round(ranks, one, tokens)
        with pytest.raises(EPInputError, match=REFUSES):
            combine(ranks, own.rows, own.batches, own.weights)
        own.check_next()


def check_wait_refused(ranks: Ranks, tokens: Sequence[int]) -> None:
    """Weights that `combine_wait` is given: the round stays outstanding, and a second call ends it."""
    own = Round(ranks, MADE["with weights"], tokens)
    sent = [ep.combine_async(*one) for ep, *one in zip(ranks, own.rows, own.batches, strict=True)]
    for ep, pending, weights in zip(ranks, sent, own.weights, strict=True):
        with pytest.raises(EPInputError, match=REFUSES):
            ep.combine_wait(pending, weights)
        with pytest.raises(EPInputError, match="1 split round"):
            ep.combine(own.rows[ep.rank], own.batches[ep.rank])
    own.check([ep.combine_wait(pending) for ep, pending in zip(ranks, sent, strict=True)], same, "partial")
    own.check_next()
