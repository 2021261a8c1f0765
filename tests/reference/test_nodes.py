"""Several nodes on CPU ranks: the same bytes as one-node calls put together by hand, and sums within their bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.rounds import PendingDispatch
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.reference.backend import connect_reference
from cute_ep.reference.formats import round_to
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .ranks import at_once, check_filled, poisoned, processes, rows_for

SHAPES = [(2, 1), (2, 2), (3, 1), (2, 4), (4, 2)]
"""(nodes, ranks of each)."""
ORDERS = {
    "expert_major": {},
    "padded": {"row_alignment": 64},
    "expert_blocks": {"block_rows": 128},
    "rank_major": {"row_order": "rank_major"},
    "rank_blocks": {"row_order": "rank_major", "block_rows": 128},
}
FORMATS_AND_ORDERS = [
    (fmt, order) for fmt in FORMATS for order in (ORDERS if fmt in ("bf16", "nvfp4_row") else ("expert_major",))
]
TOKENS = 5
MODES = ("exact", "partial", "unweighted")


def nodes_config(nodes: int, ranks: int, **changes: object) -> EPConfig:
    made = EPConfig(128, 3 * nodes * ranks, 3, TOKENS, nodes * ranks, ranks_per_node=ranks)
    return replace(made, **changes)


def draw_inputs(cfg: EPConfig, routing: str, seed: int) -> list[RankInputs]:
    """Uneven batches, some of no token and some of the most."""
    random = Random(seed)
    tokens = [random.choice((0, 1, TOKENS, random.randint(0, TOKENS))) for _ in range(cfg.world_size)]
    given = make_inputs(cfg, tokens, "uniform" if routing == "one_node" else routing, seed)
    if routing == "one_node":
        experts = cfg.peers * cfg.local_experts
        given = [replace(one, topk_ids=one.topk_ids % experts + experts * (cfg.nodes - 1)) for one in given]
    return given


def dispatch(cfg: EPConfig, given: list[RankInputs], frame: int | None = None) -> list[Dispatched]:
    xs, ids, weights = ([getattr(one, name) for one in given] for name in ("x", "topk_ids", "router_weights"))
    return reference.dispatch(cfg, xs, ids, None, weights, frame=frame)


class ByHand:
    """Calls of one node each, to which the frames of a rail are one rank's tokens."""

    def __init__(self, cfg: EPConfig, frame: int | None = None) -> None:
        self.cfg, self.experts, self.frame = cfg, cfg.num_experts // cfg.nodes, frame or cfg.max_tokens_per_rank
        most = cfg.nodes * cfg.max_tokens_per_rank
        self.node = replace(
            cfg, num_experts=self.experts, world_size=cfg.peers, max_tokens_per_rank=most, ranks_per_node=None
        )

    def frames(self, given: list[torch.Tensor], value: int) -> list[torch.Tensor]:
        """What each rank of a node brings: of the ranks of its rail, with `value` up to the frame's rows."""
        whole = [torch.full((self.frame, *one.shape[1:]), value, dtype=one.dtype) for one in given]
        for frame, one in zip(whole, given, strict=True):
            frame[: len(one)] = one
        return [torch.cat(whole[peer :: self.cfg.peers]) for peer in range(self.cfg.peers)]

    def dispatch(self, given: list[RankInputs]) -> list[Dispatched]:
        xs, weights = self.frames([one.x for one in given], 0), self.frames([one.router_weights for one in given], 1)
        batches = []
        for node in range(self.cfg.nodes):
            first = node * self.experts
            local = [
                torch.where((one.topk_ids >= first) & (one.topk_ids < first + self.experts), one.topk_ids - first, -1)
                for one in given
            ]
            batches += reference.dispatch(self.node, xs, self.frames(local, -1), None, weights)
        return batches

    def partial(self, rows: list[torch.Tensor], batches: list[Dispatched], tokens: list[int]) -> list[torch.Tensor]:
        """Sums of nodes, which are bfloat16, added from node 0 on in float32 and rounded once."""
        peers, most = self.cfg.peers, self.frame
        of_nodes = []
        for first in range(0, self.cfg.world_size, peers):
            here = slice(first, first + peers)
            of_nodes.append(reference.combine(self.node, rows[here], batches[here], mode="partial"))
        results = []
        for rank, count in enumerate(tokens):
            node, peer = divmod(rank, peers)
            total = torch.zeros(count, self.cfg.hidden)
            for sums in of_nodes:
                total = total + sums[peer][node * most :][:count].float()
            results.append(round_to(total, torch.bfloat16))
        return results


