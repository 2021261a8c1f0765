"""What this machine's links and memories can do, measured in the same run as the operations that are held against it.

The copies by SMs are our own copy kernel's (`copy_bytes`), on all GPUs at once; the copy engine's are cuMemcpyAsync.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cute_ep.api.errors import EPError
from cute_ep.bench.timing import Runner, percentile
from cute_ep.layouts.maps.launch import PIECE_BYTES
from cute_ep.runtime import driver_calls
from cute_ep.runtime.driver import enable_all_peers, resident_ctas
from cute_ep.runtime.local_ops import copy_bytes

COPY_BYTES = 3 << 28
"""A multiple of every number of peers up to 4, times PIECE_BYTES."""
COPY_SAMPLES = 20
TURNS = 16
"""Parts of a copy to all peers by turns: large beside a launch, and few, since all samples are queued behind one gate.
"""
EMPTY_LAUNCHES = 32
"""Empty launches in a graph."""
HOPS = 200
"""Flags that travel there, and as many back, in a launch."""
POLLS = 1 << 20
"""Looks at a flag before the ping-pong gives up (about a second)."""


@dataclass(frozen=True)
class Ceilings:
    """Rates in bytes per second, times in seconds; always of the slowest GPU, median of COPY_SAMPLES.

    Attributes:
        ring: SM stores, each GPU to the next one; on one GPU, within it. Bytes count once.
        all_to_all: SM stores, each GPU to all others: at once, by an equal share of its CTAs each, or by turns, no two
            GPUs to the same one; the faster of the two.
        copy_engine: as `ring`, by the copy engines.
        memory_sm: SM copy within each GPU, bytes read plus bytes written.
        memory_engine: the same by cuMemcpyAsync.
        flag: one way of a flag (st.release.sys until ld.acquire.sys has seen it) between the first and the last GPU;
            0 where the driver does not compile PTX.
        launch: an empty launch of a full grid within a CUDA graph.
    """

    ring: float
    all_to_all: float
    copy_engine: float
    memory_sm: float
    memory_engine: float
    flag: float
    launch: float

    @property
    def push(self) -> float:
        """The fastest way to a peer: no kernel's stores have been seen to beat the copy engine's."""
        return max(self.ring, self.all_to_all, self.copy_engine)

    @property
    def memory(self) -> float:
        """The faster one of the two kinds of copies."""
        return max(self.memory_sm, self.memory_engine)


def work_us(part: Sequence[int], ceilings: Ceilings) -> tuple[float, float]:
    """Microseconds that the bytes of one operation, over the busiest link and at the busiest memory, take at least."""
    return 1e6 * part[0] / ceilings.push, 1e6 * part[1] / ceilings.memory


def latency_us(ceilings: Ceilings) -> float:
    """Microseconds of one flag and one launch."""
    return 1e6 * (ceilings.flag + ceilings.launch)


def floors(parts: Sequence[tuple[int, int]], ceilings: Ceilings) -> dict[str, float]:
    """Least times in microseconds of operations that follow each other.

    Args:
        parts: (bytes over the busiest link, bytes at the busiest memory) of each operation.
        ceilings: rates of the same run.

    Returns:
        "link_floor_us", "memory_floor_us" and "floor_us": for each operation the larger of the two, one flag and one
        launch. Bytes that are still in the L2 cache take less than the memory floor says.
    """
    work = [work_us(part, ceilings) for part in parts]
    return {
        "link_floor_us": sum(link for link, _ in work),
        "memory_floor_us": sum(memory for _, memory in work),
        "floor_us": sum(map(max, work)) + latency_us(ceilings) * len(parts),
    }


def peer_of(gpu: int, turn: int, count: int) -> int:
    """Which of `count` GPUs one copies to in a turn: in each turn no two to the same."""
    return (gpu + 1 + turn % max(1, count - 1)) % count


def part_of(turn: int) -> slice:
    """The bytes of a turn."""
    return slice(turn * COPY_BYTES // TURNS, (turn + 1) * COPY_BYTES // TURNS)


def measure_ceilings(devices: Sequence[str], library: str | None = None) -> Ceilings:
    """The ceilings of the named GPUs, all of them at once; takes about 2 s.

    Args:
        devices: names; a GPU that is named several times counts once.
        library: folder of compiled kernels to look in first.
    """
    names = list(dict.fromkeys(devices))
    count = len(names)
    enable_all_peers(map(torch.device, names))
    sources = [torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=name) for name in names]
    targets = [torch.zeros_like(source) for source in sources]
    ahead = targets[1:] + targets[:1]
    parts = max(1, count - 1)
    share = COPY_BYTES // parts // PIECE_BYTES * PIECE_BYTES
    sides = [[torch.cuda.Stream(name) for _ in range(parts)] for name in names]
    ctas = resident_ctas(torch.device(names[0]).index) // parts

    def to_all(lane: int) -> None:
        main = torch.cuda.current_stream()
        for hop, side in enumerate(sides[lane]):
            peer, part = targets[(lane + hop + 1) % count], slice(hop * share, (hop + 1) * share)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                copy_bytes(peer[part], sources[lane][part], ctas=ctas, library=library)
        for side in sides[lane]:
            main.wait_stream(side)

    def by_turns(lane: int) -> None:
        for turn in range(TURNS):
            target, part = targets[peer_of(lane, turn, count)], part_of(turn)
            copy_bytes(target[part], sources[lane][part], library=library)

    def by_engine(lane: int, target: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        driver_calls.copy(target.data_ptr(), sources[lane].data_ptr(), COPY_BYTES, stream)

    with Runner([torch.cuda.Stream(name) for name in names]) as runner:

        def rate(copy: Callable[[int], None], nbytes: int = COPY_BYTES) -> float:
            return nbytes / percentile(runner.time(COPY_SAMPLES, lambda lane, index: copy(lane)), 50)

        ring = rate(lambda lane: copy_bytes(ahead[lane], sources[lane], library=library))
        spread = max(rate(to_all, parts * share), rate(by_turns))
        engine = rate(lambda lane: by_engine(lane, ahead[lane]))
        within = rate(lambda lane: copy_bytes(targets[lane], sources[lane], library=library), 2 * COPY_BYTES)
        within_engine = rate(lambda lane: by_engine(lane, targets[lane]), 2 * COPY_BYTES)
        nothing = [source[:0] for source in sources]
        launches = runner.time_graphs(
            COPY_SAMPLES, lambda lane, index: copy_bytes(nothing[lane], nothing[lane], library=library), EMPTY_LAUNCHES
        )
    try:
        flag = flag_seconds(names)
    except EPError:
        flag = 0.0
    return Ceilings(ring, spread, engine, within, within_engine, flag, percentile(launches, 50))


PING_PONG = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry ping_pong(
    .param .u64 mine, .param .u64 theirs, .param .u32 first, .param .u32 last, .param .u32 serves, .param .u32 limit
)
{
    .reg .pred %serves, %waits, %more;
    .reg .b32 %value, %last, %word, %polls, %limit;
    .reg .b64 %mine, %theirs;
    ld.param.u64 %mine, [mine];
    ld.param.u64 %theirs, [theirs];
    ld.param.u32 %value, [first];
    ld.param.u32 %last, [last];
    ld.param.u32 %limit, [limit];
    ld.param.u32 %word, [serves];
    setp.ne.u32 %serves, %word, 0;
next:
    @%serves st.release.sys.global.u32 [%theirs], %value;
    mov.u32 %polls, 0;
poll:
    ld.acquire.sys.global.u32 %word, [%mine];
    add.u32 %polls, %polls, 1;
    setp.lt.u32 %waits, %word, %value;
    setp.lt.and.u32 %waits, %polls, %limit, %waits;
    @%waits bra poll;
    @!%serves st.release.sys.global.u32 [%theirs], %value;
    add.u32 %value, %value, 1;
    setp.le.u32 %more, %value, %last;
    @%more bra next;
    ret;
}
\0"""
"""One thread on each of two GPUs: values first..last go there and come back."""
_TYPES = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)


def flag_seconds(names: Sequence[str]) -> float:
    """One way of a flag between the first and the last of the named GPUs (one GPU: between two of its SMs)."""
    ends = [names[0], names[-1]]
    flags = [torch.zeros(1, dtype=torch.int32, device=end) for end in ends]
    calls = [0, 0]
    loaded = driver_calls.load(PING_PONG)

    def play(lane: int, index: int) -> None:
        first = 1 + HOPS * calls[lane]
        calls[lane] += 1
        addresses = flags[lane].data_ptr(), flags[1 - lane].data_ptr()
        values = (*addresses, first, first + HOPS - 1, int(lane == 0), POLLS)
        function = driver_calls.function_of(loaded, "ping_pong")
        driver_calls.launch_thread(function, torch.cuda.current_stream().cuda_stream, values, _TYPES)

    with Runner([torch.cuda.Stream(end) for end in ends]) as runner:
        spans = runner.time(COPY_SAMPLES, play)
    driver_calls.unload(loaded)
    return percentile(spans, 50) / (2 * HOPS)
