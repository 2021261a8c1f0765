"""Calls of one kind: what checks look at is the same in all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

KINDS_KEPT = 1024
"""Kinds of calls that an adapter keeps."""


class Kinds(set[object]):
    """Kinds of calls whose arguments were checked: later ones of a kind need not be. Never one that is None."""

    def add(self, kind: object) -> None:
        if kind is not None:
            if len(self) >= KINDS_KEPT:
                self.clear()
            super().add(kind)

    def once(self, kind: object, check: Callable[..., None], *given: object) -> None:
        """Call check(*given), which raises, unless it was right for this kind before."""
        if kind not in self:
            check(*given)
            self.add(kind)


def kind_of(given: object) -> object:
    """All that `checks.given` looks at in a tensor, or in those of a tuple."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.dtype, given.device
    if isinstance(given, tuple):
        return tuple(map(kind_of, given))
    return type(given)
