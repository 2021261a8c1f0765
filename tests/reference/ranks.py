"""What tests of the reference communicator share: small groups, poisoned buffers, exact comparison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS, DispatchBuffers, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.reference.backend import ReferenceCommunicator, connect_reference
from cute_ep.reference.processes import connect_processes
from cute_ep.testing.compare import assert_bits, assert_prefix_and_poison
from cute_ep.testing.verify import POISON, poison
from cute_ep.testing.workloads import RankInputs, make_inputs

FLOAT_POISON = torch.full((4,), POISON, dtype=torch.uint8).view(torch.float32).item()


def poison_all(buffers: DispatchBuffers) -> DispatchBuffers:
    for tensor in tensors_of(buffers).values():
        if tensor is not None:
            poison(tensor)
    return buffers


def poisoned(communicator: ReferenceCommunicator, capacity: int | None = None) -> DispatchBuffers:
    return poison_all(communicator.allocate(capacity))


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == POISON).all())


def expected(cfg: EPConfig, inputs: list[RankInputs], *, weights: bool = True, scales=None) -> list[Dispatched]:
    xs, ids = [one.x for one in inputs], [one.topk_ids for one in inputs]
    return reference.dispatch(cfg, xs, ids, scales, [one.router_weights for one in inputs] if weights else None)


def assert_columns_and_poison(actual: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Transposed scale factors: [words, rows] within [words, capacity]."""
    assert_bits(actual[:, : want.shape[1]], want, name)
    assert is_poison(actual[:, want.shape[1] :]), name


def check_filled(cfg: EPConfig, got: Dispatched, want: Dispatched, name: str) -> None:
    for one in BUFFERS:
        value = getattr(want, one)
        if one == "scales" and cfg.scales_as == "transposed":
            assert_columns_and_poison(got.scales, value, f"{name} scales")
        elif one == "headers":
            assert_bits(without_round(got.headers), without_round(value), f"{name} headers")
        elif value is not None:
            assert_prefix_and_poison(getattr(got, one), value, POISON, f"{name} {one}")
        elif one == "weights":
            assert not got.weights.any()
        else:
            assert getattr(got, one) is None
    assert got.return_slices_log2 == want.return_slices_log2


def without_round(headers: torch.Tensor) -> torch.Tensor:
    """Headers without the number of the dispatch round, which `reference.dispatch` does not know."""
    return headers[:, [word for word in HeaderWord if word != HeaderWord.ROUND]]


def rows_for(batches: list[Dispatched], cfg: EPConfig, seed: int = 0) -> list[torch.Tensor]:
    """Random expert outputs over the whole capacity of each batch."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b.tokens.shape[0], cfg.hidden, generator=generator).bfloat16() for b in batches]


def small(**changes) -> EPConfig:
    values = dict(hidden=32, num_experts=6, top_k=2, max_tokens_per_rank=5, world_size=3, dispatch_format="nvfp4")
    return EPConfig(**(values | changes))


def dispatch_all(cfg: EPConfig, seed: int = 0):
    """(communicators, their Dispatched, the inputs) of one round."""
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [cfg.max_tokens_per_rank] * cfg.world_size, "uniform", seed)
    batches = [
        one.dispatch(given.x, given.topk_ids, given.router_weights)
        for one, given in zip(communicators, inputs, strict=True)
    ]
    return communicators, batches, inputs


def at_once(ranks: Sequence, call: Callable[[int], object]) -> list:
    """What call(rank) returns, or raises, for every rank, each in a thread of its own."""

    def work(rank: int) -> object:
        torch.set_num_threads(1)
        try:
            return call(rank)
        except EPError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@contextmanager
def processes(cfg: EPConfig) -> Iterator[list[ReferenceCommunicator]]:
    """The communicators that the processes of `cfg` would have."""
    ranks = range(cfg.world_size)
    barrier, given = threading.Barrier(cfg.world_size, timeout=30), [None] * cfg.world_size

    def connect(rank: int) -> ReferenceCommunicator:
        def on_all_ranks(
            make: Callable, share: Callable = lambda made: None, undo: Callable | None = None, doing: str = ""
        ) -> tuple:
            made = make()
            given[rank] = share(made)
            barrier.wait()
            shared = list(given)
            barrier.wait()
            return made, shared

        return connect_processes(cfg, rank, on_all_ranks)

    made = at_once(ranks, connect)
    try:
        yield made
    finally:
        for one in made:
            one.close()
