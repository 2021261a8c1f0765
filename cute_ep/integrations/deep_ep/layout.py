"""Where tokens go in normal mode: what `get_dispatch_layout` counts, and entries for layouts that callers make."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch

from cute_ep.integrations.common import checks
from cute_ep.integrations.deep_ep import calls
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOP_K
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.torch_internals import versions_of

Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""[R] tokens by rank, [T, R] whether a token goes to a rank, [E] entries by expert, [T, K] entries."""
_GIVEN: dict[int, GivenLayout] = {}
"""By the id of `goes`, while that is alive."""


class Goes(ref[torch.Tensor]):
    """A weak reference to the `goes` of a layout, which knows its id."""

    __slots__ = ("key",)
    key: int


class GivenLayout(NamedTuple):
    """What `get_dispatch_layout` has returned, of which entries, and the `versions` of these and of the memory of all
    that was returned, with which it is true. It keeps `goes`, by which it is found, by a weak reference alone."""

    routes: RouteCounts
    topk_idx: torch.Tensor
    versions: tuple[int, ...]
    goes: Goes

    @classmethod
    def of(cls, topk_idx: torch.Tensor, num_experts: int, ranks: int) -> tuple[RouteCounts, torch.Tensor]:
        """Count. Returns what `known` finds again by `goes`, and that."""
        routes = count_routes(topk_idx, num_experts, ranks)
        goes = routes.goes
        found = Goes(goes, _forget)
        found.key = id(goes)
        _GIVEN[found.key] = cls(routes, topk_idx, versions_of(topk_idx, routes.memory), found)
        return routes, goes

    @staticmethod
    def known(layout: Layout, ranks: int) -> RouteCounts | None:
        """The counts, if these are of one layout for so many ranks, unchanged, which torch does not know of inference
        tensors."""
        by_rank, goes, by_expert, topk_idx = layout
        made = _GIVEN.get(id(goes))
        if made is None or made.goes() is not goes or (topk_idx is not None and made.topk_idx is not topk_idx):
            return None
        routes = made.routes
        same = routes.by_rank is by_rank and routes.by_expert is by_expert and routes.sizes.given[-1] == ranks
        return routes if same and made.versions == versions_of(made.topk_idx, routes.memory) else None


def _forget(gone: Goes) -> None:
    """A layout whose `goes` is gone, unless another has its id by now."""
    made = _GIVEN.get(gone.key)
    if made is not None and made.goes is gone:
        del _GIVEN[gone.key]


def check_layout(layout: Layout, ranks: int, nodes: int, device: torch.device) -> None:
    """EPInputError unless `routes_of` takes these, which `get_dispatch_layout` has not made."""
    by_rank, goes, by_expert, topk_idx = layout
    checks.given("num_tokens_per_rank", by_rank, shape=(ranks,), dtype=checks.ID_TYPES, device=device)
    checks.given("is_token_in_rank", goes, shape=(None, ranks), dtype=torch.bool, device=device)
    checks.given("num_tokens_per_expert", by_expert, shape=(None,), dtype=checks.ID_TYPES, device=device)
    experts = by_expert.shape[0]
    calls.check_experts(experts, ranks, "num_tokens_per_expert.shape[0]")
    most, rule = MAX_TOP_K - (topk_idx is not None), "is_token_in_rank: must be of get_dispatch_layout with more than"
    checks.require(ranks <= most, rule + " {} ranks, here {}", most, ranks)
    if topk_idx is not None:
        rule = "num_tokens_per_expert.shape[0] = {}: must not exceed {} with an is_token_in_rank of one's own"
        checks.require(experts + ranks * nodes <= MAX_EXPERTS, rule, experts, MAX_EXPERTS - ranks * nodes)
        checks.given("topk_idx", topk_idx, shape=(goes.shape[0], None), dtype=checks.ID_TYPES, device=device)
        checks.integer("topk_idx.shape[1]", topk_idx.shape[1], 1, min(MAX_TOP_K - ranks, experts))


def routes_of(layout: Layout, nodes: int) -> tuple[RouteCounts, int]:
    """Entries that bring each token where `goes` [T, R] says, with the caller's counts to be sent, and out of how many
    experts they are: [T, K] given ones, but for those of other ranks, then one for each rank. Ids out of range stay so.
    Behind its given experts each rank has one for each node, since a node needs as many experts as a token has
    entries."""
    by_rank, goes, by_expert, topk_idx = layout
    (tokens, ranks), num_experts = goes.shape, by_expert.shape[0]
    given = 0 if topk_idx is None else num_experts // ranks
    local = given + nodes
    own = torch.arange(given, local * ranks, local, dtype=torch.int32, device=goes.device)
    entries = torch.where(goes, own, -1)
    if topk_idx is not None:
        ids = topk_idx.long()
        known = (ids >= 0) & (ids < num_experts)
        server = ids.clamp(min=0, max=num_experts - 1) // given
        gone = known & ~goes.gather(1, server)
        shifted = torch.where(known, ids + server * nodes, torch.where(ids < 0, ids, ids + ranks * nodes))
        entries = torch.cat([torch.where(gone, -1, shifted), entries], dim=1)
    sent = torch.full((1,), tokens, dtype=torch.int32, device=goes.device)
    counts = whole_vectors(torch.cat([by_rank.int(), by_expert.int(), sent])[None])[0]
    routes = count_routes(entries, local * ranks, ranks)
    routes.sent, routes.words = counts, counts.shape[0]
    return routes, local * ranks


def tokens_by_node(goes: torch.Tensor, ranks_per_node: int | None) -> torch.Tensor | None:
    """[nodes] int32, how many tokens go to each node, of [T, R] bool; None: all ranks are on one."""
    if ranks_per_node is None:
        return None
    return goes.unflatten(1, (-1, ranks_per_node)).any(2).sum(0, dtype=torch.int32)


def whole_vectors(words: torch.Tensor) -> torch.Tensor:
    """[n, words] of 32 bits with zeros up to whole vectors."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % (VECTOR_BYTES // 4))).contiguous()
