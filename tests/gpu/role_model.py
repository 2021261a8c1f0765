"""What each role of the kernels reads and writes in arenas, from docs/protocol.md, in plain torch.

A function for what a rank sends writes into the image of one receiver; so it says what a sending half must have stored
there, and writes what a receiving half finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.arena import MANY_SLICES
from cute_ep.layouts.maps.record import Region

from .arena_images import FEW_TOKENS, Image

CHUNK = 16
"""Slices that share a flag, unless rows are Lamport rows."""
ENTRY_BITS = 10
"""Of an entry: its expert, below its position."""
VECTOR, SEGMENT = 16, 512
"""Bytes of an access and of what a warp takes at a time."""
LOST = 0x7FFF
"""bfloat16 of a row that dispatch had no room for; also what a NaN is rounded to."""
NOT_HERE = -1
STATE = {"dispatch": (0, 1), "combine": (2, 3)}
"""Words of the state: rounds sent, and rounds received."""
STATE_WORDS = 12


def up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Rows(NamedTuple):
    """Encoded rows as bytes: payload [T, B], scale factors [T, S], scales of the rows [T, 2]."""

    payload: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None

    @classmethod
    def of(cls, rows: QuantizedRows) -> Rows:
        return cls(*(None if one is None else as_bytes(one) for one in rows))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[T, bytes of a row] of a matrix, or of a vector."""
    width = tensor[:1].numel() if len(tensor) else tensor.shape[1:].numel()
    return tensor.contiguous().view(torch.uint8).view(len(tensor), width * tensor.element_size())


def words_of(content: torch.Tensor) -> torch.Tensor:
    """[T, words] int32 of bytes, the last one filled up with zeros."""
    padded = torch.nn.functional.pad(content, (0, -content.shape[1] % 4))
    return padded.contiguous().view(torch.int32)


