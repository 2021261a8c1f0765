"""The plots of runs, where matplotlib is installed: `python -m perf.plots RUN ...`, beside run.json or, of a kept run,
in build/perf/<its name>. The model in them has the constants that all given runs of a commit have together."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from cute_ep.bench.ceilings import Ceilings
from perf.cases import MAIN, MEASURED_FORMATS
from perf.cells import partial_name
from perf.model import fit_for, predict
from perf.peer_tables import fastest_ways, peer_columns
from perf.runs import ARTEFACTS, RUN_HELP, read_run
from perf.values import exact_pairs, ratio, swiglu_key

COLORS = dict(zip(MEASURED_FORMATS, ("#1f4e79", "#2e8b57", "#c0792a", "#8e44ad", "#c0392b"), strict=True))
MARKERS = dict(zip(MEASURED_FORMATS, ("o", "s", "D", "^", "v"), strict=True))
APART = dict(zip(MEASURED_FORMATS, (0.87, 0.93, 1.0, 1.07, 1.15), strict=True))
"""By what a format's points and lines are moved along the axis of tokens, so that none hides another."""
PEER_STYLES = {
    "nccl_ag_rs": ("#777777", "s"),
    "nccl_all_to_all": ("#aaaaaa", "D"),
    "deepep_low_latency": ("#e0a100", "^"),
    "deepep_normal": ("#00a0a0", "v"),
    "deepep_normal_tuned": ("#006d6d", "v"),
    "deepep_normal_any_sms": ("#003c3c", "v"),
    "deepep_v2": ("#7d3c98", "<"),
    "deepep_v2_expanded": ("#b084cc", ">"),
    "nccl_ep_low_latency": ("#2e8b57", "P"),
    "nccl_ep_high_throughput": ("#145a32", "X"),
    "flashinfer_one_sided": ("#d35400", "*"),
}
"""Of the columns of peer tables."""
LINES = {"bf16": "-", "fp8": "--", "nvfp4": ":"}
SHOWN = ("dispatch", "combine_partial", "pair")


def series(cases: Iterable[dict], operation: str, fmt: str) -> list[dict]:
    """The cases of the main shape and uniform routing in the order of their tokens."""
    key = (MAIN.text, "uniform", operation, fmt)
    own = [case for case in cases if (case["shape"], case["routing"], case["operation"], case["format"]) == key]
    return sorted(own, key=lambda case: case["tokens"])


def panels(plt, count: int, width: float = 4.6):
    figure, axes = plt.subplots(1, count, figsize=(width * count, 3.8), constrained_layout=True, squeeze=False)
    for axis in axes[0]:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _token_axis(axis, values: Iterable[int]) -> None:
    ticks = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axis.minorticks_off()
    axis.set_xlabel("tokens per rank")


def _points(axis, cases: list[dict], fmt: str, value: Callable[[dict], float], style: str = "") -> None:
    """One value of each case, moved aside by its format."""
    places = [case["tokens"] * APART[fmt] for case in cases]
    look = {"marker": MARKERS[fmt], "color": COLORS[fmt], "markersize": 4, "linewidth": 1, "label": fmt}
    axis.plot(places, [value(case) for case in cases], linestyle=style or "none", **look)
    _token_axis(axis, [case["tokens"] for case in cases])


def _title(figure, run: dict) -> None:
    """Which machine and problem a figure is of."""
    gpus = list(run["machine"]["gpus"].values())
    shape = f"hidden {MAIN.hidden}, {MAIN.num_experts} experts, top-{MAIN.top_k}, uniform routing"
    figure.suptitle(f"{len(gpus)} x {gpus[0]}, {len(run['machine']['devices'])} ranks; {shape}", fontsize=9)


