"""Where the tokens of a dispatch in DeepEP's normal mode go, and what dispatch returns of it for later calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_ep import DispatchBuffers, Dispatched, EPConfig
from cute_ep.api.carving import Carving
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.runtime.counts import ENDS
from cute_ep.runtime.pool import Hold
from cute_ep.runtime.routes import RouteCounts

BY_RANK: dict[str, Any] = {"row_alignment": 1, "row_order": RANK_MAJOR}
"""Of one row per (token, rank)."""
WITH_WIDE_IDS: dict[str, Any] = {**BY_RANK, "row_ids": "int64"}
"""The same, with local experts as dispatch returns them, for handles that do not read them again."""


class Returned(NamedTuple):
    """A batch, without its rows, whose rows combine can return, and what keeps its communicator open."""

    hold: Hold
    batch: Dispatched


@lru_cache(maxsize=64)
def zeroing(cfg: EPConfig) -> EPConfig:
    """The same with zeros in padding."""
    return replace(cfg, zero_padding=True)


@dataclass(eq=False, repr=False)
class Route:
    """Where the tokens of one dispatch go: by `routes` of the entries that it is given, out of so many `experts`.

    Attributes:
        tokens: what no rank has more tokens than.
        rows: rows per (token, rank) received, or that there is room for.
        own: whether a token has an entry of each rank behind those that it was given.
        places: over nodes, [rows] int64, where a batch has each row by source rank; None: there.
        of_rows: for sums of rows, once they were sent.
        of_words: for sums of top-k weights, once there was need; by the number of words of a row.
    """

    zeroes = False  # whether the dispatch under way makes padding zero

    routes: RouteCounts
    experts: int
    tokens: int
    rows: int
    own: bool = False
    places: torch.Tensor | None = None
    of_rows: Returned | None = None
    of_words: dict[int, Returned] = field(default_factory=dict)

    @property
    def frame(self) -> int:
        """Of dispatches along it: over nodes their tokens count nodes in frames of so many rows."""
        return max(self.tokens, 1)

    @property
    def sent(self) -> Returned:
        """`of_rows`, behind the dispatch."""
        assert self.of_rows is not None
        return self.of_rows

    def by_source(self, buffers: DispatchBuffers, names: Sequence[str], rows: int) -> list[torch.Tensor]:
        """The first rows of tensors, over nodes by source rank."""
        places = self.places
        if places is None:
            return buffers.first_of(names, rows)
        tensors: list[torch.Tensor] = [getattr(buffers, name) for name in names]
        raw = [one.view(torch.uint8) if one.itemsize == 1 else one for one in tensors]
        return [one.index_select(0, places).view(of.dtype) for one, of in zip(raw, tensors, strict=True)]

    def tokens_of_rows(self) -> torch.Tensor:
        """[rows] int32, the token index on its source of each row, behind the dispatch."""
        (info,) = self.by_source(self.sent.batch.buffers, ("src_info",), self.rows)
        source = info.select(1, 0)
        return source if self.places is None else source % self.frame  # in frames tokens count nodes

    def by_batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by source rank, as the batch has them."""
        return rows if self.places is None else torch.empty_like(rows).index_copy_(0, self.places, rows)

    def most_rows(self, tokens: int) -> int:
        """Rows that a dispatch can bring of so many tokens of all ranks."""
        return tokens

    def made_for(self, cfg: EPConfig) -> EPConfig:
        """What its dispatches' memory is made for, where `cfg` is the communicator's."""
        return zeroing(cfg) if self.zeroes else cfg

    @property
    def order(self) -> dict[str, Any]:
        """Options of a configuration: in which order rows are, and how they are padded."""
        return WITH_WIDE_IDS


class Handle(Sequence[torch.Tensor | None]):
    """What dispatch returns for later calls: the `route`, and DeepEP's six fields as a sequence, of which three are
    None. Views are made when they are read.

    Attributes:
        rank_prefix_matrix: [R, R] int32; rows that rank d has of sources 0 .. s are element [s, d].
        recv_src_idx: [rows] int32, the token index on its source of each row received.
        is_token_in_rank: [T, R] bool, as dispatch was given it.
    """

    FIELDS = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )
    channel_prefix_matrix = recv_channel_prefix_matrix = send_head = None

    def __init__(self, route: Route, ends: Carving, is_token_in_rank: torch.Tensor) -> None:
        self.route, self._ends, self.is_token_in_rank = route, ends, is_token_in_rank
        self._tokens = None if route.places is None else route.tokens_of_rows()  # operations that a graph captures

    @property
    def rank_prefix_matrix(self) -> torch.Tensor:
        """See above."""
        return self._ends.tensor(ENDS)

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """See above."""
        return self.route.tokens_of_rows() if self._tokens is None else self._tokens

    def __len__(self) -> int:
        return len(self.FIELDS)

    def __getitem__(self, field: Any) -> Any:
        if isinstance(field, slice):
            return tuple(getattr(self, name) for name in self.FIELDS[field])
        return getattr(self, self.FIELDS[field])
