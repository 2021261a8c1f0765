"""Small tensors that share an allocation, each made when it is first asked for.

torch takes microseconds of the host for every tensor, and a dispatch writes a dozen, most of which only kernels read:
these need no more than an address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import align_up
from cute_ep.torch_internals import BelowViews, count_dispatch_modes

WORD = torch.int32
"""Element type of an allocation; what is carved out of it has elements as wide, or of 8 bytes."""
WORD_BYTES = WORD.itemsize
NOTHING: Mapping[str, Any] = MappingProxyType({})


def first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """So many first rows, as if they had been made with the memory: as of `Carving.tensor`."""
    inference = tensor.is_inference()
    if torch.is_inference_mode_enabled() != inference:
        with torch.inference_mode(inference):
            return first_rows(tensor, count)
    with BelowViews():
        return tensor.narrow(0, 0, count)


def only_rows(count: int, device: torch.device) -> torch.Tensor:
    """A tensor with so many rows and no memory for them, for what asks only how many there are. Of a type that no
    payload has, so that no dispatch takes it for memory of rows."""
    if count_dispatch_modes():  # whose tensors others must not be given
        return torch.empty(1, dtype=torch.bool, device=device).expand(count)
    return _only_rows(count, device)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _only_rows(count: int, device: torch.device) -> torch.Tensor:
    return _one(device).expand(count)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> torch.Tensor:
    """Made once: a graph's capture may be what asks for it, and then its memory stays."""
    return torch.empty(1, dtype=torch.bool, device=device)


class Piece(NamedTuple):
    """A row-major tensor of these extents and type, behind so many elements of that type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _strides(row: tuple[int, ...]) -> tuple[int, ...]:
    """Of row-major rows of these extents."""
    return tuple(prod(row[place:]) for place in range(len(row) + 1))


class Pieces(NamedTuple):
    """Pieces of an allocation of so many words, by name, and bytes before each, which are multiples of VECTOR_BYTES."""

    words: int
    begins: dict[str, int]
    by_name: dict[str, Piece]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Pieces:
        """For row-major tensors of these shapes and types, whose elements have 4 or 8 bytes."""
        begins, by_name, end = {}, {}, 0
        for name, (shape, dtype) in shapes.items():
            begins[name] = end
            by_name[name] = Piece(shape, _strides(shape[1:]), end // dtype.itemsize, dtype)
            end += align_up(prod(shape) * dtype.itemsize, VECTOR_BYTES)
        return cls(end // WORD_BYTES, begins, by_name)

    @property
    def nbytes(self) -> int:
        """Of the allocation."""
        return self.words * WORD_BYTES


class Carving:
    """New memory for `pieces`, of undefined content, at `address`. A tensor carved out of it keeps all of it."""

    __slots__ = ("_made", "_memory", "address", "pieces")

    def __init__(self, pieces: Pieces, device: torch.device | str) -> None:
        self.pieces = pieces
        self._memory = torch.empty(pieces.words, dtype=WORD, device=device)
        self.address = self._memory.data_ptr()
        self._made: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.pieces.begins

    def addresses(self) -> dict[str, int]:
        """Where each tensor begins."""
        first = self.address
        return {name: first + begin for name, begin in self.pieces.begins.items()}

    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and behind the last."""
        return self.address, self.address + self.pieces.nbytes

    def addresses_of(self, *names: str) -> list[int]:
        """Where some of them begin."""
        first, begins = self.address, self.pieces.begins
        return [first + begins[name] for name in names]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, always the same one, and as if it had been made with the memory: no view, so torch counts its
        changes apart from those of the others; an inference tensor if the memory was made in inference mode."""
        made = self._made.get(name)
        if made is not None:
            return made
        (made,) = self.new((name,), None)
        return self._made.setdefault(name, made)  # another thread may have been faster

    def new(self, names: Sequence[str], rows: int | None, made: Mapping[str, Any] = NOTHING) -> list[torch.Tensor]:
        """New tensors, as `tensor` makes them, of so many first rows, or of all: of those `made` already, in the
        memory's mode, or carved anew."""
        memory, inference, new = self._memory, self._memory.is_inference(), list[torch.Tensor]()
        if torch.is_inference_mode_enabled() != inference:
            with torch.inference_mode(inference):
                return self.new(names, rows, made)
        with BelowViews():
            for name in names:
                if rows is not None and (whole := made.get(name)) is not None:
                    new.append(whole.narrow(0, 0, rows))
                    continue
                shape, strides, first, dtype = self.pieces.by_name[name]
                own = memory if dtype == WORD else memory.view(dtype)
                new.append(own.as_strided(shape if rows is None else (rows, *shape[1:]), strides, first))
        return new
