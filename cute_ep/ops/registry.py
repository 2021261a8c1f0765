"""Names of communicators: torch ops take strings, which graphs, guards and caches can hold."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from functools import cache
from itertools import count
from threading import Lock

import torch
from torch import Tensor

from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.torch_internals import keep_address


@cache
def order_of(device: torch.device) -> Tensor:
    """int32 [1] on a device, which all ops of all its communicators say that they write: one tensor, since calls of
    two communicators have an order, too. A compiler keeps what writes a tensor, in its order.

    It stays where it is, so compiled code with CUDA graphs may write it.
    """
    with torch.inference_mode(False):
        order = torch.zeros(1, dtype=torch.int32, device=device)
    keep_address(order)
    return order


class Registered:
    """What ops know of a communicator.

    Attributes:
        order: `order_of` the communicator's device.
        nodes: of the communicator's configuration.
        slices: `return_slices_log2` of the latest dispatch, by its number of tokens, over nodes of rows of all frames.
            A kernel of combine needs it, and no tensor on the host has it.
    """

    def __init__(self, communicator: EPCommunicator) -> None:
        self._communicator = weakref.ref(communicator)
        self.order = order_of(communicator.device)
        self.nodes = communicator.cfg.nodes
        self.slices: dict[int, int] = {}

    @property
    def communicator(self) -> EPCommunicator | None:
        """None once nobody else has it."""
        return self._communicator()


_BY_NAME: dict[str, Registered] = {}
"""Also those whose communicator is gone, until the next `register`, which puts another table in this one's place:
torch.compile iterates over it while it traces, and meanwhile other threads register and the garbage collector runs."""
_NAMES: weakref.WeakKeyDictionary[EPCommunicator, str] = weakref.WeakKeyDictionary()
_NUMBERS: Iterator[int] = count()
_REGISTERING = Lock()
CLOSED = "; one that an adapter's close() has closed serves no backward pass any more"


def register(communicator: EPCommunicator) -> str:
    """The name by which ops find a communicator; the same one each time, in any thread.

    The name is a string, so a module that holds it can be copied, pickled and compiled. It holds no communicator: keep
    the communicator yourself, for as long as ops run. It contains a digest of the configuration, since shapes that a
    compiler cache keeps follow from it; processes that register in the same order give their communicators the same
    names.

    Args:
        communicator: one that has its device to itself. Give each rank a process: where one process has several GPUs,
            a backward pass launches for all of them from threads of torch's, and a rank that CUDA makes wait while it
            loads a kernel may keep the others waiting until they time out.

    Raises:
        EPInputError: it is none, is closed, or shares its device with other ranks of this process. Their results are in
            place only after `synchronize`, which no op can wait for.
    """
    if not isinstance(communicator, EPCommunicator):
        raise EPInputError(f"communicator = {type(communicator).__name__}: must be what connect returned")
    if communicator.closed:
        raise EPInputError(f"communicator = {communicator!r}: must be open")
    if communicator.shares_device:
        raise EPInputError(
            f"communicator = {communicator!r}: must have its device to itself in this process, ops return finished "
            "results; use a process per rank (cute_ep.connect)"
        )
    global _BY_NAME
    with _REGISTERING:
        name = _NAMES.get(communicator)
        if name is None:
            digest = hashlib.sha256(repr((communicator.cfg, communicator.hooks)).encode()).hexdigest()[:12]
            name = f"{next(_NUMBERS)}-{digest}"
            there = {other: one for other, one in _BY_NAME.items() if one.communicator is not None}
            _BY_NAME = {**there, name: Registered(communicator)}
            _NAMES[communicator] = name
    return name


def registered(name: str) -> Registered:
    """What is known of the communicator of a name. EPInputError: there is none."""
    found = _BY_NAME.get(name)
    if found is None:
        raise EPInputError(
            f"comm = {name!r}: must be what cute_ep.ops.register returned for a communicator that lives{CLOSED}"
        )
    return found


def communicator_of(name: str) -> EPCommunicator:
    """The communicator of a name. EPInputError: there is none any more."""
    communicator = registered(name).communicator
    if communicator is None:
        raise EPInputError(
            f"comm = {name!r}: the communicator is gone; keep it for as long as ops use its name{CLOSED}"
        )
    return communicator


def is_open(name: str) -> bool:
    """Whether there is an open communicator of a name."""
    found = _BY_NAME.get(name)
    communicator = None if found is None else found.communicator
    return communicator is not None and not communicator.closed
