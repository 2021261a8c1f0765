"""Exhaustive search of the models of the protocol, `ep_protocol.pml` within a node (docs/memory_model.md says what it
shows), `pipelines.pml` within a combine, and `mail.pml` between nodes, with spin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER, MODEL, MAIL, PIPELINES = Path(__file__).parent, "ep_protocol.pml", "mail.pml", "pipelines.pml"
PAN_FLAGS = ("-w", "-DSAFETY", "-DMEMLIM=1000")
QUICK_COMPILER = shutil.which("tcc") or "gcc"
"""tcc compiles a verifier in a hundredth of a second, gcc in half of one."""
MAX_DEPTH, HASH_BITS = 5000, 20
INCOMPLETE = ("max search depth too small", "MEMLIM", "out of memory", "Search not completed", "hash-compact")
ASSERTION, STUCK = "pan:1: assertion violated", "pan:1: invalid end state"


@dataclass(frozen=True)
class Result:
    """What one search printed."""

    errors: int
    states: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Case:
    """One set of -D definitions of a model; the error that a mutant must produce; whether the search is long.

    Most searches take less time than gcc. Those of more than two seconds are worth its optimisation.
    """

    defines: str
    finds: str = ""
    long: bool = False
    model: str = MODEL

    def __str__(self) -> str:
        return ",".join(self.defines.split() if self.model == MODEL else [self.model, *self.defines.split()])


HIDDEN_BY_TURNS = (
    "NO_CONSUMED_WAIT",
    "ACK_OWN_ROUND",
    "ACK_AFTER_WAIT",
    "ACK_ON_RECEIVE",
    "EQUAL",
    "WAIT_PREVIOUS",
    "ARENA_HEADER",
)
HOLDS = [
    # Nobody dies.
    Case("N=2 SLICES=2 ORDER=SPLIT"),
    Case("N=2 SLICES=2 ORDER=ROLES"),
    Case("N=2 SLICES=2 ORDER=FUSED"),
    Case("N=2 SLICES=2 ORDER=MIXED"),
    Case("N=2 SLICES=2 ROUTING=ALL ORDER=SPLIT"),
    Case("N=2 SLICES=2 ROUTING=ALL ORDER=ROLES"),
    Case("N=2 SLICES=2 ROUNDS=5 ORDER=SPLIT"),
    Case("N=2 ORDER=STREAMS", long=True),
    Case("N=2 FINE ORDER=SPLIT", long=True),
    Case("N=3 ORDER=SPLIT"),
    Case("N=3 ORDER=FUSED"),
    Case("N=3 ROUTING=SELF ORDER=FUSED"),
    Case("N=3 ORDER=MIXED COMBINES=0"),
    Case("N=2 SLICES=2 EMPTY ORDER=ROLES"),
    Case("N=3 EMPTY ORDER=FUSED DISPATCHES=0"),
    Case("N=2 SLICES=2 LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=SPLIT"),
    Case("N=2 SLICES=2 LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=ROLES"),
    Case("N=2 SLICES=2 LAMPORT=ALL FALLBACK ROUNDS=5 ORDER=FUSED"),
    Case("N=2 SLICES=2 LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=SPLIT"),
    Case("N=2 SLICES=2 LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=MIXED"),
    Case("N=2 FINE LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=SPLIT DISPATCHES=0"),
    Case("N=3 LAMPORT=ALL FALLBACK ORDER=FUSED"),
    Case("N=2 SLICES=2 LAMPORT=ALL FALLBACK ROUTING=SWING ORDER=ROLES"),
    # A fused dispatch sends its own rank nothing; ranks may mix fused launches and halves.
    Case("N=2 SLICES=2 DIRECT ROUTING=ALL ORDER=ROLES COMBINES=0"),
    Case("N=2 SLICES=2 DIRECT ROUTING=ALL ROUNDS=5 ORDER=MIXED COMBINES=0"),
    Case("N=2 SLICES=2 DIRECT CHUNK ROUNDS=5 ORDER=FUSED"),
    Case("N=2 SLICES=2 DIRECT LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=MIXED"),
    Case("N=3 DIRECT LAMPORT=ALL FALLBACK ORDER=FUSED"),
    Case("N=2 DIRECT DEATH ROUTING=ALL ORDER=ROLES COMBINES=0"),
    Case("N=2 DIRECT SLOW ORDER=FUSED"),
    # A flag stands for two slices.
    Case("N=2 SLICES=2 CHUNK EMPTY ORDER=ROLES"),
    Case("N=2 SLICES=2 CHUNK FINE ORDER=SPLIT DISPATCHES=0"),
    Case("N=2 SLICES=2 CHUNK LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=SPLIT"),
    Case("N=2 SLICES=2 CHUNK STAGGERED LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=MIXED"),
    # Dispatch and combine by turns.
    Case("N=2 SLICES=2 CHUNK STAGGERED LAMPORT=SOME FALLBACK ROUNDS=5 ROUTING=SWING ORDER=ROLES AHEAD=0"),
    Case("N=3 SLICES=2 CHUNK ORDER=FUSED AHEAD=0"),
    # A rank dies at any point.
    Case("N=2 DEATH SLICES=2 CHUNK ORDER=SPLIT"),
    Case("N=2 DEATH DOOMED=1 ORDER=MIXED COMBINES=0"),
    Case("N=2 DEATH ROUTING=ALL ORDER=ROLES DISPATCHES=0", long=True),
    Case("N=2 DEATH EMPTY ORDER=SPLIT"),
    Case("N=2 DEATH ORDER=FUSED"),
    Case("N=2 DEATH LAMPORT=ALL FALLBACK ORDER=SPLIT"),
    Case("N=2 DEATH LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=FUSED DISPATCHES=0"),
    # Nobody dies, any wait may time out.
    Case("N=2 SLOW SLICES=2 ORDER=SPLIT"),
    Case("N=2 SLOW ORDER=FUSED"),
    Case("N=2 SLOW SLICES=2 LAMPORT=ALL FALLBACK ORDER=SPLIT DISPATCHES=0"),
    Case("N=2 SLOW SLICES=2 CHUNK STAGGERED LAMPORT=SOME FALLBACK ORDER=SPLIT DISPATCHES=0"),
    # A fused launch while a round is outstanding.
    Case("N=2 SLICES=2 MISTAKE=ONE ORDER=SPLIT COMBINES=0"),
    Case("N=2 SLICES=2 MISTAKE=ONE LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=SPLIT DISPATCHES=0"),
    Case("N=2 SLICES=2 MISTAKE=ALL LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=ROLES DISPATCHES=0"),
    Case("N=2 MISTAKE=ONE ORDER=FUSED AHEAD=0"),
    # Ranks compare of which dispatch round the rows are that come home; one combines another batch than the others.
    Case("N=2 SLICES=2 PAIRS ORDER=SPLIT"),
    Case("N=2 SLICES=2 PAIRS ROUNDS=5 ORDER=ROLES DISPATCHES=0"),
    Case("N=2 SLICES=2 PAIRS EMPTY ORDER=ROLES DISPATCHES=0"),
    Case("N=2 SLICES=2 PAIRS LAMPORT=SOME FALLBACK ROUNDS=5 ORDER=MIXED DISPATCHES=0"),
    Case("N=2 PAIRS FINE ORDER=SPLIT DISPATCHES=0"),
    Case("N=3 PAIRS ROUTING=SELF ORDER=FUSED DISPATCHES=0", long=True),
    Case("N=2 PAIRS DEATH ORDER=FUSED DISPATCHES=0"),
    Case("N=2 PAIRS SLOW ORDER=SPLIT DISPATCHES=0"),
    Case("N=2 SLICES=2 PAIRS CROSSED ROUTING=ALL ORDER=ROLES DISPATCHES=0"),
    Case("N=2 PAIRS CROSSED LAMPORT=ALL FALLBACK ORDER=SPLIT DISPATCHES=0"),
    Case("N=3 PAIRS CROSSED ORDER=FUSED DISPATCHES=0"),
    # What only split launches, combines without dispatches between them, and Lamport words need: these hold without.
    Case("N=2 SLICES=2 ORDER=ROLES MUTANT=NO_CONSUMED_WAIT"),
    Case("N=2 SLICES=2 ORDER=ROLES MUTANT=ACK_AFTER_WAIT"),
    # What tests with fused launches by turns cannot find.
    *(
        Case(f"N=2 SLICES=2 LAMPORT=SOME FALLBACK ROUNDS=5 ROUTING=ALL ORDER=FUSED AHEAD=0 MUTANT={mutant}")
        for mutant in HIDDEN_BY_TURNS
    ),
    # Dates that return after four rounds, while every word is written in every second one.
    Case("N=2 FINE ROUNDS=5 DATES=4 ORDER=FUSED COMBINES=0", long=True),
    # The CTAs of one rank.
    Case("GRID ORDER=ROLES CTAS=3 SLOW"),
    Case("GRID ORDER=ROLES ROUTERS=1"),
    Case("GRID ORDER=ROLES SLOTS=2"),
    Case("GRID ORDER=FUSED CTAS=3 SLOW"),
    Case("GRID ORDER=SPLIT CTAS=3 SLOW"),
    Case("GRID ORDER=SPLIT SLOTS=3"),
    Case("GRID MISTAKE ORDER=ROLES CTAS=3 SLOW"),
    # The same, with a second pass behind a meeting in some receives, and with messages that CTAs take by number.
    Case("GRID MEET ORDER=FUSED CTAS=3 SLOW PATIENT", long=True),
    Case("GRID MEET ORDER=SPLIT CTAS=3 SLOW", long=True),
    Case("GRID TAKE ORDER=SPLIT CTAS=3 SLOW"),
    Case("GRID MEET TAKE ORDER=ROLES CTAS=3 SLOW"),
    Case("GRID MEET TAKE ORDER=ROLES SLOTS=2"),
    Case("GRID MEET TAKE ORDER=FUSED CTAS=3", long=True),
    Case("GRID MEET TAKE ORDER=SPLIT CTAS=3"),
    Case("GRID MEET TAKE MISTAKE ORDER=FUSED CTAS=3"),
    # The same, where CTAs that have sent receive, too, and messages are received by number.
    Case("GRID TAKE ORDER=JOINS CTAS=3 SLOW"),
    Case("GRID MEET TAKE ORDER=JOINS CTAS=3"),
    Case("GRID MEET TAKE ORDER=JOINS CTAS=3 SLOW PATIENT", long=True),
    Case("GRID MEET TAKE MISTAKE ORDER=JOINS CTAS=3"),
    Case("GRID TAKE ORDER=JOINS MOST CTAS=3 SLOW"),
    Case("GRID MEET TAKE ORDER=JOINS MOST CTAS=3"),
    # The same, with numbers that alternate by parity.
    Case("GRID TAKE TURNS ORDER=ROLES CTAS=3 SLOW"),
    Case("GRID TAKE TURNS ORDER=ROLES SLOTS=2"),
    Case("GRID TAKE TURNS ORDER=FUSED CTAS=3"),
    Case("GRID TAKE TURNS ORDER=SPLIT CTAS=3 SLOW"),
    # Between nodes; two and three nodes, any wait may time out, another kernel gives up, a rank dies.
    Case("N=2 ROUNDS=5", model=MAIL),
    Case("N=2 SLOW", long=True, model=MAIL),
    Case("N=2 OTHER", long=True, model=MAIL),
    Case("N=2 OTHER LATE_SOURCE ROUNDS=2", model=MAIL),
    Case("N=2 DEATH", model=MAIL),
    Case("N=3 PIECES=1", long=True, model=MAIL),
    Case("N=2 PARITIES=2 ROUNDS=5", model=MAIL),
    Case("N=2 PARITIES=2 SLOW", long=True, model=MAIL),
    Case("N=2 PARITIES=2 OTHER", long=True, model=MAIL),
    Case("N=2 PARITIES=2 DEATH", model=MAIL),
    Case("N=2 QUEUED ROUNDS=5", model=MAIL),
    Case("N=2 QUEUED SLOW", model=MAIL),
    Case("N=2 QUEUED OTHER", model=MAIL),
    Case("N=2 QUEUED DEATH", model=MAIL),
    Case("N=3 QUEUED PIECES=1", model=MAIL),
    Case("N=3 NEAR PIECES=1 DEATH ROUNDS=2", long=True, model=MAIL),
    Case("N=3 NEAR PIECES=1 PARITIES=2", long=True, model=MAIL),
    Case("N=2 PARITIES=2 LATE_SOURCE", model=MAIL),
    Case("N=2 PARITIES=2 OTHER LATE_SOURCE ROUNDS=2", model=MAIL),
    # Pipelines that add up: some send first, some draw spans while there is nothing to add up.
    Case("N=2 SPANS=3", model=PIPELINES),
    Case("N=2 RUNS=4", model=PIPELINES),
    Case("N=2 SPANS=4 RUNS=2 ALONE", model=PIPELINES),
    Case("N=2 PIPES=1 FIRST=3 SPANS=3", model=PIPELINES),
    Case("N=3 PIPES=1 SPANS=2", model=PIPELINES),
    Case("N=3 PIPES=2 SPANS=1", long=True, model=PIPELINES),
    Case("N=3 PIPES=1 FIRST=3 SPANS=2 RUNS=1", long=True, model=PIPELINES),
]

FAILS = [
    Case("MUTANT=NO_CONSUMED_WAIT ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT ROUTING=SELF ORDER=FUSED DISPATCHES=0", ASSERTION),
    Case("MUTANT=ONE_PARITY ORDER=SPLIT COMBINES=0", STUCK),
    Case("MUTANT=ONE_PARITY ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=FLAG_FIRST ORDER=SPLIT", ASSERTION),
    Case("MUTANT=EARLY_FLAG SLICES=2 CHUNK ORDER=FUSED COMBINES=0", ASSERTION),
    Case("MUTANT=EARLY_FLAG SLICES=2 CHUNK ORDER=FUSED DISPATCHES=0", ASSERTION),
    Case("MUTANT=TWO_STORES ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=UNDATED ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("DATES=2 ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("DATES=4 SLICES=2 FINE ROUNDS=5 SHORT=3 ORDER=FUSED COMBINES=0", ASSERTION),
    Case("MUTANT=WAIT_FOR_ALL LAMPORT=ALL ORDER=FUSED COMBINES=0", STUCK),
    Case("MUTANT=WAIT_FOR_ALL LAMPORT=ALL ORDER=FUSED DISPATCHES=0", STUCK),
    Case("MUTANT=SILENT_OWNER SLICES=2 ORDER=FUSED DISPATCHES=0", STUCK),
    Case("MUTANT=ACK_OWN_ROUND ORDER=SPLIT", ASSERTION),
    Case("MUTANT=ACK_AFTER_WAIT ORDER=SPLIT COMBINES=0", STUCK),
    Case("MUTANT=ACK_AFTER_WAIT ORDER=SPLIT DISPATCHES=0", STUCK),
    Case("MUTANT=ACK_ON_RECEIVE ORDER=SPLIT", STUCK),
    Case("MUTANT=EQUAL ROUTING=ALL ORDER=SPLIT", STUCK),
    Case("MUTANT=EQUAL ROUTING=ALL ROUNDS=4 ORDER=ROLES", STUCK),
    Case("MUTANT=WAIT_PREVIOUS ORDER=SPLIT", STUCK),
    Case("MUTANT=ARENA_HEADER ROUTING=SWING ORDER=ROLES", ASSERTION),
    Case("MUTANT=COMPLETE_ANYWAY DEATH ORDER=ROLES", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT SLICES=2 LAMPORT=ALL ORDER=ROLES", ASSERTION),
    Case("MUTANT=ACK_OWN_ROUND LAMPORT=ALL ORDER=SPLIT", ASSERTION),
    Case("MUTANT=WEAK_ACK LAMPORT=ALL ROUTING=ALL ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=WEAK_ACK LAMPORT=ALL ROUTING=ALL ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=NO_CLEAR LAMPORT=ALL ROUTING=ALL ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=NO_CLEAR LAMPORT=ALL ROUTING=ALL ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=PASS_OVER LAMPORT=ALL ROUTING=ALL ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=SENTINEL_IS_DATA LAMPORT=ALL ORDER=SPLIT", ASSERTION),
    Case("MUTANT=SILENT_FALLBACK LAMPORT=ALL FALLBACK ORDER=SPLIT", STUCK),
    Case("MUTANT=FLAG_ALWAYS LAMPORT=ALL ORDER=SPLIT", STUCK),
    Case("MUTANT=FLAG_FIRST LAMPORT=ALL FALLBACK ORDER=SPLIT", ASSERTION),
    Case("MUTANT=EQUAL LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=SPLIT", STUCK),
    Case("MUTANT=ONE_PARITY LAMPORT=ALL ORDER=SPLIT COMBINES=0", STUCK),
    Case("MUTANT=ONE_PARITY LAMPORT=ALL ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=HEEDLESS SLOW LAMPORT=ALL FALLBACK ROUTING=ALL ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=NO_CONSUMED_WAIT LAMPORT=ALL ROUTING=SWING ROUNDS=4 ORDER=ROLES AHEAD=0", ASSERTION),
    Case("MUTANT=ONE_PARITY LAMPORT=SOME FALLBACK ROUTING=ALL ORDER=FUSED AHEAD=0", ASSERTION),
    Case("MUTANT=WEAK_ACK LAMPORT=ALL ROUTING=ALL ORDER=FUSED AHEAD=0", ASSERTION),
    Case("MUTANT=NO_CLEAR LAMPORT=ALL ROUTING=ALL ORDER=FUSED AHEAD=0", ASSERTION),
    Case("MUTANT=UNCHECKED MISTAKE=ONE SLICES=2 ORDER=SPLIT COMBINES=0", ASSERTION),
    Case("MUTANT=UNCHECKED MISTAKE=ALL LAMPORT=ALL ROUTING=ALL ORDER=ROLES DISPATCHES=0", ASSERTION),
    Case("MUTANT=ONE_PAIR PAIRS ORDER=SPLIT DISPATCHES=0", STUCK),
    Case("MUTANT=ONE_PAIR PAIRS EMPTY ORDER=FUSED DISPATCHES=0", ASSERTION),
    Case("MUTANT=UNPAIRED PAIRS CROSSED ROUTING=ALL ORDER=SPLIT DISPATCHES=0", ASSERTION),
    Case("MUTANT=DIRECT_SPLIT DIRECT ROUTING=ALL ORDER=SPLIT COMBINES=0", STUCK),
    Case("MUTANT=DIRECT_SPLIT DIRECT ROUTING=ALL LAMPORT=ALL ORDER=MIXED COMBINES=0", STUCK),
    Case("MUTANT=OWN_AWAITED DIRECT ROUTING=ALL ORDER=FUSED COMBINES=0", STUCK),
    Case("MUTANT=OWN_AWAITED DIRECT ROUTING=ALL LAMPORT=ALL ORDER=ROLES COMBINES=0", STUCK),
    Case("MUTANT=OWN_SLOT DIRECT ROUTING=ALL ORDER=FUSED COMBINES=0", ASSERTION),
    Case("ORDER=SPLIT COMBINES=0 OUTSTANDING=3", STUCK),
    Case("ORDER=SPLIT DISPATCHES=0 OUTSTANDING=3", STUCK),
    Case("GRID ORDER=ROLES MUTANT=HALF_COUNTER", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=STALE_OUTPUT SLOW", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=COMPLETE_ANYWAY SLOW", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=UNORDERED SLOW", ASSERTION),
    Case("GRID ORDER=SPLIT CTAS=3 MUTANT=UNORDERED SLOW", ASSERTION),
    Case("GRID ORDER=ROLES MUTANT=LATE_FENCE SLOW", ASSERTION),
    Case("GRID ORDER=SPLIT MUTANT=ACK_AFTER_WAIT", STUCK),
    Case("GRID ORDER=ROLES MUTANT=UNCHECKED MISTAKE", ASSERTION),
    Case("GRID ORDER=ROLES SLOTS=1", STUCK),
    Case("GRID ORDER=FUSED CTAS=3 SLOTS=2", STUCK),
    Case("GRID ORDER=SPLIT SLOTS=2", STUCK),
    Case("GRID MEET ORDER=ROLES MUTANT=NO_RESET", ASSERTION),
    Case("GRID MEET ORDER=SPLIT CTAS=3 MUTANT=NO_RESET", ASSERTION),
    Case("GRID MEET ORDER=ROLES MUTANT=EARLY_RESET", STUCK),
    Case("GRID MEET ORDER=ROLES SLOW PATIENT MUTANT=SILENT_FAILURE", STUCK),
    Case("GRID MEET ORDER=ROLES CTAS=3 SLOW MUTANT=FAILED_JOINS", ASSERTION),
    Case("GRID MEET ORDER=ROLES MUTANT=ALL_MEET", STUCK),
    Case("GRID MEET ORDER=SPLIT SLOTS=3", STUCK),
    Case("GRID TAKE ORDER=ROLES MUTANT=NO_RESET", STUCK),
    Case("GRID TAKE ORDER=SPLIT CTAS=3 MUTANT=NO_RESET", STUCK),
    Case("GRID TAKE ORDER=ROLES MUTANT=EARLY_RESET", ASSERTION),
    Case("GRID TAKE ORDER=JOINS CTAS=3 SLOTS=2", STUCK),
    Case("GRID TAKE ORDER=JOINS CTAS=3 MUTANT=DRAWS_GO_ON", ASSERTION),
    Case("GRID TAKE ORDER=JOINS CTAS=3 MUTANT=DRAWS_FROM_NONE", ASSERTION),
    Case("GRID TAKE TURNS ORDER=ROLES MUTANT=NO_RESET", STUCK),
    Case("GRID TAKE TURNS ORDER=ROLES MUTANT=EARLY_RESET", ASSERTION),
    Case("MUTANT=NO_FREE_WAIT", ASSERTION, model=MAIL),
    Case("MUTANT=NO_FREE_WAIT PARITIES=2", ASSERTION, model=MAIL),
    Case("MUTANT=PACK_ANYWAY PARITIES=2 SLOW ROUNDS=4", ASSERTION, model=MAIL),
    Case("MUTANT=PACK_ANYWAY SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=NO_HEADER SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=LAST_SIGNAL", ASSERTION, model=MAIL),
    Case("MUTANT=ONE_WORD SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_EARLY", ASSERTION, model=MAIL),
    Case("MUTANT=WAIT_PREVIOUS", ASSERTION, model=MAIL),
    Case("MUTANT=HEADER_FIRST OTHER", ASSERTION, model=MAIL),
    Case("MUTANT=FEW_PIECES", STUCK, model=MAIL),
    Case("MUTANT=MOVED QUEUED SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=MOVED QUEUED OTHER", ASSERTION, model=MAIL),
    Case("MUTANT=MOVED SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_BEFORE QUEUED", ASSERTION, model=MAIL),
    Case("MUTANT=NO_HEADER QUEUED SLOW", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_EARLY QUEUED", ASSERTION, model=MAIL),
    Case("MUTANT=SENDS_AHEAD", STUCK, model=MAIL),
    Case("MUTANT=READ_FIRST", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_BEFORE", ASSERTION, model=MAIL),
    Case("MUTANT=HELD_SPAN", STUCK, model=PIPELINES),
    Case("MUTANT=ONE_COUNTER", STUCK, model=PIPELINES),
    Case("MUTANT=ONE_FLAG", STUCK, model=PIPELINES),
    Case("MUTANT=UNAWAITED", ASSERTION, model=PIPELINES),
    Case("MUTANT=WAITS_FIRST", STUCK, model=PIPELINES),
    # Two rounds are sent before the first is read.
    Case("MUTANT=ONE_LANDING PARITIES=2", ASSERTION, model=MAIL),
    Case("MUTANT=ONE_SOURCE PARITIES=2 LATE_SOURCE", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_BEFORE PARITIES=2 ROUNDS=4", ASSERTION, model=MAIL),
    Case("MUTANT=FREE_EARLY PARITIES=2", ASSERTION, model=MAIL),
    Case("MUTANT=LAST_SIGNAL PARITIES=2", ASSERTION, model=MAIL),
    Case("MUTANT=WAIT_PREVIOUS PARITIES=2", ASSERTION, model=MAIL),
]


def search(case: Case, folder: Path) -> Result:
    """Generate, compile and run the verifier for one set of definitions."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    shutil.copy(FOLDER / case.model, folder)
    warnings = run("spin", "-a", *(f"-D{define}" for define in case.defines.split()), case.model)
    assert "rror" not in warnings, warnings
    compiler = ("gcc", "-Og") if case.long else (QUICK_COMPILER,)
    run(*compiler, *PAN_FLAGS, "-o", "pan", "pan.c")
    text = run("./pan", f"-m{MAX_DEPTH}", f"-w{HASH_BITS}")
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    seconds = re.search(r"elapsed time (\S+) seconds", text)
    assert errors and states and seconds, text
    return Result(int(errors[1]), int(states[1]), float(seconds[1]), text)


