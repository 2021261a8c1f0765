"""The README's section on speed and docs/performance.md, from runs: `python -m perf.report perf/results/<run> ...`, the
main one first.

It replaces what is between the README's markers, all of the page, and the tables beside each run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from cute_ep.bench.ceilings import Ceilings
from perf import tables
from perf.cases import MAIN, QUICK_FORMATS
from perf.losses import losses_text, peers_lines
from perf.model import commit_of, elsewhere_table, fit_for, read_run, shares_gpus, summary_table
from perf.peers import CHAINED
from perf.tables import (
    CONDITIONS_TEXT,
    FLOOR_TEXT,
    ceilings_text,
    conditions_table,
    exact_pairs,
    exact_text,
    machine_text,
    medians,
    mirror_bias,
    mirror_table,
    mirror_title,
    peers_table,
    peers_text,
    provenance_text,
    short_commit,
)

ROOT = Path(__file__).parents[1]
README, MORE, LOG = ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "perf" / "LOG.md"
PLOTS = {
    "peers.svg": "Time of a pair beside NCCL and DeepEP by tokens",
    "latency.svg": "Time of dispatch, partial combine and their pair by tokens, measured, modelled and floor",
}
"""File -> what it shows, for those who do not see it."""
README_PLOTS = ("peers.svg",)
MODES = ("partial", "exact")
README_TOKENS = (1, 16, 128, 1024, 4096)
HEADLINE_TOKENS = (1, 128, 4096)
TABLES = "tables.md"
STANDING_TEXT = (
    "All times are of rounds that follow one another at once in a graph, so that with few tokens a launch takes its "
    "SMs while the one before ends (in a layer matmuls stand between). Four input sets alternate (all libraries); "
    "small ones stay in L2. Our output buffers are sized to the rows that arrive."
)


def replace_between(text: str, name: str, section: str) -> str:
    """`text` with `section` between the markers of `name`; ValueError when they are not there once each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"must have {begin} and, after it, {end} once each")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{section.strip()}\n{end}{rest.partition(end)[2]}"


def headline(run: dict) -> str:
    """How much faster than what, in a few sentences; "" without pairs or peers."""
    partial, exact = medians(run, "pair"), exact_pairs(run)
    points = [(tokens, "bf16") for tokens in HEADLINE_TOKENS if (tokens, "bf16") in partial]
    if not points or not run["peers"]:
        return ""

    def best(family: str, point: tuple[int, str]) -> float:
        pairs = [row for row in run["peers"] if row["operation"] == "pair" and row["peer"].startswith(family)]
        return min((row["p50_us"] for row in pairs if (row["tokens"], row["format"]) == point), default=float("nan"))

    def times(own: Mapping[tuple[int, str], float]) -> str:
        return " / ".join(f"{own[point]:.{1 if own[point] < 100 else 0}f}" for point in points)

    def faster(own: Mapping[tuple[int, str], float], family: str) -> str:
        return " / ".join(f"{best(family, point) / own[point]:.1f}" for point in points)

    gpus = list(run["machine"]["gpus"].values())
    sizes = " / ".join(str(tokens) for tokens, _ in points)
    note = "" if medians(run, "pair_exact") else " (here a dispatch and a combine timed separately and added)"
    largest = points[-1]
    lost = [name for name in ("NCCL", "DeepEP") if best(name.lower(), largest) < exact[largest]]
    warning = f", so with {largest[0]} tokens it loses to {' and '.join(lost)}" if lost else ""
    return (
        f"On {len(gpus)} x {gpus[0]} (hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, {sizes} BF16 "
        f'tokens per rank) a dispatch and a combine take {times(partial)} us with `mode="partial"`: '
        f"{faster(partial, 'nccl')} times as fast as the fastest NCCL collectives measured beside them, "
        f"{faster(partial, 'deepep')} times as fast as DeepEP V1. The default mode, `exact`{note}, takes "
        f"{times(exact)} us: {faster(exact, 'nccl')} and {faster(exact, 'deepep')} times as fast{warning}. "
        "[Speed](#speed) says how this was measured."
    )


def conditions_text(run: dict) -> str:
    """Pairs under other conditions; "" where none were measured."""
    table = conditions_table(run)
    return f"{CONDITIONS_TEXT}\n\n{table}" if table else ""


