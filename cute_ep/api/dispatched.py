"""What dispatch returns and combine needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch

from cute_ep.api.carving import Carving, Pieces
from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.counts import HostCounts, any_lost
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import payload_columns, payload_dtype, scale_dtype
from cute_ep.api.use import Origin, Use
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.scales import ATOM, ATOM_ROWS, block_scale_shape, scale_shape


@dataclass(frozen=True, eq=False, repr=False)
class DispatchBuffers:
    """Memory of one dispatch output, to be reused call after call (see `Communicator.allocate`). Its tensors stay where
    they are: leave their shapes and storages alone.

    A group is a local expert; with a fused shared expert group 0 is that one and local expert e is group e + 1. In
    rank-major order a group is a source rank. G is their number. Each group's rows are padded to the configuration's
    `alignment` with rows of zeros; with `block_rows` the rows behind them hold anything.

    Attributes:
        tokens: [capacity, hidden] bfloat16 or float8_e4m3fn, or [capacity, hidden * bits / 8] uint8 (formats of fewer
            than 8 bits: element 0 in the lowest bits of byte 0).
        scales: block scale factors, uint8 bits or float32, in the configuration's scale layout
            (`cute_ep.layouts.maps.scales` has the shapes); rows that pad a group are zero. None when the format has
            none. With `block_rows` and layout `transposed`: [G, words, capacity / G].
        row_scales: [capacity] bfloat16, each row's own scale. None when the format has none.
        row_offsets: [G + 1] int32; group g owns rows [row_offsets[g], row_offsets[g + 1]), padding included.
        row_counts: [G] int32, rows of each group without padding; of a block, those that it has room for.
        scales_offsets: [G] int32; the first 128-row scale block of group g is
            row_offsets[g] // 128 + scales_offsets[g]. None unless scales are in the 128x4 atom layout.
        expert_ids: [G] int32, 0 .. G-1.
        src_info: [capacity, 2] int32, (token index on its source rank, top-k slot) of each row; (token, top_k) for
            rows of the shared expert, (-1, -1) for padding. In rank-major order the slot is the last of this rank.
        num_rows: [1] int32, row_offsets[G].
        row_map: [R, Tmax, K] int32, the row of entry (source, token, k), -1 where this rank has none, 2^31 - 1 where
            the buffers could not hold all rows. R is the number of ranks that exchange messages (`EPConfig.peers`).
            In rank-major order a token's last entry of this rank has its row, others have -1.
        headers: [R, 4] int32, one header a source (`cute_ep.layouts.maps.arena.HeaderWord`), among others the number of
            the dispatch round: combine compares it with that of the other ranks.
        weights: [R, Tmax, K] float32, what partial combine multiplies rows by: the router weights that travelled, 1
            from a source that gave none, and 1 in rank-major order. Defined where `row_map` has a row.
        row_weights: [capacity] float32, the router weight of each row, 1 from a source that gave none and for the
            shared expert, 0 for padding. In rank-major order [capacity, K], those of the token's entries, 0 for entries
            that are not this rank's.
        row_expert_ids: [capacity, K] int32 in rank-major order, the local experts of the token's entries, -1 for those
            that are not this rank's, and in all rows that no token has; else None.
        source_ranges: [G, R, 2] int32, of each source in a group (rows, rows of sources before it), of those that a
            block has room for; None in rank-major order, where a group is a source.
        use: which batch the tensors hold.
        made_for: the configuration that `allocate` or `carve` made them for; None of others, which must be checked.
        carving: memory of the tensors that are not attributes yet, where `carve` has made it.
    """

    # each instance's own, but no fields: made with the tensors, shared by all batches in them
    use: ClassVar[Use]
    made_for: ClassVar[EPConfig | None] = None
    carving: ClassVar[Carving | None] = None

    tokens: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    row_offsets: torch.Tensor
    row_counts: torch.Tensor
    scales_offsets: torch.Tensor | None
    expert_ids: torch.Tensor
    src_info: torch.Tensor
    num_rows: torch.Tensor
    row_map: torch.Tensor
    headers: torch.Tensor
    weights: torch.Tensor
    row_weights: torch.Tensor
    row_expert_ids: torch.Tensor | None
    source_ranges: torch.Tensor | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "use", Use.of(self.row_offsets))

    @classmethod
    def allocate(cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None) -> DispatchBuffers:
        """Uninitialised buffers for `capacity` rows, rounded up to the alignment, or for blocks of as many together;
        None: `cfg.max_rows`, which no routing can exceed. EPInputError: as `rows_for`, `check_capacity`."""
        made = {
            name: None if want is None else torch.empty(want[0], dtype=want[1], device=device)
            for name, want in buffer_shapes(cfg, rows_for(cfg, check_capacity(cfg, capacity))).items()
        }
        buffers = cls(**made)
        buffers.__dict__["made_for"] = cfg
        return buffers

    @classmethod
    def carve(cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None) -> DispatchBuffers:
        """As `allocate`, in less of the host's time: all tensors but the rows and their scale factors share an
        allocation, so each of them keeps the others' memory, and `torch.save` wants copies of those of other types."""
        whole, pieces = _parts(cfg, rows_for(cfg, check_capacity(cfg, capacity)))
        buffers = object.__new__(cls)
        own = buffers.__dict__
        for name, want in whole.items():
            own[name] = None if want is None else torch.empty(want[0], dtype=want[1], device=device)
        own["use"], own["made_for"], own["carving"] = Use(), cfg, Carving(pieces, device)
        return buffers

    if not TYPE_CHECKING:  # a type checker would take any name for a tensor's

        def __getattr__(self, name: str) -> Any:
            """A tensor that is not an attribute yet."""
            carving = self.__dict__.get("carving")
            if carving is None or name not in carving:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            tensor = self.__dict__[name] = carving.tensor(name)
            if name == "row_offsets":
                tensor._cute_ep_use = self.use
            return tensor

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have all tensors: the carving's address would be that of the original."""
        return {**self.__dict__, **tensors_of(self), "carving": None}

    def addresses(self, names: Sequence[str]) -> dict[str, int]:
        """Device addresses of tensors by name, 0 where there is none; makes none of those that are not there yet."""
        own = self.__dict__
        found = {} if self.carving is None else self.carving.addresses()
        return {
            name: found[name] if name not in own else 0 if (tensor := own[name]) is None else tensor.data_ptr()
            for name in names
        }

    def __repr__(self) -> str:
        return f"DispatchBuffers({_extents(self)})"


