"""How many rows come to each rank: what a caller that allocates exactly that many must ask the others first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple, Protocol

import torch

from cute_ep.api.buffers import Beside, DispatchBuffers
from cute_ep.api.carving import Carving, Pieces
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.host import is_capturing
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.local_arguments import TOLD_BESIDE_ENTRIES, TellArgs
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOP_K, RANK_MAJOR
from cute_ep.layouts.maps.variants import TELL_KERNEL
from cute_ep.runtime.driver import launch_on
from cute_ep.runtime.host_words import HostWords
from cute_ep.runtime.local_kernels import local_kernel
from cute_ep.runtime.streams import stream_of
from cute_ep.torch_internals import current_stream


@lru_cache(maxsize=256, typed=True)
def counting_config(words: int, ranks: int, timeout_s: float, ranks_per_node: int | None = None) -> EPConfig:
    """Of a communicator for one message a rank, which all ranks get: `words` 32-bit words, sent as bfloat16, which
    moves unchanged. A token has few entries, so a message is as many tokens as all ranks need, each to the ranks of a
    few nodes. Each rank has an expert for each of these nodes, so that a node has one for each entry of a token."""
    per_node = ranks_per_node or ranks
    nodes = ranks // per_node
    reached = max(1, min(nodes, MAX_TOP_K // per_node, MAX_EXPERTS // ranks))
    sizes = 2 * words, ranks * reached, reached * per_node, -(-nodes // reached), ranks
    rows: dict[str, Any] = {"row_alignment": 1, "row_order": RANK_MAJOR}
    return EPConfig(*sizes, timeout_s=timeout_s, ranks_per_node=ranks_per_node, **rows)


class _Counts(NamedTuple):
    entries: list[int]
    tokens: int
    arriving: int


class ReceiveCounts(_Counts):
    """What a rank receives from all ranks, itself included, and the most that one of them sends.

    Attributes:
        entries: of all ranks' tokens, for each local expert.
        tokens: most of a rank.
        arriving: tokens with an entry for this rank.
    """

    _rows: tuple[int, int] | None = None  # an alignment, and what `rows` has answered

    def padded(self, alignment: int) -> list[int]:
        """Rows of each local expert, padded to a multiple of `alignment`."""
        if alignment == 1:
            return self.entries
        more = alignment - 1  # `align_up`, called for each of 128, takes 9 us instead of 5 (a CPU, 2026-11-26)
        return [(count + more) // alignment * alignment for count in self.entries]

    def rows(self, alignment: int) -> int:
        """Of all local experts together, padded so; added up once."""
        if self._rows is None or self._rows[0] != alignment:
            self._rows = alignment, sum(self.padded(alignment))
        return self._rows[1]


ENDS = "ends"
"""[R, R] int32 in the memory that an exchange is given: element [s, d], how many tokens ranks 0 .. s send to rank d."""


def with_ends(ranks: int) -> Beside:
    """ENDS of so many ranks, beside buffers."""
    return ((ENDS, ((ranks, ranks), torch.int32)),)


def memory_of_ends(ranks: int, device: torch.device | str) -> Carving:
    """New memory for ENDS alone."""
    return Carving(Pieces.of(dict(with_ends(ranks))), device)


class CountExchange(Protocol):
    """An exchange of counts that this rank has begun."""

    def wait(self) -> ReceiveCounts:
        """Wait on the host for all ranks' counts, and for nothing else that the stream has to do; once.

        Raises:
            EPTimeout: a rank did not come in time.
            EPInputError: two later exchanges were begun; at most two may be waited for.
        """


class ToldExchange:
    """One of which a kernel tells the host: record `number` of `words`, of so many local experts."""

    __slots__ = ("_counting", "_local", "_number", "_stream")

    def __init__(self, counting: Counting, number: int, local: int, stream: int) -> None:
        self._counting, self._number, self._local, self._stream = counting, number, local, stream

    def wait(self) -> ReceiveCounts:
        """As above."""
        counting, local, communicator = self._counting, self._local, self._counting.communicator
        assert counting.told is not None
        found = counting.told.wait(self._number, local + TOLD_BESIDE_ENTRIES, self._failed, self._ended)
        if found is None:
            communicator.synchronize()
            raise EPError(f"rank {communicator.rank}: an exchange of counts has ended without them; connect again")
        return ReceiveCounts(found[:local], found[local], found[local + 1])

    def _failed(self) -> bool:
        return self._counting.communicator.failed

    def _ended(self) -> bool:
        return stream_of(self._counting.communicator.device, self._stream).query()


class ReadExchange:
    """One whose counts the host reads, by `read`."""

    def __init__(self, read: Callable[[], ReceiveCounts]) -> None:
        self.wait = read


class Counting:
    """What all exchanges of counts on a communicator have in common. Each overwrites what the one before has brought,
    in inference mode or not.

    Attributes:
        everyone: [tokens, top_k] int32 ids, one of each rank in all, then -1.
        out: memory for R rows, those of a rail one after the other.
        table: these as [R, words] int32: `RouteCounts.counts`, in the order of `rows`.
        rows: which row each rank has.
        told: what kernels tell the host; None: it reads the table.

    Raises:
        VariantMissing: a kernel is not in the library.
    """

    @torch.inference_mode(False)
    def __init__(self, communicator: EPCommunicator) -> None:
        self.communicator, cfg = communicator, communicator.cfg
        ranks, shape = cfg.world_size, (cfg.max_tokens_per_rank, cfg.top_k)
        self.everyone = torch.full(shape, -1, dtype=torch.int32, device=communicator.device)
        first = torch.arange(0, cfg.num_experts, cfg.local_experts, dtype=torch.int32, device=communicator.device)
        self.everyone.view(-1)[:ranks] = first
        self.rows = [rank % cfg.peers * cfg.nodes + cfg.node(rank) for rank in range(ranks)]
        self._order = torch.tensor(self.rows, device=communicator.device)
        self.out = DispatchBuffers.carve(cfg, communicator.device, ranks)
        self.table = self.out.tokens.view(torch.int32)
        self.told: HostWords | None = None
        if kernels_tell(communicator):
            self._kernel = local_kernel(communicator.device.index, TELL_KERNEL, None, None)
            self._come = self.table.data_ptr(), self.out.addresses(["num_rows"])["num_rows"]
            self._sizes = ranks, cfg.nodes, self.table.shape[1]
            self.told = HostWords(self.table.shape[1])

    def exchange(
        self, counts: torch.Tensor, experts: int, *, ends: Carving | None = None, told: bool = True
    ) -> CountExchange:
        """Have every rank know this one's counts, on the current stream. Collective; nothing waits on the host.

        Args:
            counts: int32, which begin with `RouteCounts.counts`.
            experts: E, of all ranks.
            ends: where to put ENDS, if they are wanted.
            told: whether the exchange is to be waited for.

        Raises:
            EPError: it is to be waited for, and a CUDA graph is being captured.
        """
        communicator = self.communicator
        device, cfg = communicator.device, communicator.cfg
        if told and is_capturing(device):
            raise EPError("the host waits for numbers of rows, so no CUDA graph can capture this call")
        communicator._send_row(counts, self.everyone, self.out)
        if self.told is not None:
            return self._tell(self.told, experts, ends, told=told)
        if ends is not None:
            ends.tensor(ENDS).copy_(self.by_rank()[:, : cfg.world_size].cumsum(0))
        if not told or communicator.shares_device:  # then other ranks may have yet to come
            return ReadExchange(lambda: self._read(experts))
        found = self._read(experts)
        return ReadExchange(lambda: found)

    def by_rank(self) -> torch.Tensor:
        """The table with a row for each rank, on the device."""
        return self.table if self.communicator.cfg.nodes == 1 else self.table.index_select(0, self._order)

    def free(self) -> None:
        """Give host memory back, when the communicator was closed."""
        if self.told is not None:
            self.told.free()

    def _tell(self, words: HostWords, experts: int, ends: Carving | None, *, told: bool) -> CountExchange:
        """Behind an exchange: have a kernel add up the counts, and if they are `told` write them to the host."""
        communicator, device = self.communicator, self.communicator.device
        ranks, *_ = self._sizes
        local = experts // ranks
        number, address, epoch = words.begin() if told else (0, 0, 0)
        if not communicator.shares_device:
            stream = current_stream(device.index)
        else:
            assert communicator.stream is not None
            stream = communicator.stream.cuda_stream
            if ends is not None:
                ends.tensor(ENDS).record_stream(communicator.stream)
        if told or ends is not None:
            (to,) = (0,) if ends is None else ends.addresses_of(ENDS)
            given = TellArgs(*self._come, address, to, *self._sizes, communicator.rank, local, ranks + experts, epoch)
            launch_on(device.index, self._kernel, 1, given, stream)
        return ToldExchange(self, number, local, stream)

    def _read(self, experts: int) -> ReceiveCounts:
        """On the CPU, from the table, which is there once all ranks have made the call."""
        self.communicator.synchronize()
        words = (ctypes.c_int32 * self.table.numel()).from_address(self.table.data_ptr())
        ranks, rank = self.communicator.cfg.world_size, self.communicator.rank
        local = experts // ranks

        def columns(first: int, count: int) -> list[Sequence[int]]:
            places = [first + row * self.table.shape[1] for row in self.rows]
            return [words[place : place + count] for place in places]

        entries, *others = columns(ranks + rank * local, local)
        for more in others:
            entries = list(map(add, entries, more))
        tokens = max(count for (count,) in columns(ranks + experts, 1))
        return ReceiveCounts(list(entries), tokens, sum(count for (count,) in columns(rank, 1)))


def kernels_tell(communicator: EPCommunicator) -> bool:
    """Whether kernels tell the host what comes, or the host reads it where it is."""
    return communicator.device.type != "cpu"
