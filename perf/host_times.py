"""What calls take a thread of the host, by the compiled launcher and by Python in turns, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m perf.host_times --library build/library

us of a round of a dispatch and a combine (`cute_ep.bench.timing.Runner.host_time`) on the slowest rank: a median of the
turns, and their range. Streams are held while rounds are queued, so no GPU is waited for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import cute_ep.ops
from cute_ep import connect
from cute_ep.api.config import EPConfig
from cute_ep.bench.machine import environment
from cute_ep.bench.timing import Runner
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.launches import by_python
from perf.cases import MAIN
from perf.command_line import at_least_one

TOKENS = (1, 16)
FORMATS = ("bf16", "fp8")
TURNS = 6
WAYS = ("compiled", "Python")


def rounds(ep: Communicator, tokens: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name: rounds of one rank, on the current stream."""
    cfg, comm = ep.cfg, cute_ep.ops.register(ep)
    x = torch.randn(tokens, cfg.hidden, device=ep.device).bfloat16()
    weights, ids = torch.rand(tokens, cfg.num_experts, device=ep.device).softmax(dim=1).topk(cfg.top_k)
    out, result = ep.allocate(), torch.empty_like(x)
    rows = torch.zeros(cfg.max_rows, cfg.hidden, dtype=torch.bfloat16, device=ep.device)
    tracked, tracked_rows = x.clone().requires_grad_(), rows.clone().requires_grad_()

    def halves() -> None:
        batch = ep.dispatch_wait(ep.dispatch_async(x, ids, weights), out)
        ep.combine_wait(ep.combine_async(rows, batch, mode="partial"), out=result)

    def into() -> None:
        batch = cute_ep.ops.dispatch_into(x, ids, weights, comm, out)
        cute_ep.ops.combine_into(rows, batch, result, mode="partial")

    def differentiable() -> None:
        cute_ep.ops.combine(tracked_rows, cute_ep.ops.dispatch(tracked, ids, weights, comm), mode="partial")

    found: dict[str, Callable[[], object]] = {
        "pair": lambda: ep.combine(rows, ep.dispatch(x, ids, weights, out=out), mode="partial", out=result),
        "pair, new memory": lambda: ep.combine(rows, ep.dispatch(x, ids, weights), mode="partial"),
        "halves": halves,
        "ops, given memory": into,
        "ops": lambda: cute_ep.ops.combine(rows, cute_ep.ops.dispatch(x, ids, weights, comm), mode="partial"),
    }
    return found if cfg.format.scale else found | {"ops with gradients": differentiable}


def measure(ep: Communicator, tokens: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """us of this rank's thread, by name, way and turn."""
    stream = torch.cuda.Stream()
    if ep._repeats is None:
        raise SystemExit("perf.host_times: cute-ep info says why there is no compiled launcher")
    with torch.cuda.stream(stream), Runner([stream], ep.synchronize) as runner:
        works = rounds(ep, tokens)
        found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in works}
        for turn in range(turns):
            for name, work in works.items():
                for way in WAYS if turn % 2 else reversed(WAYS):
                    with nullcontext() if way == "compiled" else by_python(ep):
                        for _ in range(3):
                            work()
                        found[name][way].append(1e6 * runner.host_time(lambda lane, index, work=work: work()))
    return found


def line(name: str, times: dict[str, list[float]]) -> str:
    """The times of one kind of round in words."""
    words = [f"{way} {median(one):.1f} ({min(one):.1f} to {max(one):.1f})" for way, one in times.items()]
    ratio = median(one / other for one, other in zip(*times.values(), strict=True))
    return f"{name}: {', '.join(words)}, {ratio:.2f}"


def slowest(every: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Of all ranks' times those of the slowest one, turn by turn."""
    return {
        name: {way: [max(turn) for turn in zip(*(one[name][way] for one in every), strict=True)] for way in ways}
        for name, ways in every[0].items()
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, metavar="DIR", help="folder of compiled kernels")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"turns (default {TURNS})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args()
    at_least_one(parser, turns=args.turns)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    rows = []
    for fmt in FORMATS:
        for tokens in TOKENS:
            cfg = EPConfig(MAIN.hidden, MAIN.num_experts, MAIN.top_k, tokens, world, fmt, timeout_s=20)
            every: list = [None] * world
            with connect(cfg, library=args.library) as ep:
                dist.all_gather_object(every, measure(ep, tokens, args.turns))
            found = slowest(every)
            rows.append({"format": fmt, "tokens": tokens, "us": found})
            if rank == 0:
                sys.stdout.write("".join(f"{fmt} {tokens} tokens, {line(*one)}\n" for one in found.items()))
                sys.stdout.flush()
    if rank == 0 and args.out:
        devices = [f"cuda:{index}" for index in range(world)]
        made = {"environment": environment(devices, "perf.host_times"), "times": rows}
        args.out.write_text(json.dumps(made, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
