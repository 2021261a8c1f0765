"""A stage of role tests without a GPU: the host's part of a launch is real, and in place of the kernel the outputs are
made here, from the launch's arguments and from what the rank's own arena holds, found by the layouts; a word, or flag,
that has not come is an error."""

from __future__ import annotations

from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.rounds import PendingDispatch
from cute_ep.api.row_tensors import QuantizedRows, payload_dtype, scale_dtype
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.arena import (
    CHUNK,
    LAMPORT_TOKENS,
    HeaderWord,
    are_flagged,
    message_of,
    message_slices_log2,
)
from cute_ep.reference.dispatch import Source
from cute_ep.reference.results import OwnDispatched, ReadAgain, fill
from tests import fake_gpu
from tests.fake_gpu import Launches, MakeRank, arena_address
from tests.gpu.arena_images import Image
from tests.gpu.role_cases import Case
from tests.gpu.role_launch import Launch
from tests.gpu.role_model import owners
from tests.gpu.role_stage import Stage

SHARED_CTAS = 41
"""CTAs of each of three ranks that share a GPU of 132 SMs without a budget."""


class PaperStage(Stage):
    """A stage without a GPU: ranks have addresses, and nothing is written anywhere.

    Attributes:
        launch: whose images the next calls find.
        numbers: of their rounds.
        sums: what the last combine has found.
    """

    launch: Launch
    sums: Homecoming

    def __init__(self, rank: Any, me: int) -> None:
        self.rank, self.me, self.cfg, self.device = rank, me, rank.cfg, rank.device
        places = [SimpleNamespace(arena=SimpleNamespace(address=arena_address(one))) for one in range(self.cfg.peers)]
        self.communicators = places  # type: ignore[assignment]
        self.numbers: list[int] = []


