"""A run as Markdown tables: `python -m perf.tables perf/results/h200x4.json` prints all of them. Nothing here needs a
GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.cases import MAIN, OTHERS, QUICK_FORMATS
from perf.cells import markdown, time_cell
from perf.peer_list import CHAINED
from perf.peer_tables import peers_table, peers_text, versions_text
from perf.runs import RUN_HELP, read_kept, read_run
from perf.values import by_point, medians, mirror_bias, ratio, swiglu_key

COLUMNS = {
    "dispatch": "dispatch",
    "combine_exact": "combine exact",
    "combine_partial": "combine partial",
    "pair": "pair, partial",
    "pair_exact": "pair, exact",
    "pair_chained": "pair, no graph",
}
"""Operation -> column."""
CONDITIONS = {
    "pair": "as elsewhere",
    "pair_apart": "apart",
    "pair_roomy": "default buffers",
}
"""Pairs under other conditions (`cute_ep.bench.measure.CONDITIONS`) -> column."""
CONDITIONS_TEXT = (
    "Pairs of dispatch and partial combine. *As elsewhere*: rounds of a graph follow one another at once, so that a "
    "launch may take its SMs while the one before ends; four input sets in turn, which the L2 cache holds while they "
    "are small; output buffers with room for exactly the rows that arrive. *Apart*: another kernel before each launch, "
    "as in a layer; its time is taken off. *Default buffers*: those of `ep.allocate()`."
)
FLOOR_TEXT = (
    "Floor of a launch: the time of its bytes on the busiest link or in the busiest memory, whichever is longer, at "
    "the rate of the run's fastest copy, plus one flag and one empty launch; few tokens stay in L2 and may take less"
)
SM_CEILING_TEXT = (
    "The bytes of an operation moved without waiting for a flag, by one CTA on each of so many SMs: the fastest kernel "
    "of `perf/sm_ceiling.cu`. *plain*: loads and stores of so many threads, each with (vectors x sources) loads at "
    "once; *bulk*: bulk copies of so many warps and bytes through shared memory. Sums of rows are XORs"
)
TAKEN = {"swiglu": "SwiGLU", "compiled": "SwiGLU through torch.compile"}
"""Sections that may be of another run (`perf.runs.CARRIED`), as the text calls them."""
FLOORS = ("dispatch", "combine_exact", "combine_partial", "pair")


def ceilings_row(ceilings: dict) -> dict[str, str]:
    """The ceilings as cells, by column."""
    names = {"ring": "SM stores, ring, GB/s", "all_to_all": "all to all", "copy_engine": "copy engine"}
    names |= {"memory_sm": "memory, SMs", "memory_engine": "memory, cuMemcpyAsync"}
    rates = {column: f"{ceilings[name] / 1e9:.0f}" for name, column in names.items()}
    return rates | {f"{name}, us": f"{1e6 * ceilings[name]:.2f}" for name in ("flag", "launch")}


def ceilings_text(ceilings: dict) -> str:
    """The ceilings in one line."""
    rate = {name: f"{ceilings[name] / 1e9:.0f}" for name in ceilings if name not in ("flag", "launch")}
    return (
        f"SM stores to a peer {rate['ring']} GB/s (ring), {rate['all_to_all']} GB/s (to all peers at once); copy "
        f"engine to a peer {rate['copy_engine']} GB/s; memory, read + write, {rate['memory_sm']} GB/s by SMs, "
        f"{rate['memory_engine']} GB/s by cuMemcpyAsync; one flag {1e6 * ceilings['flag']:.2f} us; an empty launch "
        f"{1e6 * ceilings['launch']:.2f} us"
    )


def cases_table(cases: Sequence[dict], shape: str, routing: str) -> str:
    """Medians and 99th percentiles of one shape and routing, with floors."""
    points = [(key, every) for key, every in by_point(cases).items() if key[:2] == (shape, routing)]
    rows = []
    for (_, _, tokens, fmt), every in sorted(points, key=lambda item: item[0][2]):
        times = [
            f"{every[name]['p50_us']:.1f} ({every[name]['p99_us']:.1f})" if name in every else "" for name in COLUMNS
        ]
        least = " / ".join(f"{every[name]['floor_us']:.1f}" for name in FLOORS if name in every)
        times_least = " / ".join(f"{ratio(every[name]):.2f}" for name in FLOORS if name in every)
        rows.append((str(tokens), fmt, *times, least, times_least))
    short = "dispatch / exact / partial / pair"
    return markdown(("tokens per rank", "format", *COLUMNS.values(), f"floor, {short}", f"times floor, {short}"), rows)


def mirror_pairs(run: dict) -> list[tuple[dict, float | None]]:
    """The cases of the mirror, each with what GPUs of their own would take: its time multiplied by the ratio that is
    known for its operation, format and size; None where none is."""
    ratios = {(one["operation"], one["format"], one["tokens"]): one["ratio"] for one in run.get("mirror_bias", ())}
    found = ((case, ratios.get((case["operation"], case["format"], case["tokens"]))) for case in run.get("mirror", ()))
    return [(case, known and known * case["p50_us"]) for case, known in found]


def mirror_table(run: dict) -> str:
    """Medians of what `perf.mirror` measured, and in brackets what `mirror_pairs` makes of them."""
    found = {
        (case["tokens"], case["operation"], case["format"]): f"{case['p50_us']:.1f}"
        + ("" if corrected is None else f" ({corrected:.1f})")
        for case, corrected in mirror_pairs(run)
    }
    measured = dict.fromkeys(key[1:] for key in found)
    columns = [column for operation in COLUMNS for column in measured if column[0] == operation]
    rows = [
        (str(tokens), *(found.get((tokens, *column), "") for column in columns))
        for tokens in sorted({key[0] for key in found})
    ]
    return markdown(("tokens per rank", *(f"{COLUMNS[operation]} {fmt}" for operation, fmt in columns)), rows)


def mirror_title(run: dict) -> str:
    """What `mirror_table` shows; "" without cases."""
    cases = run.get("mirror")
    return f"With the traffic of {cases[0]['ranks']} ranks on these two GPUs" if cases else ""


def mirror_text(run: dict) -> str:
    """How far the mirror's times are off."""
    bias = run.get("mirror_bias")
    if not bias:
        return "That is optimistic by an unknown amount"
    ratios = [one["ratio"] for one in bias]
    return (
        f"That is optimistic: with the kernels of {short_commit(bias[0]['commit'])} ({bias[0]['date'][:10]}) "
        f"{run['mirror'][0]['ranks']} GPUs took {min(ratios):.3f} to {max(ratios):.3f} times as long, "
        f"{sum(ratios) / len(ratios):.3f} on average over {len(ratios)} cases; corrected by the ratio of each case"
    )


