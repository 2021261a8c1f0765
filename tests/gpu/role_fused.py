"""Fused calls on one rank of a `Stage`, with any schedule: each is a `Launch`.

What the peers send was written before the launch, so it has all that it waits for. `after`: a launch of the round
before; then both have been prepared before either is made.
"""

from __future__ import annotations

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.types import CombineMode
from cute_ep.testing.verify import POISON, guarded, poisoned_buffers

from .arena_images import Image
from .role_given import (
    DTYPES,
    Slots,
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
from .role_schedules import Schedule, adds_up
from .role_stage import Stage, draw_routes


def _begun(stage: Stage, phase: str, turn: Turn, after: Launch | None) -> list[Image]:
    """The images of a launch, before what peers have sent."""
    images = stage.images() if after is None else after.images
    if after is None:
        begin_launch(images[stage.me], phase, turn.number - 1, turn.number - 1)
    peers_have_read(images[stage.me], phase, turn.number)
    return images


def dispatch_fused(
    stage: Stage, turn: Turn, schedule: Schedule, after: Launch | None = None, *, tiled: bool = False
) -> Launch:
    """What `draw_given` gives, and `draw_played` of the peers. Where nothing is encoded own tokens are no messages:
    then their slots keep POISON, and no word of them is awaited."""
    cfg, me, number = stage.cfg, stage.me, turn.number
    tuning, slices = schedule.shapes(turn.index)
    given = draw_given(stage, turn, slices(cfg, turn.tokens_of(me), stage.lamport_home))
    stays = cfg.format.scale is None or not given.sent.encoded
    played = [draw_played(cfg, source, turn) for source in range(cfg.world_size)]
    played[me] = given.sent, given.rows
    sent, rows = zip(*played, strict=True)
    images = _begun(stage, "dispatch", turn, after)
    own, region = images[me], cfg.arena.lamport_messages
    own.await_few(region, number)
    if stays:
        own.span(region.at(number & 1, me), region.stride[1]).fill_(POISON)
    for source, one in enumerate(sent):
        if source != me:
            send_dispatch(own, source, one, number)
    expected = received_by(cfg, me, sent, rows)
    buffers = poisoned_buffers(stage.rank, int(expected.num_rows))
    received: list[Dispatched] = []

    def start() -> None:
        stage.rank.tuning = tuning
        received.append(stage.rank.dispatch(**given.arguments, out=buffers))

    def finish() -> None:
        for image in images:
            send_dispatch(image, me, given.sent, number, stays=stays)
        receive_dispatch(own, sent, number, tiled=tiled, stays=stays)
        end_launch(images, me, "dispatch", sends=True, receives=True, number=number, received=number - 1)

    def check() -> None:
        check_received(stage, received[0], expected, sent, number)

    return Launch(stage, images, start, finish, check, sent)


def combine_fused(
    stage: Stage, turn: Turn, mode: CombineMode, schedule: Schedule, after: Launch | None = None
) -> Launch:
    """What `draw_batch` gives, and `draw_slots` of the peers. Where pipelines add up own tokens' rows are not sent:
    then their slots keep POISON."""
    cfg, me, number, partial = stage.cfg, stage.me, turn.number, mode == "partial"
    tuning, _ = schedule.shapes(turn.index)
    tokens = turn.tokens_of(me)
    shape = stage.rank._cache.shape(tuning, "combine", tokens, whole_rows=not partial)
    flagged = tokens > stage.lamport_home
    assert flagged == shape.flagged, "the launch that the host chooses"
    home = Home.of(tokens, turn.slices_of(me), flagged)
    batch = draw_batch(stage, turn, home)
    ids, weights = draw_routes(cfg, me, tokens, turn.routing_of(me), turn.index)
    stays = adds_up(shape, mode)
    slots = draw_slots(cfg, ids, torch.Generator().manual_seed(100 + turn.index), partial=partial)
    filled, mine = batch.returned.slots(me, tokens, partial=partial)
    slots = Slots(slots.where, slots.whose, torch.where(filled[:, :, None], mine, slots.rows))
    images = _begun(stage, "combine", turn, after)
    own = images[me]
    own.await_few(cfg.arena.lamport_returns, number)
    peers = [rank for rank in range(cfg.world_size) if rank != me]
    play_returns(own, peers, home, slots, turn, dispatch_round=batch.dispatch_round, partial=partial)
    dtype = DTYPES[turn.index % len(DTYPES)]
    expected = slots.result(mode, weights, dtype)
    out = guarded(expected.shape, dtype, stage.device)

    def start() -> None:
        stage.rank.tuning = tuning
        stage.rank.combine(batch.rows, batch.dispatched, mode=mode, out=out)

    def finish() -> None:
        spans = shape.grid.ring_bytes > 0 or any(one.flagged for one in batch.homes)
        send_returns(images, batch, number, partial=partial, spans=spans, stays=stays)
        receive_combine(own, home, slots.where, number, partial=partial)
        end_launch(images, me, "combine", sends=True, receives=True, number=number, received=number - 1)

    return Launch(stage, images, start, finish, lambda: check_sums(out, expected, mode))