def check_capacity(cfg: EPConfig, capacity: int | None) -> int | None:
    """It as a plain integer; EPInputError if it is no number of rows for which there can be buffers."""
    if capacity is None:
        return None
    if not (is_integer(capacity) and capacity >= 0):
        rule = "an integer that is not negative" if cfg.block_rows is None else _blocks_rule(cfg)
        raise EPInputError(f"capacity = {capacity!r}: must be {rule}")
    return int(capacity)


def rows_for(cfg: EPConfig, capacity: int | None) -> int:
    """Rows of buffers with this capacity, which may be a number that a compiler traces. EPInputError: as
    `check_blocks`."""
    rows = cfg.max_rows if capacity is None else capacity
    check_blocks(cfg, "capacity", rows)
    return align_up(rows, cfg.alignment) if cfg.block_rows is None else rows


def check_blocks(cfg: EPConfig, name: str, rows: int) -> None:
    """EPInputError unless `rows` rows are whole blocks, no larger than `cfg.block_rows`; without blocks any number."""
    if cfg.block_rows is None:
        return
    if not 0 < rows <= cfg.max_rows or rows % _rows_of_blocks(cfg):
        raise EPInputError(f"{name} = {rows}: must be {_blocks_rule(cfg)}")


def _rows_of_blocks(cfg: EPConfig) -> int:
    """The fewest rows that are a block for each group; others are multiples."""
    return cfg.groups * (ATOM_ROWS if cfg.scales_as == ATOM else 1)


def _blocks_rule(cfg: EPConfig) -> str:
    least = _rows_of_blocks(cfg)
    return f"a multiple of {least} in [{least}, {cfg.max_rows}], {cfg.groups} blocks"


BUFFERS = tuple(field.name for field in fields(DispatchBuffers))
"""Names of the tensors of `DispatchBuffers`."""
APART = ("tokens", "scales", "row_scales")
"""Those that `carve` gives an allocation of their own: large ones, and those whose elements are not 4 bytes wide."""
READ_BY_COMBINE = ("tokens", "row_offsets", "row_map", "headers")
"""Those that a combine in any mode reads or checks; partial mode multiplies by `weights` too."""


