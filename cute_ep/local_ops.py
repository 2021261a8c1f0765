"""Kernels that involve one GPU only, as functions on tensors."""

from __future__ import annotations

from functools import cache

import torch

from cute_ep.driver import THREADS, Kernel, architecture
from cute_ep.errors import EPInputError
from cute_ep.layouts.formats import VECTOR_BYTES, format_named
from cute_ep.layouts.variants import COPY_KERNEL, QUANTIZE_KERNEL
from cute_ep.library import Library
from cute_ep.tuning import CTAS_PER_SM
from cute_ep.validate import check_tensor


@cache
def _kernel(device: int, name: str, fmt: str | None, folder: str | None) -> Kernel:
    with torch.cuda.device(device):
        arch = architecture(torch.device("cuda", device))
        return Kernel(Library(folder).find(name, arch, fmt, 0, None))


@cache
def _max_ctas(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * CTAS_PER_SM


def quantize(
    x: torch.Tensor, fmt: str, input_scale: torch.Tensor | None = None, *, library: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows as dispatch does, on the current stream.

    Args:
        x: [T, hidden] bfloat16 on a GPU.
        fmt: name of a format with scales.
        input_scale: float32[1], the global scale G; None: 1.
        library: folder of compiled kernels to look in first.

    Returns:
        payload [T, payload bytes] uint8 and scales [T, scale bytes] uint8, row-major.

    Raises:
        EPInputError: an argument breaks its rule.
        VariantMissing: the kernel is not in the library.
    """
    record = format_named(fmt)
    if not record.scale:
        raise EPInputError(f"fmt = {fmt!r}: has no scales, there is nothing to quantise")
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16, alignment=VECTOR_BYTES)
    tokens, hidden = x.shape
    try:
        record.check_hidden(hidden)
    except ValueError as error:
        raise EPInputError(str(error)) from None
    if input_scale is not None:
        check_tensor("input_scale", input_scale, shape=(1,), dtype=torch.float32, device=x.device)
    payload = torch.empty(tokens, record.payload_bytes(hidden), dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, record.scale_bytes(hidden), dtype=torch.uint8, device=x.device)
    device = x.device.index or 0
    units = max(1, payload.numel() // VECTOR_BYTES)
    arguments = {
        "x": x.data_ptr(),
        "out": payload.data_ptr(),
        "scales": scales.data_ptr(),
        "global_scale": 0 if input_scale is None else input_scale.data_ptr(),
        "tokens": tokens,
        "hidden": hidden,
    }
    kernel = _kernel(device, QUANTIZE_KERNEL, fmt, library)
    with torch.cuda.device(device):
        grid = min(_max_ctas(device), -(-units // THREADS))
        kernel.launch(grid, arguments, torch.cuda.current_stream(device).cuda_stream)
    return payload, scales


def copy_bytes(
    destination: torch.Tensor, source: torch.Tensor, *, ctas: int | None = None, library: str | None = None
) -> None:
    """Copy `source` over `destination` with SM loads and stores, on the current stream of the source's device.

    Args:
        destination, source: contiguous, same number of bytes (a multiple of 16), 16-byte aligned. The destination
            may be on a peer whose access `driver.enable_peer_access` has enabled.
        ctas: CTAs to use; default all that are resident together.

    Raises:
        EPInputError: sizes differ or are no multiple of 16 bytes.
    """
    if source.nbytes != destination.nbytes or source.nbytes % VECTOR_BYTES:
        raise EPInputError(
            f"source.nbytes = {source.nbytes}, destination.nbytes = {destination.nbytes}: must be equal and a "
            f"multiple of {VECTOR_BYTES}"
        )
    for name, tensor in (("source", source), ("destination", destination)):
        if not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            raise EPInputError(f"{name}: must be contiguous and aligned to {VECTOR_BYTES} bytes")
    device = source.device.index or 0
    arguments = {"source": source.data_ptr(), "destination": destination.data_ptr(), "num_bytes": source.nbytes}
    kernel = _kernel(device, COPY_KERNEL, None, library)
    with torch.cuda.device(device):
        kernel.launch(ctas or _max_ctas(device), arguments, torch.cuda.current_stream(device).cuda_stream)
