"""What launches of a `Stage` are given, what has been sent to its rank, and what the outputs must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.arena import has_whole_segments
from cute_ep.testing.compare import assert_bits, assert_untouched_behind
from cute_ep.testing.verify import POISON, check_dispatched

from .arena_images import Image, signed
from .role_launch import Turn
from .role_model import (
    LOST,
    Home,
    Rows,
    Sent,
    as_bfloat16,
    as_floats,
    consumed,
    owners,
    returned_rows,
    send_combine,
    weighted_sums,
)
from .role_stage import Stage, draw_routes, draw_sent, expert_rows, random_rows, tokens_with_blanks

LOST_ROW = 2**31 - 1
GARBAGE = 0x25A5A5A5
"""What stands in tensors of a batch where nobody may read."""
EXPERT_ROWS = 50
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def peers_have_read(image: Image, phase: str, number: int) -> None:
    """All ranks have read the round before last, so this one may send."""
    image.signal(consumed(image, phase).at(), max(number - 2, 0), image.cfg.world_size)


# ---- dispatch


class Given(NamedTuple):
    """What a rank is given to dispatch.

    Attributes:
        arguments: of the call.
        sent: what it makes of them.
        rows: the same encoded rows.
    """

    arguments: dict[str, torch.Tensor | None]
    sent: Sent
    rows: QuantizedRows


def draw_given(stage: Stage, turn: Turn, slices: tuple[int, int]) -> Given:
    """Rows that the kernel encodes, in odd turns rows that came encoded. slices: as of `Sent`."""
    cfg, me, index = stage.cfg, stage.me, turn.index
    tokens = turn.tokens_of(me)
    ids, weights = draw_routes(cfg, me, tokens, turn.routing_of(me), index)
    ready = index % 2 == 1 and cfg.format.scale is not None
    factor = 2.0 ** (index - 2) if cfg.format.global_scale and not ready else None
    given: dict[str, torch.Tensor | None]
    if ready:
        rows = random_rows(cfg, tokens, index)
        given = {"x": rows.payload, "scales": rows.scales, "row_scales": rows.row_scales}
    else:
        x = tokens_with_blanks(cfg, me, tokens, index)
        rows = reference.quantize(x, cfg.format, 1.0 if factor is None else factor)
        given = {"x": x, "input_scale": None if factor is None else torch.tensor([factor])}
    given["topk_ids"] = ids.int() if index % 2 else ids
    given["router_weights"] = weights if index % 3 else None
    arguments = {name: one if one is None else one.to(stage.device) for name, one in given.items()}
    sent = Sent(ids, given["router_weights"], Rows.of(rows), *slices, encoded=not ready, few=stage.lamport_home)
    return Given(arguments, sent, rows)


def draw_played(cfg: EPConfig, source: int, turn: Turn) -> tuple[Sent, QuantizedRows]:
    """What a played rank has sent: rows hold any bytes."""
    log2 = turn.slices_of(source)
    log2s = (log2 if has_whole_segments(cfg.format) else 0), log2
    return draw_sent(cfg, source, turn.tokens_of(source), turn.routing_of(source), turn.index, log2s)


def received_by(cfg: EPConfig, me: int, sent: Sequence[Sent], rows: Sequence[QuantizedRows]) -> Dispatched:
    """What a rank receives of what all ranks have sent, by the reference."""
    scaled = cfg.format.scale is not None
    return reference.dispatch(
        cfg,
        [None if scaled else one.payload for one in rows],
        [one.topk_ids for one in sent],
        None,
        [one.weights for one in sent],
        rows if scaled else None,
    )[me]


def check_received(stage: Stage, batch: Dispatched, expected: Dispatched, sent: Sequence[Sent], number: int) -> None:
    """`check_dispatched`, and all headers."""
    check_dispatched(batch, expected, stage.cfg, stage.me)
    headers = torch.tensor([[signed(word, 32) for word in one.header(number)] for one in sent]).int()
    assert_bits(batch.headers, headers, "headers")


# ---- combine


@dataclass(frozen=True)
class Returned:
    """Outputs of a rank's experts, and whose tokens they belong to.

    Attributes:
        cfg, me: the rank's.
        rows: bits [N, hidden], int16.
        row_map, weights: [R, Tmax, K], as dispatch has left them: the row of each entry, and its router weight.
    """

    cfg: EPConfig
    me: int
    rows: torch.Tensor
    row_map: torch.Tensor
    weights: torch.Tensor

    def slots(self, source: int, tokens: int, *, partial: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `send_combine`: what comes home to a source of so many tokens."""
        row_map, weights = self.row_map[source, :tokens], self.weights[source, :tokens]
        where, found = row_map >= 0, returned_rows(self.rows, row_map)
        if not partial:
            return where, found
        sums = as_bfloat16(weighted_sums(found, weights, where))
        of_me = torch.arange(self.cfg.world_size) == self.me
        return where.any(dim=1, keepdim=True) & of_me, sums[:, None].expand(-1, self.cfg.world_size, -1)


class Batch(NamedTuple):
    """What a rank is given to combine.

    Attributes:
        rows: on its device.
        dispatched: put together from tensors.
        returned: the same on the CPU.
        homes: of all ranks.
        dispatch_round: that the batch is of.
    """

    rows: torch.Tensor
    dispatched: Dispatched
    returned: Returned
    homes: list[Home]
    dispatch_round: int


