"""What a number of SMs can do at best: the rows of a dispatch or a combine, moved by kernels that wait for nobody.

    python -m perf.sm_ceiling --tokens 1024,4096 --sms 8,16,24,32,64,132 [--order rank_major] [--out FILE.json]

`perf.row_moves` says which rows, perf/sm_ceiling.cu how: by loads and stores, or by bulk copies through shared memory.
All ranks start together, in graphs of several rounds as in `cute_ep.bench.measure`; the ceiling is the fastest
kernel's time. Each kernel's bytes are compared once for each operation and number of tokens, its SMs (%smid) after each
time. Sums are XORs: the arithmetic of a combine is not in its ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.types import RowOrder
from cute_ep.bench.machine import environment, parse_devices
from cute_ep.bench.measure import set_generator
from cute_ep.bench.timing import Runner, rounds_per_graph, summary
from cute_ep.bench.traffic import LAUNCHES
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, ROW_ORDERS
from cute_ep.runtime import driver_calls
from cute_ep.runtime.driver import architecture, enable_all_peers, on_device
from cute_ep.runtime.gpus import sm_budget
from cute_ep.testing.workloads import ROUTINGS
from perf.cases import MAIN
from perf.row_buffers import RowBuffers
from perf.runs import reproduce

SOURCE = Path(__file__).with_suffix(".cu")
NVCC = "/usr/local/cuda/bin/nvcc"
"""Where it is when it is not on the path."""
ALONE, ALL_SHARED = 114 << 10, 227 << 10
"""Bytes of shared memory of which two CTAs do not fit an SM, and all that a CTA can have."""
KERNELS = {
    "plain_512_7x2": (512, ALONE),
    "plain_512_4x4": (512, ALONE),
    "plain_1024_4x2": (1024, ALONE),
    "plain_1024_2x4": (1024, ALONE),
    "bulk_1_14336": (32, ALL_SHARED),
    "bulk_4_3584": (128, ALL_SHARED),
    "bulk_4_3584_sums": (128, ALL_SHARED),
    "bulk_8_2048_sums": (256, ALL_SHARED),
}
"""Kernels of SOURCE -> threads of a CTA, its shared memory. Plain: threads, then vectors of a lane and the sources that
it loads at once. Bulk: warps, then bytes of a copy."""
SAMPLES = 20
NOT_TOLD = -1


class NoCompilerError(EPError):
    """There is no nvcc, or it failed."""


def compile_kernels(arch: str, row_bytes: int) -> bytes:
    """The cubin of SOURCE for rows of a size, a multiple of 14336 bytes; NoCompilerError: there is none, and why."""
    found = shutil.which("nvcc") or shutil.which(NVCC)
    if found is None:
        raise NoCompilerError(f"nvcc: neither on the path nor {NVCC}")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "sm_ceiling.cubin")
        words = ["-cubin", f"-arch={arch}", "-std=c++17", f"-DROW_BYTES={row_bytes}", "-o", str(made), str(SOURCE)]
        done = subprocess.run([found, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompilerError(f"nvcc: {(done.stderr or done.stdout).strip()[:300]}")
        return made.read_bytes()


class _Launch(NamedTuple):
    """A kernel of one rank with its arguments: `values` are what `pointers` point to."""

    launcher: driver_calls.Launcher
    threads: int
    values: tuple
    pointers: ctypes.Array


class RowMover:
    """The kernels of SOURCE, loaded to move the rows of some buffers."""

    def __init__(self, library: int, buffers: RowBuffers) -> None:
        """library: of `driver_calls.load`."""
        self._buffers = buffers
        self._tables = [buffers.table(rank) for rank in range(len(buffers.devices))]
        self._sms = [
            torch.full((sm_budget(one, None),), NOT_TOLD, dtype=torch.int32, device=one) for one in buffers.devices
        ]
        ranks = range(len(buffers.devices))
        self._launches = {name: [self._prepare(library, name, rank) for rank in ranks] for name in KERNELS}

    def _prepare(self, library: int, name: str, rank: int) -> _Launch:
        threads, smem_bytes = KERNELS[name]
        with on_device(torch.device(self._buffers.devices[rank])) as context:
            function = driver_calls.function_of(library, name)
            driver_calls.allow_shared_memory(function, smem_bytes)
        table = self._tables[rank]
        values = (
            ctypes.c_uint64(table.data_ptr()),
            ctypes.c_uint32(len(table)),
            ctypes.c_uint64(self._sms[rank].data_ptr()),
        )
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        return _Launch(driver_calls.Launcher(function, context, smem_bytes), threads, values, pointers)

    def launch(self, name: str, rank: int, sms: int) -> None:
        """Queue a rank's rows on its current stream, by one CTA on each of so many SMs."""
        own, stream = self._launches[name][rank], torch.cuda.current_stream(self._buffers.devices[rank])
        arguments = ctypes.addressof(own.pointers)
        own.launcher.launch(sms, own.threads, stream.cuda_stream, arguments, early=False, pairs=False)

    def check_bytes(self, runner: Runner, name: str, sms: int) -> None:
        """Run twice over poisoned memory; EPError where bytes are wrong."""
        self._buffers.poison()
        for _ in range(2):
            runner.on_all(lambda rank: self.launch(name, rank, sms))
        if wrong := self._buffers.wrong_rows():
            raise EPError(f"{name}: {wrong} wrong rows")

    def check_sms(self, name: str, sms: int) -> None:
        """EPError where a rank's last launch was not on so many SMs."""
        for rank, told in enumerate(self._sms):
            found = told[told != NOT_TOLD].unique().numel()
            if found != sms:
                raise EPError(f"{name}: rank {rank} ran on {found} SMs, not {sms}")
            told.fill_(NOT_TOLD)

    def time(self, runner: Runner, name: str, sms: int, rounds: int, samples: int = SAMPLES) -> float:
        """Median of a round on the slowest rank in microseconds, with the SMs checked."""
        spans = runner.time_graphs(samples, lambda rank, index: self.launch(name, rank, sms), rounds)
        self.check_sms(name, sms)
        return summary(spans)["p50_us"]


