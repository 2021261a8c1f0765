"""Sums of a token's rows on one rank, which combine brings home in place of the rows."""

from __future__ import annotations

import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.validate import check_tensor
from cute_ep.layouts.maps.arena import MAX_SLICES, SEGMENT_BYTES
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import CTAS_PER_SM, WARPS
from cute_ep.layouts.maps.local_arguments import SumArgs
from cute_ep.layouts.maps.routing import division_magic
from cute_ep.layouts.maps.variants import SUM_KERNEL
from cute_ep.runtime.driver import launch_on, resident_ctas
from cute_ep.runtime.local_kernels import local_kernel


def sum_rows(
    rows: torch.Tensor, batch: Dispatched, *, sms: int | None = None, library: str | None = None
) -> tuple[torch.Tensor, Dispatched]:
    """Add the rows that each token has on this rank, on the current stream; one kernel, and the host waits for nothing.

    Args:
        rows: [N, hidden] bfloat16 in the order of the batch's rows, contiguous and 16-byte aligned.
        batch: what dispatch returned and what is in its place already; expert-major, without a fused shared expert.
        sms: SMs that the kernel may take; None: all.
        library: folder of compiled kernels to look in first; None: that of the last connection on this device.

    Returns:
        [min(N, R * Tmax), hidden] bfloat16 sums of a token's rows: float32, entries ascending, from +0, rounded once;
        NaN if dispatch had no room for one of them. Rows of no token hold anything. And the batch of which combine
        returns these sums. Its `topk_ids` are the batch's: derive one with those of entries that are the last of their
        token on their rank (`RouteCounts.last_ids`).

    Raises:
        EPInputError: rows have another shape, type or place.
        VariantMissing: the kernel is not in the library.
    """
    device = batch.row_map.device
    check_tensor("rows", rows, shape=(None, None), dtype=torch.bfloat16, device=device, alignment=VECTOR_BYTES)
    if not rows.shape[1] or rows.shape[1] % (VECTOR_BYTES // 2):
        raise EPInputError(f"rows.shape[1] = {rows.shape[1]}: must be a positive multiple of {VECTOR_BYTES // 2}")
    sources, tokens, top_k = batch.row_map.shape
    room = min(len(rows), sources * tokens)
    sums, last_map = rows.new_empty(room, rows.shape[1]), torch.empty_like(batch.row_map)
    if device.type != "cuda":
        reference.sum_rows(rows, batch, sums, last_map, by_token=room < len(rows))
    else:
        ctas = resident_ctas(device.index)
        ctas = ctas if sms is None else min(ctas, CTAS_PER_SM * sms)
        arguments = SumArgs(
            rows=rows.data_ptr(),
            sums=sums.data_ptr(),
            row_map=batch.row_map.data_ptr(),
            last_map=last_map.data_ptr(),
            headers=batch.headers.data_ptr(),
            capacity=len(rows),
            room=room,
            by_token=int(room < len(rows)),
            vectors=rows.shape[1] * rows.itemsize // VECTOR_BYTES,
            sources=sources,
            sources_magic=division_magic(sources),
            max_tokens=tokens,
            top_k=top_k,
            slices_log2=slices_log2(sources * tokens, rows.shape[1] * rows.itemsize, ctas * WARPS),
        )
        kernel = local_kernel(device.index, SUM_KERNEL, None, library)
        launch_on(device.index, kernel, ctas, arguments)
    return sums, batch.derived(row_map=last_map, tokens=sums)


def slices_log2(tokens: int, row_bytes: int, warps: int) -> int:
    """log2 of slices of a row: enough for `warps` warps, unless slices would be shorter than a segment."""
    slices = 1
    while slices < MAX_SLICES and tokens * slices < warps and slices * SEGMENT_BYTES < row_bytes:
        slices *= 2
    return slices.bit_length() - 1
