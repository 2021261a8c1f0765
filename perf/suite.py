"""The suite: ceilings, operations, SM budgets, SwiGLU and other libraries on this machine's GPUs, in one run.

`python -m perf.suite` (`make perf`) writes run.json, tables.md and, where matplotlib is installed, plots to
build/perf/<date>-<gpu>x<number>; `perf.report` keeps a run in perf/results. Exit code 1 when something could not be
measured; the notes in run.json say what. A machine that is lent for minutes takes a run in parts, with `--add`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from cute_ep.aot.library import Library, source_hash
from cute_ep.api.errors import EPConfigError
from cute_ep.bench.ceilings import Ceilings, floors, measure_ceilings
from cute_ep.bench.machine import describe_devices, environment, gpu_state, link_matrix, machine_name, parse_devices
from cute_ep.bench.measure import make_sets, measure
from cute_ep.runtime.connection import connected
from perf import peers, plots, tables
from perf.cases import MAIN, MIRROR_TOKENS, QUICK_FORMATS, Group, case_groups
from perf.command_line import words_of
from perf.mirror import GPUS, measure_mirror
from perf.orders import measure_orders
from perf.runs import ARTEFACTS, RUN, reproduce
from perf.sm_ceiling import NoCompilerError
from perf.sweep import measure_sweep, measure_sweep_ceilings
from perf.swiglu import measure_swiglu

TABLES = "tables.md"
SECTIONS = ("cases", "orders", "sweep", "mirror", "swiglu", "compiled", "peers")
QUICK_SECTIONS = ("cases", "swiglu")
COMPILED_TIMEOUT_S = 150.0


def library_facts(folder: str | None) -> dict[str, str | int | list[str]]:
    """Which kernels were measured: the digest of the sources that all in use were made from, that of their cubins, how
    many they are, for which architectures, and the DSL that compiled them."""
    entries = sorted(Library(folder).entries.values(), key=lambda entry: (entry.variant.arch, entry.variant.symbol))
    cubins = hashlib.sha256("".join(entry.sha256 for entry in entries).encode()).hexdigest()[:16]
    dsl, arches = (sorted(set(words)) for words in ([e.dsl for e in entries], [e.variant.arch for e in entries]))
    return {"sources": source_hash(), "cubins": cubins, "kernels": len(entries), "arches": arches, "dsl": dsl}


class Suite:
    """One run and what it has found so far, kept on disk after every section."""

    def __init__(
        self,
        devices: Sequence[str],
        folder: Path,
        library: str | None,
        quick: bool,
        console: Console,
        commit: str | None = None,
        packages: Path | None = None,
        others: Sequence[str] = tuple(peers.PEERS),
    ) -> None:
        self.devices, self.folder, self.library, self.quick = list(devices), folder, library, quick
        self.console, self.packages, self.peers = console, packages, others
        self.failed = False
        machine = environment(devices, reproduce("perf.suite", sys.argv[1:]))
        machine |= {"links": link_matrix(), "commit": commit or machine["commit"], "library": library_facts(library)}
        self.run: dict = {"machine": machine, "quick": quick, "notes": [], "seconds": {}, "gpu_state": {}}
        self.run |= {"ceilings": {}, "cases": [], "orders": [], "sweep": [], "sm_ceilings": []}
        self.run |= {"mirror": [], "swiglu": [], "peers": []}

    def add_to(self, earlier: dict, sections: Sequence[str]) -> None:
        """Continue a run with further sections. ValueError: it is not of these GPUs, sources, kernels and versions, or
        has a section, or one of its peers, already."""
        before, now = earlier["machine"], self.run["machine"]
        for name in before.keys() | now.keys():
            if name not in ("command", "date") and before.get(name) != now.get(name):
                raise ValueError(f"the run in {self.folder} is of {name} {before.get(name)}, this one {now.get(name)}")
        again = [name for name in sections if name in earlier["gpu_state"] and name != "peers"]
        if "peers" in sections:
            again += [peer for peer in self.peers if any(row["peer"] == peer for row in earlier["peers"])]
        if again:
            raise ValueError(f"the run in {self.folder} has {', '.join(again)} already: leave that out")
        command = " && ".join([before["command"], now["command"]])
        self.run = earlier | {"machine": before | {"command": command}}

    def say(self, text: str) -> None:
        """One line of progress."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def note(self, text: str, *, failure: bool = True) -> None:
        """Something that the tables should say; a failure makes the run exit with 1."""
        self.run["notes"].append(text)
        self.failed |= failure
        self.console.print(text, style="red" if failure else "yellow", highlight=False, soft_wrap=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section, note its failure instead of raising it, and save."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # the other sections have not failed
            self.say(traceback.format_exc())
            self.note(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self.run["seconds"][name] = round(self.run["seconds"].get(name, 0) + time.perf_counter() - start, 1)
        torch.cuda.empty_cache()
        self.save()

    def look(self, name: str) -> None:
        """Keep the GPUs' clocks, power and temperature at the end of a section, while they are those of the work."""
        self.run["gpu_state"][name] = gpu_state()

    def save(self) -> None:
        """Write the JSON file and the tables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RUN).write_text(json.dumps(self.run, indent=1) + "\n")
        (self.folder / TABLES).write_text(tables.page(self.run))

    def measure_group(self, group: Group, ceilings: Ceilings) -> None:
        """All points of one shape and format."""
        try:
            cfg = group.shape.config(group.format, len(self.devices), group.max_tokens)
        except EPConfigError as error:
            self.note(f"{group.shape.text} {group.format}: {error}", failure=False)
            return
        with connected(cfg, self.devices, library=self.library) as communicators:
            for tokens, routing in group.points:
                sets = make_sets(cfg, self.devices, tokens, routing)
                for case in measure(communicators, sets, group.operations(tokens, routing)):
                    self.run["cases"].append({"shape": group.shape.text} | case | floors(case["parts"], ceilings))
                del sets

    def measure_sm_ceilings(self) -> None:
        """What the SMs of the sweep can do at best, where their kernels can be compiled."""
        try:
            self.run["sm_ceilings"] = measure_sweep_ceilings(self.devices, self.say)
        except NoCompilerError as error:
            self.note(f"SM ceilings: {error}", failure=False)

    def measure_compiled(self, memory: float) -> None:
        """`perf.compiled`, where it works."""
        file = self.folder / "compiled.json"
        words = [sys.executable, "-m", "perf.compiled", "--memory", str(memory), "--device", self.devices[0]]
        why = None
        try:
            done = subprocess.run(
                [*words, "--out", str(file)], capture_output=True, text=True, timeout=COMPILED_TIMEOUT_S, check=False
            )
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        except subprocess.TimeoutExpired:
            why = f"stopped after {COMPILED_TIMEOUT_S:.0f} s"
        if why is not None:
            self.note(f"torch.compile: {why}", failure=False)
        if file.exists():
            self.run["compiled"] = json.loads(file.read_text())
            file.unlink()


def run_suite(suite: Suite, sections: Sequence[str]) -> None:
    """Ceilings, then the named sections; other libraries last, when this process holds no memory."""
    if not suite.run["ceilings"]:
        with suite.section("ceilings"):
            suite.run["ceilings"] = vars(measure_ceilings(suite.devices, suite.library))
            suite.look("ceilings")
    if not suite.run["ceilings"]:
        return
    ceilings = Ceilings(**suite.run["ceilings"])
    suite.say(tables.ceilings_text(suite.run["ceilings"]))

    def work(name: str, measure_all: Callable[[], None]) -> None:
        if name in sections:
            with suite.section(name):
                measure_all()
                suite.look(name)

    for group in case_groups(suite.quick) if "cases" in sections else ():
        with suite.section(f"{group.shape.text} {group.format}"):
            suite.measure_group(group, ceilings)
        seconds = suite.run["seconds"][f"{group.shape.text} {group.format}"]
        suite.say(f"{group.shape.text} {group.format}: {len(group.points)} points in {seconds:.1f} s")
    if "cases" in sections:
        suite.look("cases")
    first, memory = suite.devices[0], ceilings.memory
    orders = suite.run["orders"]
    work("orders", lambda: orders.extend(measure_orders(suite.devices, suite.library, ceilings, suite.say)))
    work("sweep", lambda: suite.run["sweep"].extend(measure_sweep(suite.devices, suite.library, suite.say)))
    if "sweep" in sections:
        with suite.section("sm_ceilings"):
            suite.measure_sm_ceilings()
    if len(suite.devices) == len(set(suite.devices)) == GPUS:
        mirror = suite.run["mirror"]
        work("mirror", lambda: mirror.extend(measure_mirror(QUICK_FORMATS, MIRROR_TOKENS, suite.library, suite.say)))
    swiglu = suite.run["swiglu"]
    work("swiglu", lambda: swiglu.extend(measure_swiglu(first, memory, suite.library, suite.quick, suite.say)))
    work("compiled", lambda: suite.measure_compiled(memory))

    def others() -> None:
        rows, versions, notes = suite.run["peers"], suite.run.get("peer_versions", {}), suite.run["notes"]

        def save(found: dict) -> None:
            suite.run |= {"peers": rows + found["rows"], "peer_versions": found["versions"]}
            suite.run["notes"] = notes + found["notes"]
            suite.save()

        count, names = len(dict.fromkeys(suite.devices)), suite.peers
        peers.run_peers(
            count, MAIN, suite.quick, suite.say, names, save=save, packages=suite.packages, versions=versions
        )

    work("peers", others)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"fewer cases, and only {', '.join(QUICK_SECTIONS)}")
    parser.add_argument("--sections", metavar="S[,S]", help=f"out of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--devices", default="auto", metavar="LIST", help="as for cute-ep bench")
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels to look in first")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="other libraries, as for python -m perf.peers")
    parser.add_argument("--peers", default=",".join(peers.PEERS), metavar="P[,P]", help="(default all)")
    parser.add_argument("--add", action="store_true", help="to the run in --out, of the same machine and sources")
    parser.add_argument("--commit", metavar="HASH", help="of these sources, where there is no checkout to ask")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results (default build/perf/<date>-<machine>)"
    )
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    default = QUICK_SECTIONS if args.quick else SECTIONS
    chosen = words_of(parser, "sections", args.sections or ",".join(default), SECTIONS)
    others = words_of(parser, "peers", args.peers, peers.PEERS)
    try:
        devices = parse_devices(args.devices, MAIN.num_experts)
        if devices[0] == "cpu":
            raise EPConfigError("devices = 'cpu': the suite measures GPUs")
    except EPConfigError as error:
        parser.error(str(error))
    today = datetime.date.today().isoformat()
    folder = args.out or ARTEFACTS / f"{today}-{machine_name(devices)}"
    suite = Suite(devices, folder, args.library, args.quick, console, args.commit, args.packages, others)
    if args.add:
        try:
            suite.add_to(json.loads((folder / RUN).read_text()), chosen)
        except (OSError, ValueError) as error:
            parser.error(f"add: {error}")
    suite.say(describe_devices(devices))
    start = time.perf_counter()
    run_suite(suite, chosen)
    suite.run["seconds"]["all"] = round(suite.run["seconds"].get("all", 0) + time.perf_counter() - start, 1)
    suite.save()
    drawn = plots.draw(suite.run, suite.folder)
    if not drawn:
        suite.say(f"no plots without matplotlib; elsewhere: python -m perf.plots {suite.folder}")
    suite.say(f"{suite.folder} in {suite.run['seconds']['all']:.0f} s; keep it: python -m perf.report {suite.folder}")
    return int(suite.failed)


if __name__ == "__main__":
    raise SystemExit(main())
