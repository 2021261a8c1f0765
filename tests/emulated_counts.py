"""What `tell_counts` does, in ordinary memory: at once, or when a test lets it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.layouts.maps.local_arguments import TOLD_BESIDE_ENTRIES, TellArgs
from cute_ep.runtime import counts, host_words
from tests.plain_memory import PlainHostMemory


def tell_words(args: TellArgs) -> list[tuple[int, int]]:
    """The (address, LL word) pairs that the kernel stores in host memory; it has added up `ends` then."""
    if _row(args.num_rows, 1) != [args.ranks]:
        return []
    peers = args.ranks // args.nodes
    places = [rank % peers * args.nodes + rank // peers for rank in range(args.ranks)]
    table = [_row(args.table + 4 * args.words * place, args.words) for place in places]
    for source in range(args.ranks if args.ends else 0):
        sums = [sum(row[rank] for row in table[: source + 1]) for rank in range(args.ranks)]
        (ctypes.c_int32 * args.ranks).from_address(args.ends + 4 * args.ranks * source)[:] = sums
    if not args.told:
        return []
    first = args.ranks + args.rank * args.local_experts
    values = [sum(row[first + expert] for row in table) for expert in range(args.local_experts)]
    values += [max(row[args.tokens] for row in table), sum(row[args.rank] for row in table)]
    assert len(values) == args.local_experts + TOLD_BESIDE_ENTRIES
    return [(args.told + 8 * place, args.epoch << 32 | value) for place, value in enumerate(values)]


def _row(address: int, count: int) -> list[int]:
    return (ctypes.c_int32 * count).from_address(address)[:]


def store(words: list[tuple[int, int]]) -> None:
    """As the kernel stores them, in any order; here the last first."""
    for address, word in reversed(words):
        ctypes.c_uint64.from_address(address).value = word


class Stream:
    """A stream with launches that wait until `run`. A launch reads memory when it runs.

    Attributes:
        at_once: whether launches run when they are made.
        asked: how often the host has asked whether the stream has ended.
        waited: whether the host has waited for it.
        kept: what launches write to, which torch frees in the order of a stream only where there is one.
    """

    cuda_stream = 7

    def __init__(self) -> None:
        self.at_once, self.asked, self.launches, self.waited = True, 0, list[TellArgs](), False
        self.kept: list[torch.Tensor] = []

    def launch(self, device: int | None, kernel: object, grid: int, given: TellArgs, stream: int) -> None:
        assert kernel == "tell_counts" and grid == 1 and stream == self.cuda_stream
        self.launches.append(given)
        if self.at_once:
            self.run()

    def run(self, most: int | None = None) -> None:
        """The launches that wait, or the first of them."""
        taken, self.launches = self.launches[:most], self.launches[len(self.launches[:most]) :]
        for one in taken:
            store(tell_words(one))

    def empty(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.kept.append(torch.empty(*arguments, **options))
        return self.kept[-1]

    def query(self) -> bool:
        self.asked += 1
        return not self.launches

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The stream of all that the host launches to be told counts, on the CPU in place of a GPU."""
    made = Stream()
    monkeypatch.setattr(counts, "kernels_tell", lambda communicator: True)
    monkeypatch.setattr(counts, "torch", SimpleNamespace(**{**vars(torch), "empty": made.empty}))
    monkeypatch.setattr(counts, "local_kernel", lambda device, name, fmt, folder: name)
    monkeypatch.setattr(counts, "current_stream", lambda device: made.cuda_stream)
    monkeypatch.setattr(counts, "stream_of", lambda device, handle: made)
    monkeypatch.setattr(counts, "launch_on", made.launch)
    monkeypatch.setattr(host_words, "HostMemory", PlainHostMemory)
    yield made


def arrive(counting: counts.Counting, table: torch.Tensor) -> None:
    """What a dispatch of counts brings: `table` has a row for each rank, [R, words] int32."""
    for rank, row in enumerate(counting.rows):
        counting.table[row] = table[rank]
    counting.out.num_rows.fill_(len(table))
