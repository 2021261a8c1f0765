"""Inputs of one dispatch that tests, `cute-ep verify` and the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.routing import MAX_RANKS


@dataclass(frozen=True)
class RankInputs:
    """One rank's dispatch arguments, on the CPU: x [T, hidden] bfloat16, topk_ids [T, K] int32,
    router_weights [T, K] float32 (positive, each token's sum to 1)."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    router_weights: torch.Tensor


def _preferred(preference: torch.Tensor, top_k: int) -> torch.Tensor:
    """The `top_k` distinct experts of highest preference, [T, experts] -> [T, top_k]."""
    return preference.topk(top_k, dim=1).indices


def _uniform(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    return _preferred(torch.rand(tokens, cfg.num_experts, generator=generator), cfg.top_k)


def _zipf(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    # log-probability plus Gumbel noise: sampling without replacement in proportion to 1 / (expert + 1)
    noise = -(-torch.rand(tokens, cfg.num_experts, generator=generator).clamp(min=1e-30).log()).log()
    return _preferred(noise - torch.arange(1, cfg.num_experts + 1).log(), cfg.top_k)


def _one_expert(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    others = torch.rand(tokens, cfg.num_experts - 1, generator=generator)
    return torch.cat([torch.zeros(tokens, 1, dtype=torch.int64), 1 + _preferred(others, cfg.top_k - 1)], dim=1)


def _one_rank(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    preference = torch.rand(tokens, cfg.num_experts, generator=generator)
    preference[:, -cfg.local_experts :] += 1
    return _preferred(preference, cfg.top_k)


def _masked(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    ids = _uniform(cfg, tokens, generator)
    ids[torch.rand(tokens, cfg.top_k, generator=generator) < 1 / 3] = -1
    ids[1::5] = -1
    return ids


def _repeated(cfg: EPConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    ids = _uniform(cfg, tokens, generator)
    ids[0::3, -1] = ids[0::3, 0]
    ids[1::6] = ids[1::6, :1]
    return ids


ROUTINGS: dict[str, Callable[[EPConfig, int, torch.Generator], torch.Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "one_rank": _one_rank,
    "masked": _masked,
    "repeated": _repeated,
}
"""How tokens choose experts. Only with `repeated` does an expert appear more than once in a token.

- uniform: top_k of all experts with equal probability.
- zipf: expert e in proportion to 1 / (e + 1), so rank 0 is the busiest.
- one_expert: slot 0 is expert 0, the other slots are uniform over the rest.
- one_rank: the experts of the last rank; when it owns fewer than top_k, all of them and uniform others.
- masked: uniform, then a third of the ids and every fifth token (1, 6, ...) whole are -1.
- repeated: uniform, then the last slot of every third token (0, 3, ...) is its first one, and all slots of every sixth
  (1, 7, ...) are.
"""


def make_rank_inputs(cfg: EPConfig, rank: int, tokens: int, routing: str, seed: int) -> RankInputs:
    """Inputs of one rank: the same on every machine that calls with the same arguments, and with `skip_a2a` the same
    on all ranks.

    Token values are normal times a power of two in [2**-5, 2**4] a group of 16 elements, and one group in 64
    is zero, so that neighbouring scale factors differ.

    Raises:
        EPInputError: `routing` is not one of ROUTINGS, or `tokens` is outside [0, max_tokens_per_rank].
    """
    if routing not in ROUTINGS:
        raise EPInputError(f"routing = {routing!r}: must be one of {', '.join(ROUTINGS)}")
    if not 0 <= tokens <= cfg.max_tokens_per_rank:
        raise EPInputError(f"tokens = {tokens}: must be in [0, max_tokens_per_rank = {cfg.max_tokens_per_rank}]")
    generator = torch.Generator().manual_seed(seed * MAX_RANKS + (0 if cfg.skip_a2a else rank))
    ids = ROUTINGS[routing](cfg, tokens, generator).int()
    weights = torch.randn(tokens, cfg.top_k, generator=generator).softmax(dim=1)
    groups = -(-cfg.hidden // 16)
    factor = torch.randint(-5, 5, (tokens, groups), generator=generator).float().exp2()
    factor[torch.randint(64, (tokens, groups), generator=generator) == 0] = 0
    x = torch.randn(tokens, groups, 16, generator=generator).mul_(factor[:, :, None]).bfloat16()
    return RankInputs(x.flatten(1)[:, : cfg.hidden].contiguous(), ids.contiguous(), weights)


def make_inputs(cfg: EPConfig, tokens_per_rank: Sequence[int], routing: str, seed: int) -> list[RankInputs]:
    """`make_rank_inputs` of every rank; `tokens_per_rank` has world_size entries, with `skip_a2a` all the same, else
    EPInputError."""
    if len(tokens_per_rank) != cfg.world_size:
        raise EPInputError(f"len(tokens_per_rank) = {len(tokens_per_rank)}: must be world_size = {cfg.world_size}")
    if cfg.skip_a2a and len(set(tokens_per_rank)) > 1:
        raise EPInputError(f"tokens_per_rank = {tuple(tokens_per_rank)}: must be the same on all ranks with skip_a2a")

    def make(rank: int) -> RankInputs:
        return make_rank_inputs(cfg, rank, tokens_per_rank[rank], routing, seed)

    # In a forked process torch makes its threads anew where their number is set, for each thread at its first operation
    # and without a lock (torch 2.13): before others do, this one does.
    torch.set_num_threads(torch.get_num_threads())
    with ThreadPoolExecutor(cfg.world_size) as pool:  # torch draws with one thread a generator
        return list(pool.map(make, range(cfg.world_size)))
