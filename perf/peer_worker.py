"""One rank of one other library: `python -m perf.peer_worker`, started by `perf.peers`.

Rounds are timed as ours are (`cute_ep.timing`): graphs where the library can be captured, behind a gate that all
processes open together; the result of a sample is its slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perf.cases import Shape
from perf.peers import MODULES, NOT_PRESENT

if TYPE_CHECKING:
    import torch

SETS = 4
ROUNDS, LARGE_ROUNDS, LARGE_TOKENS = 8, 4, 1024
"""Rounds of a graph, even: DeepEP's low-latency calls alternate between two buffers."""
SAMPLES, LARGE_SAMPLES = 200, 50


@dataclass
class Inputs:
    """One input set: x [T, hidden], ids and weights [T, K] of this rank, and all ranks' ids [R, T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    all_ids: torch.Tensor


@dataclass
class Work:
    """One format and batch size of a peer. `dispatch` and `combine` take the index of an input set; a combine follows
    a dispatch of the same set. `error` is the largest relative error of a round, where it was looked at."""

    format: str
    tokens: int
    dispatch: Callable[[int], object]
    combine: Callable[[int], object]
    error: float | None = None


@dataclass
class Rank:
    """This process and the problem."""

    rank: int
    world: int
    shape: Shape
    tokens: list[int]

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.shape.num_experts // self.world

    def inputs(self, tokens: int) -> list[Inputs]:
        """SETS input sets of uniform routing; every rank makes all ranks' routing from its seed."""
        import torch

        found = []
        for number in range(SETS):
            every = []
            for rank in range(self.world):
                generator = torch.Generator("cuda").manual_seed(number * self.world + rank)
                scores = torch.rand(tokens, self.shape.num_experts, generator=generator, device="cuda")
                every.append(scores.topk(self.shape.top_k, dim=1).indices)
            x = torch.randn(tokens, self.shape.hidden, dtype=torch.bfloat16, device="cuda")
            weights = torch.randn(tokens, self.shape.top_k, device="cuda").softmax(dim=1)
            found.append(Inputs(x, every[self.rank].contiguous(), weights, torch.stack(every)))
        return found


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error against |wanted|, which counts as at least 0.02."""
    difference = (result.float() - wanted.float()).abs() / wanted.float().abs().clamp(min=0.02)
    return float(difference.max())


def time_works(me: Rank, works: Callable[[Rank], Iterator[Work]], emit: Callable[[dict], None]) -> None:
    """Time all works: first the pairs of all of them, then dispatch and combine alone, which some may not allow."""
    import torch
    import torch.distributed as dist

    from cute_ep.timing import Runner, summary

    host = dist.new_group(backend="gloo")

    def slowest(seconds: list[float]) -> dict:
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=host)
        return summary(times.tolist())

    with Runner([torch.cuda.Stream()], meet=lambda: dist.barrier(host)) as runner:
        for operations in (("pair", "pair_chained"), ("dispatch", "combine")):
            for work in works(me):
                large = work.tokens >= LARGE_TOKENS
                rounds, samples = (LARGE_ROUNDS, LARGE_SAMPLES) if large else (ROUNDS, SAMPLES)

                def one_round(operation: str, index: int, work: Work = work) -> None:
                    if operation != "combine":
                        work.dispatch(index % SETS)
                    if operation != "dispatch":
                        work.combine(index % SETS)

                for index in range(SETS):
                    runner.on_all(lambda lane, index=index: one_round("pair", index))
                for operation in operations:

                    def of_lane(lane: int, index: int, operation: str = operation) -> None:
                        one_round(operation, index)

                    if operation == "pair_chained":
                        seconds = runner.time(samples, of_lane, chained=True)
                    else:
                        seconds = runner.time_graphs(samples, of_lane, rounds)
                    about = {"format": work.format, "tokens": work.tokens, "operation": operation}
                    emit(about | {"error": work.error} | slowest(seconds))
                torch.cuda.synchronize()


def main() -> int:
    """Run one rank; rank 0 appends the results, a JSON object a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        if MODULES.get(args.peer) == "deep_ep":
            from perf.nvshmem import preload

            preload()
        import torch
        import torch.distributed as dist

        works = getattr(importlib.import_module("perf.peer_libraries"), args.peer)
        torch.cuda.set_device(args.rank)
        if args.peer in MODULES:
            importlib.import_module(MODULES[args.peer])
    except (ImportError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return NOT_PRESENT
    here = torch.device("cuda", args.rank)
    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("nccl", init_method=address, rank=args.rank, world_size=args.world, device_id=here)
    hidden, experts, top_k = map(int, args.shape.split("/"))
    me = Rank(args.rank, args.world, Shape(hidden, experts, top_k), [int(word) for word in args.tokens.split(",")])

    def emit(row: dict) -> None:
        if args.rank == 0:
            with args.out.open("a") as file:
                file.write(json.dumps({"peer": args.peer} | row) + "\n")

    time_works(me, works, emit)
    torch.cuda.synchronize()
    dist.barrier()
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # whatever it is, its last line is the reason that the note gives
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the libraries' destructors may wait for ranks that are gone
