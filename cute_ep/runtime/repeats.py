"""Calls that come again: launched by the compiled launcher, without Python's checks and records.

Python checks what kind of tensors a call is given, never what they hold. So a call of the same kind of tensors as one
before is as right as that one, and its launch differs in the tensors' addresses only. What else a launch depends on is
a key: an object that must be the same one. All other calls are declined, and then checked as ever, so errors come from
Python alone (`launcher.c`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_ep.api.buffers import DispatchBuffers, buffer_shapes, rows_for
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.rounds import PendingCombine, PendingDispatch
from cute_ep.runtime.arguments import WRITTEN
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.launch_cache import LaunchShape, Spans
from cute_ep.runtime.launcher import Calls, make_calls

READ, SEEN = -1, -2  # as in launcher.c
"""Places of tensors whose addresses are no parameters: a call reads them, or only their kind matters."""
SENT = ("input.x", "ids.data", "input.router_weights", "input.global_scale", "input.scales", "input.row_scales")
"""Addresses of what dispatch is given."""
LEFT = ("batch.row_map", "batch.headers", "batch.weights")
"""Those of what dispatch has left for combine."""
SUMMED = ("ids.data", "sums.router_weights", "sums.epilogue_data", "sums.out")
"""Those of what combine sums with."""
RECEIVED = (*(f"out.{name}" for name in WRITTEN), "scales.data")
"""Those of new buffers."""
RECEIVING = ("dispatch", "dispatch_wait")
SMALL = 256
"""Python has one object for each number up to this one."""

Kind: TypeAlias = tuple[object, ...]
"""Tensors of a call or None, and then its keys."""
Made: TypeAlias = tuple[Any, tuple[torch.Tensor | None, ...]]
"""What a call returns, and the tensors in it whose addresses are parameters."""


class Operation(NamedTuple):
    """How calls of an operation are told from each other.

    Attributes:
        tensors: parameters that are their addresses, or READ or SEEN.
        keys: how many objects must be the same, with the two that all calls have.
    """

    tensors: tuple[str | int, ...]
    keys: int

    @property
    def written(self) -> int:
        """Which tensor is combine's output; -1: there is none."""
        return self.tensors.index("sums.out") if "sums.out" in self.tensors else -1

    @property
    def addresses(self) -> int:
        """Bits of what dispatch has left, which may be addresses."""
        return sum(1 << place for place, one in enumerate(self.tensors) if one in LEFT)


OPERATIONS = {
    "dispatch": Operation((*SENT, SEEN), 4),
    "dispatch_async": Operation(SENT, 4),
    "dispatch_wait": Operation((READ, READ, SEEN), 3),
    "combine": Operation(("rows.data", *LEFT, SEEN, SEEN, SEEN, *SUMMED), 9),
    "combine_async": Operation(("rows.data", *LEFT, SEEN, SEEN, SEEN, READ), 8),
    "combine_wait": Operation(("rows.data", SEEN, *SUMMED), 8),
}
"""The tensors are those that the functions below return, and then the keys."""


def of_sent(given: DispatchInput) -> Kind:
    """Of `dispatch_async`."""
    return *given[:6], None, given.frame


def of_dispatch(given: DispatchInput, out: DispatchBuffers | None) -> Kind:
    """Of `dispatch`. The kernel is bound to `out`, whose `tokens` may have come to require a gradient."""
    return *given[:6], _tokens(out), out, given.frame


def of_received(pending: PendingDispatch, out: DispatchBuffers | None) -> Kind:
    """Of `dispatch_wait`."""
    return pending.topk_ids, pending.router_weights, _tokens(out), out


def _tokens(out: DispatchBuffers | None) -> torch.Tensor | None:
    return out.tokens if type(out) is DispatchBuffers else None


def of_combine(rows: torch.Tensor, dispatched: Dispatched, whole: bool, mode: str, options: SumOptions) -> Kind:
    """Of `combine`, of a batch that is whole or was put together from tensors. `tokens` tell how many rows it has."""
    return rows, *_left(dispatched, whole), *_summed(dispatched, mode, options), None if whole else dispatched.rank


def of_returned(rows: torch.Tensor, dispatched: Dispatched, whole: bool, mode: str) -> Kind:
    """Of `combine_async`, as above."""
    read = rows, *_left(dispatched, whole), dispatched.topk_ids
    return *read, None, mode, *_how(dispatched), None if whole else dispatched.rank


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
        if buffers.memory.carving is not None:
            return *buffers.memory.carving.addresses_of("row_map", "headers", "weights"), *checked
    return buffers.row_map, buffers.headers, buffers.weights, *checked


def _summed(dispatched: Dispatched, mode: str, options: SumOptions) -> Kind:
    weights, out, dtype, epilogue_data = options
    if weights is None and mode == "exact":
        weights = dispatched.router_weights
    return dispatched.topk_ids, weights, epilogue_data, out, None, mode, dtype, *_how(dispatched)


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
        context = kernels["dispatch"].context
        self.calls: dict[str, Calls] = {
            name: make_calls(context, reports, len(one.tensors), one.written, one.keys, one.addresses)
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
        kernel is not bound to, or with a number that the next call would give as another object.

        Args:
            kind: with all keys.
            numbers: as of `Kernel.launch`.
            spans: where the buffers are that the kernel is bound to.
            result: what combine returned.
        """
        tensors, written = OPERATIONS[operation].tensors, OPERATIONS[operation].written
        count = len(tensors)
        out, *others = kind[count:]
        if (out is not None and spans is None) or any(type(one) is int and one > SMALL for one in others):
            return
        ends = [] if spans is None else list(chain.from_iterable(zip(*spans, strict=True)))
        make: Callable[[], Made] | None = None
        made: tuple[str, ...] = ()
        if out is None and operation in RECEIVING:
            make, made = self._new_buffers, RECEIVED
        elif result is not None and kind[written] is None:
            make, made = new_like(result), ("sums.out",)
        self.calls[operation].add(
            kind[:count],
            kind[count:],
            tuple([one if isinstance(one, int) else kernel.place(one) for one in tensors]),
            kernel.described(numbers, shape.threads),
            shape.ctas,
            shape.pairs,
            bool(shape.grid.pdl),
            struct.pack(f"{len(ends)}q", *ends),
            make,
            tuple(map(kernel.place, made)),
            shape,
        )

    def _new_buffers(self) -> Made:
        made = DispatchBuffers.of_shapes(self._cfg, self._device, self._shapes)
        own = vars(made)
        return made, tuple([own[name] for name in (*WRITTEN, "scales")])
