"""Compare dispatch and combine on this machine with the reference, bit for bit, over formats, batch sizes, routings,
shapes and options; exit code 1 when any byte differs."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.markup import escape

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.api.types import FormatName
from cute_ep.cli.common import add_device_arguments, one_thread_on_a_cpu, seconds_text, write_json
from cute_ep.cli.ranks import LocalRanks, OneRank, Ranks
from cute_ep.layouts.maps.formats import FORMATS, formats_of

if TYPE_CHECKING:
    from cute_ep.testing.workloads import RankInputs

SHAPES = ((7168, 256, 8), (2880, 128, 4), (640, 24, 3), (96, 12, 3))
"""(hidden, experts, top-k): DeepSeek-V3's; hidden that is no multiple of 128; scale factors that fill no atom. A format
whose rows a shape does not fit is left out there."""
TOKENS = (0, 1, 7, 16, 128, 513, 4096)
ROUTINGS = ("uniform", "zipf", "one_expert", "one_rank", "masked")
QUICK_SHAPES, QUICK_TOKENS, QUICK_ROUTINGS = SHAPES[1:], (0, 1, 16, 128), ("zipf", "masked")
LARGEST = 1024
"""From this many tokens on each format is checked with one routing, another one for each format."""
OPTION_TOKENS = 131
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Options:
    """What a case exercises besides its batch: fields of EPConfig, fields of RoundOptions (`dtype` by its name), and
    whether only formats with scale factors have it."""

    config: dict = field(default_factory=dict)
    round: dict = field(default_factory=dict)
    scaled: bool = False


PLAIN = "plain"
OPTIONS: dict[str, Options] = {
    PLAIN: Options(),
    "aligned": Options({"row_alignment": 16}, {"dtype": "float16"}),
    "linear": Options({"scale_layout": "linear", "row_alignment": 128, "zero_padding": False}, scaled=True),
    "quantised": Options({}, {"prequantized": True}, scaled=True),
    "shared": Options({"fused_shared_expert": True}, {"dtype": "float32"}),
    "alone": Options({"fused_shared_expert": True, "skip_a2a": True}),
}
"""By the name that a case prints. All but the plain ones are checked with one batch of each shape."""


@dataclass(frozen=True)
class Case:
    """One round to check; `tokens` has one entry per rank."""

    fmt: str
    hidden: int
    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    routing: str
    options: str
    split: bool
    ranks_per_node: int | None = None

    @property
    def text(self) -> str:
        """The case in one line."""
        shape = f"hidden {self.hidden:5} experts {self.num_experts:3} top-{self.top_k}"
        tokens = ",".join(map(str, self.tokens))
        how = f"{self.routing:10} {self.options:9} {'split' if self.split else 'fused'}"
        return f"{self.fmt:9} {shape} {how} tokens {tokens}"

    @property
    def cfg(self) -> EPConfig:
        """The deployment; EPConfigError when the format cannot hold the rows."""
        shape = (self.hidden, self.num_experts, self.top_k, max(1, *self.tokens), len(self.tokens))
        options = OPTIONS[self.options].config | {"ranks_per_node": self.ranks_per_node}
        return EPConfig(*shape, cast(FormatName, self.fmt), TIMEOUT_S, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep verify`."""
    add_device_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="small shapes, 4 batch sizes, 2 routings: on a CPU always")
    parser.add_argument(
        "--nodes", action="store_true", help="this is one rank of several, started by torchrun, whose ranks are a node"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, cases, times and outcomes")


def tokens_of_ranks(tokens: int, ranks: int) -> tuple[int, ...]:
    """`tokens` on rank 0 and other numbers, some of them 0, on the others."""
    pattern = (tokens, tokens // 2, max(0, tokens - 1), tokens // 7)
    return tuple(pattern[rank % len(pattern)] for rank in range(ranks))


def cases_of(shape: tuple[int, int, int], ranks: int, sizes: Sequence[int], routings: Sequence[str]) -> Iterator[Case]:
    """All cases of one shape, those of one format and option one after the other, fused and split by turns."""
    turn = count()
    for number, fmt in enumerate(formats_of(shape[0])):
        for size in sizes:
            some = routings if size < LARGEST else [routings[number % len(routings)]]
            for routing in some:
                yield Case(fmt, *shape, tokens_of_ranks(size, ranks), routing, PLAIN, next(turn) % 2 == 1)
        for name, options in OPTIONS.items():
            if name == PLAIN or (options.scaled and not FORMATS[fmt].scale):
                continue
            tokens = tokens_of_ranks(OPTION_TOKENS, ranks)
            if options.config.get("skip_a2a"):
                tokens = (OPTION_TOKENS,) * ranks
            for split in (False, True):
                yield Case(fmt, *shape, tokens, routings[next(turn) % len(routings)], name, split)


def run(args: argparse.Namespace, console: Console) -> int:
    """Check every case, one line each. Returns 0, or 1 when a case failed; EPError when nothing can be connected."""
    from cute_ep.bench.machine import parse_devices

    if args.nodes:
        return run_rank(args, console)
    devices = parse_devices(args.devices, or_cpu=True)
    with one_thread_on_a_cpu(devices):
        return run_on(devices, args, console)


def run_on(devices: list[str], args: argparse.Namespace, console: Console) -> int:
    """`run` once the devices are known."""
    from cute_ep.bench.machine import describe_devices

    console.print(describe_devices(devices), highlight=False, soft_wrap=True)
    if devices[0] == "cpu":
        console.print(
            "checked here: the reference backend's rounds against the reference functions, the cases of --quick only",
            soft_wrap=True,
        )
    return check_all(LocalRanks(devices, args.library), args, console)


def run_rank(args: argparse.Namespace, console: Console) -> int:
    """`run` of one rank of several, all of which make the same calls; that of rank 0 prints what is right."""
    import torch
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]
    if missing:
        rule = "run it on each node as torchrun ... -m cute_ep verify --nodes"
        raise EPConfigError(f"--nodes: {', '.join(missing)} must be set; {rule}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    try:
        console.quiet = dist.get_rank() != 0
        ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        what = "GPUs" if torch.cuda.is_available() else "the reference backend"
        console.print(f"{ranks} ranks of {what}, {per_node} of each node", highlight=False)
        return check_all(OneRank(ranks, per_node, args.library), args, console)
    finally:
        dist.destroy_process_group()


def check_all(ranks: Ranks, args: argparse.Namespace, console: Console) -> int:
    """Check all cases on some ranks. Returns 0, or 1 when one failed."""
    from cute_ep.bench.machine import environment

    quick = args.quick or ranks.devices[0] == "cpu"
    shapes, sizes = (QUICK_SHAPES, QUICK_TOKENS) if quick else (SHAPES, TOKENS)
    routings, count = QUICK_ROUTINGS if quick else ROUTINGS, ranks.count
    started, outcomes = time.perf_counter(), []
    for hidden, experts, top_k in shapes:
        least = max(experts, top_k * (count // (ranks.per_node or count)))
        shape = (hidden, -(-least // count) * count, top_k)
        group = _Group(ranks, max(*sizes, OPTION_TOKENS))
        try:
            for case in cases_of(shape, count, sizes, routings):
                case = replace(case, ranks_per_node=ranks.per_node)
                if ranks.per_node is None or not OPTIONS[case.options].config.get("fused_shared_expert"):
                    outcomes.append(_check(group, case, console))
        finally:
            group.close()
    failed = [row for row in outcomes if row["error"]]
    took = seconds_text(time.perf_counter() - started)
    if args.json:
        write_json(args.json, {"machine": environment(ranks.devices, args.command_line), "cases": outcomes})
    if failed:
        console.print(f"[red]{len(failed)} of {len(outcomes)} cases differ or failed[/], {took}")
        return 1
    console.print(f"[green]all {len(outcomes)} cases are bit-exact[/], {took}")
    return 0


class _Group:
    """What the cases of one shape share: the communicators of the latest configuration, made again when it changes and
    after a failure, and the batches, which are the same in every format."""

    def __init__(self, ranks: Ranks, max_tokens: int) -> None:
        self.ranks, self.max_tokens = ranks, max_tokens
        self._cfg: EPConfig | None = None
        self._open: Sequence = ()
        self._batches: dict[tuple, list[RankInputs]] = {}

    def inputs(self, case: Case) -> list[RankInputs]:
        """The case's batch; with `skip_a2a` the same tokens on every rank."""
        from cute_ep.testing.workloads import make_inputs

        key = (case.tokens, case.routing)
        if key not in self._batches:
            shape = (case.hidden, case.num_experts, case.top_k, max(1, *case.tokens), len(case.tokens))
            cfg = EPConfig(*shape, ranks_per_node=case.ranks_per_node)
            self._batches[key] = make_inputs(cfg, case.tokens, case.routing, seed=sum(case.tokens))
        made = self._batches[key]
        return made[:1] * len(made) if case.cfg.skip_a2a else made

    def communicators(self, case: Case) -> Sequence:
        """The ranks of this process."""
        cfg = replace(case.cfg, max_tokens_per_rank=self.max_tokens)
        if cfg != self._cfg:
            self.close()
            self._open, self._cfg = self.ranks.connect(cfg), cfg
        return self._open

    def close(self) -> None:
        """Close the communicators."""
        for communicator in self._open:
            communicator.close()
        self._open, self._cfg = (), None


def _check(group: _Group, case: Case, console: Console) -> dict:
    """Check one case and print its line."""
    import torch

    from cute_ep.testing.verify import RoundOptions, check_round

    wanted = dict(OPTIONS[case.options].round)
    if "dtype" in wanted:
        wanted["dtype"] = getattr(torch, wanted["dtype"])
    inputs, communicators = group.inputs(case), group.communicators(case)
    start, error, broken = time.perf_counter(), None, False
    try:
        check_round(communicators, inputs, RoundOptions(case.split, **wanted))
    except (AssertionError, EPError) as failure:
        error, broken = f"{type(failure).__name__}: {failure}", isinstance(failure, EPError)
    errors = group.ranks.errors(error)
    if broken or (errors and len(communicators) < case.cfg.world_size):  # other processes may have made more calls
        group.close()
    error = "; ".join(errors) or None
    seconds = time.perf_counter() - start
    mark = "[red]FAIL[/]" if error else "[green]ok[/]  "
    console.print(f"{mark} {case.text}  {seconds_text(seconds)}", highlight=False, soft_wrap=True)
    if error:
        console.print(f"     [red]{escape(error)}[/]", highlight=False, soft_wrap=True)
    return vars(case) | {"seconds": round(seconds, 6), "error": error}
