"""Calls that come again: launched by the compiled launcher, without Python's checks and records.

Python checks what kind of tensors a call is given, never what they hold. So a call of the same kind of tensors as one
before is as right as that one, and its launch differs in the tensors' addresses only. What else a launch depends on is
a key: an object that must be the same one. All other calls are declined, and then checked as ever, so errors come from
Python alone (`launcher.c`).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_ep.api.buffers import DispatchBuffers, buffer_shapes, rows_for
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.carving import Carving, Pieces
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.rounds import PendingCombine, PendingDispatch
from cute_ep.runtime.arguments import WRITTEN
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.launch_cache import LaunchShape, Spans
from cute_ep.runtime.launcher import Calls, make_calls

READ, SEEN, CARVED = "read", "seen", "carved"
"""In place of a parameter: a call reads the tensor, or only its kind matters; or it is the address of memory that
several tensors of new buffers were carved out of."""
SENT = ("input.x", "ids.data", "input.router_weights", "input.global_scale", "input.scales", "input.row_scales")
"""Addresses of what dispatch is given."""
ROWS, CAPACITY = "rows.data", "rows.capacity"
"""Address of experts' outputs, and how many rows of them there are, in which calls of a kind may differ."""
LEFT_BEHIND = ("row_map", "headers", "weights")
"""What dispatch has left for combine."""
LEFT = tuple(f"batch.{name}" for name in LEFT_BEHIND)
"""Its addresses."""
SUMMED = ("ids.data", "sums.router_weights", "sums.epilogue_data", "sums.out")
"""Those of what combine sums with."""
RECEIVED = (*(f"out.{name}" for name in WRITTEN), "scales.data")
"""Those of new buffers."""
INTO = ("out.tokens", "scales.data", "out.row_scales", CARVED)
"""Those of buffers that were carved."""
MAKING = ("dispatch", "dispatch_wait")
"""Operations that make buffers where the caller gives none."""
PIECES_KEPT = 64
"""Of buffers that calls were given."""
SMALL = 256
"""Python has one object for each number up to this one."""

Kind: TypeAlias = tuple[object, ...]
"""Tensors of a call or None, and then its keys."""
Made: TypeAlias = tuple[Any, tuple[torch.Tensor | None, ...]]
"""What a call returns, and the tensors in it whose addresses are parameters."""


class Operation(NamedTuple):
    """How calls of an operation are told from each other.

    Attributes:
        tensors: parameters that are their addresses, or READ, SEEN or CARVED.
        keys: how many objects must be the same, with the two that all calls have.
        given: those of `tensors` that are given by address, besides what always may be.
        room: where `tensors` have the one that has as many rows as ROWS may have; None: there are no such.
    """

    tensors: tuple[str, ...]
    keys: int
    given: tuple[str, ...] = ()
    room: int | None = None

    @property
    def written(self) -> int:
        """Bits of what the kernel writes, but for buffers that it is bound to."""
        return self._bits("sums.out", *INTO)

    @property
    def read(self) -> int:
        """Bits of what the call reads."""
        return (1 << len(self.tensors)) - 1 & ~self.written & ~self._bits(SEEN)

    @property
    def addresses(self) -> int:
        """Bits of what may be given by address: what dispatch has left, and what was carved."""
        return self._bits(*LEFT, CARVED, *self.given)

    @property
    def opened(self) -> int:
        """Bits of what calls of a kind may have more or fewer rows of."""
        return self._bits(ROWS)

    def _bits(self, *parameters: str) -> int:
        return sum(1 << place for place, one in enumerate(self.tensors) if one in parameters)


OPERATIONS = {
    "dispatch": Operation((*SENT, SEEN), 4),
    "dispatch_into": Operation((*SENT, *INTO), 5),
    "send_row": Operation(SENT[:1], 4, SENT[:1]),
    "dispatch_async": Operation(SENT, 4),
    "dispatch_wait": Operation((READ, READ, SEEN), 3),
    "dispatch_wait_into": Operation((READ, READ, *INTO), 4),
    "combine": Operation((ROWS, *LEFT, SEEN, SEEN, SEEN, *SUMMED), 9, room=4),
    "combine_async": Operation((ROWS, *LEFT, SEEN, SEEN, SEEN, READ), 8, room=4),
    "combine_wait": Operation((ROWS, SEEN, *SUMMED), 8, room=1),
}
"""The tensors are those that the functions below return, and then the keys."""


