"""Compare dispatch and combine on this machine with the reference, bit for bit, over formats, batch sizes, routings
and shapes; exit code 1 when any byte differs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from cute_ep.commands.common import add_device_arguments, seconds_text, write_json
from cute_ep.config import EPConfig
from cute_ep.errors import EPError
from cute_ep.layouts.formats import FORMATS

if TYPE_CHECKING:
    pass

SHAPES = ((7168, 256, 8), (2880, 128, 4), (96, 12, 3))
"""(hidden, experts, top-k): DeepSeek-V3's; hidden that is no multiple of 128; part of a scale-factor atom."""
TOKENS = (0, 1, 7, 16, 128, 513, 4096)
ROUTINGS = ("uniform", "zipf", "one_expert", "one_rank", "masked")
QUICK_SHAPES, QUICK_TOKENS, QUICK_ROUTINGS = SHAPES[1:], (0, 1, 16, 128), ("zipf", "masked")
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Case:
    """One round to check; `tokens` has one entry a rank."""

    fmt: str
    hidden: int
    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    routing: str
    split: bool

    @property
    def text(self) -> str:
        """The case in one line."""
        shape = f"hidden {self.hidden:5} experts {self.num_experts:3} top-{self.top_k}"
        tokens = ",".join(map(str, self.tokens))
        return f"{self.fmt:6} {shape} {self.routing:10} {'split' if self.split else 'fused'} tokens {tokens}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep verify`."""
    add_device_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="small shapes, 4 batch sizes, 2 routings")
    parser.add_argument("--json", metavar="FILE", help="write machine, cases, times and outcomes")


def tokens_of_ranks(tokens: int, ranks: int) -> tuple[int, ...]:
    """`tokens` on rank 0 and other numbers, some of them 0, on the others."""
    pattern = (tokens, tokens // 2, max(0, tokens - 1), tokens // 7)
    return tuple(pattern[rank % len(pattern)] for rank in range(ranks))


def run(args: argparse.Namespace, console: Console) -> int:
    """Check every case, one line each. Returns 0, or 1 when a case failed; EPError when nothing can be connected."""
    from cute_ep.machine import describe_devices, environment, parse_devices

    devices = parse_devices(args.devices)
    on_cpu, ranks = devices[0] == "cpu", len(devices)
    quick = args.quick or on_cpu
    shapes, sizes = (QUICK_SHAPES, QUICK_TOKENS) if quick else (SHAPES, TOKENS)
    routings = QUICK_ROUTINGS if quick else ROUTINGS
    console.print(describe_devices(devices), highlight=False)
    if on_cpu:
        console.print("checked here: the reference backend's rounds against the reference functions, small cases only")
    started, outcomes = time.perf_counter(), []
    for hidden, experts, top_k in shapes:
        experts = -(-max(experts, top_k) // ranks) * ranks
        group = _Group(devices, args.library, (hidden, experts, top_k), max(sizes))
        try:
            for size in sizes:
                for routing in routings:
                    outcomes += _check_inputs(group, tokens_of_ranks(size, ranks), routing, console)
        finally:
            group.close()
    failed = [row for row in outcomes if row["error"]]
    took = seconds_text(time.perf_counter() - started)
    if args.json:
        write_json(args.json, {"machine": environment(devices, args.command_line), "cases": outcomes})
    if failed:
        console.print(f"[red]{len(failed)} of {len(outcomes)} cases differ or failed[/], {took}")
        return 1
    console.print(f"[green]all {len(outcomes)} cases are bit-exact[/], {took}")
    return 0


class _Group:
    """Communicators of one shape, made once a format and again after a failure that leaves them unusable."""

    def __init__(self, devices: list[str], library: str | None, shape: tuple[int, int, int], max_tokens: int) -> None:
        self.devices, self.library, self.shape, self.max_tokens = devices, library, shape, max_tokens
        self._open: dict[str, Sequence] = {}

    def config(self, fmt: str) -> EPConfig:
        """The deployment in one format."""
        return EPConfig(*self.shape, self.max_tokens, len(self.devices), fmt, TIMEOUT_S)

    def communicators(self, fmt: str) -> Sequence:
        """All ranks."""
        from cute_ep.connection import connect_local

        if fmt not in self._open:
            self._open[fmt] = connect_local(self.config(fmt), self.devices, library=self.library)
        return self._open[fmt]

    def drop(self, fmt: str) -> None:
        """Close the communicators of one format."""
        for communicator in self._open.pop(fmt, ()):
            communicator.close()

    def close(self) -> None:
        """Close all."""
        for fmt in list(self._open):
            self.drop(fmt)


def _check_inputs(group: _Group, tokens: tuple[int, ...], routing: str, console: Console) -> list[dict]:
    """Check one batch in every format, fused and split."""
    from cute_ep.verify import check_round
    from cute_ep.workloads import make_inputs

    inputs = make_inputs(group.config("bf16"), tokens, routing, seed=sum(tokens))
    rows = []
    for fmt in FORMATS:
        communicators = group.communicators(fmt)
        for split in (False, True):
            case = Case(fmt, *group.shape, tokens, routing, split)
            start, error = time.perf_counter(), None
            try:
                check_round(communicators, inputs, split=split)
            except (AssertionError, EPError) as failure:
                error = f"{type(failure).__name__}: {failure}"
                if isinstance(failure, EPError):
                    group.drop(fmt)
                    communicators = group.communicators(fmt)
            seconds = time.perf_counter() - start
            mark = "[red]FAIL[/]" if error else "[green]ok[/]  "
            console.print(f"{mark} {case.text}  {seconds_text(seconds)}", highlight=False, soft_wrap=True)
            if error:
                console.print(f"     [red]{escape(error)}[/]", highlight=False, soft_wrap=True)
            rows.append(vars(case) | {"seconds": round(seconds, 6), "error": error})
    return rows
