"""Measure launch shapes on this machine and keep the fastest one of each operation, format and number of tokens in the
user's cache, where later runs on such GPUs with as many SMs and such a model find it. Every shape gives the same
bytes."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cute_ep.api.config import EPConfig
from cute_ep.api.presets import format_names, token_counts
from cute_ep.cli import tune_beside
from cute_ep.cli.common import (
    add_budget_argument,
    add_device_arguments,
    add_shape_arguments,
    chosen_shape,
    config,
    measured_devices,
    print_table,
)
from cute_ep.layouts.maps.formats import formats_of
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, ROW_ORDERS, RowOrder
from cute_ep.tuning.builtin import built_in
from cute_ep.tuning.file import Setting, find_tuning, read_tables, tuning_file, write_tables
from cute_ep.tuning.launch_shape import FAMILIES, Shape, Tuning

if TYPE_CHECKING:
    from cute_ep.bench.tune import Outcome

LOG = logging.getLogger(__name__)
OPERATIONS: dict[RowOrder, dict[str, tuple[str, ...]]] = {
    "expert_major": {"dispatch": ("dispatch",), "combine": ("combine_exact", "combine_partial")},
    "rank_major": {"dispatch": ("dispatch",), "combine": ("combine_partial",)},
}
"""What is timed for a family's table, by the order of rows; the geometric mean counts. Combine is timed with the first
format only: rows come home in bfloat16 whatever they were dispatched in."""
TOKENS, QUICK_TOKENS = "1,4,8,16,32,64,128,256,512,1024,2048,4096", "1,16,64,128,256,512,1024,4096"
"""One in each range of the built-in tables but the one that ends where pipelines begin; the quick ones: of the tables
for whole GPUs."""
TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep tune`."""
    add_device_arguments(parser)
    add_shape_arguments(parser)
    add_budget_argument(parser)
    parser.add_argument("--tokens", metavar="T[,T]", help=f"tokens of every rank (default {TOKENS})")
    parser.add_argument("--format", metavar="F[,F]", help="token formats (default all that hold the shape)")
    parser.add_argument(
        "--order", choices=ROW_ORDERS, default=EXPERT_MAJOR, help="of rows; each has tables (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help=f"fewer numbers of tokens: {QUICK_TOKENS}")
    parser.add_argument(
        "--beside",
        metavar="ROWSxINNERxCOLUMNS",
        help="instead, find which budget of SMs suits a layer whose matmuls, [rows, inner] times [inner, columns], run "
        "beside it: "
        f"measures pairs of {tune_beside.TOKENS} {tune_beside.FORMAT} tokens, if no others are named; keeps nothing",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print and write, each format when it is done; with `--beside` as `tune_beside`. Returns 0; EPConfigError
    where there is no GPU, the shape breaks a rule, or the file with the tables is damaged."""
    if args.beside is not None:
        return tune_beside.run(args, console)
    from cute_ep.bench.machine import describe_devices

    model = chosen_shape(args)
    sizes = sorted(set(token_counts(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))))
    formats = format_names(args.format) if args.format else formats_of(model.hidden)
    devices = measured_devices(args, model, "tune")
    configs = [config(model, len(devices), max(sizes), fmt, TIMEOUT_S, args.order) for fmt in formats]
    read_tables()  # a damaged file is found now
    console.print(
        f"{model.name}: hidden {model.hidden}, {model.num_experts} experts, top-{model.top_k}, {args.order}; "
        f"{describe_devices(devices, args.sms)}; into {tuning_file()}",
        highlight=False,
        soft_wrap=True,
    )
    table, ranks = result_table(), Ranks(devices, args.sms, args.library)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(sizes) * (len(configs) + 1))
        for cfg in configs:
            families = FAMILIES if cfg is configs[0] else ("dispatch",)
            found = tune_format(cfg, ranks, families, sizes, partial(progress.update, task))
            keep(found, devices)
            add_results(table, found)
    print_table(console, table)
    return 0


@dataclass(frozen=True)
class Ranks:
    """Where ranks run: a device each, the SMs that each may take, and the folder with their kernels."""

    devices: Sequence[str]
    sms: int | None
    library: str | None


@dataclass(frozen=True)
class Found:
    """What was found for one configuration, in launches of at most `max_ctas` CTAs, with `ring_bytes` as of
    `built_in`: outcomes by family and tokens."""

    cfg: EPConfig
    max_ctas: int
    ring_bytes: int
    outcomes: dict[str, dict[int, Outcome]]


def tune_format(
    cfg: EPConfig, ranks: Ranks, families: Sequence[str], sizes: Sequence[int], step: Callable[..., None]
) -> Found:
    """Measure the families with one set of communicators.

    `step` is `rich.progress.Progress.update` of a task with one step for each family and number of tokens.
    """
    from cute_ep.bench.measure import make_runner, make_sets
    from cute_ep.bench.tune import tune_size
    from cute_ep.runtime.connection import connected

    connection = connected(cfg, ranks.devices, sms=ranks.sms, library=ranks.library)
    with connection as communicators, make_runner(communicators) as lanes:
        first = communicators[0]
        found = Found(cfg, first.max_ctas, first.ring_bytes, {family: {} for family in families})
        for tokens in sizes:
            sets = make_sets(cfg, ranks.devices, tokens)
            for family in families:
                LOG.info("tuning %s, %s, %d tokens per rank", family, cfg.dispatch_format, tokens)
                step(description=f"{family} {cfg.dispatch_format} {tokens} tokens")
                outcome = tune_size(communicators, sets, family, lanes, OPERATIONS[cfg.row_order][family])
                found.outcomes[family][tokens] = outcome
                step(advance=1)
            del sets
    return found


def keep(found: Found, devices: Sequence[str]) -> None:
    """Write what was found into the user's cache, beside what is there for other numbers of tokens."""
    import torch

    cfg, max_ctas = found.cfg, found.max_ctas
    name, gpus = torch.cuda.get_device_name(devices[0]), len(set(devices))
    known, tables = find_tuning(cfg, name, gpus, max_ctas, ring_bytes=found.ring_bytes), {}
    for family, outcomes in found.outcomes.items():
        entries = {tokens: outcome.entry for tokens, outcome in outcomes.items()}
        setting = Setting.of(family, cfg, name, gpus, max_ctas, ring_bytes=found.ring_bytes)
        tables[setting] = known.revised(family, entries).table(family)
    write_tables(tables)


def result_table() -> Table:
    """An empty table for `add_results`."""
    table = Table(
        title="fastest shapes: CTAs, or twins, those of them that send (packed: on SMs of their own; joining: and then "
        "receive), slices of a row; p50 of the slowest rank"
    )
    for name in ("operation", "format"):
        table.add_column(name)
    for name in ("tokens / rank", "built in", "p50 (us)", "best", "p50 (us)", "gain"):
        table.add_column(name, justify="right")
    return table


def shape_text(shape: Shape) -> str:
    """What `result_table` shows of a shape."""
    words = ["all"] if shape.send_ctas == shape.grid else [str(shape.send_ctas)]
    words += ["packed"] * shape.packed + ["joining"] * shape.joins
    return f"{shape.grid}, {' '.join(words)}, {shape.slices}"


def add_results(table: Table, found: Found) -> None:
    """One row for each number of tokens, a section for each family."""
    base = built_in(found.cfg, found.max_ctas, ring_bytes=found.ring_bytes)

    def text(tuning: Tuning, family: str, tokens: int) -> str:
        return shape_text(tuning.shape(family, tokens, found.max_ctas, ring_bytes=found.ring_bytes))

    for family, outcomes in found.outcomes.items():
        for tokens, outcome in outcomes.items():
            tuned = base.revised(family, {tokens: outcome.entry})
            before, after = text(base, family, tokens), text(tuned, family, tokens)
            table.add_row(
                family,
                found.cfg.dispatch_format if family == "dispatch" else "any",
                str(tokens),
                before,
                f"{outcome.default_us:.1f}",
                "the same" if after == before else after,
                f"{outcome.us:.1f}",
                f"{100 * (1 - outcome.us / outcome.default_us):.1f} %",
            )
        table.add_section()