def conditions_table(run: dict) -> str:
    """Pairs under other conditions; "" where none were measured."""
    times = {operation: medians(run, operation) for operation in CONDITIONS}
    keys = sorted(set().union(*(times[name] for name in CONDITIONS if name != "pair")))
    formats = [fmt for fmt in QUICK_FORMATS if any(key[1] == fmt for key in keys)]
    rows = []
    for tokens in sorted({key[0] for key in keys}):
        every = [times[name].get((tokens, fmt)) for fmt in formats for name in CONDITIONS]
        rows.append((str(tokens), *map(time_cell, every)))
    head = (f"{fmt}, {column}" for fmt in formats for column in CONDITIONS.values())
    return markdown(("tokens per rank", *head), rows)


def by_budget(results: Sequence[dict], cell: Callable[[dict], str]) -> str:
    """A table of results by the SMs that a rank takes."""
    budgets = sorted({case["sms"] for case in results})
    found = {(case["operation"], case["format"], case["tokens"], case["sms"]): case for case in results}
    keys = dict.fromkeys(key[:3] for key in found)
    rows = [
        (name.replace("_", " "), fmt, str(tokens))
        + tuple(cell(found[(name, fmt, tokens, sms)]) if (name, fmt, tokens, sms) in found else "" for sms in budgets)
        for name, fmt, tokens in keys
    ]
    return markdown(("operation", "format", "tokens per rank", *(f"{sms} SMs" for sms in budgets)), rows)


def sweep_table(sweep: Sequence[dict], ceilings: Sequence[dict] = ()) -> str:
    """Medians by the SMs that a rank takes: one CTA on each, of a whole GPU two; in brackets over the ceiling, where
    that was measured."""

    def key(case: dict) -> tuple:
        return case["operation"], case["format"], case["tokens"], case["sms"]

    least = {key(one): one["p50_us"] for one in ceilings}

    def cell(case: dict) -> str:
        known = least.get(key(case))
        return f"{case['p50_us']:.1f}" + ("" if known is None else f" ({case['p50_us'] / known:.2f})")

    return by_budget(sweep, cell)


