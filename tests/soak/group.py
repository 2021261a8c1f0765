"""A small group of ranks for faults: rounds that are compared, and errors that must be raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from cute_ep.api.config import EPConfig
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.connection import connected

from .batches import Batch
from .deployments import SMS_OF_WAITERS, InputSet
from .programs import Lane, draw_program, enqueue

TIMEOUT_S = 2.0


def small_config(ranks: int, fmt: str = "bf16") -> EPConfig:
    return EPConfig(1024, 8 * ranks, 4, 48, ranks, fmt, timeout_s=TIMEOUT_S)


def small_input(ranks: int, *, bits: int | None = None, tokens: int = 48) -> InputSet:
    modes = {"exact": torch.bfloat16, "partial": torch.bfloat16}
    return InputSet((tokens,) * ranks, "uniform", 0.0, "dispatch", False, False, modes, bits)


def sms_for(devices: Sequence[str], groups: int = 1) -> int | None:
    """Budget of one of `groups` groups of virtual ranks side by side; None on the reference backend."""
    return None if devices[0] == "cpu" else SMS_OF_WAITERS // (len(devices) * groups)


class Group:
    """Communicators of one group and input sets on them, whose rounds are counted wrong or right."""

    def __init__(self, communicators: Sequence[Communicator], given: Sequence[InputSet], seed: int = 1) -> None:
        self.devices = {communicator.rank: communicator.device for communicator in communicators}
        cfg = communicators[0].cfg
        self.batches = [Batch(cfg, self.devices, one, seed + place) for place, one in enumerate(given)]
        self.scratch, self.counters = {}, {}
        for rank, device in self.devices.items():
            size = max(batch.scratch_bytes(rank) for batch in self.batches)
            self.scratch[rank] = torch.empty(size, dtype=torch.uint8, device=device)
            self.counters[rank] = torch.zeros(1, dtype=torch.int64, device=device)
        self.use(communicators)
        self.wait()  # the lanes' streams do not wait for the one on which all this was made
        self.compare({rank: {} for rank in self.devices}, [])  # loads torch's kernels
        self.wait()

    def use(self, communicators: Sequence[Communicator]) -> None:
        """Go on with these, of the same configuration and devices."""
        self.lanes = [Lane(communicator, two_streams=False) for communicator in communicators]

    def compare(self, slices: dict[int, dict[int, int]], modes: Sequence[str]) -> None:
        """Enqueue the comparison of what `slices` (by rank and batch) says was dispatched, and combined in `modes`."""
        for lane in self.lanes:
            with lane.on("dispatch"):
                for index, made in slices[lane.rank].items() or [(0, 0)]:
                    scratch, counter = self.scratch[lane.rank], self.counters[lane.rank]
                    self.batches[index].compare(lane.rank, modes, made, scratch, counter[0])

    def wait(self) -> None:
        """Wait for the devices, and forget what was wrong so far."""
        self._synchronize()
        for counter in self.counters.values():
            counter.zero_()
        for batch in self.batches:
            for segment in (one for rank in batch.segments.values() for one in rank.values()):
                segment.wrong.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        for device in self.devices.values():
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def poison(self) -> None:
        """Make all outputs ready for a round, whatever came of the last one."""
        self.compare({rank: dict.fromkeys(range(len(self.batches)), 0) for rank in self.devices}, ["exact", "partial"])
        self.wait()

    def check_right(self) -> None:
        """Wait for all ranks; AssertionError unless all bytes compared since the last look were right."""
        for lane in self.lanes:
            lane.communicator.synchronize()
        wrong = {rank: int(counter) for rank, counter in self.counters.items()}
        where = [
            f"input set {index}, rank {rank}, {name}: {'; '.join(found)}"
            for index, batch in enumerate(self.batches if any(wrong.values()) else ())
            for rank, segments in batch.segments.items()
            for name, segment in segments.items()
            if (found := segment.describe_wrong())
        ]
        self.wait()
        assert not any(wrong.values()), "\n".join([f"wrong bytes by rank: {wrong}", *where])

    def round(self, random: Random, index: int = 0) -> None:
        """One round of an input set, compared: in halves or fused, some modes; errors as the calls raise them."""
        some = self.batches[index : index + 1]
        program = draw_program(random, some, some[0].cfg.world_size, delays=False)  # the same in all processes
        slices: dict[int, dict[int, int]] = {rank: {} for rank in self.devices}
        enqueue(random, [lane.run(program, some, slices[lane.rank]) for lane in self.lanes], by_steps=True)
        self.compare({rank: {index: made[0]} for rank, made in slices.items()}, program.modes(0))
        self.check_right()


@contextmanager
def group_of(devices: Sequence[str], library: Path | None, given: InputSet, fmt: str = "bf16") -> Iterator[Group]:
    with connected(small_config(len(devices), fmt), devices, sms=sms_for(devices), library=library) as communicators:
        yield Group(communicators, [given])


def expect(error: type[Exception], words: str, call: Callable[[], object]) -> str:
    """The error that `call` raises; AssertionError where there is none, or it lacks the words, in capitals or not."""
    try:
        call()
    except error as caught:
        assert words.lower() in str(caught).lower(), f"no {words!r} in {caught}"
        return f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
    raise AssertionError(f"no {error.__name__}")
