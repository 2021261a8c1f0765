"""Compile kernels into a library folder. Shapes are run-time arguments, so one set of kernels serves every model; hooks
("module:function", see cute_ep.kernels.hooks) make further variants of the kernels that call them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_ep.aot.cubin import DISASSEMBLER, find_nvdisasm
from cute_ep.aot.library import LibraryEntry, cache_folder
from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import PRESETS, format_names, presets_named
from cute_ep.cli.common import bytes_text, print_table, seconds_text
from cute_ep.layouts.maps.formats import FORMATS, formats_of
from cute_ep.layouts.maps.variants import ARCHITECTURES, Hooks, Variant, variants

HOOK_HELP = {
    "epilogue": "changes combine's sums before they are rounded",
    "router_weights": "reads router weights that are not float32",
    "input_scale": "reads the tokens' global scale",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep build`."""
    parser.add_argument("--preset", metavar="NAME[,NAME]|all", help=f"models to serve: {', '.join(PRESETS)}")
    parser.add_argument("--format", default=",".join(FORMATS), metavar="F[,F]", help="token formats (default all)")
    parser.add_argument(
        "--arch", default=",".join(ARCHITECTURES), metavar="A[,A]", help=f"targets (default {','.join(ARCHITECTURES)})"
    )
    parser.add_argument("--kernel", metavar="K[,K]", help="only these kernels, e.g. dispatch,combine_exact")
    for hook, does in HOOK_HELP.items():
        parser.add_argument(f"--{hook.replace('_', '-')}", metavar="M:F", help=f"module:function that {does}")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"library folder (default {_short(cache_folder())})")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at work at a time (default one per core)")
    parser.add_argument(
        "--reuse", type=Path, metavar="DIR", help="copy from this folder what was made from the same sources"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="compile all anew, with line info, and write PTX and SASS that name source lines to this folder",
    )


def wanted_variants(args: argparse.Namespace) -> list[Variant]:
    """The variants that the arguments ask for, after checking that they serve the given shapes.

    Raises:
        EPConfigError: an unknown name, a hook that is no "module:function", or a shape that some format cannot hold:
            names the rule.
    """
    formats = format_names(args.format)
    archs = tuple(name.strip() for name in args.arch.split(","))
    for arch in archs:
        if arch not in ARCHITECTURES:
            raise EPConfigError(f"arch = {arch!r}: must be one of {', '.join(ARCHITECTURES)}")
    if args.jobs is not None and args.jobs < 1:
        raise EPConfigError(f"jobs = {args.jobs}: must be at least 1")
    for shape in presets_named(args.preset) if args.preset else ():
        if not formats_of(shape.hidden, formats):
            raise EPConfigError(f"{shape.name}: hidden = {shape.hidden} fits none of the formats {', '.join(formats)}")
    try:
        hooks = Hooks(**{hook: getattr(args, hook) for hook in HOOK_HELP})
    except ValueError as error:
        raise EPConfigError(str(error)) from None
    made = variants(archs, formats, hooks)
    if args.kernel:
        known = {variant.kernel for variant in made}
        names = [name.strip() for name in args.kernel.split(",")]
        for name in names:
            if name not in known:
                raise EPConfigError(f"kernel = {name!r}: must be one of {', '.join(sorted(known))}")
        made = [variant for variant in made if variant.kernel in names]
    return made


def run(args: argparse.Namespace, console: Console) -> int:
    """Compile what is missing or stale. Returns 0; errors as `cute_ep.aot.build.build`, and EPConfigError where both
    `--reuse` and `--keep` are given.

    Shows a bar on a terminal, elsewhere a line for each kernel that has been compiled."""
    from cute_ep.aot.build import build, copy_kernels

    made = wanted_variants(args)
    folder = args.out or cache_folder()
    if args.reuse and args.keep:
        raise EPConfigError(f"keep = {str(args.keep)!r}: must be None with reuse, which copies kernels without PTX")
    jobs = min(args.jobs or os.cpu_count() or 1, len(made))
    sys.path.insert(0, os.getcwd())  # where hooks are, beside what is installed
    for shape in presets_named(args.preset) if args.preset else ():
        served = ", ".join(formats_of(shape.hidden, format_names(args.format)))
        console.print(
            f"{shape.name} (hidden {shape.hidden}, top-k {shape.top_k}) is served in {served}", highlight=False
        )
    started = time.perf_counter()
    if args.reuse:
        copy_kernels(made, folder, args.reuse)
    finished: dict[Variant, float | None] = {}
    width = len(str(len(made)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"compiling with {jobs} processes", total=len(made))

        def on_done(variant: Variant, compiled: bool) -> None:
            finished[variant] = time.perf_counter() - started if compiled else None
            progress.update(task, advance=1, description=f"{variant.arch} {variant.symbol}")
            if compiled and not console.is_terminal:
                count = f"{len(finished):{width}} of {len(made)}"
                console.print(f"{count}  {variant.arch} {variant.symbol}", highlight=False, soft_wrap=True)

        entries = build(made, folder, jobs=jobs, keep=args.keep, on_done=on_done)
    compiled = sum(at is not None for at in finished.values())
    if compiled:
        print_table(console, build_table(entries, finished))
    size = bytes_text(sum(entry.path.stat().st_size for entry in entries))
    took = seconds_text(time.perf_counter() - started)
    if args.keep and find_nvdisasm() is None:
        console.print(f"there is no SASS: nvdisasm is not installed; pip install {DISASSEMBLER}", highlight=False)
    console.print(
        f"{compiled} built, {len(entries) - compiled} up to date, {size} in {_short(folder)}, {took}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def build_table(entries: Sequence[LibraryEntry], finished: dict[Variant, float | None]) -> Table:
    """One row per variant that was compiled; `finished` has its seconds since the start, None for all others."""
    table = Table(title="compiled kernels")
    table.add_column("variant", no_wrap=True)
    table.add_column("architecture")
    for name in ("registers / thread", "spills (B / thread)", "shared memory (B)", "cubin (B)", "done at (s)"):
        table.add_column(name, justify="right")
    for entry in entries:
        at = finished.get(entry.variant)
        if at is not None:
            numbers = (entry.registers, entry.spill_bytes, entry.smem_bytes, entry.path.stat().st_size)
            table.add_row(entry.variant.symbol, entry.variant.arch, *map(str, numbers), f"{at:.1f}")
    return table


def _short(folder: Path) -> str:
    """A folder with the user's home written as ~."""
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
