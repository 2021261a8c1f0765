"""The documents on speed as text: the README's section, docs/performance.md, a table of kept runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cute_ep.bench.timing import LARGE_TOKENS
from perf import node_pages
from perf.cases import MAIN, QUICK_FORMATS
from perf.cells import by_tokens, markdown, partial_name, time_cell
from perf.losses import BYTES_TOKENS, PARTIAL, Loss, change_of, farthest_text, losses
from perf.model import fit_for, predictions_text, summary_text
from perf.peer_list import CHAINED, FAMILIES, PEERS
from perf.peer_tables import fastest, peer_cell, peers_table, peers_text, versions_text
from perf.runs import kept_beside
from perf.tables import (
    CONDITIONS,
    FLOOR_TEXT,
    ceilings_row,
    exact_text,
    machine_text,
    measured_text,
    orders_table,
    ranks_text,
    software_text,
    sweep_table,
    taken_text,
)
from perf.values import TIE, exact_pairs, medians, ranked_pairs

PLOTS = {
    "peers": "Pairs by tokens, with NCCL and DeepEP",
    "latency": "Dispatch, partial combine and pair by tokens: measured, model, floor",
}
"""Plot -> what it shows, for those who do not see it. The first is of every run that has other libraries, the second
of the main one."""
README_TOKENS = (1, 16, 128, 1024, 4096)
TIMES_TEXT = "Dispatch and then combine: p50 in us of CUDA-graph replay with warm caches, slowest GPU, all SMs"
TIES = f"differences below {TIE:.0%} are ties"
STANDING_TEXT = (
    "Rounds in a graph follow each other without a gap. Four input sets alternate, and L2 holds small ones. Our output "
    f"buffers have room for exactly the rows that arrive. {TIES[0].upper()}{TIES[1:]}."
)


class Places(NamedTuple):
    """Where things are in a project."""

    results: Path
    catalogue: Path
    readme: Path
    more: Path
    adapters: Path

    @classmethod
    def of(cls, root: Path) -> Places:
        """Those of the project in a folder."""
        results, docs = root / "perf" / "results", root / "docs"
        pages = (docs / f"{name}.md" for name in ("performance", "adapters"))
        return cls(results, results / "README.md", root / "README.md", *pages)


def conditions_text(run: dict) -> str:
    """BF16 pairs under other conditions, and of rows as others have them; "" where none were measured."""
    words = {
        "pair": "as above",
        "pair_apart": "with another kernel before each launch, its time taken off",
        "pair_roomy": "with output buffers of the default size",
    }
    times = {words[operation]: medians(run, operation) for operation in CONDITIONS}
    times["rows by source rank, as others have them"] = ranked_pairs(run)
    others = [own for name, own in times.items() if name != words["pair"]]
    sizes = sorted({tokens for own in others for tokens, fmt in own if fmt == "bf16"})
    rows = {name: [time_cell(own.get((tokens, "bf16"))) for tokens in sizes] for name, own in times.items()}
    return f"BF16 partial pairs under other conditions:\n\n{by_tokens(sizes, rows)}" if sizes else ""


def orders_text(run: dict) -> str:
    """Dispatch by the order of rows; "" where it was not measured."""
    dispatches = [case for case in run["orders"] if case["operation"] == "dispatch"]
    table = orders_table(dispatches, named=False)
    return f"Dispatch by the order of rows, over the floor in brackets:\n\n{table}" if table else ""


def budgets_text(run: dict) -> str:
    """Times of many tokens by SM budget; "" where these or their ceilings were not measured."""
    many = [case for case in run["sweep"] if case["tokens"] >= LARGE_TOKENS]
    if not many or not run["sm_ceilings"]:
        return ""
    return (
        "By SM budget; in brackets over the time of the fastest kernel that moves the same bytes on as many SMs and "
        f"waits for nothing (`perf.sm_ceiling`):\n\n{sweep_table(many, run['sm_ceilings'])}"
    )


def host_text(run: dict, catalogue: str) -> str:
    """What queueing a pair takes of the host, in a line; "" where it was not measured."""
    own = [time for (_, fmt), time in medians(run, CHAINED, "host_us").items() if fmt in QUICK_FORMATS]
    rows = [row for row in run["peers"] if row["operation"] == CHAINED and "host_us" in row]
    if not own or not rows:
        return ""
    theirs = {name: [row["host_us"] for row in rows if row["peer"] == name] for name in PEERS}
    beside = (f"{name.replace('_', ' ')} {min(all_):.0f} to {max(all_):.0f}" for name, all_ in theirs.items() if all_)
    return (
        f"Host time to queue a pair without a graph: {min(own):.0f} to {max(own):.0f} us ([spread]({catalogue})); "
        f"{', '.join(beside)}."
    )


def paragraphs(parts: Iterable[str]) -> str:
    """Those of the parts that are not empty, an empty line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip())