def blank_slices(words: torch.Tensor, of_segment: int, row_bytes: int, log2: int) -> torch.Tensor:
    """[T, slices] bool: whether a slice has a word of ones, of [T, words] of which each segment has `of_segment`; the
    payload of a row has `row_bytes`."""
    segments = -(-row_bytes // SEGMENT)
    share = -(-segments // (1 << log2)) * of_segment
    parts = [words[:, number * share : (number + 1) * share] == -1 for number in range(1 << log2)]
    return torch.stack([part.any(dim=1) for part in parts], dim=1)


# ---- dispatch


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a dispatch.

    Attributes:
        topk_ids: [T, K] int64.
        weights: [T, K] float32, or None.
        rows: encoded.
        log2, returned_log2: base-2 logarithms of the slices of a message and of a returned row.
        encoded: whether a kernel encodes the rows: what it stores behind the last scale factors is undefined.
        few: most tokens whose rows come home as Lamport rows, a choice of the source.
    """

    topk_ids: torch.Tensor
    weights: torch.Tensor | None
    rows: Rows
    log2: int
    returned_log2: int
    encoded: bool = False
    few: int = FEW_TOKENS

    @property
    def tokens(self) -> int:
        return len(self.topk_ids)

    @property
    def gives_weights(self) -> bool:
        """Whether messages come with router weights: a source without tokens has none to give."""
        return self.weights is not None and self.tokens > 0

    def header(self, number: int) -> list[int]:
        returns = Home(self.tokens, self.returned_log2, self.tokens > self.few).word
        return [self.tokens, self.log2 << 1 | self.gives_weights, number, returns]

    def goes_to(self, cfg: EPConfig, source: int, rank: int) -> torch.Tensor:
        """[T] bool, of the tokens of rank `source`; those of the shared expert go to their own rank."""
        mine = owners(cfg, self.topk_ids) == rank
        return mine.any(dim=1) | (cfg.fused_shared_expert and rank == source)

    def blank(self, cfg: EPConfig) -> torch.Tensor:
        """[T, slices] bool: slices with a word that stands for one that has not come."""
        payload, scales, _ = self.rows
        found = blank_slices(words_of(payload), SEGMENT // 4, payload.shape[1], self.log2)
        if scales is not None:
            fmt = cfg.format
            of_segment = -(-SEGMENT * 8 // fmt.bits * fmt.scale_itemsize // fmt.block // 4)
            if self.log2 == 0:
                of_segment = scales.shape[1]
            found |= blank_slices(words_of(scales), of_segment, payload.shape[1], self.log2)
        return found


def owners(cfg: EPConfig, topk_ids: torch.Tensor) -> torch.Tensor:
    """[T, K] rank of each entry; NOT_HERE where it is masked."""
    return torch.where(topk_ids >= 0, topk_ids // (cfg.num_experts // cfg.world_size), NOT_HERE)


def entries_and_counts(cfg: EPConfig, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] packed entries, and [keys] how many positions each has: experts, or in rank-major order ranks, where only
    a token's last entry for a rank has a position."""
    keys, count = topk_ids, cfg.num_experts
    if cfg.is_rank_major:
        ranks, count = owners(cfg, topk_ids), cfg.world_size
        keys = ranks.clone()
        for slot in range(cfg.top_k):
            again = (ranks[:, slot + 1 :] == ranks[:, slot : slot + 1]).any(dim=1)
            keys[again, slot] = NOT_HERE
    chosen = keys.flatten()[:, None] == torch.arange(count)
    position = (chosen.long().cumsum(0) - 1).gather(1, keys.flatten()[:, None].clamp(min=0)).view(keys.shape)
    position = torch.where(keys >= 0, position, 0)
    entries = torch.where(topk_ids >= 0, position << ENTRY_BITS | topk_ids, -1)
    return entries, chosen.sum(0)


def send_dispatch(image: Image, source: int, sent: Sent, number: int, *, stays: bool = False) -> None:
    """All that rank `source` stores at the image's rank in a round, except that it has read an earlier one. stays: its
    own tokens stand in its tables, but are not sent."""
    cfg, arena, parity = image.cfg, image.arena, number & 1
    entries, counts = entries_and_counts(cfg, sent.topk_ids)
    of_rank = counts.view(cfg.world_size, -1)[image.rank].tolist()
    image.tell(arena.table.at(parity, source), torch.tensor([*sent.header(number), *of_rank]), number)
    image.tell(arena.entries.at(parity, source), entries, number)
    if sent.weights is not None:
        image.tell(arena.weights.at(parity, source), sent.weights.contiguous().view(torch.int32), number)
    if stays and source == image.rank:
        return
    goes = sent.goes_to(cfg, source, image.rank)
    if sent.tokens > FEW_TOKENS:
        image.signal(arena.message_ready.at(source), number, -(-(sent.tokens << sent.log2) // CHUNK))
    else:
        blank = (sent.blank(cfg) & goes[:, None]).flatten()
        for index in blank.nonzero().flatten().tolist():
            image.signal(arena.message_ready.at(source, index), number)
    message, at = image.messages(number, source, sent.tokens)
    for name, (begin, content) in message_parts(sent.rows).items():
        end = begin + content.shape[1]
        message[:, begin:end][goes] = content[goes]
        if name == "scales" and sent.encoded:  # they are stored in whole vectors
            for token in goes.nonzero().flatten().tolist() if end % VECTOR else ():
                image.leave_open(at + token * message.shape[1] + end, -end % VECTOR)


def message_parts(rows: Rows) -> dict[str, tuple[int, torch.Tensor]]:
    """(where it begins in a message, [T, bytes]) of each field that there is, in whole words."""
    parts, begin = {}, 0
    for name, content in rows._asdict().items():
        if content is not None:
            parts[name] = begin, torch.nn.functional.pad(content, (0, -content.shape[1] % 4))
            begin += up(content.shape[1], VECTOR)
    return parts


def receive_dispatch(image: Image, sent: Sequence[Sent], number: int, *, tiled: bool, stays: bool = False) -> None:
    """What the receiving rank changes in its arena: words that it has taken have not come, and where scale factors are
    written by tiles those of Lamport rows are set aside. stays: its own tokens are no messages; of these all scale
    factors are set aside, of more than FEW_TOKENS tokens where messages would have them."""
    for source, one in enumerate(sent):
        goes, few = one.goes_to(image.cfg, source, image.rank), one.tokens <= FEW_TOKENS
        own = stays and source == image.rank
        message, _ = image.messages(number, source, one.tokens)
        parts = message_parts(one.rows)
        for begin, content in parts.values() if few and not own else ():
            message[:, begin : begin + content.shape[1]][goes] = 0xFF
        if tiled and (few or own):
            begin, scales = parts["scales"]
            if few:
                region, begin = image.arena.staged_scales, 0
                message = image.span(region.at(source), one.tokens * region.shape[-1]).view(one.tokens, -1)
            message[:, begin : begin + scales.shape[1]][goes] = scales[goes]


# ---- combine


@dataclass(frozen=True)
class Home:
    """What a rank's tokens get back in a combine: how many there are, the log2 of the slices of their rows, and whether
    flags tell that these have come."""

    tokens: int
    log2: int
    flagged: bool

    @classmethod
    def of(cls, tokens: int, log2: int, flagged: bool) -> Home:
        """log2: any; it is made one that rows with flags may have."""
        return cls(tokens, log2 % MANY_SLICES.bit_length() if flagged else log2, flagged)

    @property
    def word(self) -> int:
        """In the header of the dispatch before."""
        return self.flagged << 3 | self.log2


def as_floats(rows: torch.Tensor) -> torch.Tensor:
    """float32 of bfloat16 bits, int16."""
    return (rows.int() << 16).view(torch.float32)


def as_bfloat16(sums: torch.Tensor) -> torch.Tensor:
    """Bits, int16, of the nearest bfloat16, ties to even; of any NaN LOST."""
    bits = sums.contiguous().view(torch.int32).long()
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(sums.isnan(), LOST, rounded).to(torch.int16)


def returned_rows(rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """[T, K, hidden] bits of the rows of `row_map` [T, K]; LOST beyond the last, anything where there is none."""
    found = rows[row_map.clamp(0, len(rows) - 1).long()]
    return torch.where((row_map >= len(rows))[:, :, None], LOST, found)


def weighted_sums(rows: torch.Tensor, weights: torch.Tensor | None, there: torch.Tensor) -> torch.Tensor:
    """[T, hidden] float32: from +0, slots ascending, each product and each sum rounded, of bits [T, slots, hidden]
    where `there` [T, slots]; weights None: no products."""
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for slot in range(rows.shape[1]):
        row = as_floats(rows[:, slot])
        row = row if weights is None else weights[:, slot, None] * row
        total = torch.where(there[:, slot, None], total + row, total)
    return total


def send_combine(
    image: Image,
    owner: int,
    home: Home,
    number: int,
    *,
    dispatch_round: int,
    slots: tuple[torch.Tensor, torch.Tensor],
    partial: bool,
    spans: bool,
    stays: bool = False,
) -> None:
    """All that rank `owner` stores at the image's rank in a round, except that it has read an earlier one.

    Args:
        slots: ([T, n] bool, bits [T, n, hidden]): which slots it fills, and with what; n is top_k, or of partial sums
            the number of ranks.
        spans: whether rows are sent in spans: some rank's have flags, or pipelines send them.
        stays: whether rows of its own tokens are not sent.
    """
    arena = image.arena
    image.tell(arena.return_rounds.at(number & 1, owner), torch.tensor([dispatch_round]), number)
    if stays and owner == image.rank:
        return
    where, rows = slots
    view = image.slots(number, home.tokens, flagged=home.flagged, partial=partial)
    view[:, : where.shape[1]][where] = as_bytes(rows[where])
    slices, ready = home.tokens << home.log2, arena.return_ready.at(owner)
    if home.flagged:
        image.signal(ready, number, -(-slices // CHUNK))
    elif spans and not partial:
        image.signal(ready, number, slices)
    elif not partial:
        row = rows.shape[2] * 2
        words = rows.contiguous().view(torch.int32).view(-1, row // 4)
        blank = blank_slices(words, SEGMENT // 4, row, home.log2).view(*where.shape, 1 << home.log2)
        found = (blank & where[:, :, None]).any(dim=1).flatten()
        for index in found.nonzero().flatten().tolist():
            image.signal(arena.return_ready.at(owner, index), number)


def receive_combine(image: Image, home: Home, where: torch.Tensor, number: int, *, partial: bool) -> None:
    """What the rank changes in its arena that gets rows back in the slots `where` [T, n]."""
    if not home.flagged:
        image.slots(number, home.tokens, flagged=False, partial=partial)[:, : where.shape[1]][where] = 0xFF


# ---- a launch


def begin_launch(image: Image, phase: str, sent: int, received: int) -> None:
    """What the launching rank's arena must hold: rounds of a phase, no failure, counters and tickets at zero."""
    arena = image.arena
    words = image.words(arena.state.at(), STATE_WORDS)
    words.zero_()
    words[list(STATE[phase])] = torch.tensor([sent, received])
    if phase == "combine":
        tickets(image, sent + 1).zero_()


def consumed(image: Image, phase: str) -> Region:
    """Where ranks tell that of the image which rounds they have received."""
    return image.arena.dispatch_consumed if phase == "dispatch" else image.arena.combine_consumed


def tickets(image: Image, number: int) -> torch.Tensor:
    """A view of the tickets of a combine round."""
    region = image.arena.combine_tickets
    return image.words(region.at(number & 1), region.stride[0])[:: region.stride[2]]


def _may_be_drawn(image: Image, number: int, may: bool) -> None:
    """Whether tickets of a combine round may hold anything."""
    region = image.arena.combine_tickets
    for counter in range(tickets(image, number).numel()):
        image.leave_open(region.at(number & 1) + 8 * region.stride[2] * counter, 4, may)


def end_launch(
    images: Sequence[Image],
    me: int,
    phase: str,
    *,
    number: int,
    received: int,
    sends: bool = False,
    receives: bool = False,
) -> None:
    """What a launch of rank `me` changes whatever it carries: it tells all ranks which rounds it had received, counts
    its own, and lets the tickets of the next round begin at zero."""
    own = images[me]
    for image in images:
        image.signal(consumed(image, phase).at(me), received)
    for word, counts in zip(STATE[phase], (sends, receives), strict=True):
        if counts:
            own.words(own.arena.state.at(), STATE_WORDS)[word] = number
    if phase == "combine" and sends:
        tickets(own, number + 1).zero_()
        _may_be_drawn(own, number + 1, False)
        _may_be_drawn(own, number, True)
