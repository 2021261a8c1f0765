"""One rank's mail: its memory, and the kernels around an exchange that the rail's engine makes.

A round of a channel is, in the order of one stream (`docs/protocol.md`, Between nodes): pack, put, await, read, free.
Every method enqueues its part on the current stream, in which the caller's device is current, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.host import host_list
from cute_ep.api.row_tensors import QuantizedRows, payload_columns, payload_dtype, scale_dtype
from cute_ep.layouts.maps.arena import LL_BYTES
from cute_ep.layouts.maps.launch import PIECE_BYTES, WARPS
from cute_ep.layouts.maps.mail import HEADER_BYTES, PARITIES, Channel, Piece, RoundWord, Routes, sums_bytes
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
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import OutputType
from cute_ep.runtime.arguments import address, ids_record, row_vectors
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.driver_calls import relaxed_capture
from cute_ep.runtime.rails.engine import Engine, Put, words_of
from cute_ep.runtime.streams import give_back, take_stream
from cute_ep.runtime.sums import slices_log2
from cute_ep.torch_internals import current_stream

ENTRIES_OF_CTA = 2048
"""Entries of a frame for which a further CTA is worth its launch."""
FOREVER = 1 << 62
"""A round that never comes."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Frame:
    """Frames of all nodes as one dispatch's tokens: views of the mail or copies, and copies of the routes.

    Attributes:
        rows: [nodes * F] rows in the dispatch format.
        topk_ids: [nodes * F, top_k] int32, of the own node's experts from 0 on, else -1.
        router_weights: [nodes * F, top_k] float32.
        copies: regions of the mail in which frames are not one behind the other, with the bytes of `rows` that are
            copies of theirs.
    """

    rows: QuantizedRows
    topk_ids: torch.Tensor
    router_weights: torch.Tensor
    copies: tuple[tuple[Region, torch.Tensor], ...]


class SumsOf(NamedTuple):
    """What a round of sums is of.

    Attributes:
        frame: rows of the frames.
        batch: address of the batch's dispatch round (int32).
        at_once: whether the sums are added behind what sends them, with nothing between.
    """

    frame: int
    batch: int
    at_once: bool


@dataclass(frozen=True)
class MailParts:
    """What a rank's mail is made of.

    Attributes:
        memory: [bytes] uint8, a rank's map; zeros before the first round.
        kernels: by name, MAIL_KERNELS.
        status: address of host-visible records, one a node and one each of INPUT_ERRORS.
        abort: address of the abort word of the rank's arena.
        max_ctas: CTAs of one launch at most.
        second: bytes from the map to words like its own, which count the sums that land second; 0: all sums are counted
            together.
    """

    cfg: EPConfig
    rank: int
    memory: torch.Tensor
    kernels: Mapping[str, Kernel]
    status: int
    abort: int
    max_ctas: int
    second: int = 0


