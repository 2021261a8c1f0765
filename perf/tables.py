"""A run as Markdown tables. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf.cases import MAIN, OTHERS, QUICK_FORMATS
from perf.peers import CHAINED, PEERS

COLUMNS = {
    "dispatch": "dispatch",
    "combine_exact": "combine exact",
    "combine_partial": "combine partial",
    "pair": "pair",
    "pair_chained": "pair, no graph",
}
"""Operation -> column."""
FLOORS = ("dispatch", "combine_exact", "combine_partial", "pair")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) + "\n"


def by_point(cases: Iterable[dict]) -> dict[tuple[str, str, int, str], dict[str, dict]]:
    """(shape, routing, tokens, format) -> operation -> case, in the order of first appearance."""
    found: dict[tuple[str, str, int, str], dict[str, dict]] = {}
    for case in cases:
        key = (case["shape"], case["routing"], case["tokens"], case["format"])
        found.setdefault(key, {})[case["operation"]] = case
    return found


def ratio(case: dict) -> float:
    """Median over the floor."""
    return case["p50_us"] / case["floor_us"]


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
    return markdown(("tokens a rank", "format", *COLUMNS.values(), f"floor, {short}", f"times floor, {short}"), rows)


def mirror_table(cases: Sequence[dict]) -> str:
    """Medians of what `perf.mirror` measured."""
    found = {(case["tokens"], case["operation"], case["format"]): f"{case['p50_us']:.1f}" for case in cases}
    measured = dict.fromkeys(key[1:] for key in found)
    columns = [column for operation in COLUMNS for column in measured if column[0] == operation]
    rows = [
        (str(tokens), *(found.get((tokens, *column), "") for column in columns))
        for tokens in sorted({key[0] for key in found})
    ]
    return markdown(("tokens a rank", *(f"{COLUMNS[operation]} {fmt}" for operation, fmt in columns)), rows)


def mirror_title(cases: Sequence[dict]) -> str:
    """What `mirror_table` shows; "" without cases."""
    return f"With the traffic of {cases[0]['ranks']} ranks on these two GPUs" if cases else ""


def sweep_table(sweep: Sequence[dict]) -> str:
    """Medians by SM budget."""
    budgets = sorted({case["sms"] for case in sweep})
    found = {(case["operation"], case["format"], case["tokens"], case["sms"]): case for case in sweep}
    keys = dict.fromkeys(key[:3] for key in found)
    rows = [
        (name.replace("_", " "), fmt, str(tokens))
        + tuple(f"{found[(name, fmt, tokens, sms)]['p50_us']:.1f}" for sms in budgets)
        for name, fmt, tokens in keys
    ]
    return markdown(("operation", "format", "tokens a rank", *(f"{sms} SMs" for sms in budgets)), rows)


def swiglu_table(results: Sequence[dict], compiled: Sequence[dict] = ()) -> str:
    """Times and shares of the copy ceiling, plain / interleaved."""

    def cell(every: Sequence[dict], key: tuple) -> str:
        own = {one["interleaved"]: one for one in every if (one["rows"], one["width"], one["format"]) == key}
        if set(own) != {False, True}:
            return ""
        times = " / ".join(f"{own[kind]['p50_us']:.1f}" for kind in (False, True))
        shares = " / ".join(f"{own[kind]['share']:.0%}" for kind in (False, True))
        return f"{times} ({shares})"

    keys = dict.fromkeys((one["rows"], one["width"], one["format"]) for one in results)
    rows = [(str(key[0]), str(key[1]), key[2], cell(results, key), cell(compiled, key)) for key in keys]
    return markdown(("rows", "D", "format", "fused_silu", "torch.compile"), rows)


def peer_columns(rows: Iterable[dict]) -> list[tuple[str, str]]:
    """(peer, format) of every column of a peer table, in the order of PEERS."""
    order = list(PEERS)
    return sorted({(row["peer"], row["format"]) for row in rows}, key=lambda pair: (order.index(pair[0]), pair[1]))


def medians(run: dict, operation: str, of: str = "p50_us") -> dict[tuple[int, str], float]:
    """(tokens, format) -> microseconds of an operation of the main shape, uniform routing."""
    return {
        (case["tokens"], case["format"]): case[of]
        for case in run["cases"]
        if (case["shape"], case["routing"], case["operation"]) == (MAIN.text, "uniform", operation) and of in case
    }


def exact_pairs(run: dict) -> dict[tuple[int, str], float]:
    """`medians` of dispatch and then exact combine, which are measured one by one."""
    dispatch, combine = medians(run, "dispatch"), medians(run, "combine_exact")
    return {key: dispatch[key] + time for key, time in combine.items() if key in dispatch}


def peers_table(run: dict, operation: str, of: str = "p50_us") -> str:
    """Medians of one operation (dispatch, combine, pair, pair_chained), or what else there is `of` it, beside those of
    the other libraries; "" where there is nothing."""
    own = medians(run, "combine_partial" if operation == "combine" else operation, of)
    exact = exact_pairs(run) if operation == "pair" else {}
    theirs = {
        (row["tokens"], row["peer"], row["format"]): row[of]
        for row in run["peers"]
        if row["operation"] == operation and of in row
    }
    here = [fmt for fmt in QUICK_FORMATS if any(key[1] == fmt for key in own)]
    columns = peer_columns(row for row in run["peers"] if row["operation"] == operation and of in row)
    rows = []
    for tokens in sorted({key[0] for key in own} | {key[0] for key in theirs}):
        mine = [own.get((tokens, fmt)) for fmt in here] + ([exact.get((tokens, "bf16"))] if exact else [])
        others = [theirs.get((tokens, *column)) for column in columns]
        rows.append((str(tokens), *("" if time is None else f"{time:.1f}" for time in mine + others)))
    names = [f"cute_ep {fmt}" for fmt in here] + (["cute_ep bf16 exact"] if exact else [])
    names += [f"{peer} {fmt}".replace("_", " ") for peer, fmt in columns]
    return markdown(("tokens a rank", *names), rows)


def machine_text(run: dict) -> str:
    """GPUs, versions, date and commit in one line."""
    machine = run["machine"]
    gpus, ranks = list(machine["gpus"].values()), len(machine["devices"])
    links = machine.get("links")
    link = f", {links[0][1]} between GPUs" if links and len(links) > 1 else ""
    return (
        f"{len(gpus)} x {gpus[0]}{link}, {ranks} rank{'s' if ranks > 1 else ''}, driver {machine['driver']}, CUDA "
        f"{machine['cuda']}, torch {machine['torch']}, Python {machine['python']}, {machine['date'][:10]}, commit "
        f"{machine['commit']}"
    )


def rounds_text(cases: Sequence[dict]) -> str:
    """How many rounds the graphs of some cases have: "rounds (32 from 1 tokens on, 4 from 1024 tokens on)"."""
    found: dict[int, int] = {}
    for case in cases:
        if case["operation"] != CHAINED:
            found[case["rounds"]] = min(case["tokens"], found.get(case["rounds"], case["tokens"]))
    ordered = sorted(found.items(), key=lambda item: item[1])
    parts = (f"{rounds} from {tokens} tokens on" for rounds, tokens in ordered)
    return f"rounds ({', '.join(parts)})"


def page(run: dict) -> str:
    """The whole run."""
    if not run["ceilings"]:
        return f"{machine_text(run)}.\n\n" + "".join(f"- {note}\n" for note in run["notes"])
    parts = [
        f"# {machine_text(run)}\n\n`{run['machine']['command']}`\n\nCeilings of this run: "
        f"{ceilings_text(run['ceilings'])}.\n\nTimes in microseconds, slowest GPU, median (99th percentile) of graphs "
        f"of several {rounds_text(run['cases'])}. Pair: dispatch, then partial combine. Floor: for each launch the "
        "larger of link bytes over the ceiling of SM stores and memory bytes over the copy ceiling, plus a flag and an "
        "empty launch.\n"
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
        parts.append("".join(f"- `{name}`: {text}.\n" for name, text in PEERS.items()))
    mirror = run.get("mirror", ())
    section(mirror_title(mirror), mirror_table(mirror))
    section("SM budgets", sweep_table(run["sweep"]))
    section("SwiGLU and quantise", swiglu_table(run["swiglu"], run.get("compiled", ())))
    section("Notes", "".join(f"- {note}\n" for note in run["notes"]))
    return "\n".join(parts)
