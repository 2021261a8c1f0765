"""Show the GPUs and how they are linked, the compiled kernels, and the memory that a deployment needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cute_ep.aot.library import Library, LibraryEntry, read_manifest, source_hash
from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import Preset, format_names
from cute_ep.cli.common import (
    add_shape_arguments,
    bytes_text,
    chosen_shape,
    config,
    message_regions,
    print_table,
    seconds_text,
    write_json,
)
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.variants import ARCHITECTURES
from cute_ep.tuning.file import read_tables, tuning_file

RANK_COUNTS = (1, 2, 4, 8)
DEFAULT_TOKENS = 4096
FEW = f"calls of up to {LAMPORT_TOKENS} tokens"
PARTS = {
    f"tokens received, {FEW}": ("lamport_messages",),
    "tokens received, larger calls": ("messages",),
    "experts' outputs received, calls of few tokens": ("lamport_returns",),
    "experts' outputs received, larger calls": ("returns",),
    "scale factors, set aside to be laid out": ("staged_scales",),
    "routing: counts, experts, router weights": ("table", "entries", "weights"),
}
"""What the regions of an arena hold; all others hold flags and counters."""
FLAGS, PADDING = "flags and counters", "rounding up to whole pages, and a start of its own for each rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep info`."""
    add_shape_arguments(parser)
    parser.add_argument("--format", default="bf16", metavar="F", help="token format of the memory table (default bf16)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"tokens per rank (default {DEFAULT_TOKENS})",
    )
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels to look in first")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON instead of tables, or write it into FILE too"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print all tables, or JSON. Returns 0; EPConfigError for a shape that breaks a rule."""
    from cute_ep.runtime.launcher import missing

    shape = chosen_shape(args)
    formats = format_names(args.format)
    if len(formats) > 1:
        raise EPConfigError(f"format = {args.format!r}: must be one format")
    configs = {
        ranks: config(shape, ranks, args.max_tokens, formats[0])
        for ranks in RANK_COUNTS
        if shape.num_experts % ranks == 0
    }
    library = Library(args.library)
    if args.json:
        facts = all_facts(shape, configs, library, args.command_line)
        if args.json == "-":
            console.out(json.dumps(facts, indent=1), highlight=False)
            return 0
        write_json(Path(args.json), facts)
    print_devices(console)
    why = missing()
    console.print(f"launcher: {'compiled' if why is None else f'Python ({why})'}", highlight=False, soft_wrap=True)
    console.print(f"tables of cute-ep tune: {tuned_tables()}", highlight=False, soft_wrap=True)
    print_table(console, library_table(library))
    if library.entries:
        print_table(console, kernel_table(list(library.entries.values())))
    print_table(console, memory_table(shape, configs))
    return 0


def all_facts(shape: Preset, configs: dict[int, EPConfig], library: Library, command: str) -> dict:
    """What the tables show, in bytes and seconds, for a file of JSON."""
    from cute_ep.bench.machine import environment, link_matrix, nvshmem_found
    from cute_ep.runtime.launcher import missing
    from cute_ep.runtime.rails.network import slow_network

    gpus = gpu_facts()
    return {
        "machine": environment([gpu["device"] for gpu in gpus], command),
        "gpus": gpus,
        "peer_access": peer_access(len(gpus)),
        "links": link_matrix() if gpus else None,
        "sharing": sharing(len(gpus)),
        "nvshmem": nvshmem_found(),
        "slow_network": slow_network(),
        "launcher_missing": missing(),
        "tuned_tables": tuned_tables(),
        "libraries": library_facts(library),
        "kernels": kernel_counts(list(library.entries.values())),
        "memory": {
            "shape": vars(shape),
            "format": next(iter(configs.values())).dispatch_format,
            "max_tokens_per_rank": next(iter(configs.values())).max_tokens_per_rank,
            "by_ranks": {
                ranks: {
                    "regions": {name: region.nbytes for name, region in cfg.arena.regions.items()},
                    "total": memory_bytes(cfg),
                }
                for ranks, cfg in configs.items()
            },
        },
    }


def tuned_tables() -> str:
    """How many tables replace built-in ones, each in its setting, and their file; or what is wrong with the file."""
    try:
        return f"{len(read_tables())} in {tuning_file()}"
    except EPConfigError as error:
        return str(error)


def gpu_facts() -> list[dict]:
    """One dict per CUDA GPU of this machine."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": facts.name,
                "architecture": f"sm_{facts.major}{facts.minor}",
                "sms": facts.multi_processor_count,
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    return found


