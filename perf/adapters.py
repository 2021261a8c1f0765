"""What a call costs through an adapter, beside the call of a communicator that does the same in the same run.

    python -m perf.adapters --library build/library --out build/perf/adapters.json
    python -m perf.adapters --table build/perf/adapters.json

One process per GPU, also of one GPU; without GPUs one process on the CPU, whose times say nothing. An adapter whose
framework is not installed is a note. With two or more GPUs and DeepEP installed its own times are taken in the same
run, by `perf.peers`, and by `perf.deepep_worker` where its host waits. A file kept as
perf/results/<machine>-adapters.json is a table in docs/adapters.md (`python -m perf.report`).

vLLM and the other frameworks may want different versions of transformers. Then each environment makes a run
(`--adapters vllm`), and the files, such as <machine>-adapters.json and <machine>-vllm-adapters.json, are a table each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from perf import peers
from perf.cases import MAIN, Shape
from perf.cells import markdown
from perf.command_line import words_of
from perf.peer_list import LIBRARIES, PEERS
from perf.runs import kept_beside, reproduce, rounded
from perf.tables import machine_text

ADAPTERS = {
    "deepep_normal": "DeepEP V1, normal",
    "deepep_low_latency": "DeepEP V1, low latency",
    "deepep_elastic": "DeepEP V2",
    "flashinfer": "FlashInfer",
    "transformers": "transformers, experts",
    "megatron": "Megatron-core",
    "torchtitan": "torchtitan",
    "sglang": "SGLang",
    "vllm": "vLLM",
    "ops": "`cute_ep.ops`",
    "layer": "`cute_ep.nn.MoELayer`",
}
"""By the names of the functions in `perf.adapter_works` and `perf.framework_works`."""
WAITING = "deepep_normal"
"""The adapter whose host waits where DeepEP's own does, and the peer that `perf.deepep_worker` times."""
MODULES = {name: name for name in ("flashinfer", "transformers", "megatron", "torchtitan", "sglang", "vllm")}
TOKENS, QUICK_TOKENS = (16, 128, 4096), (128,)
TINY = Shape(256, 8, 2)
TINY_TOKENS = (8,)
"""Of the CPU."""
BUDGETS_S = dict.fromkeys(ADAPTERS, 150.0)
TABLE_TEXT = (
    "By tokens per rank: p50 in us of the slowest rank, in brackets divided by what a communicator takes for the same "
    "tokens, with as many SMs, into memory that stays. *waits*: the host waits for numbers of rows, so both times are "
    "the host's, from the call to the end of its work; others are of CUDA graphs. *host*: us until the call returns, "
    "without a graph, with the fewest tokens. *DeepEP*: its own call in the same run"
)
SAME = 0.05
"""Combines of an adapter whose times differ by less are shown once: its formats and options change dispatch only."""
SAME_TEXT = f"A combine within {SAME:.0%} of one of the same adapter above is not listed"
NOTHING_TEXT = "Not measured yet; `python -m perf.adapters` does."


@contextmanager
def kernels_from(library: str | None) -> Iterator[None]:
    """Processes started inside find the kernels of a folder where communicators look for kernels."""
    if library is None:
        yield
        return
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cute_ep").symlink_to(Path(library).resolve())
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def run_adapters(
    world: int,
    shape: Shape,
    tokens: Sequence[int],
    names: Sequence[str] = tuple(ADAPTERS),
    say: Callable[[str], None] = lambda text: None,
    logs: Path | None = None,
    checkout: Path | None = None,
) -> dict:
    """Run adapters one after the other in `world` processes. `checkout`: as of `perf.peers.run_workers`.

    Returns:
        "rows", each with "adapter", "format", "tokens", "rows" (that the first rank receives, one per token and
        expert), "operation" (dispatch, combine, or pair and layer, which are both), "about" (how the adapter is
        called), and, of the adapter and with "native_" before the name of the communicator: "p50_us", "how" (graph,
        queued, waited: `perf.adapter_worker`) and "host_us"; and "notes".
    """
    found: dict = {"rows": [], "notes": []}
    left: Sequence[str] = []
    for name in names:
        if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            found["notes"].append(f"{name}: not present: no module {MODULES[name]}")
        else:
            left = [*left, name]
    command = partial(peers.worker_command, module="perf.adapter_worker", budgets=BUDGETS_S)
    while left:
        rows, notes, left = peers.run_workers(
            left, world, shape, tokens, logs, command=command, budgets=BUDGETS_S, checkout=checkout
        )
        found["rows"] += [{"adapter": row.pop("peer")} | row for row in rows]
        found["notes"] += notes
        say(f"{len(found['rows'])} results")
    return found


