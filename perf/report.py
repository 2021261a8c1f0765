"""The documents on speed, from the runs that are kept: `python -m perf.report [RUN ...]`.

Each RUN, a suite's folder, first takes the place of the kept one of its kind of machine: perf/results/<machine>.json,
and the plots that the documents show. Then all documents are written from the kept runs: the README's headline and
section on speed, docs/performance.md, what calls of adapters cost in docs/adapters.md, and the table in
perf/results/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perf import adapters, plots
from perf.headline import headline
from perf.model import fit_for
from perf.pages import Places, catalogue_table, more_page, plots_of, section
from perf.runs import RUN_HELP, keep_run, kept_text, read_kept, read_run, refusal
from perf.values import mirror_bias

ROOT = Path(__file__).parents[1]


def replace_between(text: str, name: str, section: str) -> str:
    """`text` with `section` between the markers of `name`; ValueError when they are not there once each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"must have {begin} and, after it, {end} once each")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{section.strip()}\n{end}{rest.partition(end)[2]}"


def keep(run: dict, results: Path) -> None:
    """Put a run in place of the kept one; what is known of every mirror then is kept with it."""
    keep_run(run, results)
    runs = read_kept(results)
    for name, one in runs.items():
        one["mirror_bias"] = mirror_bias(one, runs.values())
        (results / f"{name}.json").write_text(kept_text(one))


def write(places: Places) -> None:
    """All documents. ValueError: a file lacks markers; nothing is written then."""
    runs = read_kept(places.results)
    texts = {}
    sections = ((places.readme, "headline", headline(next(iter(runs.values())))),)
    sections += ((places.readme, "perf", section(runs, places)), (places.catalogue, "runs", catalogue_table(runs)))
    sections += ((places.adapters, "adapters", adapters.section(adapters.kept(places.results))),)
    for path, name, text in sections:
        try:
            texts[path] = replace_between(texts.get(path) or path.read_text(), name, text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    for path, text in (texts | {places.more: more_page(runs, places)}).items():
        path.write_text(text)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"{RUN_HELP}, to be kept")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the project (default: this one)")
    args = parser.parse_args()
    places = Places.of(args.root)
    found = {path: read_run(path) for path in args.runs}
    for path, run in found.items():
        if why := refusal(run):
            parser.error(f"{path}: {why} is not kept")
    if found and not plots.have_matplotlib():
        parser.error("a run is kept with plots, which need matplotlib: pip install -e .[perf]")
    for run in found.values():
        keep(run, places.results)
    if found:
        runs, drawn = read_kept(places.results), set()
        for name, run in runs.items():
            fits, shown = fit_for(run, runs.values()), plots_of(name, runs)
            drawn |= set(plots.draw(run, places.results, fits, shown, f"{name}-"))
        for stale in set(places.results.glob("*.svg")) - drawn:
            stale.unlink()
    try:
        write(places)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
