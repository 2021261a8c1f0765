"""Operations of several checkouts in turns: the cases, in which order they are measured, and the table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from cute_ep.api.errors import EPConfigError
from perf.kernel_turns import HERE, Case, cases_of, measure_turns, places_of, side_of, table

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    with open("../log", "a") as log:
        log.write(os.path.basename(os.getcwd()) + " ")
    fmt, tokens, sms, operations, samples = json.loads(line)
    if tokens == 13:
        sys.exit(3)
    if tokens == 14:
        time.sleep(600)
    speed = float(open("speed").read()) * len(sys.argv[1])
    print(json.dumps({name: speed * tokens for name in operations}), flush=True)
"""


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders of two checkouts, the second of which is half as fast, and what stands for the worker of both."""
    (tmp_path / "worker.py").write_text(WORKER)
    places = {HERE: tmp_path / HERE, "before": tmp_path / "before"}
    for speed, folder in enumerate(places.values(), 1):
        folder.mkdir()
        (folder / "speed").write_text(str(speed))
    return places


def test_sides_measure_in_turns_whose_order_turns_around(places: dict[str, Path], tmp_path: Path) -> None:
    cases = [Case("bf16", 2, None, ("dispatch", "pair")), Case("fp8", 3, 24, ("dispatch",))]
    with ExitStack() as stack:
        sides = [stack.enter_context(side_of(*one, tmp_path / "worker.py")) for one in places.items()]
        *_, times = measure_turns(sides, cases, 2, 5)
    first = "here before " * 2
    assert (tmp_path / "log").read_text() == first + "before here " * 2
    length = len("build/library")
    assert times["fp8 3 dispatch, 24 SMs"] == {HERE: [3 * length] * 2, "before": [6 * length] * 2}
    assert list(times) == ["bf16 2 dispatch", "bf16 2 pair", "fp8 3 dispatch, 24 SMs"]


def test_a_side_that_ends_is_named(places: dict[str, Path], tmp_path: Path) -> None:
    with side_of("before", places["before"], tmp_path / "worker.py") as side:
        with pytest.raises(RuntimeError, match="before: ended with 3"):
            list(measure_turns([side], [Case("bf16", 13, None, ("pair",))], 1, 5))
        with pytest.raises(RuntimeError, match="before: ended with 3"):
            side.ask(["bf16", 1, None, ["pair"], 5])


def test_a_side_that_does_not_answer_is_ended_and_named(places: dict[str, Path], tmp_path: Path) -> None:
    with side_of("before", places["before"], tmp_path / "worker.py") as side:
        assert side.ask(["bf16", 1, None, ["pair"], 5])
        with pytest.raises(RuntimeError, match=r"before: gave no answer in 0.3 s to \['bf16', 14"):
            side.ask(["bf16", 14, None, ["pair"], 5], deadline_s=0.3)


PACKAGES = {
    "cute_ep/bench/machine.py": "def parse_devices(which, experts):\n    return [f'{which}:{experts}']\n",
    "cute_ep/bench/measure.py": """
import os
def make_sets(cfg, devices, tokens, routing):
    return [cfg.fmt, cfg.ranks, cfg.row_order, *devices, tokens, routing]
def measure(ranks, sets, operations, samples):
    print("said")
    os.write(1, b"by C")
    return [{"operation": name, "p50_us": [*ranks, *sets, samples]} for name in operations]
""",
    "cute_ep/runtime/connection.py": """
from contextlib import contextmanager
calls = []
@contextmanager
def connected(cfg, devices, sms, library):
    calls.append(sms)
    yield [len(calls), sms, library]
""",
    "perf/cases.py": """
from dataclasses import dataclass
@dataclass
class Config:
    fmt: str
    ranks: int
    tokens: int
    row_order: str = "as before there were others"
class MAIN:
    num_experts = 7
    config = Config
""",
}
"""What the worker needs of a checkout, which tells what it was given."""


def install(checkout: Path) -> None:
    """Put PACKAGES there."""
    for name, source in PACKAGES.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(source)


def test_the_worker_runs_with_the_packages_of_its_checkout_and_keeps_its_ranks(tmp_path: Path) -> None:
    install(tmp_path)
    with side_of("before", tmp_path) as side:
        answers = [side.ask(["fp8", tokens, sms, ["pair"], 5]) for tokens, sms in ((2, None), (2, 24), (2, None))]
    told = ["build/library", "fp8", 1, "as before there were others", "auto:7", 2, "uniform", 5]
    assert answers == [{"pair": [1, None, *told]}, {"pair": [2, 24, *told]}, {"pair": [1, None, *told]}]


def test_the_worker_measures_rows_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    install(tmp_path)
    with side_of("before", tmp_path, order="rank_major") as side:
        assert side.ask(["bf16", 2, None, ["pair"], 5])["pair"][5] == "rank_major"


def test_combines_are_measured_once_whatever_the_format_of_tokens() -> None:
    cases = cases_of(["bf16", "fp8"], [1, 16], [None, 24], ["dispatch", "combine_exact", "pair"])
    assert len(cases) == 8 and cases[0] == Case("bf16", 1, None, ("dispatch", "combine_exact", "pair"))
    assert cases[-1] == Case("fp8", 16, 24, ("dispatch", "pair"))
    assert cases_of(["bf16", "fp8"], [1], [None], ["combine_partial"]) == [Case("bf16", 1, None, ("combine_partial",))]


def test_checkouts_with_one_name_are_told_apart_and_equal_ones_refused(tmp_path: Path) -> None:
    folders = [tmp_path / one / "before" for one in ("a", "b")]
    assert list(places_of(folders).values()) == [Path.cwd(), *folders]
    for others in ([Path()], [folders[0], tmp_path / "a" / "." / "before"]):
        with pytest.raises(EPConfigError, match="must be different folders"):
            places_of(others)


def test_the_table_has_medians_and_their_ratios_to_those_here() -> None:
    times = {"bf16 1 pair": {HERE: [9, 10, 30], "before": [12, 11, 90]}, "bf16 2 pair": {HERE: [4], "before": [2]}}
    assert table(times).splitlines() == [
        "| operation | here | before |",
        "|---|---|---|",
        "| bf16 1 pair | 10.00 | 12.00 (1.200) |",
        "| bf16 2 pair | 4.00 | 2.00 (0.500) |",
    ]
