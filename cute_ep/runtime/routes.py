"""How many tokens a rank will send where: what the others must know before they can make room."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import ID_TYPES
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.local_arguments import CountArgs
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, count_words, division_magic
from cute_ep.layouts.maps.variants import COUNT_KERNEL
from cute_ep.runtime.arguments import address, ids_record
from cute_ep.runtime.driver import launch_on
from cute_ep.runtime.local_kernels import local_kernel

WORD_BYTES = 4
"""Of int32."""


class Sizes(NamedTuple):
    """Sizes of `RouteCounts`, which are all in one memory.

    Attributes:
        given: tokens, entries of each, experts, ranks.
        words: of `counts`.
        places: by name, extents, strides and where they begin, in words or for `goes` in bytes.
        memory: words of all.
        numbers: what a kernel is told besides addresses, without a mask and with one.
    """

    given: tuple[int, int, int, int]
    words: int
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]
    memory: int
    numbers: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, tokens: int, top_k: int, experts: int, ranks: int) -> Sizes:
        """Of `given`."""
        words, entries = count_words(ranks, experts), tokens * top_k
        goes = align_up(words + 2 * entries, VECTOR_BYTES // WORD_BYTES)
        places = {
            "counts": ((words,), (1,), 0),
            "by_rank": ((ranks,), (1,), 0),
            "by_expert": ((experts,), (1,), ranks),
            "ids": ((tokens, top_k), (top_k, 1), words),
            "last_ids": ((tokens, top_k), (top_k, 1), words + entries),
            "goes": ((tokens, ranks), (ranks, 1), goes * WORD_BYTES),
        }
        given, memory = (tokens, top_k, experts, ranks), goes + -(-tokens * ranks // WORD_BYTES)
        local = -(-experts // ranks)
        first, last = (tokens, top_k, ranks, experts, words), (local, division_magic(local))
        return cls(given, words, places, memory, ((*first, 0, *last), (*first, 1, *last)))


sizes_of = lru_cache(maxsize=1024)(Sizes.of)


class Part:
    """A tensor in the memory of `RouteCounts` that is made when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, routes: RouteCounts | None, owner: type) -> Any:
        if routes is None:
            return self
        made = vars(routes)[self.name] = routes.memory.as_strided(*routes.sizes.places[self.name])
        return made


class RouteCounts:
    """What a rank's expert ids say, on their device. Rank r has experts [r * E / R, (r + 1) * E / R).

    Attributes:
        sizes: of what follows.
        memory: int32: `counts`, and then the others. torch counts changes of them together.
        counts: int32: R tokens by rank, E entries by expert, T, and zeros up to a multiple of 16 bytes.
        by_rank, by_expert: those parts of `counts`.
        ids: [T, K] int32, a copy of the ids; 2^31 - 1 where one does not fit.
        last_ids: the same of entries that are the last of their token on their rank, else -1.
        weights: [T, K] float32, the router weights if they were given; the same tensor if it is of that type.
        sent, words: what `Counting.exchange` is given, of which so many words are the counts.
    """

    counts, by_rank, by_expert, ids, last_ids = Part(), Part(), Part(), Part(), Part()

    def __init__(self, sizes: Sizes, device: torch.device, weights: torch.Tensor | None = None) -> None:
        self.sizes, self.weights = sizes, weights
        self.sent = self.memory = torch.empty(sizes.memory, dtype=torch.int32, device=device)
        self.words = sizes.words

    @property
    def goes(self) -> torch.Tensor:
        """[T, R] bool, whether a token goes to a rank; a new tensor each time."""
        return self.memory.view(torch.bool).as_strided(*self.sizes.places["goes"])


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
    (tokens, top_k), device = topk_ids.shape, topk_ids.device
    sizes = sizes_of(tokens, top_k, num_experts, ranks)
    if not _has_kernel(device, ranks):
        routes = RouteCounts(sizes, device, None if weights is None else weights.float())
        found = reference.count_routes(topk_ids, num_experts, ranks, mask)
        for part, one in zip((routes.counts, routes.goes, routes.ids, routes.last_ids), found, strict=True):
            part.copy_(one)
        return routes
    topk_ids, narrow, wide = topk_ids.contiguous(), None, None
    if weights is not None and weights.dtype == torch.bfloat16:
        narrow, wide = weights.contiguous(), torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    elif weights is not None:
        wide = weights if weights.dtype == torch.float32 else weights.float()
    routes = RouteCounts(sizes, device, wide)
    first, places = routes.memory.data_ptr(), sizes.places
    arguments = CountArgs(
        ids_record(topk_ids),
        first,
        first + places["goes"][2],
        first + places["ids"][2] * WORD_BYTES,
        first + places["last_ids"][2] * WORD_BYTES,
        address(narrow),
        0 if narrow is None else address(wide),
        *sizes.numbers[mask],
    )
    launch_on(device.index, local_kernel(device.index, COUNT_KERNEL, None, library), 1, arguments)
    return routes


def _has_kernel(device: torch.device, ranks: int) -> bool:
    return device.type == "cuda" and ranks <= MAX_RANKS


def _check_weights(weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    if weights.shape != topk_ids.shape or weights.device != topk_ids.device:
        given = f"{tuple(weights.shape)} on {weights.device}"
        raise EPInputError(f"weights: {given}: must be {tuple(topk_ids.shape)} on {topk_ids.device}, as the ids")
    if not weights.is_floating_point():
        raise EPInputError(f"weights.dtype = {weights.dtype}: must be a floating type")
    if weights.requires_grad and torch.is_grad_enabled():
        raise EPInputError("weights.requires_grad = True: must be False, the kernel has no gradient; detach() them")
