"""The faults: what is done, what must be seen, and the processes in which it happens."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from cute_ep.aot.library import source_hash
from cute_ep.api.errors import EPInputError
from cute_ep.bench.machine import environment, parse_devices

from . import fault_calls, fault_interrupts, fault_libraries, fault_ranks
from .record import Bar, check_writable

ROOT = Path(__file__).parents[2]
RANKS = 2
"""Of the group that something happens to."""
LIMIT_S = 60.0
"""A process that takes longer is ended: a fault must never make anything wait forever."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        act: does it in a process; its documentation says what is done and what must be seen.
        gpus: GPUs that it needs; with none it also runs on the reference backend.
        a_process_a_rank: whether each rank is a process of its own, on a GPU of its own; else `act` is given devices.
        killed: whether the last rank is killed.
        alone: whether it must not share a GPU with other faults, because it takes memory or counts on time.
    """

    name: str
    act: Callable[..., str]
    gpus: int = 0
    a_process_a_rank: bool = False
    killed: bool = False
    alone: bool = False

    @property
    def told(self) -> str:
        """What is done and what must be seen."""
        return " ".join((self.act.__doc__ or "").split())


FAULTS = (
    Fault("late", fault_calls.late, gpus=1, alone=True),
    Fault("out-of-memory", fault_calls.out_of_memory, gpus=1, alone=True),
    Fault("never-calls", fault_calls.never_calls),
    Fault("bad-ids", fault_calls.bad_ids),
    Fault("nan-everywhere", fault_calls.nan_everywhere),
    Fault("two-communicators", fault_calls.two_communicators),
    Fault("fork-after-connect", fault_calls.fork_after_connect),
    Fault("interrupts", fault_interrupts.interrupts),
    Fault("damaged-cubin", fault_libraries.damaged_cubin),
    Fault("stale-cubin", fault_libraries.stale_cubin),
    Fault("corrupt-manifest", fault_libraries.corrupt_manifest),
    Fault("rank-late", fault_ranks.late, gpus=2, a_process_a_rank=True, alone=True),
    Fault("rank-out-of-memory", fault_ranks.out_of_memory, gpus=2, a_process_a_rank=True, alone=True),
    Fault("rank-absent", fault_ranks.absent, gpus=2, a_process_a_rank=True),
    Fault("rank-killed-before", fault_ranks.killed_before, gpus=2, a_process_a_rank=True, killed=True),
    Fault("rank-killed-within", fault_ranks.killed_within, gpus=2, a_process_a_rank=True, killed=True),
    Fault("rank-killed-between", fault_ranks.killed_between, gpus=2, a_process_a_rank=True, killed=True),
    Fault("rank-killed-at-work", fault_ranks.killed_at_work, gpus=2, a_process_a_rank=True, killed=True),
)


def act_here(args: argparse.Namespace) -> None:
    """Let one fault happen in this process, and write what was seen. EPInputError: an argument is missing."""
    (fault,) = [fault for fault in FAULTS if fault.name == args.name]
    for name in ("rank", "ranks", "meeting") if fault.a_process_a_rank else ("devices",):
        if getattr(args, name) is None:
            raise EPInputError(f"{name} = None: fault {fault.name} needs --{name}")
    if fault.a_process_a_rank:
        seen = fault_ranks.run_rank(fault.act, args.rank, args.ranks, args.meeting, args.library)
    else:
        seen = fault.act(parse_devices(args.devices), args.library)
    sys.stdout.write(f"{seen}\n")
    sys.stdout.flush()
    if fault.a_process_a_rank:
        os._exit(0)  # process groups, which may have lost a rank, are not waited for


@dataclass(frozen=True)
class Verdict:
    """What became of one fault: "good", "wrong", or "skipped"."""

    fault: Fault
    verdict: str
    seen: str
    seconds: float = 0.0


def run_fault(fault: Fault, library: Path | None, devices: str) -> Verdict:
    """Let it happen in processes of its own, and judge how each ends and what it says.

    Args:
        devices: of the ranks, in faults of one process.
    """
    command = [sys.executable, "-m", "tests.soak", "fault", fault.name]
    command += ["--library", str(library.absolute())] if library else []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        commands = [[*command, "--devices", devices]]
        if fault.a_process_a_rank:
            meeting = ["--ranks", str(RANKS), "--meeting", f"{folder}/meeting", "--rank"]
            commands = [[*command, *meeting, str(rank)] for rank in range(RANKS)]
        outputs = [Path(folder) / f"{number}.txt" for number in range(len(commands))]
        running = []
        for one, output in zip(commands, outputs, strict=True):
            with output.open("w") as file:
                running.append(subprocess.Popen(one, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        codes, lines = [], []
        for process, output in zip(running, outputs, strict=True):
            try:
                codes.append(process.wait(max(0.0, started + LIMIT_S - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
                lines.append(f"did not end within {LIMIT_S:.0f} s")
            lines += output.read_text().splitlines()[-12 if codes[-1] else -1 :]
    wanted = [0] * len(codes)
    if fault.killed:
        wanted[-1] = -signal.SIGKILL
    if codes != wanted:
        lines.append(f"exit codes {codes}, must be {wanted}")
    return Verdict(fault, "good" if codes == wanted else "wrong", "\n".join(lines), time.monotonic() - started)


def run_faults(
    only: Sequence[str] | None, jobs: int, library: Path | None, out: Path, command: str, console: Console
) -> int:
    """The faults that this machine has GPUs for, or some of them; several at a time, but for those that must be alone.

    Returns:
        0, or 1 if a process did not end as it must, or none has run.
    """
    if jobs < 1:
        raise EPInputError(f"jobs = {jobs}: must be positive")
    check_writable(out)
    gpus = torch.cuda.device_count()
    devices = "cpu:2" if not gpus else "virtual:2" if gpus == 1 else "cuda:0,cuda:1"
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    verdicts = [Verdict(one, "skipped", f"needs {one.gpus} GPUs") for one in chosen if one.gpus > gpus]
    possible = [fault for fault in chosen if fault.gpus <= gpus]
    started = time.monotonic()
    with Bar(console, len(possible)) as bar:

        def run(fault: Fault) -> Verdict:
            verdict = run_fault(fault, library, devices)
            bar.step(1, fault.name)
            return verdict

        verdicts += [run(fault) for fault in possible if fault.alone]
        with ThreadPoolExecutor(jobs) as pool:
            verdicts += pool.map(run, [fault for fault in possible if not fault.alone])
    seconds = time.monotonic() - started
    for one in verdicts:
        text = one.seen if one.verdict == "wrong" else one.seen.splitlines()[-1] if one.seen else ""
        line = f"{one.verdict:8}{one.fault.name}: {one.fault.told}"
        console.print(f"{line}\n        {one.seconds:.0f} s, {text}", highlight=False, markup=False, soft_wrap=True)
    wrong = [one.fault.name for one in verdicts if one.verdict == "wrong"]
    content = {
        "environment": environment(sorted(set(parse_devices(devices))), command),
        "source_hash": source_hash(),
        "seconds": round(seconds, 1),
        "faults": [
            {
                "name": one.fault.name,
                "told": one.fault.told,
                "verdict": one.verdict,
                "seen": one.seen,
                "seconds": round(one.seconds, 1),
            }
            for one in verdicts
        ],
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    summary = (
        f"soak: {len(possible)} faults in {seconds:.0f} s, {len(wrong)} wrong, {len(chosen) - len(possible)} skipped"
    )
    console.print(f"{summary}; {out}", highlight=False, markup=False, soft_wrap=True)
    return int(bool(wrong) or not possible)
