"""Rounds over virtual nodes whose mail comes in any order and late.

`python -m tests.gpu.storm NODES RANKS READS ROUNDS`. READS: "late", as late as a put may read, or "early", into copies
that land any time later.
"""

from __future__ import annotations

import sys

import torch

from tests.storm_rail import Storm, Streams

from .test_nodes import FRAMES, Rounds, config, connected

LANES = 3
BETWEEN_CHECKS = 200


def main(nodes: int, ranks: int, reads: str, rounds: int) -> None:
    """AssertionError or EPTimeout when something is wrong."""
    with connected(config(nodes, ranks)) as made:
        given = Rounds(made, 12, FRAMES)
        storm = Storm(lambda device: Streams(device, LANES), LANES, seed=rounds, copies=reads == "early")
        storm.prepare([ep.mail for ep in made])
        for turn in range(1, rounds + 1):
            given.enqueue(turn % 12)
            if turn % BETWEEN_CHECKS == 0 or turn == rounds:
                given.check()
        for ep in made:
            torch.cuda.synchronize(ep.device)
            assert ep.flags().completed["frames received"] == ep.flags().completed["sums received"] == rounds
        storm.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
