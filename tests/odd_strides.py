"""Tensors whose dimensions of one element have any strides: torch calls them contiguous, so calls take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

STRIDES = (0, 7, 1 << 40)


def with_stride(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """The same memory, with another stride in a dimension of one element."""
    assert tensor.shape[dim] == 1 and tensor.is_contiguous()
    strides = list(tensor.stride())
    strides[dim] = stride
    odd = tensor.as_strided(tensor.shape, strides)
    assert odd.is_contiguous() and odd.data_ptr() == tensor.data_ptr()
    return odd


def odd_ones(tensors: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, int, int]]:
    """(name, dimension, stride) of every tensor with a dimension of one element, and each stride that it may have."""
    for name, tensor in tensors.items():
        if tensor is not None:
            for dim in (dim for dim, extent in enumerate(tensor.shape) if extent == 1):
                yield from ((name, dim, stride) for stride in STRIDES)
