"""Rounds over virtual nodes whose mail comes in any order and late.

`python -m tests.gpu.storm NODES RANKS READS TURNS`. READS: "late", as late as a put may read, or "early", into copies
that land any time later. TURNS is the seed, too.
"""

from __future__ import annotations

import sys

from tests.storm_rail import Streams

from .mail_schedules import storm
from .node_rounds import config
from .test_nodes import connected


def main(nodes: int, ranks: int, reads: str, turns: int) -> None:
    """AssertionError or EPTimeout when something is wrong."""
    with connected(config(nodes, ranks)) as made:
        storm(made, Streams, turns=turns, seed=turns, copies=reads == "early")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