def run_deepep(
    gpus: int,
    shape: Shape,
    tokens: Sequence[int],
    names: Sequence[str] = tuple(ADAPTERS),
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
    logs: Path | None = None,
) -> dict:
    """Run DeepEP itself for those adapters that have its interface.

    Returns:
        What `perf.peers.run_peers` returns. Further rows are of dispatches that the host waits for, with the batch
        sizes `tokens`: each has "peer" and, as an adapter's, "format", "tokens", "rows", "operation", "how" (waited),
        "p50_us" and "host_us".
    """
    found = peers.run_peers(gpus, shape, quick, say, [name for name in names if name in PEERS], logs=logs)
    if WAITING in names:
        rows, notes = run_deepep_waiting(gpus, shape, tokens, None if logs is None else logs / "waiting")
        found["rows"] += rows
        found["notes"] += notes
        say(f"{WAITING}: {len(rows)} results where the host waits")
    return found


def run_deepep_waiting(
    gpus: int, shape: Shape, tokens: Sequence[int], logs: Path | None = None
) -> tuple[list[dict], list[str]]:
    """Rows of `run_deepep` of dispatches that the host waits for, and notes; none with one GPU or without DeepEP."""
    if gpus < 2 or importlib.util.find_spec(str(LIBRARIES[PEERS[WAITING].library].module)) is None:
        return [], []
    command = partial(peers.worker_command, module="perf.deepep_worker", budgets=BUDGETS_S)
    rows, notes, _ = peers.run_workers([WAITING], gpus, shape, tokens, logs, command=command, budgets=BUDGETS_S)
    return rows, [f"DeepEP where its host waits: {note}" for note in notes]


def theirs(run: Mapping, row: Mapping, field: str = "p50_us") -> float | None:
    """What DeepEP itself took in the same run for what a row is of, if that was measured: waited for as the row was,
    or not."""
    names = ("format", "tokens", "operation")
    for one in run["peers"]:
        alike = (one.get("how") == "waited") == (row["how"] == "waited")
        if alike and one["peer"] == row["adapter"] and all(one[name] == row[name] for name in names):
            return one.get(field)
    return None


def table(run: Mapping) -> str:
    """A run as Markdown: a line for all batch sizes of an adapter's operation."""
    sizes = sorted({row["tokens"] for row in run["rows"]})
    found: dict[tuple[str, ...], dict[int, Mapping]] = {}
    for row in run["rows"]:
        name = ADAPTERS[row["adapter"]] + (f", {row['about']}" if "about" in row else "")
        how = "waits" if row["how"] == "waited" else row["how"]
        found.setdefault((name, row["operation"], row["format"], how), {})[row["tokens"]] = row

    def cell(row: Mapping | None) -> str:
        if row is None:
            return ""
        other = theirs(run, row)
        beside = f"{row['p50_us'] / row['native_p50_us']:.2f}" + ("" if other is None else f", DeepEP {other:.1f}")
        return f"{row['p50_us']:.1f} ({beside})"

    lines = []
    for key, every in found.items():
        first = every[min(every)]
        other = theirs(run, first, "host_us")
        host = f"{first['host_us']:.0f} / {first['native_host_us']:.0f}"
        host += "" if other is None else f", DeepEP {other:.0f}"
        lines.append((*key, *(cell(every.get(tokens)) for tokens in sizes), host))
    return markdown(("adapter", "operation", "format", "how", *map(str, sizes), "host / native"), lines)


