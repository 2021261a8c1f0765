"""The kernels between nodes without a GPU: Python that does what they do, on the addresses that they are given.

A launch runs at once, in the thread that launches, and waits as a kernel would. So each rank needs a thread of its own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

import torch

from cute_ep.layouts.maps.arena import LL_BYTES
from cute_ep.layouts.maps.mail import HEADER_BYTES, MailHeader, Piece, RoundWord
from cute_ep.layouts.maps.parameters import parameters_of
from cute_ep.layouts.maps.routing import BEYOND, INPUT_ERRORS, OutputType, Phase, StatusWord, pack_phase

TYPES = {OutputType.BF16: torch.bfloat16, OutputType.FP16: torch.float16, OutputType.F32: torch.float32}


def at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The memory at an address as a row-major tensor."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return (
        torch.frombuffer((ctypes.c_uint8 * max(count, 1)).from_address(address), dtype=torch.uint8)[:count]
        .view(dtype)
        .view(shape)
    )


def word(address: int) -> torch.Tensor:
    return at(address, torch.int64, 1)


class Emulated:
    """A kernel by name, as `driver.Kernel` is launched, also by several threads at a time.

    Attributes:
        given: arguments of the launch that runs.
    """

    def __init__(self, name: str, given: Mapping[str, int] | None = None) -> None:
        self.name, self.given = name, given or {}
        self.names = [parameter for parameter, _ in parameters_of(name)]

    def launch(self, grid: int, given: Sequence[int], stream: int) -> None:
        one = Emulated(self.name, dict(zip(self.names, given, strict=True)))
        values = {name: value for name, value in one.given.items() if not name.startswith(("group.", "ids."))}
        getattr(one, self.name)(**values)

    def group(self, name: str) -> int:
        return self.given[f"group.{name}"]

    @property
    def others(self) -> list[int]:
        return [node for node in range(self.group("nodes")) if node != self.group("node")]

    @property
    def healthy(self) -> bool:
        return not int(word(self.group("abort")))

    def rounds(self, which: RoundWord) -> torch.Tensor:
        return word(self.group("rounds") + LL_BYTES * which)

    @property
    def batch(self) -> int:
        return int(at(self.group("batch"), torch.int32, 1)) if self.group("batch") else 0

    def report(self, record: int, phase: Phase, index: int, expected: int, seen: int) -> None:
        words = at(self.group("status") + record * 4 * len(StatusWord), torch.int32, len(StatusWord))
        if phase in INPUT_ERRORS or not int(words[StatusWord.PHASE]):
            words.copy_(torch.tensor([pack_phase(phase, 0), index, expected, seen]))
        if phase not in INPUT_ERRORS:
            word(self.group("abort")).fill_(1)

    def wait(self, address: int, epoch: int, node: int, phase: Phase, index: int) -> None:
        until = time.monotonic() + self.group("timeout_ns") / 1e9
        while self.healthy and int(word(address)) < epoch:
            if time.monotonic() > until:
                self.report(node, phase, index, epoch, int(word(address)))
            time.sleep(1e-4)

    def wait_free(self, epoch: int, phase: Phase) -> None:
        for node in self.others:
            self.wait(self.group("free") + 8 * node, epoch, node, phase, 0)

    def finish(self, epoch: int, headers: Sequence[int], frame: int) -> None:
        for address in headers:
            header = at(address, torch.int32, len(MailHeader))
            header[MailHeader.FRAME], header[MailHeader.BATCH] = frame, self.batch
            header[MailHeader.ROUND] = epoch
        self.rounds(RoundWord.SENT).fill_(epoch)
        self.tell(0, epoch)

    def tell(self, which: int, epoch: int) -> None:
        if self.group("progress"):
            word(self.group("progress") + 8 * which).fill_(epoch)

    # ---- the kernels

    def pack_frame(
        self,
        x: int,
        x_vectors: int,
        scales: int,
        scales_pitch: int,
        row_scales: int,
        weights: int,
        payload: int,
        scales_out: int,
        routes: int,
        weights_at: int,
        row_scales_at: int,
        tokens: int,
        frame: int,
        top_k: int,
        experts: int,
        vectors: int,
        scale_bytes: int,
    ) -> None:
        epoch = int(self.rounds(RoundWord.SENT)) + 1
        self.wait_free(epoch - 1, Phase.FRAME_READ)
        if not self.healthy:
            return
        if tokens:
            rows = [at(x + token * x_vectors * 16, torch.uint8, vectors * 16) for token in range(tokens)]
            at(payload, torch.uint8, tokens, vectors * 16).copy_(torch.stack(rows))
            if scale_bytes:
                rows = [at(scales + token * scales_pitch, torch.uint8, scale_bytes) for token in range(tokens)]
                at(scales_out, torch.uint8, tokens, scale_bytes).copy_(torch.stack(rows))
            if row_scales:
                at(routes + row_scales_at, torch.int16, tokens).copy_(at(row_scales, torch.int16, tokens))
        ids, out = (
            at(routes + HEADER_BYTES, torch.int32, frame, top_k),
            at(routes + weights_at, torch.float32, frame, top_k),
        )
        ids.fill_(-1)
        out.fill_(1)
        if tokens:
            given = at(self.given["ids.data"], torch.int64 if self.given["ids.wide"] else torch.int32, tokens, top_k)
            low = given.int()
            wrong = (low < -1) | (low >= experts)
            for index in (wrong | (low != given)).flatten().nonzero().flatten().tolist():
                record, seen = self.group("nodes") + INPUT_ERRORS.index(Phase.EXPERT_ID), int(given.flatten()[index])
                seen = seen if -(2**31) <= seen < 2**31 else BEYOND
                self.report(record, Phase.EXPERT_ID, index, experts, seen)
            ids[:tokens] = torch.where(wrong, -1, low)
            if weights:
                out[:tokens] = at(weights, torch.float32, tokens, top_k)
        self.finish(epoch, [routes], frame)

    def pack_sums(self, sums: int, out: int, pitch: int, turn: int, frame: int, vectors: int) -> None:
        epoch = int(self.rounds(RoundWord.SENT)) + 1
        self.wait_free(epoch - 2, Phase.SUMS_READ)
        if not self.healthy:
            return
        out += (epoch & 1) * turn
        rows = at(sums, torch.int16, self.group("nodes"), frame, vectors * 8)
        for node in self.others:
            at(out + node * pitch + HEADER_BYTES, torch.int16, frame, vectors * 8).copy_(rows[node])
        self.finish(epoch, [out + node * pitch for node in self.others], frame)

    def await_frames(self, pieces: int, headers: int, pitch: int, turn: int, frame: int) -> None:
        self._await(Phase.FRAME, pieces, headers, pitch, turn, frame)

    def await_sums(self, pieces: int, headers: int, pitch: int, turn: int, frame: int) -> None:
        self._await(Phase.SUMS, pieces, headers, pitch, turn, frame)

    def _await(self, phase: Phase, pieces: int, headers: int, pitch: int, turn: int, frame: int) -> None:
        epoch = int(self.rounds(RoundWord.RECEIVED)) + 1
        if self.healthy:
            self.tell(1, epoch)
        headers += (epoch & 1) * turn
        for node in self.others:
            for piece in Piece:
                if pieces >> piece & 1:
                    self.wait(self.group("arrived") + 8 * (node * len(Piece) + piece), epoch, node, phase, piece)
        if not self.healthy:
            return
        for node in self.others:
            header = at(headers + node * pitch, torch.int32, len(MailHeader)).tolist()
            if header[MailHeader.ROUND] != epoch:
                self.report(node, phase, len(Piece), epoch, header[MailHeader.ROUND])
            elif header[MailHeader.FRAME] != frame:
                self.report(node, Phase.FRAME_SIZE, epoch, frame, header[MailHeader.FRAME])
            elif self.batch and header[MailHeader.BATCH] and self.batch != header[MailHeader.BATCH]:
                self.report(node, Phase.PAIR, epoch, self.batch, header[MailHeader.BATCH])
        if self.healthy:
            self.rounds(RoundWord.RECEIVED).fill_(epoch)

    def unpack_frames(
        self,
        routes: int,
        pitch: int,
        weights_at: int,
        row_scales_at: int,
        ids: int,
        weights: int,
        row_scales: int,
        frame: int,
        top_k: int,
        first_expert: int,
        experts: int,
    ) -> None:
        for node in range(self.group("nodes")):
            mail = routes + node * pitch
            local = at(mail + HEADER_BYTES, torch.int32, frame, top_k) - first_expert
            inside = (local >= 0) & (local < experts)
            at(ids, torch.int32, self.group("nodes"), frame, top_k)[node] = torch.where(inside, local, -1)
            given = at(mail + weights_at, torch.float32, frame, top_k)
            at(weights, torch.float32, self.group("nodes"), frame, top_k)[node] = given
            if row_scales:
                given = at(mail + row_scales_at, torch.int16, frame)
                at(row_scales, torch.int16, self.group("nodes"), frame)[node] = given

    def sum_nodes(
        self,
        own: int,
        landed: int,
        pitch: int,
        turn: int,
        out: int,
        out_type: int,
        tokens: int,
        vectors: int,
        slices_log2: int,
    ) -> None:
        if not tokens:
            return
        landed += (int(self.rounds(RoundWord.RECEIVED)) & 1) * turn
        total = torch.zeros(tokens, vectors * 8)
        for node in range(self.group("nodes")):
            rows = own if node == self.group("node") else landed + node * pitch
            total = total + at(rows, torch.bfloat16, tokens, vectors * 8).float()
        dtype = TYPES[OutputType(out_type)]
        at(out, dtype, tokens, vectors * 8).copy_(total.to(dtype))

    def put_mail(self, mails: int, **pieces: int) -> None:
        if not self.healthy:
            return
        parity = int(self.rounds(RoundWord.SENT)) & 1
        for node in self.others:
            there = int(at(mails, torch.int64, self.group("nodes"))[node])
            for name in ("payload", "scales", "routes"):
                one = {key.partition(".")[2]: value for key, value in pieces.items() if key.startswith(f"{name}.")}
                source = one["source"] + node * one["step"] + parity * one["source_turn"]
                if one["num_bytes"]:
                    ctypes.memmove(there + one["to"] + parity * one["to_turn"], source, one["num_bytes"])

    def signal_mail(self, mails: int, word: int, words: int, round_at: int) -> None:
        if not self.healthy:
            return
        for node in self.others:
            there = int(at(mails, torch.int64, self.group("nodes"))[node]) + word
            for number in range(4):
                if words >> number & 1:
                    at(there + 8 * number, torch.int64, 1).copy_(at(round_at, torch.int64, 1))