def explained_text(run: dict, fits: dict) -> str:
    """How well the model explains the run; "" for a run without cases."""
    table = summary_table(run, fits)
    words = (
        "The model of `perf/model.py` against this run. Its constants are fitted to dispatch and both combines of "
        f"{MAIN.text} with uniform routing, each measured alone, in all runs of this commit; only what was not fitted "
        "tests it, of that shape and routing the pairs:"
    )
    return f"{words}\n\n{table}" if table else ""


def predictions_text(run: dict, fits: dict) -> str:
    """What the model says of machines that were not measured; "" when it knows no rates for this one."""
    table = elsewhere_table(fits, Ceilings(**run["ceilings"]), next(iter(run["machine"]["gpus"].values())))
    words = "What the model predicts, not measured, in microseconds; overheads, flags and arithmetic are Hopper's:"
    return f"{words}\n\n{table}" if table else ""


def host_text(run: dict, folder: Path, page: Path) -> str:
    """What queueing a pair takes of the host, and how far those times can be trusted; "" where it was not measured."""
    table = peers_table(run, CHAINED, "host_us")
    own = [time for (_, fmt), time in medians(run, CHAINED, "host_us").items() if fmt in QUICK_FORMATS]
    if not table or not own:
        return ""
    return (
        "What a thread takes to queue a pair without a graph, in microseconds. Ours is nearly the same work at "
        f"every size and in every format: that it took {min(own):.0f} to {max(own):.0f} us says how restless the "
        f"machine's CPU was, which the run's [README]({link(folder / 'README.md', page)}) describes. Smaller "
        f"differences say nothing.\n\n{table}"
    )


def tables_text(folder: Path, page: Path) -> str:
    """Where all tables of a run are, for a reader of `page`."""
    which = "both combines, tails, other shapes, Zipf routing, SM budgets, SwiGLU"
    return f"All tables ({which}): [{folder.name}]({link(folder / 'tables.md', page)})."


def paragraphs(parts: Iterable[str]) -> str:
    """Those of the parts that are not empty, an empty line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip())


def mirror_text(run: dict, runs: Iterable[dict]) -> str:
    """What `perf.mirror` found on the run's machine, and what that is worth; "" where it was not run. How far the
    mirror is off is taken from two of `runs` with the same kernels, of this run's commit if there are any."""
    cases = run.get("mirror", ())
    if not cases:
        return ""
    every, ranks = list(runs), cases[0]["ranks"]
    known = [
        (commit_of(mirrored), mirror_bias(mirrored, real))
        for mirrored in [run, *every]
        for real in every
        if mirrored.get("mirror")
        and mirrored["mirror"][0]["ranks"] == ranks == len(real["machine"]["gpus"])
        and commit_of(mirrored) == commit_of(real)
        and not shares_gpus(real)
    ]
    if not known:
        return f"{mirror_title(cases)}, which is optimistic by an unknown amount:\n\n{mirror_table(cases)}"
    commit, bias = known[0]
    mean = sum(bias.values()) / len(bias)
    return (
        f"{mirror_title(cases)}. That is optimistic: with the kernels of {short_commit(commit)}, {ranks} GPUs took "
        f"{min(bias.values()):.3f} to {max(bias.values()):.3f} times as long, {mean:.3f} on average. In brackets: the "
        f"time multiplied by the ratio {ranks} GPUs / 2 GPUs measured at {short_commit(commit)} for that operation, "
        f"format and size.\n\n{mirror_table(cases, bias)}"
    )