def draw_latency(plt, run: dict, fits: dict):
    """Measured medians over the model, floors dashed."""
    ceilings = Ceilings(**run["ceilings"])
    figure, axes = panels(plt, len(SHOWN))
    for axis, operation in zip(axes, SHOWN, strict=True):
        for fmt in MEASURED_FORMATS if operation != "combine_partial" else ("bf16",):
            cases = series(run["cases"], operation, fmt)
            if not cases:
                continue
            _points(axis, cases, fmt, lambda case: case["p50_us"])
            tokens, color = [case["tokens"] * APART[fmt] for case in cases], COLORS[fmt]
            axis.plot(tokens, [predict(case, fits, ceilings) for case in cases], "-", color=color, linewidth=0.8)
            if fmt in LINES:
                axis.plot(tokens, [case["floor_us"] for case in cases], "--", color=color, linewidth=0.8, alpha=0.6)
        axis.set_yscale("log")
        axis.set_title(operation.replace("_", " "), fontsize=10)
    axes[0].set_ylabel("us")
    handles, labels = axes[0].get_legend_handles_labels()
    handles += [plt.Line2D([], [], color="black", linewidth=0.8, linestyle=style) for style in ("-", "--")]
    axes[0].legend(handles, [*labels, "model", "floor"], fontsize=8, frameon=False)
    _title(figure, run)
    return figure


def draw_ratio(plt, run: dict):
    """Median over the floor."""
    figure, axes = panels(plt, len(SHOWN))
    for axis, operation in zip(axes, SHOWN, strict=True):
        for fmt in MEASURED_FORMATS if operation != "combine_partial" else ("bf16",):
            cases = series(run["cases"], operation, fmt)
            if cases:
                _points(axis, cases, fmt, ratio, "-")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylim(bottom=0)
        axis.set_title(operation.replace("_", " "), fontsize=10)
    axes[0].set_ylabel("measured / floor")
    axes[0].legend(fontsize=8, frameon=False)
    _title(figure, run)
    return figure


def draw_peers(plt, run: dict):
    """Pairs beside those of other libraries, in exact mode too; solid: bf16, dashed: fp8, dotted: nvfp4."""
    rows = [row for row in run["peers"] if row["operation"] == "pair"]
    if not rows:
        return None
    figure, (axis,) = panels(plt, 1, 7.5)
    ticks: set[int] = set()
    for fmt, style in LINES.items():
        cases = series(run["cases"], "pair", fmt)
        if cases:
            ticks |= {case["tokens"] for case in cases}
            tokens, times = zip(*((case["tokens"], case["p50_us"]) for case in cases), strict=True)
            name = f"cute_ep {partial_name(fmt)}"
            axis.plot(tokens, times, "o" + style, color="#1f4e79", markersize=4, label=name)
    exact = sorted((tokens, time) for (tokens, fmt), time in exact_pairs(run).items() if fmt == "bf16")
    if exact:
        axis.plot(*zip(*exact, strict=True), "x-", color="#c0392b", markersize=5, label="cute_ep bf16 exact")
    best = fastest_ways(rows)
    for peer, fmt in peer_columns(rows):
        own = sorted((row["tokens"], row["p50_us"]) for row in best if (row["peer"], row["format"]) == (peer, fmt))
        color, marker = PEER_STYLES[peer]
        ticks |= {tokens for tokens, _ in own}
        name = f"{peer} {fmt}".replace("_", " ")
        axis.plot(*zip(*own, strict=True), marker + LINES[fmt], color=color, markersize=4, linewidth=1, label=name)
    _token_axis(axis, ticks)
    axis.set_yscale("log")
    axis.set_ylabel("dispatch + combine (us)")
    axis.legend(fontsize=8, frameon=False)
    _title(figure, run)
    return figure


