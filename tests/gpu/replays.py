"""Captured layers that are replayed with their inputs changed in place, without a word from the host in between.

A layer is a dispatch and a combine; its sums are the next layer's tokens. Each replay finds its outputs poisoned, NaN
where sums will be, and its inputs new; what it wrote is copied aside, and compared when the last replay has ended. In
between stand copies only, no kernel of torch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.dispatched import Dispatched
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits, assert_untouched_behind
from cute_ep.testing.verify import (
    POISON,
    check_dispatched,
    check_headers,
    expert_rows,
    guarded,
    poison,
    poisoned_buffers,
)
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import changed

from .runs import Streams, delay, draw_delay, settle

ROUTINGS = ("uniform", "repeated", "masked")
MODES = ("exact", "partial", "exact")


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's allocation."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def inside(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor at the begin of `memory` that has type and shape of `like`."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


class Inputs:
    """One replay's inputs on all ranks, and what each layer must make of them."""

    def __init__(self, communicators: Sequence[Communicator], tokens: Sequence[int], layers: int, seed: int) -> None:
        cfg, oracle = communicators[0].cfg, communicators[0].device
        made = [make_inputs(cfg, tokens, ROUTINGS[(seed + n) % 3], 10 * seed + n) for n in range(layers)]
        self.x = [one.x.to(oracle) for one in made[0]]
        self.ids = [[one.topk_ids.to(oracle) for one in layer] for layer in made]
        self.weights = [[one.router_weights.to(oracle) for one in layer] for layer in made]
        self.rows, self.batches, self.sums = [], [], []
        x = self.x
        for n in range(layers):
            self.batches.append(reference.dispatch(cfg, x, self.ids[n], None, self.weights[n]))
            self.rows.append(expert_rows(self.batches[n], cfg.hidden, 10 * seed + n))
            x = reference.combine(cfg, self.rows[n], self.batches[n], self.weights[n], MODES[n])
            self.sums.append(x)


class RankMemory:
    """What one rank's captured layers read and write: the same memory in every replay."""

    def __init__(self, communicator: Communicator, rank: int, every: Sequence[Inputs]) -> None:
        device, cfg, first = communicator.device, communicator.cfg, every[0]
        layers = range(len(first.rows))
        most = [max(int(one.batches[n][rank].num_rows) for one in every) for n in layers]
        self.x = first.x[rank].to(device).clone()
        self.ids = [first.ids[n][rank].to(device).clone() for n in layers]
        self.weights = [first.weights[n][rank].to(device).clone() for n in layers]
        self.rows = [poison(torch.empty(rows, cfg.hidden, dtype=torch.bfloat16, device=device)) for rows in most]
        self.buffers = [poisoned_buffers(communicator, rows) for rows in most]
        self.sums = [guarded(self.x.shape, torch.bfloat16, device) for _ in layers]
        self.batches: list[Dispatched | None] = [None for _ in layers]
        self._taken = [self.x, *self.ids, *self.weights, *self.rows]
        self._given = [
            [t.to(device) for t in (one.x[rank], *(of_rank[rank] for of_rank in one.ids + one.weights + one.rows))]
            for one in every
        ]
        outputs = [getattr(buffers, name) for buffers in self.buffers for name in BUFFERS]
        self._outputs = [memory_of(tensor) for tensor in (*outputs, *self.sums) if tensor is not None]
        self._nan = [torch.full_like(sums, torch.nan) for sums in self.sums]
        self._poison = poison(torch.empty(max(map(len, self._outputs)), dtype=torch.uint8, device=device))
        self._saved = [[torch.empty_like(memory) for memory in self._outputs] for _ in every]

    def take(self, number: int) -> None:
        """Enqueue copies: inputs of a replay in place of what was there, poison over the outputs."""
        for target, source in zip(self._taken, self._given[number], strict=True):
            target[: source.shape[0]].copy_(source)
        for output in self._outputs:
            output.copy_(self._poison[: len(output)])
        for sums, nan in zip(self.sums, self._nan, strict=True):
            sums.copy_(nan)

    def save(self, number: int) -> None:
        """Enqueue copies of all outputs."""
        for saved, output in zip(self._saved[number], self._outputs, strict=True):
            saved.copy_(output)

    def results(self, number: int) -> tuple[list[Dispatched], list[torch.Tensor]]:
        """What a replay wrote: a batch and the sums of each layer."""
        memory, batches = iter(self._saved[number]), []
        for batch, buffers in zip(self.batches, self.buffers, strict=True):
            names = [name for name in BUFFERS if getattr(buffers, name) is not None]
            batches.append(changed(batch, **{name: inside(next(memory), getattr(buffers, name)) for name in names}))
        return batches, [inside(next(memory), sums) for sums in self.sums]


