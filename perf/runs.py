"""Runs on disk: in full, as the suite writes them into a folder, and kept, as one small file per kind of machine in
perf/results. `read_run` reads both alike; `keep_run` makes the second from the first."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from cute_ep.bench.ceilings import Ceilings, floors
from cute_ep.bench.measure import PARTS

RESULTS = Path(__file__).parent / "results"
ARTEFACTS = Path(__file__).parents[1] / "build" / "perf"
"""Where the suite writes."""
RUN = "run.json"
RUN_HELP = "a file of perf/results, or the folder of a run in full"
SECTIONS = ("cases", "orders", "sweep", "sm_ceilings", "mirror", "mirror_bias", "swiglu", "compiled", "peers")
"""Lists of results. "mirror_bias" is in kept runs only (`perf.values.mirror_bias`)."""
CARRIED = ("swiglu", "compiled")
"""Sections that a run without them takes over from the one that it replaces: each is of one GPU and holds its own
comparison."""
DROPPED = {"p95_us", "mean_us", "min_us", "link_floor_us", "memory_floor_us", "remote_bytes", "logical_bytes"}
"""Fields that kept runs lack; floors are computed when a run is read."""
SHARES = ("share", "error", "ratio")


def reproduce(module: str, arguments: Sequence[str]) -> str:
    """The command line of a module that measures the same, without where this one's results and logs go and which
    commit it was of."""
    where = argparse.ArgumentParser(add_help=False)
    for option in ("--out", "--logs", "--commit"):
        where.add_argument(option)
    return shlex.join(["python", "-m", module, *where.parse_known_args(arguments)[1]])


def machine_key(run: dict) -> str:
    """GPU and number of GPUs as a part of a file name, "h200x4"."""
    gpus = list(run["machine"]["gpus"].values())
    return f"{gpus[0].removeprefix('NVIDIA ').split()[0].lower()}x{len(gpus)}"


def shares_gpus(run: dict) -> bool:
    """Whether several ranks of the run were on one GPU."""
    return len(set(run["machine"]["devices"])) < len(run["machine"]["devices"])


def commit_of(run: dict) -> str:
    """Its commit, without what may be said of it behind."""
    return str(run["machine"]["commit"]).split(maxsplit=1)[0]


def rounded(name: str, value: object) -> object:
    """A field as kept runs have it: times to 1 ns, shares to 4 digits."""
    if not isinstance(value, float):
        return value
    if name.endswith("_us"):
        return round(value, 3)
    return float(f"{value:.4g}") if name in SHARES else value


def pack(rows: Sequence[dict]) -> dict:
    """Results as a table: "same" has the fields that all rows share, "columns" the names of the others, "rows" their
    values; null where a row lacks a field."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in DROPPED]
    columns = {name: [rounded(name, row.get(name)) for row in rows] for name in names}
    same = {name: own[0] for name, own in columns.items() if all(value == own[0] for value in own)}
    others = {name: own for name, own in columns.items() if name not in same}
    values = [list(row) for row in zip(*others.values(), strict=True)] if others else [[] for _ in rows]
    return {"same": same, "columns": list(others), "rows": values}


