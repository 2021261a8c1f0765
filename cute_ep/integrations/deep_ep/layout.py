"""Where tokens go in normal mode: what `get_dispatch_layout` counts, and entries for layouts that callers make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cute_ep import EPCommunicator
from cute_ep.api.row_tensors import ID_TYPES
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import require
from cute_ep.integrations.common.reports import Words
from cute_ep.integrations.deep_ep import calls
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOP_K
from cute_ep.reference.routes import NO_EXPERT
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.torch_internals import version_of

_GIVEN = WeakTensorKeyDictionary()
"""The `GivenLayout` of each `goes` that is still alive."""


class GivenLayout(NamedTuple):
    """What `get_dispatch_layout` has returned, parts of `RouteCounts`, and the tensors that it is true of as long as
    their `versions` are the same: the entries, the counts, and `goes`. It does not refer to `goes`, by which it is
    found: then neither would ever be freed."""

    counts: torch.Tensor
    by_rank: torch.Tensor
    by_expert: torch.Tensor
    ids: torch.Tensor
    last_ids: torch.Tensor
    topk_idx: torch.Tensor
    versions: tuple[int, int, int]

    @classmethod
    def of(cls, topk_idx: torch.Tensor, num_experts: int, ranks: int) -> RouteCounts:
        """Count; `known` finds it again by `goes`."""
        routes = count_routes(topk_idx, num_experts, ranks)
        counts, by_rank, by_expert, goes, ids, last_ids, _ = routes
        versions = _version(topk_idx), _version(counts), _version(goes)
        _GIVEN[goes] = cls(counts, by_rank, by_expert, ids, last_ids, topk_idx, versions)
        return routes

    @staticmethod
    def known(
        goes: torch.Tensor, by_rank: torch.Tensor, by_expert: torch.Tensor, topk_idx: torch.Tensor | None
    ) -> RouteCounts | None:
        """The counts, if all these are of one layout, unchanged; `topk_idx` may be missing. Of inference tensors torch
        does not know that."""
        made: GivenLayout | None = _GIVEN.get(goes)
        if made is None or (topk_idx is not None and made.topk_idx is not topk_idx):
            return None
        if made.by_rank is not by_rank or made.by_expert is not by_expert:
            return None
        if made.versions != (_version(made.topk_idx), _version(made.counts), _version(goes)):
            return None
        return RouteCounts(made.counts, by_rank, by_expert, goes, made.ids, made.last_ids)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def check_layout(
    layout: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor | None,
    ranks: int,
    device: torch.device,
) -> None:
    """EPInputError unless `routes_of` can take these arguments of a dispatch, which `get_dispatch_layout` has not
    made. `layout`: num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert."""
    by_rank, goes, by_expert = layout
    checks.given("num_tokens_per_rank", by_rank, shape=(ranks,), dtype=ID_TYPES, device=device)
    checks.given("is_token_in_rank", goes, shape=(None, ranks), dtype=torch.bool, device=device)
    checks.given("num_tokens_per_expert", by_expert, shape=(None,), dtype=ID_TYPES, device=device)
    experts = by_expert.shape[0]
    calls.check_experts(experts, ranks, "num_tokens_per_expert.shape[0]")
    if topk_idx is not None:
        rule = "num_tokens_per_expert.shape[0] = {}: must not exceed {} with an is_token_in_rank of one's own"
        require(experts + ranks <= MAX_EXPERTS, rule, experts, MAX_EXPERTS - ranks)
        checks.given("topk_idx", topk_idx, shape=(goes.shape[0], None), dtype=ID_TYPES, device=device)
        checks.integer("topk_idx.shape[1]", topk_idx.shape[1], 1, min(MAX_TOP_K - ranks, experts))


def routes_of(goes: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int) -> tuple[RouteCounts, int]:
    """Entries that bring each token where `goes` [T, R] says, and out of how many experts they are: the [T, K] ones
    that there are, but for those of other ranks, then one for each rank. Ids out of range stay so."""
    ranks, local = goes.shape[1], 1 if topk_idx is None else num_experts // goes.shape[1] + 1
    own = torch.arange(local - 1, local * ranks, local, dtype=torch.int32, device=goes.device)
    entries = torch.where(goes, own, -1)
    if topk_idx is not None:
        ids = topk_idx.long()
        known = (ids >= 0) & (ids < num_experts)
        server = ids.clamp(min=0, max=num_experts - 1) // (local - 1)
        gone = known & ~goes.gather(1, server)
        shifted = torch.where(known, ids + server, torch.where(ids < 0, ids, ids + ranks))
        entries = torch.cat([torch.where(gone, -1, shifted), entries], dim=1)
    return count_routes(entries, local * ranks, ranks), local * ranks


@dataclass(frozen=True)
class LayoutWords(Words):
    """Words of entries that `routes_of` may have put others behind. `own`: communicators whose latest dispatch had
    such entries."""

    own: set[EPCommunicator] = field(default_factory=set)

    def entry(self, communicator: EPCommunicator, index: int, experts: int, seen: int) -> str:
        more = communicator.cfg.world_size if communicator in self.own else 0
        beyond = seen == NO_EXPERT or seen < 0
        return super().entry(communicator, index, experts - more, seen if beyond else seen - more)
