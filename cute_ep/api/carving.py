"""Small tensors that share an allocation, each made when it is first asked for.

torch takes microseconds of the host for every tensor, and a dispatch writes a dozen, most of which only kernels read:
these need no more than an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import align_up

WORD = torch.int32
"""Element type of an allocation; what is carved out of it has as wide elements."""
WORD_BYTES = WORD.itemsize


class Pieces(NamedTuple):
    """Pieces of an allocation of so many words, by name: bytes before each, at multiples of VECTOR_BYTES; its extents
    and type."""

    words: int
    begins: dict[str, int]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Pieces:
        """For row-major tensors of these shapes and types, whose elements have 4 bytes."""
        begins, end = {}, 0
        for name, (shape, _) in shapes.items():
            begins[name] = end
            end += align_up(prod(shape) * WORD_BYTES, VECTOR_BYTES)
        return cls(end // WORD_BYTES, begins, shapes)

    @property
    def nbytes(self) -> int:
        """Of the allocation."""
        return self.words * WORD_BYTES


class Carving:
    """New memory for `pieces`, of undefined content, at address `first`. A tensor carved out of it keeps all of it."""

    __slots__ = ("_made", "_memory", "first", "pieces")

    def __init__(self, pieces: Pieces, device: torch.device | str) -> None:
        self.pieces = pieces
        self._memory = torch.empty(pieces.words, dtype=WORD, device=device)
        self.first = self._memory.data_ptr()
        self._made: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.pieces.begins

    def addresses(self) -> dict[str, int]:
        """Where each tensor begins."""
        first = self.first
        return {name: first + begin for name, begin in self.pieces.begins.items()}

    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and behind the last."""
        return self.first, self.first + self.pieces.nbytes

    def addresses_of(self, *names: str) -> list[int]:
        """Where some of them begin."""
        first, begins = self.first, self.pieces.begins
        return [first + begins[name] for name in names]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, always the same one, and as if it had been made with the memory: no view, so torch counts its
        changes apart from those of the others; an inference tensor if the memory was made in inference mode."""
        made = self._made.get(name)
        if made is not None:
            return made
        memory, inference = self._memory, self._memory.is_inference()
        if torch.is_inference_mode_enabled() != inference:
            with torch.inference_mode(inference):
                return self.tensor(name)
        shape, dtype = self.pieces.shapes[name]
        if dtype != WORD:
            memory = memory.view(dtype)
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        new = memory.as_strided(shape, strides[::-1], self.pieces.begins[name] // WORD_BYTES).data
        return self._made.setdefault(name, new)  # another thread may have been faster
