"""Which experts the rows of a batch are of, for experts that are told it row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.local_arguments import LabelArgs, MarkArgs
from cute_ep.layouts.maps.variants import LABEL_KERNEL, MARK_KERNEL
from cute_ep.runtime.driver import launch_on, resident_ctas
from cute_ep.runtime.local_kernels import local_kernel


class Labels(NamedTuple):
    """[rows, 1] numbers of experts, and [rows, 1] float32 ones, if these were asked for."""

    experts: torch.Tensor
    ones: torch.Tensor | None


def label_rows(
    batch: Dispatched,
    rows: int,
    groups: range,
    elsewhere: int,
    *,
    dtype: torch.dtype = torch.int32,
    ones: bool = False,
    library: str | None = None,
) -> Labels:
    """The expert of each of a batch's first rows, on the current stream; one kernel, which takes what SMs are free, and
    the host waits for nothing. Ranks that share a GPU must have that stream wait for their communicator's.

    Args:
        batch: what dispatch returned, in expert-major order.
        rows: as many as the batch has room for, or fewer.
        groups: the numbers of the batch's groups, one after the other.
        elsewhere: the number of rows that no token has: padding, and those behind the last.
        dtype: int32 or int64, of the numbers, none of which is negative.
        ones: whether ones are wanted, too.
        library: folder of compiled kernels to look in first; None: that of the last connection on this device.

    Raises:
        VariantMissing: the kernel is not in the library.
    """
    device = batch.buffers.tokens.device
    made = Labels(
        torch.empty((rows, 1), dtype=dtype, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device) if ones else None,
    )
    if not _has_kernel(device):
        reference.label_rows(batch.row_offsets, batch.row_counts, groups, elsewhere, *made)
    elif rows:
        arguments = LabelArgs(
            **batch.buffers.addresses(("row_offsets", "row_counts")),
            experts=made.experts.data_ptr(),
            ones=0 if made.ones is None else made.ones.data_ptr(),
            rows=rows,
            groups=len(groups),
            first=groups.start,
            elsewhere=elsewhere,
            wide=int(dtype == torch.int64),
        )
        _launch(LABEL_KERNEL, device, rows, arguments, library)
    return made


def mark_entries(
    batch: Dispatched, first: int, elsewhere: int, *, weights: bool = False, library: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts of all rank-major rows by their numbers in the whole model, as `label_rows` makes those of others.

    Args:
        batch: what dispatch returned, in rank-major order, with int32 `row_expert_ids`.
        first: the number of this rank's first expert.
        elsewhere: the number in entries that are not of this rank, and in rows that no token has; may be negative.
        weights: whether `row_weights` are wanted, too, with 0 there.

    Returns:
        [capacity, K] int32 numbers; float32 weights, None unless these are wanted.
    """
    tokens, device = batch.buffers.tokens, batch.buffers.tokens.device
    shape = tokens.shape[0], batch.topk_ids.shape[1]
    experts = torch.empty(shape, dtype=torch.int32, device=device)
    given = torch.empty(shape, dtype=torch.float32, device=device) if weights else None
    if not _has_kernel(device):
        found = batch.row_expert_ids
        assert found is not None
        reference.mark_entries(found, batch.row_weights, first, elsewhere, experts, given)
    elif experts.numel():
        arguments = MarkArgs(
            **batch.buffers.addresses(("row_expert_ids", "row_weights")),
            experts=experts.data_ptr(),
            weights=0 if given is None else given.data_ptr(),
            entries=experts.numel(),
            first=first,
            elsewhere=elsewhere,
        )
        _launch(MARK_KERNEL, device, experts.numel(), arguments, library)
    return experts, given


def _launch(name: str, device: torch.device, threads: int, given: LabelArgs | MarkArgs, library: str | None) -> None:
    """With so many threads, as far as CTAs fit the device together."""
    ctas = min(-(-threads // THREADS), resident_ctas(device.index))
    launch_on(device.index, local_kernel(device.index, name, None, library), ctas, given)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"
