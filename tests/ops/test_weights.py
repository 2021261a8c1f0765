"""Router weights of partial sums in ops: the rule of `tests.weights_cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ep.ops
from cute_ep.api.errors import EPInputError
from cute_ep.testing.workloads import make_inputs
from tests import weights_cases

from .ranks import on_all_ranks

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "combine": lambda rows, batch, out: cute_ep.ops.combine(rows, batch),
    "combine, named": lambda rows, batch, out: cute_ep.ops.combine(rows, batch, "partial"),
    "combine_into": lambda rows, batch, out: cute_ep.ops.combine_into(rows, batch, out),
    "combine with a gradient": lambda rows, batch, out: cute_ep.ops.combine(rows.requires_grad_(), batch).detach(),
    "compiled": lambda rows, batch, out: torch.compile(cute_ep.ops.combine, backend="aot_eager")(rows, batch),
}


@weights_cases.tokens
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_partial_sums_need_the_weights_of_their_dispatch(call: Callable, tokens: tuple[int, int]) -> None:
    """Else no rank has sent anything, and all make another round."""
    cfg = weights_cases.CFG
    given = make_inputs(cfg, tokens, "masked", 3)

    def program(rank: int, comm: str) -> Any:
        one, made = given[rank], []
        for weights in (None, torch.ones_like(one.router_weights), one.router_weights):
            batch = cute_ep.ops.dispatch(one.x, one.topk_ids, weights, comm)
            rows, out = batch.tokens.clone(), torch.empty_like(one.x)
            if weights is None:
                with pytest.raises(EPInputError, match=weights_cases.ASKS):
                    call(rows, batch, out)
            else:
                made.append(call(rows, batch, out))
                exact = cute_ep.ops.combine(rows.detach(), batch, "exact")
                torch.testing.assert_close(made[-1], exact, rtol=2**-6, atol=2**-6)
        return made

    made, calls = on_all_ranks(cfg, program)
    assert calls[0] == calls[1] == ["dispatch", "partial", *2 * ["dispatch", "partial", "exact"]]
    assert all(len(sums) == 2 for sums in made)


def test_rank_major_rows_need_none() -> None:
    cfg = weights_cases.MADE["rank-major without"].cfg
    given = make_inputs(cfg, (9, 4), "masked", 3)

    def program(rank: int, comm: str) -> torch.Tensor:
        batch = cute_ep.ops.dispatch(given[rank].x, given[rank].topk_ids, None, comm)
        return cute_ep.ops.combine(batch.tokens, batch)

    made, _ = on_all_ranks(cfg, program)
    homes = [
        sum(((one.topk_ids // cfg.local_experts == rank) & (one.topk_ids >= 0)).any(1) for rank in range(2))
        for one in given
    ]
    for out, one, home in zip(made, given, homes, strict=True):
        assert torch.equal(out, (one.x.float() * home[:, None]).bfloat16())