def draw_sweep(plt, run: dict):
    """Medians by SM budget."""
    if not run["sweep"]:
        return None
    keys = dict.fromkeys((case["operation"], case["format"]) for case in run["sweep"])
    figure, axes = panels(plt, len(keys))
    for axis, (operation, fmt) in zip(axes, keys, strict=True):
        own = [case for case in run["sweep"] if (case["operation"], case["format"]) == (operation, fmt)]
        for number, tokens in enumerate(sorted({case["tokens"] for case in own})):
            points = sorted((case["sms"], case["p50_us"]) for case in own if case["tokens"] == tokens)
            color = list(COLORS.values())[number % len(COLORS)]
            axis.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=f"{tokens} tokens")
        ticks = sorted({case["sms"] for case in own})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_yscale("log")
        axis.set_xlabel("SMs")
        axis.set_title(f"{operation.replace('_', ' ')}, {fmt}", fontsize=10)
    axes[0].set_ylabel("us")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_swiglu(plt, run: dict):
    """Shares of the copy ceiling at the largest number of rows."""
    if not run["swiglu"]:
        return None
    rows = max(one["rows"] for one in run["swiglu"])
    widths = sorted({one["width"] for one in run["swiglu"]})
    figure, axes = panels(plt, len(widths))
    sources = {"fused_silu": run["swiglu"], "torch.compile": run.get("compiled", [])}
    bars = [(name, kind) for name in sources for kind in (False, True)]
    for axis, width in zip(axes, widths, strict=True):
        formats = list(dict.fromkeys(one["format"] for one in run["swiglu"]))
        for number, (name, interleaved) in enumerate(bars):
            found = {
                one["format"]: one["share"]
                for one in sources[name]
                if swiglu_key(one)[:2] + swiglu_key(one)[3:] == (rows, width, 1, interleaved)
            }
            places = [index + 0.2 * (number - 1.5) for index, fmt in enumerate(formats) if fmt in found]
            color = "#1f4e79" if name == "fused_silu" else "#aaaaaa"
            heights = [found[fmt] for fmt in formats if fmt in found]
            label = f"{name}, {'interleaved' if interleaved else 'plain'}"
            axis.bar(places, heights, 0.18, color=color, alpha=0.6 if interleaved else 1.0, label=label)
        axis.set_xticks(range(len(formats)), formats)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{rows} rows in one group, D {width}", fontsize=10)
    axes[0].set_ylabel("bytes/s over those of a copy within the GPU", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside lower center", ncols=4)
    return figure


PLOTS: dict[str, Callable] = {
    "latency": draw_latency,
    "ratio": draw_ratio,
    "peers": draw_peers,
    "sweep": draw_sweep,
    "swiglu": draw_swiglu,
}


def slim(svg: str) -> str:
    """The same picture in fewer bytes: coordinates to 0.01, no indentation, comments, metadata, names of groups, and
    groups that say nothing."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    says: list[bool] = []  # of each open group, whether it has attributes

    def tag(found: re.Match[str]) -> str:
        if found[0] != "</g>":
            says.append(found[0] != "<g>")
            return found[0] * says[-1]
        return found[0] * says.pop()

    svg = re.sub(r"</?g\b[^>]*>", tag, svg)
    return re.sub(r"\n\s*", "\n", re.sub(r"(\d\.\d\d)\d+", r"\1", svg))


def have_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def pyplot_for_svg():
    """matplotlib.pyplot, set so that the same figure becomes the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "cute_ep", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    from matplotlib import pyplot

    return pyplot


def write_svg(plt, figure, path: Path) -> None:
    """Write a figure as a small SVG file, and close it."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(slim(path.read_text()))
    plt.close(figure)


def draw(
    run: dict, folder: Path, fits: dict | None = None, names: Collection[str] = tuple(PLOTS), prefix: str = ""
) -> list[Path]:
    """Write those plots of `names` that the run has data for as SVG files; none without matplotlib.

    Args:
        run: the run.
        folder: where the files go.
        fits: constants of the model; None: those of this run alone.
        names: out of PLOTS.
        prefix: of the files' names.
    """
    if not have_matplotlib() or not run["ceilings"]:
        return []
    pyplot = pyplot_for_svg()
    written = []
    latency = partial(draw_latency, fits=fit_for(run, [run]) if fits is None else fits)
    for name, make in (PLOTS | {"latency": latency}).items():
        figure = make(pyplot, run) if name in names else None
        if figure is not None:
            written.append(folder / f"{prefix}{name}.svg")
            write_svg(pyplot, figure, written[-1])
    return written


def main() -> int:
    """Run from the command line; 1 without matplotlib."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=RUN_HELP)
    runs = {path: read_run(path) for path in parser.parse_args().runs}
    drawn = []
    for path, run in runs.items():
        folder = path if path.is_dir() else ARTEFACTS / path.stem
        folder.mkdir(parents=True, exist_ok=True)
        drawn.append(draw(run, folder, fit_for(run, runs.values())))
    for paths in drawn:
        for path in paths:
            print(path)  # noqa: T201
    if not all(drawn):
        print("nothing drawn: matplotlib is missing (pip install -e .[perf]), or a run has no ceilings")  # noqa: T201
    return int(not all(drawn))


if __name__ == "__main__":
    raise SystemExit(main())
