"""A pair beside a matmul: how much longer each takes than alone, and what a layer takes, by SM budget.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m perf.beside --library build/library
    PYTHONPATH=where/deepep/is python -m torch.distributed.run ... -m perf.beside --peers deepep_normal

The pair, a BF16 dispatch and partial combine of MAIN, is on a stream of higher priority than the matmul, MATMUL in
BF16, which cuBLAS is told to leave so many SMs (`cublasSetSmCountTarget`). Times are us of CUDA-graph replay, of the
slowest GPU, medians of SAMPLES. Each is measured alone, and *beside* the other, which is then at work all the time.
*layer* is one pair and the matmuls of a layer of so many tokens, begun at once; *apart*, where both have all SMs, is
one after the other. Nothing waits for a row of the other, so *layer* is what no overlap of a layer can beat.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep import connect
from cute_ep.bench.machine import environment
from cute_ep.torch_internals import sleep_on_gpu
from perf.cases import MAIN, Shape
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
"""Of the experts' intermediate rows: a token of k entries takes 6 k hidden LAYER_WIDTH operations."""
SAMPLES, PAIRS, MATMULS = 20, 8, 4
SLEEP_CYCLES = 1_000_000
"""Until all ranks have queued what begins at once."""


class Matmul(NamedTuple):
    """[rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int

    def in_layer(self, tokens: int, shape: Shape = MAIN) -> float:
        """How many of it a rank's grouped matmuls of a layer are, of tokens a rank."""
        operations = 6 * tokens * shape.top_k * shape.hidden * LAYER_WIDTH
        return operations / (2 * self.rows * self.inner * self.columns)


MATMUL = Matmul(8192, 7168, 4096)


class Repeated:
    """A graph of calls on a stream.

    Attributes:
        us: of one call, alone.
    """

    def __init__(self, host: Host, stream: torch.cuda.Stream, calls: int, call: Callable[[int], object]) -> None:
        self.stream, self.calls = stream, calls
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for number in range(SETS):
                call(number)
            torch.cuda.synchronize()
            self.graph.capture_begin(capture_error_mode="thread_local")
            for number in range(calls):
                call(number % SETS)
            self.graph.capture_end()
        self.us = times(host, (self, 1))[0] / calls

    def replays(self, us: float) -> int:
        """How many last so long."""
        return max(1, math.ceil(us / (self.us * self.calls)))


def times(host: Host, *work: tuple[Repeated, int]) -> list[float]:
    """us of so many replays of each, begun at once: of the slowest GPU, the median."""
    samples: list[list[float]] = []
    for _ in range(SAMPLES + 3):
        torch.cuda.synchronize()
        host.highest([0.0])
        spans = []
        for one, replays in work:
            with torch.cuda.stream(one.stream):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                sleep_on_gpu(SLEEP_CYCLES)
                start.record()
                for _ in range(replays):
                    one.graph.replay()
                end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        samples.append(host.highest([start.elapsed_time(end) * 1e3 for start, end in spans]))
    return [median(column) for column in zip(*samples[3:], strict=True)]


def beside(host: Host, one: Repeated, other: Repeated) -> float:
    """us of a call of `one` while `other` is at work, for at least four times as long as it takes alone."""
    return times(host, (one, 1), (other, other.replays(4 * one.us * one.calls)))[0] / one.calls


def layer(host: Host, pair: Repeated, matmul: Repeated, matmuls: float) -> float:
    """us of a pair and so many matmuls, as many pairs as a graph has, begun at once."""
    return max(times(host, (pair, 1), (matmul, _replays(pair, matmul, matmuls)))) / pair.calls


def apart(host: Host, pair: Repeated, matmul: Repeated, matmuls: float) -> float:
    """us of the same one after the other: power or heat may hold up as many matmuls more than one."""
    return sum(times(host, (pair, 1)) + times(host, (matmul, _replays(pair, matmul, matmuls)))) / pair.calls


def _replays(pair: Repeated, matmul: Repeated, matmuls: float) -> int:
    return max(1, round(matmuls * pair.calls / matmul.calls))


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
        torch.cuda.synchronize()


@contextmanager
def deepep_work(me: Rank, tokens: int, sms: int | None, library: Path | None) -> Iterator[Work]:
    """With DeepEP's default chunk sizes."""
    preload()
    from perf.deepep_works import normal_works

    assert sms == NORMAL_SMS
    yield next(normal_works(Rank(me.rank, me.world, me.shape, [tokens])))


def set_matmul_sms(sms: int) -> None:
    """How many SMs cuBLAS takes on this thread and GPU from now on; 0: all."""
    cublas = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '0').split('.')[0]}")
    status = cublas.cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), sms)
    assert status == 0, f"cublasSetSmCountTarget({sms}): {status}"


def measure(
    host: Host, me: Rank, peer: str, tokens: int, budgets: Sequence[int | None], library: Path | None
) -> Iterator[dict]:
    """For each budget a row where the matmul leaves it alone ("left": its SMs), then one where it leaves nothing."""
    open_work = our_work if peer == OURS else deepep_work
    on, above = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    every = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    a = torch.randn(MATMUL.rows, MATMUL.inner, device="cuda").bfloat16()
    b = torch.randn(MATMUL.inner, MATMUL.columns, device="cuda").bfloat16()
    c = torch.empty(MATMUL.rows, MATMUL.columns, dtype=torch.bfloat16, device="cuda")
    for sms in budgets:
        with open_work(me, tokens, sms, library) as work:

            def both(index: int, work: Work = work) -> None:
                work.dispatch(index)
                work.combine(index)

            pair = Repeated(host, above, PAIRS, both)
            for left in dict.fromkeys((sms or 0, 0)):
                with torch.cuda.stream(on):
                    set_matmul_sms(every - left if left else 0)
                matmul = Repeated(host, on, MATMULS, lambda _: torch.mm(a, b, out=c))
                row = {"peer": peer, "tokens": tokens, "sms": sms, "left": left, "matmuls": MATMUL.in_layer(tokens)}
                row |= {"pair_us": pair.us, "matmul_us": matmul.us, "pair_beside_us": beside(host, pair, matmul)}
                row |= {"matmul_beside_us": beside(host, matmul, pair)}
                row |= {"layer_us": layer(host, pair, matmul, row["matmuls"])}
                yield row | ({"apart_us": apart(host, pair, matmul, row["matmuls"])} if sms is None else {})
                del matmul
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
