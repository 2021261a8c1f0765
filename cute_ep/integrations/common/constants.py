"""Tensors that calls only read, made once, and larger when more is needed: torch takes longer to launch what fills one
than to take a part of it. Not for what a CUDA graph captures, which would fill it when it is replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_ep.torch_internals import count_dispatch_modes


class Constant:
    """The first rows of a tensor that `make` makes, of so many rows on a device. Nobody may write them."""

    def __init__(self, make: Callable[[int, torch.device], torch.Tensor]) -> None:
        self._make = make
        # with smaller ones before: streams that still read them are not known to torch's allocator
        self._made: dict[torch.device, list[torch.Tensor]] = {}

    def first(self, rows: int, device: torch.device) -> torch.Tensor:
        """So many. They share memory with those of other calls, which streams need not wait for."""
        if count_dispatch_modes():  # whose tensors others must not be given
            return self._make(rows, device)
        made = self._made.setdefault(device, [])
        if not made or made[-1].shape[0] < rows:
            with torch.inference_mode(False):
                whole = self._make(1 << max(0, rows - 1).bit_length(), device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            made.append(whole)
        return made[-1][:rows]


ONES = Constant(lambda rows, device: torch.ones(rows, dtype=torch.float32, device=device))
"""[rows] float32."""
