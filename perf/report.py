"""The README's section on speed, from runs: `python -m perf.report perf/results/<run> ...`, the main one first.

It replaces what is between the markers, and leaves the rest of the file as it is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from cute_ep.ceilings import Ceilings
from perf.cases import MAIN
from perf.model import elsewhere_table, fit_for, read_run, summary_table
from perf.peers import PEERS
from perf.tables import by_point, ceilings_text, machine_text, mirror_table, mirror_title, peers_table, ratio

BEGIN, END = "<!-- perf:begin -->", "<!-- perf:end -->"
README = Path(__file__).parents[1] / "README.md"
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


def lost_to(run: dict) -> Iterator[tuple[str, str, int, float, float]]:
    """(peer, format, tokens, its time, ours) of every pair at which another library was faster in the same format."""
    own = {
        (case["format"], case["tokens"]): case["p50_us"]
        for case in run["cases"]
        if (case["shape"], case["routing"], case["operation"]) == (MAIN.text, "uniform", "pair")
    }
    for row in run["peers"]:
        ours = own.get((row["format"], row["tokens"]))
        if row["operation"] == "pair" and ours is not None and row["p50_us"] < ours:
            yield row["peer"], row["format"], row["tokens"], row["p50_us"], ours


def losses_text(run: dict) -> str:
    """Where another library is faster, and which operations are farthest from their floors."""
    lost = list(lost_to(run))
    lines = []
    for peer, fmt, tokens, theirs, ours in lost:
        lines.append(f"- {peer.replace('_', ' ')} {fmt} at {tokens} tokens: {theirs:.1f} us, here {ours:.1f} us.")
    if run["peers"] and not lost:
        lines.append("- No pair of another library in the same format was faster in this run.")
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


def commit_of(run: dict) -> str:
    """Its commit, without what may be said of it behind."""
    return str(run["machine"]["commit"]).split(maxsplit=1)[0]


def swiglu_key(row: dict) -> tuple:
    """What a SwiGLU time is of."""
    return row["format"], row["interleaved"], row["rows"], row["width"]


def explained_text(run: dict, fits: dict) -> str:
    """How well the model explains the run; "" for a run without cases."""
    table = summary_table(run, fits)
    return f"The model of `perf/model.py`, fitted to this commit, against this run:\n\n{table}" if table else ""


def predictions_text(run: dict, fits: dict) -> str:
    """How well the model explains the run, and what it says of machines that were not measured; "" when it knows no
    rates for this one."""
    table = elsewhere_table(fits, Ceilings(**run["ceilings"]), next(iter(run["machine"]["gpus"].values())))
    if not table:
        return ""
    return f"{explained_text(run, fits)}\n\nWhat it predicts, not measured, in microseconds:\n\n{table}"


def tables_text(folder: str) -> str:
    """Where all tables of a run are."""
    which = "both combines, tails, other shapes, Zipf routing, SM budgets, SwiGLU"
    return f"All tables ({which}): [{folder}]({folder}/tables.md)."


def paragraphs(parts: Iterable[str]) -> str:
    """Those of the parts that are not empty, an empty line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip())


def mirror_text(run: dict) -> str:
    """What `perf.mirror` found on the run's machine; "" where it was not run."""
    cases = run.get("mirror", ())
    title = f"{mirror_title(cases)} (`perf/mirror.py` says how near that comes):"
    return f"{title}\n\n{mirror_table(cases)}" if cases else ""


def short_section(run: dict, folder: str, fits: dict) -> str:
    """The text of a run that is not the main one."""
    return paragraphs(
        (
            f"The same on {machine_text(run)}:",
            peers_table(run, "pair"),
            "Where it loses:\n\n" + losses_text(run),
            explained_text(run, fits),
            mirror_text(run),
            tables_text(folder),
        )
    )


def section(run: dict, folder: str, others: Mapping[str, dict] = MappingProxyType({})) -> str:
    """The section's text; `folder` is the run's, as seen from the README. `others`: more runs, by folder: those of the
    same commit add to the model's constants, and each has a short section."""

    def fits_of(one: dict) -> dict:
        return fit_for(one, [other for other in (run, *others.values()) if commit_of(other) == commit_of(one)])

    files = {name: Path(folder) / name for name in PLOTS if (README.parent / folder / name).exists()}
    plots = "\n".join(f"![{PLOTS[name]}]({path.as_posix()})" for name, path in files.items())
    shape = f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing"
    included = "; ".join(f"*{name.replace('_', ' ')}*: {text}" for name, text in PEERS.items())
    parts = [
        f"{machine_text(run)}; {shape}.",
        plots,
        "Dispatch and then partial combine, p50 in microseconds of CUDA-graph replay, slowest GPU. Routing, "
        "quantisation and expansion to expert-major rows are inside ours.",
        peers_table(run, "pair"),
        f"{included}." if run["peers"] else "",
        f"Ceilings of the same run: {ceilings_text(run['ceilings'])}.",
        "Where it loses:\n\n" + losses_text(run),
        predictions_text(run, fits_of(run)),
        tables_text(folder),
        *(short_section(one, place, fits_of(one)) for place, one in others.items()),
        f"`make perf` measures your machine, `python -m perf.model {folder}` says what ceilings explain; what was "
        "tried: [perf/LOG.md](perf/LOG.md).",
    ]
    return paragraphs(parts)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with a run.json")
    parser.add_argument(
        "others",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="more runs, in short; the model is fitted to those of a commit",
    )
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="(default: the project's)")
    args = parser.parse_args()
    folder, *others = (Path(os.path.relpath(one, README.parent)).as_posix() for one in (args.folder, *args.others))
    runs = {place: read_run(one) for place, one in zip(others, args.others, strict=True)}
    try:
        text = replace_between(args.readme.read_text(), section(read_run(args.folder), folder, runs))
    except ValueError as error:
        parser.error(f"{args.readme}: {error}")
    args.readme.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
