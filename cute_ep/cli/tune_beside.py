"""`cute-ep tune --beside ROWSxINNERxCOLUMNS`: with which budget of SMs (`sms` of `connect`) a layer takes least, when
its matmuls, of this size, run beside dispatch and combine.

Nothing in the measured layer waits for rows, so a budget pays at most what the table says. It is printed, not kept: it
belongs to the program that calls `connect`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import Preset, format_names, token_counts
from cute_ep.api.types import RowOrder
from cute_ep.cli.common import chosen_shape, config, measured_devices, print_table, step
from cute_ep.layouts.maps.routing import EXPERT_MAJOR

if TYPE_CHECKING:
    from cute_ep.bench.beside import Matmul

BUDGETS = (8, 16, 24, 32, 64)
"""What is tried beside all SMs, of those that leave the matmul some."""
TOKENS, FORMAT = "4096", "bf16"
TIMEOUT_S = 30.0
GAIN = 0.02
"""Part of a layer by which a budget must be faster than one after the other, to be worth it."""
COLUMNS = {
    "pair_us": "pair",
    "pair_beside_us": "beside the matmul",
    "matmul_us": "matmul",
    "matmul_beside_us": "beside the pair",
    "layer_us": "layer, at once",
    "apart_us": "in turn",
}
"""Of the table, by what `Beside.measure` returns; in us."""


def parse_matmul(text: str) -> tuple[int, int, int]:
    """8192x7168x4096: [rows, inner] times [inner, columns], positive numbers, else EPConfigError."""
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise EPConfigError(f"beside = {text!r}: must be ROWSxINNERxCOLUMNS, positive numbers such as 8192x7168x4096")
    rows, inner, columns = map(int, words)
    return rows, inner, columns


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print for each number of tokens and format. Returns 0; EPConfigError where an argument breaks a rule
    or there is no GPU."""
    rows, inner, columns = parse_matmul(args.beside)
    if args.sms is not None:
        raise EPConfigError(f"sms = {args.sms}: --beside tries budgets itself, leave it out")
    if args.quick:
        raise EPConfigError(f"quick: --beside measures {TOKENS} tokens; leave it out, or name others by --tokens")
    model, sizes = chosen_shape(args), token_counts(args.tokens or TOKENS)
    formats = format_names(args.format or FORMAT)

    from cute_ep.bench.beside import IN_LAYER, Matmul
    from cute_ep.bench.machine import describe_devices

    matmul = Matmul(rows, inner, columns)
    for tokens in sizes:
        count = matmul.in_layer(tokens, model.top_k, model.hidden, model.moe_hidden)
        if not IN_LAYER[0] <= count <= IN_LAYER[1]:
            raise EPConfigError(
                f"beside = {args.beside!r}: a layer of {tokens} tokens has as many operations as {count:.3g} such "
                f"matmuls, must be {IN_LAYER[0]} to {IN_LAYER[1]}; name the size of your layer's, or other --tokens"
            )
    devices = measured_devices(args, model, "tune")
    if len(set(devices)) < len(devices):
        raise EPConfigError(
            f"devices = {args.devices!r}: are {len(devices)} ranks on fewer GPUs, must be a GPU a rank, such as cuda:0"
        )
    console.print(
        f"{model.name}: hidden {model.hidden}, {model.num_experts} experts of {model.moe_hidden}, top-{model.top_k}, "
        f"{args.order}; matmul {args.beside}; {describe_devices(devices, None)}",
        highlight=False,
        soft_wrap=True,
    )
    for tokens in sizes:
        for fmt in formats:
            cfg = config(model, len(devices), tokens, fmt, TIMEOUT_S, args.order)
            found = measure(cfg, model, devices, args.library, matmul, console)
            print_table(console, table_of(cfg, found))
            console.print(advice(found, args.order), highlight=False, soft_wrap=True)
    return 0


def measure(
    cfg: EPConfig, model: Preset, devices: Sequence[str], library: str | None, matmul: Matmul, console: Console
) -> list[dict]:
    """For each budget, all SMs first, "sms" and what `Beside.measure` returns: pairs of partial combine, the default
    mode, with buffers of the default size. EPTimeout, EPError: as the kernels report."""
    from cute_ep.bench.beside import Beside, Highest, Threads
    from cute_ep.bench.measure import make_sets, roomy, run_round
    from cute_ep.runtime.connection import connected

    tokens, rows = cfg.max_tokens_per_rank, []
    in_layer = matmul.in_layer(tokens, cfg.top_k, cfg.hidden, model.moe_hidden)
    threads = Threads(devices)
    sets = make_sets(cfg, devices, tokens)
    batches = [roomy(cfg, own) for own in sets.batches]
    del sets  # and with it buffers that `batches` do not use
    besides = threads.on_all(lambda rank, highest: Beside(highest, matmul, in_layer))
    for sms in (None, *(one for one in BUDGETS if one < min(beside.sms for beside in besides))):
        with (
            step(console, f"{cfg.dispatch_format}, {tokens} tokens, {'all' if sms is None else sms} SMs"),
            connected(cfg, devices, sms=sms, library=library) as communicators,
        ):

            def one(rank: int, highest: Highest, sms: int | None = sms, ranks: Sequence = communicators) -> dict:
                own = batches[rank]
                pair = besides[rank].pair(lambda number: run_round(ranks[rank], own[number % len(own)], "pair"))
                made = besides[rank].measure(pair, sms or 0, in_turn=sms is None)
                ranks[rank].synchronize()  # raises what replays of the graphs have reported
                return made

            rows.append({"sms": sms} | threads.on_all(one)[0])
    return rows


def table_of(cfg: EPConfig, rows: Sequence[dict]) -> Table:
    """A line for each budget."""
    table = Table(title=f"{cfg.dispatch_format}, {cfg.max_tokens_per_rank} tokens / rank, us of the slowest rank")
    for name in ("SMs", *COLUMNS.values()):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{row[name]:.0f}" if name in row else "" for name in COLUMNS)
        table.add_row("all" if row["sms"] is None else str(row["sms"]), *cells)
    return table


def advice(rows: Sequence[dict], order: RowOrder) -> str:
    """With which `sms` the layer takes least: one after the other, if nothing gains GAIN."""
    in_turn = rows[0]["apart_us"]
    best = min(rows, key=lambda row: row["layer_us"])
    times = f"at once a layer takes {best['layer_us']:.0f} us at best, in turn {in_turn:.0f}"
    if best["layer_us"] > (1 - GAIN) * in_turn:
        return f"sms=None, in turn: {times}"
    if best["sms"] is None:
        return f"sms=None, at once: {times}"
    command = f"cute-ep tune --sms {best['sms']}" + ("" if order == EXPERT_MAJOR else f" --order {order}")
    return f"sms={best['sms']}, at once: {times}; `{command}` finds launch shapes for it"
