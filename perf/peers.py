"""Other libraries on the same shapes, in processes of their own, one per GPU.

python -m perf.peers --out peers.json

Peers of one library share their processes. A library that is not installed is a note. A peer that fails or exceeds its
budget is stopped, is a note beside what it measured before, and costs no other peer its turn. Nothing here imports
torch: DeepEP needs its libraries in a process before torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perf.cases import MAIN, QUICK_TOKENS, Shape

PEER_SMS = {"deepep_normal": 24}
"""SMs of those that take a number of them."""
PEERS = {
    "nccl_ag_rs": "NCCL all-gather of all tokens, reduce-scatter of BF16 rows; no multicast, symmetric memory or "
    "(unlike NCCL's default) registration of buffers in graphs; no expert order, no weighted sum on a rank",
    "nccl_all_to_all": "NCCL all_to_all of a BF16 row per (token, expert), known splits; with gather and weighted "
    "sum as unfused torch operations",
    "deepep_low_latency": "DeepEP V1, low-latency kernels; quantises FP8; rows end as [local expert, slots, hidden]",
    "deepep_normal": f"DeepEP V1, normal kernels, {PEER_SMS['deepep_normal']} SMs, default chunk sizes, worst-case row "
    "count (no host synchronisation); the caller quantises FP8, untimed; rows end in source order; no weighted sum on "
    "a rank",
}
"""What each peer does, for whoever reads its times."""
MODULES = {"deepep_low_latency": "deep_ep", "deepep_normal": "deep_ep"}
CHAINED = "pair_chained"
"""`cute_ep.bench.measure.CHAINED`, without torch."""
PEER_TOKENS = (1, 16, 128, 512, 1024, 4096, 8192)
START_S = 45.0
"""Budget from a process's start to its first peer: imports and NCCL, about 10 s where the files are cached."""
BUDGETS_S = {"nccl_ag_rs": 25.0, "nccl_all_to_all": 45.0, "deepep_low_latency": 30.0, "deepep_normal": 40.0}
"""A peer's time, which ends it. All of them and two starts stay within 160 s."""
DUMP_S, END_S = 1.0, 10.0
"""Time to write stacks into the logs before the processes of an overdue peer are killed, and for the driver to let go
of one that was."""
NOT_PRESENT = 3
"""Exit code of a worker whose library is missing."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PLAIN_GRAPHS = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0"}
"""Captured NCCL operations are kernel nodes only. By default each adds an external event node, with which
cudaGraphLaunch may block, and the capture asks the other ranks about the buffers. Not allowed with it: an operation
outside a graph while a graph's launch is outstanding."""
ENVIRONMENT = NO_MULTICAST | PLAIN_GRAPHS
ENVIRONMENT |= {"NVSHMEM_REMOTE_TRANSPORT": "none", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}
MAX_ERROR = {"bf16": 0.03, "fp8": 0.1}
"""Of a round by format: a few roundings, of which e4m3's is up to 2^-4 of a value."""
ROWS = "rows.jsonl"
VERSIONS = "versions.json"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)', re.MULTILINE)


def place_file(folder: Path, rank: int) -> Path:
    """Where a worker keeps "peer: what it is doing"."""
    return folder / f"rank{rank}.at"


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker_command(
    names: Sequence[str],
    rank: int,
    world: int,
    port: int,
    shape: Shape,
    tokens: Sequence[int],
    folder: Path,
    *,
    module: str = "perf.peer_worker",
    budgets: Mapping[str, float] | None = None,
) -> list[str]:
    """Words of the process of one rank. It ends itself when whoever started it has not."""
    spent = BUDGETS_S if budgets is None else budgets
    limit = START_S + sum(spent[name] for name in names) + 10
    words = [sys.executable, "-m", module, "--peers", ",".join(names), "--limit", str(limit)]
    words += ["--rank", str(rank), "--world", str(world), "--port", str(port), "--folder", str(folder)]
    return [*words, "--shape", shape.text, "--tokens", ",".join(map(str, tokens))]