def link(target: Path, page: Path) -> str:
    """`target` as a link of `page` names it."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def plots_of(name: str, runs: Mapping[str, dict]) -> Sequence[str]:
    """Which plots of a run are shown."""
    return tuple(PLOTS) if name == next(iter(runs)) else tuple(PLOTS)[:1]


def plots_text(name: str, results: Path, page: Path, shown: Collection[str]) -> str:
    """The plots of a run that are there, as `page` shows them."""
    files = {plot: results / f"{name}-{plot}.svg" for plot in shown}
    return "\n".join(f"![{PLOTS[plot]}]({link(path, page)})" for plot, path in files.items() if path.exists())


def times_text(run: dict, more: str) -> str:
    """What the numbers of a table of pairs are."""
    tuned = "" if any("how" in row for row in run["peers"]) else ", and none was tuned to these GPUs"
    theirs = f"none leaves rows in expert order without gaps{tuned}. Shown are the fastest of each library"
    included = f"; theirs [differ]({more}): {theirs}" if run["peers"] else ""
    return (
        f"{TIMES_TEXT}. {exact_text(run)}. Ours include routing, quantisation and expansion to expert-major rows"
        f"{included}."
    )


def fastest_table(run: dict) -> str:
    """Our pairs above the fastest ones of each family of libraries, at README_TOKENS."""
    partial, exact = medians(run, "pair"), exact_pairs(run)
    rows: dict[str, list[str]] = {}
    for fmt in QUICK_FORMATS:
        points = [(tokens, fmt) for tokens in README_TOKENS]
        rows[f"cute_ep {partial_name(fmt)}"] = [time_cell(partial.get(point)) for point in points]
        if fmt == "bf16":
            rows[f"cute_ep {fmt} exact"] = [time_cell(exact.get(point)) for point in points]
    for family in FAMILIES:
        for fmt in QUICK_FORMATS:
            found = (fastest(run, family, (tokens, fmt)) for tokens in README_TOKENS)
            rows[f"{family} {fmt}"] = [peer_cell(row and {**row, "how": ""}) for row in found]
    return by_tokens(README_TOKENS, rows)


def loss_lines(found: Iterable[Loss]) -> list[str]:
    """A line for each case that is lost, with both times at the largest size, and what would change it."""
    lines: dict[str, list[str]] = {}
    lost: dict[str, set[int]] = {}
    for loss in found:
        sizes, theirs, ours = zip(*loss.points, strict=True)
        text = f"{loss.other} at {', '.join(map(str, sizes))} ({theirs[-1]:.1f}, ours {ours[-1]:.1f})"
        lines.setdefault(loss.case, []).append(text)
        lost.setdefault(loss.case, set()).update(sizes)
    return [f"{case}: {'; '.join(texts)}; to change it: {change_of(case, lost[case])}" for case, texts in lines.items()]


def losses_text(run: dict) -> str:
    """Where other libraries are faster; "" where none is."""
    lines = [f"- {line}" for line in loss_lines(losses(run))]
    return "\n".join(["Others were faster at these sizes (times at the last):\n", *lines]) if lines else ""


def failures_text(run: dict) -> str:
    """A line for each peer that failed; "" where none did."""
    lines = [f"- {note}" for note in run["notes"] if any(note.startswith(f"{name}: failed: ") for name in PEERS)]
    return "\n".join(["Other libraries that could not be measured, or not to the end:\n", *lines]) if lines else ""


def section(runs: Mapping[str, dict], places: Places) -> str:
    """The README's text: of the main run, and where partial pairs lose with other numbers of GPUs."""
    (name, run), *others = runs.items()
    page, more = places.readme, link(places.more, places.readme)
    lines, elsewhere = loss_lines(losses(run)), {other_name: list(losses(other)) for other_name, other in others}
    for other_name, found in elsewhere.items():
        about = f"{other_name} ({measured_text(runs[other_name])})"
        lines += [f"{about}, {line}" for line in loss_lines(loss for loss in found if loss.case == PARTIAL)]
    often = any(loss.case != PARTIAL for found in elsewhere.values() for loss in found)
    left_out = f"; of other runs only partial pairs, they lose more: [{more}]({more})" if often else ""
    known = "\n".join(f"- {line}" for line in lines)
    shape = f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing"
    parts = [
        f"{machine_text(run)}; {shape}.",
        plots_text(name, places.results, page, tuple(PLOTS)[:1]),
        times_text(run, more),
        fastest_table(run),
        conditions_text(run),
        f"Another library was faster at these tokens per rank (times: at the last; {TIES}{left_out}):\n\n{known}"
        if known
        else "",
        f"[{more}]({more}) has the conditions, all libraries, other numbers of GPUs and a model of the times. "
        "`make perf` measures your machine.",
    ]
    return paragraphs(parts)