def link(target: Path, page: Path) -> str:
    """`target` as a link of `page` names it."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def plots_text(folder: Path, page: Path, names: Iterable[str]) -> str:
    """The plots of a run that are there, as `page` shows them."""
    files = {name: folder / name for name in names if (folder / name).exists()}
    return "\n".join(f"![{PLOTS[name]}]({link(path, page)})" for name, path in files.items())


def shape_text(run: dict) -> str:
    """Machine and problem."""
    shape = f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing"
    return f"{machine_text(run)}; {shape}."


def times_text(run: dict) -> str:
    """What the numbers of a table of pairs are."""
    return (
        "Dispatch and then combine, p50 in microseconds of CUDA-graph replay, slowest GPU, all SMs. *partial*: combine "
        f'with `mode="partial"`; {exact_text(run)}. Routing, quantisation and expansion to expert-major rows are '
        "inside ours."
    )


def section(run: dict, folder: Path, page: Path, more: Path, others: Iterable[dict] = ()) -> str:
    """The README's text of a run in `folder`; `page` is the README, `more` the page with the rest. Of `others` it says
    where the fastest pairs lose, once for each number of GPUs."""
    lines = list(peers_lines(run))
    seen = {len(run["machine"]["gpus"])}
    for other in others:
        gpus = len(other["machine"]["gpus"])
        lost_there = list(peers_lines(other))
        partial, exact = ([line for line in lost_there if line.startswith(f"Pairs with {m}")] for m in MODES)
        often = "; exact loses more often" if len(exact) > len(partial) else ""
        only = f"listed are partial pairs in graphs only{often}: [docs/performance.md]({link(more, page)})"
        if gpus not in seen:
            lines += [f"On {gpus} GPUs: {line[0].lower()}{line[1:-1]} ({only})." for line in partial]
        seen.add(gpus)
    lost = "\n".join(f"- {line}" for line in lines)
    parts = [
        shape_text(run),
        plots_text(folder, page, README_PLOTS),
        times_text(run),
        peers_table(run, "pair", sizes=README_TOKENS),
        "No other library here leaves rows in expert order without gaps, and none was tuned to these GPUs; "
        f"[docs/performance.md]({link(more, page)}) says what each one's times include."
        if run["peers"]
        else "",
        STANDING_TEXT,
        conditions_text(run),
        "Where another library was faster:\n\n" + lost if lost else "",
        f"[docs/performance.md]({link(more, page)}) has all sizes, other numbers of GPUs, where it loses in each run, "
        f"the model and its predictions; all tables of this run: [{folder.name}]({link(folder / TABLES, page)}). `make "
        f"perf` measures your machine; what was tried: [perf/LOG.md]({link(LOG, page)}).",
    ]
    return paragraphs(parts)


def run_text(folder: Path, run: dict, page: Path, runs: Iterable[dict]) -> list[str]:
    """All that the page says of a run."""
    every = list(runs)
    return [
        f"## {machine_text(run)}",
        provenance_text(run),
        plots_text(folder, page, PLOTS),
        f"Pairs. {exact_text(run)}." if run["cases"] else "",
        peers_table(run, "pair"),
        f"Ceilings of the same run: {ceilings_text(run['ceilings'])}.",
        conditions_text(run),
        host_text(run, folder, page),
        "Where it loses to another library, and where it is far from its floor:\n\n" + losses_text(run),
        explained_text(run, fit_for(run, every)),
        mirror_text(run, every),
        tables_text(folder, page),
    ]


def more_page(runs: Mapping[Path, dict], page: Path) -> str:
    """The page beside the README: `runs` by folder, the main one first. The model's constants come from all runs of a
    commit."""
    every = list(runs.values())
    main = every[0]
    parts = [
        "# Speed, beside what the README says",
        "Written by `python -m perf.report`, with the README's section; times as there.",
        STANDING_TEXT,
        f"{FLOOR_TEXT}.",
        f"What the times of other libraries include: {peers_text(main)}" if main["peers"] else "",
    ]
    for folder, run in runs.items():
        parts += run_text(folder, run, page, every)
    parts += [
        "## Other machines",
        predictions_text(main, fit_for(main, every)),
        f"`python -m perf.model {' '.join(link(one, README) for one in runs)}` says what ceilings explain.",
    ]
    return f"{paragraphs(parts)}\n"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="folder with a run.json, the main one first"
    )
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="(default: the project's)")
    parser.add_argument("--more", type=Path, default=MORE, metavar="FILE", help="page for the rest (default: likewise)")
    args = parser.parse_args()
    runs = {folder.resolve(): read_run(folder) for folder in args.folders}
    folder, run = next(iter(runs.items()))
    others = list(runs.values())[1:]
    try:
        text = replace_between(args.readme.read_text(), "headline", headline(run))
        text = replace_between(text, "perf", section(run, folder, args.readme, args.more, others))
    except ValueError as error:
        parser.error(f"{args.readme}: {error}")
    args.readme.write_text(text)
    args.more.write_text(more_page(runs, args.more))
    for folder, run in runs.items():
        (folder / TABLES).write_text(tables.page(run))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
