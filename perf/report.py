"""The README's section on speed and docs/performance.md, from runs: `python -m perf.report perf/results/<run> ...`, the
main one first.

It replaces what is between the README's markers, and all of the page.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cute_ep.ceilings import Ceilings
from perf.cases import MAIN
from perf.model import elsewhere_table, fit_for, read_run, summary_table
from perf.peers import CHAINED, PEER_SMS, PEERS
from perf.tables import (
    by_point,
    ceilings_text,
    exact_pairs,
    machine_text,
    medians,
    mirror_table,
    mirror_title,
    peers_table,
    ratio,
)

BEGIN, END = "<!-- perf:begin -->", "<!-- perf:end -->"
ROOT = Path(__file__).parents[1]
README, MORE, LOG = ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "perf" / "LOG.md"
PLOTS = {
    "latency.svg": "Time of dispatch, partial combine and their pair by tokens, measured, modelled and floor",
    "peers.svg": "Time of a pair beside NCCL and DeepEP by tokens",
}
"""File -> what it shows, for those who do not see it."""
WORST = 3
"""Operations farthest from their floor that the text names."""
BYTES_TOKENS = 128
"""From this many tokens on a ratio to the floor says something about bytes; below, about latency."""


def replace_between(text: str, section: str) -> str:
    """`text` with `section` between the markers; ValueError when they are not there once each, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"must have {BEGIN} and, after it, {END} once each")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section.strip()}\n{END}{rest.partition(END)[2]}"


def lost_to(
    rows: Iterable[dict], operation: str, own: Mapping[tuple[int, str], float]
) -> Iterator[tuple[str, str, int, str]]:
    """(peer, format, tokens, both times) of an operation wherever another library's takes less than `own`."""
    for row in rows:
        ours = own.get((row["tokens"], row["format"]))
        if row["operation"] == operation and ours is not None and row["p50_us"] < ours:
            times = f"{row['p50_us']:.1f} us, here {ours:.1f}"
            yield row["peer"].replace("_", " "), row["format"], row["tokens"], times


def queued(rows: Iterable[dict]) -> list[dict]:
    """Pairs without a graph whose host time is known: what takes longer counts, the GPUs or the host that queues."""
    known = (row for row in rows if row["operation"] == CHAINED and "host_us" in row)
    return [row | {"p50_us": max(row["p50_us"], row["host_us"])} for row in known]


def peers_lines(run: dict) -> Iterator[str]:
    """Where another library is faster: pairs with either combine and without a graph, operations on as many SMs as it
    takes."""
    pairs = list(lost_to(run["peers"], "pair", medians(run, "pair")))
    yield from (f"{peer} {fmt} at {tokens} tokens: {times}." for peer, fmt, tokens, times in pairs)
    if run["peers"] and not pairs:
        yield "No pair of another library in the same format was faster in this run."
    exact: dict[str, dict[int, str]] = {}
    for peer, fmt, tokens, times in lost_to(run["peers"], "pair", exact_pairs(run)):
        exact.setdefault(f"{peer} {fmt}", {})[tokens] = times
    for name, lost in exact.items():
        where = ", ".join(map(str, lost))
        yield f"Exact combine, pairs: {name} at {where} tokens; at {max(lost)} {lost[max(lost)]}."
    own = medians({"cases": queued(run["cases"])}, CHAINED)
    for peer, fmt, tokens, times in lost_to(queued(run["peers"]), CHAINED, own):
        yield f"Without a graph, the longer of the GPUs' and the host's time, {peer} {fmt} at {tokens} tokens: {times}."
    for name, sms in PEER_SMS.items():
        theirs = [row for row in run["peers"] if row["peer"] == name]
        for operation, ours in (("dispatch", "dispatch"), ("combine", "combine_partial")):
            own = {
                (case["tokens"], case["format"]): case["p50_us"]
                for case in run["sweep"]
                if (case["sms"], case["operation"]) == (sms, ours)
            }
            for peer, fmt, tokens, times in lost_to(theirs, operation, own):
                yield f"On {sms} SMs each, {operation} of {peer} {fmt} at {tokens} tokens: {times}."


