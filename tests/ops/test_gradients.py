"""Gradients of a layer over the ops are those of a dense layer, bit for bit where the numbers allow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import CombineMode

from .layer import Given, check, given, gradients, layer
from .ranks import CFG, on_all_ranks

TOKENS = (9, 0, 7)
PADDED = replace(CFG, row_alignment=8)
SHARED = replace(CFG, fused_shared_expert=True)
SKIP = replace(CFG, skip_a2a=True, world_size=2, num_experts=8)


def check_all(one: Given, made: list[list[torch.Tensor]], *, weighted: bool = True) -> None:
    for rank, parts in enumerate(made):
        check(one, rank, parts, weighted=weighted)


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated", "one_expert", "one_rank"])
@pytest.mark.parametrize("cfg", [CFG, PADDED], ids=["dense rows", "padded rows"])
def test_gradients_are_those_of_a_dense_layer(cfg: EPConfig, routing: str, mode: CombineMode) -> None:
    """Also with a rank without tokens, masked ids, an expert twice in a token, and experts without rows."""
    one = given(cfg, TOKENS, routing)
    made, calls = on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, mode))
    check_all(one, made)
    assert all(part.count_nonzero() > 9 for part in made[2]), "numbers that could tell nothing"
    assert calls == [["dispatch", mode, "dispatch", "unweighted", "partial"]] * 3


def test_rank_major_rows_have_the_gradients_of_a_sum_over_ranks() -> None:
    """Every rank doubles the token; weights that require a gradient are refused."""
    cfg = replace(CFG, row_order="rank_major")
    one = given(cfg, TOKENS, "masked")

    def program(rank: int, comm: str) -> tuple[torch.Tensor, ...]:
        x = one.x[rank].bfloat16().requires_grad_()
        batch = cute_ep.ops.dispatch(x, one.ids[rank], one.weights[rank], comm)
        out = cute_ep.ops.combine(batch.tokens * 2, batch, "partial")
        out.backward(one.x[rank].bfloat16() + 1)
        weighted = batch._replace(router_weights=one.weights[rank].clone().requires_grad_())
        with pytest.raises(EPInputError, match="must be False with rank-major rows"):
            cute_ep.ops.combine(batch.tokens, weighted, "partial")
        assert x.grad is not None
        return out.detach(), x.grad

    for rank, (out, grad) in enumerate(on_all_ranks(cfg, program)[0]):
        ids, x = one.ids[rank], one.x[rank].bfloat16().float()
        served = [len({i // cfg.local_experts for i in row if i >= 0}) for row in ids.tolist()]
        factor = 2 * torch.tensor(served).view(-1, 1).float()
        assert torch.equal(out, (factor * x).bfloat16())
        assert torch.equal(grad, (factor * (x + 1).bfloat16().float()).bfloat16())


def test_ids_of_64_bits_have_the_same_gradients() -> None:
    one = given(CFG, TOKENS, "masked")
    wide = replace(one, ids=[ids.long() for ids in one.ids])
    check_all(one, on_all_ranks(CFG, lambda rank, comm: gradients(wide, rank, comm))[0])


def test_without_any_token_gradients_are_zeros() -> None:
    one = given(CFG, (0, 0, 0), "uniform")
    check_all(one, on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm))[0])


def test_a_shared_expert_gets_the_gradients_of_the_own_tokens() -> None:
    """Router weights get none."""
    one = given(SHARED, TOKENS, "uniform")
    made, calls = on_all_ranks(SHARED, lambda rank, comm: gradients(one, rank, comm, weighted=False))
    check_all(one, made, weighted=False)
    assert calls == [["dispatch", "exact", "dispatch", "partial"]] * 3


@pytest.mark.parametrize("cfg", [SKIP, replace(SKIP, fused_shared_expert=True)], ids=["plain", "shared expert"])
def test_replicated_tokens_get_the_gradients_of_the_own_experts(cfg: EPConfig) -> None:
    one, weighted = given(cfg, (5, 5), "uniform"), not cfg.fused_shared_expert
    made, _ = on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, weighted=weighted))
    check_all(one, made, weighted=weighted)


def test_a_gradient_that_nobody_wants_costs_no_round() -> None:
    """Frozen tokens need no combine, frozen experts and tokens no dispatch, frozen router weights no rows back."""
    one = given(CFG, TOKENS, "uniform")

    def backward(x: bool, weights: bool, experts: bool):
        def program(rank: int, comm: str) -> None:
            parts = one.x[rank].bfloat16(), one.weights[rank].clone(), one.of_rank(rank).bfloat16()
            for part, wanted in zip(parts, (x, weights, experts), strict=True):
                part.requires_grad_(wanted)
            layer(comm, parts[0], one.ids[rank], *parts[1:]).sum().backward()

        return on_all_ranks(CFG, program)[1]

    assert backward(x=False, weights=True, experts=False) == [["dispatch", "exact", "unweighted"]] * 3
    assert backward(x=False, weights=False, experts=True) == [["dispatch", "exact", "dispatch"]] * 3
    assert backward(x=True, weights=False, experts=False) == [["dispatch", "exact", "dispatch", "partial"]] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outputs_of_every_type_have_gradients(dtype: torch.dtype) -> None:
    one = given(CFG, TOKENS, "masked")

    def typed(comm, x, ids, weights, experts, mode):
        batch = cute_ep.ops.dispatch(x, ids, weights, comm)
        rows = torch.nn.functional.grouped_mm(batch.tokens, experts, offs=batch.row_offsets[1:]).relu()
        return cute_ep.ops.combine(rows, batch, mode, dtype=dtype)

    made, _ = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm, call=typed))
    assert all(out.dtype == dtype for out, *_ in made)
    check_all(one, made)


def test_rows_of_no_token_take_no_part() -> None:
    """What experts make of rows behind the last one and of padding, NaN too, reaches neither output nor gradient; their
    own gradients are zeros, and those of NaN tokens stay with them."""
    one = given(PADDED, TOKENS, "masked")

    def program(rank: int, comm: str) -> tuple[torch.Tensor, ...]:
        x = one.x[rank].bfloat16().requires_grad_()
        batch = cute_ep.ops.dispatch(x, one.ids[rank], one.weights[rank], comm)
        live = batch.src_info[:, :1] >= 0
        rows = torch.where(live, batch.tokens, torch.nan)
        rows.retain_grad()
        batch.tokens.register_hook(lambda grad: torch.where(live, grad, torch.nan))
        cute_ep.ops.combine(rows, batch).backward(one.grads[rank].bfloat16())
        assert rows.grad is not None and x.grad is not None
        return rows.grad[~live.flatten()], x.grad

    for of_dead, of_x in on_all_ranks(PADDED, program)[0]:
        assert len(of_dead) and not of_dead.any() and of_x.isfinite().all()


def test_layers_one_after_the_other_and_side_by_side_make_rounds_in_one_order() -> None:
    """Also in the backward pass; a rank in another order would get other tokens' gradients, or time out."""
    one = given(CFG, TOKENS, "uniform")

    def program(rank: int, comm: str) -> list[torch.Tensor]:
        experts = one.of_rank(rank).bfloat16().requires_grad_()
        x = one.x[rank].bfloat16().requires_grad_()
        weights = one.weights[rank].clone().requires_grad_()
        left = layer(comm, x, one.ids[rank], weights, experts)
        right = layer(comm, -x, one.ids[rank], weights, experts, "partial")
        out = layer(comm, (left - right).clamp(-1, 1), one.ids[rank], weights, experts)
        out.backward(one.grads[rank].bfloat16())
        return [x.grad, weights.grad, experts.grad]

    made, calls = on_all_ranks(CFG, program)
    assert calls[0] == calls[1] == calls[2] and len(calls[0]) == 15
    for rank, parts in enumerate(made):
        assert all(part is not None and part.isfinite().all() for part in parts), rank
        assert rank == 1 or all(part.any() for part in parts)
    again, _ = on_all_ranks(CFG, program)
    for first, second in zip(made, again, strict=True):
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
