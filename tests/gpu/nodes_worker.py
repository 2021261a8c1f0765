"""One rank of several nodes: `python -m torch.distributed.run --nproc-per-node N -m tests.gpu.nodes_worker
RANKS_PER_NODE [nccl|tcp|nvshmem]`. With tcp each process is a host of its own to NCCL, which then takes TCP.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPTimeout
from cute_ep.api.interface import EPCommunicator
from cute_ep.runtime.process_connection import connect
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_dispatched, expert_rows, poison, poisoned_buffers
from cute_ep.testing.workloads import ROUTINGS, make_inputs

from .conftest import LIBRARY

MOST = 37
FRAMES = (None, MOST, MOST + 3)
TIMEOUT_S = 3.0
MODES = ["partial", "exact", "unweighted"]
OPTIONS: dict[str, object] = {"library": LIBRARY}
"""Of `connect`."""
SMS_OF_A_STREAM = 48
"""Twice as many, and NCCL's of both channels, fit a GPU together."""
HANGS_S = 120
"""After which a check ends with the stacks of all threads."""


class Round:
    """Inputs of all ranks, what must come of them, and this rank's part on its device."""

    def __init__(self, ep: EPCommunicator, number: int, most: int = MOST) -> None:
        cfg, rank, device = ep.cfg, ep.rank, ep.device
        tokens = [(0, most, 1, 17, 30)[(peer + number) % 5] for peer in range(cfg.world_size)]
        inputs = make_inputs(cfg, tokens, list(ROUTINGS)[number % len(ROUTINGS)], number)
        self.cfg, self.rank, self.frame = cfg, rank, FRAMES[number % len(FRAMES)] if most == MOST else None
        self.columns = [[getattr(one, name).to(device) for one in inputs] for name in ("x", "topk_ids")]
        self.columns.append([one.router_weights.to(device) for one in inputs])
        self.given = dict(zip(("x", "topk_ids", "router_weights"), (one[rank] for one in self.columns), strict=True))
        self.want = reference.dispatch(cfg, self.columns[0], self.columns[1], None, self.columns[2], frame=self.frame)
        rows = expert_rows(self.want, cfg.hidden, number)
        self.rows, weights = rows[rank], self.columns[2]
        self.home = {mode: reference.combine(cfg, rows, self.want, weights, mode)[rank] for mode in MODES}
        self.sums = self.home["partial"]

    def run(self, ep: EPCommunicator, *, split: bool) -> None:
        """Dispatch and combine, fused or in halves, in poisoned memory, compared bit for bit."""
        buffers = poisoned_buffers(ep, int(self.want[self.rank].num_rows))
        if split:
            batch = ep.dispatch_wait(ep.dispatch_async(**self.given, frame=self.frame), buffers)
        else:
            batch = ep.dispatch(**self.given, frame=self.frame, out=buffers)
        ep.synchronize()
        check_dispatched(batch, self.want[self.rank], self.cfg, self.rank)
        for mode, want in self.home.items():
            out = poison(torch.empty_like(want))
            if split:
                ep.combine_wait(ep.combine_async(self.rows, batch, mode), out=out)
            else:
                ep.combine(self.rows, batch, mode=mode, out=out)
            ep.synchronize()
            assert_bits(out, want, f"{mode}, rank {self.rank}")


def config(ranks_per_node: int, **changes: object) -> EPConfig:
    world = dist.get_world_size()
    given = {"hidden": 1152, "num_experts": 6 * world, "top_k": 4, "max_tokens_per_rank": MOST + 11, "timeout_s": 20}
    return EPConfig(**(given | changes), world_size=world, ranks_per_node=ranks_per_node)  # type: ignore[arg-type]


def open_rank(cfg: EPConfig, group: dist.ProcessGroup | None = None, **options: object) -> EPCommunicator:
    given = OPTIONS | options | ({} if cfg.nodes > 1 else {"transport": None})
    return connect(cfg, group, **given)  # type: ignore[arg-type]


def check_rounds(ranks_per_node: int) -> None:
    for fmt in ("bf16", "fp8", "mxfp6_e2m3", "nvfp4_row"):
        with open_rank(config(ranks_per_node, dispatch_format=fmt)) as ep:
            for number in range(6):
                if number == 3 and ep.rank == 0:
                    time.sleep(0.3)
                Round(ep, number).run(ep, split=number % 2 == 1)


