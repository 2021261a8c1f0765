"""What several sub-commands share: shape and device arguments, numbers with units, JSON files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import PRESETS, Preset, preset_named
from cute_ep.api.types import FormatName, RowOrder
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import EXPERT_MAJOR


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """`--preset`, and `--hidden`, `--experts`, `--top-k` that override its numbers."""
    parser.add_argument("--preset", default="deepseek-v3", metavar="NAME", help=f"model shape: {', '.join(PRESETS)}")
    parser.add_argument("--hidden", type=int, metavar="N", help="elements of a token row, instead of the preset's")
    parser.add_argument("--experts", type=int, metavar="N", help="experts of all ranks, instead of the preset's")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts per token, instead of the preset's")


def chosen_shape(args: argparse.Namespace) -> Preset:
    """The shape that the arguments of `add_shape_arguments` describe; EPConfigError for an unknown preset."""
    base = preset_named(args.preset)
    changed = [value for value in (args.hidden, args.experts, args.top_k) if value is not None]
    return Preset(
        f"{base.name}, changed" if changed else base.name,
        base.hidden if args.hidden is None else args.hidden,
        base.moe_hidden,
        base.num_experts if args.experts is None else args.experts,
        base.top_k if args.top_k is None else args.top_k,
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """`--devices` and `--library`."""
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="LIST",
        help="auto (as many GPUs as divide the experts, or 4 virtual ranks on a single one; verify and demo take cpu "
        "where there is none); cuda:0,cuda:1,... one rank each; "
        "virtual:N, N ranks on cuda:0; cpu or cpu:N, the reference backend with N ranks (default auto)",
    )
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels to look in first")


def measured_devices(args: argparse.Namespace, shape: Preset, command: str) -> list[str]:
    """The GPUs that `--devices` names, for a command that measures them; EPConfigError of `parse_devices`, or for a
    CPU."""
    from cute_ep.bench.machine import parse_devices

    devices = parse_devices(args.devices, shape.num_experts)
    if devices[0] == "cpu":
        raise EPConfigError(f"devices = 'cpu': {command} measures GPUs; verify and demo run on a CPU")
    return devices


def add_budget_argument(parser: argparse.ArgumentParser) -> None:
    """`--sms`, as `connect_local` takes it."""
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help="SMs that one rank may use (default: all, or where ranks share a GPU an equal part of all but 8)",
    )


@contextmanager
def one_thread_on_a_cpu(devices: Sequence[str]) -> Iterator[None]:
    """Let torch use one thread where the ranks are on the CPU: on a busy machine, small sums that wait for a second
    thread take seconds."""
    import torch

    threads = torch.get_num_threads()
    try:
        if devices[0] == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Say what is being done: beside a spinner on a terminal, as a line elsewhere."""
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...", highlight=False, soft_wrap=True)
        yield


def config(
    shape: Preset, ranks: int, tokens: int, fmt: str, timeout_s: float = 60.0, order: RowOrder = EXPERT_MAJOR
) -> EPConfig:
    """The deployment of a shape; EPConfigError names the rule that it breaks."""
    numbers = shape.hidden, shape.num_experts, shape.top_k, tokens, ranks
    return EPConfig(*numbers, cast(FormatName, fmt), timeout_s, row_order=order)


def message_regions(cfg: EPConfig) -> tuple[Region, Region]:
    """Where messages arrive in an arena, two rounds of them: of calls with few tokens, and of calls with many."""
    return cfg.arena.lamport_messages, cfg.arena.messages


def print_table(console: Console, table: Table) -> None:
    """Print a table with its title and caption as lines of their own, which rich would wrap to the table's width. Cells
    are wrapped between words and never cut: a table whose longest words do not fit is wider than the console."""
    title, caption = table.title, table.caption
    table.title = table.caption = None
    console.print(f"[bold]{title}[/]" if title else "", highlight=False, soft_wrap=True)
    wide = console.options.update(width=sys.maxsize)
    for column in table.columns:
        cells = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
        column.min_width = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
    least = Measurement.get(console, wide, table).minimum
    if least > console.width:
        table.width = least
    console.print(table, crop=False)
    if caption:
        console.print(f"[dim]{caption}[/]", highlight=False, soft_wrap=True)


def bytes_text(count: float) -> str:
    """A number of bytes with a binary unit, "224 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float) -> str:
    """A time with a unit that suits it, "12.3 us"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def write_file(argument: str, path: Path, text: str) -> None:
    """Write what the user asked for by an argument, creating its folder; EPConfigError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise EPConfigError(f"{argument} = {str(path)!r}: cannot be written ({error.strerror})") from None


def write_json(path: Path, content: dict) -> None:
    """Write `content` to the path of --json."""
    write_file("json", path, json.dumps(content, indent=1) + "\n")
