"""Two GPUs with the traffic of more: how fast a rank is among R ranks, measured where there are only two GPUs.

Ranks 0 and 1 of R run, a GPU each. What one of them sends to rank 2, 3, ... goes to the other GPU as well, and lands
where the other one looks for what rank 2, 3, ... sends to it. So each GPU sends, receives, sums and waits for as much
as with R GPUs, at the rate of a link to one peer, which is a little higher than that to all peers at once (H200: 365
for 349 GB/s). The kernels are those that ship: where the regions of an arena are is an argument. Here an arena is a
block for each source, all alike, so another source is a shift of the address by whole blocks:

    words of source s in the arena at a:        a + s * block + ...
    what rank r stores to rank p says source r: b + (p - r) * block, as the address of "rank p's arena", makes it p

Tokens go to all other ranks, with equally many experts and the same local ones on each, or to none: then what rank 1
gets from "rank 2" fits what rank 0 has sent there. As many go to all as give the number of messages of uniform
routing.

It is optimistic. Four H200s took 0.952 to 1.045 times as long as this did with the same kernels (7e010b7, driver
580.159.04, 2026-11-22), 1.022 times on average over 81 cases; BF16 pairs 0.994 to 1.034 times, of 4096 tokens 1.032.
`perf.tables` prints every time beside what it is when multiplied by the factor of its case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import format_names, token_counts
from cute_ep.bench.measure import Batch, InputSets, make_batch, make_runner, measure, run_round
from cute_ep.bench.traffic import count_routing
from cute_ep.bench.tune import tune_size
from cute_ep.layouts.maps.arena import ARENA_ALIGNMENT, PAGE_BYTES, region_arguments, return_slots
from cute_ep.layouts.maps.arguments import Regions
from cute_ep.layouts.maps.record import RegionMap, align_up
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, ROW_ORDERS, RowOrder
from cute_ep.layouts.maps.variants import NO_HOOKS
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import DeviceMemory, enable_all_peers, resident_ctas
from cute_ep.runtime.driver_calls import fill_words
from cute_ep.runtime.gpus import check_gpu
from cute_ep.runtime.parts import RankParts, load_kernels, unload_kernels
from cute_ep.tuning.builtin import built_in
from perf.cases import MAIN, MIRROR_TOKENS, QUICK_FORMATS
from perf.orders import in_order

GPUS = 2
RANKS = 4
SETS = 4
SAMPLES = 100
CHECKED_TOKENS = (32, 2048)
"""Rows that are Lamport rows, and rows that are not."""
OPERATIONS = ("dispatch", "combine_partial", "pair")
"""Exact combine is left out: its slots are numbered by experts, not by ranks."""
SOURCE_MODE = {
    "message_ready": 0,
    "return_ready": 0,
    "return_rounds": 1,
    "table": 1,
    "entries": 1,
    "weights": 1,
    "returns": 2,
    "messages": 1,
    "lamport_returns": 2,
    "lamport_messages": 1,
    "staged_scales": 0,
}
"""Which mode of a region counts the ranks that write it; the others are the owner's, or `CONSUMED`."""
CONSUMED = ("dispatch_consumed", "combine_consumed")
"""Regions whose words lie side by side, so that shifted stores miss them: those of ranks 2, 3, ... hold FOR_EVER."""
FOR_EVER = 0x3FFFFFFF


