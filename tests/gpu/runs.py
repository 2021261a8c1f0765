"""Running schedules: everything is enqueued without a word from the host, and compared in the end.

Launches of random ranks are delayed by random times. Each call has outputs of its own, poisoned before the run, with
more poison behind them; the comparison comes after the last launch. So rounds follow each other as closely as streams
let them, and whatever lands late, early or twice is still there to be found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, HeaderWord
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits, assert_untouched_behind
from cute_ep.testing.verify import POISON, check_dispatched, check_headers, guarded, poisoned_buffers
from cute_ep.testing.workloads import make_rank_inputs
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

from .schedules import ORDERS, TOKENS, Case, Step, steps_of

ROUTINGS = ("uniform", "repeated", "zipf", "masked")
LONGEST_DELAY = 1 << 21
"""Cycles of the longest delay: a millisecond, in which a rank that does not wait runs many rounds ahead."""
DELAYED = 0.3
"""Share of the launches that are delayed."""
SHARED_CTAS = 112
"""CTAs of all launches that may be side by side on a GPU: the others of its SMs stay free, for kernels of the caller's
that stand between calls. (Without this, ranks that share a GPU leave SMs free by themselves, for one launch each.)"""
DISTINCT = 5
"""Different batches, by turns: as an odd number, so that rounds n and n + 2 never have the same."""


def sms_of(devices: Sequence[str], share: int) -> int | None:
    """SM budget of each rank, of which `share` launches may be side by side; None for one, for which the default leaves
    room."""
    return None if share == 1 else max(1, SHARED_CTAS * len(set(devices)) // (len(devices) * share))


class Batch:
    """One batch on all ranks: inputs, what dispatch must make of them, and made-up expert rows with their sums. The
    last rank's tokens, if it has any, stay at home."""

    def __init__(self, communicators: Sequence[Communicator], case: Case, number: int, seed: int) -> None:
        self.cfg, ranks = communicators[0].cfg, len(communicators)
        self.number, oracle = number, communicators[0].device
        columns: list[list[torch.Tensor]] = [[], [], []]
        for rank in range(ranks):
            last = 0 < rank == ranks - 1
            some = min(TOKENS[case.tokens][(number + 2 * rank) % 7], self.cfg.max_tokens_per_rank)
            tokens = 0 if last and case.idle else some
            routing = "one_rank" if last else ROUTINGS[(number + rank) % len(ROUTINGS)]
            inputs = make_rank_inputs(self.cfg, rank, tokens, routing, seed + number)
            for column, tensor in zip(columns, vars(inputs).values(), strict=True):
                column.append(tensor.to(oracle))
        self.weights = columns[2]
        self.expected = reference.dispatch(self.cfg, *columns[:2], None, self.weights)
        self.arguments = [
            tuple(column[rank].to(c.device) for column in columns) for rank, c in enumerate(communicators)
        ]
        self.devices = [c.device for c in communicators]
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._sums: dict[tuple[int, str], list[torch.Tensor]] = {}

    def rows(self, turn: int) -> list[torch.Tensor]:
        """Expert rows a rank, other ones each turn, of such different sizes that the order of additions shows."""
        if turn not in self._rows:
            self._rows[turn] = []
            for rank, device in enumerate(self.devices):
                generator = torch.Generator(device).manual_seed(1000 * self.number + 10 * turn + rank)
                shape = int(self.expected[rank].num_rows), self.cfg.hidden
                size = torch.randint(-12, 13, (shape[0], 1), generator=generator, device=device)
                rows = torch.randn(shape, generator=generator, device=device) * torch.exp2(size.float())
                self._rows[turn].append(rows.bfloat16())
        return self._rows[turn]

    def sums(self, turn: int, mode: str) -> list[torch.Tensor]:
        """What combine must make of `rows(turn)`, a rank each."""
        if (turn, mode) not in self._sums:
            rows = [one.to(self.weights[0].device) for one in self.rows(turn)]
            self._sums[turn, mode] = reference.combine(self.cfg, rows, self.expected, self.weights, mode)
        return self._sums[turn, mode]


JOINING = (
    Entry(LAMPORT_TOKENS, MANY, 1 / 4, 4, split_from=2, joins=True),
    Entry(MANY, MANY, 1 / 4, 1, split_from=2, joins=True),
)
ONE_CTA = Tuning(*[(Entry(LAMPORT_TOKENS, 1, 0, 1), Entry(MANY, 1, 0, 1))] * 2)


