"""Whose a batch is, and whether its buffers still hold it."""

from __future__ import annotations

import torch


class Origin:
    """Whose a batch is: each communicator has one of these, which is compared by identity."""

    __slots__ = ("rank",)

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Use:
    """How often tensors of `DispatchBuffers` were received into. It goes with `row_offsets`: the buffers, and all
    batches in the same tensors, share it."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn = 0

    def __reduce__(self) -> tuple:
        return Use, ()  # copies of the tensors hold no batch of a communicator

    @staticmethod
    def of(row_offsets: torch.Tensor) -> Use:
        """That of the buffers with these offsets."""
        use = getattr(row_offsets, "_cute_ep_use", None)
        if use is None:
            use = row_offsets._cute_ep_use = Use()
        return use

    def begin(self) -> None:
        """A batch is about to be received: those before are gone."""
        self.turn += 1