@pytest.fixture(scope="session")
def tools() -> None:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"{' and '.join(missing)} must be installed in CI: the protocol model is not checked without")
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: the protocol model is not checked")


@pytest.fixture(scope="session")
def result_of(
    tools: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Result]]:
    """The result of a search. The first to ask starts all that were selected, one a core; under xdist its own only."""
    under_xdist = "PYTEST_XDIST_WORKER" in os.environ
    pool = ThreadPoolExecutor(1 if under_xdist else os.cpu_count())

    def start(case: Case) -> Future[Result]:
        return pool.submit(search, case, tmp_path_factory.mktemp("spin"))

    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected = [item.callspec.params["case"] for item in items if item.path == Path(__file__)]
    running = {} if under_xdist else {case: start(case) for case in selected if isinstance(case, Case)}
    yield lambda case: (running.get(case) or start(case)).result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", HOLDS, ids=str)
def test_the_properties_of_the_protocol_hold(case: Case, result_of: Callable[[Case], Result]) -> None:
    result = result_of(case)
    assert result.errors == 0, result.text
    assert not [words for words in INCOMPLETE if words in result.text], result.text


@pytest.mark.parametrize("case", FAILS, ids=str)
def test_a_broken_protocol_is_caught(case: Case, result_of: Callable[[Case], Result]) -> None:
    result = result_of(case)
    assert result.errors > 0, result.text
    assert case.finds in result.text, result.text
