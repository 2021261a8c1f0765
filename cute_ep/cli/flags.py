"""Show what ranks whose waits timed out were waiting for, from files of `EPTimeout.flags.write`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep flags`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one of each rank, in any order")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the flags of every rank, and which rank is behind; returns the exit code."""
    from cute_ep.api.flags import Flags, slowest

    ranks = sorted((Flags.read(path) for path in args.files), key=lambda one: one.rank)
    for one in ranks:
        console.print(str(one), highlight=False, soft_wrap=True, markup=False)
    console.print(slowest(ranks), highlight=False, soft_wrap=True, markup=False)
    return 0
