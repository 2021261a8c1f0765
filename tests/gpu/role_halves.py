"""Halves of calls on one rank of a `Stage`: each is a `Launch`."""

from __future__ import annotations

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.rounds import PendingCombine, PendingDispatch
from cute_ep.api.types import CombineMode
from cute_ep.testing.verify import guarded, poisoned_buffers

from .arena_images import FEW_TOKENS
from .role_given import (
    DTYPES,
    EXPERT_ROWS,
    GARBAGE,
    batch_of,
    check_received,
    check_sums,
    draw_batch,
    draw_given,
    draw_played,
    draw_slots,
    peers_have_read,
    play_returns,
    received_by,
    send_returns,
)
from .role_launch import Launch, Turn
from .role_model import (
    Home,
    begin_launch,
    end_launch,
    receive_combine,
    receive_dispatch,
    send_dispatch,
)
from .role_schedules import HALVES
from .role_stage import Stage, draw_routes


def dispatch_send(stage: Stage, turn: Turn) -> Launch:
    """What `draw_given` gives."""
    cfg, me, number = stage.cfg, stage.me, turn.number
    stage.rank.tuning, slices = HALVES.shapes(turn.index)
    given = draw_given(stage, turn, slices(cfg, turn.tokens_of(me), stage.lamport_home))
    images = stage.images()
    begin_launch(images[me], "dispatch", number - 1, turn.received)
    peers_have_read(images[me], "dispatch", number)

    def start() -> None:
        with stage.sent_only("dispatch"):
            stage.rank.dispatch_async(**given.arguments)

    def finish() -> None:
        for image in images:
            send_dispatch(image, me, given.sent, number)
        end_launch(images, me, "dispatch", sends=True, number=number, received=turn.received)

    return Launch(stage, images, start, finish, lambda: None)


def dispatch_receive(stage: Stage, turn: Turn, *, tiled: bool = False) -> Launch:
    """What the peers and the rank itself have sent is written by hand; rows hold any bytes."""
    cfg, me, number = stage.cfg, stage.me, turn.number
    stage.rank.tuning, _ = HALVES.shapes(turn.index)
    sent, rows = zip(*(draw_played(cfg, source, turn) for source in range(cfg.world_size)), strict=True)
    images = stage.images()
    own = images[me]
    begin_launch(own, "dispatch", number, number - 1)
    own.await_few(cfg.arena.lamport_messages, number)
    for source, one in enumerate(sent):
        send_dispatch(own, source, one, number)
    expected = received_by(cfg, me, sent, rows)
    buffers = poisoned_buffers(stage.rank, int(expected.num_rows))
    mine = sent[me]
    weights = None if mine.weights is None else mine.weights.to(stage.device)
    pending = PendingDispatch(mine.topk_ids.to(stage.device), weights, mine.returned_log2, ())
    received: list[Dispatched] = []

    def start() -> None:
        stage.rounds("dispatch").count_sent(pending)
        received.append(stage.rank.dispatch_wait(pending, buffers))

    def finish() -> None:
        receive_dispatch(own, sent, number, tiled=tiled)
        end_launch(images, me, "dispatch", receives=True, number=number, received=number - 1)

    def check() -> None:
        check_received(stage, received[0], expected, sent, number)

    return Launch(stage, images, start, finish, check, sent)


def combine_send(stage: Stage, turn: Turn, mode: CombineMode) -> Launch:
    """What `draw_batch` gives."""
    cfg, me, number, partial = stage.cfg, stage.me, turn.number, mode == "partial"
    stage.rank.tuning, _ = HALVES.shapes(turn.index)
    batch = draw_batch(stage, turn, turn.home_of(me, cfg.max_tokens_per_rank))
    images = stage.images()
    begin_launch(images[me], "combine", number - 1, turn.received)
    peers_have_read(images[me], "combine", number)

    def start() -> None:
        with stage.sent_only("combine"):
            stage.rank.combine_async(batch.rows, batch.dispatched, mode)

    def finish() -> None:
        spans = any(home.flagged for home in batch.homes)
        send_returns(images, batch, number, partial=partial, spans=spans)
        end_launch(images, me, "combine", sends=True, number=number, received=turn.received)

    return Launch(stage, images, start, finish, lambda: None)


def combine_receive(stage: Stage, turn: Turn, mode: CombineMode) -> Launch:
    """What the peers and the rank itself return is written by hand, as `draw_slots` says."""
    cfg, me, number, partial = stage.cfg, stage.me, turn.number, mode == "partial"
    stage.rank.tuning, _ = HALVES.shapes(turn.index)
    generator = torch.Generator().manual_seed(turn.index)
    ids, weights = draw_routes(cfg, me, turn.tokens_of(me), turn.routing_of(me), turn.index)
    home = Home(len(ids), turn.slices_of(me), len(ids) > FEW_TOKENS)
    slots = draw_slots(cfg, ids, generator, partial=partial)
    images = stage.images()
    own = images[me]
    begin_launch(own, "combine", number, number - 1)
    own.await_few(cfg.arena.lamport_returns, number)
    play_returns(own, range(cfg.world_size), home, slots, turn, dispatch_round=number + 3, partial=partial)
    dtype = DTYPES[turn.index % len(DTYPES)]
    expected = slots.result(mode, weights, dtype)
    given = torch.zeros(EXPERT_ROWS, cfg.hidden, dtype=torch.bfloat16, device=stage.device)
    routed = cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k
    nothing = torch.full(routed, GARBAGE, dtype=torch.int32)
    headers = torch.full((cfg.world_size, 4), GARBAGE, dtype=torch.int32)
    left = {"row_map": nothing, "headers": headers, "weights": nothing.view(torch.float32)}
    batch = batch_of(stage, given, ids, weights, home.log2, left)
    pending = PendingCombine(batch, mode, given)
    out = guarded(expected.shape, dtype, stage.device)

    def start() -> None:
        stage.rounds("combine").count_sent(pending)
        stage.rank.combine_wait(pending, out=out)

    def finish() -> None:
        receive_combine(own, home, slots.where, number, partial=partial)
        end_launch(images, me, "combine", receives=True, number=number, received=number - 1)

    return Launch(stage, images, start, finish, lambda: check_sums(out, expected, mode))
