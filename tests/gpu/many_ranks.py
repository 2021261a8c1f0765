"""One schedule with many virtual ranks on one GPU: `python -m tests.gpu.many_ranks RANKS`."""

from __future__ import annotations

import sys
from dataclasses import replace

from .conftest import connected
from .runs import Run, run_schedules
from .schedules import CASES, config_of


def main(ranks: int) -> None:
    """AssertionError or EPTimeout when something is wrong."""
    devices = ["cuda:0"] * ranks
    case = replace(CASES["ahead"], rounds=5)
    with connected(config_of(case, ranks), devices) as communicators:
        run_schedules(Run(communicators, case))


if __name__ == "__main__":
    main(int(sys.argv[1]))
