"""Show the GPUs and how they are linked, the compiled kernels, and the memory that a deployment needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from cute_ep.commands.common import (
    add_shape_arguments,
    bytes_text,
    chosen_shape,
    config,
    format_names,
    message_regions,
    print_table,
    seconds_text,
)
from cute_ep.config import memory_bytes
from cute_ep.errors import EPConfigError
from cute_ep.layouts.variants import ARCHITECTURES
from cute_ep.library import Library, LibraryEntry, read_manifest, source_hash
from cute_ep.presets import Preset

RANK_COUNTS = (1, 2, 4, 8)
DEFAULT_TOKENS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep info`."""
    add_shape_arguments(parser)
    parser.add_argument("--format", default="bf16", metavar="F", help="token format of the memory table (default bf16)")
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"tokens a rank (default {DEFAULT_TOKENS})"
    )
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels to look in first")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print all tables. Returns 0; EPConfigError for a shape that breaks a rule."""
    shape = chosen_shape(args)
    formats = format_names(args.format)
    if len(formats) > 1:
        raise EPConfigError(f"format = {args.format!r}: must be one format")
    memory = memory_table(shape, formats[0], args.max_tokens)
    print_devices(console)
    library = Library(args.library)
    print_table(console, library_table(library))
    if library.entries:
        print_table(console, kernel_table(library.entries.values()))
    print_table(console, memory)
    return 0


def print_devices(console: Console) -> None:
    """GPUs with their links, or one line where there are none."""
    import torch

    from cute_ep.machine import driver_version, link_matrix

    count = torch.cuda.device_count()
    if not count:
        console.print(f"no CUDA GPU here (torch {torch.__version__}); the reference backend runs on the CPU")
        return
    table = Table(
        title=f"devices: driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda}, torch {torch.__version__}",
    )
    for name in ("device", "name", "architecture"):
        table.add_column(name)
    for name in ("SMs", "memory", "free"):
        table.add_column(name, justify="right")
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        arch = f"sm_{facts.major}{facts.minor}"
        sms = str(facts.multi_processor_count)
        table.add_row(f"cuda:{index}", facts.name, arch, sms, bytes_text(total), bytes_text(free))
    print_table(console, table)
    if count == 1:
        return
    links = link_matrix()
    table = Table(title="peer access and link (NV18: 18 NVLinks)")
    table.add_column("from \\ to")
    for index in range(count):
        table.add_column(f"cuda:{index}", justify="center")
    for device in range(count):
        cells = []
        for peer in range(count):
            reach = "-" if peer == device else "yes" if torch.cuda.can_device_access_peer(device, peer) else "no"
            link = links[device][peer] if links and len(links) == count and peer != device else ""
            cells.append(f"{reach} {link}".strip())
        table.add_row(f"cuda:{device}", *cells)
    print_table(console, table)


def library_table(library: Library) -> Table:
    """Every library folder in search order with what it holds."""
    table = Table(title="compiled kernels, in search order", caption="stale: made from other sources, never launched")
    table.add_column("folder", overflow="fold")
    for name in ("variants", "stale", "size", "compile time"):
        table.add_column(name, justify="right")
    table.add_column("CuTe DSL")
    for path in library.folders:
        entries = [entry for entry in read_manifest(path).values() if entry.path.exists()]
        stale = sum(entry.source_hash != source_hash(entry.variant.hooks) for entry in entries)
        versions = ", ".join(sorted({entry.dsl for entry in entries})) or "-"
        table.add_row(str(path), str(len(entries)), str(stale), *size_and_time(entries), versions)
    return table


def kernel_table(entries: Iterable[LibraryEntry]) -> Table:
    """How many variants of each kernel can be launched on each architecture."""
    found = [entry for entry in entries if entry.path.exists()]
    archs = [arch for arch in ARCHITECTURES if any(entry.variant.arch == arch for entry in found)]
    table = Table(title="variants by kernel: one a format where it encodes rows, and those with hooks")
    table.add_column("kernel")
    for name in (*archs, "size", "compile time"):
        table.add_column(name, justify="right")

    def add(name: str, some: list[LibraryEntry], style: str | None = None) -> None:
        counts = (sum(entry.variant.arch == arch for entry in some) for arch in archs)
        table.add_row(name, *map(str, counts), *size_and_time(some), style=style)

    for kernel in dict.fromkeys(entry.variant.kernel for entry in found):
        add(kernel, [entry for entry in found if entry.variant.kernel == kernel])
    table.add_section()
    add("all", found, "bold")
    return table


def size_and_time(entries: list[LibraryEntry]) -> tuple[str, str]:
    """Bytes of the cubins, and seconds of one core that it took to compile them."""
    size = sum(entry.path.stat().st_size for entry in entries)
    return bytes_text(size), seconds_text(sum(entry.seconds for entry in entries)) if entries else "-"


def memory_table(shape: Preset, fmt: str, max_tokens: int) -> Table:
    """Symmetric memory of one rank, region by region, for 1 to 8 ranks, and what slots per expert would need."""
    from cute_ep.traffic import per_expert_receive_bytes

    configs = {ranks: config(shape, ranks, max_tokens, fmt) for ranks in RANK_COUNTS if shape.num_experts % ranks == 0}
    table = Table(
        title=f"memory of one rank: {shape.name}, {shape.num_experts} experts, hidden {shape.hidden}, "
        f"top-{shape.top_k}, {fmt}, {max_tokens} tokens a rank",
    )
    table.add_column("region")
    for ranks in configs:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right")
    for name in next(iter(configs.values())).arena.regions:
        table.add_row(name, *(bytes_text(cfg.arena.regions[name].nbytes) for cfg in configs.values()))
    table.add_row(
        "to begin apart, in whole pages", *(bytes_text(c.arena.allocation - c.arena.nbytes) for c in configs.values())
    )
    table.add_section()
    table.add_row("total, one rank", *(bytes_text(memory_bytes(cfg)) for cfg in configs.values()), style="bold")
    table.add_row(
        "messages, received once a round",
        *(bytes_text(max(region.nbytes for region in message_regions(cfg)) // 2) for cfg in configs.values()),
    )
    table.add_row(
        "slots per (expert, source): E * Tmax * message",
        *(bytes_text(per_expert_receive_bytes(cfg)) for cfg in configs.values()),
    )
    return table
