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


class Piece(NamedTuple):
    """Where a tensor is: words before it, extents, strides, type."""

    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Pieces(NamedTuple):
    """Pieces of an allocation of so many words, each at a multiple of VECTOR_BYTES; and (name, bytes before it)."""

    words: int
    by_name: dict[str, Piece]
    begins: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Pieces:
        """For row-major tensors of these shapes and types, whose elements have 4 bytes."""
        pieces, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            pieces[name] = Piece(end, shape, stride, dtype)
            end = align_up(end + prod(shape), VECTOR_BYTES // WORD.itemsize)
        return cls(end, pieces, tuple((name, piece.begin * WORD.itemsize) for name, piece in pieces.items()))


class Carving:
    """New memory for `pieces`, of undefined content. A tensor carved out of it keeps all of it."""

    __slots__ = ("_begins", "_first", "_made", "_memory", "_pieces")

    def __init__(self, pieces: Pieces, device: torch.device | str) -> None:
        self._pieces, self._begins = pieces.by_name, pieces.begins
        self._memory = torch.empty(pieces.words, dtype=WORD, device=device)
        self._first = self._memory.data_ptr()
        self._made: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def addresses(self) -> dict[str, int]:
        """Where each tensor begins."""
        first = self._first
        return {name: first + begin for name, begin in self._begins}

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, always the same one; torch counts its changes apart from those of the others."""
        made = self._made.get(name)
        if made is None:
            begin, shape, stride, dtype = self._pieces[name]
            memory = self._memory.data if dtype == WORD else self._memory.view(dtype).data
            made = self._made[name] = memory.as_strided(shape, stride, begin)
        return made
