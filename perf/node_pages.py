"""What the documents say of kept runs of `perf.node_times`, perf/results/<machine>-nodes.json by NCCL and
<machine>-nodes-nvshmem.json by NVSHMEM."""

from __future__ import annotations

from collections.abc import Mapping

from perf.cells import markdown

OWN_GOALS = (2.5, 2.5, 2.5, 1.6)
"""Of 1, 16, 128, 4096 tokens: the pair over nodes less its exchanges, over the pair of one node, at most."""
EXCHANGE_GOAL = 1.1
"""An exchange by NCCL over the same by bare sends and receives, at most."""
COPY_GOAL, PUT_US = 1.15, 14
"""One by NVSHMEM takes at most so much as peer copies of the same bytes, and so long more for each put."""
PUTS = {"bf16": {"frames": 2, "sums": 1}, "fp8": {"frames": 3, "sums": 1}}
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
            f"## Several nodes on one host, by {engine_of(run).split()[0]}: {len(gpus)} x {gpus[0]}, each a node, "
            f"{machine['date'][:10]}, commit {machine['commit'][:7]}",
            f"[Data]({data[name]}): {engine_of(run)} over NVLink, driver {machine['driver']}. us of pairs; in "
            f"brackets: exchanges over {bare_of(run)}; *own*, the pair less its exchanges, over that of one node "
            f"(goals {', '.join(map(str, OWN_GOALS))}). One token with a frame of 16 takes {many / few:.2f} times as "
            f"long with room for 4096 (goal {FRAME_GOAL}).",
            markdown(
                ("tokens", "format", "one node", "nodes", "frames", "sums", "own"),
                (row(found, by_puts(run)) for found in run["times"]),
            ),
        ]
    return parts


def by_puts(run: Mapping) -> bool:
    """Whether a run is one over NVSHMEM."""
    return "nvshmem" in run["environment"]["command"]


def engine_of(run: Mapping) -> str:
    """What exchanged, in words."""
    return "NVSHMEM" if by_puts(run) else f"NCCL {run['environment']['nccl']}"


def bare_of(run: Mapping) -> str:
    """What exchanges are divided by, in words."""
    if by_puts(run):
        return f"{COPY_GOAL} peer copies of the same bytes and {PUT_US} us a put (goal 1)"
    return f"bare sends and receives by as many CTAs (goal {EXCHANGE_GOAL})"


def row(found: Mapping, puts: bool) -> tuple[str, ...]:
    """A line of the table."""
    bare = {name: found[f"bare {name}"] for name in ("frames", "sums")}
    if puts:
        count = PUTS[found["format"]]
        bare = {name: COPY_GOAL * value + PUT_US * count[name] for name, value in bare.items()}
    exchanges = (f"{found[name]:.0f} ({found[name] / value:.2f})" for name, value in bare.items())
    own = f"{found['own']:.0f} ({found['own'] / found['one node']:.2f})"
    pairs = (f"{found[name]:.0f}" for name in ("one node", "nodes"))
    return str(found["tokens"]), found["format"], *pairs, *exchanges, own