@pytest.mark.parametrize(("fmt", "order"), FORMATS_AND_ORDERS)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_bytes_are_those_of_one_node_calls_put_together(nodes: int, ranks: int, fmt: str, order: str) -> None:
    """Every tensor of every rank and the partial sums, in each format and order, over all kinds of routes."""
    cfg = nodes_config(nodes, ranks, dispatch_format=fmt, max_tokens_per_rank=TOKENS + 2, **ORDERS[order])
    for seed, routing in enumerate([*ROUTINGS, "one_node"]):
        given, frame = draw_inputs(cfg, routing, seed), (None, TOKENS)[seed % 2]
        by_hand = ByHand(cfg, frame)
        got, want = dispatch(cfg, given, frame), by_hand.dispatch(given)
        for rank, (batch, other) in enumerate(zip(got, want, strict=True)):
            for name in BUFFERS:
                value = other.topk_ids if name == "frame_ids" else getattr(other, name)
                if value is None:
                    assert getattr(batch, name) is None
                else:
                    assert_bits(getattr(batch, name), value, f"{routing}: rank {rank}, {name}")
        rows, tokens = rows_for(got, cfg, seed), [len(one.x) for one in given]
        sums = reference.combine(cfg, rows, got)
        for rank, (one, other) in enumerate(zip(sums, by_hand.partial(rows, want, tokens), strict=True)):
            assert_bits(one, other, f"{routing}: sums of rank {rank}")


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_exact_sums_and_rows_do_not_depend_on_where_nodes_end(nodes: int, ranks: int) -> None:
    """They have the bits of one node; so have partial sums where a rank is a node, which rounds them twice alike."""
    several = nodes_config(nodes, ranks)
    one = replace(several, ranks_per_node=None)
    given, sums = draw_inputs(several, "uniform", 1), {}
    for cfg in (several, one):
        batches = dispatch(cfg, given)
        rows = [expert_outputs(cfg, batch) for batch in batches]
        sums[cfg] = {mode: reference.combine(cfg, rows, batches, mode=mode) for mode in MODES}
    for mode in MODES:
        if mode != "partial" or ranks == 1:
            for rank, pair in enumerate(zip(sums[several][mode], sums[one][mode], strict=True)):
                assert_bits(*pair, f"{mode}, rank {rank}")


def expert_outputs(cfg: EPConfig, batch: Dispatched) -> torch.Tensor:
    """What depends on a row of bfloat16 and its expert alone."""
    local = torch.bucketize(torch.arange(len(batch.tokens)), batch.row_offsets[1:], right=True)
    return (batch.tokens.float() * (1 + batch.rank * cfg.local_experts + local)[:, None]).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_sums_are_within_their_bound_and_near_it(nodes: int, ranks: int, dtype: torch.dtype) -> None:
    cfg = nodes_config(nodes, ranks, top_k=8, num_experts=24 * nodes * ranks)
    batches = dispatch(cfg, make_inputs(cfg, [TOKENS] * cfg.world_size, "uniform", 3))
    rows, nearest = rows_for(batches, cfg, 4), 0.0
    sums, bounds = (
        make(cfg, rows, batches, dtype=dtype) for make in (reference.combine, reference.combine_error_bound)
    )
    for one, (value, bound) in zip(sums, bounds, strict=True):
        assert reference.within(one, value, bound).all()
        nearest = max(nearest, float(((one.double() - value).abs() / bound).max()))
    assert nearest > 0.3


