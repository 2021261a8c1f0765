"""The plots of runs, where matplotlib is installed: `python -m perf.plots perf/results/<run>...`. The model in them has
the constants that all given runs of a commit have together."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from cute_ep.ceilings import Ceilings
from perf.cases import MAIN, MEASURED_FORMATS
from perf.model import fit_for, predict, read_run
from perf.tables import peer_columns, ratio

COLORS = dict(zip(MEASURED_FORMATS, ("#1f4e79", "#2e8b57", "#c0792a", "#8e44ad", "#c0392b"), strict=True))
PEER_STYLES = {
    "nccl_ag_rs": ("#777777", "s"),
    "nccl_all_to_all": ("#aaaaaa", "D"),
    "deepep_low_latency": ("#e0a100", "^"),
    "deepep_normal": ("#00a0a0", "v"),
}
LINES = {"bf16": "-", "fp8": "--", "nvfp4": ":"}
SHOWN = ("dispatch", "combine_partial", "pair")


def series(cases: Iterable[dict], operation: str, fmt: str) -> list[dict]:
    """The cases of the main shape and uniform routing in the order of their tokens."""
    key = (MAIN.text, "uniform", operation, fmt)
    own = [case for case in cases if (case["shape"], case["routing"], case["operation"], case["format"]) == key]
    return sorted(own, key=lambda case: case["tokens"])


def _panels(plt, count: int, width: float = 4.6):
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
    axis.set_xlabel("tokens a rank")


def draw_latency(plt, run: dict, fits: dict):
    """Measured medians over the model, floors dashed."""
    ceilings = Ceilings(**run["ceilings"])
    figure, axes = _panels(plt, len(SHOWN))
    for axis, operation in zip(axes, SHOWN, strict=True):
        for fmt in MEASURED_FORMATS if operation != "combine_partial" else ("bf16",):
            cases = series(run["cases"], operation, fmt)
            tokens = [case["tokens"] for case in cases]
            if not cases:
                continue
            color = COLORS[fmt]
            axis.plot(tokens, [case["p50_us"] for case in cases], "o", color=color, markersize=4, label=fmt)
            axis.plot(tokens, [predict(case, fits, ceilings) for case in cases], "-", color=color, linewidth=1)
            if fmt in LINES:
                axis.plot(tokens, [case["floor_us"] for case in cases], "--", color=color, linewidth=0.8, alpha=0.6)
            _token_axis(axis, tokens)
        axis.set_yscale("log")
        axis.set_title(operation.replace("_", " "), fontsize=10)
    axes[0].set_ylabel("us (points: measured, lines: model, dashed: floor)", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_ratio(plt, run: dict):
    """Median over the floor."""
    figure, axes = _panels(plt, len(SHOWN))
    for axis, operation in zip(axes, SHOWN, strict=True):
        for fmt in MEASURED_FORMATS if operation != "combine_partial" else ("bf16",):
            cases = series(run["cases"], operation, fmt)
            if cases:
                tokens = [case["tokens"] for case in cases]
                axis.plot(tokens, [ratio(case) for case in cases], "o-", color=COLORS[fmt], markersize=4, label=fmt)
                _token_axis(axis, tokens)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylim(bottom=0)
        axis.set_title(operation.replace("_", " "), fontsize=10)
    axes[0].set_ylabel("measured / floor")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_peers(plt, run: dict):
    """Pairs beside those of other libraries; solid: bf16, dashed: fp8, dotted: nvfp4."""
    rows = [row for row in run["peers"] if row["operation"] == "pair"]
    if not rows:
        return None
    figure, (axis,) = _panels(plt, 1, 7.5)
    ticks: set[int] = set()
    for fmt, style in LINES.items():
        cases = series(run["cases"], "pair", fmt)
        if cases:
            ticks |= {case["tokens"] for case in cases}
            tokens, times = zip(*((case["tokens"], case["p50_us"]) for case in cases), strict=True)
            axis.plot(tokens, times, "o" + style, color="#1f4e79", markersize=4, label=f"cute_ep {fmt}")
    for peer, fmt in peer_columns(rows):
        own = sorted((row["tokens"], row["p50_us"]) for row in rows if (row["peer"], row["format"]) == (peer, fmt))
        color, marker = PEER_STYLES[peer]
        ticks |= {tokens for tokens, _ in own}
        name = f"{peer} {fmt}".replace("_", " ")
        axis.plot(*zip(*own, strict=True), marker + LINES[fmt], color=color, markersize=4, linewidth=1, label=name)
    _token_axis(axis, ticks)
    axis.set_yscale("log")
    axis.set_ylabel("dispatch + combine (us)")
    axis.legend(fontsize=8, frameon=False)
    return figure


def draw_sweep(plt, run: dict):
    """Medians by SM budget."""
    if not run["sweep"]:
        return None
    keys = dict.fromkeys((case["operation"], case["format"]) for case in run["sweep"])
    figure, axes = _panels(plt, len(keys))
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
    figure, axes = _panels(plt, len(widths))
    sources = {"fused_silu": run["swiglu"], "torch.compile": run.get("compiled", [])}
    bars = [(name, kind) for name in sources for kind in (False, True)]
    for axis, width in zip(axes, widths, strict=True):
        formats = list(dict.fromkeys(one["format"] for one in run["swiglu"]))
        for number, (name, interleaved) in enumerate(bars):
            found = {
                one["format"]: one["share"]
                for one in sources[name]
                if (one["rows"], one["width"], one["interleaved"]) == (rows, width, interleaved)
            }
            places = [index + 0.2 * (number - 1.5) for index, fmt in enumerate(formats) if fmt in found]
            color = "#1f4e79" if name == "fused_silu" else "#aaaaaa"
            heights = [found[fmt] for fmt in formats if fmt in found]
            label = f"{name}, {'interleaved' if interleaved else 'plain'}"
            axis.bar(places, heights, 0.18, color=color, alpha=0.6 if interleaved else 1.0, label=label)
        axis.set_xticks(range(len(formats)), formats)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{rows} rows, D {width}", fontsize=10)
    axes[0].set_ylabel("share of the copy ceiling")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside lower center", ncols=4)
    return figure


PLOTS: dict[str, Callable] = {
    "latency": draw_latency,
    "ratio": draw_ratio,
    "peers": draw_peers,
    "sweep": draw_sweep,
    "swiglu": draw_swiglu,
}


def draw(run: dict, folder: Path, fits: dict | None = None) -> list[Path]:
    """Write the plots that the run has data for as SVG files; none without matplotlib. `fits`: of the model; None:
    those of this run alone."""
    if importlib.util.find_spec("matplotlib") is None or not run["ceilings"]:
        return []
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "cute_ep", "svg.fonttype": "none"}
    from matplotlib import pyplot

    written = []
    latency = partial(draw_latency, fits=fit_for(run, [run]) if fits is None else fits)
    for name, make in (PLOTS | {"latency": latency}).items():
        figure = make(pyplot, run)
        if figure is not None:
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
            pyplot.close(figure)
    return written


def main() -> int:
    """Run from the command line; 1 without matplotlib."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders with a run.json")
    runs = {folder: read_run(folder) for folder in parser.parse_args().folders}
    drawn = [draw(run, folder, fit_for(run, runs.values())) for folder, run in runs.items()]
    for paths in drawn:
        for path in paths:
            print(path)  # noqa: T201
    if not all(drawn):
        print("nothing drawn: matplotlib is missing (pip install -e .[perf]), or a run has no ceilings")  # noqa: T201
    return int(not all(drawn))


if __name__ == "__main__":
    raise SystemExit(main())