class RankMail:
    """One rank's part of the exchanges of its rail. `interrupted`: a call ended in the middle, so that host and device
    may count different rounds."""

    interrupted = False

    def __init__(self, parts: MailParts, engine: Engine) -> None:
        self.parts, self.cfg, self.engine = parts, parts.cfg, engine
        self.map = parts.cfg.mail
        self.node, self.memory = parts.cfg.node(parts.rank), parts.memory
        self.base = parts.memory.data_ptr()
        self._first_expert = self.node * parts.cfg.peers * parts.cfg.local_experts
        self._landings = set(range(PARITIES))  # where no sums are that were sent and not received

    def introduce(self, mails: Sequence[int]) -> None:
        """Tell the kernels where the map of each node's rank is, as mapped here, or the memory that stands for it."""
        at = self.map.mails
        self._view(at.at(), LL_BYTES * len(mails), torch.int64).copy_(torch.tensor(mails, device="cpu"))

    def wait_for_nobody(self) -> None:
        """Let no kernel wait for a word, where the stream itself waits for the engine: headers are compared."""
        for region in (self.map.arrived, self.map.free):
            self._view(region.at(), int(region.nbytes), torch.int64).fill_(FOREVER)

    def count_landings_apart(self) -> None:
        """Let the sums of each landing wait for the ones before them there. Kernels wait for those two before, so
        nothing counts as one that was not read."""
        for begin in (0, self.parts.second):
            at = begin + self.map.free.at(Channel.SUMS)
            self._view(at, LL_BYTES * self.cfg.nodes, torch.int64).fill_(1 - PARITIES)

    @property
    def stream(self) -> int:
        """Handle of the device's current stream, on which everything is enqueued; 0 without a GPU."""
        return current_stream(self.memory.device.index) if self.memory.is_cuda else 0

    def words_at(self, landing: int) -> int:
        """Address of the map, or of the words that stand for its own where they count what lands there."""
        return self.base + landing * self.parts.second

    def words(self, landing: int = 0) -> list[int]:
        """What the map has before its payload, as it is now: waits for nothing."""
        words = self._view(landing * self.parts.second, self.map.payload.at(), torch.int64)
        if not words.is_cuda:
            return host_list(words)
        with relaxed_capture():  # as `DeviceMemory.read`
            stream = take_stream(words.device)
            try:
                with torch.cuda.stream(stream):
                    return host_list(words)
            finally:
                give_back(stream)

    # ---- frames

    def empty_frame(self, frame: int, ids: torch.Tensor) -> Frame:
        """Memory for what `unpack` fills: views of the mail where frames are one behind the other in it, else copies;
        and copies of the routes, in `ids` [>= nodes * F, top_k] int32 and in new tensors."""
        cfg, at, count = self.cfg, self.map, self.cfg.nodes * frame
        fmt, device, apart = cfg.format, self.memory.device, self._pitch(frame) != frame
        scales = row_scales = None
        regions = [region for region in (at.payload, at.scales) if region.shape[-1]]
        parts = [
            torch.empty(count * region.shape[-1], dtype=torch.uint8, device=device)
            if apart
            else self._view(region.at(), count * region.shape[-1], torch.uint8)
            for region in regions
        ]
        payload = parts[0].view(payload_dtype(fmt)).view(count, payload_columns(fmt, cfg.hidden))
        if at.scale_bytes:
            scales = parts[1].view(scale_dtype(fmt)).view(count, -1)
        if fmt.row_scale:
            row_scales = torch.empty(count, dtype=torch.bfloat16, device=device)
        return Frame(
            QuantizedRows(payload, scales, row_scales),
            ids[:count],
            torch.empty(count, cfg.top_k, dtype=torch.float32, device=device),
            tuple(zip(regions, parts, strict=True)) if apart else (),
        )

    def send_frame(
        self, rows: QuantizedRows, topk_ids: torch.Tensor, router_weights: torch.Tensor | None, frame: int
    ) -> None:
        """Pack this rank's tokens, put them, and wait for those of the other nodes' ranks."""
        cfg, at, routes = self.cfg, self.map, self._routes(frame)
        tokens = topk_ids.shape[0]
        puts = self.frame_puts(frame, tokens)
        begins = {one.piece: self.base + one.source for one in puts}
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
        self.engine.put(self, Channel.FRAMES, puts)
        headers = self.base + at.routes.at()
        awaited = AwaitMailArgs(self._group(Channel.FRAMES), words_of(puts), headers, at.routes.stride[0], 0, frame)
        self._launch("await_frames", awaited, 1)

    def frame_puts(self, frame: int, tokens: int) -> list[Put]:
        """What travels of this rank's frame with so many tokens. Whole frames where the receiver has to know how many
        bytes come, else the rows of tokens: those behind them have no ids."""
        pitch, found, rows = self._pitch(frame), [], tokens if self._heedless else frame
        for piece, begin, step, nbytes in self.map.pieces(pitch, self._routes(frame)):
            at, some = begin + self.node * step, nbytes if piece == Piece.ROUTES else nbytes // pitch * rows
            found.append(Put(piece, at, 0, at, step, some))
        return found

    @property
    def _heedless(self) -> bool:
        """Whether puts come whatever kernels have found, also after a failure, when a peer may read a frame of another
        length. They change nothing there only if frames of all lengths are at the same place."""
        return self.engine.queued and self.engine.one_sided

    def _pitch(self, frame: int) -> int:
        """Rows from one node's frame to the next one's."""
        return self.cfg.max_tokens_per_rank if self._heedless else frame

    def unpack(self, into: Frame, frame: int) -> None:
        """Fill what `empty_frame` made: the frames that have come, until they are freed."""
        cfg, at, routes = self.cfg, self.map, self._routes(frame)
        for region, part in into.copies:
            whole = self._view(region.at(), int(region.nbytes), torch.uint8).view(*region.shape)[:, :frame]
            word = next(one for one in WORDS if region.shape[-1] % one.itemsize == 0)
            part.view(word).view(cfg.nodes, frame, -1).copy_(whole.view(word))
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

    def send_sums(self, sums: torch.Tensor, of: SumsOf) -> int:
        """Pack the own node's [nodes * F, hidden] sums, and put each node's. Returns their landing, for `add_sums`."""
        landing = min(self._landings) if self.engine.queued else 0
        put = self.sums_put(of.frame, landing)
        self._pack_sums(sums, put, of, self.cfg.hidden)
        self._put_sums(put, of)
        if self.engine.queued:
            self._landings.remove(landing)
        return landing

    def _pack_sums(self, sums: torch.Tensor, put: Put, of: SumsOf, columns: int) -> None:
        """Copy [nodes * F, columns] to where a put takes them from."""
        group, out = self._group(Channel.SUMS, of.batch, put.landing), self.base + put.source
        args = PackSumsArgs(group, sums.data_ptr(), out, put.step, put.source_turn, of.frame, columns // 8)
        self._launch("pack_sums", args, -(-of.frame // WARPS))

    def _put_sums(self, put: Put, of: SumsOf) -> None:
        self.engine.put(self, Channel.SUMS, [put])
        if not of.at_once:
            self.engine.tell_exchanged(self, Channel.SUMS)

    def sums_put(self, frame: int, landing: int) -> Put:
        """What travels of the sums that this rank's node has made. `landing`: the first one."""
        source, to, nbytes = self.map.sent_sums, self.map.sums, sums_bytes(frame, self.cfg.hidden)
        source_turn, to_turn = (0 if self.engine.queued else region.stride[0] for region in (source, to))
        places = source.at(landing), source.stride[1], to.at(landing, self.node), to.stride[1]
        return Put(Piece.ROUTES, *places, nbytes, source_turn, to_turn, landing)

    def add_sums(self, own: torch.Tensor, out: torch.Tensor, out_type: OutputType, of: SumsOf, landing: int) -> None:
        """Wait for the other nodes' sums of the oldest round that was not received, write all nodes' sum into `out`
        [T, hidden], and free them. `own`: [T, hidden] of the own node; `landing`: what `send_sums` returned."""
        put, tokens = self.sums_put(of.frame, landing), out.shape[0]
        headers, turn, pitch = self.base + self.map.sums.at(landing), put.to_turn, put.to_step
        self._await_sums(of, headers, pitch, turn, landing)
        slices = slices_log2(tokens, 2 * self.cfg.hidden, self.parts.max_ctas * WARPS) if tokens else 0
        self._launch(
            "sum_nodes",
            SumNodesArgs(
                group=self._group(Channel.SUMS, landing=landing),
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
        self.free(Channel.SUMS, landing)
        self._landings.add(landing)

    # ---- rows of entries, by an engine that brings more than sums

    def send_entries(self, rows: torch.Tensor, of: SumsOf) -> torch.Tensor:
        """Pack the own node's [nodes * F, top_k, hidden] bfloat16 rows, and put each node's. Returns new memory, where
        those of the other nodes land."""
        cfg, columns = self.cfg, self.cfg.top_k * self.cfg.hidden
        pitch = sums_bytes(of.frame, columns)
        sent, landing = (torch.empty(cfg.nodes, pitch, dtype=torch.uint8, device=rows.device) for _ in range(2))
        source, to = sent.data_ptr() - self.base, landing.data_ptr() - self.base + self.node * pitch
        put = Put(Piece.ROUTES, source, pitch, to, pitch, pitch)
        sent[:, :HEADER_BYTES].zero_()  # after a failure none is written
        self._pack_sums(rows, put, of, columns)
        self._put_sums(put, of)
        return landing

    def take_entries(self, landing: torch.Tensor, of: SumsOf) -> torch.Tensor:
        """Wait for what lands there. Returns [nodes, F, top_k, hidden] bfloat16, of which the own node's are not
        there."""
        cfg, pitch = self.cfg, landing.shape[1]
        self._await_sums(of, landing.data_ptr(), pitch, 0)
        self.free(Channel.SUMS)
        return landing[:, HEADER_BYTES:].view(torch.bfloat16).view(cfg.nodes, of.frame, cfg.top_k, cfg.hidden)

    def _await_sums(self, of: SumsOf, headers: int, pitch: int, turn: int, landing: int = 0) -> None:
        group = self._group(Channel.SUMS, of.batch, landing, tells=of.at_once)
        self._launch("await_sums", AwaitMailArgs(group, 1 << Piece.ROUTES, headers, pitch, turn, of.frame), 1)

    def free(self, channel: Channel, landing: int = 0) -> None:
        """Tell the other nodes' ranks that this rank has read what came there, once it has."""
        self.engine.free(self, channel, landing)

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

    def _group(self, channel: Channel, batch: int = 0, landing: int = 0, *, tells: bool = True) -> MailGroup:
        """`tells`: whether the launch tells the host how far the channel is."""
        at, parts, words = self.map, self.parts, self.words_at(landing)
        return MailGroup(
            status=parts.status,
            abort=parts.abort,
            timeout_ns=int(self.cfg.timeout_s * 1e9),
            node=self.node,
            nodes=self.cfg.nodes,
            rounds=words + at.rounds.at(channel),
            arrived=words + at.arrived.at(channel),
            free=words + at.free.at(channel),
            progress=self.engine.progress(channel) if tells else 0,
            batch=batch,
        )

    def _launch(self, kernel: str, arguments: Fields, ctas: int) -> None:
        grid = max(1, min(ctas, self.parts.max_ctas))
        self.parts.kernels[kernel].launch(grid, tuple(numbers(arguments)), self.stream)