def sm_ceilings_table(ceilings: Sequence[dict]) -> str:
    """The ceilings of so many SMs, and the kernels that they are of."""
    return by_budget(ceilings, lambda one: f"{one['p50_us']:.1f} {one['kernel']}")


def orders_table(orders: Sequence[dict], named: bool = True) -> str:
    """Medians, over the floor in brackets, by the order of rows; `named` has a column with the operation."""
    found = {(one["operation"], one["format"], one["tokens"], one["order"]): one for one in orders}
    columns = list(dict.fromkeys(key[3] for key in found))

    def cell(case: dict | None) -> str:
        return "" if case is None else f"{case['p50_us']:.1f} ({ratio(case):.2f})"

    rows = [
        (name.replace("_", " "), fmt, str(tokens), *(cell(found.get((name, fmt, tokens, order))) for order in columns))
        for name, fmt, tokens in dict.fromkeys(key[:3] for key in found)
    ]
    head = ("operation", "format", "tokens per rank", *(name.replace("_", " ") for name in columns))
    return markdown(head[not named :], [row[not named :] for row in rows])


def swiglu_table(results: Sequence[dict], compiled: Sequence[dict] = ()) -> str:
    """Times and shares of the copy ceiling, plain / interleaved, by the number of groups that the rows are in."""

    def cell(every: Sequence[dict], key: tuple, groups: int) -> str:
        wanted = (*key, groups)
        own = {one["interleaved"]: one for one in every if swiglu_key(one)[:-1] == wanted}
        if set(own) != {False, True}:
            return ""
        times = " / ".join(f"{own[kind]['p50_us']:.1f}" for kind in (False, True))
        shares = " / ".join(f"{own[kind]['share']:.0%}" for kind in (False, True))
        return f"{times} ({shares})"

    keys = dict.fromkeys(swiglu_key(one)[:3] for one in results)
    counts = sorted({one.get("groups", 1) for one in results})
    rows = [(*map(str, key), *(cell(results, key, count) for count in counts), cell(compiled, key, 1)) for key in keys]
    names = (f"fused_silu, {count} group{'s' * (count > 1)}" for count in counts)
    return markdown(("rows", "D", "format", *names, "torch.compile"), rows)


def exact_text(run: dict) -> str:
    """How `exact_pairs` of a run came about."""
    if medians(run, "pair_exact"):
        return "*exact*: measured as a pair"
    dispatch, combine, pairs = (medians(run, name) for name in ("dispatch", "combine_partial", "pair"))
    off = [time / (dispatch[key] + combine[key]) - 1 for key, time in pairs.items() if key in combine]
    known = f"; partial pairs differ from such sums by {min(off):+.0%} to {max(off):+.0%}" if off else ""
    return f"*exact*: **summed from dispatch and combine, not measured as a pair**{known}"


def clocks_text(run: dict) -> str:
    """The lowest SM clock and the highest power that a section ended with; "" where nothing was asked."""
    every = [gpu for state in run.get("gpu_state", {}).values() for gpu in state]

    def values(name: str) -> list[float]:
        words = [gpu.get(name, "").split(" ")[0] for gpu in every]
        return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]

    clocks, power, limits = values("clocks.sm"), values("power.draw"), values("enforced.power.limit")
    if not clocks or not power or not limits:
        return ""
    return (
        f"At the ends of sections SM clocks were {min(clocks):.0f} MHz or more, power at most {max(power):.0f} of "
        f"{min(limits):.0f} W."
    )


def gpus_text(run: dict) -> str:
    """Number and name of the GPUs."""
    gpus = list(run["machine"]["gpus"].values())
    return f"{len(gpus)} x {gpus[0]}"


def measured_text(run: dict) -> str:
    """Date and commit."""
    return f"{run['machine']['date'][:10]}, commit {short_commit(run['machine']['commit'])}"


def ranks_text(run: dict) -> str:
    """GPUs, what is between them, and ranks."""
    machine = run["machine"]
    ranks, links = len(machine["devices"]), machine.get("links")
    link = f", {links[0][1]} between GPUs" if links and len(links) > 1 else ""
    return f"{gpus_text(run)}{link}, {ranks} rank{'s' if ranks > 1 else ''}"


def software_text(run: dict) -> str:
    """Versions of what a run was made with."""
    machine = run["machine"]
    return f"driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, Python {machine['python']}"


def machine_text(run: dict) -> str:
    """GPUs, versions, date and commit in one line."""
    return f"{ranks_text(run)}, {software_text(run)}, {measured_text(run)}"


