"""Exhaustive search of the protocol model `ep_protocol.pml` with spin (docs/protocol.md says what it shows)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("ep_protocol.pml")
PAN_FLAGS = ("-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=1000")
MAX_DEPTH = 5000
INCOMPLETE = ("max search depth too small", "MEMLIM", "out of memory", "Search not completed", "hash-compact")
ASSERTION, STUCK = "assertion violated", "invalid end state"


@dataclass(frozen=True)
class Result:
    """What one search printed."""

    errors: int
    states: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Case:
    """One set of -D definitions of the model; the error that a mutant must produce."""

    defines: str
    finds: str = ""


HOLDS = [
    # Nobody dies.
    Case("N=2 CHUNKS=2 ORDER=SPLIT"),
    Case("N=2 CHUNKS=2 ORDER=STREAM"),
    Case("N=2 CHUNKS=2 ORDER=ROLES"),
    Case("N=2 CHUNKS=2 ORDER=FUSED"),
    Case("N=2 FINE ORDER=SPLIT"),
    Case("N=3 ORDER=SPLIT COMBINES=0"),
    Case("N=3 ORDER=SPLIT DISPATCHES=0"),
    Case("N=3 ORDER=STREAM"),
    Case("N=3 ORDER=ROLES"),
    # Rank 0 dies at any point.
    Case("N=2 DEATH CHUNKS=2 ORDER=SPLIT"),
    Case("N=2 DEATH CHUNKS=2 ORDER=ROLES"),
    Case("N=2 DEATH FINE ORDER=ROLES"),
    Case("N=3 DEATH ORDER=STREAM"),
    Case("N=3 DEATH ORDER=FUSED"),
    # Nobody dies, any wait may time out.
    Case("N=2 SLOW CHUNKS=2 ORDER=SPLIT"),
    # Fused launches only: the wait for "consumed" is always satisfied already.
    Case("N=2 CHUNKS=2 ORDER=ROLES MUTANT=NO_CONSUMED_WAIT"),
    Case("N=2 CHUNKS=2 ORDER=ROLES COMBINES=0 MUTANT=NO_CONSUMED_WAIT"),
    # The CTAs of one rank.
    Case("GRID ORDER=ROLES SLOW"),
    Case("GRID ORDER=ROLES SLOTS=2"),
    Case("GRID ORDER=FUSED SENDERS=3 SLOW"),
]

FAILS = [
    Case("MUTANT=NO_CONSUMED_WAIT ORDER=SPLIT", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT ORDER=STREAM", ASSERTION),
    Case("MUTANT=ONE_PARITY ORDER=SPLIT", ASSERTION),
    Case("MUTANT=ONE_PARITY ORDER=ROLES COMBINES=0", ASSERTION),
    Case("MUTANT=FLAG_FIRST ORDER=SPLIT", ASSERTION),
    Case("MUTANT=FLAG_FIRST ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=CONSUMED_EARLY ORDER=SPLIT", ASSERTION),
    Case("MUTANT=CONSUMED_EARLY ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=EQUAL ORDER=SPLIT", STUCK),
    Case("MUTANT=WAIT_PREVIOUS ORDER=STREAM", STUCK),
    Case("MUTANT=ARENA_HEADER ORDER=SPLIT", ASSERTION),
    Case("MUTANT=ANNOUNCE_ANYWAY DEATH ORDER=ROLES", ASSERTION),
    Case("ORDER=STREAM COMBINES=0 OUTSTANDING=3", STUCK),
    Case("GRID ORDER=ROLES MUTANT=OTHER_EPOCH", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=STALE_OUTPUT SLOW", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=RECEIVERS_FIRST SLOTS=2", STUCK),
    Case("GRID ORDER=FUSED SENDERS=3 SLOTS=2", STUCK),
]


def search(defines: str, folder: Path, optimise: str) -> Result:
    """Generate, compile and run the verifier for one set of definitions.

    `optimise` is gcc's -O option: the searches are so short that -O2 costs more compile time than it saves.
    """

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    shutil.copy(MODEL, folder)
    warnings = run("spin", "-a", *(f"-D{define}" for define in defines.split()), MODEL.name)
    assert "rror" not in warnings, warnings
    run("gcc", optimise, *PAN_FLAGS, "-o", "pan", "pan.c")
    text = run("./pan", f"-m{MAX_DEPTH}")
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    seconds = re.search(r"elapsed time (\S+) seconds", text)
    assert errors and states and seconds, text
    return Result(int(errors[1]), int(states[1]), float(seconds[1]), text)


@pytest.fixture(autouse=True)
def tools() -> None:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"{' and '.join(missing)} must be installed in CI: the protocol model is not checked without")
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: the protocol model is not checked")


@pytest.mark.parametrize("case", HOLDS, ids=lambda case: case.defines.replace(" ", ","))
def test_properties_hold(case: Case, tmp_path: Path) -> None:
    result = search(case.defines, tmp_path, "-O1")
    assert result.errors == 0, result.text
    assert not [words for words in INCOMPLETE if words in result.text], result.text


@pytest.mark.parametrize("case", FAILS, ids=lambda case: case.defines.replace(" ", ","))
def test_broken_protocol_is_caught(case: Case, tmp_path: Path) -> None:
    result = search(case.defines, tmp_path, "-O0")
    assert result.errors > 0, result.text
    assert case.finds in result.text, result.text
