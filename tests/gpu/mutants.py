"""Kernels with one mistake in the protocol each, and the schedule that finds it.

    python -m tests.gpu.mutants build [NAME ...]    compile them into build/mutants; needs the DSL, no GPU
    python -m tests.gpu.mutants run [NAME ...]      run each on its schedule; needs a GPU, no DSL

A mutant is a patch of a copy of the sources, from which both commands run: kernels of other sources than the process's
own are never launched. The sources have no switch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .mistakes import MUTANTS, UNCHANGED, expected

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
ARCH = "sm_90a"
FORMATS = "bf16"
"""Of the kernels that are compiled: enough for the schedules below."""
BESIDE = 4
"""Processes of a GPU at a time: of 18 that began at once half found no memory for a context (2 x H200, 2026-11-29)."""


def make_tree(name: str, folder: Path, source: Path = ROOT) -> None:
    """The package of a checkout as it would be installed, in a folder, with the mistake of that name."""
    skip = shutil.ignore_patterns("__pycache__", "library")
    shutil.copytree(source / "cute_ep", folder / "cute_ep", ignore=skip)
    for edit in () if name == UNCHANGED else MUTANTS[name].edits:
        edit.apply(folder / "cute_ep")


def start(folder: Path, words: Sequence[str], **environment: str) -> subprocess.Popen:
    """A python process that imports the package from `folder` and begins there, where `cute-ep build` looks first."""
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def build(names: Iterable[str]) -> None:
    """Compile the kernels of mutants for ARCH, all of the sources that there are now; SystemExit with the compiler's
    words when one does not."""
    with tempfile.TemporaryDirectory() as kept:
        make_tree(UNCHANGED, Path(kept))
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                make_tree(name, Path(folder), Path(kept))
                words = ["-m", "cute_ep", "build", "--arch", ARCH, "--format", FORMATS, "--out", str(FOLDER / name)]
                process = start(Path(folder), words)
                output = "".join(process.communicate())
                if process.returncode:
                    raise SystemExit(f"{name}: {output[-4000:]}")
            sys.stderr.write(f"{name}: compiled\n")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: "found", "survived", "hung" (its schedule did not end), "absent" (no kernels of these
    sources) or "failed" (no result); and in words."""

    verdict: str
    words: str


def run(
    names: Sequence[str], say: Callable[[str, Outcome], None] = lambda name, outcome: None, timeout_s: float = 600
) -> dict[str, Outcome]:
    """Run mutants on their schedules, a process each, BESIDE of a GPU at a time, which each has alone. `say`: called
    with each that has ended."""
    from .mutant_worker import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        raise SystemExit("no NVIDIA GPU on this machine")
    places = [threading.Semaphore(BESIDE) for _ in gpus]
    with tempfile.TemporaryDirectory() as scratch:

        def run_one(numbered: tuple[int, str]) -> Outcome:
            with places[numbered[0] % len(gpus)]:
                outcome = run_there(*numbered)
            say(numbered[1], outcome)
            return outcome

        def run_there(number: int, name: str) -> Outcome:
            folder, gpu = Path(scratch, name), gpus[number % len(gpus)]
            folder.mkdir()
            make_tree(name, folder)
            words = ["-m", "tests.gpu.mutant_worker", name, str(Path(scratch, f"gpu{number % len(gpus)}"))]
            # a storm's streams need a queue each
            process = start(folder, words, CUDA_VISIBLE_DEVICES=gpu, CUDA_DEVICE_MAX_CONNECTIONS="32")
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return Outcome("failed", f"no result after {timeout_s:g} s")
            if process.returncode:
                return Outcome("failed", errors[-2000:])
            return Outcome(*json.loads(output.splitlines()[-1]))

        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(run_one, enumerate(names)), strict=True))


def main(arguments: Sequence[str]) -> int:
    """The command line above."""
    command, *names = arguments or [""]
    known = [UNCHANGED, *MUTANTS]
    if command not in ("build", "run") or set(names) - set(known):
        raise SystemExit(f"{__doc__}\nNAME: out of {', '.join(known)}")
    if command == "build":
        build([name for name in names or MUTANTS if name != UNCHANGED])
        return 0

    def say(name: str, outcome: Outcome) -> None:
        sys.stdout.write(f"{name:18} {outcome.verdict:9} {outcome.words}\n")
        sys.stdout.flush()

    outcomes = run(names or known, say)
    wrong = {name for name, outcome in outcomes.items() if outcome.verdict not in expected(name)}
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
