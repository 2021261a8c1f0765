"""How many tokens a rank will send where: what the others must know before they can make room."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import ID_TYPES
from cute_ep.layouts.maps.local_arguments import CountArgs
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, count_words, division_magic
from cute_ep.layouts.maps.variants import COUNT_KERNEL
from cute_ep.runtime.arguments import address, ids_record
from cute_ep.runtime.driver import launch_on
from cute_ep.runtime.local_kernels import local_kernel


class RouteCounts(NamedTuple):
    """What a rank's expert ids say, on their device. Rank r has experts [r * E / R, (r + 1) * E / R).

    Attributes:
        counts: int32: R tokens by rank, E entries by expert, T, and zeros up to a multiple of 16 bytes.
        by_rank, by_expert: those parts of `counts`.
        goes: [T, R] bool, whether a token goes to a rank.
        ids: [T, K] int32, a copy of the ids; 2^31 - 1 where one does not fit.
        last_ids: the same of entries that are the last of their token on their rank, else -1.
        weights: [T, K] float32, the router weights if they were given; the same tensor if it is of that type.
    """

    counts: torch.Tensor
    by_rank: torch.Tensor
    by_expert: torch.Tensor
    goes: torch.Tensor
    ids: torch.Tensor
    last_ids: torch.Tensor
    weights: torch.Tensor | None = None


def count_routes(
    topk_ids: torch.Tensor,
    num_experts: int,
    ranks: int,
    *,
    weights: torch.Tensor | None = None,
    mask: bool = False,
    library: str | None = None,
) -> RouteCounts:
    """Count tokens by rank and entries by expert, on the current stream; one kernel, of more than MAX_RANKS ranks some
    of torch. The host waits for nothing.

    Args:
        topk_ids: [T, K] int32 or int64 expert ids. Those that are no expert's are not counted.
        num_experts, ranks: E and R. Each rank has the next ceil(E / R) experts, the last ones fewer.
        weights: [T, K] router weights of a floating type, without a gradient; the kernel widens bfloat16 ones.
        mask: whether `ids` are to have -1 in place of what is no expert's id.
        library: folder of compiled kernels to look in first; None: that of the last connection on this device.

    Raises:
        EPInputError: an argument breaks its rule.
        VariantMissing: the kernel is not in the library.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in ID_TYPES:
        given = f"{topk_ids.dtype} of shape {tuple(topk_ids.shape)}"
        raise EPInputError(f"topk_ids: {given}: must be [T, K] of type {' or '.join(map(str, ID_TYPES))}")
    if not (0 < ranks <= MAX_EXPERTS and 0 < num_experts <= MAX_EXPERTS):
        rule = f"in [1, {MAX_EXPERTS}], and ranks = {ranks} in [1, {MAX_EXPERTS}]"
        raise EPInputError(f"num_experts = {num_experts}: must be {rule}")
    if weights is not None:
        _check_weights(weights, topk_ids)
    if topk_ids.device.type != "cuda" or ranks > MAX_RANKS:
        counts, goes, ids, last_ids = reference.count_routes(topk_ids, num_experts, ranks, mask)
        wide = None if weights is None else weights.float()
    else:
        topk_ids = topk_ids.contiguous()
        (tokens, top_k), device = topk_ids.shape, topk_ids.device
        words, entries, local = count_words(ranks, num_experts), tokens * top_k, -(-num_experts // ranks)
        narrow = None
        if weights is None or weights.dtype != torch.bfloat16:
            wide = None if weights is None else weights.float()
        else:
            narrow, wide = weights.contiguous(), torch.empty((tokens, top_k), dtype=torch.float32, device=device)
        memory = torch.empty(words + 2 * entries, dtype=torch.int32, device=device)
        counts = memory.as_strided((words,), (1,), 0)
        ids = memory.as_strided((tokens, top_k), (top_k, 1), words)
        last_ids = memory.as_strided((tokens, top_k), (top_k, 1), words + entries)
        goes = torch.empty((tokens, ranks), dtype=torch.bool, device=device)
        arguments = CountArgs(
            ids=ids_record(topk_ids),
            counts=counts.data_ptr(),
            goes=goes.data_ptr(),
            ids_out=ids.data_ptr(),
            last_ids=last_ids.data_ptr(),
            weights=address(narrow),
            weights_out=0 if narrow is None else address(wide),
            tokens=tokens,
            top_k=top_k,
            ranks=ranks,
            experts=num_experts,
            words=words,
            mask=int(mask),
            local_experts=local,
            local_experts_magic=division_magic(local),
        )
        kernel = local_kernel(device.index, COUNT_KERNEL, None, library)
        launch_on(device.index, kernel, 1, arguments)
    return RouteCounts(counts, counts[:ranks], counts[ranks : ranks + num_experts], goes, ids, last_ids, wide)


def _check_weights(weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    if weights.shape != topk_ids.shape or weights.device != topk_ids.device:
        given = f"{tuple(weights.shape)} on {weights.device}"
        raise EPInputError(f"weights: {given}: must be {tuple(topk_ids.shape)} on {topk_ids.device}, as the ids")
    if not weights.is_floating_point():
        raise EPInputError(f"weights.dtype = {weights.dtype}: must be a floating type")
    if weights.requires_grad and torch.is_grad_enabled():
        raise EPInputError("weights.requires_grad = True: must be False, the kernel has no gradient; detach() them")