MISTAKES = {
    "top_k = 3: must be an integer in [1, 2] (num_experts = 16 over 8 nodes)": {"top_k": 3, "ranks_per_node": 1},
    "ranks_per_node = 3: must divide world_size = 8": {"ranks_per_node": 3},
    "ranks_per_node = 0: must be an integer in [1, 32]": {"ranks_per_node": 0},
    "ranks_per_node = 2.0: must be an integer in [1, 32]": {"ranks_per_node": 2.0},
    "ranks_per_node = 64: must be an integer in [1, 32]": {
        "ranks_per_node": 64,
        "world_size": 128,
        "num_experts": 128,
    },
    "world_size = 64: must be an integer in [1, 32] on one node; set ranks_per_node for several": {
        "world_size": 64,
        "num_experts": 64,
    },
    "world_size = 1025: must be an integer in [1, 1024]": {"world_size": 1025, "ranks_per_node": 1},
    "max_tokens_per_rank = 8192: must leave nodes * max_tokens_per_rank = 65536 within 32768": {
        "max_tokens_per_rank": 8192,
        "ranks_per_node": 1,
    },
    "max_tokens_per_rank = 0: must be an integer in [1, 8192]": {"max_tokens_per_rank": 0, "ranks_per_node": 2},
    "skip_a2a = True: must be False over 2 nodes": {"skip_a2a": True, "ranks_per_node": 4},
    "fused_shared_expert = True: must be False over 2 nodes": {"fused_shared_expert": True, "ranks_per_node": 4},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_nodes_cannot_have_is_refused_by_its_rule(message: str) -> None:
    with pytest.raises(EPConfigError) as caught:
        replace(EPConfig(256, 16, 2, 8, 8), **MISTAKES[message])
    assert str(caught.value) == message


def test_one_node_is_none_and_many_ranks_go_with_small_nodes() -> None:
    one = EPConfig(256, 8, 2, 8, 8, ranks_per_node=8)
    assert one.ranks_per_node is None and one == EPConfig(256, 8, 2, 8, 8) and (one.nodes, one.peers) == (1, 8)
    assert replace(one, world_size=2).peers == 2
    many = EPConfig(256, 1024, 2, 32, 1024, ranks_per_node=8)
    assert (many.nodes, many.peers, many.max_tokens_per_peer) == (128, 8, 4096)
    assert [many.node(rank) for rank in (0, 7, 8, 1023)] == [0, 0, 1, 127]


def test_a_function_over_the_sums_is_refused_over_nodes() -> None:
    cfg = nodes_config(2, 2)
    batches = dispatch(cfg, draw_inputs(cfg, "uniform", 0))
    with pytest.raises(EPInputError, match=r"^epilogue = function: must be None over 2 nodes$"):
        reference.combine(cfg, rows_for(batches, cfg), batches, epilogue=lambda rank, sums: sums)


# ---- communicators


class Rounds:
    """Two rounds of a group of communicators, whose calls wait where each has a process of its own."""

    def __init__(self, cfg: EPConfig, made: list, seed: int) -> None:
        self.cfg, self.made, self.ranks = cfg, made, range(cfg.world_size)
        self.given = [draw_inputs(cfg, "uniform", seed + number) for number in range(2)]
        self.frames = [cfg.max_tokens_per_rank - number for number in range(2)]
        self.batches = [dispatch(cfg, *round_) for round_ in zip(self.given, self.frames, strict=True)]
        self.rows = [rows_for(batches, cfg, seed) for batches in self.batches]

    def on_all(self, call: Callable[[int], Any]) -> list:
        """What call(rank) returns for every rank."""
        done = [call(rank) for rank in self.ranks] if self.made[0].shares_device else at_once(self.ranks, call)
        for one in done:
            if isinstance(one, Exception):
                raise one
        return done

    def arguments(self, number: int, rank: int) -> dict[str, Any]:
        return vars(self.given[number][rank]) | {"frame": self.frames[number]}

    def check(self) -> None:
        """Fused calls, plans, and halves of two rounds at a time, against the functions."""
        made = self.made
        fused = self.on_all(lambda rank: made[rank].dispatch(**self.arguments(0, rank), out=poisoned(made[rank])))
        plans = self.on_all(lambda rank: made[rank].plan_dispatch(**self.arguments(1, rank)).launch())
        sent = [self.on_all(partial(self.send, number)) for number in range(2)]
        halves = [self.on_all(partial(self.receive, pending)) for pending in sent]
        received = [(0, fused), (1, plans), *enumerate(halves)]
        for number, batches in received[:1] + received[2:]:
            for rank in self.ranks:
                check_filled(self.cfg, batches[rank], self.batches[number][rank], f"round {number}, rank {rank}")
        for mode in MODES:
            self.check_sums(mode, received)
        for one in made:
            one.synchronize()

    def send(self, number: int, rank: int) -> PendingDispatch:
        return self.made[rank].dispatch_async(**self.arguments(number, rank))

    def receive(self, pending: list, rank: int) -> Dispatched:
        return self.made[rank].dispatch_wait(pending[rank], poisoned(self.made[rank]))

    def check_sums(self, mode: str, received: list[tuple[int, list[Dispatched]]]) -> None:
        made, rows = self.made, self.rows
        (_, fused), (_, plans), *halves = received
        back = [
            self.on_all(lambda rank, n=number, b=batches: made[rank].combine_async(rows[n][rank], b[rank], mode))
            for number, batches in halves
        ]
        home = [self.on_all(lambda rank, p=pending: made[rank].combine_wait(p[rank])) for pending in back]
        home.append(self.on_all(lambda rank: made[rank].combine(rows[0][rank], fused[rank], mode=mode)))
        home.append(self.on_all(lambda rank: made[rank].plan_combine(rows[1][rank], plans[rank], mode=mode).launch()))
        want = [reference.combine(self.cfg, *one, mode=mode) for one in zip(rows, self.batches, strict=True)]
        for number, results in zip((0, 1, 0, 1), home, strict=True):
            for rank in self.ranks:
                assert_bits(results[rank], want[number][rank], f"{mode}, round {number}, rank {rank}")


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4_row"])
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_ranks_of_one_process_make_rounds_over_nodes(nodes: int, ranks: int, fmt: str) -> None:
    cfg = nodes_config(nodes, ranks, dispatch_format=fmt, max_tokens_per_rank=TOKENS + 1)
    Rounds(cfg, connect_reference(cfg), 5).check()


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 1)])
def test_processes_make_rounds_over_nodes(nodes: int, ranks: int) -> None:
    cfg = nodes_config(nodes, ranks, timeout_s=60, max_tokens_per_rank=TOKENS + 1)
    with processes(cfg) as made:
        Rounds(cfg, made, 9).check()


