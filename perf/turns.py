"""Calls of adapters for which the host waits, in turns with those of another checkout on the same machine.

    git worktree add build/before HASH
    (cd build/before && python -m cute_ep build --arch sm_90a --out build/library)
    python -m perf.turns --against build/before --library build/library --out build/perf/turns.json

Each checkout needs kernels of its own in build/library. A turn is a run of `perf.adapters` in new processes, here and
then there. Of each call the table has the median of the turns. With two or more GPUs and DeepEP its own dispatch is
timed behind the last turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from perf import adapters, peers
from perf.adapter_worker import WAITED
from perf.cases import MAIN
from perf.cells import markdown
from perf.command_line import at_least_one, words_of

NAMES = "deepep_normal", "deepep_elastic", "sglang", "megatron", "torchtitan", "transformers", "vllm"
"""Adapters that have calls for which the host waits."""
Key = tuple[str, str, str, str, int]
"""Adapter, operation, how it is called, format, tokens."""
TITLE = "us here / there (ratio; DeepEP's own and the ratio to it), median of the turns, slowest rank"


def key_of(row: Mapping) -> Key:
    return row["adapter"], row["operation"], row.get("about", ""), row["format"], row["tokens"]


def medians(turns: Iterable[Sequence[Mapping]], field: str) -> dict[Key, float]:
    """Of each call that the host waits for, by the turns that have it."""
    found: dict[Key, list[float]] = {}
    for rows in turns:
        for row in rows:
            if row["how"] == WAITED:
                found.setdefault(key_of(row), []).append(row[field])
    return {key: median(values) for key, values in found.items()}


def table(run: Mapping, field: str) -> str:
    """Times of a run as Markdown. `field`: "p50_us", to the end of a call's work, or "host_us", until it returns."""
    here, there = medians(run["here"], field), medians(run["there"], field)
    own = {("deepep_normal", row["operation"], "", row["format"], row["tokens"]): row for row in run["deepep"]}
    sizes = sorted({tokens for *_, tokens in here})

    def cell(key: Key) -> str:
        if key not in here or key not in there:
            return ""
        text = f"{here[key]:.0f} / {there[key]:.0f} ({here[key] / there[key]:.2f}"
        other = own.get(key)
        return f"{text})" if other is None else f"{text}; {other[field]:.0f}, {here[key] / other[field]:.2f})"

    lines = []
    for name, operation, about, fmt in dict.fromkeys(key[:4] for key in here):
        called = adapters.ADAPTERS[name] + (f", {about}" if about else "")
        lines.append((called, operation, fmt, *(cell((name, operation, about, fmt, size)) for size in sizes)))
    return markdown(("adapter", "operation", "format", *map(str, sizes)), lines)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, metavar="DIR", required=True, help="the other checkout")
    parser.add_argument("--library", metavar="DIR", help="folder of this checkout's kernels")
    parser.add_argument("--adapters", default=",".join(NAMES), metavar="A[,A]", help="(default: %(default)s)")
    parser.add_argument("--tokens", default=",".join(map(str, adapters.TOKENS)), metavar="T[,T]")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the processes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args()
    names = words_of(parser, "adapters", args.adapters, NAMES)
    at_least_one(parser, turns=args.turns)
    gpus = peers.gpu_count()
    shape, tokens = MAIN, [int(word) for word in args.tokens.split(",")]
    if not gpus:
        shape, tokens = adapters.TINY, list(adapters.TINY_TOKENS)
    places = {"here": (args.library, None), "there": (str(args.against / "build" / "library"), args.against.resolve())}
    run: dict = {"shape": shape.text, "here": [], "there": [], "notes": []}
    for turn in range(args.turns):
        for name, (library, checkout) in places.items():
            logs = None if args.logs is None else args.logs / f"{name}{turn}"
            with adapters.kernels_from(library if gpus else None):
                found = adapters.run_adapters(max(gpus, 1), shape, tokens, names, logs=logs, checkout=checkout)
            run[name].append(found["rows"])
            run["notes"] += [f"{name}, turn {turn}: {note}" for note in found["notes"]]
            sys.stderr.write(f"turn {turn}, {name}: {len(found['rows'])} results\n")
    waiting = adapters.WAITING in names
    run["deepep"], notes = adapters.run_deepep_waiting(gpus, shape, tokens, args.logs) if waiting else ([], [])
    run["notes"] += notes
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(run))
    notes = "".join(f"- {note}\n" for note in run["notes"])
    for field, what in (("p50_us", "To the end of the work"), ("host_us", "Until the call returns")):
        sys.stdout.write(f"{what}: {TITLE}\n\n{table(run, field)}\n\n")
    sys.stdout.write(notes)
    return int(not all(run["here"]) or not all(run["there"]))


if __name__ == "__main__":
    raise SystemExit(main())
