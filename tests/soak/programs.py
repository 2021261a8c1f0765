"""Bursts of rounds that run without a synchronisation: any order of halves that the contract allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch

from cute_ep.api.rounds import MAX_OUTSTANDING
from cute_ep.runtime.communicator import Communicator

from .batches import Batch

HALVES = {"dispatch_async": "dispatch_wait", "combine_async": "combine_wait"}


class Step(NamedTuple):
    """One half of an operation on one batch; `mode` is None for dispatch."""

    operation: str
    batch: int
    mode: str | None = None

    def __str__(self) -> str:
        return f"{self.operation}({self.batch}{', ' * bool(self.mode)}{self.mode or ''})"

    @property
    def phase(self) -> str:
        return self.operation.partition("_")[0]


@dataclass(frozen=True)
class Program:
    """The calls of all ranks in one burst.

    Attributes:
        steps: halves, in the same order on every rank.
        fused: per rank the sending steps whose receiving half comes next and that are one call with it.
        delays: cycles that a rank's stream sleeps before a step, by (rank, number of the step).
    """

    steps: tuple[Step, ...]
    fused: tuple[frozenset[int], ...]
    delays: dict[tuple[int, int], int]

    @property
    def batches(self) -> list[int]:
        """The batches, each in one round."""
        return [step.batch for step in self.steps if step.operation == "dispatch_async"]

    def modes(self, batch: int) -> list[str]:
        """The combine modes of a batch."""
        return [step.mode for step in self.steps if step.operation == "combine_async" and step.batch == batch]

    def kinds(self) -> Counter[str]:
        """Operations of all ranks by what they are, and the rounds of a burst with delays."""
        found: Counter[str] = Counter()
        for number, step in enumerate(self.steps):
            if step.operation in HALVES:
                name = f"combine {step.mode}" if step.mode else "dispatch"
                fused = sum(number in one for one in self.fused)
                found[f"{name}, fused"] += fused
                found[f"{name}, in halves"] += len(self.fused) - fused
        found["rounds with delays"] = len(self.batches) if self.delays else 0
        return +found


def draw_program(random: Random, batches: Sequence[Batch], ranks: int, *, delays: bool) -> Program:
    """Some of the batches, one round each, with up to all of their combine modes."""
    chosen = random.sample(range(len(batches)), random.randint(1, len(batches)))
    eager = random.choice((0.0, 0.5, 0.9, 1.0))  # how often a sending half is followed by its receiving half
    sent: dict[str, list[Step]] = {"dispatch": [], "combine": []}
    to_send = {"dispatch": [Step("dispatch_async", index) for index in chosen], "combine": []}
    steps: list[Step] = []
    while any(sent.values()) or any(to_send.values()):
        possible = [to_send[phase][0] for phase in sent if to_send[phase] and len(sent[phase]) < MAX_OUTSTANDING]
        possible += [one[0]._replace(operation=HALVES[one[0].operation]) for one in sent.values() if one]
        step = random.choice(possible)
        if steps and steps[-1].operation in HALVES and random.random() < eager:
            last = sent[steps[-1].phase]
            step = last[0]._replace(operation=HALVES[last[0].operation])
        if step.operation in HALVES:
            sent[step.phase].append(to_send[step.phase].pop(0))
        else:
            sent[step.phase].pop(0)
        if step.operation == "dispatch_wait":
            allowed = list(batches[step.batch].given.modes)
            for mode in random.sample(allowed, min(len(allowed), random.choice((0, 1, 1, 1, 2, 3)))):
                place = random.randint(0, len(to_send["combine"]))
                to_send["combine"].insert(place, Step("combine_async", step.batch, mode))
        steps.append(step)
    joinable = _joinable(steps)
    share = random.choice((0.0, 0.5, 1.0, 1.0))
    fused = tuple(frozenset(number for number in joinable if random.random() < share) for _ in range(ranks))
    slept = {}
    for _ in range(random.choice((0, 0, 1, 3)) if delays else 0):
        slept[random.randrange(ranks), random.randrange(len(steps))] = 2 ** random.randint(10, 18)
    return Program(tuple(steps), fused, slept)


def _joinable(steps: Sequence[Step]) -> list[int]:
    """Sending steps that may be one call with the step behind them: of a phase that has nothing else outstanding."""
    outstanding: Counter[str] = Counter()
    found = []
    for number, step in enumerate(steps):
        if step.operation in HALVES:
            behind = steps[number + 1] if number + 1 < len(steps) else None
            if not outstanding[step.phase] and behind == step._replace(operation=HALVES[step.operation]):
                found.append(number)
            outstanding[step.phase] += 1
        else:
            outstanding[step.phase] -= 1
    return found


class Lane:
    """One rank: its communicator, and on a GPU the streams of its dispatches and combines, which may be the same."""

    def __init__(self, communicator: Communicator, *, two_streams: bool) -> None:
        self.communicator, self.rank = communicator, communicator.rank
        self.streams: dict[str, torch.cuda.Stream] = {}
        if communicator.device.type == "cuda":
            first = communicator.stream
            second = torch.cuda.Stream(communicator.device) if two_streams else first
            self.streams = {"dispatch": first, "combine": second}
        self.forks = two_streams

    def on(self, phase: str) -> AbstractContextManager:
        """Makes the phase's stream current."""
        return torch.cuda.stream(self.streams[phase]) if self.streams else nullcontext()

    def run(self, program: Program, batches: Sequence[Batch], slices: dict[int, int]) -> Iterator[None]:
        """Enqueue this rank's calls of a program, one at a time. Only kernels that have been launched before: the host
        must not wait here, as other ranks have not been called yet.

        Args:
            slices: set to what dispatch returned as `return_slices_log2`, by batch.
        """
        if self.forks:
            self.streams["combine"].wait_stream(self.streams["dispatch"])
        pending, received = {}, {}
        joined = program.fused[self.rank]
        for number, step in enumerate(program.steps):
            if number - 1 not in joined:
                with self.on(step.phase):
                    cycles = program.delays.get((self.rank, number))
                    if cycles and self.streams:
                        torch.cuda._sleep(cycles)
                    self._call(step, batches[step.batch], number in joined, pending, received)
            if step.operation == "dispatch_wait":
                slices[step.batch] = received[step.batch].return_slices_log2
                if self.forks:
                    self.streams["combine"].wait_stream(self.streams["dispatch"])
            yield
        if self.forks:
            self.streams["dispatch"].wait_stream(self.streams["combine"])

    def _call(self, step: Step, batch: Batch, fused: bool, pending: dict, received: dict) -> None:
        communicator, rank, index = self.communicator, self.rank, step.batch
        late = {"router_weights": batch.late_weights[rank]} if step.mode == "exact" else {}
        if step.operation == "dispatch_async":
            if fused:
                received[index] = communicator.dispatch(**batch.arguments[rank], out=batch.buffers[rank])
            else:
                pending[index] = communicator.dispatch_async(**batch.arguments[rank])
        elif step.operation == "dispatch_wait":
            received[index] = communicator.dispatch_wait(pending.pop(index), batch.buffers[rank])
        elif step.operation == "combine_wait":
            communicator.combine_wait(pending.pop(step[1:]), out=batch.out(rank, step.mode), **late)
        elif fused:
            out = batch.out(rank, step.mode)
            communicator.combine(batch.rows[rank], received[index], mode=step.mode, out=out, **late)
        else:
            pending[step[1:]] = communicator.combine_async(batch.rows[rank], received[index], step.mode)

    def capture(self, program: Program, batches: Sequence[Batch], slices: dict[int, int]) -> torch.cuda.CUDAGraph:
        """`run` as a graph."""
        graph = torch.cuda.CUDAGraph()
        with self.on("dispatch"):
            graph.capture_begin()
            for _ in self.run(program, batches, slices):
                pass
            graph.capture_end()
        return graph


def enqueue(random: Random, runs: Sequence[Iterator[None]], *, by_steps: bool) -> None:
    """Let the ranks make their calls: step by step, or one rank after the other, in random orders."""
    order = list(runs)
    random.shuffle(order)
    while by_steps and order:
        order = [one for one in order if next(one, StopIteration) is None]
        random.shuffle(order)
    for one in order:
        for _ in one:
            pass