@dataclass(frozen=True)
class Streams:
    """The streams of one rank: for dispatch and for combine, often the same one."""

    dispatch: torch.cuda.Stream
    combine: torch.cuda.Stream

    @classmethod
    def of_ranks(cls, communicators: Sequence[Communicator], two: bool) -> list[Streams | None]:
        """One entry a rank: its own stream where ranks share a GPU, None on the CPU."""
        devices = [c.device for c in communicators]
        if devices[0].type == "cpu":
            return [None] * len(devices)
        if len(set(devices)) < len(devices):
            assert not two, "ranks that share a GPU have one stream each"
            return [cls(c.stream, c.stream) for c in communicators]
        made = []
        for device in devices:
            first = torch.cuda.Stream(device)
            made.append(cls(first, torch.cuda.Stream(device) if two else first))
        return made

    def on(self, kind: str) -> AbstractContextManager:
        """Make the stream of a call the current one."""
        return torch.cuda.stream(self.combine if kind.islower() else self.dispatch)


@dataclass
class Run:
    """One group's part: made before the first launch, enqueued call by call, compared in the end."""

    communicators: Sequence[Communicator]
    case: Case
    seed: int = 0
    streams: list[Streams | None] | None = None
    steps: list[Step] = field(init=False)

    def __post_init__(self) -> None:
        case, ranks = self.case, range(len(self.communicators))
        self.steps = steps_of(ORDERS[case.order](case.rounds))
        self.streams = self.streams or Streams.of_ranks(self.communicators, case.streams)
        self.batches = [Batch(self.communicators, case, number, self.seed) for number in range(DISTINCT)]
        combines = [step for step in self.steps if step.kind in "ca"]
        for step in combines:  # everything is made before the first launch
            self.batch_of(step).sums(step.turn, step.mode)
        self.buffers = [
            [
                poisoned_buffers(self.communicators[rank], int(self.batches[n % DISTINCT].expected[rank].num_rows))
                for n in range(1, case.rounds + 1)
            ]
            for rank in ranks
        ]
        self.outs = [
            [
                guarded((self.batch_of(step).arguments[rank][0].shape[0], c.cfg.hidden), torch.bfloat16, c.device)
                for step in combines
            ]
            for rank, c in enumerate(self.communicators)
        ]
        first = self.batches[1 % DISTINCT].arguments[0][0]
        self.crossed_out = torch.empty_like(first)
        self.received: list[dict[int, Dispatched]] = [{} for _ in ranks]
        self.events: list[dict[int, torch.cuda.Event]] = [{} for _ in ranks]
        self.sent: list[dict[tuple[str, int], object]] = [{} for _ in ranks]

    def is_crossed(self, rank: int, step: Step) -> bool:
        """Whether a rank combines another batch than the step's."""
        return self.case.crossed and rank == 0 and step is self.steps[-1]

    def batch_of(self, step: Step) -> Batch:
        return self.batches[step.number % DISTINCT]

    def enqueue(self, rank: int, step: Step) -> None:
        """One call of one rank, on the current stream."""
        c, batch, received = self.communicators[rank], self.batch_of(step), self.received[rank]
        place, sent = step.output, self.sent[rank]
        streams = self.streams[rank] if self.case.streams else None
        if streams and step.kind in "ca":
            streams.combine.wait_event(self.events[rank][step.number])
        if step.kind == "D":
            received[step.number] = c.dispatch(*batch.arguments[rank], out=self.buffers[rank][place])
        elif step.kind == "A":
            sent["A", place] = c.dispatch_async(*batch.arguments[rank])
        elif step.kind == "W":
            received[step.number] = c.dispatch_wait(sent.pop(("A", place)), self.buffers[rank][place])
        elif step.kind == "w":
            c.combine_wait(sent.pop(("a", place)), out=self.outs[rank][place])
        elif self.is_crossed(rank, step):
            rows = self.batches[1 % DISTINCT].rows(0)[rank]
            c.combine(rows, received[1], mode=step.mode, out=self.crossed_out)
        else:
            rows = batch.rows(step.turn)[rank]
            if step.kind == "a":
                sent["a", place] = c.combine_async(rows, received[step.number], step.mode)
            else:
                c.combine(rows, received[step.number], mode=step.mode, out=self.outs[rank][place])
        if streams and step.kind in "DW":
            self.events[rank][step.number] = streams.dispatch.record_event()

    def check(self) -> None:
        """Wait for the end and compare every tensor of every call.

        Raises:
            AssertionError: names the call, the tensor and the first element that differs.
            EPTimeout: a rank's wait was in vain.
        """
        if self.case.crossed:
            self._check_told()
            return
        for communicator in self.communicators:
            communicator.synchronize()
        for step in self.steps:
            try:
                if step.kind in "DW":
                    self._check_batch(step)
                elif step.kind in "cw":
                    self._check_sums(step)
            except AssertionError as error:
                raise AssertionError(f"{self.case}, {step.kind}{step.number}: {error}") from error

    def _check_told(self) -> None:
        """That ranks which awaited rows of another dispatch round say so. Others need not have ended well."""
        last = self.case.rounds
        for rank, communicator in enumerate(self.communicators):
            ids = self.batches[(last if rank else 1) % DISTINCT].arguments[rank][1]
            owners = set((ids[ids >= 0] // communicator.cfg.local_experts).tolist())
            others = owners - {0} if rank == 0 else owners & {0}
            try:
                communicator.synchronize()
                told = "nothing"
            except EPError as error:
                told = f"{type(error).__name__}: {error}"
            own = self.received[rank][last if rank else 1].headers[0, HeaderWord.ROUND].item()
            wanted = f"has the batch of dispatch round {own} here"
            if others and (wanted not in told or told.startswith("EPTimeout")):
                raise AssertionError(f"{self.case}: rank {rank} awaited rows of rank(s) {others}, and told {told}")

    def _check_batch(self, step: Step) -> None:
        cfg = self.communicators[0].cfg
        batches = [received[step.number] for received in self.received]
        for rank, (got, want) in enumerate(zip(batches, self.batch_of(step).expected, strict=True)):
            check_dispatched(got, want, cfg, rank)
        check_headers(batches, cfg)

    def _check_sums(self, step: Step) -> None:
        sums = self.batch_of(step).sums(step.turn, step.mode)
        for rank, want in enumerate(sums):
            out, name = self.outs[rank][step.output], f"rank {rank} combine {step.mode}"
            assert_bits(out, want, name)
            assert_untouched_behind({name: out}, POISON)


def delay(device: torch.device, cycles: int) -> None:
    """Hold up the current stream of a GPU."""
    if cycles and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def draw_delay(generator: random.Random) -> int:
    """Cycles; mostly none."""
    return generator.randrange(LONGEST_DELAY) if generator.random() < DELAYED else 0


@contextmanager
def launch_shapes(runs: Sequence[Run]) -> Iterator[None]:
    """Senders of the runs that want it so join, and rank 0 of a slow one launches one CTA."""
    before = [
        (run.case, rank, one, one.tuning)
        for run in runs
        for rank, one in enumerate(run.communicators)
        if one.device.type == "cuda"
    ]
    for case, rank, communicator, tuning in before:
        if case.joins:
            communicator.tuning = replace(tuning, dispatch=JOINING)
        if case.slow and rank == 0:
            communicator.tuning = ONE_CTA
    try:
        yield
    finally:
        for _, _, communicator, tuning in before:
            communicator.tuning = tuning


def settle(devices: Sequence[torch.device]) -> None:
    """Load the kernel of `delay` where it is needed, and wait for all that was prepared: CUDA loads a kernel at its
    first launch and may wait for an idle device, which ranks that spin are not."""
    for device in set(devices):
        if device.type == "cuda":
            delay(device, 1)
            torch.cuda.synchronize(device)


def run_schedules(*runs: Run, seed: int = 0) -> None:
    """Enqueue all calls of all runs, which have the same ranks and whose calls alternate, then `check` each."""
    generator = random.Random(seed)
    ranks, longest = len(runs[0].communicators), max(len(run.steps) for run in runs)
    order = [(rank, place) for rank in range(ranks) for place in range(longest)]
    if not runs[0].case.by_rank:
        order.sort(key=lambda entry: entry[1])
    with launch_shapes(runs):
        settle([c.device for c in runs[0].communicators])
        for rank, place in order:
            for run in runs:
                if place < len(run.steps):
                    step, streams = run.steps[place], run.streams[rank]
                    with streams.on(step.kind) if streams else nullcontext():
                        delay(run.communicators[rank].device, draw_delay(generator))
                        run.enqueue(rank, step)
        for run in runs:
            run.check()
