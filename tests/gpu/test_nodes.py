"""Several nodes on this machine's GPUs: virtual nodes in one process, whose rails copy between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError, EPTimeout
from cute_ep.api.interface import EPCommunicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_round, poison, poisoned_buffers
from cute_ep.testing.workloads import ROUTINGS
from tests.strided_rows import TAKEN

from .conftest import connected as connected_ranks
from .node_rounds import FRAMES, HIDDEN, MOST, Rounds, config, inputs_of, stream_of
from .queues import run_with_queues
from .test_strided_rows import check_views

SHAPES = [(2, 1), (2, 2), (3, 1), (2, 4), (4, 2)]
"""(nodes, ranks of each)."""
FORMATS = ("bf16", "fp8", "mxfp6_e2m3", "nvfp4", "nvfp4_row")


@contextmanager
def connected(cfg: EPConfig) -> Iterator[list[EPCommunicator]]:
    """Ranks on all GPUs of this worker, by turns; the ranks of a node next to each other."""
    devices = list(islice(cycle(range(torch.cuda.device_count())), cfg.world_size))
    with connected_ranks(cfg, [f"cuda:{index}" for index in sorted(devices)]) as made:
        yield made


@pytest.mark.parametrize("split", [False, True], ids=["fused", "halves"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_have_the_bytes_of_the_reference(nodes: int, ranks: int, fmt: str, split: bool) -> None:
    """In poisoned memory with guard rows, over all kinds of routes; rows that come quantised, too."""
    cfg = config(nodes, ranks, dispatch_format=fmt)
    with connected(cfg) as made:
        for seed in range(len(ROUTINGS)):
            ready = fmt != "bf16" and seed % 2 == 1
            frame = FRAMES[seed % len(FRAMES)]
            options = RoundOptions(split=split, modes=("partial",), prequantized=ready, seed=seed, frame=frame)
            check_round(made, inputs_of(cfg, seed), options)


@pytest.mark.parametrize("order", [{"row_order": "rank_major"}, {"block_rows": 128}, {"row_alignment": 64}], ids=str)
def test_other_orders_of_rows(order: dict) -> None:
    cfg = config(2, 2, dispatch_format="mxfp8", **order)
    with connected(cfg) as made:
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            check_round(made, inputs_of(cfg, seed), RoundOptions(modes=("partial",), dtype=dtype, seed=seed))


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_many_rounds_that_nobody_synchronises(nodes: int, ranks: int) -> None:
    """Over and over, with frames of several lengths, each output compared; now and then a rank is late."""
    with connected(config(nodes, ranks)) as made:
        rounds = Rounds(made, 6, FRAMES)
        torch.cuda.synchronize()
        for turn in range(170):
            if turn % 23 == 5:
                with stream_of(made[turn % len(made)]):
                    torch.cuda._sleep(2_000_000)
            rounds.enqueue(turn % 6)
        rounds.check()


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_graphs_with_any_number_of_calls_are_replayed(calls: int) -> None:
    """Also an odd number: rounds that follow each other then use the same memory. Before each replay the tokens of each
    rank change places, and outputs are poisoned."""
    with connected(config(2, 2)) as made:
        device = made[0].device
        if any(ep.device != device for ep in made):
            pytest.skip("one graph holds the calls of one GPU's ranks")
        rounds = Rounds(made, calls, [MOST])
        rounds.enqueue(0)  # first use of everything
        rounds.check()
        static = [[{name: t.clone() for name, t in one.items()} for one in on] for on in rounds.given]
        buffers = [[poisoned_buffers(ep, int(b.num_rows)) for ep, b in zip(made, w, strict=True)] for w in rounds.want]
        home = [[torch.empty_like(one["x"]) for one in on] for on in static]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(calls):
                batches = [
                    ep.dispatch(**static[number][rank], frame=MOST, out=buffers[number][rank])
                    for rank, ep in enumerate(made)
                ]
                for rank, ep in enumerate(made):
                    ep.combine(rounds.rows[number][rank], batches[rank], out=home[number][rank])
            for ep in made:
                torch.cuda.current_stream().wait_stream(ep.stream)
        for turn in range(20):
            for number in range(calls):
                for rank in range(len(made)):
                    x = rounds.given[number][rank]["x"]
                    static[number][rank]["x"].copy_(x.flip(0) if turn % 2 else x)
                    poison(home[number][rank])
                    poison(buffers[number][rank].tokens)
            graph.replay()
            for ep in made:
                ep.synchronize()
            for number in range(calls):
                check_replay(made, static[number], buffers[number], home[number], rounds.rows[number])


def check_replay(made: list, given: list[dict], buffers: list, home: list, rows: list) -> None:
    """One round of a replay against the reference."""
    cfg = made[0].cfg
    columns = [[one[name] for one in given] for name in ("x", "topk_ids", "router_weights")]
    want = reference.dispatch(cfg, columns[0], columns[1], None, columns[2], frame=MOST)
    for rank, sums in enumerate(reference.combine(cfg, rows, want)):
        used = int(want[rank].num_rows)
        assert_bits(buffers[rank].tokens[:used], want[rank].tokens, f"rows of rank {rank}")
        assert_bits(home[rank], sums, f"sums of rank {rank}")


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


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4_row"])
def test_rows_that_lie_apart(fmt: str) -> None:
    """To encode, and quantised; a rank has another view than the next one."""
    cfg, names = config(2, 2, dispatch_format=fmt), list(TAKEN)
    with connected(cfg) as made:
        for turn in range(len(names)):
            views = [TAKEN[names[(turn + rank) % len(names)]] for rank in range(len(made))]
            check_views(made, MOST, views, quantised=fmt != "bf16" and turn % 2 == 1, split=turn % 3 == 0)


def test_ids_of_64_bits() -> None:
    cfg = config(2, 2)
    with connected(cfg) as made:
        rounds = Rounds(made, 6, FRAMES)
        for given in rounds.given:
            for one in given:
                one["topk_ids"] = one["topk_ids"].long()
        for number in range(6):
            rounds.enqueue(number)
        rounds.check()
        for ep in made:
            ids = torch.zeros(2, cfg.top_k, dtype=torch.int64, device=ep.device)
            ids[1, 1] = 2**40 + 1 if ep.rank == 2 else 1
            ep.dispatch(torch.ones(2, cfg.hidden, device=ep.device).bfloat16(), ids)
        for ep in made:
            if ep.rank == 2:
                with pytest.raises(EPInputError, match=r"^rank 2: topk_ids.flatten\(\)\[5\] = .* or beyond 32 bits"):
                    ep.synchronize()
            else:
                ep.synchronize()


def test_a_wrong_out_is_refused_before_anything_is_sent() -> None:
    """By one rank while nobody else calls, who would be waited for; then all ranks go on."""
    with connected(config(2, 2)) as made:
        rounds, ranks = Rounds(made, 6, FRAMES), range(len(made))
        rounds.enqueue(0)
        rounds.check()
        ep, given = made[1], rounds.given[1][1] | {"frame": rounds.frames[1]}
        before = ep.mail.words()
        wrong = replace(ep.allocate(), num_rows=torch.zeros(1, device=ep.device))
        for call in (ep.dispatch, ep.plan_dispatch):
            with pytest.raises(EPInputError, match=r"^out\.num_rows"):
                call(**given, out=wrong)
        ep.synchronize()
        assert ep.mail.words() == before
        sent = [one.dispatch_async(**rounds.given[1][rank], frame=rounds.frames[1]) for rank, one in enumerate(made)]
        with pytest.raises(EPInputError, match=r"^out\.num_rows"):
            ep.dispatch_wait(sent[1], wrong)
        batches = [one.dispatch_wait(sent[rank]) for rank, one in enumerate(made)]
        sums = torch.zeros(len(given["x"]) + 1, HIDDEN, device=ep.device).bfloat16()
        with pytest.raises(EPInputError, match=r"^out"):
            rounds.combine(1, 1, batches[1], out=sums)
        pending = [one.combine_async(rounds.rows[1][rank], batches[rank]) for rank, one in enumerate(made)]
        with pytest.raises(EPInputError, match=r"^out"):
            ep.combine_wait(pending[1], out=sums)
        home = [one.combine_wait(pending[rank]) for rank, one in enumerate(made)]
        for rank in ranks:
            with stream_of(made[rank]):
                rounds.compare(1, rank, batches[rank], home[rank])
        for number in range(2, 6):
            rounds.enqueue(number)
        rounds.check()


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_dispatch_on_one_stream_and_combine_on_another(nodes: int, ranks: int) -> None:
    """The next dispatch need not wait for the combine before, which is now and then late."""
    with connected(config(nodes, ranks)) as made:
        if any(ep.shares_device for ep in made):
            pytest.skip("ranks that share a GPU have one stream each")
        rounds = Rounds(made, 6, FRAMES)
        streams = [tuple(torch.cuda.Stream(ep.device) for _ in range(2)) for ep in made]
        for ep in made:
            torch.cuda.synchronize(ep.device)
        for turn in range(120):
            number, batches, home = turn % 6, [], []
            for rank, (first, _) in enumerate(streams):
                with torch.cuda.stream(first):
                    batches.append(rounds.dispatch(number, rank))
            for rank, (first, second) in enumerate(streams):
                second.wait_stream(first)
                with torch.cuda.stream(second):
                    if turn % 7 == rank:
                        torch.cuda._sleep(2_000_000)
                    home.append(rounds.combine(number, rank, batches[rank]))
            for rank, (_, second) in enumerate(streams):
                with torch.cuda.stream(second):
                    rounds.compare(number, rank, batches[rank], home[rank])
                    for tensor in tensors_of(batches[rank].buffers).values():
                        if tensor is not None:
                            tensor.record_stream(second)
        rounds.check()


@pytest.mark.parametrize("reads", ["late", "early"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 1)])
def test_many_rounds_in_a_storm(nodes: int, ranks: int, reads: str) -> None:
    """Mail comes in parts, in any order and late (`tests.storm_rail`)."""
    run_with_queues("storm", nodes, ranks, reads, 2000)
