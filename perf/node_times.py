"""What several nodes cost beside their exchanges, on the GPUs of one host, each a node.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m perf.node_times --library build/library

In one run, by graph replay, p50 of the slowest GPU, in us: a pair of one node, the pair over nodes, the two exchanges
alone, as the rail makes them and bare: sends and receives of NCCL of the same bytes by as many CTAs, or for
`--transport nvshmem` copies of them to the other GPUs. `own` is the pair less the rail's exchanges.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from cute_ep import connect
from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.bench.machine import environment
from cute_ep.layouts.maps.launch import FREE_SMS
from cute_ep.layouts.maps.mail import Channel
from cute_ep.runtime import driver_calls
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.nccl import exchange
from cute_ep.runtime.rails.nccl_library import NcclLibrary
from cute_ep.testing.workloads import make_rank_inputs
from cute_ep.torch_internals import current_stream, sleep_on_gpu
from perf.cases import MAIN

TOKENS = (1, 16, 128, 4096)
FORMATS = ("bf16", "fp8")
ROUNDS, SAMPLES, SETS = 10, 40, 4


def time_graph(work: Callable[[int], object]) -> float:
    """us of work(0), work(1), ...: p50 over replays of ROUNDS, of the slowest GPU in each."""
    for number in range(SETS):
        work(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(ROUNDS):
            work(number % SETS)
    samples = []
    for _ in range(SAMPLES + 3):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sleep_on_gpu(400_000)  # until all ranks have queued theirs
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        own = torch.tensor([start.elapsed_time(end) * 1e3 / ROUNDS])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        samples.append(float(own))
    return median(samples[3:])


class Pairs:
    """Pairs of a communicator over SETS input sets."""

    def __init__(self, ep: EPCommunicator, tokens: int, frame: int | None = None) -> None:
        self.ep, self.frame = ep, frame
        self.given = [
            {
                name: tensor.to(ep.device)
                for name, tensor in vars(make_rank_inputs(ep.cfg, ep.rank, tokens, "uniform", n)).items()
            }
            for n in range(SETS)
        ]
        self.out = ep.allocate()
        self.home = torch.empty(tokens, ep.cfg.hidden, dtype=torch.bfloat16, device=ep.device)
        self.rows = torch.ones(self.out.tokens.shape[0], ep.cfg.hidden, dtype=torch.bfloat16, device=ep.device)

    def __call__(self, number: int) -> None:
        batch = self.ep.dispatch(**self.given[number], frame=self.frame, out=self.out)
        self.ep.combine(self.rows, batch, mode="partial", out=self.home)

    def time(self) -> float:
        """As of `time_graph`; EPTimeout, EPError: as kernels of the replays report."""
        found = time_graph(self)
        self.ep.synchronize()
        return found


class BareSends:
    """Sends and receives of what a rail exchanges, by a communicator of their own."""

    def __init__(self, mail: RankMail) -> None:
        self.mail, self.library = mail, NcclLibrary.loaded()
        ids = [self.library.unique_id()]
        dist.broadcast_object_list(ids, 0)
        self.communicator = self.library.connect(ids[0], mail.node, mail.cfg.nodes, FREE_SMS)

    def exchange(self, pieces: list[Put]) -> None:
        exchange(self.library, self.communicator, self.mail, pieces, current_stream(self.mail.memory.device.index))


class BareCopies:
    """Copies of what a rail exchanges to memory of the other GPUs, which nobody reads."""

    def __init__(self, mail: RankMail) -> None:
        self.mail = mail
        others = (node for node in range(mail.cfg.nodes) if node != mail.node)
        self.homes = {node: torch.zeros_like(mail.memory, device=f"cuda:{node}") for node in others}
        for there in self.homes.values():
            there[:1].copy_(mail.memory[:1])  # has the GPUs reach each other's memory

    def exchange(self, pieces: list[Put]) -> None:
        stream = current_stream(self.mail.memory.device.index)
        for node, there in self.homes.items():
            for one in pieces:
                source = self.mail.base + one.source + node * one.step
                driver_calls.copy(there.data_ptr() + one.to, source, one.nbytes, stream)


def times(cfg: EPConfig, tokens: int, library: Path | None, transport: str) -> dict[str, float]:
    """What is measured of one configuration, in us."""
    found: dict[str, float] = {}
    with connect(replace(cfg, ranks_per_node=None), library=library) as ep:
        found["one node"] = Pairs(ep, tokens).time()
    with connect(cfg, library=library, transport=transport) as ep:
        assert isinstance(ep, NodesCommunicator)
        found["nodes"] = Pairs(ep, tokens).time()
        mail, frames, sums = ep.mail, ep.mail.frame_puts(tokens, tokens), [ep.mail.sums_put(tokens, 0)]
        bare = BareSends(mail) if transport == "nccl" else BareCopies(mail)
        for name, channel, pieces in (("frames", Channel.FRAMES, frames), ("sums", Channel.SUMS, sums)):
            found[name] = time_graph(lambda _, channel=channel, pieces=pieces: mail.engine.put(mail, channel, pieces))
            found[f"bare {name}"] = time_graph(lambda _, pieces=pieces: bare.exchange(pieces))
        torch.cuda.synchronize()
        dist.barrier()
    found["own"] = found["nodes"] - found["frames"] - found["sums"]
    return found


def one_token(cfg: EPConfig, library: Path | None, transport: str) -> dict[str, float]:
    """A pair of one token with frames of 16, of communicators for 16 and for 4096 tokens."""
    found = {}
    for most in (16, 4096):
        with connect(replace(cfg, max_tokens_per_rank=most), library=library, transport=transport) as ep:
            found[f"one token, frame 16 of {most}"] = Pairs(ep, 1, 16).time()
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, metavar="DIR", help="folder of compiled kernels")
    parser.add_argument("--transport", choices=("nccl", "nvshmem"), default="nccl", help="of the rail (default nccl)")
    parser.add_argument("--commit", metavar="HASH", help="of these sources, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    rows = []
    for fmt in FORMATS:
        for tokens in TOKENS:
            cfg = EPConfig(MAIN.hidden, MAIN.num_experts, MAIN.top_k, tokens, world, fmt, 20, ranks_per_node=1)
            rows.append({"format": fmt, "tokens": tokens} | times(cfg, tokens, args.library, args.transport))
            if rank == 0:
                told = ", ".join(f"{name} {value:.1f}" for name, value in list(rows[-1].items())[2:])
                sys.stdout.write(f"{fmt} {tokens}: {told}; own {rows[-1]['own'] / rows[-1]['one node']:.2f} x\n")
                sys.stdout.flush()
    few = one_token(replace(cfg, dispatch_format="bf16"), args.library, args.transport)
    if rank == 0:
        sys.stdout.write(f"{few}\n")
        if args.out:
            devices = [f"cuda:{index}" for index in range(world)]
            about = environment(devices, f"perf.node_times --transport {args.transport}")
            made = {
                "environment": about | ({"commit": args.commit} if args.commit else {}),
                "times": rows,
                "one token": few,
            }
            args.out.write_text(json.dumps(made, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