def of_sent(given: DispatchInput) -> Kind:
    """Of `dispatch_async`."""
    return *given[:6], None, given.frame


def of_dispatch(cfg: EPConfig, given: DispatchInput, out: DispatchBuffers | None) -> tuple[str, Kind]:
    """Of `dispatch`, and its operation. Where `out` was carved for the configuration, so that there is nothing to check
    of it, all its addresses are the call's. Otherwise the kernel is bound to it, and its `tokens` may have come to
    require a gradient."""
    if type(out) is DispatchBuffers and (carving := out.memory.carving) is not None and out.memory.cfg is cfg:
        return "dispatch_into", (*given[:6], *_carved(out, carving), given.frame)
    return "dispatch", (*given[:6], _tokens(out), out, given.frame)


def of_received(cfg: EPConfig, pending: PendingDispatch, out: DispatchBuffers | None) -> tuple[str, Kind]:
    """Of `dispatch_wait`, as above."""
    sent = pending.topk_ids, pending.router_weights
    if type(out) is DispatchBuffers and (carving := out.memory.carving) is not None and out.memory.cfg is cfg:
        return "dispatch_wait_into", (*sent, *_carved(out, carving))
    return "dispatch_wait", (*sent, _tokens(out), out)


def _carved(out: DispatchBuffers, carving: Carving) -> Kind:
    """INTO, no key that a weak reference keeps, and what tells where the tensors are."""
    return out.tokens, out.scales, out.row_scales, carving.address, None, carving.pieces


def _tokens(out: DispatchBuffers | None) -> torch.Tensor | None:
    return out.tokens if type(out) is DispatchBuffers else None


def of_combine(rows: torch.Tensor, dispatched: Dispatched, whole: bool, mode: str, options: SumOptions) -> Kind:
    """Of `combine`, of a batch that is whole or was put together from tensors. `tokens` tell how many rows it has."""
    return rows, *_left(dispatched, whole), *_summed(dispatched, mode, options), None if whole else dispatched.rank


def of_returned(rows: torch.Tensor, dispatched: Dispatched, whole: bool, mode: str) -> Kind:
    """Of `combine_async`, as above."""
    read = rows, *_left(dispatched, whole), dispatched.topk_ids
    return *read, None, _word(mode), *_how(dispatched), None if whole else dispatched.rank


def of_summed(pending: PendingCombine, options: SumOptions) -> Kind:
    """Of `combine_wait`."""
    dispatched, mode, rows = pending
    return rows, dispatched.buffers.tokens, *_summed(dispatched, mode, options)


def _left(dispatched: Dispatched, whole: bool) -> Kind:
    """With the tensors that are checked of a batch that is not whole. Makes none that are not there yet."""
    buffers = dispatched.buffers
    if not whole:
        checked = buffers.tokens, buffers.row_offsets, buffers.num_rows
    else:
        checked = buffers.tokens, None, None
        if (carving := buffers.memory.carving) is not None:
            left = carving.addresses_of(*LEFT_BEHIND)
            if "weights" in vars(buffers):  # which others may stand for
                left[-1] = buffers.weights.data_ptr()
            return *left, *checked
    return buffers.row_map, buffers.headers, buffers.weights, *checked


def _summed(dispatched: Dispatched, mode: str, options: SumOptions) -> Kind:
    weights, out, dtype, epilogue_data = options
    if weights is None and mode == "exact":
        weights = dispatched.router_weights
    return dispatched.topk_ids, weights, epilogue_data, out, None, _word(mode), dtype, *_how(dispatched)


def _word(mode: object) -> object:
    """The one object for a mode that is a word: callers may make another one each time."""
    return sys.intern(mode) if type(mode) is str else mode


def _how(dispatched: Dispatched) -> Kind:
    return dispatched.return_slices_log2, dispatched.row_per_entry, dispatched.weighted