def without_repetition(run: Mapping) -> dict:
    """A run without the combines that take as long, at every size, as one of the same adapter before them."""
    times: dict[str, dict[tuple, dict[int, float]]] = {}
    for row in run["rows"]:
        if row["operation"] == "combine":
            every = times.setdefault(row["adapter"], {})
            every.setdefault((row.get("about"), row["format"], row["how"]), {})[row["tokens"]] = row["p50_us"]
    left_out = set()
    for name, every in times.items():
        shown: list[dict[int, float]] = []
        for key, own in every.items():
            if any(own.keys() == one.keys() and all(abs(own[at] / one[at] - 1) < SAME for at in own) for one in shown):
                left_out.add((name, *key))
            else:
                shown.append(own)

    def kept_row(row: Mapping) -> bool:
        key = (row["adapter"], row.get("about"), row["format"], row["how"])
        return row["operation"] != "combine" or key not in left_out

    return {**run, "rows": [row for row in run["rows"] if kept_row(row)]}


def text_of(run: Mapping) -> str:
    """A run as JSON, a line for each field and each result."""
    lists = ("rows", "peers")
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in run.items() if name not in lists]
    for name in lists:
        rows = ({field: rounded(field, value) for field, value in row.items()} for row in run[name])
        parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "]")
    return "{" + ",\n".join(parts) + "}\n"


def section(runs: Mapping[str, Mapping]) -> str:
    """The text of docs/adapters.md on the kept runs, by name."""
    if not runs:
        return NOTHING_TEXT
    measured = {row["adapter"] for run in runs.values() for row in run["rows"]}
    parts = []
    for name, run in runs.items():
        data = f"[Data](../perf/results/{name}.json)"
        sizes = f"hidden, experts, top-k {run['shape'].replace('/', ', ')}"
        elsewhere = measured - {row["adapter"] for row in run["rows"]}
        notes = (f"- {note}\n" for note in run["notes"] if note.split(":")[0] not in elsewhere)
        parts += [f"{data}: {machine_text(run)}; {sizes}.", table(without_repetition(run)), "".join(notes)]
    return "\n\n".join([f"{TABLE_TEXT}. {SAME_TEXT}.", *(part.strip() for part in parts if part)])


def kept(results: Path) -> dict[str, dict]:
    """The kept runs by name."""
    return kept_beside("adapters", results)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a run, and measure nothing")
    parser.add_argument("--adapters", default=",".join(ADAPTERS), metavar="A[,A]", help="(default all: %(default)s)")
    parser.add_argument("--gpus", type=int, metavar="N", help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_TOKENS[0]} tokens per rank")
    parser.add_argument("--commit", metavar="HASH", help="of these sources, where there is no checkout to ask")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the processes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results (default: standard output)")
    args = parser.parse_args()
    if args.table:
        sys.stdout.write(table(json.loads(args.table.read_text())))
        return 0
    names = words_of(parser, "adapters", args.adapters, ADAPTERS)

    from cute_ep.bench.machine import environment, link_matrix

    gpus = peers.gpu_count() if args.gpus is None else args.gpus
    devices = [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
    shape, tokens = (MAIN, QUICK_TOKENS if args.quick else TOKENS) if gpus else (TINY, TINY_TOKENS)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    machine = environment(devices, reproduce("perf.adapters", sys.argv[1:]))
    machine |= {"links": link_matrix(), "commit": args.commit or machine["commit"]}
    run = {"machine": machine, "quick": args.quick, "shape": shape.text}
    with kernels_from(args.library):
        run |= run_adapters(len(devices), shape, tokens, names, say, args.logs)
    found = run_deepep(gpus, shape, tokens, names, args.quick, say, args.logs)
    run |= {"peers": found["rows"], "peer_versions": found["versions"], "notes": run["notes"] + found["notes"]}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text_of(run))
    else:
        sys.stdout.write(text_of(run))
    return int(not run["rows"])


if __name__ == "__main__":
    raise SystemExit(main())
