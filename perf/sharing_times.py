"""Whether it costs time how ranks share memory: pairs by each kind of symmetric memory in turns, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m perf.sharing_times --library build/library

us of a dispatch and a combine by graph replay, p50 of the slowest GPU. Each turn connects anew by every kind, in
alternating order, since times depend on where memory lies; shown are the median of the turns, their range, and the
median of the ratios to the last kind, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from cute_ep import connect
from cute_ep.api.config import EPConfig
from cute_ep.bench.machine import environment
from cute_ep.runtime import trial
from cute_ep.runtime.symmetric import Kind
from perf.cases import MAIN
from perf.command_line import at_least_one
from perf.node_times import Pairs, time_graph

TOKENS = (1, 128, 4096)
TURNS = 8


def times(cfg: EPConfig, kinds: list[Kind], turns: int, library: Path | None) -> dict[Kind, list[float]]:
    """us of a pair, by kind and turn."""
    found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns):
        for kind in kinds if turn % 2 else reversed(kinds):
            trial.ON_ONE_MACHINE = (kind,)
            with connect(cfg, library=library) as ep:
                found[kind].append(time_graph(Pairs(ep, cfg.max_tokens_per_rank)))
    return found


def line(tokens: int, found: dict[Kind, list[float]]) -> str:
    """The times of one number of tokens in words."""
    *_, last = found
    words = []
    for kind, one in found.items():
        words.append(f"{kind} {median(one):.2f} ({min(one):.2f} to {max(one):.2f})")
        if kind is not last:
            ratio = median(own / other for own, other in zip(one, found[last], strict=True))
            words[-1] += f", {ratio:.4f} of {last}"
    return f"{tokens} tokens: {'; '.join(words)}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, metavar="DIR", help="folder of compiled kernels")
    parser.add_argument("--format", default="bf16", metavar="F", help="token format (default bf16)")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"turns (default {TURNS})")
    names = [kind.name.lower() for kind in Kind]
    parser.add_argument("--kinds", nargs="+", choices=names, default=["descriptor", "ipc"], help="what is compared")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args()
    at_least_one(parser, turns=args.turns)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    kinds, rows = [Kind[name.upper()] for name in args.kinds], []
    for tokens in TOKENS:
        cfg = EPConfig(MAIN.hidden, MAIN.num_experts, MAIN.top_k, tokens, world, args.format, 20)
        found = times(cfg, kinds, args.turns, args.library)
        rows.append({"tokens": tokens, "us": {kind.name: one for kind, one in found.items()}})
        if rank == 0:
            sys.stdout.write(f"{line(tokens, found)}\n")
            sys.stdout.flush()
    if rank == 0 and args.out:
        devices = [f"cuda:{index}" for index in range(world)]
        made = {"environment": environment(devices, "perf.sharing_times"), "format": args.format, "times": rows}
        args.out.write_text(json.dumps(made, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
