"""A pair beside a matmul: how much longer each takes than alone, and what a layer takes, by SM budget; also DeepEP's.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m perf.beside --library build/library
    PYTHONPATH=where/deepep/is python -m torch.distributed.run ... -m perf.beside --peers deepep_normal

The pair is a BF16 dispatch and partial combine of MAIN, the matmul MATMUL. *layer* is one pair and the matmuls of a
layer of so many tokens, begun at once; *apart*, where both have all SMs, is one after the other.
`cute_ep.bench.beside` says how times are taken. `cute-ep tune --beside` finds a budget for another matmul.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from cute_ep import connect
from cute_ep.bench.beside import Beside, Matmul
from cute_ep.bench.machine import environment
from perf.cases import MAIN
from perf.cells import markdown
from perf.command_line import budgets_of
from perf.nvshmem import preload
from perf.peer_list import NORMAL_SMS
from perf.peer_timing import SETS, Host, Rank, Work
from perf.peer_worker import run
from perf.runs import reproduce

COLUMNS = "peer tokens sms left pair_us matmul_us pair_beside_us matmul_beside_us layer_us apart_us".split()
OURS = "cute_ep"
PEERS = (OURS, "deepep_normal")
TOKENS, SMS = "1024,4096", "4,8,12,16,24,32,64,all"
LAYER_WIDTH = 2048
"""Of the experts' intermediate rows."""
MATMUL = Matmul(8192, 7168, 4096)


@contextmanager
def our_work(me: Rank, tokens: int, sms: int | None, library: Path | None) -> Iterator[Work]:
    """Buffers have the default size."""
    inputs = me.inputs(tokens)
    with connect(me.shape.config("bf16", me.world, tokens), sms=sms, library=library) as ep:
        out, home = ep.allocate(), torch.empty_like(inputs[0].x)
        rows = torch.ones(out.tokens.shape[0], me.shape.hidden, dtype=torch.bfloat16, device=ep.device)
        batches: list = [None] * SETS

        def dispatch(index: int) -> None:
            one = inputs[index]
            batches[index] = ep.dispatch(one.x, one.ids, one.weights, out=out)

        yield Work("bf16", tokens, dispatch, lambda index: ep.combine(rows, batches[index], mode="partial", out=home))
        ep.synchronize()


@contextmanager
def deepep_work(me: Rank, tokens: int, sms: int | None, library: Path | None) -> Iterator[Work]:
    """With DeepEP's default chunk sizes."""
    preload()
    from perf.deepep_works import normal_works

    assert sms == NORMAL_SMS
    yield next(normal_works(Rank(me.rank, me.world, me.shape, [tokens])))


def measure(
    host: Host, me: Rank, peer: str, tokens: int, budgets: Sequence[int | None], library: Path | None
) -> Iterator[dict]:
    """For each budget a row where the matmul leaves it alone ("left": its SMs), then one where it leaves nothing."""
    open_work = our_work if peer == OURS else deepep_work
    matmuls = MATMUL.in_layer(tokens, me.shape.top_k, me.shape.hidden, LAYER_WIDTH)
    streams = Beside(host.highest, MATMUL, matmuls)
    for sms in budgets:
        with open_work(me, tokens, sms, library) as work:

            def both(number: int, work: Work = work) -> None:
                work.dispatch(number % SETS)
                work.combine(number % SETS)

            pair = streams.pair(both)
            for left in dict.fromkeys((sms or 0, 0)):
                row = {"peer": peer, "tokens": tokens, "sms": sms, "left": left, "matmuls": matmuls}
                yield row | streams.measure(pair, left, in_turn=sms is None)
            del pair


def markdown_rows(rows: Sequence[dict]) -> str:
    """A table."""

    def cell(value: object) -> str:
        return "all" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)

    return markdown(COLUMNS, [[cell(row.get(name, "")) for name in COLUMNS] for row in rows])


def main() -> int:
    """Run from the command line, a process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--library", type=Path, metavar="DIR", help="folder of compiled kernels to look in first")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[OURS])
    parser.add_argument("--tokens", default=TOKENS, help="a rank (default: %(default)s)")
    parser.add_argument("--sms", default=SMS, help="budgets of ours (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the rows, as JSON")
    args = parser.parse_args()
    budgets = budgets_of(parser, args.sms)
    tokens = [int(word) for word in args.tokens.split(",")]
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank())
    me, host = Rank(dist.get_rank(), dist.get_world_size(), MAIN, tokens), Host()
    rows: list[dict] = []
    for count in tokens:
        for peer in args.peers:
            for row in measure(host, me, peer, count, budgets if peer == OURS else [NORMAL_SMS], args.library):
                rows.append(row)
                if me.rank == 0:
                    sys.stderr.write(f"{row}\n")
    if me.rank == 0:
        sys.stdout.write(markdown_rows(rows))
        if args.out:
            devices = [f"cuda:{rank}" for rank in range(me.world)]
            made = {"machine": environment(devices, reproduce("perf.beside", sys.argv[1:])), "rows": rows}
            args.out.write_text(json.dumps(made, indent=1) + "\n")
    host.highest([0.0])
    return 0


if __name__ == "__main__":
    run(main)