@dataclass(frozen=True)
class Blocks:
    """An arena as a block for each source.

    Attributes:
        arguments: as `Arena.arguments`.
        nbytes: of a block.
        count: blocks, with room for stores that are shifted.
        blank: (offset, bytes) in a block of what begins as SENTINEL words.
    """

    arguments: Regions
    nbytes: int
    count: int
    blank: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cfg: EPConfig) -> Blocks:
        """The regions of `cfg`'s arena, each without the mode of SOURCE_MODE inside a block."""
        inside = RegionMap(ARENA_ALIGNMENT)
        for name, region in cfg.arena.regions.items():
            extents = [extent for mode, extent in enumerate(region.shape) if mode != SOURCE_MODE.get(name)]
            inside.add(name, region.itemsize, *extents)
        nbytes = align_up(inside.nbytes, PAGE_BYTES)
        regions = {}
        for name, region in inside.regions.items():
            stride = list(region.stride)
            if name in SOURCE_MODE:
                stride.insert(SOURCE_MODE[name], nbytes // region.itemsize)
            regions[name] = replace(region, stride=tuple(stride))
        count = return_slots(cfg.world_size, cfg.top_k) + cfg.world_size
        blank = (inside.regions[region.name] for region in cfg.arena.cleared)
        return cls(region_arguments(regions), nbytes, count, tuple((one.offset, one.nbytes) for one in blank))

    def allocate(self, device: torch.device, ranks: int) -> DeviceMemory:
        """An arena as its first round must find it."""
        ones = [(block * self.nbytes + at, count) for block in range(self.count) for at, count in self.blank]
        memory = DeviceMemory(device, self.count * self.nbytes, ones)
        with torch.cuda.device(device):
            for name in CONSUMED:
                first = memory.address + getattr(self.arguments, name).at + 8 * GPUS
                fill_words(first, FOR_EVER, 2 * (ranks - GPUS))
            torch.cuda.synchronize()
        return memory

    def addresses(self, rank: int, arenas: Sequence[int], ranks: int) -> list[int]:
        """What rank 0 or 1 takes for the addresses of all ranks' arenas."""
        other = arenas[1 - rank]
        shifted = [other + (peer - rank) * self.nbytes for peer in range(GPUS, ranks)]
        return [*arenas, *shifted]


@contextmanager
def connect_mirror(cfg: EPConfig, library: str | None) -> Iterator[list[Communicator]]:
    """Ranks 0 and 1 of `cfg`, with the built-in launch shapes. All is freed at the end, unless a wait failed."""
    devices = [torch.device("cuda", gpu) for gpu in range(GPUS)]
    enable_all_peers(devices)
    blocks = Blocks.of(cfg)
    with ExitStack() as everything:
        arenas, communicators = [], []
        for device in devices:
            arenas.append(blocks.allocate(device, cfg.world_size))
            everything.callback(arenas[-1].free)
        for rank, device in enumerate(devices):
            kernels, ctas = load_kernels(cfg, device, Library(library), NO_HOOKS), resident_ctas(device.index)
            everything.callback(unload_kernels, kernels, device)
            parts = RankParts(cfg, rank, device, arenas[rank], kernels, NO_HOOKS, ctas, built_in(cfg, ctas))
            addresses = blocks.addresses(rank, [arena.address for arena in arenas], cfg.world_size)
            communicator = Communicator(parts, addresses, group=None, release=lambda _: None)
            everything.callback(communicator.free)
            for kernel in kernels.values():
                kernel.bind("arena", blocks.arguments)
            communicators.append(communicator)
        held = everything.pop_all()
    try:
        yield communicators
    finally:
        for device in devices:
            torch.cuda.synchronize(device)
        if not any(communicator.failed for communicator in communicators):
            held.close()


def mirrored_ids(cfg: EPConfig, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    """[tokens, top_k] int32 expert ids of a rank, on the generator's device: see above."""
    ranks, local, top_k = cfg.world_size, cfg.local_experts, cfg.top_k
    here = {"generator": generator, "device": generator.device}
    everywhere = round(tokens * (1 - (1 - 1 / ranks) ** top_k))
    each = top_k // ranks
    own = torch.rand(tokens, local, **here).topk(top_k, dim=1).indices + rank * local
    remote = torch.rand(tokens, local, **here).topk(each, dim=1).indices
    ids = own.clone()
    parts = [remote + peer * local for peer in range(ranks) if peer != rank]
    ids[:, : each * (ranks - 1)] = torch.cat(parts, dim=1)
    goes = torch.randperm(tokens, **here) < everywhere
    ids = torch.where(goes[:, None], ids, own)
    return ids.gather(1, torch.rand(tokens, top_k, **here).argsort(dim=1)).int().contiguous()


def as_rank(cfg: EPConfig, ids: torch.Tensor, rank: int, other: int) -> torch.Tensor:
    """The ids of `rank` as rank `other`'s would be: the two ranks' experts exchanged."""
    owner = ids // cfg.local_experts
    swapped = torch.where(owner == rank, other, torch.where(owner == other, rank, owner))
    return swapped * cfg.local_experts + ids % cfg.local_experts


def make_mirror_sets(cfg: EPConfig, tokens: int, sets: int = SETS) -> InputSets:
    """As `cute_ep.bench.measure.make_sets`, of the two ranks that run; counts and devices are those of all ranks."""
    batches: list[list[Batch]] = [[] for _ in range(GPUS)]
    counts = []
    for number in range(sets):
        generators = [torch.Generator(f"cuda:{rank}").manual_seed(GPUS * number + rank) for rank in range(GPUS)]
        ids = [mirrored_ids(cfg, tokens, rank, generator) for rank, generator in enumerate(generators)]
        others = [as_rank(cfg, ids[1], 1, peer) for peer in range(GPUS, cfg.world_size)]
        counts.append(count_routing(cfg, [*ids, *others]))
        room = cfg.local_experts * cfg.alignment  # what is padded differs a little from `others`
        for rank, generator in enumerate(generators):
            with torch.device(f"cuda:{rank}"):
                batches[rank].append(make_batch(cfg, ids[rank], counts[-1].rows_received(rank) + room, generator))
    names = tuple(f"cuda:{rank}" for rank in range(cfg.world_size))
    return InputSets(cfg, tokens, "mirror", names, batches, counts)


def check_mirror(cfg: EPConfig, library: str | None) -> None:
    """RuntimeError unless the tokens come back, where experts return the BF16 rows that they get and weigh alike; in
    rank-major order as often as they have ranks, which weigh nothing."""
    batches = [one[0] for one in make_mirror_sets(cfg, cfg.max_tokens_per_rank, sets=1).batches]
    for batch in batches:
        batch.router_weights.fill_(1 / cfg.top_k)
    with connect_mirror(cfg, library) as communicators, make_runner(communicators) as runner:
        runner.on_all(lambda rank: run_round(communicators[rank], batches[rank], "dispatch"))
        for batch in batches:
            batch.rows.copy_(batch.buffers.tokens)
        runner.on_all(lambda rank: run_round(communicators[rank], batches[rank], "combine_partial"))
    for rank, batch in enumerate(batches):
        expected = batch.x
        if cfg.is_rank_major:
            owners = torch.nn.functional.one_hot(batch.topk_ids.long() // cfg.local_experts, cfg.world_size)
            expected = (batch.x.float() * owners.amax(1).sum(1, keepdim=True)).bfloat16()
        if not torch.equal(batch.result, expected):
            raise RuntimeError(f"mirror of {cfg.world_size} ranks: rank {rank} does not get its tokens back")


def measure_mirror(
    formats: Sequence[str],
    sizes: Sequence[int],
    library: str | None,
    say: Callable[[str], None],
    *,
    ranks: int = RANKS,
    order: RowOrder = EXPERT_MAJOR,
    tune: bool = False,
) -> list[dict]:
    """`measure` of OPERATIONS with the built-in tables, at the main shape with rows in this order, with "ranks" in
    every result. With `tune` "best" is the entry that `tune_size` finds for an operation, "best_us" its time.

    Raises:
        RuntimeError: of `check_mirror`.
    """
    results = []
    for tokens in CHECKED_TOKENS:
        check_mirror(in_order(MAIN.config("bf16", ranks, tokens), order), library)
    for cfg in (in_order(MAIN.config(fmt, ranks, tokens), order) for fmt in formats for tokens in sizes):
        sets = make_mirror_sets(cfg, cfg.max_tokens_per_rank)
        with connect_mirror(cfg, library) as communicators, make_runner(communicators) as runner:
            cases = measure(communicators, sets, OPERATIONS, SAMPLES, runner)
            for case in cases if tune else ():
                operation = case["operation"]
                if operation != "pair":
                    family = operation.removesuffix("_partial")
                    outcome = tune_size(communicators, sets, family, runner, (operation,))
                    case |= {"best": str(outcome.entry), "best_us": outcome.us}
        results += [case | {"ranks": ranks} for case in cases]
        texts = [f"{case['operation']} {case['p50_us']:.2f}" for case in cases]
        texts += [f"{case['best']} {case['best_us']:.2f}" for case in cases if "best" in case]
        say(f"{ranks} ranks, {cfg.dispatch_format} {cfg.max_tokens_per_rank}: {', '.join(texts)}")
    return results


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"ranks whose traffic there is (default {RANKS})")
    parser.add_argument("--tokens", metavar="T[,T]", help=f"tokens of every rank (default {MIRROR_TOKENS})")
    parser.add_argument("--format", metavar="F[,F]", help=f"formats (default {QUICK_FORMATS})")
    parser.add_argument("--order", choices=ROW_ORDERS, default=EXPERT_MAJOR, help="of rows (default: %(default)s)")
    parser.add_argument("--tune", action="store_true", help="search for faster launch shapes too")
    parser.add_argument("--library", metavar="DIR", help="folder of compiled kernels to look in first")
    args = parser.parse_args()
    if args.ranks <= GPUS or MAIN.top_k % args.ranks:
        parser.error(f"--ranks {args.ranks}: must be 4 or 8 (experts of a token are the same number on all ranks)")
    try:
        formats = format_names(args.format) if args.format else QUICK_FORMATS
        sizes = token_counts(args.tokens) if args.tokens else MIRROR_TOKENS
        check_gpu(f"devices = the first {GPUS} GPUs", GPUS - 1)
    except EPConfigError as error:
        parser.error(str(error))
    say = partial(print, flush=True)
    measure_mirror(formats, sizes, args.library, say, ranks=args.ranks, order=args.order, tune=args.tune)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