def check_unsynchronised(ranks_per_node: int) -> None:
    """Many rounds one after the other, two dispatches and two combines outstanding, the former received on another
    stream; each output is compared on the device."""
    with open_rank(config(ranks_per_node)) as ep:
        rounds = [Round(ep, number) for number in range(6)]
        wrong, other = torch.zeros((), dtype=torch.int64, device=ep.device), torch.cuda.Stream()
        torch.cuda.synchronize()
        for turn in range(60):
            if turn % 11 == ep.rank:
                torch.cuda._sleep(3_000_000)
            some = [rounds[(2 * turn + which) % 6] for which in range(2)]
            sent = [ep.dispatch_async(**one.given, frame=one.frame) for one in some]
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                batches = [ep.dispatch_wait(one) for one in sent]
                del sent
            torch.cuda.current_stream().wait_stream(other)
            back = [ep.combine_async(one.rows, batch) for one, batch in zip(some, batches, strict=True)]
            for one, pending in zip(some, back, strict=True):
                wrong += torch.ne(ep.combine_wait(pending).view(torch.int16), one.sums.view(torch.int16)).sum()
            one = rounds[turn % 6]
            home = ep.combine(one.rows, ep.dispatch(**one.given, frame=one.frame))
            wrong += torch.ne(home.view(torch.int16), one.sums.view(torch.int16)).sum()
        ep.synchronize()
        assert int(wrong) == 0, f"{int(wrong)} elements of sums differ"


class Replayed:
    """A graph of so many pairs of calls, over inputs that are changed in place."""

    def __init__(self, ep: EPCommunicator, calls: int) -> None:
        self.ep, self.rounds = ep, [Round(ep, number) for number in range(calls)]
        for one in self.rounds:  # first use of everything
            one.run(ep, split=False)
        self.buffers = [poisoned_buffers(ep, int(one.want[ep.rank].num_rows)) for one in self.rounds]
        self.modes = ["exact" if number == 1 and "exact" in MODES else "partial" for number in range(calls)]
        self.sums = [one.home[mode] for one, mode in zip(self.rounds, self.modes, strict=True)]
        self.home = [torch.empty_like(one) for one in self.sums]
        self.graph = torch.cuda.CUDAGraph()
        self.batches: list[Dispatched] = []
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for one, buffers, home, mode in zip(self.rounds, self.buffers, self.home, self.modes, strict=True):
                self.batches.append(ep.dispatch(**one.given, frame=one.frame, out=buffers))
                ep.combine(one.rows, self.batches[-1], mode=mode, out=home)

    def check(self, turn: int) -> None:
        """Replay with tokens in another order, and compare with the reference."""
        for one, home in zip(self.rounds, self.home, strict=True):
            for x in one.columns[0]:
                x.copy_(x.flip(0))
            poison(home)
        self.graph.replay()
        self.ep.synchronize()
        for one, buffers, home, sums in zip(self.rounds, self.buffers, self.home, self.sums, strict=True):
            want = reference.dispatch(one.cfg, *one.columns[:2], None, one.columns[2], frame=one.frame)
            used = int(want[one.rank].num_rows)
            assert_bits(buffers.tokens[:used], want[one.rank].tokens, f"rows of turn {turn}")
            assert_bits(home, sums, f"sums of turn {turn}")


def check_graphs(ranks_per_node: int) -> None:
    for calls in (1, 2, 3):
        with open_rank(config(ranks_per_node)) as ep:
            replayed = Replayed(ep, calls)
            for turn in range(10):
                replayed.check(turn)
            for one in replayed.rounds:  # whose tokens are in their first order again
                one.run(ep, split=True)
            replayed.check(10)
            del replayed


def check_two_communicators(ranks_per_node: int) -> None:
    """The one that is closed first leaves the other what both use."""
    with open_rank(config(ranks_per_node)) as ep:
        with open_rank(config(ranks_per_node, dispatch_format="fp8")) as other:
            for number in range(3):
                Round(ep, number).run(ep, split=False)
                Round(other, number).run(other, split=True)
        Round(ep, 3).run(ep, split=True)


def check_streams_in_other_orders(ranks_per_node: int) -> None:
    """A dispatch waits, in its exchange and with all its CTAs, while the sums of another stream are exchanged: the last
    rank gives its part of the sums first, and only then its tokens."""
    cfg = config(ranks_per_node, hidden=7168, max_tokens_per_rank=2048)
    with open_rank(cfg, sms=SMS_OF_A_STREAM) as ep:
        one = Round(ep, 1, most=2048)
        batch = ep.dispatch(**one.given)
        ep.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        last = ep.rank == cfg.world_size - 1

        def dispatch() -> None:
            with torch.cuda.stream(streams[0]):
                ep.dispatch(**one.given)

        def combine() -> torch.Tensor:
            with torch.cuda.stream(streams[1]):
                return ep.combine(one.rows, batch)

        calls: list[Callable] = [combine, dispatch] if last else [dispatch, combine]
        made = []
        for call in calls:
            made.append(call())
            time.sleep(0.2)
        for stream in streams:
            stream.synchronize()
        ep.synchronize()
        assert_bits(made[calls.index(combine)], one.sums, "sums beside a dispatch")


