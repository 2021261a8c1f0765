"""Launches of two groups, whose CTAs have an SM each and take all SMs together, are resident together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, product

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.runtime.communicator import Communicator
from cute_ep.tuning.launch_shape import TWIN_CTAS

from .conftest import connected

MOST = LAMPORT_TOKENS + 400
TOKENS = (16, 200, MOST)
"""Too few to fill SMs, Lamport rows by CTAs that fill them, rows that pipelines bring home."""
CALLS = ("dispatch", "dispatch_wait", "combine_partial", "combine_exact")
PAIRS = {"virtual2": ["cuda:0"] * 2, "gpus2": ["cuda:0", "cuda:1"]}
DEADLINE, SOON = 10.0, 5.0
"""Seconds after which a rank gives up, and after which what was launched has ended, if it can start."""
CFG = EPConfig(2048, 48, 6, MOST, 2, timeout_s=DEADLINE)


class Group:
    """Two ranks, each on its stream, and, by the number of tokens, what they have dispatched."""

    def __init__(self, ranks: list[Communicator]) -> None:
        self.ranks, self.given = ranks, {}
        for tokens in TOKENS:
            given = [self._inputs(tokens, one.device) for one in ranks]
            self.synchronize()
            batches = [self._on(rank, self.ranks[rank].dispatch, *given[rank]) for rank in (0, 1)]
            self.synchronize()
            rows = [
                batch.tokens.new_zeros((batch.tokens.shape[0], CFG.hidden), dtype=torch.bfloat16) for batch in batches
            ]
            self.given[tokens] = given, batches, rows
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all that the ranks' GPUs have to do."""
        for one in self.ranks:
            torch.cuda.synchronize(one.device)

    def start(self, rank: int, call: str, tokens: int) -> torch.cuda.Event:
        """The end of a call of one rank, which waits for the other."""
        given, batches, rows = self.given[tokens]
        communicator = self.ranks[rank]
        if call == "dispatch":
            self._on(rank, communicator.dispatch, *given[rank])
        elif call == "dispatch_wait":
            self._on(rank, lambda: communicator.dispatch_wait(communicator.dispatch_async(*given[rank])))
        else:
            mode = call.removeprefix("combine_")
            self._on(rank, communicator.combine, rows[rank], batches[rank], mode=mode)
        return self._on(rank, lambda: torch.cuda.current_stream().record_event())

    def _inputs(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        weights, ids = torch.rand(tokens, CFG.num_experts, device=device).topk(CFG.top_k)
        return torch.randn(tokens, CFG.hidden, device=device).bfloat16(), ids, weights

    def _on(self, rank: int, call: Callable, *arguments: object, **options: object) -> object:
        with torch.cuda.stream(self.ranks[rank].stream):
            return call(*arguments, **options)


def ends_beside(
    waiting: list[Group], first: tuple[str, int], other: Group, call: tuple[str, int], seconds: float
) -> bool:
    """Whether calls of the other group end while a rank of each waiting group waits in its first call for its peer,
    which then comes."""
    waits = [one.start(0, *first) for one in waiting]
    time.sleep(0.002)
    ends = [other.start(rank, *call) for rank in (0, 1)]
    until = time.monotonic() + seconds
    while not all(end.query() for end in ends) and time.monotonic() < until:
        time.sleep(0.0002)
    ended = all(end.query() for end in ends)
    assert not any(end.query() for end in waits)
    for one in waiting:
        one.start(1, *first)
    for rank in chain(*(one.ranks for one in (*waiting, other))):
        rank.synchronize()
    return ended


def sms_of_both(devices: list[str], share: float) -> tuple[int, int]:
    """SMs of a rank of the first group, and of the second group, whose ranks have all that one of the first leaves."""
    have = torch.cuda.get_device_properties(0).multi_processor_count
    first = int(have * share)
    return first, (have - first) // devices.count("cuda:0")


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> list[str]:
    """Devices of two ranks."""
    devices = PAIRS[request.param]
    if len(set(devices)) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    return devices


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("share", [1 / 16, 1 / 5, 1 / 3, 6 / 13])
def test_a_launch_that_waits_leaves_the_other_sms_to_another_group(pair: list[str], share: float, fmt: str) -> None:
    cfg, (few, rest) = replace(CFG, dispatch_format=fmt), sms_of_both(pair, share)
    kinds = list(product(CALLS, TOKENS))
    with connected(cfg, pair, sms=few) as first, connected(cfg, pair, sms=rest) as second:
        assert all(rank.ring_bytes for rank in (*first, *second))
        one, other = Group(first), Group(second)
        late = [calls for calls in product(kinds, kinds) if not ends_beside([one], calls[0], other, calls[1], SOON)]
    assert not late


def test_sms_that_a_launch_has_are_not_free(pair: list[str]) -> None:
    """Without which the test above says nothing: beside a third group a dispatch waits for CTAs that do not start. All
    CTAs have twins, and so fill an SM, and stay until they have received."""
    have, sharing = torch.cuda.get_device_properties(0).multi_processor_count, pair.count("cuda:0")
    few = min(TWIN_CTAS, have // (sharing + 1))
    with ExitStack() as stack:
        sizes = have - sharing * few, 8, few
        one, third, other = (Group(stack.enter_context(connected(CFG, pair, sms=sms))) for sms in sizes)
        try:
            assert not ends_beside([one, third], ("dispatch", MOST), other, ("dispatch", MOST), 0.1)
        except EPTimeout:  # where ranks share a GPU, the one that comes late finds no SM either
            assert len(set(pair)) == 1
