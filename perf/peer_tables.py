"""Times of other libraries: the fastest of several ways of the same, what wins, and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from perf.cases import QUICK_FORMATS
from perf.cells import by_tokens, partial_name, time_cell
from perf.peer_list import PEERS, column_of, family_of
from perf.values import exact_pairs, medians


def fastest_ways(rows: Iterable[dict], of: str = "p50_us") -> list[dict]:
    """The row with the least `of` for each column, format, batch size and operation, in the order of first appearance:
    "peer" becomes the column, and "way" says which way it is, where a run has several ways of the column."""
    every = list(rows)
    found: dict[tuple, dict] = {}
    ways: dict[str, set[str]] = {}
    for row in every:
        column = column_of(row["peer"])
        ways.setdefault(column, set()).add(row["peer"])
        key = column, row["format"], row["tokens"], row["operation"]
        if key not in found or row[of] < found[key][of]:
            found[key] = row
    return [
        row | {"peer": column, "way": PEERS[row["peer"]].way if len(ways[column]) > 1 else ""}
        for (column, *_), row in found.items()
    ]


def fastest(run: dict, family: str, point: tuple[int, str]) -> dict | None:
    """The fastest pair of a family of libraries, as `fastest_ways` has it; None where none was measured."""
    own = [row for row in run["peers"] if family_of(row["peer"]) == family]
    pairs = [row for row in fastest_ways(own) if row["operation"] == "pair"]
    found = [row for row in pairs if (row["tokens"], row["format"]) == point]
    return min(found, key=lambda row: row["p50_us"], default=None)


def name_of(row: dict) -> str:
    """A peer and its format as texts call them."""
    return f"{row['peer']} {row['format']}".replace("_", " ")


def peer_columns(rows: Iterable[dict]) -> list[tuple[str, str]]:
    """(column, format) of every column of a peer table, in the order of PEERS."""
    order = list(PEERS)
    found = {(column_of(row["peer"]), row["format"]) for row in rows}
    return sorted(found, key=lambda pair: (order.index(pair[0]), pair[1]))


def peer_cell(row: dict | None, of: str = "p50_us") -> str:
    """A time, and in brackets which way it was measured and how it was called."""
    if row is None:
        return ""
    words = ", ".join(filter(None, (row.get("way"), row.get("how"))))
    return f"{time_cell(row[of])} ({words})" if words else time_cell(row[of])


def peers_table(run: dict, operation: str, of: str = "p50_us", sizes: Collection[int] | None = None) -> str:
    """Medians of one operation (dispatch, combine, pair, pair_chained), or what else there is `of` it, above those of
    the other libraries, at `sizes` (None: all); "" where there is nothing."""
    own = medians(run, "combine_partial" if operation == "combine" else operation, of)
    exact = exact_pairs(run) if operation == "pair" else {}
    known = [row for row in run["peers"] if row["operation"] == operation and of in row]
    theirs = {(row["tokens"], row["peer"], row["format"]): row for row in fastest_ways(known, of)}
    here = [(fmt, own) for fmt in QUICK_FORMATS if any(key[1] == fmt for key in own)]
    names = [f"cute_ep {partial_name(fmt) if exact else fmt}" for fmt, _ in here]
    if exact:
        here.insert(1, ("bf16", exact))
        names.insert(1, "cute_ep bf16 exact")
    every = sorted({key[0] for key in own} | {key[0] for key in theirs})
    shown = [tokens for tokens in every if sizes is None or tokens in sizes]
    rows = {
        name: [time_cell(times.get((tokens, fmt))) for tokens in shown]
        for name, (fmt, times) in zip(names, here, strict=True)
    }
    for peer, fmt in peer_columns(known):
        cells = [peer_cell(theirs.get((tokens, peer, fmt)), of) for tokens in shown]
        rows[f"{peer} {fmt}".replace("_", " ")] = cells
    return by_tokens(shown, rows)


def peers_text(runs: Iterable[dict]) -> str:
    """What each peer's times include, of the peers that some run has."""
    measured = {row["peer"] for run in runs for row in run["peers"]}
    return "; ".join(f"*{name.replace('_', ' ')}*: {PEERS[name].does}" for name in PEERS if name in measured)


def versions_text(run: dict) -> str:
    """Which versions the peers are of; "" without peers."""
    versions = ", ".join(f"{name} {version}" for name, version in run.get("peer_versions", {}).items())
    return f"Other libraries: {versions or 'versions not recorded'}." if run["peers"] else ""
