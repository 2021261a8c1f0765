"""One rank's mail: its memory, and the kernels around an exchange that the rail's engine makes.

A round of a channel is, in the order of one stream (`docs/protocol.md`, Mail): pack, put, await, read, free. Every
method enqueues its part on the current stream, in which the caller's device is current, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.host import host_list
from cute_ep.api.row_tensors import QuantizedRows, payload_columns, payload_dtype, scale_dtype
from cute_ep.layouts.maps.arena import LL_BYTES
from cute_ep.layouts.maps.launch import PIECE_BYTES, WARPS
from cute_ep.layouts.maps.mail import HEADER_BYTES, Channel, Piece, RoundWord, Routes, sums_bytes
from cute_ep.layouts.maps.mail_arguments import (
    AwaitMailArgs,
    MailGroup,
    PackFrameArgs,
    PackSumsArgs,
    PutArgs,
    PutMailArgs,
    SignalMailArgs,
    SumNodesArgs,
    UnpackFramesArgs,
)
from cute_ep.layouts.maps.parameters import Fields, numbers
from cute_ep.layouts.maps.routing import OutputType
from cute_ep.runtime.arguments import address, ids_record, row_vectors
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.streams import give_back, take_stream
from cute_ep.runtime.sums import slices_log2
from cute_ep.torch_internals import current_stream

ENTRIES_OF_CTA = 2048
"""Entries of a frame for which a further CTA is worth its launch."""


@dataclass(frozen=True)
class Frame:
    """Frames of all nodes as one dispatch's tokens: views of the mail, and copies of the routes.

    Attributes:
        rows: [nodes * F] rows in the dispatch format.
        topk_ids: [nodes * F, top_k] int32, of the own node's experts from 0 on, else -1.
        router_weights: [nodes * F, top_k] float32.
    """

    rows: QuantizedRows
    topk_ids: torch.Tensor
    router_weights: torch.Tensor


class Put(NamedTuple):
    """A piece on its way, by offsets in maps.

    Attributes:
        source: of what goes to node 0's rank in rounds of parity 0.
        step: from there to what goes to the next node's; 0 where all get the same.
        to: where it goes in the map of each.
        source_turn, to_turn: to those of rounds of parity 1.
    """

    piece: Piece
    source: int
    step: int
    to: int
    nbytes: int
    source_turn: int = 0
    to_turn: int = 0


class Engine(Protocol):
    """What brings pieces of mail to the other ranks of a rail, in stream order."""

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """Bring each piece of this rank's mail, of the round that was packed last, to every other node's rank, and then
        the round to the piece's word of `arrived` there, behind the rounds before. What comes behind on the stream may
        write to the sources."""


@dataclass(frozen=True)
class MailParts:
    """What a rank's mail is made of.

    Attributes:
        memory: [bytes] uint8, a rank's map; zeros before the first round.
        kernels: by name, MAIL_KERNELS.
        status: address of host-visible records, one a node and one each of INPUT_ERRORS.
        abort: address of the abort word of the rank's arena.
        max_ctas: CTAs of one launch at most.
    """

    cfg: EPConfig
    rank: int
    memory: torch.Tensor
    kernels: Mapping[str, Kernel]
    status: int
    abort: int
    max_ctas: int


class RankMail:
    """One rank's part of the exchanges of its rail."""

    def __init__(self, parts: MailParts, engine: Engine) -> None:
        self.parts, self.cfg, self.engine = parts, parts.cfg, engine
        self.map = parts.cfg.mail
        self.node, self.memory = parts.cfg.node(parts.rank), parts.memory
        self.base = parts.memory.data_ptr()
        self._first_expert = self.node * parts.cfg.peers * parts.cfg.local_experts

    def introduce(self, mails: Sequence[int]) -> None:
        """Tell the kernels where the map of each node's rank is, as mapped here."""
        at = self.map.mails
        self._view(at.at(), LL_BYTES * len(mails), torch.int64).copy_(torch.tensor(mails, device="cpu"))

    def words(self) -> list[int]:
        """What the map has before its payload, as it is now: waits for nothing."""
        words = self._view(0, self.map.payload.at(), torch.int64)
        if not words.is_cuda:
            return host_list(words)
        stream = take_stream(words.device)
        try:
            with torch.cuda.stream(stream):
                return host_list(words)
        finally:
            give_back(stream)

    # ---- frames

    def empty_frame(self, frame: int) -> Frame:
        """Memory for what `unpack` fills: views of the mail, and new tensors for copies of the routes."""
        cfg, at, count = self.cfg, self.map, self.cfg.nodes * frame
        fmt, device = cfg.format, self.memory.device
        payload = self._view(at.payload.at(), count * at.payload_bytes, payload_dtype(fmt))
        scales = row_scales = None
        if at.scale_bytes:
            scales = self._view(at.scales.at(), count * at.scale_bytes, scale_dtype(fmt)).view(count, -1)
        if fmt.row_scale:
            row_scales = torch.empty(count, dtype=torch.bfloat16, device=device)
        return Frame(
            QuantizedRows(payload.view(count, payload_columns(fmt, cfg.hidden)), scales, row_scales),
            torch.empty(count, cfg.top_k, dtype=torch.int32, device=device),
            torch.empty(count, cfg.top_k, dtype=torch.float32, device=device),
        )

    def send_frame(
        self, rows: QuantizedRows, topk_ids: torch.Tensor, router_weights: torch.Tensor | None, frame: int
    ) -> None:
        """Pack this rank's tokens, put them, and wait for those of the other nodes' ranks."""
        cfg, at, routes = self.cfg, self.map, self._routes(frame)
        tokens = topk_ids.shape[0]
        pieces = at.pieces(frame, routes)
        begins = {piece: self.base + begin + self.node * step for piece, begin, step, _ in pieces}
        self._launch(
            "pack_frame",
            PackFrameArgs(
                group=self._group(Channel.FRAMES),
                ids=ids_record(topk_ids),
                x=rows.payload.data_ptr(),
                x_vectors=row_vectors(rows.payload),
                scales=address(rows.scales),
                scales_pitch=0 if rows.scales is None else rows.scales.stride(0) * rows.scales.itemsize,
                row_scales=address(rows.row_scales),
                weights=address(router_weights),
                payload=begins[Piece.PAYLOAD],
                scales_out=begins.get(Piece.SCALES, 0),
                routes=begins[Piece.ROUTES],
                weights_at=routes.weights,
                row_scales_at=routes.row_scales,
                tokens=tokens,
                frame=frame,
                top_k=cfg.top_k,
                experts=cfg.num_experts,
                vectors=at.payload_bytes // 16,
                scale_bytes=at.scale_bytes,
            ),
            max(-(-tokens // WARPS), -(-frame * cfg.top_k // ENTRIES_OF_CTA)),
        )
        own = [
            Put(piece, begin + self.node * step, 0, begin + self.node * step, nbytes)
            for piece, begin, step, nbytes in pieces
        ]
        self.engine.put(self, Channel.FRAMES, own)
        words = words_of(own)
        headers = self.base + at.routes.at()
        awaited = AwaitMailArgs(self._group(Channel.FRAMES), words, headers, at.routes.stride[0], 0, frame)
        self._launch("await_frames", awaited, 1)

    def unpack(self, into: Frame, frame: int) -> None:
        """Fill what `empty_frame` made: the frames that have come, until they are freed."""
        cfg, at, routes = self.cfg, self.map, self._routes(frame)
        self._launch(
            "unpack_frames",
            UnpackFramesArgs(
                group=self._group(Channel.FRAMES),
                routes=self.base + at.routes.at(),
                pitch=at.routes.stride[0],
                weights_at=routes.weights,
                row_scales_at=routes.row_scales,
                ids=into.topk_ids.data_ptr(),
                weights=into.router_weights.data_ptr(),
                row_scales=address(into.rows.row_scales),
                frame=frame,
                top_k=cfg.top_k,
                first_expert=self._first_expert,
                experts=cfg.peers * cfg.local_experts,
            ),
            -(-frame * cfg.top_k // ENTRIES_OF_CTA),
        )

    # ---- sums

    def send_sums(self, sums: torch.Tensor, frame: int) -> None:
        """Pack the own node's [nodes * F, hidden] sums, and put each node's."""
        at, nbytes = self.map, sums_bytes(frame, self.cfg.hidden)
        begin, turn, step = at.sent_sums.at(), at.sent_sums.stride[0], at.sent_sums.stride[1]
        self._launch(
            "pack_sums",
            PackSumsArgs(
                group=self._group(Channel.SUMS),
                sums=sums.data_ptr(),
                out=self.base + begin,
                pitch=step,
                turn=turn,
                frame=frame,
                vectors=self.cfg.hidden // 8,
            ),
            -(-frame // WARPS),
        )
        to = at.sums.at(0, self.node)
        piece = Put(Piece.ROUTES, begin, step, to, nbytes, source_turn=turn, to_turn=at.sums.stride[0])
        self.engine.put(self, Channel.SUMS, [piece])

    def add_sums(self, own: torch.Tensor, out: torch.Tensor, out_type: OutputType, frame: int) -> None:
        """Wait for the other nodes' sums of the oldest round that was not received, write all nodes' sum into `out`
        [T, hidden], and free them. `own`: [T, hidden] of the own node."""
        at = self.map
        headers, tokens = self.base + at.sums.at(), out.shape[0]
        turn, pitch = at.sums.stride[0], at.sums.stride[1]
        awaited = AwaitMailArgs(self._group(Channel.SUMS), 1 << Piece.ROUTES, headers, pitch, turn, frame)
        self._launch("await_sums", awaited, 1)
        slices = slices_log2(tokens, 2 * self.cfg.hidden, self.parts.max_ctas * WARPS) if tokens else 0
        self._launch(
            "sum_nodes",
            SumNodesArgs(
                group=self._group(Channel.SUMS),
                own=own.data_ptr(),
                landed=headers + HEADER_BYTES,
                pitch=pitch,
                turn=turn,
                out=out.data_ptr(),
                out_type=out_type,
                tokens=tokens,
                vectors=self.cfg.hidden // 8,
                slices_log2=slices,
            ),
            -(-(tokens << slices) // WARPS),
        )
        self.free(Channel.SUMS)

    def free(self, channel: Channel) -> None:
        """Tell the other nodes' ranks that this rank has read what came, once it has."""
        self.signal(channel, self.map.free.at(channel, self.node), 1, RoundWord.RECEIVED)

    def signal(self, channel: Channel, word: int, words: int, count: RoundWord) -> None:
        """Store how many rounds there are in words of the other nodes' ranks, the first of which is `word` bytes into
        their maps."""
        mails, rounds = self.base + self.map.mails.at(), self.base + self.map.rounds.at(channel, count)
        self._launch("signal_mail", SignalMailArgs(self._group(channel), mails, word, words, rounds), 1)

    def put(self, channel: Channel, pieces: Sequence[Put]) -> None:
        """Copy pieces to the other nodes' ranks, whose memory this GPU reaches."""
        records = dict.fromkeys(Piece, PutArgs(0, 0, 0, 0, 0, 0))
        for one in pieces:
            source = self.base + one.source
            records[one.piece] = PutArgs(source, one.step, one.source_turn, one.to, one.to_turn, one.nbytes)
        mails, most = self.base + self.map.mails.at(), max(one.nbytes for one in pieces)
        ctas = -(-most // PIECE_BYTES)
        self._launch("put_mail", PutMailArgs(self._group(channel), mails, *(records[piece] for piece in Piece)), ctas)

    # ---- what all have in common

    def _routes(self, frame: int) -> Routes:
        return Routes.of(frame, self.cfg.top_k, self.cfg.format.row_scale_bytes)

    def _view(self, begin: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[begin : begin + nbytes].view(dtype)

    def _group(self, channel: Channel) -> MailGroup:
        at, parts = self.map, self.parts
        return MailGroup(
            status=parts.status,
            abort=parts.abort,
            timeout_ns=int(self.cfg.timeout_s * 1e9),
            node=self.node,
            nodes=self.cfg.nodes,
            rounds=self.base + at.rounds.at(channel),
            arrived=self.base + at.arrived.at(channel),
            free=self.base + at.free.at(channel),
        )

    def _launch(self, kernel: str, arguments: Fields, ctas: int) -> None:
        grid = max(1, min(ctas, self.parts.max_ctas))
        stream = current_stream(self.memory.device.index) if self.memory.is_cuda else 0
        self.parts.kernels[kernel].launch(grid, numbers(arguments), stream)


def words_of(pieces: Sequence[Put]) -> int:
    """The words of some pieces, a bit each."""
    return sum(1 << one.piece for one in pieces)
