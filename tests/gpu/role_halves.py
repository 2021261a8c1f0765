"""Halves of calls on one rank of a `Stage`, each ready to be launched: what its memory must hold before, the launch,
and what all memory and its outputs must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.rounds import PendingCombine, PendingDispatch
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.arena import has_whole_segments
from cute_ep.testing.compare import assert_bits, assert_untouched_behind
from cute_ep.testing.verify import POISON, check_dispatched, guarded, poisoned_buffers
from cute_ep.testing.workloads import ROUTINGS

from .arena_images import FEW_TOKENS, Image, signed
from .role_model import (
    LOST,
    Home,
    Rows,
    Sent,
    as_bfloat16,
    as_floats,
    begin_launch,
    end_launch,
    owners,
    receive_combine,
    receive_dispatch,
    returned_rows,
    send_combine,
    send_dispatch,
    weighted_sums,
)
from .role_stage import (
    SINGLE,
    Stage,
    draw_routes,
    draw_sent,
    encoded,
    expert_rows,
    random_rows,
    shapes,
    tokens_with_blanks,
)

LOST_ROW = 2**31 - 1
GARBAGE = 0x25A5A5A5
"""What stands in tensors of a batch where nobody may read."""
EXPERT_ROWS = 50
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Turn(NamedTuple):
    """A launch.

    Attributes:
        number: of the round.
        tokens: of ranks 0, 1, 2; of others in turn again.
        routing: as in ROUTINGS, or SINGLE, of rank 0; of others those that follow, or with `alike` the same.
        index: of the turn, the seed of what is drawn; even and odd ones differ in what a call is given.
    """

    number: int
    tokens: tuple[int, ...]
    routing: str
    index: int = 0
    alike: bool = False

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def routing_of(self, rank: int) -> str:
        names = [*ROUTINGS, SINGLE]
        return names[(names.index(self.routing) + (0 if self.alike else rank)) % len(names)]

    def slices_of(self, rank: int) -> int:
        """A choice of a played rank, as log2."""
        return (self.index + 2 * rank) % (6 if self.tokens_of(rank) <= FEW_TOKENS else 3)

    def home_of(self, rank: int, most: int) -> Home:
        """What a played rank gets back where ranks have at most so many tokens: every second one has flags if there is
        room for such rows, with as few slices as there are flags for."""
        tokens, log2 = self.tokens_of(rank), self.slices_of(rank)
        flagged = tokens > FEW_TOKENS or (most > FEW_TOKENS and (self.index + rank) % 2 == 0)
        return Home(tokens, log2 % 3 if flagged else log2, flagged)

    @property
    def received(self) -> int:
        """Rounds that the launching rank has received when it sends; in odd turns one is outstanding."""
        return max(self.number - 1 - self.index % 2, 0)


@dataclass
class Half:
    """A half of a call.

    Attributes:
        images: what all memory must hold, before the launch and, after `finish`, afterwards.
        start: launches it.
        finish: changes `images` to what it must leave.
        check: AssertionError unless outputs are right; the launch has ended.
        sent: what was sent before, by source, of a receiving dispatch.
    """

    stage: Stage
    images: list[Image]
    start: Callable[[], None]
    finish: Callable[[], None]
    check: Callable[[], None]
    sent: tuple[Sent, ...] = ()

    @property
    def own(self) -> Image:
        return self.images[self.stage.me]

    def run(self, when: str) -> list[Image]:
        """Launch it, and compare all memory and outputs. Returns what memory held before."""
        before = [image.copy() for image in self.images]
        self.stage.write(self.images)
        self.start()
        self.finish()
        self.stage.check(self.images, when)
        try:
            self.check()
        except AssertionError as error:
            raise AssertionError(f"{when}: {error}") from error
        return before


def dispatch_send(stage: Stage, turn: Turn) -> Half:
    """Rows that the kernel encodes, in odd turns rows that came encoded."""
    cfg, me, index, number = stage.cfg, stage.me, turn.index, turn.number
    stage.rank.tuning, slices = shapes(index)
    tokens = turn.tokens_of(me)
    ids, weights = draw_routes(cfg, me, tokens, turn.routing_of(me), index)
    ready = index % 2 == 1 and cfg.format.scale is not None
    factor = 2.0 ** (index - 2) if cfg.format.global_scale and not ready else None
    if ready:
        rows = random_rows(cfg, tokens, index)
        given = {"x": rows.payload, "scales": rows.scales, "row_scales": rows.row_scales}
        stored = Rows.of(rows)
    else:
        given = {"x": tokens_with_blanks(cfg, me, tokens, index)}
        given["input_scale"] = None if factor is None else torch.tensor([factor])
        stored = encoded(cfg, given["x"], 1.0 if factor is None else factor)
    given["topk_ids"] = ids.int() if index % 2 else ids
    given["router_weights"] = weights if index % 3 else None
    given = {name: one if one is None else one.to(stage.device) for name, one in given.items()}
    sent = Sent(ids, weights if index % 3 else None, stored, *slices(cfg, tokens), encoded=not ready)
    images = stage.images()
    begin_launch(images[me], "dispatch", number - 1, turn.received)
    images[me].signal(cfg.arena.dispatch_consumed.at(), max(number - 2, 0), cfg.world_size)

    def start() -> None:
        with stage.sent_only("dispatch"):
            stage.rank.dispatch_async(**given)

    def finish() -> None:
        for image in images:
            send_dispatch(image, me, sent, number)
        end_launch(images, me, "dispatch", sends=True, number=number, received=turn.received)

    return Half(stage, images, start, finish, lambda: None)


def dispatch_receive(stage: Stage, turn: Turn, *, tiled: bool = False) -> Half:
    """What the peers and the rank itself have sent is written by hand; rows hold any bytes."""
    cfg, me, number = stage.cfg, stage.me, turn.number
    stage.rank.tuning, _ = shapes(turn.index)
    drawn: list[tuple[Sent, QuantizedRows]] = []
    for source in range(cfg.world_size):
        log2 = turn.slices_of(source)
        log2s = (log2 if has_whole_segments(cfg.format) else 0), log2
        drawn.append(draw_sent(cfg, source, turn.tokens_of(source), turn.routing_of(source), turn.index, log2s))
    sent, rows = zip(*drawn, strict=True)
    images = stage.images()
    own = images[me]
    begin_launch(own, "dispatch", number, number - 1)
    own.await_few(cfg.arena.lamport_messages, number)
    for source, one in enumerate(sent):
        send_dispatch(own, source, one, number)
    scaled = cfg.format.scale is not None
    expected = reference.dispatch(
        cfg,
        [None if scaled else one.payload for one in rows],
        [one.topk_ids for one in sent],
        None,
        [one.weights for one in sent],
        rows if scaled else None,
    )[me]
    buffers = poisoned_buffers(stage.rank, int(expected.num_rows))
    mine = sent[me]
    weights = None if mine.weights is None else mine.weights.to(stage.device)
    pending = PendingDispatch(mine.topk_ids.to(stage.device), weights, mine.returned_log2, ())
    headers = torch.tensor([[signed(word, 32) for word in one.header(number)] for one in sent]).int()
    received: list[Dispatched] = []

    def start() -> None:
        stage.rounds("dispatch").count_sent(pending)
        received.append(stage.rank.dispatch_wait(pending, buffers))

    def finish() -> None:
        receive_dispatch(own, sent, number, tiled=tiled)
        end_launch(images, me, "dispatch", sends=False, number=number, received=number - 1)

    def check() -> None:
        check_dispatched(received[0], expected, cfg, me)
        assert_bits(received[0].headers, headers, "headers")

    return Half(stage, images, start, finish, check, sent)


def _batch(
    stage: Stage, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, log2: int, left: dict[str, torch.Tensor]
) -> Dispatched:
    """A batch of this rank put together from tensors; `left`: what dispatch has left for combine."""
    tensors = {"tokens": rows, "row_offsets": torch.zeros(stage.cfg.groups + 1, dtype=torch.int32)} | left
    on_device = {name: one.to(stage.device) for name, one in tensors.items()}
    given = {"topk_ids": ids.to(stage.device), "router_weights": weights.to(stage.device)}
    return Dispatched.of_tensors(on_device, rank=stage.me, return_slices_log2=log2, **given)


def combine_send(stage: Stage, turn: Turn, mode: str) -> Half:
    """Of a batch that is written by hand: rows in any order, some twice, some lost."""
    cfg, me, number, partial = stage.cfg, stage.me, turn.number, mode == "partial"
    stage.rank.tuning, _ = shapes(turn.index)
    generator = torch.Generator().manual_seed(turn.index)
    rows = expert_rows(EXPERT_ROWS, cfg.hidden, generator)
    routes = [
        draw_routes(cfg, rank, turn.tokens_of(rank), turn.routing_of(rank), turn.index)
        for rank in range(cfg.world_size)
    ]
    homes = [turn.home_of(rank, cfg.max_tokens_per_rank) for rank in range(cfg.world_size)]
    shape = cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k
    row_map = torch.full(shape, GARBAGE, dtype=torch.int32)
    weights = row_map.clone().view(torch.float32)
    for source, (ids, of_source) in enumerate(routes):
        found = torch.randint(EXPERT_ROWS, ids.shape, generator=generator)
        found[5::13] = LOST_ROW
        row_map[source, : len(ids)] = torch.where(owners(cfg, ids) == me, found, -1).int()
        weights[source, : len(ids)] = of_source
    dispatch_round = 7 * turn.index
    headers = [[home.tokens, GARBAGE, dispatch_round + (rank != me), home.word] for rank, home in enumerate(homes)]
    left = {"row_map": row_map, "headers": torch.tensor(headers).int(), "weights": weights}
    given = rows.view(torch.bfloat16).to(stage.device)
    batch = _batch(stage, given, *routes[me], homes[me].log2, left)
    images = stage.images()
    begin_launch(images[me], "combine", number - 1, turn.received)
    images[me].signal(cfg.arena.combine_consumed.at(), max(number - 2, 0), cfg.world_size)

    def slots(source: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = row_map[source, :tokens] >= 0
        found = returned_rows(rows, row_map[source, :tokens])
        if not partial:
            return where, found
        sums = as_bfloat16(weighted_sums(found, weights[source, :tokens], where))
        of_me = torch.arange(cfg.world_size) == me
        return where.any(dim=1, keepdim=True) & of_me, sums[:, None].expand(-1, cfg.world_size, -1)

    def start() -> None:
        with stage.sent_only("combine"):
            stage.rank.combine_async(given, batch, mode)

    def finish() -> None:
        spans = any(home.flagged for home in homes)
        for source, (image, home) in enumerate(zip(images, homes, strict=True)):
            how = {"dispatch_round": dispatch_round, "partial": partial, "spans": spans}
            send_combine(image, me, home, number, slots=slots(source, home.tokens), **how)
        end_launch(images, me, "combine", sends=True, number=number, received=turn.received)

    return Half(stage, images, start, finish, lambda: None)


def rounded(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 in a type of combine's output, with its one NaN."""
    if dtype == torch.bfloat16:
        return as_bfloat16(sums).view(dtype)
    bits, nan = (torch.int16, LOST) if dtype == torch.float16 else (torch.int32, 0x7FFFFFFF)
    return torch.where(sums.isnan(), nan, sums.to(dtype).view(bits)).to(bits).view(dtype)