def unpack(table: dict) -> list[dict]:
    """The rows of `pack`."""
    rows = (table["same"] | dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def launches(cases: Sequence[dict]) -> Iterator[tuple[dict, list | None]]:
    """(case, the bytes of its launches where each is measured alone); None where one is not, or where the case is such
    a launch itself."""
    names = ("shape", "routing", "tokens", "format")
    alone = {(*(case[name] for name in names), case["operation"]): case.get("parts") for case in cases}
    for case in cases:
        parts = PARTS[case["operation"]]
        found = [alone.get((*(case[name] for name in names), part)) for part in parts]
        yield case, None if len(parts) == 1 or None in found else [own[0] for own in found]


def read_run(path: Path) -> dict:
    """A run, from a folder with run.json or from a kept file. Its floors are computed anew from its bytes and ceilings,
    so that those of all runs follow one rule."""
    run = {"quick": False, "notes": []} | json.loads((path / RUN if path.is_dir() else path).read_text())
    for name in SECTIONS:
        section = run.setdefault(name, [])
        run[name] = unpack(section) if isinstance(section, dict) else section
    if run["ceilings"]:
        ceilings = Ceilings(**run["ceilings"])
        cases = [{"parts": known} | case for case, known in launches(run["cases"])]
        for name, rows in (("cases", cases), ("orders", run["orders"])):
            run[name] = [case | floors(case["parts"], ceilings) for case in rows]
    return run


def read_kept(results: Path = RESULTS) -> dict[str, dict]:
    """The kept runs by name, the newest first, of the same day the one with most GPUs."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    runs = {name: read_run(results / f"{name}.json") for name, content in found.items() if "ceilings" in content}

    def place(name: str) -> tuple[str, int, str]:
        machine = runs[name]["machine"]
        return machine["date"][:10], len(machine["gpus"]), machine["date"]

    order = sorted(runs, key=place)
    return {name: runs[name] for name in reversed(order)}


def kept_beside(kind: str, results: Path = RESULTS) -> dict[str, dict]:
    """The kept measurements of another kind, perf/results/<machine>-<kind>.json, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(results.glob(f"*-{kind}.json"))}


def refusal(run: dict) -> str | None:
    """Why a run is none to keep; None when it is one."""
    if run["quick"]:
        return "a quick run"
    if not run["ceilings"] or not run["cases"]:
        return "a run without ceilings or cases"
    if shares_gpus(run):
        return "a run of ranks that share GPUs"
    return None if run["machine"]["commit"] else "a run of an unknown commit (python -m perf.suite --commit)"


def carry_over(run: dict, previous: dict | None) -> dict:
    """The run, with the CARRIED sections that it lacks from the one that it replaces; "taken_from" says which they are
    and where they were measured. A mirror keeps the bias that was known."""
    if previous is None:
        return run
    run = run | {"taken_from": dict(run.get("taken_from", {}))}
    if run["mirror"] and not run["mirror_bias"]:
        run["mirror_bias"] = previous["mirror_bias"]
    for name in CARRIED:
        if not run[name] and previous[name]:
            own = {fact: previous["machine"][fact] for fact in ("date", "commit", "command")}
            run["taken_from"][name] = previous.get("taken_from", {}).get(name, own)
            run[name] = previous[name]
    return run


def without_sums(cases: Sequence[dict]) -> list[dict]:
    """The cases without the bytes that `read_run` puts together again from those of single launches."""
    return [
        {name: value for name, value in case.items() if name != "parts" or value != known}
        for case, known in launches(cases)
    ]


def kept_text(run: dict) -> str:
    """The JSON of a kept run: a line for each field, in sections a line for each row."""
    own = {name: value for name, value in run.items() if name not in SECTIONS and value}
    own["ceilings"] = {name: float(f"{value:.6g}") for name, value in run["ceilings"].items()}
    if "all" in own.get("seconds", {}):
        own["seconds"] = {"all": own["seconds"]["all"]}
    parts = [f"{_line(name)}:{_line(value)}" for name, value in own.items()]
    for name in SECTIONS:
        if run[name]:
            table = pack(without_sums(run[name]) if name == "cases" else run[name])
            rows = ",\n".join(_line(row) for row in table.pop("rows"))
            parts.append(f'{_line(name)}:{_line(table)[:-1]},"rows":[\n{rows}]}}')
    return "{" + ",\n".join(parts) + "}\n"


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def keep_run(run: dict, results: Path = RESULTS) -> Path:
    """Write a run in place of the kept one of the same kind of machine. Returns its file."""
    path = results / f"{machine_key(run)}.json"
    previous = read_run(path) if path.exists() else None
    path.write_text(kept_text(carry_over(run, previous)))
    return path
