"""The memory of dispatch outputs: tensors, their shapes, and how many rows they have room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cute_ep.api.carving import Carving, Pieces, first_rows, only_rows
from cute_ep.api.config import MAX_ROWS, EPConfig, is_integer
from cute_ep.api.errors import EPInputError
from cute_ep.api.provenance import Generation, Memory
from cute_ep.api.row_tensors import payload_columns, payload_dtype, scale_dtype
from cute_ep.api.tensors import end_of
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.scales import ATOM, ATOM_ROWS, block_scale_shape, scale_shape

if TYPE_CHECKING:
    from cute_ep.api.dispatched import Dispatched


Beside: TypeAlias = tuple[tuple[str, tuple[tuple[int, ...], torch.dtype]], ...]
"""Names of tensors, and their shapes and types, whose elements have 4 or 8 bytes."""


@dataclass(frozen=True, eq=False, repr=False)
class DispatchBuffers:
    """Memory of one dispatch output, to be reused call after call (see `Communicator.allocate`). Its tensors stay where
    they are: leave their shapes and storages alone.

    A group is a local expert; with a fused shared expert group 0 is that one and local expert e is group e + 1. In
    rank-major order a group is a source rank. G is their number. Each group's rows are padded to the configuration's
    `alignment` with rows of zeros; with `block_rows` the rows behind them hold anything. The `tokens` of padding hold
    anything without `zero_padding` of the configuration that the buffers were made for.

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
        row_expert_ids: [capacity, K] in rank-major order, of type `EPConfig.row_ids`, the local experts of the token's
            entries, -1 for those that are not this rank's, and in all rows that no token has; else None.
        source_ranges: [G, R, 2] int32, of each source in a group (rows, rows of sources before it), of those that a
            block has room for; None in rank-major order, where a group is a source.
        frame_ids: [nodes * Tmax, K] int32, of the frames of F rows that the ranks of this rank's rail gave, node after
            node: the expert of each entry among those of this node, from 0 on, -1 where it is another node's. Defined
            in the first nodes * F rows; combine reads it. None on one node.
        memory: where the tensors come from.
    """

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
    frame_ids: torch.Tensor | None
    memory: Memory = field(default_factory=lambda: Memory(Generation()), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", Memory(self.memory.generation))

    @classmethod
    def allocate(cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None) -> DispatchBuffers:
        """Uninitialised buffers for `capacity` rows, rounded up to the alignment, or for blocks of as many together;
        None: `cfg.max_rows`, which no routing can exceed. EPInputError: as `rows_for`, `check_capacity`."""
        return cls.of_shapes(cfg, device, buffer_shapes(cfg, rows_for(cfg, check_capacity(cfg, capacity))))

    @classmethod
    def of_shapes(cls, cfg: EPConfig, device: torch.device | str, shapes: Shapes) -> DispatchBuffers:
        """`allocate`, of `buffer_shapes` of the same configuration."""
        return cls._made(_tensors(shapes, device), Memory(Generation(), cfg))

    @classmethod
    def carve(cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None) -> DispatchBuffers:
        """As `allocate`, in less of the host's time: all tensors but the rows and their scale factors share an
        allocation, so each of them keeps the others' memory, and `torch.save` wants copies of those of other types."""
        return cls.carver(cfg, device, capacity)()

    @classmethod
    def carver(
        cls, cfg: EPConfig, device: torch.device | str, capacity: int | None = None, beside: Beside = ()
    ) -> Callable[[], DispatchBuffers]:
        """What makes anew each time what `carve` makes, in less of the host's time; and other tensors `beside`, in the
        allocation that is shared."""
        absent, apart, pieces = _parts(cfg, rows_for(cfg, check_capacity(cfg, capacity)), beside)

        def make() -> DispatchBuffers:
            tensors: dict[str, torch.Tensor | None] = {**absent}
            for name, shape, dtype in apart:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            return cls._made(tensors, Memory(Generation(), cfg, Carving(pieces, device)))

        return make

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor | None]) -> DispatchBuffers:
        """Buffers put together from all tensors, as the constructor does in more of the host's time."""
        return cls._made(tensors, Memory(Generation()))

    @classmethod
    def _made(cls, attributes: Mapping[str, object], memory: Memory) -> DispatchBuffers:
        """Buffers with these attributes; the constructor would ask for all tensors, and not believe `memory`."""
        made = object.__new__(cls)
        vars(made).update(attributes, memory=memory)  # the class is frozen
        return made

    def changed(self, changes: Mapping[str, torch.Tensor | None]) -> DispatchBuffers:
        """The same with other tensors, which must be checked; makes none of those that are not there yet."""
        return self._made({**vars(self), **changes}, self.memory._replace(cfg=None))

    def first_of(self, names: Sequence[str], rows: int) -> list[torch.Tensor]:
        """`first` of several that have as many rows, in less of the host's time."""
        carving = self.memory.carving
        if carving is None or self.tokens.shape[0] == rows:
            return [self.first(name, rows) for name in names]
        return carving.new(names, rows, vars(self))

    def first(self, name: str, rows: int) -> torch.Tensor:
        """The first rows of a tensor that the configuration has, which may have no others. No view for autograd, which
        refuses to change it in place and keeps its memory when that of the rows was freed."""
        carving = self.memory.carving
        if carving is not None and name not in vars(self) and carving.pieces.by_name[name].shape[0] != rows:
            return carving.new((name,), rows)[0]
        tensor: torch.Tensor = getattr(self, name)
        return tensor if tensor.size(0) == rows else first_rows(tensor, rows)

    def without_rows(self, weights: torch.Tensor | None = None) -> DispatchBuffers:
        """The same without the memory of rows and scale factors: `tokens` is one that has as many rows. `weights`: a
        tensor like those that this library has made, to stand for them."""
        if self.memory.carving is not None:
            rows = only_rows(self.tokens.size(0), self.tokens.device)
        else:
            rows = self.src_info if self.row_expert_ids is None else self.row_expert_ids
        made = object.__new__(type(self))  # as in `_made`
        vars(made).update(vars(self), tokens=rows, scales=None, row_scales=None)
        if weights is not None:
            vars(made)["weights"] = weights
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For copies: they have all tensors, and nothing that says that these were made together."""
        return {**tensors_of(self), "memory": Memory(self.memory.generation)}

    def zeroed_by(self, cfg: EPConfig) -> bool:
        """Whether a dispatch of this configuration makes padding zero: `zero_padding` of the one that they were made
        for, which may differ in that from the communicator's."""
        made = self.memory.cfg
        return (cfg if made is None else made).zero_padding

    def addresses(self, names: Sequence[str]) -> dict[str, int]:
        """Device addresses of tensors by name, 0 where there is none; makes none of those that are not there yet."""
        own, carving = vars(self), self.memory.carving
        found = {} if carving is None else carving.addresses()
        return {
            name: found[name] if name not in own else 0 if (tensor := own[name]) is None else tensor.data_ptr()
            for name in names
        }

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Addresses of the first byte and behind the last of each allocation, or of each tensor that was not carved;
        makes none of those that are not there yet."""
        carving = self.memory.carving
        own = [(name, one) for name, one in vars(self).items() if isinstance(one, torch.Tensor) and one.nbytes]
        made = [one for name, one in own if carving is None or name not in carving]
        found = [(tensor.data_ptr(), end_of(tensor)) for tensor in made]
        return tuple(found if carving is None else [*found, carving.span()])

    def __repr__(self) -> str:
        return f"DispatchBuffers({room_of(self)})"


BUFFERS = tuple(one.name for one in fields(DispatchBuffers) if one.name != "memory")
"""Names of the tensors of `DispatchBuffers`."""
APART = ("tokens", "scales", "row_scales")
"""Those that `carve` gives an allocation of their own: large ones, and those whose elements are not 4 bytes wide."""


class Carved:
    """A tensor of `DispatchBuffers` that becomes an attribute when it is first read, where `carve` made its memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, buffers: DispatchBuffers | None, owner: type) -> Any:
        carving = None if buffers is None else vars(buffers)["memory"].carving
        if carving is None or self.name not in carving:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        tensor = carving.tensor(self.name)
        object.__setattr__(buffers, self.name, tensor)
        return tensor


