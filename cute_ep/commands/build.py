"""Compile kernels into a library folder. Rows' hidden size and top-k are run-time arguments, so the general kernels
serve every model; --specialise compiles them in."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_ep.commands.common import bytes_text, config, format_names, print_table, seconds_text
from cute_ep.errors import EPConfigError, EPError
from cute_ep.layouts.formats import FORMATS
from cute_ep.layouts.routing import MAX_EXPERTS
from cute_ep.layouts.variants import ARCHITECTURES, Variant, variants
from cute_ep.library import LibraryEntry, cache_folder
from cute_ep.presets import PRESETS, Preset, presets_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep build`."""
    parser.add_argument("--preset", metavar="NAME[,NAME]|all", help=f"models to serve: {', '.join(PRESETS)}")
    parser.add_argument("--hidden", type=int, metavar="N", help="elements of a token row to serve")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts a token to serve")
    parser.add_argument("--format", default=",".join(FORMATS), metavar="F[,F]", help="token formats (default all)")
    parser.add_argument(
        "--arch", default=",".join(ARCHITECTURES), metavar="A[,A]", help=f"targets (default {','.join(ARCHITECTURES)})"
    )
    parser.add_argument("--kernel", metavar="K[,K]", help="only these kernels, e.g. dispatch,combine_exact")
    parser.add_argument("--specialise", action="store_true", help="compile hidden and top-k in")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"library folder (default {_short(cache_folder())})")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at work at a time (default one a core)")


def wanted_variants(args: argparse.Namespace) -> list[Variant]:
    """The variants that the arguments ask for, after checking that they serve the given shapes.

    Raises:
        EPConfigError: an unknown name, or a shape that some format cannot hold: names the rule.
    """
    formats = format_names(args.format)
    archs = tuple(name.strip() for name in args.arch.split(","))
    for arch in archs:
        if arch not in ARCHITECTURES:
            raise EPConfigError(f"arch = {arch!r}: must be one of {', '.join(ARCHITECTURES)}")
    if args.jobs is not None and args.jobs < 1:
        raise EPConfigError(f"jobs = {args.jobs}: must be at least 1")
    shapes = served_shapes(args)
    for shape in shapes:
        for fmt in formats:
            check_shape(shape, fmt)
    if args.specialise:
        if not shapes:
            raise EPConfigError("specialise: needs --preset, --hidden or --top-k to compile in")
        sizes = [(shape.hidden, shape.top_k) for shape in shapes]
        if not args.preset:
            sizes = [(args.hidden, args.top_k)]
        made = [variant for hidden, top_k in sizes for variant in variants(archs, formats, hidden, top_k)]
    else:
        made = variants(archs, formats)
    made = list(dict.fromkeys(made))
    if args.kernel:
        known = {variant.kernel for variant in made}
        names = [name.strip() for name in args.kernel.split(",")]
        for name in names:
            if name not in known:
                raise EPConfigError(f"kernel = {name!r}: must be one of {', '.join(sorted(known))}")
        made = [variant for variant in made if variant.kernel in names]
    return made


def served_shapes(args: argparse.Namespace) -> list[Preset]:
    """The shapes named by --preset, or the one given by --hidden and --top-k; empty when none is."""
    if args.preset:
        if args.hidden is not None or args.top_k is not None:
            raise EPConfigError("preset: cannot go together with --hidden or --top-k")
        return presets_named(args.preset)
    if args.hidden is None and args.top_k is None:
        return []
    hidden = 128 if args.hidden is None else args.hidden
    top_k = 1 if args.top_k is None else args.top_k
    named = f"hidden {args.hidden or 'any'}, top-k {args.top_k or 'any'}"
    return [Preset(named, hidden, 0, MAX_EXPERTS, top_k)]


def check_shape(shape: Preset, fmt: str) -> None:
    """EPConfigError, which names the rule, unless dispatch and combine support `shape` in format `fmt`."""
    try:
        config(shape, 1, 1, fmt)
    except EPConfigError as error:
        raise EPConfigError(f"{shape.name}: {error}") from None


def run(args: argparse.Namespace, console: Console) -> int:
    """Compile what is missing or stale. Returns 0; EPError when the DSL is missing or a kernel does not compile."""
    from cute_ep.build import build

    made = wanted_variants(args)
    folder = args.out or cache_folder()
    jobs = min(args.jobs or os.cpu_count() or 1, len(made))
    for shape in served_shapes(args):
        print_served(shape, made, console)
    started = time.perf_counter()
    finished: dict[Variant, float | None] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"compiling with {jobs} processes", total=len(made))

        def on_done(variant: Variant, compiled: bool) -> None:
            finished[variant] = time.perf_counter() - started if compiled else None
            progress.update(task, advance=1, description=f"{variant.arch} {variant.symbol}")

        try:
            entries = build(made, folder, jobs=jobs, on_done=on_done)
        except RuntimeError as error:
            raise EPError(str(error)) from error
    print_table(console, build_table(entries, finished))
    compiled = sum(at is not None for at in finished.values())
    size = bytes_text(sum(entry.path.stat().st_size for entry in entries))
    took = seconds_text(time.perf_counter() - started)
    console.print(
        f"{compiled} built, {len(entries) - compiled} up to date, {size} in {_short(folder)}, {took}", soft_wrap=True
    )
    return 0


def print_served(shape: Preset, made: Sequence[Variant], console: Console) -> None:
    """One line: which of the variants serve a shape."""
    fits = [v for v in made if v.hidden in (None, shape.hidden) and v.top_k in (None, shape.top_k)]
    special = sum(v.hidden is not None or v.top_k is not None for v in fits)
    archs = ", ".join(dict.fromkeys(variant.arch for variant in fits))
    kinds = f"{len(fits) - special} general" + (f" and {special} specialised" if special else "")
    console.print(
        f"{shape.name} (hidden {shape.hidden}, top-k {shape.top_k}) is served by {kinds} variants ({archs})"
        if shape.moe_hidden
        else f"{shape.name}: served by {kinds} variants ({archs})",
        highlight=False,
    )


def build_table(entries: Sequence[LibraryEntry], finished: dict[Variant, float | None]) -> Table:
    """One row a variant; `finished` has seconds since the start, None for what was up to date."""
    table = Table(title="kernel library")
    table.add_column("variant")
    table.add_column("architecture")
    for name in ("registers / thread", "spills (B / thread)", "shared memory (B)", "cubin (B)", "done at (s)"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for entry in entries:
        at = finished.get(entry.variant)
        numbers = (entry.registers, entry.spill_bytes, entry.smem_bytes, entry.path.stat().st_size)
        state = ("-", "up to date") if at is None else (f"{at:.1f}", "built")
        table.add_row(entry.variant.symbol, entry.variant.arch, *map(str, numbers), *state)
    return table


def _short(folder: Path) -> str:
    """A folder with the user's home written as ~."""
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