def losses_text(run: dict) -> str:
    """Where another library is faster, and which operations are farthest from their floors."""
    lines = [f"- {line}" for line in peers_lines(run)]
    own = {swiglu_key(row): row["p50_us"] for row in run["swiglu"]}
    for row in run.get("compiled", ()):
        ours = own.get(swiglu_key(row))
        if ours is not None and row["p50_us"] < ours:
            text = f"torch.compile of SwiGLU {row['format']} at {row['rows']} rows of {row['width']}"
            lines.append(f"- {text}: {row['p50_us']:.0f} us, here {ours:.0f} us.")
    for chosen in ("uniform", "zipf"):
        far = sorted(
            (ratio(case), tokens, fmt, name)
            for (shape, routing, tokens, fmt), every in by_point(run["cases"]).items()
            for name, case in every.items()
            if (shape, routing) == (MAIN.text, chosen) and tokens >= BYTES_TOKENS and not name.startswith("pair")
        )
        worst = [
            f"{name.replace('_', ' ')} {fmt} at {tokens}: {times:.2f}" for times, tokens, fmt, name in far[-WORST:]
        ]
        if worst:
            where = f"from {BYTES_TOKENS} tokens on, {chosen} routing"
            lines.append(f"- Farthest from the floor, {where}: {'; '.join(reversed(worst))} times.")
    return "\n".join(lines)


def swiglu_key(row: dict) -> tuple:
    """What a SwiGLU time is of."""
    return row["format"], row["interleaved"], row["rows"], row["width"]


def explained_text(run: dict, fits: dict) -> str:
    """How well the model explains the run; "" for a run without cases."""
    table = summary_table(run, fits)
    return f"The model of `perf/model.py`, fitted to this commit, against this run:\n\n{table}" if table else ""


def predictions_text(run: dict, fits: dict) -> str:
    """What the model says of machines that were not measured; "" when it knows no rates for this one."""
    table = elsewhere_table(fits, Ceilings(**run["ceilings"]), next(iter(run["machine"]["gpus"].values())))
    return f"What the model predicts, not measured, in microseconds:\n\n{table}" if table else ""


def tables_text(folder: Path, page: Path) -> str:
    """Where all tables of a run are, for a reader of `page`."""
    which = "both combines, tails, other shapes, Zipf routing, SM budgets, SwiGLU"
    return f"All tables ({which}): [{folder.name}]({link(folder / 'tables.md', page)})."


def paragraphs(parts: Iterable[str]) -> str:
    """Those of the parts that are not empty, an empty line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip())


def mirror_text(run: dict) -> str:
    """What `perf.mirror` found on the run's machine; "" where it was not run."""
    cases = run.get("mirror", ())
    title = f"{mirror_title(cases)} (`perf/mirror.py` says how near that comes):"
    return f"{title}\n\n{mirror_table(cases)}" if cases else ""


def link(target: Path, page: Path) -> str:
    """`target` as a link of `page` names it."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def section(run: dict, folder: Path, page: Path, more: Path) -> str:
    """The README's text of a run in `folder`; `page` is the README, `more` the page with the rest."""
    files = {name: folder / name for name in PLOTS if (folder / name).exists()}
    plots = "\n".join(f"![{PLOTS[name]}]({link(path, page)})" for name, path in files.items())
    shape = f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing"
    included = "; ".join(f"*{name.replace('_', ' ')}*: {text}" for name, text in PEERS.items())
    parts = [
        f"{machine_text(run)}; {shape}.",
        plots,
        'Dispatch and then combine with `mode="partial"`, p50 in microseconds of CUDA-graph replay, slowest GPU, all '
        'SMs; "exact": with the default mode, the sum of both halves. Routing, quantisation and expansion to '
        "expert-major rows are inside ours.",
        peers_table(run, "pair"),
        f"{included}." if run["peers"] else "",
        f"Ceilings of the same run: {ceilings_text(run['ceilings'])}.",
        "Where it loses:\n\n" + losses_text(run),
        tables_text(folder, page),
        f"Other numbers of GPUs, the model and its predictions: [docs/performance.md]({link(more, page)}). `make perf` "
        f"measures your machine; what was tried: [perf/LOG.md]({link(LOG, page)}).",
    ]
    return paragraphs(parts)


def more_page(runs: Mapping[Path, dict], page: Path) -> str:
    """The page beside the README: `runs` by folder, the main one first. The model's constants come from all runs of a
    commit."""
    every = list(runs.values())
    (_, main), *others = runs.items()
    parts = [
        "# Speed, beside what the README says",
        "Written by `python -m perf.report`, with the README's section; times as there.",
        f"## {machine_text(main)}",
        explained_text(main, fit_for(main, every)),
        predictions_text(main, fit_for(main, every)),
        f"`python -m perf.model {' '.join(link(one, README) for one in runs)}` says what ceilings explain.",
    ]
    for folder, run in others:
        parts += [
            f"## {machine_text(run)}",
            peers_table(run, "pair"),
            "Where it loses:\n\n" + losses_text(run),
            explained_text(run, fit_for(run, every)),
            mirror_text(run),
            tables_text(folder, page),
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
    try:
        text = replace_between(args.readme.read_text(), section(run, folder, args.readme, args.more))
    except ValueError as error:
        parser.error(f"{args.readme}: {error}")
    args.readme.write_text(text)
    args.more.write_text(more_page(runs, args.more))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