def batch_of(
    stage: Stage, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, log2: int, left: dict[str, torch.Tensor]
) -> Dispatched:
    """A batch of this rank put together from tensors; `left`: what dispatch has left for combine."""
    tensors = {"tokens": rows, "row_offsets": torch.zeros(stage.cfg.groups + 1, dtype=torch.int32)} | left
    on_device = {name: one.to(stage.device) for name, one in tensors.items()}
    given = {"topk_ids": ids.to(stage.device), "router_weights": weights.to(stage.device)}
    return Dispatched.of_tensors(on_device, rank=stage.me, return_slices_log2=log2, **given)


def draw_batch(stage: Stage, turn: Turn, home: Home) -> Batch:
    """Rows in any order, some twice, some lost; `home`: of the own tokens."""
    cfg, me = stage.cfg, stage.me
    generator = torch.Generator().manual_seed(turn.index)
    rows = expert_rows(EXPERT_ROWS, cfg.hidden, generator)
    routes = [
        draw_routes(cfg, rank, turn.tokens_of(rank), turn.routing_of(rank), turn.index)
        for rank in range(cfg.world_size)
    ]
    homes = [turn.home_of(rank, cfg.max_tokens_per_rank) for rank in range(cfg.world_size)]
    homes[me] = home
    shape = cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k
    row_map = torch.full(shape, GARBAGE, dtype=torch.int32)
    weights = row_map.clone().view(torch.float32)
    for source, (ids, of_source) in enumerate(routes):
        found = torch.randint(EXPERT_ROWS, ids.shape, generator=generator)
        found[5::13] = LOST_ROW
        row_map[source, : len(ids)] = torch.where(owners(cfg, ids) == me, found, -1).int()
        weights[source, : len(ids)] = of_source
    dispatch_round = 7 * turn.index
    headers = [[one.tokens, GARBAGE, dispatch_round + (rank != me), one.word] for rank, one in enumerate(homes)]
    left = {"row_map": row_map, "headers": torch.tensor(headers).int(), "weights": weights}
    given = rows.view(torch.bfloat16).to(stage.device)
    dispatched = batch_of(stage, given, *routes[me], home.log2, left)
    return Batch(given, dispatched, Returned(cfg, me, rows, row_map, weights), homes, dispatch_round)


def rounded(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 in a type of combine's output, with its one NaN."""
    if dtype == torch.bfloat16:
        return as_bfloat16(sums).view(dtype)
    bits, nan = (torch.int16, LOST) if dtype == torch.float16 else (torch.int32, 0x7FFFFFFF)
    return torch.where(sums.isnan(), nan, sums.to(dtype).view(bits)).to(bits).view(dtype)


class Slots(NamedTuple):
    """What comes home of a rank's tokens.

    Attributes:
        where: [T, n] bool, which slots are filled; n is top_k, or of partial sums the number of ranks.
        whose: [T, n] the ranks that fill them.
        rows: bits [T, n, hidden], int16.
    """

    where: torch.Tensor
    whose: torch.Tensor
    rows: torch.Tensor

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `send_combine`: those of one rank."""
        return self.where & (self.whose == rank), self.rows

    def result(self, mode: str, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What combine makes of them; weights: [T, K] of the router."""
        if mode != "unweighted":
            return rounded(weighted_sums(self.rows, None if mode == "partial" else weights, self.where), dtype)
        kept = torch.where(self.where[:, :, None], self.rows, 0)
        if dtype == torch.bfloat16:
            return kept.view(dtype)
        return as_floats(kept) if dtype == torch.float32 else rounded(as_floats(kept), dtype)


def slots_of(cfg: EPConfig, ids: torch.Tensor, *, partial: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`where` and `whose` of `Slots`, of tokens with these expert ids."""
    owner, ranks = owners(cfg, ids), torch.arange(cfg.world_size)
    if partial:
        return (owner[:, :, None] == ranks).any(dim=1), ranks.expand(len(ids), -1)
    return owner >= 0, owner


def draw_slots(cfg: EPConfig, ids: torch.Tensor, generator: torch.Generator, *, partial: bool) -> Slots:
    """Rows hold any bytes, sums no word of ones."""
    where, whose = slots_of(cfg, ids, partial=partial)
    rows = expert_rows(where.numel(), cfg.hidden, generator).view(*where.shape, cfg.hidden)
    if partial:
        rows[rows.view(torch.int32).repeat_interleave(2, dim=2) == -1] = LOST
    return Slots(where, whose, rows)


def play_returns(
    image: Image, ranks: Iterable[int], home: Home, slots: Slots, turn: Turn, *, dispatch_round: int, partial: bool
) -> None:
    """What some ranks have returned to the image's, by hand. In odd turns rank 0 tells 0, which fits any round."""
    for rank in ranks:
        told = 0 if turn.index % 2 and rank == 0 else dispatch_round
        spans, own = turn.index % 3 == 1, slots.of(rank)
        send_combine(image, rank, home, turn.number, dispatch_round=told, slots=own, partial=partial, spans=spans)


def send_returns(
    images: Sequence[Image], batch: Batch, number: int, *, partial: bool, spans: bool, stays: bool = False
) -> None:
    """What a combine of a batch returns to all ranks; spans, stays: as of `send_combine`."""
    how = {"dispatch_round": batch.dispatch_round, "partial": partial, "spans": spans, "stays": stays}
    for source, (image, home) in enumerate(zip(images, batch.homes, strict=True)):
        slots = batch.returned.slots(source, home.tokens, partial=partial)
        send_combine(image, batch.returned.me, home, number, slots=slots, **how)


def check_sums(out: torch.Tensor, expected: torch.Tensor, mode: str) -> None:
    """AssertionError unless combine's output is that, and nothing behind it was written."""
    assert_bits(out, expected, f"combine {mode}")
    assert_untouched_behind({f"combine {mode}": out}, POISON)
