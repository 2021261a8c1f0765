"""Measure launch shapes on this machine and keep the fastest one of each operation, format and number of tokens in the
user's cache, where later runs on such GPUs with as many SMs and such a model find it. Every shape gives the same
bytes."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cute_ep.commands.common import (
    add_budget_argument,
    add_device_arguments,
    add_shape_arguments,
    chosen_shape,
    config,
    format_names,
    print_table,
    token_counts,
)
from cute_ep.config import EPConfig
from cute_ep.errors import EPConfigError
from cute_ep.launch_shape import MANY, Entry, Shape, Tuning, pieces_for
from cute_ep.layouts.formats import formats_of
from cute_ep.tuning import ONE_A_SM, built_in, segments_of
from cute_ep.tuning_file import Setting, find_tuning, read_tables, tuning_file, write_tables

if TYPE_CHECKING:
    from cute_ep.communicator import Communicator
    from cute_ep.measure import InputSets
    from cute_ep.timing import Runner

LOG = logging.getLogger(__name__)
OPERATIONS = {"dispatch": ("dispatch",), "combine": ("combine_exact", "combine_partial")}
"""What is timed for a family's table; the geometric mean counts. Combine is timed with the first format only: rows come
home in bfloat16 whatever they were dispatched in."""
TOKENS, QUICK_TOKENS = "1,8,32,64,128,256,512,1024,2048,4096", "1,16,64,128,256,512,1024,4096"
"""The quick ones: one in each range of the built-in tables."""
GRIDS = (32, 64, ONE_A_SM, MANY)
SENDERS = {"dispatch": (0, 1 / 8, 1 / 4, 3 / 8, 1 / 2), "combine": (0, 1 / 2, 2 / 3, 208 / 264)}
MOST_SENDERS = {"dispatch": (28, 44, 64), "combine": (MANY,)}
SAMPLES, FINAL_SAMPLES = 40, 120
MARGIN = 0.02
"""Part by which a shape must be faster than the built-in one to take its place."""
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What `choose` has kept, and the medians of the built-in choice and of this one, measured one after the other."""

    entry: Entry
    default_us: float
    us: float


def choices(family: str, cfg: EPConfig, tokens: int) -> dict[str, tuple]:
    """Values to try of each field of an Entry. Pieces are at most the segments of a row, rounded up."""
    segments = segments_of(family, cfg)
    pieces = tuple(count for count in pieces_for(tokens) if count == 1 or count < 2 * segments)
    packed = (False, True) if family == "dispatch" else (False,)
    most, senders = MOST_SENDERS[family], SENDERS[family]
    return {
        "split_from": (Entry.split_from,),
        "packed": packed,
        "pieces": pieces,
        "most_senders": most,
        "senders": senders,
        "grid": GRIDS,
    }


