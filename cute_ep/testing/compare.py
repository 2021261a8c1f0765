"""Bit-for-bit comparison of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cute_ep.api.row_tensors import as_bits


def _bits(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return as_bits(tensor.detach().to(device))


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Fail unless type, shape and every bit agree; any devices, compared on that of `actual`. NaNs agree when their
    bits do, +0 is not -0.

    The message has the first differing coordinate, both elements in hex and the number of differing elements.
    """
    __tracebackhide__ = True
    is_a, should_be = ((tensor.dtype, tuple(tensor.shape)) for tensor in (actual, expected))
    if is_a != should_be:
        raise AssertionError(f"{name}: is {is_a[0]} {is_a[1]}, expected {should_be[0]} {should_be[1]}")
    got, want = _bits(actual, actual.device), _bits(expected, actual.device)
    differs = got != want
    count = int(differs.sum())
    if count:
        coordinate = tuple(differs.nonzero()[0].tolist())
        size = expected.element_size()
        unsigned = [int(bits[coordinate]) & (1 << 8 * size) - 1 for bits in (got, want)]
        numbers = [tensor.cpu()[coordinate].item() for tensor in (actual, expected)]
        values = [f"0x{bits:0{2 * size}x} ({number})" for bits, number in zip(unsigned, numbers, strict=True)]
        raise AssertionError(
            f"{name}{list(coordinate)}: is {values[0]}, expected {values[1]}; "
            f"{count} of {differs.numel()} elements differ"
        )


def assert_prefix_and_poison(actual: torch.Tensor, expected: torch.Tensor, poison_byte: int, name: str) -> None:
    """Fail unless the first len(expected) rows of `actual` agree bit for bit with `expected` and every byte
    of its other rows still is `poison_byte`."""
    __tracebackhide__ = True
    rows = expected.shape[0]
    if actual.shape[0] < rows:
        raise AssertionError(f"{name}: has {actual.shape[0]} rows, expected at least {rows}")
    assert_bits(actual[:rows], expected, name)
    rest = _bits(actual[rows:], actual.device)
    rest = rest.clone(memory_format=torch.contiguous_format)  # a size of 1 may have any stride
    rest = (rest.flatten(1) if rest.dim() > 1 else rest[:, None]).view(torch.uint8)
    touched = rest != poison_byte
    if touched.any():
        row, byte = touched.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}[{rows + row}] byte {byte}: is 0x{int(rest[row, byte]):02x}, expected untouched poison "
            f"0x{poison_byte:02x}; {int(touched.any(dim=1).sum())} of the {rest.shape[0]} rows after it "
            "were written"
        )


def assert_untouched_behind(tensors: Mapping[str, torch.Tensor], poison_byte: int) -> None:
    """Fail unless every byte of the memory behind each tensor, up to the end of its allocation, still is `poison_byte`.
    A contiguous tensor that ends with its allocation has nothing behind it. All tensors, by name, are on one device."""
    __tracebackhide__ = True
    behind = {}
    for name, tensor in tensors.items():
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        behind[name] = memory[(tensor.storage_offset() + tensor.numel()) * tensor.element_size() :]
    found = torch.stack([(memory != poison_byte).any() for memory in behind.values()]).tolist()
    for (name, memory), touched in zip(behind.items(), found, strict=True):
        if touched:
            bytes_ = (memory != poison_byte).nonzero()
            byte = int(bytes_[0])
            raise AssertionError(
                f"{name}: byte {byte} behind it is 0x{int(memory[byte]):02x}, expected untouched poison "
                f"0x{poison_byte:02x}; {len(bytes_)} bytes there were written"
            )