def tensors_of(buffers: DispatchBuffers) -> dict[str, torch.Tensor | None]:
    """The tensors of `DispatchBuffers` by name, also of a batch that was returned in them."""
    return {name: getattr(buffers, name) for name in BUFFERS}


def routed_shape(cfg: EPConfig) -> tuple[int, int, int]:
    """Extents of what dispatch keeps of every entry (source, token, k)."""
    return cfg.peers, cfg.max_tokens_per_rank, cfg.top_k


Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype] | None]


def buffer_shapes(cfg: EPConfig, rows: int) -> Shapes:
    """(shape, type) of every tensor of `DispatchBuffers` for `rows` rows; None where the configuration has none."""
    fmt, groups, routed = cfg.format, cfg.groups, routed_shape(cfg)
    scales = None
    if cfg.scales_as is not None:
        sizes = fmt.scale_bytes(cfg.hidden), fmt.scale_itemsize
        if cfg.block_rows is None:
            shape = scale_shape(cfg.scales_as, *sizes, rows, groups)
        else:
            shape = block_scale_shape(cfg.scales_as, *sizes, rows // groups, groups)
        scales = (shape, scale_dtype(fmt))
    return {
        "tokens": ((rows, payload_columns(fmt, cfg.hidden)), payload_dtype(fmt)),
        "scales": scales,
        "row_scales": ((rows,), torch.bfloat16) if fmt.row_scale else None,
        "row_offsets": ((groups + 1,), torch.int32),
        "row_counts": ((groups,), torch.int32),
        "scales_offsets": ((groups,), torch.int32) if cfg.scales_as == ATOM else None,
        "expert_ids": ((groups,), torch.int32),
        "src_info": ((rows, 2), torch.int32),
        "num_rows": ((1,), torch.int32),
        "row_map": (routed, torch.int32),
        "headers": ((cfg.peers, len(HeaderWord)), torch.int32),
        "weights": (routed, torch.float32),
        "row_weights": ((rows, cfg.top_k) if cfg.is_rank_major else (rows,), torch.float32),
        "row_expert_ids": ((rows, cfg.top_k), torch.int32) if cfg.is_rank_major else None,
        "source_ranges": None if cfg.is_rank_major else ((groups, cfg.peers, 2), torch.int32),
    }


@lru_cache(maxsize=256)
def _parts(cfg: EPConfig, rows: int) -> tuple[Shapes, Pieces]:
    """`buffer_shapes` of tensors with an allocation of their own, and of those that there are none of; the others."""
    shapes = buffer_shapes(cfg, rows)
    shared = {name: want for name, want in shapes.items() if want is not None and name not in APART}
    return {name: want for name, want in shapes.items() if name not in shared}, Pieces.of(shared)


@dataclass(frozen=True, eq=False, repr=False)
class Dispatched(DispatchBuffers):
    """One rank's share of a dispatched batch, in tensors as of `DispatchBuffers`. N = `num_rows` rows are
    valid, all on the device.

    Attributes:
        rank: whose share it is.
        topk_ids: this rank's own [T, K] int32 or int64 argument.
        router_weights: this rank's own [T, K] float32 argument, or None.
        return_slices: base-2 logarithm of the slices in which returned rows travel; the same number in this rank's
            header.
        origin: the communicator's whose dispatch made it, None for a batch that was put together from tensors.
        turn: which batch in its buffers it is (`Use`).
        derived_ids: whether `topk_ids` are those that `derived` was given.
        weighted: whether this rank gave its dispatch router weights, or `derived` was given `weights`, which partial
            combine of expert-major rows asks for. None, of the constructor: whether there are `weights`.
    """

    rank: int
    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    return_slices: int
    origin: Origin | None = None
    turn: int = 0
    derived_ids: bool = False
    weighted: bool | None = None
    as_made: ClassVar[bool] = False  # True, as an attribute, in what `inside` returns; `dataclasses.replace` drops it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighted is None:
            object.__setattr__(self, "weighted", self.weights is not None)

    @classmethod
    def inside(cls, buffers: DispatchBuffers, own: dict[str, object]) -> Self:
        """The batch for which these buffers have been in use since `Use.begin`, with the attributes of its own: the
        constructor's work, without its 2 us of a host's time (it stores a frozen instance's fields one by one)."""
        batch = object.__new__(cls)
        fields = batch.__dict__
        fields.update(buffers.__dict__)
        fields.update(own)
        fields["as_made"], fields["turn"], fields["derived_ids"] = True, buffers.use.turn, False
        fields["weighted"] = own["router_weights"] is not None
        return batch

    @classmethod
    def of_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor | None],
        *,
        rank: int,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None,
        return_slices: int,
        weighted: bool | None = None,
    ) -> Dispatched:
        """A batch put together from tensors that a dispatch of this rank wrote, such as those that a torch op returned.

        `combine` takes it and checks shapes, types and devices. It cannot see whether the tensors belong together, nor
        whether a later dispatch has overwritten them: both are the caller's promise.

        Args:
            tensors: by the names of `DispatchBuffers`. Combine needs READ_BY_COMBINE; those that are left out, or None,
                are None in the batch. Of `tokens` it reads only how many rows there are; another tensor with as many
                rows does.
            rank: the rank that dispatched.
            topk_ids, router_weights: what that rank gave to its dispatch.
            return_slices: `Dispatched.return_slices` of that dispatch.
            weighted: whether that dispatch was given router weights. Buffers have `weights` in either case, ones where
                there were none; if it was not, combine in partial mode refuses the batch. None: whether `tensors` has
                `weights`.

        Raises:
            EPInputError: a name is unknown, or a tensor that combine needs is missing.
        """
        for name in tensors:
            if name not in BUFFERS:
                raise EPInputError(f"tensors[{name!r}]: must be one of {', '.join(BUFFERS)}")
        for name in READ_BY_COMBINE:
            if tensors.get(name) is None:
                raise EPInputError(f"tensors[{name!r}] = None: must be what dispatch wrote, combine reads it")
        parts: dict[str, Any] = dict.fromkeys(BUFFERS) | dict(tensors)
        own = {"topk_ids": topk_ids, "router_weights": router_weights, "return_slices": return_slices}
        return cls(**parts, rank=rank, **own, weighted=weighted)

    def derived(
        self,
        *,
        row_map: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        router_weights: torch.Tensor | None = None,
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
            own = self.row_map if name in ("row_map", "weights") else self.topk_ids
            if tensor is not None and tensor.shape != own.shape:
                raise EPInputError(f"{name}.shape = {tuple(tensor.shape)}: must be {tuple(own.shape)}, as in the batch")
        changes: dict[str, Any] = {
            name: tensor for name, tensor in {**given, "tokens": tokens}.items() if tensor is not None
        }
        if topk_ids is not None:
            changes["derived_ids"] = True
        if weights is not None:
            changes["weighted"] = True
        return self._changed({**changes, "num_rows": None} if row_map is not None else changes)

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        """`derived`, of arguments that were checked."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(changes, as_made=False, made_for=None)
        return made

    def without_rows(self) -> Self:
        """What combine reads of the batch, without the memory of its rows and scale factors, and without this rank's
        router weights: in exact mode combine must be given them. Those that travelled stay, so partial mode needs
        none."""
        rows = self.src_info if self.row_expert_ids is None else self.row_expert_ids  # as many as there are tokens
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(tokens=rows, scales=None, row_scales=None, router_weights=None, made_for=None)
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

    def any_lost(self) -> torch.Tensor:
        """[1] bool on the device, whether the buffers, or a block, had no room for a row of some token; at the next
        `synchronize` the host learns it too. Enqueued on the current stream, may be captured. It does not count rows of
        the shared expert where a rank has no others."""
        return any_lost(self)

    def is_latest_of(self, origin: Origin) -> bool:
        """Whether this communicator made the batch, as it is, and its buffers have not been used again since."""
        return self.as_made and self.origin is origin and self.turn == self.use.turn

    def __repr__(self) -> str:
        """Whose batch it is, where and how large; reads no tensor."""
        return f"Dispatched(rank {self.rank}, {self.topk_ids.shape[0]} tokens, {_extents(self)})"


def _extents(buffers: DispatchBuffers) -> str:
    """Room, types and place of buffers, without reading them."""
    tokens, scales = buffers.tokens, buffers.scales
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in (tokens, scales) if tensor is not None]
    return f"room for {tokens.shape[0]} rows of {tokens.shape[1]} {' with scales in '.join(types)} on {tokens.device}"