def test_an_id_out_of_range_is_told_by_its_own_rank_alone() -> None:
    cfg = nodes_config(2, 2)
    made, x = connect_reference(cfg), torch.ones(1, cfg.hidden).bfloat16()
    for ep in made:
        wrong = cfg.num_experts if ep.rank == 1 else 0
        ep.dispatch(x, torch.full((1, cfg.top_k), wrong, dtype=torch.int32))
    for ep in made:
        if ep.rank == 1:
            with pytest.raises(EPInputError, match="12"):
                ep.synchronize()
        else:
            ep.synchronize()


def test_a_frame_has_room_for_the_tokens_and_is_the_same_on_all_ranks() -> None:
    cfg = nodes_config(2, 2)
    made, x = connect_reference(cfg), torch.ones(3, cfg.hidden).bfloat16()
    ids = torch.zeros(3, cfg.top_k, dtype=torch.int32)
    for wrong in (2, 6, 0, 3.0, True):
        with pytest.raises(
            EPInputError, match=rf"^frame = {wrong}: must be an integer from x.shape\[0\] = 3 to max.* 5$"
        ):
            made[0].dispatch(x, ids, frame=wrong)
    made[0].dispatch(x, ids)  # as with 5
    made[1].dispatch(x, ids, frame=5)
    with pytest.raises(EPInputError, match=r"^frame = 4: must be 5, as in the dispatch of rank 0$"):
        made[2].dispatch(x, ids, frame=4)
    for ep in made[2:]:
        ep.dispatch(x, ids, frame=5)
    for ep in made:
        ep.synchronize()


def test_processes_whose_frames_differ_are_all_told() -> None:
    cfg = nodes_config(2, 1, timeout_s=60)
    x, ids = torch.ones(3, cfg.hidden).bfloat16(), torch.zeros(3, cfg.top_k, dtype=torch.int32)
    with processes(cfg) as made:
        for error in at_once(range(2), lambda rank: made[rank].dispatch(x, ids, frame=3 + rank)):
            assert isinstance(error, EPInputError) and "frame = " in str(error), error


def test_on_one_node_a_frame_changes_nothing() -> None:
    cfg = replace(nodes_config(2, 1), ranks_per_node=None)
    given = draw_inputs(cfg, "uniform", 0)
    for one, other in zip(dispatch(cfg, given), dispatch(cfg, given, TOKENS), strict=True):
        assert_bits(one.row_map, other.row_map, "row_map")
