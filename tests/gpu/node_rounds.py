"""Rounds over several nodes, each output compared on its stream with what must come. On the CPU, too: there calls wait,
so each rank needs a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.rounds import PendingCombine, PendingDispatch
from cute_ep.testing.verify import expert_rows
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

MOST = 37
"""Tokens of a rank; a frame may have more rows."""
FRAMES = (None, MOST, MOST + 3)
HIDDEN = 1152
WIDE = 24
"""Powers of 2 that multiply wide rows: sums of three such numbers in float32 depend on their order."""
Step = Callable[[int], None]
"""What one rank does. A list of them is for each of all ranks."""


def config(nodes: int, ranks: int, **changes: object) -> EPConfig:
    made = EPConfig(HIDDEN, 6 * nodes * ranks, 4, MOST + 11, nodes * ranks, timeout_s=20, ranks_per_node=ranks)
    return replace(made, **changes)  # type: ignore[arg-type]


def inputs_of(cfg: EPConfig, seed: int) -> list[RankInputs]:
    tokens = [(0, MOST, 1, 17, 30)[(rank + seed) % 5] for rank in range(cfg.world_size)]
    return make_inputs(cfg, tokens, list(ROUTINGS)[seed % len(ROUTINGS)], seed)


def by_turns(ranks: Sequence[int], steps: Iterable[Step]) -> None:
    """All ranks make a call, which waits for nothing on GPUs, before any makes the next one."""
    for step in steps:
        for rank in ranks:
            step(rank)


def widened(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Each element times a random power of 2."""
    generator = torch.Generator(device=rows.device).manual_seed(seed)
    powers = torch.randint(WIDE, rows.shape, generator=generator, device=rows.device)
    return (rows.float() * 2.0 ** (powers - WIDE // 2)).bfloat16()


class Rounds:
    """Inputs of several rounds, and what must come of them; inputs and outputs may change places.

    Args:
        frames: of the rounds, by turns.
        wide: rows have elements of very different size, and sums are float32. They tell in which order nodes are added.
        run: has all ranks do all steps, each in its order.
    """

    def __init__(
        self,
        made: Sequence[EPCommunicator],
        count: int,
        frames: Sequence[int | None],
        *,
        wide: bool = False,
        run: Callable[[Sequence[int], Iterable[Step]], None] = by_turns,
    ) -> None:
        self.made, self.cfg, oracle = made, made[0].cfg, made[0].device
        self.ranks, self._run = range(len(made)), run
        self.frames = [frames[number % len(frames)] for number in range(count)]
        self.dtype = torch.float32 if wide else torch.bfloat16
        self.want: list[list] = []
        self.given: list[list[dict]] = []
        self.rows: list[list[torch.Tensor]] = []
        self.sums: list[list[torch.Tensor]] = []
        self.tokens: list[list[torch.Tensor]] = []
        for number, frame in enumerate(self.frames):
            inputs = inputs_of(self.cfg, number)
            names = ("x", "topk_ids", "router_weights")
            xs, ids, weights = ([getattr(one, name).to(oracle) for one in inputs] for name in names)
            want = reference.dispatch(self.cfg, xs, ids, None, weights, frame=frame)
            rows = expert_rows(want, self.cfg.hidden, number)
            if wide:
                rows = [widened(one, number) for one in rows]
            sums = reference.combine(self.cfg, rows, want, dtype=self.dtype)
            self.want.append(want)
            # a wrong dispatch may have as many rows as there are at most, all of which combine reads
            whole = [pad(one, (0, 0, 0, self.cfg.max_rows - len(one))) for one in rows]
            self.rows.append([one.to(ep.device) for one, ep in zip(whole, made, strict=True)])
            self.sums.append([one.to(ep.device) for one, ep in zip(sums, made, strict=True)])
            self.tokens.append([one.tokens.to(ep.device) for one, ep in zip(want, made, strict=True)])
            given = zip(xs, ids, weights, made, strict=True)
            self.given.append([dict(zip(names, (t.to(ep.device) for t in one), strict=True)) for *one, ep in given])
        self.wrong = [torch.zeros((), dtype=torch.int64, device=ep.device) for ep in made]

    def dispatch(self, number: int, rank: int) -> Dispatched:
        return self.made[rank].dispatch(**self.given[number][rank], frame=self.frames[number])

    def combine(self, number: int, rank: int, batch: Dispatched, **others: object) -> torch.Tensor:
        return self.made[rank].combine(self.rows[number][rank], batch, dtype=self.dtype, **others)

    def compare(self, number: int, rank: int, batch: Dispatched, home: torch.Tensor) -> None:
        """With what must come, on the current stream; `check` tells."""
        for got, want in ((home, self.sums[number][rank]), (batch.tokens, self.tokens[number][rank])):
            pair = (one[: len(want)].view(torch.int16) for one in (got, want))
            self.wrong[rank] += torch.ne(*pair).sum()

    def run(self, steps: Iterable[Step]) -> None:
        """Have all ranks do them."""
        self._run(self.ranks, steps)

    def enqueue(self, number: int) -> None:
        """A round of all ranks, as of `fused`."""
        self.run(self.fused(number))

    def fused(self, number: int) -> list[Step]:
        """A dispatch and a combine, compared on the rank's stream with what must come. The host may wait for kernels in
        the comparison, so all ranks need to have the calls before."""
        batches, home = dict[int, Dispatched](), dict[int, torch.Tensor]()

        def dispatch(rank: int) -> None:
            batches[rank] = self.dispatch(number, rank)

        def combine(rank: int) -> None:
            home[rank] = self.combine(number, rank, batches[rank])

        def compare(rank: int) -> None:
            with stream_of(self.made[rank]):
                self.compare(number, rank, batches.pop(rank), home.pop(rank))

        return [dispatch, combine, compare]

    def halves(self, first: int, second: int) -> list[Step]:
        """The same of two rounds, with two outstanding of each phase, and the second one's sums twice."""
        rounds, made = (first, second), self.made
        sent = [dict[int, PendingDispatch]() for _ in rounds]
        batches = [dict[int, Dispatched]() for _ in rounds]
        turns = (0, 1, 1)  # the third lands where the first did
        back = [dict[int, PendingCombine]() for _ in turns]
        home = [dict[int, torch.Tensor]() for _ in turns]

        def send(turn: int, rank: int) -> None:
            given, frame = self.given[rounds[turn]][rank], self.frames[rounds[turn]]
            sent[turn][rank] = made[rank].dispatch_async(**given, frame=frame)

        def receive(turn: int, rank: int) -> None:
            batches[turn][rank] = made[rank].dispatch_wait(sent[turn].pop(rank))

        def give_back(combine: int, rank: int) -> None:
            turn = turns[combine]
            rows, batch = self.rows[rounds[turn]][rank], batches[turn][rank]
            back[combine][rank] = made[rank].combine_async(rows, batch)

        def take(combine: int, rank: int) -> None:
            home[combine][rank] = made[rank].combine_wait(back[combine].pop(rank), dtype=self.dtype)

        def compare(rank: int) -> None:
            with stream_of(made[rank]):
                for combine, turn in enumerate(turns):
                    self.compare(rounds[turn], rank, batches[turn][rank], home[combine].pop(rank))
            for batch in batches:
                del batch[rank]

        order = [(send, 0), (send, 1), (receive, 0), (receive, 1), (give_back, 0), (give_back, 1), (take, 0)]
        order += [(give_back, 2), (take, 1), (take, 2)]
        return [*(partial(half, which) for half, which in order), compare]

    def check(self) -> None:
        for ep in self.made:
            ep.synchronize()
        assert [int(one) for one in self.wrong] == [0] * len(self.made)


@contextmanager
def stream_of(ep: EPCommunicator) -> Iterator[None]:
    """The stream of a rank's calls, its device current; of a CPU nothing."""
    if ep.device.type == "cpu":
        yield
        return
    with torch.cuda.device(ep.device):
        stream = ep.stream if ep.shares_device and ep.stream else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            yield