def run_text(name: str, runs: Mapping[str, dict], places: Places) -> list[str]:
    """What the page says of one run."""
    run, page = runs[name], places.more
    data = f"[Data]({link(places.results / f'{name}.json', page)})"
    main = next(iter(runs.values()))
    software = "" if software_text(run) == software_text(main) else f", {software_text(run)}"
    return [
        f"## {name}: {ranks_text(run)}, {measured_text(run)}",
        f"{data}{software}. {exact_text(run)}. {versions_text(run)} {taken_text(run)}",
        plots_text(name, places.results, page, plots_of(name, runs)),
        peers_table(run, "pair", sizes=README_TOKENS) if name == next(iter(runs)) else fastest_table(run),
        conditions_text(run),
        orders_text(run),
        budgets_text(run),
        host_text(run, link(places.catalogue, page)),
        f"[The README]({link(places.readme, page)}#speed) says where others were faster."
        if name == next(iter(runs))
        else losses_text(run),
        failures_text(run),
    ]


def more_page(runs: Mapping[str, dict], places: Places) -> str:
    """The page beside the README. The model's constants come from all runs of a commit."""
    page, every = places.more, list(runs.values())
    fits = {name: fit_for(run, every) for name, run in runs.items()}
    main = every[0]
    ceilings = {name: ceilings_row(run["ceilings"]) for name, run in runs.items()}
    far = [(name, *cells.values(), farthest_text(runs[name], "uniform")) for name, cells in ceilings.items()]
    file = link(places.results / f"{next(iter(runs))}.json", places.readme)
    parts = [
        "# Speed in detail",
        f"`python -m perf.report` writes this page from [perf/results]({link(places.catalogue, page)}). {TIMES_TEXT}; "
        f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing. {STANDING_TEXT} "
        f"Unless a run says otherwise: {software_text(main)}.",
        f"`python -m perf.tables {file}` prints other sizes, shapes and routings, tails, SM budgets, SwiGLU, and all "
        "libraries.",
        f"The times of other libraries: {peers_text(every)}." if main["peers"] else "",
    ]
    for name in runs:
        parts += run_text(name, runs, places)
    nodes = kept_beside("nodes", places.results) | kept_beside("nodes-nvshmem", places.results)
    data = {name: link(places.results / f"{name}.json", page) for name in nodes}
    parts += node_pages.sections(nodes, data)
    parts += [
        f"## Ceilings and floors\n\n{FLOOR_TEXT}. Farthest: time over floor from {BYTES_TOKENS} tokens on, "
        "uniform routing.",
        markdown(("run", *next(iter(ceilings.values())), "farthest"), far),
        f"## The model\n\n{summary_text((run, fits[name]) for name, run in runs.items())}",
        predictions_text(runs, fits),
    ]
    return f"{paragraphs(parts)}\n"


def catalogue_table(runs: Mapping[str, dict]) -> str:
    """The commands that the kept runs were made by."""
    rows = [(f"[{name}.json]({name}.json)", f"`{run['machine']['command']}`") for name, run in runs.items()]
    return markdown(("run", "command"), rows)
