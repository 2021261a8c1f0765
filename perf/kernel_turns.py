"""Operations of communicators, in turns with those of other checkouts on the same machine.

    git worktree add build/before HASH
    (cd build/before && python -m cute_ep build --arch sm_90a --format bf16,fp8,nvfp4 --out build/library)
    python -m perf.kernel_turns --against build/before --out build/perf/kernel_turns.json

Each checkout needs kernels of its own in build/library. A process of each (`kernel_turns_worker`) keeps its ranks, and
they measure a case one after the other, turn by turn, in an order that is turned around each time. Times are p50 of
CUDA-graph replay in us, of the slowest rank; the table has the median of the turns, and its ratio to that here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Timer
from typing import NamedTuple

from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import format_names, token_counts
from cute_ep.bench.machine import environment, parse_devices
from cute_ep.bench.measure import CHAINED, PARTS
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, ROW_ORDERS, RowOrder
from perf.cases import MAIN
from perf.cells import markdown
from perf.command_line import at_least_one, budgets_of, words_of
from perf.runs import reproduce

WORKER = Path(__file__).with_name("kernel_turns_worker.py")
FORMATS, TOKENS, OPERATIONS = "bf16,fp8", "1,16,128,1024,4096", "dispatch,combine_exact,combine_partial,pair"
MEASURED = tuple(name for name in PARTS if name != CHAINED)
"""Operations that are replayed in graphs."""
HERE = "here"
DEADLINE_S = 120.0
"""For an answer, in which a process may import torch and connect its ranks."""
Times = dict[str, dict[str, list[float]]]
"""By what was measured, and by side: a time of each turn."""


class Case(NamedTuple):
    """What is measured at a time. sms: what ranks are connected with; None: all."""

    format: str
    tokens: int
    sms: int | None
    operations: tuple[str, ...]

    def name(self, operation: str) -> str:
        """Of one of its operations."""
        return f"{self.format} {self.tokens} {operation}" + ("" if self.sms is None else f", {self.sms} SMs")


def cases_of(
    formats: Iterable[str], tokens: Iterable[int], sms: Iterable[int | None], operations: Sequence[str]
) -> list[Case]:
    """All of them; combine, whose rows have no format, with the first one only."""
    cases = []
    for number, fmt in enumerate(formats):
        own = tuple(name for name in operations if number == 0 or "combine" not in name)
        cases += [Case(fmt, count, budget, own) for budget in sms for count in tokens if own]
    return cases


class Side:
    """A checkout's process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process

    def ask(self, words: Sequence[object], deadline_s: float = DEADLINE_S) -> object:
        """What it answers. RuntimeError: it has ended, or was ended because it took longer than `deadline_s`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = Timer(deadline_s, self._process.kill)
        timer.start()
        try:
            print(json.dumps(words), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the answer is missing, too
        line = self._process.stdout.readline()
        in_time = timer.is_alive()
        timer.cancel()
        if not line and not in_time:
            raise RuntimeError(f"{self.name}: gave no answer in {deadline_s:g} s to {words}")
        if not line:
            raise RuntimeError(f"{self.name}: ended with {self._process.wait()}; its words are above")
        return json.loads(line)


@contextmanager
def side_of(name: str, folder: Path, worker: Path = WORKER, order: RowOrder = EXPERT_MAJOR) -> Iterator[Side]:
    """Run the worker with a checkout's own packages and kernels, and rows in this order."""
    path = os.pathsep.join([str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", str(worker), "build/library", order]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Side(name, process)
    finally:
        process.communicate()


def places_of(others: Sequence[Path]) -> dict[str, Path]:
    """Folders of all checkouts by name, this one's first. EPConfigError: two are the same."""
    places = {HERE: Path.cwd()} | {str(folder): folder for folder in others}
    if len({folder.resolve() for folder in places.values()}) <= len(others):
        raise EPConfigError(f"against = {', '.join(map(str, others))}: must be different folders, other than this one")
    return places


def measure_turns(sides: Sequence[Side], cases: Sequence[Case], turns: int, samples: int) -> Iterator[Times]:
    """Behind each turn, what has been measured so far. RuntimeError of `Side.ask`."""
    times: Times = {}
    for turn in range(turns):
        for case in cases:
            for side in sides if turn % 2 == 0 else sides[::-1]:
                answer = side.ask([case.format, case.tokens, case.sms, case.operations, samples])
                assert isinstance(answer, dict)
                for operation, us in answer.items():
                    times.setdefault(case.name(operation), {}).setdefault(side.name, []).append(us)
        yield times


def table(times: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """As Markdown."""
    sides = list(dict.fromkeys(name for found in times.values() for name in found))
    lines = []
    for what, found in times.items():
        middle = {name: median(turns) for name, turns in found.items()}
        others = [f"{middle[name]:.2f} ({middle[name] / middle[HERE]:.3f})" for name in sides if name != HERE]
        lines.append((what, f"{middle[HERE]:.2f}", *others))
    return markdown(("operation", HERE, *(name for name in sides if name != HERE)), lines)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, nargs="+", metavar="DIR", required=True, help="other checkouts")
    parser.add_argument("--format", default=FORMATS, metavar="F[,F]", help="(default: %(default)s)")
    parser.add_argument("--tokens", default=TOKENS, metavar="T[,T]", help="of every rank (default: %(default)s)")
    parser.add_argument("--sms", default="all", metavar="N[,N]", help="budgets of SMs (default: %(default)s)")
    parser.add_argument("--operations", default=OPERATIONS, metavar="O[,O]", help="(default: %(default)s)")
    about = "of rows, rank-major ones without exact sums (default: %(default)s)"
    parser.add_argument("--order", choices=ROW_ORDERS, default=EXPERT_MAJOR, help=about)
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=100, metavar="N", help="of a turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for all times, as JSON, behind each turn")
    args = parser.parse_args()
    operations = words_of(parser, "operations", args.operations, MEASURED)
    if args.order != EXPERT_MAJOR:  # where sums are partial
        operations = [one for one in operations if "exact" not in one]
        if not operations:
            parser.error(f"operations = {args.operations}: must have one without exact sums in order {args.order}")
    budgets = budgets_of(parser, args.sms)
    at_least_one(parser, turns=args.turns, samples=args.samples)
    try:
        places = places_of(args.against)
        cases = cases_of(format_names(args.format), token_counts(args.tokens), budgets, operations)
        machine = environment(parse_devices("auto", MAIN.num_experts), reproduce("perf.kernel_turns", sys.argv[1:]))
    except EPConfigError as error:
        parser.error(str(error))
    times: Times = {}
    with ExitStack() as stack:
        sides = [stack.enter_context(side_of(name, folder, order=args.order)) for name, folder in places.items()]
        for times in measure_turns(sides, cases, args.turns, args.samples):
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"machine": machine, "times": times}, indent=1) + "\n")
    sys.stdout.write(table(times) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