def short_commit(commit: str | None) -> str:
    """A commit as people write it; what stands behind it stays ("-dirty", words)."""
    word, *rest = str(commit).split(maxsplit=1)
    name, dash, dirty = word.partition("-")
    return " ".join([name[:12] + dash + dirty, *rest])


def count_text(tokens: int) -> str:
    """1 token, 2 tokens."""
    return f"{tokens} token{'s' * (tokens != 1)}"


def rounds_text(cases: Sequence[dict]) -> str:
    """How many rounds the graphs of some cases have: "rounds (32 from 1 token on, 4 from 1024 tokens on)"."""
    found: dict[int, int] = {}
    for case in cases:
        if case["operation"] != CHAINED:
            found[case["rounds"]] = min(case["tokens"], found.get(case["rounds"], case["tokens"]))
    ordered = sorted(found.items(), key=lambda item: item[1])
    parts = (f"{rounds} from {count_text(tokens)} on" for rounds, tokens in ordered)
    return f"rounds ({', '.join(parts)})"


def provenance_text(run: dict) -> str:
    """Which kernels, and in which state the GPUs were; "" where the run does not say."""
    own = run["machine"].get("library")
    kernels = ""
    if own is not None:
        kernels = f"Kernels of sources {own['sources']}, cubins {own['cubins']}, DSL {', '.join(own['dsl'])}. "
    text = f"{kernels}{clocks_text(run)} {taken_text(run)}"
    text = text.strip()
    return f"{text}\n\n" if text else ""


def taken_text(run: dict) -> str:
    """Which sections are of another run; "" where none is."""
    return " ".join(
        f"{TAKEN[name]} is of {own['date'][:10]}, commit {short_commit(own['commit'])}."
        for name, own in run.get("taken_from", {}).items()
    )


def page(run: dict) -> str:
    """The whole run."""
    if not run["ceilings"]:
        return f"{machine_text(run)}.\n\n" + "".join(f"- {note}\n" for note in run["notes"])
    parts = [
        f"# {machine_text(run)}\n\n`{run['machine']['command']}`\n\n{provenance_text(run)}Ceilings of this run: "
        f"{ceilings_text(run['ceilings'])}.\n\nTimes in microseconds, slowest GPU, median (99th percentile) of graphs "
        f"of several {rounds_text(run['cases'])}. Pair: dispatch, then combine; a single operation is measured behind "
        f"itself, so a pair is not the sum of its halves. {FLOOR_TEXT}.\n"
    ]

    def section(title: str, text: str) -> None:
        if text:
            parts.append(f"## {title}\n\n{text}")

    for shape in (MAIN, *OTHERS):
        for routing in ("uniform", "zipf"):
            title = f"hidden {shape.hidden}, {shape.num_experts} experts, top-{shape.top_k}, {routing} routing"
            section(title, cases_table(run["cases"], shape.text, routing))
    if run["peers"]:
        for operation in ("pair", "dispatch", "combine", "pair_chained"):
            section(f"Beside other libraries: {operation.replace('_', ', ')}", peers_table(run, operation))
        host = peers_table(run, CHAINED, "host_us")
        about = "What a thread takes to queue a pair without a graph, at best, on the rank where it takes longest.\n\n"
        section("Beside other libraries: host time", host and about + host)
        parts.append(f"{exact_text(run)}. {peers_text([run])}. {versions_text(run)}\n")
    conditions = conditions_table(run)
    section("Pairs under other conditions", conditions and f"{CONDITIONS_TEXT}\n\n{conditions}")
    mirrored = mirror_table(run)
    section(mirror_title(run), mirrored and f"{mirror_text(run)}. In brackets: the corrected times.\n\n{mirrored}")
    section("Orders of rows (over the floor)", orders_table(run["orders"]))
    least = run["sm_ceilings"]
    section(f"SM budgets{' (over the ceiling)' * bool(least)}", sweep_table(run["sweep"], least))
    least_table = sm_ceilings_table(least)
    section("Ceilings of so many SMs", least_table and f"{SM_CEILING_TEXT}.\n\n{least_table}")
    section("SwiGLU and quantise", swiglu_table(run["swiglu"], run.get("compiled", ())))
    section("Notes", "".join(f"- {note}\n" for note in run["notes"]))
    return "\n".join(parts)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="All tables of runs, as Markdown.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=RUN_HELP)
    for path in parser.parse_args().runs:
        run = read_run(path)
        run["mirror_bias"] = mirror_bias(run, read_kept().values())
        print(page(run))  # noqa: T201


if __name__ == "__main__":
    main()
