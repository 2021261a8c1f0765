"""Other libraries on the same shapes, in processes of their own, one a GPU.

python -m perf.peers --out peers.json

A library that is not installed is a note. One that fails or does not end in time is stopped, and is a note beside what
it measured before. Nothing here imports torch: DeepEP needs its libraries in a process before torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.cases import MAIN, QUICK_TOKENS, TOKENS, Shape

PEERS = {
    "nccl_ag_rs": "NCCL all-gather of all tokens and reduce-scatter of BF16 rows, no multicast; the gather into expert "
    "order and the weighted sum of a token's experts on a rank are not included",
    "nccl_all_to_all": "NCCL all_to_all of one BF16 row a (token, expert), splits known beforehand; gather before and "
    "weighted sum after are included",
    "deepep_low_latency": "DeepEP low-latency kernels; FP8 is quantised in the kernel; rows end as "
    "[local expert, slots, hidden], not in expert order without gaps",
    "deepep_normal": "DeepEP normal kernels on 24 SMs, worst-case row count (so that no host synchronisation is "
    "needed); FP8 is quantised by the caller and not timed; rows end in source order, not in expert order",
}
"""What each peer does, for whoever reads its times."""
MODULES = {"deepep_low_latency": "deep_ep", "deepep_normal": "deep_ep"}
NOT_PRESENT = 3
"""Exit code of a worker whose library is missing."""
TIMEOUT_S, QUICK_TIMEOUT_S = 120.0, 60.0
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ENVIRONMENT = NO_MULTICAST | {"NVSHMEM_REMOTE_TRANSPORT": "none", "OMP_NUM_THREADS": "4"}


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker_command(peer: str, rank: int, world: int, port: int, shape: Shape, tokens: Sequence[int], out: Path):
    """Words of the process of one rank."""
    words = [sys.executable, "-m", "perf.peer_worker", "--peer", peer, "--rank", str(rank), "--world", str(world)]
    words += ["--port", str(port), "--out", str(out), "--tokens", ",".join(map(str, tokens))]
    return [*words, "--shape", shape.text]


def run_peer(
    peer: str, world: int, shape: Shape, tokens: Sequence[int], timeout_s: float
) -> tuple[list[dict], str | None]:
    """Rows that one peer has measured, and a note when it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "rows.jsonl", free_port()
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        processes: list[subprocess.Popen] = []
        try:
            for rank, log in enumerate(logs):
                command = worker_command(peer, rank, world, port, shape, tokens, out)
                with log.open("w") as file:
                    processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT | os.environ))
            codes = wait_for_all(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        failed = [rank for rank, code in enumerate(codes) if code]
        if NOT_PRESENT in codes:
            return rows, f"{peer}: not present: {last_line(logs[codes.index(NOT_PRESENT)])}"
        if failed:
            return rows, f"{peer}: rank {failed[0]} ended with {codes[failed[0]]}: {last_line(logs[failed[0]])}"
        return rows, f"{peer}: stopped after {timeout_s:.0f} s with {len(rows)} results" if None in codes else None


def wait_for_all(processes: Sequence[subprocess.Popen], timeout_s: float) -> list[int | None]:
    """Exit codes once all have ended, one has failed, or time is up; None for those that still run."""
    end = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() >= end:
            return codes
        time.sleep(0.1)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, cut to a length that a note can hold."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no message"])[-1][:300]


def run_peers(
    gpus: int,
    shape: Shape = MAIN,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
    names: Sequence[str] = tuple(PEERS),
) -> dict:
    """Run the named peers one after the other on the first `gpus` GPUs.

    Returns:
        "rows", each with "peer", "format", "tokens", "operation" (dispatch, combine, pair, pair_chained), "error"
        (largest relative error of a round with experts that change nothing, or None) and what
        `cute_ep.timing.summary` says; "notes"; and "does", what each peer's times include.
    """
    rows: list[dict] = []
    notes: list[str] = []
    for name in names:
        why = None
        if gpus < 2:
            why = f"needs at least 2 GPUs, here are {gpus}"
        elif name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            why = f"no module {MODULES[name]}"
        if why is not None:
            notes.append(f"{name}: not present: {why}")
            say(notes[-1])
            continue
        start = time.perf_counter()
        sizes, limit = (QUICK_TOKENS, QUICK_TIMEOUT_S) if quick else (TOKENS, TIMEOUT_S)
        found, note = run_peer(name, gpus, shape, sizes, limit)
        rows += found
        notes += [note] if note else []
        say(f"{name}: {len(found)} results in {time.perf_counter() - start:.1f} s{f'; {note}' if note else ''}")
    return {"rows": rows, "notes": notes, "does": PEERS}


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
    args = parser.parse_args()
    names = args.peers.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"peers = {', '.join(sorted(unknown))}: must be out of {', '.join(PEERS)}")
    found = run_peers(args.gpus, MAIN, args.quick, lambda text: print(text, file=sys.stderr), names)  # noqa: T201
    text = json.dumps(found, indent=1) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