def peer_access(count: int) -> list[list[bool | None]]:
    """[from][to]: whether a GPU can store into another one's memory; None for itself."""
    import torch

    return [
        [None if peer == device else torch.cuda.can_device_access_peer(device, peer) for peer in range(count)]
        for device in range(count)
    ]


def sharing(count: int) -> list[dict]:
    """Of each GPU, its clique of NVLink, None where only the machine is known, and by what it shares memory: None, or
    why it does not, found with 2 MiB."""
    import torch

    from cute_ep.runtime.nvlink import clique_of
    from cute_ep.runtime.symmetric import Kind, refusal

    devices = [torch.device("cuda", index) for index in range(count)]
    return [
        {"clique": clique_of(device), "refusals": {kind.value: refusal(kind, device) for kind in Kind}}
        for device in devices
    ]


def sharing_table(found: list[dict]) -> Table:
    """`sharing` for people."""
    table = Table(
        title="symmetric memory",
        caption="tried with 2 MiB in this process, which opens no handles of CUDA IPC; ranks of a machine share it by "
        "file descriptors, else by CUDA IPC; those of an NVLink domain on several machines by fabric handles",
    )
    table.add_column("device")
    table.add_column("NVLink domain", overflow="fold")
    for kind in found[0]["refusals"]:
        table.add_column(kind, overflow="fold")
    for index, one in enumerate(found):
        cells = ("yes" if why is None else f"no: {why}" for why in one["refusals"].values())
        table.add_row(f"cuda:{index}", one["clique"] or "the machine", *cells)
    return table


