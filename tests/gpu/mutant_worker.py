"""One mutant on its schedule: `python -P -m tests.gpu.mutant_worker NAME LOCK`, with the patched copy of the package
before this checkout in PYTHONPATH. The last line of its output is a JSON list, of `mutants.Outcome`."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

import cute_ep
from cute_ep.aot.library import read_manifest, source_folders, source_hash
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.variants import NO_HOOKS
from cute_ep.runtime import connection
from tests.storm_rail import Streams

from .conftest import LIBRARY
from .mail_schedules import NODES, given_up, storm
from .mistakes import MUTANTS, UNCHANGED
from .mutants import ARCH, FOLDER, ROOT
from .node_rounds import MOST, Rounds, config
from .runs import Run, run_schedules
from .schedules import CASES, Case, config_of

RANKS = 4
TIMEOUT_S, WARM_UP_S = 1.0, 20.0
TURNS = 60
"""Of a storm."""
ENDS_S = 60.0
"""In which a schedule ends, also where waits time out."""
SEEDS = 3
"""Runs of a mutant's schedule, with other inputs and delays each, until it finds something."""


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]


def try_case(case: Case, library: Path, seeds: int) -> str | None:
    """What a schedule finds in so many runs, None when nothing."""
    devices = ["cuda:0"] * RANKS
    communicators = connection.connect_local(config_of(case, RANKS, TIMEOUT_S), devices, sms=case.sms, library=library)
    for seed in range(seeds):
        try:
            run_schedules(Run(communicators, case, seed), seed=seed)
        except (AssertionError, EPError, torch.AcceleratorError) as error:  # the last: a kernel has crashed
            return f"{type(error).__name__}: {error}"
    for communicator in communicators:
        communicator.close()
    return None


def try_mail(schedule: str, library: Path, seeds: int) -> str | None:
    """The same of a schedule over nodes, whose ranks may have given up in the end: each run has new communicators."""
    cfg = config(NODES[schedule], 1, timeout_s=TIMEOUT_S)
    warm_up(replace(cfg, timeout_s=WARM_UP_S), library)
    for seed in range(seeds):
        communicators = connection.connect_local(cfg, ["cuda:0"] * cfg.world_size, library=library)
        try:
            if schedule == "storm":
                storm(communicators, Streams, turns=TURNS, seed=seed, copies=seed % 2 == 0)
            else:
                given_up(communicators)
        except (AssertionError, EPError) as error:
            return f"{type(error).__name__}: {error}"
        for communicator in communicators:
            communicator.close()
    return None


def warm_up(cfg: EPConfig, library: Path) -> None:
    """Use every kernel of torch once, whatever comes of it: its first use may wait for a kernel that waits for a
    rank."""
    with (
        suppress(AssertionError, EPError),
        connection.connected(cfg, ["cuda:0"] * cfg.world_size, library=library) as made,
    ):
        rounds = Rounds(made, 1, [MOST])
        rounds.enqueue(0)
        rounds.check()


def give(verdict: str, words: str) -> NoReturn:
    """End with a result, at once: kernels that gave up leave a context that is not worth to be cleaned up, and others
    may never end."""
    sys.stdout.write(json.dumps([verdict, words]) + "\n")
    sys.stdout.flush()
    os._exit(0)


@contextmanager
def ends_in_time(schedule: str) -> Iterator[None]:
    """The result is "hung" where the body takes too long."""
    timer = threading.Timer(ENDS_S, give, ("hung", f"{schedule!r} did not end in {ENDS_S:g} s"))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def main(name: str, lock: str) -> tuple[str, str]:
    """Verdict and words."""
    library = LIBRARY if name == UNCHANGED else FOLDER / name
    wanted = {MUTANTS[name].schedule} if name in MUTANTS else {mutant.schedule for mutant in MUTANTS.values()}
    assert all(ROOT not in folder.parents for folder in source_folders()), f"{cute_ep.__file__} is no copy"
    entries = read_manifest(library).values()
    hashes = {entry.source_hash for entry in entries if entry.variant.hooks == NO_HOOKS and entry.variant.arch == ARCH}
    if hashes != {source_hash()}:
        return "absent", f"{library} has no kernels of these sources"
    torch.zeros(1, device="cuda")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for schedule in sorted(wanted):
            with ends_in_time(schedule):
                if schedule in NODES:
                    found = try_mail(schedule, library, SEEDS if schedule == "storm" else 1)
                else:
                    found = try_case(CASES[schedule], library, SEEDS if name in MUTANTS else 1)
            if found:
                return "found", f"by {schedule!r}: {found}"
    return "survived", ", ".join(sorted(wanted))


if __name__ == "__main__":
    give(*main(*sys.argv[1:]))
