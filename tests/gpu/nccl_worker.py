"""One rank of a group whose other stream runs collectives of NCCL, as NCCL launches them by default, beside calls of
cute_ep: `python -m torch.distributed.run -m tests.gpu.nccl_worker`.

Rank 0 calls cute_ep and later NCCL, on another stream; the other ranks do so the other way round. Where their call is
queued behind their collective, rank 0's call waits for theirs, theirs for rank 0's part of the collective, which needs
SMs beside the waiting call. Where it is not, theirs starts beside their collective, which waits for rank 0's part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPTimeout
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.gpus import FEW_FREE_SMS, sm_budget, sms_beside_nccl
from cute_ep.runtime.launch_cache import LaunchCache
from cute_ep.runtime.process_connection import connect

from .conftest import LIBRARY

TOKENS, HIDDEN, TOP_K = 4096, 7168, 8
"""So many that a call takes all CTAs it may."""
LARGE, SMALL = 32 << 20, 4 << 10
"""Bytes of a rank's part of a collective: NCCL launches clusters for the first, and one CTA for the second."""
WAITS_S = 3.0
"""After which a rank gives up."""
SOON_S = 0.05
"""After which what was launched has started, if it can."""


class Case(NamedTuple):
    """A call beside a collective.

    Attributes:
        call: "dispatch", all of whose CTAs but the senders wait, or "combine", where all do.
        queued: whether the others' call is queued behind their collective.
    """

    call: str
    collective: str
    nbytes: int
    queued: bool


CASES = [
    Case(call, collective, nbytes, queued)
    for call in ("dispatch", "combine")
    for collective, nbytes in (("gather", LARGE), ("scatter", LARGE), ("gather", SMALL), ("reduce", SMALL))
    for queued in (True, False)
]
STOPS = [
    Case("dispatch", "gather", LARGE, queued=True),
    Case("dispatch", "scatter", LARGE, queued=True),
]
"""Where all SMs are taken: a combine's senders then leave SMs when they have sent, before any rank has received."""
STOPS_BESIDE = [Case("combine", "gather", LARGE, queued=True), Case("combine", "scatter", LARGE, queued=True)]
"""Where SMs stay free, but no launch is in clusters."""


class Given:
    """Tensors of this rank, on its GPU."""

    def __init__(self, communicator: Communicator) -> None:
        cfg, device = communicator.cfg, communicator.device
        self.communicator, self.buffers = communicator, communicator.allocate(TOKENS * TOP_K * 2)
        self.x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        self.ids = torch.rand(TOKENS, cfg.num_experts, device=device).topk(TOP_K).indices
        self.weights = torch.rand(TOKENS, TOP_K, device=device)
        self.out = torch.empty_like(self.x)
        self.parts = {nbytes: torch.ones(nbytes // 4, device=device) for nbytes in (LARGE, SMALL)}
        self.wholes = {n: torch.ones(cfg.world_size * len(one), device=device) for n, one in self.parts.items()}

    def prepare(self, call: str) -> Callable[[], object]:
        """Makes a call, before which all others have been made."""

        def dispatch() -> Dispatched:
            return self.communicator.dispatch(self.x, self.ids, self.weights, out=self.buffers)

        if call == "dispatch":
            return dispatch
        batch = dispatch()
        return lambda: self.communicator.combine(batch.tokens, batch, mode="partial", out=self.out)

    def collect(self, collective: str, nbytes: int) -> None:
        """A collective on the current stream. All numbers are 1, before and after."""
        part, whole = self.parts[nbytes], self.wholes[nbytes]
        if collective == "gather":
            dist.all_gather_into_tensor(whole, part)
        elif collective == "scatter":
            dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX)
        else:
            dist.all_reduce(part, dist.ReduceOp.MAX)


@contextmanager
def connected(sms: int | None, *, pairs: bool) -> Iterator[tuple[Communicator, Given]]:
    """This rank's communicator, all of whose modules are loaded. `pairs`: launches may be in clusters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = EPConfig(HIDDEN, 32 * world, TOP_K, TOKENS, world, timeout_s=WAITS_S)
    communicator = connect(cfg, library=LIBRARY, sms=sms)
    assert isinstance(communicator, Communicator)
    if not pairs:
        most, kernels, ring = communicator.max_ctas, communicator._kernels, communicator.ring_bytes
        communicator._cache = LaunchCache(cfg, rank, most, kernels, pairs=False, whole_sms=True, ring_bytes=ring)
    given = Given(communicator)
    for case in CASES:
        given.prepare("combine")()
        given.collect(case.collective, case.nbytes)
    communicator.synchronize()
    torch.cuda.synchronize()
    yield communicator, given
    communicator.close()


def waits_forever(communicator: Communicator, given: Given, case: Case) -> bool:
    """Whether a rank's call ends with EPTimeout; then the communicator is of no use any more."""
    call, other, done = given.prepare(case.call), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()

    def collect() -> None:
        with torch.cuda.stream(other):
            given.collect(case.collective, case.nbytes)
            done.record()

    if dist.get_rank() == 0:
        call()
        time.sleep(SOON_S if case.queued else 3 * SOON_S)
        collect()
    else:
        collect()
        if case.queued:
            torch.cuda.current_stream().wait_event(done)
        else:
            time.sleep(SOON_S)
        call()
    late = torch.zeros(1, device=communicator.device)
    try:
        communicator.synchronize()
    except EPTimeout:
        late.fill_(1)
    torch.cuda.synchronize()
    dist.all_reduce(late)
    assert all(bool((one == 1).all()) for one in (*given.parts.values(), *given.wholes.values()))
    return bool(late)


def main() -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    few = sms_beside_nccl(device)
    most_alone = sm_budget(device, None) - FEW_FREE_SMS - 1  # from which on no launch is in clusters
    for sms in (few, most_alone):
        with connected(sms, pairs=True) as (communicator, given):
            for case in CASES:
                assert not waits_forever(communicator, given, case), (sms, case)
    stops = [(None, case) for case in STOPS]
    if torch.cuda.get_device_capability() == (9, 0):
        stops += [(few, case) for case in STOPS_BESIDE]
    for sms, case in stops:
        with connected(sms, pairs=False) as (communicator, given):
            assert waits_forever(communicator, given, case), f"{case}, {sms} SMs, no clusters: shows nothing"
    sys.stdout.write(f"rank {dist.get_rank()} ok\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
