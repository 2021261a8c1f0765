"""Measure launch shapes on this machine and keep the fastest one of each operation, format and batch size in the user's
cache, where later runs look. Every shape gives the same bytes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cute_ep.commands.common import (
    add_device_arguments,
    add_shape_arguments,
    chosen_shape,
    config,
    format_names,
    print_table,
    served_formats,
    token_counts,
    write_json,
)
from cute_ep.config import EPConfig
from cute_ep.errors import EPConfigError
from cute_ep.layouts.formats import BF16, FP8, NVFP4
from cute_ep.library import cache_folder
from cute_ep.tuning import Shape, launch_shape

if TYPE_CHECKING:
    from cute_ep.communicator import Communicator

DEFAULT_FORMATS = (BF16.name, FP8.name, NVFP4.name)
DISPATCH = ("dispatch",)
COMBINES = ("combine_exact", "combine_partial")
"""Tuned with one format only: rows come home in bfloat16 whatever they were dispatched in."""
SAMPLES = 40
MARGIN = 0.01
"""Part by which a shape must be faster than the table's for the cache to have it."""
TIMEOUT_S = 30.0
GRIDS = (64, 128)
SENDERS = (0.0, 1 / 8, 48 / 264, 1 / 4, 1 / 2, 180 / 264)
"""Shares of the CTAs that only send; 0: every CTA does both."""


def candidates(operation: str, cfg: EPConfig, tokens: int, max_ctas: int) -> list[Shape]:
    """Shapes to try, the one that `launch_shape` chooses first."""
    shapes = [launch_shape(operation.partition("_")[0], cfg, tokens, max_ctas)]
    for grid in (*(grid for grid in GRIDS if grid < max_ctas), max_ctas):
        for share in SENDERS:
            senders = round(grid * share)
            if 0 < senders < grid:
                shapes.append(Shape(grid, senders, senders))
            elif not share:
                shapes.append(Shape(grid, grid, 0))
    return list(dict.fromkeys(shapes))


def shape_key(operation: str, cfg: EPConfig, tokens: int) -> str:
    """The key of a shape in the cache, "dispatch/nvfp4/7168/256/8/4/128"."""
    fmt = cfg.dispatch_format if operation in DISPATCH else "any"
    return f"{operation}/{fmt}/{cfg.hidden}/{cfg.num_experts}/{cfg.top_k}/{cfg.world_size}/{tokens}"


def tuning_file(machine: str) -> Path:
    """Where the shapes of a machine are kept; `machine` is `cute_ep.machine.machine_name`."""
    return cache_folder() / f"tuning-{machine}.json"


@contextmanager
def forced(communicators: Sequence[Communicator], operation: str, shape: Shape) -> Iterator[None]:
    """Let every launch of an operation have this shape."""
    launch = operation.partition("_")[0]
    for communicator in communicators:
        chosen = communicator._shape

        def choose(name: str, tokens: int, chosen=chosen) -> Shape:
            return shape if name == launch else chosen(name, tokens)

        vars(communicator)["_shape"] = choose
    try:
        yield
    finally:
        for communicator in communicators:
            del vars(communicator)["_shape"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep tune`."""
    add_device_arguments(parser)
    add_shape_arguments(parser)
    parser.add_argument(
        "--tokens", default="1,16,64,128,256,512,1024,4096", metavar="T[,T]", help="tokens of every rank"
    )
    parser.add_argument(
        "--format",
        metavar="F[,F]",
        help=f"token formats (default those of {', '.join(DEFAULT_FORMATS)} that hold the shape)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the shapes here, not into the cache")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and write. Returns 0; EPConfigError where there is no GPU or the shape breaks a rule."""
    from cute_ep.connection import connect_local
    from cute_ep.machine import describe_devices, machine_name, parse_devices

    model, sizes = chosen_shape(args), token_counts(args.tokens)
    formats = format_names(args.format) if args.format else served_formats(model, DEFAULT_FORMATS) or DEFAULT_FORMATS
    devices = parse_devices(args.devices, model.num_experts)
    if devices[0] == "cpu":
        raise EPConfigError("devices = 'cpu': tune measures GPUs")
    configs = [config(model, len(devices), max(sizes), fmt, TIMEOUT_S) for fmt in formats]

    from cute_ep.measure import make_sets

    path = Path(args.out) if args.out else tuning_file(machine_name(devices))
    console.print(f"{model.name} on {describe_devices(devices)}; {path}", highlight=False, soft_wrap=True)
    shapes: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
    table = Table(title="fastest shapes")
    for name in ("operation", "format", "tokens / rank", "grid", "senders", "p50 (us)", "of the table (us)"):
        table.add_column(name, justify="left" if name in ("operation", "format") else "right")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        plan = [DISPATCH + (COMBINES if cfg is configs[0] else ()) for cfg in configs]
        task = progress.add_task("tuning", total=len(sizes) * sum(map(len, plan)))
        for cfg, operations in zip(configs, plan, strict=True):
            communicators: list = connect_local(cfg, devices, library=args.library)
            try:
                for tokens in sizes:
                    sets = make_sets(cfg, devices, tokens)
                    for operation in operations:
                        progress.update(task, description=f"{operation} {cfg.dispatch_format} {tokens} tokens")
                        best, times = fastest(communicators, sets, operation)
                        shapes[shape_key(operation, cfg, tokens)] = asdict(best)
                        mine, default = times[best], next(iter(times.values()))
                        numbers = (best.grid, best.send_ctas if best.receive_from else "all")
                        table.add_row(
                            operation.replace("_", " "),
                            cfg.dispatch_format if operation in DISPATCH else "any",
                            *map(str, (tokens, *numbers)),
                            f"{mine:.1f}",
                            f"{default:.1f}",
                        )
                        progress.advance(task)
                    table.add_section()
            finally:
                for communicator in communicators:
                    communicator.close()
    print_table(console, table)
    write_json(str(path), shapes)
    return 0


def fastest(communicators: Sequence[Communicator], sets, operation: str) -> tuple[Shape, dict[Shape, float]]:
    """The fastest candidate, and the median of each in microseconds, that of the table first."""
    from cute_ep.measure import measure

    cfg = communicators[0].cfg
    times = {}
    for shape in candidates(operation, cfg, sets.tokens, communicators[0].max_ctas):
        with forced(communicators, operation, shape):
            (case,) = measure(communicators, sets, (operation,), SAMPLES)
        times[shape] = case["p50_us"]
    default, best = next(iter(times)), min(times, key=times.__getitem__)
    return (best if times[best] < (1 - MARGIN) * times[default] else default), times