class Replays:
    """One group's captured layers.

    Args:
        communicators: all ranks.
        tokens: of each rank, the same in all replays (a capture keeps them).
        layers: dispatches and combines in the capture; 2 leave each layer its parity, 3 change it.
        count: replays.
        streams: of the ranks; None: new ones.
        others: more groups of the same ranks and configuration, which take the layers by turns, in one capture a rank.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator],
        tokens: Sequence[int],
        layers: int,
        count: int = 5,
        streams: list[Streams | None] | None = None,
        others: Sequence[Sequence[Communicator]] = (),
    ) -> None:
        self.communicators, self.layers, self.count = communicators, layers, count
        self.groups = [communicators, *others]
        self.streams = streams or Streams.of_ranks(communicators, False)
        self.inputs = [Inputs(communicators, tokens, layers, seed) for seed in range(count)]
        self.memory = [RankMemory(c, rank, self.inputs) for rank, c in enumerate(communicators)]
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def calls(self, rank: int) -> list[Callable[[], None]]:
        """What is captured of one rank."""
        memory, made = self.memory[rank], []

        def after(c: Communicator) -> None:
            """Have the rank's stream wait for a call that ran on another one, that of a further group."""
            if c.shares_device and c is not self.communicators[rank] and c.stream is not None:
                torch.cuda.current_stream(c.device).wait_stream(c.stream)

        def dispatch(n: int) -> None:
            c, x = self.groups[n % len(self.groups)][rank], memory.sums[n - 1] if n else memory.x
            memory.batches[n] = c.dispatch(x, memory.ids[n], memory.weights[n], out=memory.buffers[n])
            after(c)

        def combine(n: int) -> None:
            c = self.groups[n % len(self.groups)][rank]
            c.combine(memory.rows[n], memory.batches[n], mode=MODES[n], out=memory.sums[n])
            after(c)

        for n in range(self.layers):
            made += [lambda n=n: dispatch(n), lambda n=n: combine(n)]
        return made

    def capture(self) -> None:
        """Capture all ranks, and use every copy once."""
        for rank, (memory, streams) in enumerate(zip(self.memory, self.streams, strict=True)):
            with streams.on("D"):
                memory.take(0)
                memory.save(0)
            torch.cuda.synchronize(self.communicators[rank].device)
            graph = torch.cuda.CUDAGraph()
            with streams.on("D"), torch.cuda.graph(graph, stream=streams.dispatch):
                for call in self.calls(rank):
                    call()
            self.graphs.append(graph)

    def enqueue(self, rank: int, number: int) -> None:
        """One replay of one rank, on the current stream."""
        self.memory[rank].take(number)
        self.graphs[rank].replay()
        self.memory[rank].save(number)

    def run_eagerly(self, number: int) -> None:
        """The same calls without a capture, each on all ranks before the next: for ranks on the CPU."""
        for memory in self.memory:
            memory.take(number)
        for row in zip(*(self.calls(rank) for rank in range(len(self.memory))), strict=True):
            for call in row:
                call()
        for memory in self.memory:
            memory.save(number)

    def check(self) -> None:
        """Wait for the end and compare every tensor of every replay; errors as `Run.check`."""
        cfg = self.communicators[0].cfg
        for communicator in (one for group in self.groups for one in group):
            communicator.synchronize()
        for number, inputs in enumerate(self.inputs):
            results = [memory.results(number) for memory in self.memory]
            for n in range(self.layers):
                batches = [batches[n] for batches, _ in results]
                for rank, (_, sums) in enumerate(results):
                    name = f"replay {number}, layer {n}, rank {rank}"
                    check_dispatched(batches[rank], inputs.batches[n][rank], cfg, rank)
                    assert_bits(sums[n], inputs.sums[n][rank], f"{name}, sums")
                    assert_untouched_behind({f"{name}, sums": sums[n]}, POISON)
                check_headers(batches, cfg)


def run_replays(*groups: Replays, seed: int = 0) -> None:
    """Capture, enqueue all replays of all groups, which have the same ranks and alternate, then `check` each."""
    generator = random.Random(seed)
    for group in groups:
        group.capture()
    settle([c.device for c in groups[0].communicators])
    for number in range(groups[0].count):  # a stream holds so many launches that wait, and these are hundreds of copies
        for rank in range(len(groups[0].communicators)):
            for group in groups:
                with group.streams[rank].on("D"):
                    delay(group.communicators[rank].device, draw_delay(generator))
                    group.enqueue(rank, number)
    for group in groups:
        group.check()
