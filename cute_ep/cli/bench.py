"""Time dispatch, both combines, and pairs of dispatch and either; beside the times the bytes that must move and the
least that they take at copy speeds measured in the same run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import format_names, token_counts
from cute_ep.cli.common import (
    add_budget_argument,
    add_device_arguments,
    add_shape_arguments,
    bytes_text,
    chosen_shape,
    config,
    measured_devices,
    print_table,
    seconds_text,
    step,
    write_json,
)
from cute_ep.layouts.maps.formats import BF16, FP8, NVFP4, formats_of

DEFAULT_FORMATS = (BF16.name, FP8.name, NVFP4.name)
TIMEOUT_S = 30.0
ROUTINGS = ("uniform", "zipf", "one_rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep bench`."""
    add_device_arguments(parser)
    add_shape_arguments(parser)
    add_budget_argument(parser)
    parser.add_argument("--tokens", default="1,16,128,512,4096", metavar="T[,T]", help="tokens of every rank")
    parser.add_argument(
        "--format",
        metavar="F[,F]",
        help=f"token formats (default those of {', '.join(DEFAULT_FORMATS)} that hold the shape)",
    )
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS, help="how tokens choose experts")
    parser.add_argument(
        "--iterations", type=int, default=200, metavar="N", help="samples, each a CUDA graph of rounds (default 200)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, ceilings and all results")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print every case. Returns 0; EPConfigError where there is no GPU or the shape breaks a rule."""
    from cute_ep.bench.machine import describe_devices, environment
    from cute_ep.runtime.connection import connected

    shape, sizes = chosen_shape(args), token_counts(args.tokens)
    formats = format_names(args.format) if args.format else formats_of(shape.hidden, DEFAULT_FORMATS) or DEFAULT_FORMATS
    if args.iterations < 1:
        raise EPConfigError(f"iterations = {args.iterations}: must be at least 1")
    devices = measured_devices(args, shape, "bench")
    configs = {fmt: config(shape, len(devices), max(sizes), fmt, TIMEOUT_S) for fmt in formats}

    from cute_ep.bench.ceilings import floors, measure_ceilings
    from cute_ep.bench.measure import SETS, make_sets, measure

    machine = environment(devices, args.command_line)
    console.print(
        f"{shape.name}: hidden {shape.hidden}, {shape.num_experts} experts, top-{shape.top_k}, {args.routing} routing, "
        f"{args.iterations} samples over {SETS} input sets; {describe_devices(devices, args.sms)}",
        highlight=False,
        soft_wrap=True,
    )
    with step(console, "measuring copy speeds, launch and flag"):
        ceilings = measure_ceilings(devices, args.library)
    kind = "device to device" if len(set(devices)) > 1 else "within the GPU"
    console.print(
        f"ceilings: {kind} {ceilings.push / 1e9:.0f} GB/s, memory (read + write) {ceilings.memory / 1e9:.0f} GB/s, "
        f"flag {seconds_text(ceilings.flag)}, launch {seconds_text(ceilings.launch)}",
        highlight=False,
    )
    results = []
    for fmt, cfg in configs.items():
        table = result_table(fmt)
        with connected(cfg, devices, sms=args.sms, library=args.library) as communicators:
            for tokens in sizes:
                with step(console, f"timing {fmt}, {tokens} tokens per rank"):
                    sets = make_sets(cfg, devices, tokens, args.routing)
                    for case in measure(communicators, sets, samples=args.iterations):
                        results.append(case | floors(case["parts"], ceilings))
                        add_result(table, results[-1])
                table.add_section()
        print_table(console, table)
    if args.json:
        content = {
            "machine": machine,
            "shape": vars(shape) | {"routing": args.routing},
            "ceilings": vars(ceilings),
            "results": results,
        }
        write_json(args.json, content)
    return 0


def result_table(fmt: str) -> Table:
    """An empty table for `add_result`."""
    table = Table(title=f"{fmt}: times of the slowest rank")
    table.add_column("tokens / rank", justify="right")
    table.add_column("operation")
    for name in (
        "p50 (us)",
        "p95 (us)",
        "p99 (us)",
        "to other ranks",
        "per expert",
        "link floor (us)",
        "memory floor (us)",
        "floor (us)",
        "p50 / floor",
    ):
        table.add_column(name, justify="right")
    return table


def add_result(table: Table, case: dict) -> None:
    """One row of `measure` and `floors`."""
    times = (f"{case[f'p{percent}_us']:.1f}" for percent in (50, 95, 99))
    least = (f"{case[name]:.1f}" for name in ("link_floor_us", "memory_floor_us", "floor_us"))
    moved = (bytes_text(case[f"{which}_bytes"]) for which in ("remote", "logical"))
    ratio = f"{case['p50_us'] / case['floor_us']:.2f}"
    table.add_row(str(case["tokens"]), case["operation"].replace("_", " "), *times, *moved, *least, ratio)