def new_like(result: torch.Tensor) -> Callable[[], Made]:
    """Makes outputs of combine like one that must not be kept."""
    shape, dtype, device = result.shape, result.dtype, result.device

    def make() -> Made:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made, (made,)

    return make


class Repeats:
    """The calls of one rank that can be launched again, by operation.

    Args:
        kernels: the rank's, by name.
        reports: `Status.reports`.

    Raises:
        EPError: as `make_calls`.
    """

    def __init__(
        self,
        cfg: EPConfig,
        device: torch.device,
        kernels: Mapping[str, Kernel],
        reports: tuple[int, int, int],
    ) -> None:
        self._cfg, self._device, self._shapes = cfg, device, buffer_shapes(cfg, rows_for(cfg, None))
        self._pieces: dict[int, object] = {}  # by their number
        context = kernels["dispatch"].context
        self.calls: dict[str, Calls] = {
            name: make_calls(context, reports, len(one.tensors), one.written, one.keys, one.addresses, one.opened)
            for name, one in OPERATIONS.items()
        }

    def keep(
        self,
        operation: str,
        kind: Kind,
        kernel: Kernel,
        shape: LaunchShape,
        numbers: tuple[int, ...],
        spans: Spans | None = None,
        result: torch.Tensor | None = None,
    ) -> None:
        """Keep a call that was launched, so that one of the same kind is launched again. Not one into buffers that the
        kernel is not bound to, or with a number that the next call would give as another object; nor the first one into
        buffers that were carved for so many rows, since calls may have other numbers of rows each time.

        Args:
            kind: with all keys.
            numbers: as of `Kernel.launch`.
            spans: where the buffers are that the kernel is bound to.
            result: what combine returned.
        """
        one = OPERATIONS[operation]
        count = len(one.tensors)
        out, *others = kind[count:]
        if (out is not None and spans is None) or any(type(key) is int and key > SMALL for key in others):
            return
        if CARVED in one.tensors and not self._was_carved(others[0]):
            return
        ends = [] if out is None or spans is None else list(chain.from_iterable(zip(*spans, strict=True)))
        make: Callable[[], Made] | None = None
        made: tuple[str, ...] = ()
        if out is None and operation in MAKING:
            make, made = self._new_buffers, RECEIVED
        elif result is not None and kind[one.tensors.index("sums.out")] is None:
            make, made = new_like(result), ("sums.out",)
        parts = [(place, kernel.place(name), 0) for place, name in enumerate((*one.tensors, *made))]
        if one.room is not None:
            room = kind[one.room]
            assert isinstance(room, torch.Tensor)
            parts.append((-1 - one.tensors.index(ROWS), kernel.place(CAPACITY), room.shape[0]))
        extents = [0] * count
        if CARVED in one.tensors:
            place, pieces = one.tensors.index(CARVED), others[0]
            assert isinstance(pieces, Pieces)
            parts += [(place, kernel.place(f"out.{name}"), begin) for name, begin in pieces.begins.items()]
            extents[place] = pieces.nbytes
        parts = [part for part in parts if part[1] >= 0]
        self.calls[operation].add(
            kind[:count],
            kind[count:],
            struct.pack(f"{3 * len(parts)}q", *chain.from_iterable(parts)),
            one.read,
            struct.pack(f"{count}q", *extents),
            kernel.described(numbers, shape.threads),
            shape.ctas,
            shape.pairs,
            bool(shape.grid.pdl),
            struct.pack(f"{len(ends)}q", *ends),
            make,
            len(made),
            shape,
        )

    def _was_carved(self, pieces: object) -> bool:
        """Whether a call before was given buffers of such pieces."""
        known = self._pieces.get(id(pieces)) is pieces
        if not known:
            if len(self._pieces) >= PIECES_KEPT:
                self._pieces.clear()
            self._pieces[id(pieces)] = pieces
        return known

    def _new_buffers(self) -> Made:
        made = DispatchBuffers.of_shapes(self._cfg, self._device, self._shapes)
        own = vars(made)
        return made, tuple([own[name] for name in (*WRITTEN, "scales")])