@dataclass
class Worker:
    """The process of one rank."""

    process: subprocess.Popen
    log: Path
    place: Path

    def at(self) -> tuple[str | None, str]:
        """The peer that it measures (None: it starts) and what it is doing."""
        peer, _, what = self.place.read_text().partition(": ") if self.place.exists() else ("", "", "")
        return peer or None, what

    def messages(self) -> tuple[list[str], list[str]]:
        """Lines of its log that name an error, and all lines; without stacks."""
        text = re.split(r"^.*\(most recent call first\):$", self.log.read_text(errors="replace"), flags=re.M)[0]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return [line for line in lines if "Error" in line or " WARN " in line], lines

    def frames(self) -> list[str]:
        """Where the main thread of a process is that was told to write its stacks: the innermost frame and this
        project's two innermost."""
        stacks = self.log.read_text(errors="replace").split("(most recent call first):\n")[1:]
        found = FRAME.findall(stacks[-1]) if stacks else []
        ours = [frame for frame in found[1:] if Path(frame[0]).parent == Path(__file__).parent]
        return [f"{name} ({Path(file).name}:{line})" for file, line, name in found[:1] + ours[:2]]


def run_workers(
    names: Sequence[str],
    world: int,
    shape: Shape,
    tokens: Sequence[int],
    logs: Path | None = None,
    versions: dict[str, str] | None = None,
    *,
    command: Callable[..., list[str]] | None = None,
    budgets: Mapping[str, float] | None = None,
    checkout: Path | None = None,
) -> tuple[list[dict], list[str], Sequence[str]]:
    """Let one process per GPU measure peers of the same library in turn.

    Args:
        versions: is given those of the libraries that the processes have loaded.
        command: makes the words of a process, with the arguments of `worker_command`, which is the default.
        budgets: as BUDGETS_S, which is the default.
        checkout: whose sources are measured, and measure; None: those in the working directory.

    Returns:
        The rows measured, notes on what did not end well, and the peers whose turn had not come then.
    """
    command, budgets = command or worker_command, BUDGETS_S if budgets is None else budgets
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), free_port()
        workers: list[Worker] = []
        try:
            for rank in range(world):
                words = command(names, rank, world, port, shape, tokens, folder)
                log = folder / f"rank{rank}.log"
                with log.open("w") as file:
                    process = subprocess.Popen(
                        words, stdout=file, stderr=file, cwd=checkout, env=ENVIRONMENT | os.environ
                    )
                workers.append(Worker(process, log, place_file(folder, rank)))
            codes = wait_for_all(workers, budgets)
            if None in codes and not any(codes):
                for worker in workers:
                    worker.process.send_signal(signal.SIGUSR1)
                time.sleep(DUMP_S)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(END_S)
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for worker in workers:
                    shutil.copy(worker.log, logs / f"{names[0]}-{worker.log.name}")
        out, loaded = folder / ROWS, folder / VERSIONS
        if versions is not None and loaded.exists():
            versions |= json.loads(loaded.read_text())
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        peer, what = workers[failed or 0].at()
        if failed is not None:
            errors, lines = workers[failed].messages()
            message = (errors or lines or ["no message"])[-1][:300]
            if codes[failed] == NOT_PRESENT:
                why = f"not present: {message}"
            else:
                why = f"rank {failed} ended with {codes[failed]}{f' at {what}' if what else ''}: {message}"
        elif None in codes:
            count = sum(row["peer"] == peer for row in rows)
            limit = START_S if peer is None else budgets[peer]
            why = f"stopped after {limit:.0f} s with {count} results; {places(workers)}"
        else:
            return rows, [], ()
        if peer is None:
            return rows, [f"{name}: {why}" for name in names], ()
        return rows, [f"{peer}: {why}"], names[list(names).index(peer) + 1 :]


def wait_for_all(workers: Sequence[Worker], budgets: Mapping[str, float]) -> list[int | None]:
    """Exit codes once all have ended, one has failed, or a budget is spent; None for those that still run."""
    peer, end = None, time.monotonic() + START_S
    while True:
        codes = [worker.process.poll() for worker in workers]
        now = workers[0].at()[0]
        if now is not None and now != peer:
            peer, end = now, time.monotonic() + budgets[now]
        if None not in codes or any(codes) or time.monotonic() >= end:
            return codes
        time.sleep(0.1)


