"""Tensors that calls only read, made once, and larger when more is needed: torch takes longer to launch what fills one
than to take a part of it. Not for what a CUDA graph captures, which would fill it when it is replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Constant:
    """The first rows of a tensor that `make` makes, of so many rows on a device. Nobody may write them."""

    def __init__(self, make: Callable[[int, torch.device], torch.Tensor]) -> None:
        self._make = make
        self._made: dict[torch.device, torch.Tensor] = {}

    def first(self, rows: int, device: torch.device) -> torch.Tensor:
        """So many. They share memory with those of other calls, which streams need not wait for."""
        whole = self._made.get(device)
        if whole is None or whole.shape[0] < rows:
            with torch.inference_mode(False):
                whole = self._made[device] = self._make(1 << max(0, rows - 1).bit_length(), device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return whole[:rows]


ONES = Constant(lambda rows, device: torch.ones(rows, dtype=torch.float32, device=device))
"""[rows] float32."""
ONES_COLUMN = Constant(lambda rows, device: torch.ones((rows, 1), dtype=torch.float32, device=device))
"""[rows, 1] float32."""
NUMBERS_COLUMN = Constant(lambda rows, device: torch.arange(rows, dtype=torch.int32, device=device)[:, None])
"""[rows, 1] int32, each row's number."""
