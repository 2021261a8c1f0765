"""One rank of other libraries: `python -m perf.peer_worker`, started by `perf.peers`. `perf.peer_timing` times them."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from perf.cases import Shape
from perf.peer_list import LIBRARIES, PEERS
from perf.peers import NOT_PRESENT, ROWS, VERSIONS, place_file


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Versions of NCCL, and of the packages that installed these modules."""
    import torch

    found = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    packages = importlib.metadata.packages_distributions()
    for module in modules:
        for name in packages.get(module.partition(".")[0], ()):
            found[name] = importlib.metadata.version(name)
    return found


def arguments() -> argparse.Namespace:
    """Those of `perf.peers.worker_command`. From now on the process answers where it is, and ends itself in time."""
    faulthandler.register(signal.SIGUSR1)  # `perf.peers` asks so where an overdue rank is
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", required=True)
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("shape", "tokens"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True, help="seconds after which the process ends itself")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    return args


def told(args: argparse.Namespace, name: str) -> tuple[Callable[[str], None], Callable[[dict], None]]:
    """(says what a peer is doing, appends one of its results, of rank 0 only: one JSON object per line)."""
    place = place_file(args.folder, args.rank)

    def at(what: str) -> None:
        new = place.with_suffix(".new")
        new.write_text(f"{name}: {what}")
        new.replace(place)

    def emit(row: dict) -> None:
        if args.rank == 0:
            with (args.folder / ROWS).open("a") as file:
                file.write(json.dumps({"peer": name} | row) + "\n")

    return at, emit


def shape_of(text: str) -> Shape:
    """The shape of `Shape.text`."""
    hidden, experts, top_k = map(int, text.split("/"))
    return Shape(hidden, experts, top_k)


def main() -> int:
    """Run one rank of peers of one library."""
    args = arguments()
    names = args.peers.split(",")
    library = LIBRARIES[PEERS[names[0]].library]
    try:
        if library.nvshmem:
            from perf.nvshmem import preload

            preload()
        import torch
        import torch.distributed as dist

        from perf.peer_timing import Host, Lane, Rank, time_works

        torch.cuda.set_device(args.rank)
        if library.module is not None:
            importlib.import_module(library.module)
        all_works = importlib.import_module(f"perf.{library.works}")
    except (ImportError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return NOT_PRESENT
    here = torch.device("cuda", args.rank)
    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("nccl", init_method=address, rank=args.rank, world_size=args.world, device_id=here)
    me = Rank(args.rank, args.world, shape_of(args.shape), [int(word) for word in args.tokens.split(",")])
    host = Host()
    lane = Lane(host)
    if args.rank == 0:
        (args.folder / VERSIONS).write_text(json.dumps(versions_of([library.module] if library.module else [])))
    for name in names:
        at, emit = told(args, name)
        works = getattr(all_works, name)
        time_works(lambda works=works: works(me), lane, emit, at)
        at("done")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    host.highest([0.0])
    return 0


def run(work: Callable[[], int]) -> NoReturn:
    """End the process with what `work` returns."""
    try:
        code = work()
    except BaseException:  # whatever it is, its last line is the reason that the note gives
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the libraries' destructors may wait for ranks that are gone


if __name__ == "__main__":
    run(main)