def choose(
    default: Entry,
    fields: Mapping[str, Sequence],
    shape: Callable[[Entry], Shape],
    time: Callable[[Entry, int], float],
) -> Outcome:
    """Try one field's values after the other's, beginning with the default and going on from the fastest so far.

    Args:
        default: the built-in choice, kept unless another one is faster by more than MARGIN, twice.
        fields: values of each field, in the order in which they are tried.
        shape: what an entry comes to; a shape is timed once.
        time: microseconds of an entry, from so many samples.
    """
    best, times = default, {shape(default): time(default, SAMPLES)}
    for name, values in fields.items():
        for entry in [replace(best, **{name: value}) for value in values]:
            if shape(entry) not in times:
                times[shape(entry)] = time(entry, SAMPLES)
                if times[shape(entry)] < times[shape(best)]:
                    best = entry
    before, after = times[shape(default)], times[shape(best)]
    if after < (1 - MARGIN) * before:
        before, after = time(default, FINAL_SAMPLES), time(best, FINAL_SAMPLES)
        if after < (1 - MARGIN) * before:
            return Outcome(best, before, after)
    return Outcome(default, before, before)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep tune`."""
    add_device_arguments(parser)
    add_shape_arguments(parser)
    add_budget_argument(parser)
    parser.add_argument("--tokens", metavar="T[,T]", help=f"tokens of every rank (default {TOKENS})")
    parser.add_argument("--format", metavar="F[,F]", help="token formats (default all that hold the shape)")
    parser.add_argument("--quick", action="store_true", help=f"fewer numbers of tokens: {QUICK_TOKENS}")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print and write, each format when it is done. Returns 0; EPConfigError where there is no GPU, the shape
    breaks a rule, or the file with the tables is damaged."""
    from cute_ep.machine import describe_devices, parse_devices

    model = chosen_shape(args)
    sizes = sorted(set(token_counts(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))))
    formats = format_names(args.format) if args.format else formats_of(model.hidden)
    devices = parse_devices(args.devices, model.num_experts)
    if devices[0] == "cpu":
        raise EPConfigError("devices = 'cpu': tune measures GPUs")
    configs = [config(model, len(devices), max(sizes), fmt, TIMEOUT_S) for fmt in formats]
    read_tables()  # a damaged file is found now
    console.print(
        f"{model.name}: hidden {model.hidden}, {model.num_experts} experts, top-{model.top_k}; "
        f"{describe_devices(devices, args.sms)}; into {tuning_file()}",
        highlight=False,
        soft_wrap=True,
    )
    table = result_table()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(sizes) * (len(configs) + 1))
        for cfg in configs:
            families = tuple(OPERATIONS) if cfg is configs[0] else ("dispatch",)
            tune_format(cfg, devices, args.sms, args.library, families, sizes, table, partial(progress.update, task))
    print_table(console, table)
    return 0


def tune_format(
    cfg: EPConfig,
    devices: Sequence[str],
    sms: int | None,
    library: str | None,
    families: Sequence[str],
    sizes: Sequence[int],
    table: Table,
    step: Callable[..., None],
) -> None:
    """Measure the families with one set of communicators, write what was found, add it to the table.

    `step` is `rich.progress.Progress.update` of a task with one step for each family and number of tokens.
    """
    import torch

    from cute_ep.connection import connected
    from cute_ep.measure import make_runner, make_sets

    found: dict[str, dict[int, Outcome]] = {family: {} for family in families}
    with connected(cfg, devices, sms=sms, library=library) as communicators, make_runner(communicators) as lanes:
        max_ctas = communicators[0].max_ctas
        base = built_in(cfg, max_ctas)
        for tokens in sizes:
            sets = make_sets(cfg, devices, tokens)
            for family in families:
                LOG.info("tuning %s, %s, %d tokens per rank", family, cfg.dispatch_format, tokens)
                step(description=f"{family} {cfg.dispatch_format} {tokens} tokens")
                found[family][tokens] = tune_size(communicators, sets, family, base, lanes, OPERATIONS[family])
                step(advance=1)
            del sets
    name, gpus = torch.cuda.get_device_name(devices[0]), len(set(devices))
    known, tables = find_tuning(cfg, name, gpus, max_ctas), {}
    for family, outcomes in found.items():
        entries = {tokens: outcome.entry for tokens, outcome in outcomes.items()}
        tables[Setting.of(family, cfg, name, gpus, max_ctas)] = known.revised(family, entries).table(family)
        add_results(table, family, cfg, base, outcomes, max_ctas)
    write_tables(tables)


def tune_size(
    communicators: Sequence[Communicator],
    sets: InputSets,
    family: str,
    base: Tuning,
    lanes: Runner,
    operations: Sequence[str],
) -> Outcome:
    """`choose` for one number of tokens by the times of some of the family's operations, on all ranks."""
    from cute_ep.measure import measure

    def with_entry(entry: Entry) -> Tuning:
        return base.revised(family, {sets.tokens: entry})

    def shape(entry: Entry) -> Shape:
        return with_entry(entry).shape(family, sets.tokens, communicators[0].max_ctas)

    def time(entry: Entry, samples: int) -> float:
        for communicator in communicators:
            communicator.tuning = with_entry(entry)
        cases = measure(communicators, sets, operations, samples, lanes)
        return geometric_mean(case["p50_us"] for case in cases)

    default = replace(base.entry(family, sets.tokens), tokens=sets.tokens)
    return choose(default, choices(family, sets.cfg, sets.tokens), shape, time)


def result_table() -> Table:
    """An empty table for `add_results`."""
    table = Table(title="fastest shapes: CTAs, those of them that send, pieces of a row; p50 of the slowest rank")
    for name in ("operation", "format"):
        table.add_column(name)
    for name in ("tokens / rank", "built in", "p50 (us)", "best", "p50 (us)", "gain"):
        table.add_column(name, justify="right")
    return table


def add_results(
    table: Table, family: str, cfg: EPConfig, base: Tuning, outcomes: Mapping[int, Outcome], max_ctas: int
) -> None:
    """One row for each number of tokens."""

    def text(tuning: Tuning, tokens: int) -> str:
        shape = tuning.shape(family, tokens, max_ctas)
        senders = f"{shape.send_ctas}{' packed' if shape.packed else ''}" if shape.receive_from else "all"
        return f"{shape.grid}, {senders}, {shape.pieces}"

    for tokens, outcome in outcomes.items():
        before, after = text(base, tokens), text(base.revised(family, {tokens: outcome.entry}), tokens)
        table.add_row(
            family,
            cfg.dispatch_format if family == "dispatch" else "any",
            str(tokens),
            before,
            f"{outcome.default_us:.1f}",
            "the same" if after == before else after,
            f"{outcome.us:.1f}",
            f"{100 * (1 - outcome.us / outcome.default_us):.1f} %",
        )
    table.add_section()