def combine_receive(stage: Stage, turn: Turn, mode: str) -> Half:
    """What the peers and the rank itself return is written by hand; rows hold any bytes, sums no word of ones."""
    cfg, me, number, partial = stage.cfg, stage.me, turn.number, mode == "partial"
    stage.rank.tuning, _ = shapes(turn.index)
    generator = torch.Generator().manual_seed(turn.index)
    ids, weights = draw_routes(cfg, me, turn.tokens_of(me), turn.routing_of(me), turn.index)
    home = Home(len(ids), turn.slices_of(me), len(ids) > FEW_TOKENS)
    owner = owners(cfg, ids)
    ranks = torch.arange(cfg.world_size)
    here = owner[:, :, None] == ranks  # [T, K, R]
    where = here.any(dim=1) if partial else here.any(dim=2)
    rows = expert_rows(where.numel(), cfg.hidden, generator).view(*where.shape, cfg.hidden)
    if partial:
        rows[rows.view(torch.int32).repeat_interleave(2, dim=2) == -1] = LOST
    images = stage.images()
    own = images[me]
    begin_launch(own, "combine", number, number - 1)
    own.await_few(cfg.arena.lamport_returns, number)
    for rank in range(cfg.world_size):
        mine = where & ((ranks == rank) if partial else (owner == rank))
        told = 0 if turn.index % 2 and rank == 0 else number + 3
        how = {"dispatch_round": told, "partial": partial, "spans": turn.index % 3 == 1}
        send_combine(own, rank, home, number, slots=(mine, rows), **how)
    dtype = DTYPES[turn.index % len(DTYPES)]
    if mode == "unweighted":
        kept = torch.where(where[:, :, None], rows, 0)
        expected = as_floats(kept)
        if dtype == torch.bfloat16:
            expected = kept.view(dtype)
        elif dtype == torch.float16:
            expected = rounded(expected, dtype)
    else:
        expected = rounded(weighted_sums(rows, None if partial else weights, where), dtype)
    given = torch.zeros(EXPERT_ROWS, cfg.hidden, dtype=torch.bfloat16, device=stage.device)
    routed = cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k
    nothing = torch.full(routed, GARBAGE, dtype=torch.int32)
    headers = torch.full((cfg.world_size, 4), GARBAGE, dtype=torch.int32)
    left = {"row_map": nothing, "headers": headers, "weights": nothing.view(torch.float32)}
    batch = _batch(stage, given, ids, weights, home.log2, left)
    pending = PendingCombine(batch, mode, given)
    out = guarded(expected.shape, dtype, stage.device)

    def start() -> None:
        stage.rounds("combine").count_sent(pending)
        stage.rank.combine_wait(pending, out=out)

    def finish() -> None:
        receive_combine(own, home, where, number, partial=partial)
        end_launch(images, me, "combine", sends=False, number=number, received=number - 1)

    def check() -> None:
        assert_bits(out, expected, f"combine {mode}")
        assert_untouched_behind({f"combine {mode}": out}, POISON)

    return Half(stage, images, start, finish, check)