for _name in BUFFERS:
    setattr(DispatchBuffers, _name, Carved(_name))


def tensors_of(buffers: DispatchBuffers | Dispatched) -> dict[str, torch.Tensor | None]:
    """The tensors of buffers by name, also of a batch in them."""
    return {name: getattr(buffers, name) for name in BUFFERS}


def most_capacity(cfg: EPConfig) -> int:
    """Rows that buffers may have room for."""
    return MAX_ROWS // cfg.id_words


def check_capacity(cfg: EPConfig, capacity: int | None) -> int | None:
    """It as a plain integer; EPInputError if it is no number of rows for which there can be buffers."""
    most = most_capacity(cfg)
    if capacity is None or (type(capacity) is int and 0 <= capacity <= most):  # is soon found
        return capacity
    if not (is_integer(capacity) and 0 <= capacity <= most):
        rule = f"an integer in [0, {most}]" if cfg.block_rows is None else _blocks_rule(cfg)
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


def routed_shape(cfg: EPConfig) -> tuple[int, int, int]:
    """Extents of what dispatch keeps of every entry (source, token, k)."""
    return cfg.peers, cfg.max_tokens_per_peer, cfg.top_k


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
        "row_expert_ids": ((rows, cfg.top_k), getattr(torch, cfg.row_ids)) if cfg.is_rank_major else None,
        "source_ranges": None if cfg.is_rank_major else ((groups, cfg.peers, 2), torch.int32),
        "frame_ids": None if cfg.nodes == 1 else (routed[1:], torch.int32),
    }


@lru_cache(maxsize=256)
def _parts(
    cfg: EPConfig, rows: int, beside: Beside
) -> tuple[dict[str, None], list[tuple[str, tuple[int, ...], torch.dtype]], Pieces]:
    """Tensors that there are none of; names, shapes and types of those with an allocation of their own; the others."""
    shapes = buffer_shapes(cfg, rows)
    absent = {name: None for name, want in shapes.items() if want is None}
    shared = {name: want for name, want in shapes.items() if want is not None and name not in APART}
    apart = [(name, *want) for name, want in shapes.items() if want is not None and name in APART]
    return absent, apart, Pieces.of({**shared, **dict(beside)})


def _tensors(shapes: Shapes, device: torch.device | str) -> dict[str, torch.Tensor | None]:
    """New tensors of these shapes and types, None where there is none."""
    return {
        name: None if want is None else torch.empty(want[0], dtype=want[1], device=device)
        for name, want in shapes.items()
    }


def room_of(buffers: DispatchBuffers) -> str:
    """Room, types and place of buffers, without reading them."""
    tokens, scales = buffers.tokens, buffers.scales
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in (tokens, scales) if tensor is not None]
    return f"room for {tokens.shape[0]} rows of {tokens.shape[1]} {' with scales in '.join(types)} on {tokens.device}"
