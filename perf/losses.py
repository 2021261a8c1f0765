"""Where a run loses: to another library, and against its own floors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from perf.cases import MAIN
from perf.peers import CHAINED, PEER_SMS
from perf.tables import by_point, count_text, exact_pairs, medians, ratio, swiglu_key

WORST = 3
"""Operations farthest from their floor that the text names."""
BYTES_TOKENS = 128
"""From this many tokens on a ratio to the floor says something about bytes; below, about latency."""


def lost_to(
    rows: Iterable[dict], operation: str, own: Mapping[tuple[int, str], float]
) -> Iterator[tuple[str, str, int, str]]:
    """(peer, format, tokens, both times) of an operation wherever another library's takes less than `own`."""
    for row in rows:
        ours = own.get((row["tokens"], row["format"]))
        if row["operation"] == operation and ours is not None and row["p50_us"] < ours:
            times = f"{row['p50_us']:.1f} us, here {ours:.1f} us"
            yield row["peer"].replace("_", " "), row["format"], row["tokens"], times


def queued(rows: Iterable[dict]) -> list[dict]:
    """Pairs without a graph whose host time is known: what takes longer counts, the GPUs or the host that queues."""
    known = (row for row in rows if row["operation"] == CHAINED and "host_us" in row)
    return [row | {"p50_us": max(row["p50_us"], row["host_us"])} for row in known]


def peers_lines(run: dict) -> Iterator[str]:
    """Where another library is faster: pairs with either combine and without a graph, operations on at least as many
    SMs as it takes."""
    for mode, own in (("partial", medians(run, "pair")), ("exact (the default)", exact_pairs(run))):
        lost: dict[str, dict[int, str]] = {}
        for peer, fmt, tokens, times in lost_to(run["peers"], "pair", own):
            lost.setdefault(f"{peer} {fmt}", {})[tokens] = times
        for name, found in lost.items():
            *others, last = found
            also = f" (also at {', '.join(map(str, others))})" if others else ""
            yield f"Pairs with {mode} combine: {name} at {count_text(last)}: {found[last]}{also}."
    own = medians({"cases": queued(run["cases"])}, CHAINED)
    for peer, fmt, tokens, times in lost_to(queued(run["peers"]), CHAINED, own):
        where = f"{peer} {fmt} at {count_text(tokens)}"
        yield f"Pairs without a graph, the longer of the GPUs' and the host's time: {where}: {times}."
    for name, sms in PEER_SMS.items():
        theirs = [row for row in run["peers"] if row["peer"] == name]
        budget = min((case["sms"] for case in run["sweep"] if case["sms"] >= sms), default=sms)
        for operation, ours in (("dispatch", "dispatch"), ("combine", "combine_partial")):
            own = {
                (case["tokens"], case["format"]): case["p50_us"]
                for case in run["sweep"]
                if (case["sms"], case["operation"]) == (budget, ours)
            }
            for peer, fmt, tokens, times in lost_to(theirs, operation, own):
                where = f"{peer} {fmt} on {sms} SMs at {count_text(tokens)}"
                yield f"Few SMs, {operation}: {where}: {times}, on {budget} SMs."


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
            f"{name.replace('_', ' ')} {fmt} at {tokens} takes {times:.2f}" for times, tokens, fmt, name in far[-WORST:]
        ]
        if worst:
            where = f"from {BYTES_TOKENS} tokens on, {chosen} routing"
            lines.append(f"- Farthest from the floor, {where}: {'; '.join(reversed(worst))} times the floor.")
    return "\n".join(lines)
