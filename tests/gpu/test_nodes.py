"""Several nodes on this machine's GPUs: virtual nodes in one process, whose rails copy between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError, EPTimeout
from cute_ep.api.interface import EPCommunicator
from cute_ep.runtime import connection
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_dispatched, check_round, poison, poisoned_buffers
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .conftest import connected as connected_ranks

SHAPES = [(2, 1), (2, 2), (3, 1), (2, 4), (4, 2)]
"""(nodes, ranks of each)."""
FORMATS = ("bf16", "fp8", "mxfp6_e2m3", "nvfp4", "nvfp4_row")
MOST = 37
HIDDEN = 1152


@pytest.fixture(autouse=True)
def nodes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "check_one_node", lambda cfg: None)


@contextmanager
def connected(cfg: EPConfig) -> Iterator[list[EPCommunicator]]:
    """Ranks on all GPUs of this worker, by turns; the ranks of a node next to each other."""
    devices = list(islice(cycle(range(torch.cuda.device_count())), cfg.world_size))
    with connected_ranks(cfg, [f"cuda:{index}" for index in sorted(devices)]) as made:
        yield made


def config(nodes: int, ranks: int, **changes: object) -> EPConfig:
    made = EPConfig(HIDDEN, 6 * nodes * ranks, 4, MOST, nodes * ranks, timeout_s=20, ranks_per_node=ranks)
    return replace(made, **changes)  # type: ignore[arg-type]


def inputs_of(cfg: EPConfig, seed: int) -> list[RankInputs]:
    tokens = [(0, MOST, 1, 17, 30)[(rank + seed) % 5] for rank in range(cfg.world_size)]
    return make_inputs(cfg, tokens, list(ROUTINGS)[seed % len(ROUTINGS)], seed)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "halves"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_have_the_bytes_of_the_reference(nodes: int, ranks: int, fmt: str, split: bool) -> None:
    """In poisoned memory with guard rows, over all kinds of routes; rows that come quantised, too."""
    cfg = config(nodes, ranks, dispatch_format=fmt)
    with connected(cfg) as made:
        for seed in range(len(ROUTINGS)):
            ready = fmt != "bf16" and seed % 2 == 1
            options = RoundOptions(split=split, modes=("partial",), prequantized=ready, seed=seed)
            check_round(made, inputs_of(cfg, seed), options)


@pytest.mark.parametrize("order", [{"row_order": "rank_major"}, {"block_rows": 128}, {"row_alignment": 64}], ids=str)
def test_other_orders_of_rows(order: dict) -> None:
    cfg = config(2, 2, dispatch_format="mxfp8", **order)
    with connected(cfg) as made:
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            check_round(made, inputs_of(cfg, seed), RoundOptions(modes=("partial",), dtype=dtype, seed=seed))


class Rounds:
    """Inputs, buffers and outputs of several rounds that are compared at the end."""

    def __init__(self, made: list[EPCommunicator], count: int, frames: list[int | None]) -> None:
        self.made, cfg = made, made[0].cfg
        self.cfg, self.frames = cfg, [frames[number % len(frames)] for number in range(count)]
        self.want, self.rows, self.given, self.out, self.sums = [], [], [], [], []
        for number, frame in enumerate(self.frames):
            on = [
                {k: v.to(ep.device) for k, v in vars(one).items()}
                for ep, one in zip(made, inputs_of(cfg, number), strict=True)
            ]
            columns = [[one[name].to(made[0].device) for one in on] for name in ("x", "topk_ids", "router_weights")]
            self.want.append(reference.dispatch(cfg, columns[0], columns[1], None, columns[2], frame=frame))
            rows = [
                torch.randn(int(b.num_rows) + 1, cfg.hidden, device=made[0].device).bfloat16() for b in self.want[-1]
            ]
            self.sums.append(reference.combine(cfg, rows, self.want[-1]))
            self.rows.append([one.to(ep.device) for one, ep in zip(rows, made, strict=True)])
            self.given.append(on)
            self.out.append([poisoned_buffers(ep, int(b.num_rows)) for ep, b in zip(made, self.want[-1], strict=True)])
        self.home = [[poison(torch.empty_like(one["x"])) for one in on] for on in self.given]

    def enqueue(self, number: int) -> None:
        """A dispatch and a combine on every rank."""
        batches = []
        for rank, ep in enumerate(self.made):
            given = self.given[number][rank] | {"frame": self.frames[number], "out": self.out[number][rank]}
            batches.append(ep.dispatch(**given))
        for rank, ep in enumerate(self.made):
            ep.combine(self.rows[number][rank], batches[rank], out=self.home[number][rank])
        self.batches = batches

    def check(self, number: int) -> None:
        for rank, one in enumerate(self.home[number]):
            assert_bits(one, self.sums[number][rank].to(one.device), f"round {number}, sums of rank {rank}")


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_many_rounds_that_nobody_synchronises(nodes: int, ranks: int) -> None:
    """A few rounds over and over, with frames of several lengths; now and then a rank is late."""
    with connected(config(nodes, ranks, dispatch_format="bf16")) as made:
        rounds = Rounds(made, 6, [None, MOST, MOST])
        torch.cuda.synchronize()
        for turn in range(170):
            if turn % 23 == 5:
                late = made[turn % len(made)]
                with torch.cuda.device(late.device), torch.cuda.stream(late.stream):
                    torch.cuda._sleep(2_000_000)
            rounds.enqueue(turn % 6)
        for ep in made:
            ep.synchronize()
        for number in range(6):
            rounds.check(number)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_graphs_with_any_number_of_calls_are_replayed(calls: int) -> None:
    """Also an odd number: consecutive rounds then use the same memory. Inputs change in place before each replay."""
    with connected(config(2, 2)) as made:
        rounds = Rounds(made, 4, [MOST])
        for number in range(4):  # first use of everything
            rounds.enqueue(number)
        for ep in made:
            ep.synchronize()
        device = made[0].device
        if any(ep.device != device for ep in made):
            pytest.skip("one graph holds the calls of one GPU's ranks")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(calls):
                rounds.enqueue(number)
            for ep in made:
                torch.cuda.current_stream().wait_stream(ep.stream)
        for _ in range(40):
            for number in range(calls):
                for one in rounds.home[number]:
                    poison(one)
            graph.replay()
        for ep in made:
            ep.synchronize()
        for number in range(calls):
            rounds.check(number)
            for rank, batch in enumerate(rounds.batches if number == calls - 1 else []):
                check_dispatched(batch, rounds.want[number][rank], made[0].cfg, rank)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(missing: int) -> None:
    with connected(config(2, 1, timeout_s=1)) as made:
        rounds = Rounds(made, 1, [None])
        ep = made[1 - missing]
        batch = ep.dispatch(**rounds.given[0][1 - missing])
        with pytest.raises(EPTimeout, match=rf"FRAME of rank {missing}: its frame of dispatch round 1 has not come"):
            ep.synchronize()
        with pytest.raises(EPTimeout, match="FRAME"):
            ep.combine(rounds.rows[0][1 - missing], batch)


def test_an_id_out_of_range_is_told_by_its_own_rank_alone() -> None:
    cfg = config(2, 2)
    with connected(cfg) as made:
        for ep in made:
            ids = torch.zeros(2, cfg.top_k, dtype=torch.int32, device=ep.device)
            ids[1, 2] = cfg.num_experts if ep.rank == 1 else 0
            ep.dispatch(torch.ones(2, cfg.hidden, device=ep.device).bfloat16(), ids)
        for ep in made:
            if ep.rank == 1:
                with pytest.raises(EPInputError, match=rf"flatten\(\)\[6\] = {cfg.num_experts}: must be -1 or in"):
                    ep.synchronize()
            else:
                ep.synchronize()
