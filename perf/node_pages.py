"""What the documents say of kept runs of `perf.node_times`, perf/results/<machine>-nodes.json."""

from __future__ import annotations

from collections.abc import Mapping

from perf.tables import markdown

OWN_GOALS = (2.5, 2.5, 2.5, 1.6)
"""Of 1, 16, 128, 4096 tokens: the pair over nodes less its exchanges, over the pair of one node, at most."""
EXCHANGE_GOAL = 1.1
"""An exchange over the same by bare sends and receives, at most."""
FRAME_GOAL = 1.1
"""A small frame with much room over one with its own, at most."""


def sections(runs: Mapping[str, dict], data: Mapping[str, str]) -> list[str]:
    """What the page on speed says of them. `data`: by name, a link to the run."""
    parts = []
    for name, run in runs.items():
        machine = run["environment"]
        few, many = run["one token"].values()
        gpus = list(machine["gpus"].values())
        parts += [
            f"## Several nodes on one host: {len(gpus)} x {gpus[0]}, each a node, {machine['date'][:10]}, commit "
            f"{machine['commit'][:7]}",
            f"[Data]({data[name]}): NCCL {machine['nccl']} over NVLink, driver {machine['driver']}. us of pairs; in "
            f"brackets: exchanges over bare sends and receives by as many CTAs (goal {EXCHANGE_GOAL}); *own*, the pair "
            f"less its exchanges, over that of one node (goals {', '.join(map(str, OWN_GOALS))}). One token with a "
            f"frame of 16 takes {many / few:.2f} times as long with room for 4096 (goal {FRAME_GOAL}).",
            markdown(("tokens", "format", "one node", "nodes", "frames", "sums", "own"), map(row, run["times"])),
        ]
    return parts


def row(found: Mapping) -> tuple[str, ...]:
    """A line of the table."""
    exchanges = (f"{found[name]:.0f} ({found[name] / found[f'bare {name}']:.2f})" for name in ("frames", "sums"))
    own = f"{found['own']:.0f} ({found['own'] / found['one node']:.2f})"
    pairs = (f"{found[name]:.0f}" for name in ("one node", "nodes"))
    return str(found["tokens"]), found["format"], *pairs, *exchanges, own