@contextmanager
def loaded_kernels(device: str, row_bytes: int) -> Iterator[int]:
    """The compiled kernels as a library of the driver's."""
    image = compile_kernels(architecture(torch.device(device)), row_bytes)
    with on_device(torch.device(device)):
        library = driver_calls.load(image)
    try:
        yield library
    finally:
        driver_calls.unload(library)


def uniform_ids(cfg: EPConfig, devices: Sequence[str], tokens: int) -> torch.Tensor:
    """[R, T, K] experts on the CPU: those of the first input set of `cute_ep.bench.measure.make_sets`."""
    found = []
    for rank, device in enumerate(devices):
        with torch.device(device):
            found.append(ROUTINGS["uniform"](cfg, tokens, set_generator(device, rank, 0)).cpu())
    return torch.stack(found)


def ranks_on_a_gpu(devices: Sequence[str]) -> int:
    """Most ranks that share a GPU; their SMs must be different ones, so that all ranks work at once."""
    return max(devices.count(device) for device in devices)


def measure_sm_ceilings(
    devices: Sequence[str],
    operations: Sequence[str],
    tokens: Sequence[int],
    budgets: Sequence[int],
    say: Callable[[str], None],
    order: RowOrder = EXPERT_MAJOR,
) -> list[dict]:
    """For each operation of LAUNCHES, number of BF16 tokens of the main shape and number of SMs: "p50_us" of the
    fastest kernel, and which that is, "kernel". Rows are in this order; in rank-major order rows come home as partial
    sums.

    Raises:
        NoCompilerError: the kernels cannot be compiled here.
        EPConfigError: a GPU has fewer SMs than its ranks take.
        EPError: bytes or SMs are wrong.
    """
    for sms in budgets:
        sm_budget(devices[0], sms * ranks_on_a_gpu(devices))
    enable_all_peers(map(torch.device, dict.fromkeys(devices)))
    results = []
    with (
        loaded_kernels(devices[0], MAIN.hidden * COMBINE_ITEMSIZE) as library,
        Runner([torch.cuda.Stream(device) for device in devices]) as runner,
    ):
        for operation in operations:
            for count in tokens:
                cfg = replace(MAIN.config("bf16", len(devices), count), row_order=order)
                buffers = RowBuffers(cfg, devices, uniform_ids(cfg, devices, count), operation)
                mover = RowMover(library, buffers)
                about = {"operation": operation, "format": "bf16", "tokens": count}
                for name in KERNELS:
                    mover.check_bytes(runner, name, budgets[0])
                    mover.check_sms(name, budgets[0])
                for sms in budgets:
                    times = {name: mover.time(runner, name, sms, rounds_per_graph(count)) for name in KERNELS}
                    best = min(times, key=lambda name: times[name])
                    results.append(about | {"sms": sms, "p50_us": times[best], "kernel": best})
                    every = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
                    say(f"{operation}, {count} tokens, {sms} SMs: {every} us")
                del mover, buffers
                torch.cuda.empty_cache()
    return results


def main() -> None:
    """Run from the command line."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[1024, 4096], metavar="N[,N]", help="tokens of a rank")
    parser.add_argument("--sms", type=numbers, default=[8, 16, 24, 32, 64], metavar="N[,N]", help="SMs of a rank")
    parser.add_argument("--order", choices=ROW_ORDERS, default=EXPERT_MAJOR, help="of rows")
    parser.add_argument("--devices", default="auto", metavar="LIST", help="as for cute-ep bench")
    parser.add_argument("--commit", metavar="HASH", help="of these sources, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args()
    devices = parse_devices(args.devices, MAIN.num_experts)
    machine = environment(devices, reproduce("perf.sm_ceiling", sys.argv[1:]))
    machine["commit"] = args.commit or machine["commit"]
    operations = [one for one in LAUNCHES if args.order == EXPERT_MAJOR or one != "combine_exact"]

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201

    found = measure_sm_ceilings(devices, operations, args.tokens, args.sms, say, args.order)
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": machine, "sm_ceilings": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