def check_late(ranks_per_node: int) -> None:
    """The last rank does not dispatch: the ranks of its rail name it, others name who waits for it."""
    cfg = config(ranks_per_node, timeout_s=TIMEOUT_S)
    last = cfg.world_size - 1
    ep = open_rank(cfg)
    if ep.rank != last:
        one = Round(ep, 0)
        began = time.monotonic()
        batch = ep.dispatch(**one.given)
        ep.combine(one.rows, batch)  # its exchange, too, must end
        try:
            ep.synchronize()
        except EPTimeout as error:
            of_rail = cfg.place(ep.rank)[0] == cfg.place(last)[0]
            assert not of_rail or (error.missing == (last,) and "FRAME" in str(error)), error
            assert time.monotonic() - began < 3 * TIMEOUT_S, error
        else:
            raise AssertionError("no EPTimeout though a rank was absent")
    dist.barrier()
    ep.close()


def check_ended(ranks_per_node: int, survivors: dist.ProcessGroup) -> None:
    """The last rank's process ends while the others have ten replays queued and the graph alive. They hear of it,
    close, and connect without it; over nodes not by NVSHMEM, which does not end without that rank."""
    cfg = config(ranks_per_node, timeout_s=TIMEOUT_S)
    last = cfg.world_size - 1
    ep = open_rank(cfg)
    replayed = Replayed(ep, 1)
    replayed.check(0)
    dist.barrier()
    if ep.rank == last:
        say()
        os._exit(0)
    began = time.monotonic()
    for _ in range(10):
        replayed.graph.replay()
    try:
        ep.synchronize()
    except EPTimeout as error:
        of_rail = cfg.place(ep.rank)[0] == cfg.place(last)[0]
        assert not of_rail or error.missing == (last,), error
    else:
        raise AssertionError("no EPTimeout though a rank has ended")
    assert time.monotonic() - began < 3 * TIMEOUT_S + 2
    try:
        ep.close()
    except Exception as error:  # it names the rank that has ended
        assert str(last) in str(error), error
    one = EPConfig(1152, 12, 4, MOST + 11, cfg.world_size - 1, timeout_s=20)
    if 12 % one.world_size == 0:
        if "transport" in OPTIONS and one.world_size > 1:
            check_refused(replace(one, ranks_per_node=1), survivors, f"is PE 0 of {cfg.world_size}: must be PE 0 of")
        with open_rank(one, survivors) as again:
            Round(again, 1).run(again, split=False)


def check_refused(cfg: EPConfig, group: dist.ProcessGroup, why: str) -> None:
    try:
        open_rank(cfg, group)
    except EPConfigError as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"connected, though NVSHMEM {why} another number")


def say() -> None:
    sys.stdout.write(f"rank {dist.get_rank()} ok\n")
    sys.stdout.flush()


def take_tcp() -> Path:
    """Have NCCL take sockets; returns its log."""
    log = Path(tempfile.mkdtemp(), "nccl")
    os.environ.update(NCCL_HOSTID=f"host{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P,SHM,GRAPH", NCCL_DEBUG_FILE=str(log))
    return log


def main(ranks_per_node: int, network: str = "nccl") -> None:
    if network == "nvshmem":
        OPTIONS["transport"] = network
        del MODES[1:]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # NCCL's and ours are more streams than 8 queues
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank())
    survivors = dist.new_group(range(dist.get_world_size() - 1))
    log = take_tcp() if network == "tcp" else None
    checks = [check_rounds, check_two_communicators, check_unsynchronised, check_graphs]
    checks += [] if log is not None else [check_streams_in_other_orders, check_late]
    for check in checks:
        began = time.monotonic()
        sys.stdout.write(f"rank {dist.get_rank()}: {check.__name__}\n")
        sys.stdout.flush()
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        check(ranks_per_node)
        dist.barrier()
        if dist.get_rank() == 0:
            sys.stdout.write(f"{check.__name__}: {time.monotonic() - began:.1f} s\n")
    if log is not None:
        assert "via NET/Socket" in log.read_text(), f"{log}: NCCL has not taken TCP"
        say()
        dist.barrier()
    else:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        check_ended(ranks_per_node, survivors)
        say()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # a rank has ended, so nothing collective can follow
