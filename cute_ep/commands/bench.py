"""Time dispatch, both combines, and in CUDA graphs these and the pair of dispatch and combine; beside the times the
bytes that must move and what those bytes take at copy speeds measured in the same run."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from cute_ep.commands.common import (
    add_device_arguments,
    add_shape_arguments,
    bytes_text,
    chosen_shape,
    config,
    format_names,
    print_table,
    served_formats,
    token_counts,
    write_json,
)
from cute_ep.errors import EPConfigError
from cute_ep.layouts.formats import BF16, FP8, NVFP4

DEFAULT_FORMATS = (BF16.name, FP8.name, NVFP4.name)
SETS = 4
TIMEOUT_S = 30.0
ROUTINGS = ("uniform", "zipf", "one_rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep bench`."""
    add_device_arguments(parser)
    add_shape_arguments(parser)
    parser.add_argument("--tokens", default="1,16,128,512,4096", metavar="T[,T]", help="tokens of every rank")
    parser.add_argument(
        "--format",
        metavar="F[,F]",
        help=f"token formats (default those of {', '.join(DEFAULT_FORMATS)} that hold the shape)",
    )
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS, help="how tokens choose experts")
    parser.add_argument("--iterations", type=int, default=100, metavar="N", help="measured rounds (default 100)")
    parser.add_argument("--json", metavar="FILE", help="write machine, ceilings and all results")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print every case. Returns 0; EPConfigError where there is no GPU or the shape breaks a rule."""
    from cute_ep.connection import connect_local
    from cute_ep.machine import describe_devices, environment, parse_devices

    shape, sizes = chosen_shape(args), token_counts(args.tokens)
    formats = format_names(args.format) if args.format else served_formats(shape, DEFAULT_FORMATS) or DEFAULT_FORMATS
    if args.iterations < 1:
        raise EPConfigError(f"iterations = {args.iterations}: must be at least 1")
    devices = parse_devices(args.devices, shape.num_experts)
    if devices[0] == "cpu":
        raise EPConfigError("devices = 'cpu': bench measures GPUs; verify and demo run on a CPU")
    configs = {fmt: config(shape, len(devices), max(sizes), fmt, TIMEOUT_S) for fmt in formats}

    from cute_ep.measure import MODES, against_ceilings, measure_case, measure_ceilings
    from cute_ep.workloads import make_inputs

    machine = environment(devices, args.command_line)
    console.print(
        f"{shape.name}: hidden {shape.hidden}, {shape.num_experts} experts, top-{shape.top_k}, {args.routing} routing, "
        f"{args.iterations} rounds over {SETS} input sets; {describe_devices(devices)}",
        highlight=False,
        soft_wrap=True,
    )
    ceilings = measure_ceilings(devices)
    kind = "device to device" if len(set(devices)) > 1 else "within the GPU"
    console.print(
        f"copy ceilings: {kind} {ceilings.push / 1e9:.0f} GB/s, memory (read + write) {ceilings.memory / 1e9:.0f} GB/s",
        highlight=False,
    )
    results = []
    for fmt, cfg in configs.items():
        communicators: list = connect_local(cfg, devices, library=args.library)
        table = result_table(fmt)
        try:
            for tokens in sizes:
                sets = [make_inputs(cfg, [tokens] * len(devices), args.routing, seed) for seed in range(SETS)]
                for mode in MODES:
                    with console.status(f"{fmt} {tokens} tokens {mode}"):
                        case = measure_case(communicators, sets, mode, args.iterations)
                    case |= {"format": fmt} | against_ceilings(case, ceilings)
                    results.append(case)
                    add_result(table, case)
                table.add_section()
        finally:
            for communicator in communicators:
                communicator.close()
        print_table(console, table)
    if args.json:
        content = {
            "machine": machine,
            "shape": vars(shape) | {"routing": args.routing},
            "ceilings_bytes_per_s": vars(ceilings),
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
        "p50 / floor",
    ):
        table.add_column(name, justify="right")
    return table


def add_result(table: Table, case: dict) -> None:
    """One row of `measure_case` and `against_ceilings`."""
    name = case["mode"].replace("_", " ")
    times = (f"{case[f'p{percent}_us']:.1f}" for percent in (50, 95, 99))
    floors = (f"{case[f'{which}_floor_us']:.1f}" for which in ("link", "memory"))
    moved = (bytes_text(case[f"{which}_bytes"]) for which in ("remote", "logical"))
    ratio = "-" if case["ratio"] is None else f"{case['ratio']:.2f}"
    table.add_row(str(case["tokens"]), name, *times, *moved, *floors, ratio)