def places(workers: Sequence[Worker]) -> str:
    """What ranks were doing, those that did the same together, and an error that one has named."""
    ranks: dict[str, list[str]] = {}
    for rank, worker in enumerate(workers):
        inside = " < ".join(worker.frames())
        text = f"{worker.at()[1] or 'starting'}{f', in {inside}' if inside else ''}"
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank {', '.join(same)}: {text}" for text, same in ranks.items()]
    errors = [error for worker in workers for error in worker.messages()[0]]
    return "; ".join(parts + [error[:200] for error in errors[-1:]])


def caveats(rows: Sequence[dict]) -> list[str]:
    """Notes on results that were not taken as the others, or that are wrong."""
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        own = [row for row in rows if row["peer"] == peer]
        eager = sum(not row["graph"] for row in own if row["operation"] != CHAINED)
        late = sum(not row["ahead"] for row in own)
        found += [f"{peer}: {eager} of {len(own)} results without CUDA graphs, for it cannot be captured"] * (eager > 0)
        found += [f"{peer}: {late} of {len(own)} results with launches that came late"] * (late > 0)
        wrong = sum((row["error"] or 0) > MAX_ERROR[row["format"]] for row in own)
        limits = " or ".join(f"{limit} ({fmt})" for fmt, limit in MAX_ERROR.items())
        found += [f"{peer}: {wrong} of {len(own)} results with a relative error above {limits}"] * (wrong > 0)
    return found


def run_peers(
    gpus: int,
    shape: Shape = MAIN,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
    names: Sequence[str] = tuple(PEERS),
    *,
    save: Callable[[dict], None] = lambda found: None,
    logs: Path | None = None,
) -> dict:
    """Run the named peers one after the other on the first `gpus` GPUs.

    Args:
        gpus, shape, quick, names: what to run; quick: fewer batch sizes.
        say: is told what has been measured.
        save: gets what is returned, also each time that processes have ended.
        logs: folder for the logs of all processes.

    Returns:
        "rows", each with "peer", "format", "tokens", "operation" (dispatch, combine, pair, pair_chained), "graph"
        (whether it was replayed in CUDA graphs), "ahead" (whether all launches were queued before the first sample
        began), "error" (largest relative error of a round with experts that change nothing, or None) and what
        `cute_ep.bench.timing.summary` says, of CHAINED also "host_us", what a thread takes to queue a round; "notes";
        "does", what each peer's times include; and "versions" of the libraries.
    """
    found: dict = {"rows": [], "notes": [], "does": PEERS, "versions": {}}
    libraries: dict[str | None, list[str]] = {}
    for name in names:
        libraries.setdefault(MODULES.get(name), []).append(name)
    for module, left in libraries.items():
        why = None
        if gpus < 2:
            why = f"needs at least 2 GPUs, here are {gpus}"
        elif module is not None and importlib.util.find_spec(module) is None:
            why = f"no module {module}"
        if why is not None:
            notes = [f"{name}: not present: {why}" for name in left]
            found["notes"] += notes
            say("\n".join(notes))
            continue
        turn: Sequence[str] = left
        sizes = QUICK_TOKENS if quick else PEER_TOKENS
        while turn:
            start = time.perf_counter()
            rows, notes, rest = run_workers(turn, gpus, shape, sizes, logs, found["versions"])
            notes += caveats(rows)
            found["rows"] += rows
            found["notes"] += notes
            began = ", ".join(turn[: len(turn) - len(rest)])
            seconds = time.perf_counter() - start
            say("\n".join([f"{began}: {len(rows)} results in {seconds:.1f} s", *notes]))
            save(found)
            turn = rest
    save(found)
    return found


def gpu_count() -> int:
    """GPUs that nvidia-smi lists, 0 without it."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", default=",".join(PEERS), metavar="P[,P]", help="(default all: %(default)s)")
    parser.add_argument("--gpus", type=int, default=gpu_count(), metavar="N", help="(default all: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results (default: standard output)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the processes")
    args = parser.parse_args()
    names = args.peers.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"peers = {', '.join(sorted(unknown))}: must be out of {', '.join(PEERS)}")

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the workers end too

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    def save(found: dict) -> None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    found = run_peers(args.gpus, MAIN, args.quick, say, names, save=save, logs=args.logs)
    if not args.out:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
