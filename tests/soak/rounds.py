"""Rounds of one deployment after the other, compared on the device with the reference, to the last byte."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from cute_ep.api.errors import EPError
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.connection import connected

from .batches import Batch
from .deployments import Deployment, draw_tuning
from .programs import Lane, Program, draw_program, enqueue

ROUNDS = 1000
"""Rounds of one deployment."""
CHUNK = 32
"""Bursts between two looks at their counters, which are the only synchronisation with the host."""
PROGRAMS = 4
"""Bursts of a deployment that are captured."""
MOST_TOLD = 4
"""Failures of one deployment that are told one by one."""

Connect = Callable[..., object]


@dataclass
class Outcome:
    """What happened to a deployment: `kinds` counts rounds and operations by what they were."""

    rounds: int = 0
    wrong_bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    broken: bool = False


@dataclass(frozen=True)
class Captured:
    """A program as a graph a rank, and per rank the `return_slices_log2` of its batches."""

    program: Program
    graphs: Sequence[torch.cuda.CUDAGraph]
    slices: Sequence[dict[int, int]]


def run_deployment(
    deployment: Deployment,
    random: Random,
    rounds: int,
    *,
    seconds: float = float("inf"),
    library: Path | None = None,
    step: Callable[[int], None] = lambda rounds: None,
    connect: Connect = connected,
) -> Outcome:
    """Run rounds until there are at least so many, or the time is over.

    Args:
        random: draws everything that `deployment` does not say.
        step: told the rounds that were compared, from time to time.
        connect: makes the communicators, as `cute_ep.runtime.connection.connected`.
    """
    outcome, deadline = Outcome(), time.monotonic() + seconds

    def run() -> None:
        with connect(deployment.cfg, list(deployment.devices), sms=deployment.sms, library=library) as communicators:
            soak = _Soak(deployment, random, communicators, outcome)
            while outcome.rounds < rounds and time.monotonic() < deadline and not outcome.failures:
                step(soak.chunk(rounds - outcome.rounds))
            soak.check_untouched()
            soak.captured.clear()  # graphs go before the kernels in them

    try:
        run()
    except EPError as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
    except Exception:  # perhaps of a device that is lost to this process
        outcome.failures.append(traceback.format_exc())
        outcome.broken = True
    finally:
        if deployment.on_gpu and not outcome.broken:
            torch.cuda.empty_cache()  # communicators allocate beside torch
    for kind in deployment.kinds():
        outcome.kinds[kind] += outcome.rounds
    return outcome


class _Soak:
    """The state of one deployment that is running."""

    def __init__(
        self, deployment: Deployment, random: Random, communicators: Sequence[Communicator], outcome: Outcome
    ) -> None:
        self.deployment, self.random, self.outcome = deployment, random, outcome
        devices = {communicator.rank: communicator.device for communicator in communicators}
        self.batches = [Batch(deployment.cfg, devices, given, random.getrandbits(32)) for given in deployment.inputs]
        self.lanes = [Lane(communicator, two_streams=deployment.streams) for communicator in communicators]
        self.scratch, self.counters = [], []
        for lane in self.lanes:
            size = max(batch.scratch_bytes(lane.rank) for batch in self.batches)
            device = lane.communicator.device
            self.scratch.append(torch.empty(size, dtype=torch.uint8, device=device))
            self.counters.append(torch.zeros(CHUNK, 16, dtype=torch.int64, device=device)[:, 0])
        with self._idle():
            self._warm()
        for _, _, _, segment in self._segments():
            segment.wrong.zero_()
        self.captured: list[Captured] = []
        if deployment.graphs:
            gc.disable()  # which may free what may not be freed during a capture
            try:
                self.captured = [self._capture() for _ in range(PROGRAMS)]
            finally:
                gc.enable()

    def chunk(self, most: int) -> int:
        """Run up to CHUNK bursts of at least one round each, `most` rounds if that is less; the rounds that ran."""
        for counter in self.counters:
            counter.zero_()
        bursts: list[tuple[str, Program]] = []
        with self._idle():
            count = 0
            while len(bursts) < CHUNK and count < most:
                bursts.append(self._burst(len(bursts)))
                count += len(bursts[-1][1].batches)
        wrong = torch.stack([counter.cpu() for counter in self.counters])
        for how, program in bursts:
            self.outcome.kinds[f"rounds of {how}"] += len(program.batches)
            self.outcome.kinds += program.kinds()
        self.outcome.rounds += count
        self.outcome.wrong_bytes += int(wrong.sum())
        if wrong.any():
            self._tell(bursts, wrong)
        return count

    def check_untouched(self) -> None:
        """A failure where memory of an operation that did not run was written to."""
        for rank, name, index, segment in self._segments():
            if not self.outcome.failures and not segment.untouched():
                self.outcome.failures.append(f"rank {rank}, {name} of input set {index}: written to by no call of it")

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """No work of any rank before and after."""
        self._synchronize_devices()
        yield
        self._synchronize_devices()  # with replays, of which communicators know nothing
        for lane in self.lanes:
            lane.communicator.synchronize()

    def _synchronize_devices(self) -> None:
        for device in set(self.deployment.devices) - {"cpu"}:
            torch.cuda.synchronize(device)

    def _segments(self) -> Iterator[tuple]:
        for index, batch in enumerate(self.batches):
            for rank, segments in batch.segments.items():
                for name, segment in segments.items():
                    yield rank, name, index, segment

    def _warm(self) -> None:
        """Launch each of torch's kernels once. CUDA loads a kernel at its first launch and may wait for the device to
        be idle then, which it is not while a rank waits for another one that the host has yet to call."""
        for lane in self.lanes:
            with lane.on("dispatch"):
                if lane.streams:
                    torch.cuda._sleep(1)
                for batch in self.batches:
                    modes = list(batch.given.modes)
                    batch.compare(lane.rank, modes, 0, self.scratch[lane.rank], self.counters[lane.rank][0])

    def _capture(self) -> Captured:
        program = draw_program(self.random, self.batches, len(self.lanes), delays=True)
        slices: list[dict[int, int]] = [{} for _ in self.lanes]
        graphs = [lane.capture(program, self.batches, slices[lane.rank]) for lane in self.lanes]
        return Captured(program, graphs, slices)

    def _burst(self, number: int) -> tuple[str, Program]:
        """Enqueue the calls of one burst on all ranks, and the comparison of what they wrote; (how, what)."""
        random = self.random
        old = random.choice(self.captured) if self.captured and random.random() < 0.6 else None
        if old is None:
            program = draw_program(random, self.batches, len(self.lanes), delays=self.deployment.on_gpu)
            replaying: list[bool] = [False] * len(self.lanes)
        else:
            program, mixed = old.program, random.random() < 0.3  # some ranks replay, others call
            replaying = [not mixed or random.random() < 0.5 for _ in self.lanes]
        if self.deployment.on_gpu and random.random() < 0.2:
            random.choice(self.lanes).communicator.tuning = draw_tuning(random)
        slices: list[dict[int, int]] = [{} for _ in self.lanes]
        runs = []
        for lane, replays in zip(self.lanes, replaying, strict=True):
            if old is not None and replays:
                slices[lane.rank] = old.slices[lane.rank]
                runs.append(_replay(lane, old.graphs[lane.rank]))
            else:
                runs.append(lane.run(program, self.batches, slices[lane.rank]))
        enqueue(random, runs, by_steps=not self.deployment.on_gpu or random.random() < 0.5)
        for lane in self.lanes:  # only now: every rank has been called, so none waits for the host
            with lane.on("dispatch"):
                for index in program.batches:
                    batch, made = self.batches[index], slices[lane.rank][index]
                    counter = self.counters[lane.rank][number]
                    batch.compare(lane.rank, program.modes(index), made, self.scratch[lane.rank], counter)
        how = "calls" if not any(replaying) else "replays" if all(replaying) else "calls and replays"
        return how, program

    def _tell(self, bursts: Sequence[tuple[str, Program]], wrong: torch.Tensor) -> None:
        for rank, number in wrong.nonzero().tolist()[:MOST_TOLD]:
            how, program = bursts[number]
            calls = " ".join(map(str, program.steps))
            where = f"rank {rank}, burst {number} of rounds up to {self.outcome.rounds}"
            self.outcome.failures.append(f"{where}: {int(wrong[rank, number])} wrong bytes in {how}: {calls}")
        told = (
            f"rank {rank}, {name} of input set {index}: {line}"
            for rank, name, index, segment in self._segments()
            for line in segment.describe_wrong()
        )
        self.outcome.failures += [line for line, _ in zip(told, range(MOST_TOLD), strict=False)]


def _replay(lane: Lane, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    with lane.on("dispatch"):
        graph.replay()
    yield