def print_devices(console: Console) -> None:
    """GPUs with their links and how they share memory, or one line where there are none."""
    import torch

    from cute_ep.bench.machine import driver_version, link_matrix, nccl_version, nvshmem_found
    from cute_ep.runtime.rails.network import slow_network

    gpus = gpu_facts()
    if not gpus:
        console.print(
            f"no CUDA GPU here (torch {torch.__version__}); the reference backend runs on the CPU", highlight=False
        )
        return
    versions = {"driver": driver_version() or "unknown", "CUDA": torch.version.cuda, "torch": torch.__version__}
    versions["NCCL"] = nccl_version() or "none, which several nodes need"
    versions["NVSHMEM"] = "{} ({})".format(*found) if (found := nvshmem_found()) else "none"
    table = Table(title="devices: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for name in ("device", "name", "architecture"):
        table.add_column(name)
    for name in ("SMs", "memory", "free"):
        table.add_column(name, justify="right")
    for gpu in gpus:
        sizes = (bytes_text(gpu["memory_bytes"]), bytes_text(gpu["free_bytes"]))
        table.add_row(gpu["device"], gpu["name"], gpu["architecture"], str(gpu["sms"]), *sizes)
    print_table(console, table)
    print_table(console, sharing_table(sharing(len(gpus))))
    if slow := slow_network():
        console.print(slow, highlight=False)
    if len(gpus) == 1:
        return
    links, access = link_matrix(), peer_access(len(gpus))
    table = Table(title="peer access and link (NV18: 18 NVLinks)")
    table.add_column("from \\ to")
    for gpu in gpus:
        table.add_column(gpu["device"], justify="center")
    for device, row in enumerate(access):
        cells = []
        for peer, reach in enumerate(row):
            link = links[device][peer] if links and len(links) == len(gpus) and reach is not None else ""
            cells.append(f"{'-' if reach is None else 'yes' if reach else 'no'} {link}".strip())
        table.add_row(gpus[device]["device"], *cells)
    print_table(console, table)


def library_facts(library: Library) -> list[dict]:
    """Every library folder in search order with what it holds; `stale` of its variants are never launched."""
    found = []
    for path in library.folders:
        entries = [entry for entry in read_manifest(path).values() if entry.path.exists()]
        stale = sum(entry.source_hash != source_hash(entry.variant.hooks) for entry in entries)
        dsl = sorted({entry.dsl for entry in entries})
        found.append(
            {"folder": str(path), "variants": len(entries), "stale": stale, **size_and_time(entries), "dsl": dsl}
        )
    return found


def library_table(library: Library) -> Table:
    """`library_facts` for people."""
    table = Table(title="compiled kernels, in search order", caption="stale: made from other sources, never launched")
    table.add_column("folder", overflow="fold")
    for name in ("variants", "stale", "size", "compile time"):
        table.add_column(name, justify="right")
    table.add_column("CuTe DSL")
    for facts in library_facts(library):
        versions = ", ".join(facts["dsl"]) or "-"
        table.add_row(facts["folder"], str(facts["variants"]), str(facts["stale"]), *in_words(facts), versions)
    return table


def kernel_counts(entries: list[LibraryEntry]) -> dict[str, dict[str, int]]:
    """Kernel -> architecture -> variants that can be launched."""
    counts: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry.path.exists():
            archs = counts.setdefault(entry.variant.kernel, {})
            archs[entry.variant.arch] = archs.get(entry.variant.arch, 0) + 1
    return counts


def kernel_table(entries: list[LibraryEntry]) -> Table:
    """How many variants of each kernel can be launched on each architecture."""
    counts = kernel_counts(entries)
    archs = [arch for arch in ARCHITECTURES if any(arch in found for found in counts.values())]
    table = Table(title="variants by kernel: one per format where it encodes rows, and those with hooks")
    table.add_column("kernel")
    for name in (*archs, "size", "compile time"):
        table.add_column(name, justify="right")
    for kernel, found in counts.items():
        some = [entry for entry in entries if entry.variant.kernel == kernel]
        table.add_row(kernel, *(str(found.get(arch, 0)) for arch in archs), *in_words(size_and_time(some)))
    table.add_section()
    sums = (str(sum(found.get(arch, 0) for found in counts.values())) for arch in archs)
    table.add_row("all", *sums, *in_words(size_and_time(entries)), style="bold")
    return table


def size_and_time(entries: list[LibraryEntry]) -> dict:
    """Bytes of the cubins that are there, and seconds of one core that it took to compile them."""
    found = [entry for entry in entries if entry.path.exists()]
    return {
        "bytes": sum(entry.path.stat().st_size for entry in found),
        "compile_seconds": round(sum(entry.seconds for entry in found), 2),
    }


def in_words(facts: dict) -> tuple[str, str]:
    """Size and time of `size_and_time` with units."""
    return bytes_text(facts["bytes"]), seconds_text(facts["compile_seconds"]) if facts["bytes"] else "-"


def memory_parts(cfg: EPConfig) -> dict[str, int]:
    """Bytes of one rank's allocation by what they are for; all of them together are `memory_bytes`."""
    regions = cfg.arena.regions
    parts = {part: sum(regions[name].nbytes for name in names) for part, names in PARTS.items()}
    named = {name for names in PARTS.values() for name in names}
    parts[FLAGS] = sum(region.nbytes for name, region in regions.items() if name not in named)
    return parts | {PADDING: memory_bytes(cfg) - sum(parts.values())}


def memory_table(shape: Preset, configs: dict[int, EPConfig]) -> Table:
    """Symmetric memory of one rank, part by part, for 1 to 8 ranks, and what slots per expert would need."""
    from cute_ep.bench.traffic import per_expert_receive_bytes

    first = next(iter(configs.values()))
    table = Table(
        title=f"symmetric memory of one rank: {shape.name}, {shape.num_experts} experts, hidden {shape.hidden}, "
        f"top-{shape.top_k}, {first.dispatch_format}, {first.max_tokens_per_rank} tokens per rank",
    )
    table.add_column("")
    for ranks in configs:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right")
    parts = [memory_parts(cfg) for cfg in configs.values()]
    for part in parts[0]:
        if any(one[part] for one in parts):
            table.add_row(part, *(bytes_text(one[part]) for one in parts))
    table.add_section()
    table.add_row("total", *(bytes_text(memory_bytes(cfg)) for cfg in configs.values()), style="bold")
    table.add_row(
        "of that, tokens received in one call",
        *(bytes_text(max(region.nbytes for region in message_regions(cfg)) // 2) for cfg in configs.values()),
    )
    table.add_row(
        "instead, with a slot per (expert, source, token)",
        *(bytes_text(per_expert_receive_bytes(cfg)) for cfg in configs.values()),
    )
    return table
