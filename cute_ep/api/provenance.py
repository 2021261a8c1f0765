"""Whose a batch is, and whether its buffers still hold it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep.api.carving import Carving
from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks


class Origin(NamedTuple):
    """A communicator, as its batches and the checks of its calls know it. Batches compare it by identity: equal ones
    are not the same communicator."""

    cfg: EPConfig
    rank: int
    device: torch.device
    hooks: Hooks = NO_HOOKS


class Generation:
    """How many batches were received into some memory: all buffers and batches in it share this."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def __reduce__(self) -> tuple:
        return Generation, ()  # copies of the tensors hold no batch of a communicator


class Memory(NamedTuple):
    """Where the tensors of buffers come from.

    Attributes:
        generation: of the memory.
        cfg: the configuration that this library made all the tensors for; None of buffers that were put together, also
            by `dataclasses.replace`: calls must check them.
        carving: memory of the tensors that are not attributes yet.
    """

    generation: Generation
    cfg: EPConfig | None = None
    carving: Carving | None = None


class Stamp(NamedTuple):
    """A dispatch, as the batch that it has made remembers it. The batch is stale when `number` is not that of its
    buffers' generation: a later dispatch was given them.

    Attributes:
        origin: the communicator's.
        number: `Generation.number` when the batch was received.
        topk_ids, router_weights, frame: of this rank, which the call has checked.
    """

    origin: Origin
    number: int
    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    frame: int | None = None
