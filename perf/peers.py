"""Other libraries on the same shapes, in processes of their own, one per GPU.

python -m perf.peers --out peers.json

Peers of one library share their processes. A peer that is not installed, fails or exceeds its budget is a note beside
what it measured before, "failed: message", and costs no other peer its turn. Nothing here imports torch: DeepEP needs
its libraries in a process before torch.

Libraries that exclude each other, or bring an NCCL of their own, are in folders of `--packages DIR`. `--wheels` prints
how to make them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from perf.cases import MAIN, PEER_TOKENS, QUICK_TOKENS, Shape
from perf.command_line import words_of
from perf.peer_list import CHAINED, ENVIRONMENT, PEERS
from perf.peer_packages import environment_of, wheel_commands
from perf.peer_processes import Worker, places, wait_for_all

START_S = 45.0
"""Budget from a process's start to its first peer: imports and NCCL, about 10 s where the files are cached."""
BUDGETS_S = {name: peer.budget_s for name, peer in PEERS.items()}
DUMP_S, END_S = 1.0, 10.0
"""Time to write stacks into the logs before the processes of an overdue peer are killed, and for the driver to let go
of one that was."""
NOT_PRESENT = 3
"""Exit code of a worker whose library is missing."""
MAX_ERROR = {"bf16": 0.03, "fp8": 0.1}
"""Of a round by format: a few roundings, of which e4m3's is up to 2^-4 of a value."""
ROWS = "rows.jsonl"
VERSIONS = "versions.json"


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
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict], list[str], Sequence[str]]:
    """Let one process per GPU measure peers of the same library in turn.

    Args:
        versions: is given those of the libraries that the processes have loaded.
        command: makes the words of a process, with the arguments of `worker_command`, which is the default.
        budgets: as BUDGETS_S, which is the default.
        checkout: whose sources are measured, and measure; None: those in the working directory.
        environment: variables of the processes, in place of those that they inherit.

    Returns:
        The rows measured, notes on what did not end well, and the peers whose turn had not come then.
    """
    command, budgets = command or worker_command, BUDGETS_S if budgets is None else budgets
    variables = ENVIRONMENT | os.environ | dict(environment or {})
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), free_port()
        workers: list[Worker] = []
        try:
            for rank in range(world):
                words = command(names, rank, world, port, shape, tokens, folder)
                log = folder / f"rank{rank}.log"
                with log.open("w") as file:
                    process = subprocess.Popen(words, stdout=file, stderr=file, cwd=checkout, env=variables)
                workers.append(Worker(process, log, place_file(folder, rank)))
            codes = wait_for_all(workers, budgets, START_S)
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
                why = message
            else:
                why = f"rank {failed} ended with {codes[failed]}{f' at {what}' if what else ''}: {message}"
        elif None in codes:
            count = sum(row["peer"] == peer for row in rows)
            limit = START_S if peer is None else budgets[peer]
            why = f"stopped after {limit:.0f} s with {count} results; {places(workers)}"
        else:
            return rows, [], ()
        if peer is None:
            return rows, [failure(name, why) for name in names], ()
        return rows, [failure(peer, why)], names[list(names).index(peer) + 1 :]


def failure(peer: str, why: str) -> str:
    """The note on a peer that did not end well, in one line."""
    return f"{peer}: failed: {' '.join(why.split())}"


def caveats(rows: Sequence[dict]) -> list[str]:
    """Notes on results that were not taken as the others, or that are wrong."""
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        own = [row for row in rows if row["peer"] == peer]
        eager = sum(not row["graph"] for row in own if row["operation"] != CHAINED)
        late = sum(not row["ahead"] for row in own)
        found += [f"{peer}: {eager} of {len(own)} results without CUDA graphs, for it cannot be captured"] * (eager > 0)
        found += [f"{peer}: {late} of {len(own)} results with launches that came late"] * (late > 0)
        wrong = sum(not (row["error"] or 0) <= MAX_ERROR[row["format"]] for row in own)  # NaN is wrong, too
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
    packages: Path | None = None,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> dict:
    """Run the named peers one after the other on the first `gpus` GPUs.

    Args:
        gpus, shape, quick, names: what to run; quick: fewer batch sizes.
        say: is told what has been measured.
        save: gets what is returned, also each time that processes have ended.
        logs: folder for the logs of all processes.
        packages: folder with a folder of packages for each library, as `perf.peer_packages` describes it.
        versions: of libraries that were measured before.

    Returns:
        "rows", each with "peer", "format", "tokens", "operation" (dispatch, combine, pair, pair_chained), "graph"
        (whether it was replayed in CUDA graphs), "ahead" (whether all launches were queued before the first sample
        began), "error" (largest relative error of a round with experts that change nothing, or None), where it has
        been chosen "how" it was called and on how many "sms", and what `cute_ep.bench.timing.summary` says, of CHAINED
        also "host_us", what a thread takes to queue a round; "notes"; "does", what each peer's times include; and
        "versions" of the libraries, and of those before, with the library's name in brackets where one has another.
    """
    found: dict = {"rows": [], "notes": [], "versions": dict(versions)}
    found["does"] = {name: peer.does for name, peer in PEERS.items()}
    libraries: dict[str, list[str]] = {}
    for name in names:
        libraries.setdefault(PEERS[name].library, []).append(name)
    for library, left in libraries.items():
        try:
            if gpus < 2:
                raise FileNotFoundError(f"needs at least 2 GPUs, here are {gpus}")
            environment = environment_of(library, packages)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            notes = [failure(name, str(error)) for name in left]
            found["notes"] += notes
            say("\n".join(notes))
            save(found)
            continue
        turn: Sequence[str] = left
        sizes = QUICK_TOKENS if quick else PEER_TOKENS
        while turn:
            start = time.perf_counter()
            loaded: dict[str, str] = {}
            rows, notes, rest = run_workers(turn, gpus, shape, sizes, logs, loaded, environment=environment)
            notes += caveats(rows)
            found["rows"] += rows
            found["notes"] += notes
            for package, version in loaded.items():
                if found["versions"].setdefault(package, version) != version:
                    found["versions"][f"{package} ({library})"] = version
            began = ", ".join(turn[: len(turn) - len(rest)])
            seconds = time.perf_counter() - start
            say("\n".join([f"{began}: {len(rows)} results in {seconds:.1f} s", *notes]))
            save(found)
            turn = rest
    save(found)
    return found


def gpu_count() -> int:
    """GPUs that processes see: those in CUDA_VISIBLE_DEVICES, or that nvidia-smi lists, 0 without it."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in named.split(",") if name.strip()])
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
    parser.add_argument("--packages", type=Path, metavar="DIR", help="folders of packages, one for each library")
    parser.add_argument("--wheels", action="store_true", help="only print the commands that make --packages")
    args = parser.parse_args()
    if args.wheels:
        sys.stdout.write("\n".join(wheel_commands()) + "\n")
        return
    names = words_of(parser, "peers", args.peers, PEERS)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the workers end too

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    def save(found: dict) -> None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    found = run_peers(args.gpus, MAIN, args.quick, say, names, save=save, logs=args.logs, packages=args.packages)
    if not args.out:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