@pytest.fixture
def make_stage(make_rank: MakeRank, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make_stage(case): a stage whose rank's calls, once `stage.launch` is set, leave what kernels would."""

    def make(case: Case) -> PaperStage:
        budget = case.schedule.sms
        monkeypatch.setattr(fake_gpu, "MAX_CTAS", budget or SHARED_CTAS)
        rank = make_rank(case.cfg, case.me, few=budget is not None)
        rank._cache.whole_sms = True
        stage, dispatch, combine = PaperStage(rank, case.me), rank.dispatch, rank.combine

        def dispatched(**given: Any) -> Dispatched:
            batch = dispatch(**given)
            receive(stage.launch.own, stage.numbers.pop(0), given, batch, launches.last("dispatch").arguments)
            return batch

        def combined(rows: torch.Tensor, batch: Dispatched, *, mode: CombineMode, out: torch.Tensor) -> None:
            combine(rows, batch, mode=mode, out=out)
            stage.sums = Homecoming(stage.launch.own, stage.numbers.pop(0), batch, launches.last("combine").arguments)
            out.copy_(stage.sums.result(rows, mode, out.dtype))

        monkeypatch.setattr(rank, "dispatch", dispatched)
        monkeypatch.setattr(rank, "combine", combined)
        return stage

    return make


def values(image: Image, offset: int, count: int, number: int) -> torch.Tensor:
    """LL words of a round, as int64 from int32."""
    words = image.words(offset, count)
    assert ((words >> 32) & 0xFFFFFFFF == number & 0xFFFFFFFF).all(), f"words at {image.place(image.begin + offset)}"
    return words << 32 >> 32


def check_arrived(content: torch.Tensor, flags: torch.Tensor, number: int) -> None:
    """AssertionError unless all words of a Lamport row are there, or the flag of one of its slices is."""
    assert not (content.contiguous().view(torch.int32) == -1).any() or (flags >= number).any()


# ---- dispatch


def source_of(image: Image, source: int, number: int) -> tuple[Source, list[int]]:
    """What a peer has sent to the image's rank, but for rows of other ranks, and its header."""
    cfg, arena, parity = image.cfg, image.arena, number & 1
    header = values(image, arena.table.at(parity, source), len(HeaderWord), number).tolist()
    tokens, log2 = header[HeaderWord.TOKENS], message_slices_log2(header[HeaderWord.MESSAGES])
    entries = values(image, arena.entries.at(parity, source), tokens * cfg.top_k, number).view(tokens, cfg.top_k)
    ids = torch.where(entries == -1, -1, entries & 1023)
    counts = values(image, arena.table.at(parity, source, 4), 1 if cfg.is_rank_major else cfg.local_experts, number)
    goes = (owners(cfg, ids) == image.rank).any(dim=1)
    if cfg.is_rank_major:
        assert counts.tolist() == [int(goes.sum())]
    else:
        mine = torch.arange(cfg.local_experts) + image.rank * cfg.local_experts
        assert counts.tolist() == [int((ids == expert).sum()) for expert in mine]
    weights = None
    if header[HeaderWord.MESSAGES] & 1:
        weights = values(image, arena.weights.at(parity, source), tokens * cfg.top_k, number)
        weights = weights.int().view(torch.float32).view(tokens, cfg.top_k)
    region = arena.lamport_messages if tokens <= LAMPORT_TOKENS else arena.messages
    pitch, parts = region.shape[-1], message_of(cfg.format, cfg.hidden)
    message = image.span(region.at(parity, source), tokens * pitch).view(tokens, pitch)
    flags = image.words(arena.message_ready.at(source), min(tokens, LAMPORT_TOKENS) * 32)
    for token in goes.nonzero().flatten().tolist():
        slices = token << log2, (token + 1) << log2
        if tokens <= LAMPORT_TOKENS:
            check_arrived(message[token, : parts.payload.nbytes], flags[slices[0] : slices[1]], number)
        else:
            assert (flags[slices[0] // CHUNK : (slices[1] - 1) // CHUNK + 1] >= number).all()

    def part(offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return message[:, offset : offset + nbytes].contiguous().view(dtype)

    fmt = cfg.format
    scales = None if fmt.scale is None else part(parts.scales.offset, fmt.scale_bytes(cfg.hidden), scale_dtype(fmt))
    row_scales = part(parts.row_scale.offset, 2, torch.bfloat16).flatten() if fmt.row_scale else None
    rows = QuantizedRows(part(0, fmt.payload_bytes(cfg.hidden), payload_dtype(fmt)), scales, row_scales)
    return Source(rows, ids, weights), header


def receive(image: Image, number: int, given: dict[str, Any], batch: Dispatched, arguments: dict[str, int]) -> None:
    """What a launch with these arguments leaves in the buffers of its batch."""
    cfg, me, ids = image.cfg, image.rank, given["topk_ids"]
    found = {source: source_of(image, source, number) for source in range(cfg.peers) if source != me}
    if given.get("scales") is None:
        rows = reference.quantize(given["x"], cfg.format, 1.0 if given["input_scale"] is None else given["input_scale"])
    else:
        rows = QuantizedRows(given["x"], given["scales"], given["row_scales"])
    own = Source(rows, ids.long(), given["router_weights"])
    messages = arguments["input.message_slices_log2"] << 1 | int(arguments["input.router_weights"] != 0)
    found[me] = own, [arguments["input.tokens"], messages, number, arguments["input.returns"]]
    pending = PendingDispatch(ids, given["router_weights"], 0, ())
    again = ReadAgain(ids, given["router_weights"])
    assert batch.stamp is not None
    out = OwnDispatched.received(batch.buffers, batch.stamp.origin, pending, number=0, read_again=again)
    assert fill(cfg, me, {source: one for source, (one, _) in found.items()}, out) is None
    headers = torch.tensor([found[source][1] for source in range(cfg.peers)])
    batch.headers.copy_(headers << 32 >> 32)


def own_messages(image: Image, number: int) -> torch.Tensor:
    """All memory of a round for messages of the rank's own tokens, and their flags."""
    regions = image.arena.messages, image.arena.lamport_messages
    spans = [image.span(one.at(number & 1, image.rank), one.stride[1]) for one in regions if one.nbytes]
    flags = image.arena.message_ready
    return torch.cat([*spans, image.span(flags.at(image.rank), 8 * flags.stride[0])])


class Homecoming:
    """What comes home of the tokens of the image's rank."""

    def __init__(self, image: Image, number: int, batch: Dispatched, arguments: dict[str, int]) -> None:
        self.image, self.number, self.batch = image, number, batch
        self.owner = owners(image.cfg, batch.topk_ids.long())
        self.log2, self.flagged = arguments["sums.return_slices_log2"], bool(arguments["sums.flagged"])
        header = batch.headers[image.rank].tolist()
        assert arguments["sums.tokens"] == header[HeaderWord.TOKENS] == len(self.owner)
        assert (are_flagged(header[HeaderWord.RETURNS]), header[HeaderWord.RETURNS] & 7) == (self.flagged, self.log2)
        for peer in range(image.cfg.peers) if len(self.owner) else ():
            if peer != image.rank:
                told = values(image, image.arena.return_rounds.at(number & 1, peer), 1, number)
                assert int(told) in (0, header[HeaderWord.ROUND])

    def slot(self, token: int, slot: int, partial: bool) -> torch.Tensor:
        """Its bytes, where kernels are told that it is."""
        regions = self.image.arena.arguments(partial=partial)
        at, *strides = regions.returns if self.flagged else regions.lamport_returns
        place = (self.number & 1, token, slot)
        return self.image.span(at + sum(map(mul, place, strides)), 2 * self.image.cfg.hidden)

    def own_slots(self, partial: bool) -> list[torch.Tensor]:
        """All that the rank itself may fill."""
        mine = (self.owner == self.image.rank).nonzero().tolist()
        places = {(token, self.image.rank if partial else slot) for token, slot in mine}
        return [self.slot(token, slot, partial) for token, slot in places]

    def row(self, token: int, slot: int, owner: int, partial: bool) -> torch.Tensor:
        """bfloat16 [hidden] of what a peer has sent."""
        cfg, arena, content = self.image.cfg, self.image.arena, self.slot(token, slot, partial)
        flags = self.image.words(arena.return_ready.at(owner), min(cfg.max_tokens_per_rank, LAMPORT_TOKENS) * 32)
        slices = token << self.log2, (token + 1) << self.log2
        if self.flagged:
            assert (flags[slices[0] // CHUNK : (slices[1] - 1) // CHUNK + 1] >= self.number).all()
        else:
            check_arrived(content, flags[slices[0] : slices[1]], self.number)
        return content.view(torch.bfloat16)

    def own_row(self, rows: torch.Tensor, token: int, slot: int) -> torch.Tensor:
        at = int(self.batch.row_map[self.image.rank, token, slot])
        lost = torch.full((rows.shape[1],), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
        return rows[at] if at < len(rows) else lost

    def result(self, rows: torch.Tensor, mode: str, dtype: torch.dtype) -> torch.Tensor:
        """The output, token by token."""
        made = [self.token(rows, token, mode) for token in range(len(self.owner))]
        shape = (self.image.cfg.top_k,) if mode == "unweighted" else ()
        if not made:
            return torch.zeros(0, *shape, rows.shape[1], dtype=dtype)
        whole = torch.stack(made)
        if mode == "unweighted" and dtype != torch.float16:  # NaNs keep their bits
            return whole if dtype == torch.bfloat16 else (whole.view(torch.int16).int() << 16).view(dtype)
        return reference.round_to(whole.float(), dtype)

    def token(self, rows: torch.Tensor, token: int, mode: str) -> torch.Tensor:
        me, owner = self.image.rank, self.owner[token].tolist()
        entries = [(slot, rank) for slot, rank in enumerate(owner) if rank >= 0]
        if mode != "partial":
            found = {
                slot: self.own_row(rows, token, slot) if rank == me else self.row(token, slot, rank, False)
                for slot, rank in entries
            }
        if mode == "unweighted":
            return torch.stack([found.get(slot, torch.zeros_like(rows[0])) for slot in range(len(owner))])
        assert self.batch.router_weights is not None
        total, weights = torch.zeros(rows.shape[1]), self.batch.router_weights[token]
        if mode == "exact":
            for slot, row in found.items():
                total = total + weights[slot] * row.float()
            return total
        for rank in sorted({rank for _, rank in entries}):
            if rank == me:
                own = torch.zeros(rows.shape[1])
                for slot, other in entries:
                    if other == me:
                        own = own + weights[slot] * self.own_row(rows, token, slot).float()
                total = total + reference.round_to(own, torch.bfloat16).float()
            else:
                total = total + self.row(token, rank, rank, True).float()
        return total
