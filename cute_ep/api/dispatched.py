"""What dispatch returns and combine needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from cute_ep.api.buffers import BUFFERS, DispatchBuffers, room_of
from cute_ep.api.counts import HostCounts, any_lost
from cute_ep.api.errors import EPInputError
from cute_ep.api.provenance import Origin, Stamp

if TYPE_CHECKING:
    from cute_ep.api.rounds import PendingDispatch

READ_BY_COMBINE = ("tokens", "row_offsets", "row_map", "headers")
"""Tensors that a combine in any mode reads or checks; partial mode multiplies by `weights` too."""

NOTHING: dict[str, Tensor | None] = dict.fromkeys(BUFFERS)

T = TypeVar("T")


class Of(Generic[T]):
    """A tensor of a batch's buffers, by the name of the attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: Dispatched, owner: type) -> T:
        tensor: T = getattr(batch.buffers, self.name)
        return tensor


@dataclass(frozen=True, eq=False, repr=False)
class Dispatched:
    """One rank's share of a dispatched batch. The tensors of `buffers` are attributes of the batch, too, by the same
    names. All are on the device, and N = `num_rows` rows are valid.

    A batch is immutable. `copy.copy` and `dataclasses.replace` give batches in the same buffers, which become stale
    with them; `copy.deepcopy` and `pickle` give tensors of their own, which no communicator takes for its batch.

    Attributes:
        buffers: what it was received into.
        rank: whose share it is.
        topk_ids: this rank's own [T, K] int32 or int64 argument.
        router_weights: this rank's own [T, K] float32 argument, or None.
        return_slices_log2: base-2 logarithm of the slices in which returned rows travel; the same number in this rank's
            header.
        row_per_entry: whether each entry of `topk_ids` that is not masked has a row of its own, which modes other than
            partial need of rank-major rows; `derived` with other `topk_ids` says so.
        weighted: whether this rank gave its dispatch router weights, or `derived` was given `weights`, which partial
            combine of expert-major rows asks for. None, of the constructor: whether there are `weights`.
        frame: what this dispatch was given as `frame`, over nodes the same on all ranks.
        stamp: the dispatch that made it; None of a batch that was put together from tensors.
    """

    buffers: DispatchBuffers
    rank: int
    topk_ids: Tensor
    router_weights: Tensor | None
    return_slices_log2: int
    row_per_entry: bool = False
    weighted: bool | None = None
    frame: int | None = None
    stamp: Stamp | None = None

    tokens = Of[Tensor]()
    scales = Of[Tensor | None]()
    row_scales = Of[Tensor | None]()
    row_offsets = Of[Tensor]()
    row_counts = Of[Tensor]()
    scales_offsets = Of[Tensor | None]()
    expert_ids = Of[Tensor]()
    src_info = Of[Tensor]()
    num_rows = Of[Tensor]()
    row_map = Of[Tensor]()
    headers = Of[Tensor]()
    weights = Of[Tensor]()
    row_weights = Of[Tensor]()
    row_expert_ids = Of[Tensor | None]()
    source_ranges = Of[Tensor | None]()
    frame_ids = Of[Tensor | None]()

    def __post_init__(self) -> None:
        if self.weighted is None:
            object.__setattr__(self, "weighted", self.weights is not None)

    @classmethod
    def received(cls, buffers: DispatchBuffers, origin: Origin, sent: PendingDispatch, **others: Any) -> Self:
        """The batch that a communicator has received into these buffers, whose generation has counted it, of what its
        rank has sent. `others` are arguments of a subclass."""
        topk_ids, router_weights, slices, _, frame = sent
        made = object.__new__(cls)
        vars(made).update(  # a frozen class takes 1 us more to set its attributes
            buffers=buffers,
            rank=origin.rank,
            topk_ids=topk_ids,
            router_weights=router_weights,
            return_slices_log2=slices,
            row_per_entry=False,
            weighted=router_weights is not None,
            frame=frame,
            stamp=Stamp(origin, buffers.memory.generation.number, topk_ids, router_weights, frame),
            **others,
        )
        return made

    @classmethod
    def of_tensors(
        cls,
        tensors: Mapping[str, Tensor | None],
        *,
        rank: int,
        topk_ids: Tensor,
        router_weights: Tensor | None,
        return_slices_log2: int,
        weighted: bool | None = None,
        frame: int | None = None,
    ) -> Dispatched:
        """A batch put together from tensors that a dispatch of this rank wrote, such as those that a torch op returned.

        `combine` takes it and checks shapes, types and devices. It cannot see whether the tensors belong together, nor
        whether a later dispatch has overwritten them: both are the caller's promise.

        Args:
            tensors: by the names of `DispatchBuffers`. Combine needs READ_BY_COMBINE, and `frame_ids` over nodes; those
                that are left out, or None, are None in the batch. Of `tokens` it reads only how many rows there are;
                another tensor with as many rows does.
            rank: the rank that dispatched.
            topk_ids, router_weights: what that rank gave to its dispatch.
            return_slices_log2: `Dispatched.return_slices_log2` of that dispatch.
            weighted: whether that dispatch was given router weights. Buffers have `weights` in either case, ones where
                there were none; if it was not, combine in partial mode refuses the batch. None: whether `tensors` has
                `weights`.
            frame: what that dispatch was given as `frame`.

        Raises:
            EPInputError: a name is unknown, or a tensor that combine needs is missing.
        """
        every = {**NOTHING, **tensors}
        if len(every) > len(BUFFERS):
            name = next(name for name in tensors if name not in BUFFERS)
            raise EPInputError(f"tensors[{name!r}]: must be one of {', '.join(BUFFERS)}")
        for name in READ_BY_COMBINE:
            if every[name] is None:
                raise EPInputError(f"tensors[{name!r}] = None: must be what dispatch wrote, combine reads it")
        buffers = DispatchBuffers.of(every)
        return cls(buffers, rank, topk_ids, router_weights, return_slices_log2, weighted=weighted, frame=frame)

    def derived(
        self,
        *,
        row_map: Tensor | None = None,
        tokens: Tensor | None = None,
        topk_ids: Tensor | None = None,
        weights: Tensor | None = None,
        router_weights: Tensor | None = None,
    ) -> Dispatched:
        """The same batch with other tensors, which tell combine to take rows from other places or to sum otherwise.

        Every rank derives in the same way, since what one rank sends another one waits for: where `topk_ids` has an
        expert, that expert's rank must have a row in `row_map`. In partial mode one row per (token, rank) is enough,
        and entries of -1 are left out of the sum. On a GPU a rank waits for a missing row until its timeout; the CPU
        raises EPInputError.

        Args:
            row_map: [R, Tmax, K] int32, the row of `rows` to return for each entry (source, token, k), -1 for none. The
                derived batch has no `num_rows`.
            tokens: a tensor with as many rows as combine may read.
            topk_ids: [T, K] int32 or int64, the entries of the own tokens that come home; -1 masks one. Rank-major rows
                of a batch with others than the last of a token on each rank masked come home in any mode.
            weights: [R, Tmax, K] float32 that this rank multiplies its rows by in partial mode; the derived batch is
                then `weighted`.
            router_weights: [T, K] float32 that this rank multiplies what comes home by in exact mode. In partial mode
                the experts' ranks multiply, by `weights`.

        Raises:
            EPInputError: a tensor has another shape than the one that it replaces.
        """
        given = {"row_map": row_map, "topk_ids": topk_ids, "weights": weights, "router_weights": router_weights}
        for name, tensor in given.items():
            before = self.row_map if name in ("row_map", "weights") else self.topk_ids
            if tensor is not None and tensor.shape != before.shape:
                rule = f"must be {tuple(before.shape)}, as in the batch"
                raise EPInputError(f"{name}.shape = {tuple(tensor.shape)}: {rule}")
        tensors = {"row_map": row_map, "tokens": tokens, "weights": weights}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if row_map is not None:
            tensors["num_rows"] = None
        changes: dict[str, Any] = {"buffers": self.buffers.changed(tensors)} if tensors else {}
        if topk_ids is not None:
            changes |= {"topk_ids": topk_ids, "row_per_entry": True}
        if router_weights is not None:
            changes["router_weights"] = router_weights
        if weights is not None:
            changes["weighted"] = True
        return self._changed(changes)

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        """`derived`, of arguments that were checked."""
        return replace(self, **changes)

    def without_rows(self, weights: Tensor | None = None) -> Self:
        """What combine reads of the batch, without the memory of its rows and scale factors, and without this rank's
        router weights: in exact mode combine must be given them. Those that travelled stay, so partial mode needs
        none; `weights`, float32 of their shape and contiguous, take their place and are not checked."""
        made = object.__new__(type(self))  # as in `received`
        vars(made).update(vars(self), buffers=self.buffers.without_rows(weights), router_weights=None)
        if self.stamp is not None:
            origin, number, topk_ids, _, frame = self.stamp
            vars(made)["stamp"] = Stamp(origin, number, topk_ids, None, frame)
        return made

    def counts_to_host(self, stream: torch.cuda.Stream | None = None) -> HostCounts:
        """Begin to copy `row_counts` and `num_rows` to pinned memory; the host does not wait before `HostCounts.wait`.

        Args:
            stream: on which the batch was dispatched, or one that waits for it; None: the current one. Ranks that share
                a GPU need their communicator's.

        Raises:
            EPInputError: the stream is being captured; the batch has no such tensors; or, on the CPU, a rank has not
                dispatched.
        """
        return HostCounts(self, stream)

    def any_lost(self) -> Tensor:
        """[1] bool on the device, whether the buffers, or a block, had no room for a row of some token; at the next
        `synchronize` the host learns it too. Enqueued on the current stream, may be captured. It does not count rows of
        the shared expert where a rank has no others."""
        return any_lost(self)

    def is_whole(self, origin: Origin) -> bool:
        """Whether this communicator's dispatch made the batch, with the ids that it has and in tensors that this
        library has made, and its buffers hold it: all that combine reads but the router weights was checked then."""
        generation, cfg, _ = self.buffers.memory
        if cfg is None or self.stamp is None:
            return False
        own, number, topk_ids, *_ = self.stamp
        return own is origin and number == generation.number and topk_ids is self.topk_ids

    def __repr__(self) -> str:
        """Whose batch it is, where and how large; reads no tensor."""
        return f"Dispatched(rank {self.rank}, {self.topk_ids.shape[0]} tokens, {room_of(self.buffers)})"
