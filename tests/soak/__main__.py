"""`python -m tests.soak rounds | faults`: exit code 0, 1 when something was wrong, 2 for wrong arguments."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cute_ep.api.errors import EPConfigError, EPInputError

from .deployments import device_sets, draw_deployment
from .faults import FAULTS, act_here, run_faults
from .record import Bar, Record
from .rounds import ROUNDS, run_deployment

MOST_FAILED = 10
"""Deployments with failures after which a run ends."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rounds = commands.add_parser("rounds", help="random deployments, compared to the last byte")
    rounds.add_argument("--rounds", type=int, default=100_000, help="in all, those of earlier calls too")
    rounds.add_argument("--seconds", type=float, default=float("inf"), help="stop cleanly after so many")
    rounds.add_argument("--seed", type=int, default=0)
    rounds.add_argument("--devices", default="auto", help="auto (all GPUs), cpu:N, virtual:N or cuda:I,cuda:J,...")
    rounds.add_argument("--deployment", type=int, help="run this one only, and keep no state")
    rounds.add_argument("--out", type=Path, default=Path("build/soak/rounds.json"), help="state; a later call goes on")
    faults = commands.add_parser("faults", help="what may go wrong around a round, a process each")
    faults.add_argument("--only", choices=[fault.name for fault in FAULTS], action="append")
    faults.add_argument("--jobs", type=int, default=4, help="faults at a time")
    faults.add_argument("--out", type=Path, default=Path("build/soak/faults.json"))
    fault = commands.add_parser("fault", help="one fault, or one rank of it, in this process; `faults` calls this")
    fault.add_argument("name", choices=[fault.name for fault in FAULTS])
    fault.add_argument("--devices", help="of the ranks, as for rounds; in faults of one process")
    fault.add_argument("--rank", type=int, help="this process's, in faults of a process a rank")
    fault.add_argument("--ranks", type=int)
    fault.add_argument("--meeting", type=Path, help="file at which they meet; must not exist")
    for command in (rounds, faults, fault):
        command.add_argument("--library", type=Path, help="folder of compiled kernels to look in first")
    return parser


def soak_rounds(args: argparse.Namespace, command: str, console: Console) -> int:
    """Deployments one after the other until there are enough rounds or the time is over.

    Returns:
        0, or 1 if something was wrong or no round has run.
    """
    if args.rounds < 1:
        raise EPInputError(f"rounds = {args.rounds}: must be positive")
    if not args.seconds > 0:
        raise EPInputError(f"seconds = {args.seconds:g}: must be positive")
    sets = device_sets(args.devices)
    if args.deployment is not None:
        deployment, random = draw_deployment(args.seed, args.deployment, sets)
        console.print(str(deployment), highlight=False, markup=False)
        outcome = run_deployment(deployment, random, min(args.rounds, ROUNDS), library=args.library)
        for line in (*outcome.failures, f"{outcome.rounds} rounds, {outcome.wrong_bytes} wrong bytes"):
            console.print(line, highlight=False, markup=False)
        return int(bool(outcome.failures) or not outcome.rounds)
    started = time.monotonic()
    record = Record(args.out, args.seed, args.devices, command, sorted({device for one in sets for device in one}))
    with Bar(console, args.rounds, record.rounds) as bar:
        while record.rounds < args.rounds and len(record.failures) < MOST_FAILED:
            left = args.seconds - (time.monotonic() - started)
            if left <= 0:
                break
            deployment, random = draw_deployment(args.seed, record.next, sets)
            bar.step(0, f"{deployment.number}: {deployment.cfg.dispatch_format}, {len(deployment.devices)} ranks")
            begin = time.monotonic()
            outcome = run_deployment(
                deployment,
                random,
                min(ROUNDS, args.rounds - record.rounds),
                seconds=left,
                library=args.library,
                step=bar.step,
            )
            reproduce = f"python -m tests.soak rounds --seed {args.seed} --devices {args.devices}"
            reproduce += f" --deployment {deployment.number}" + (f" --library {args.library}" if args.library else "")
            record.add(deployment.number, outcome, reproduce, time.monotonic() - begin)
            if outcome.failures:
                console.print(f"{reproduce}\n  " + "\n  ".join(outcome.failures), highlight=False, markup=False)
            if outcome.broken:  # the next call goes on with the next deployment, in a process of its own
                break
    console.print(record.summary(), highlight=False, markup=False, soft_wrap=True)
    return int(not record.good or not record.rounds)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    console, command = Console(), shlex.join(["python", "-m", "tests.soak", *words])
    try:
        if args.command == "rounds":
            return soak_rounds(args, command, console)
        if args.command == "fault":
            act_here(args)
            return 0
        return run_faults(args.only, args.jobs, args.library, args.out, command, console)
    except (EPConfigError, EPInputError) as error:
        Console(stderr=True).print(f"tests.soak: {error}", soft_wrap=True, markup=False)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
