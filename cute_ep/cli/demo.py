"""Run one Mixture-of-Experts layer on real text: bytes are embedded and routed, dispatched to their experts,
multiplied, combined, and compared with a dense layer in float64."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.presets import Preset
from cute_ep.cli.common import (
    add_device_arguments,
    add_shape_arguments,
    bytes_text,
    chosen_shape,
    config,
    message_regions,
    one_thread_on_a_cpu,
    print_table,
    seconds_text,
    step,
)
from cute_ep.layouts.maps.arena import message_bytes
from cute_ep.layouts.maps.formats import FORMATS, formats_of

if TYPE_CHECKING:
    from cute_ep.bench.traffic import RoutingCounts
    from cute_ep.cli.demo_layer import ExpertWeights, TextBatch

MODES = ("partial", "exact")
"""Combine modes that sum, the default first."""
CPU_TOKENS = 512
GPU_TOKENS = 2048
MOST, LEAST, BAR = 8, 4, 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep demo`."""
    parser.add_argument("text", nargs="?", metavar="FILE", help="text to read (default: a long module of Python's own)")
    add_shape_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, metavar="T", help=f"bytes of text per rank (default {GPU_TOKENS}, on a CPU {CPU_TOKENS})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of embedding, router and weights (default 0)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the layer in every format and print all tables. Returns 0, or 1 where the error of a format is too large;
    EPError as configuration and kernels raise."""
    from cute_ep.bench.machine import parse_devices

    shape = chosen_shape(args)
    devices = parse_devices(args.devices, shape.num_experts, or_cpu=True)
    with one_thread_on_a_cpu(devices):
        return run_on(devices, shape, args, console)


def run_on(devices: list[str], shape: Preset, args: argparse.Namespace, console: Console) -> int:
    """`run` once the devices are known."""
    from cute_ep.bench.machine import describe_devices
    from cute_ep.bench.traffic import count_routing
    from cute_ep.cli import demo_layer as demo
    from cute_ep.runtime.connection import connected

    started = time.perf_counter()
    on_cpu = devices[0] == "cpu"
    reduced = on_cpu and (args.hidden is None or args.experts is None)
    if reduced:
        shape = demo.cpu_preset(shape, widths=args.hidden is None, experts=args.experts is None)
    tokens = args.tokens if args.tokens is not None else CPU_TOKENS if on_cpu else GPU_TOKENS
    name, text = demo.read_text(args.text)
    configs = {
        fmt: demo.as_linear(config(shape, len(devices), tokens, fmt))
        for fmt in formats_of(shape.hidden) or [next(iter(FORMATS))]
    }
    batches = demo.text_batches(text, shape, len(devices), tokens, args.seed)
    cfg = next(iter(configs.values()))
    each = batches[0].x.shape[0]
    console.print(
        f"{shape.name}: hidden {shape.hidden}, {shape.num_experts} SwiGLU experts of width {shape.moe_hidden}, "
        f"top-{shape.top_k}{' (sizes are reduced for a CPU)' if reduced else ''}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(describe_devices(devices), highlight=False, soft_wrap=True)
    console.print(f"text: {name}, {len(batches)} x {each} bytes, one byte per token", highlight=False, soft_wrap=True)

    with step(console, "routing"):
        counts = count_routing(cfg, [batch.topk_ids for batch in batches])
    print_table(console, load_table(cfg, batches))
    print_rank_loads(cfg, counts, console)
    print_table(console, bytes_table(configs, counts))
    print_table(console, memory_table(configs))

    with step(console, "making expert weights"):
        experts = demo.make_experts(cfg, shape, devices, args.seed + 2)
        placed = [
            demo.TextBatch(*(part.to(device) for part in (one.x, one.topk_ids, one.router_weights)))
            for one, device in zip(batches, devices, strict=True)
        ]
    print_weights(cfg, experts, console)
    with step(console, "dense layer in float64, to compare with"):
        wanted = demo.dense_layer(cfg, placed, experts)
    outcomes = {}
    for fmt, cfg in configs.items():
        with step(console, f"layer with {fmt} dispatch"):
            with connected(cfg, devices, library=args.library) as communicators:
                if not on_cpu:
                    demo.run_layer(communicators, placed, experts, MODES, args.library)
                results, times = demo.run_layer(communicators, placed, experts, MODES, args.library)
        outcomes[fmt] = (times, {mode: demo.relative_errors(results[mode], wanted) for mode in MODES})
    print_table(console, time_table(outcomes, on_cpu))
    limits = {fmt: demo.rms_limit(cfg) for fmt, cfg in configs.items()}
    print_table(console, error_table(outcomes, limits))
    wrong = [
        f"{fmt} {mode}: rms error {errors[mode][1]:.3%}, must be at most {limits[fmt]:.0%}"
        for fmt, (_, errors) in outcomes.items()
        for mode in MODES
        if not errors[mode][1] <= limits[fmt]
    ]
    for line in wrong:
        console.print(line, style="red", highlight=False)
    if not wrong:
        console.print("all formats agree with the dense layer", style="green")
    console.print(f"demo took {seconds_text(time.perf_counter() - started)}")
    return int(bool(wrong))


def load_table(cfg: EPConfig, batches: list[TextBatch]) -> Table:
    """The most and the least loaded experts as bars."""
    import torch

    ids = torch.cat([batch.topk_ids.flatten() for batch in batches])
    load = torch.bincount(ids, minlength=cfg.num_experts).tolist()
    order = sorted(range(cfg.num_experts), key=lambda expert: (-load[expert], expert))
    mean = sum(load) / len(load)
    table = Table(
        title=f"tokens per expert: {sum(load)} (token, expert) pairs, mean {mean:.1f}, "
        f"most {load[order[0]] / mean:.2f} x mean, {load.count(0)} experts idle",
    )
    for column in ("expert", "rank", "tokens"):
        table.add_column(column, justify="right")
    table.add_column("")
    shown = order if len(order) <= MOST + LEAST else [*order[:MOST], None, *order[-LEAST:]]
    for expert in shown:
        if expert is None:
            table.add_row("...", "", "", "")
            continue
        bar = "█" * max(round(BAR * load[expert] / max(load[order[0]], 1)), 0) or "▏"
        table.add_row(str(expert), str(expert // cfg.local_experts), str(load[expert]), f"[cyan]{bar}[/]")
    return table


def print_rank_loads(cfg: EPConfig, counts: RoutingCounts, console: Console) -> None:
    """What each rank receives, and how many distinct ranks a token goes to."""
    tokens = max(1, sum(counts.tokens))
    experts, ranks = (int(each.sum()) / tokens for each in (counts.entries, counts.pairs))
    table = Table(
        title=f"what each rank receives: a token goes to {experts:.2f} experts on {ranks:.2f} ranks, travels once to "
        "each of these ranks, and is copied there to a row for each expert",
    )
    for column in ("rank", "tokens received", "rows for its experts"):
        table.add_column(column, justify="right")
    for rank, received in enumerate(counts.messages.sum(dim=0).tolist()):
        table.add_row(str(rank), str(received), str(counts.rows_received(rank)))
    print_table(console, table)


def bytes_table(configs: dict[str, EPConfig], counts: RoutingCounts) -> Table:
    """Bytes to other ranks, against one message per (token, expert)."""
    from cute_ep.bench.traffic import traffic

    table = Table(title="bytes that leave a rank for another one, all ranks together")
    table.add_column("format")
    for name in (
        "one message",
        "dispatch: a message per token and rank",
        "instead, a message per token and expert",
        "combine partial",
        "combine exact",
    ):
        table.add_column(name, justify="right")
    for fmt, cfg in configs.items():
        sent = [traffic(cfg, counts, name).remote_bytes for name in ("dispatch", "combine_partial", "combine_exact")]
        entries = int(counts.entries.sum() - counts.entries.diag().sum())
        token = message_bytes(cfg.format, cfg.hidden)
        table.add_row(fmt, *map(bytes_text, (token, sent[0], entries * token, *sent[1:])))
    return table


def memory_table(configs: dict[str, EPConfig]) -> Table:
    """Symmetric memory, against receive buffers with slots for each expert."""
    from cute_ep.bench.traffic import per_expert_receive_bytes

    table = Table(title="memory of one rank")
    table.add_column("format")
    for name in ("symmetric memory", "of that for received tokens", "instead, a slot per (expert, source, token)"):
        table.add_column(name, justify="right")
    for fmt, cfg in configs.items():
        receive = sum(region.nbytes for region in message_regions(cfg))
        table.add_row(fmt, *map(bytes_text, (memory_bytes(cfg), receive, per_expert_receive_bytes(cfg))))
    return table


def print_weights(cfg: EPConfig, experts: list[ExpertWeights], console: Console) -> None:
    """Memory of the weights, and whether experts share them."""
    total = sum(one.nbytes for one in experts)
    fewest = min(one.sets for one in experts)
    note = "every expert has its own"
    if fewest < cfg.local_experts:
        note = f"memory holds {fewest} sets per rank, shared by {cfg.local_experts} experts"
    console.print(f"expert weights: {bytes_text(total)} in bfloat16, {note}", highlight=False)


def time_table(outcomes: dict, on_cpu: bool) -> Table:
    """Host wall-clock times of every stage."""
    stages = list(next(iter(outcomes.values()))[0].seconds)
    where = "the reference model on the CPU, no measure of the kernels" if on_cpu else "second run, launches included"
    table = Table(
        title=f"time of each stage, all ranks, host clock ({where}); decode rows is torch, to bfloat16 for its matmuls"
    )
    table.add_column("format")
    for stage in stages:
        table.add_column(stage, justify="right")
    for fmt, (times, _) in outcomes.items():
        table.add_row(fmt, *(seconds_text(times.seconds[stage]) for stage in stages))
    return table


def error_table(outcomes: dict, limits: dict[str, float]) -> Table:
    """Errors against the dense layer, and the most that root mean squares may be."""
    table = Table(
        title="error against the dense float64 layer: max |difference| / max |value|, and of root mean squares",
    )
    table.add_column("dispatch format")
    for mode in MODES:
        table.add_column(f"{mode}: max", justify="right")
        table.add_column(f"{mode}: rms", justify="right")
    table.add_column("rms at most", justify="right")
    for fmt, (_, errors) in outcomes.items():
        cells = (f"{100 * value:.3f} %" for mode in MODES for value in errors[mode])
        table.add_row(fmt, *cells, f"{limits[fmt]:.0%}")
    return table
