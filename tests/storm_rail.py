"""An engine for tests that brings mail as badly as `Engine.put` allows: in parts of any size and order, over several
lanes, some of them late. What it does follows from a seed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, Protocol

import torch

from cute_ep.layouts.maps.mail import Channel, Piece
from cute_ep.layouts.maps.mail_arguments import SignalMailArgs
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.peers import PeerStores
from cute_ep.runtime.streams import give_back, take_stream

LONGEST_S = 1e-3
"""Of a delay."""
MOST_PARTS = 4
"""Of a piece."""
MOST_ROUNDS = 1 << 16
CYCLES_PER_S = 1.5e9
"""Of a GPU, at most about."""


class Lanes(Protocol):
    """Where work runs beside the caller's, in the order in which each lane is given it. A mark stands for what was
    given before it; to wait for one is to wait for that."""

    def mark(self) -> Any:
        """Of the caller's work so far."""

    def run(self, lane: int, after: Sequence[Any], delay_s: float, work: Callable[[], None]) -> Any:
        """Do work in a lane, after marks and then a delay; its mark."""

    def join(self, marks: Sequence[Any]) -> None:
        """Have the caller's further work wait for marks."""

    def close(self) -> None:
        """Wait for all work, and end."""


class Streams:
    """Lanes of a GPU. All its ranks share them: they have their calls by turns, and no part waits for a later call.

    Each stream needs a hardware queue that no rank's stream has (CUDA_DEVICE_MAX_CONNECTIONS): behind a rank's kernel
    that waits for a part the part would never run.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.streams = device, [take_stream(device) for _ in range(count)]
        for lane in range(count):
            self.run(lane, [], LONGEST_S, lambda: None)  # the first use would wait for kernels of ranks
        torch.cuda.synchronize(device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def run(
        self, lane: int, after: Sequence[torch.cuda.Event], delay_s: float, work: Callable[[], None]
    ) -> torch.cuda.Event:
        with torch.cuda.device(self.device), torch.cuda.stream(self.streams[lane]):
            for mark in after:
                self.streams[lane].wait_event(mark)
            if delay_s:
                torch.cuda._sleep(int(delay_s * CYCLES_PER_S))
            work()
            return self.mark()

    def join(self, marks: Sequence[torch.cuda.Event]) -> None:
        for mark in marks:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def close(self) -> None:
        for stream in self.streams:
            stream.synchronize()
            give_back(stream)


class Threads:
    """Lanes without a GPU. Work waits only for what was given before it, so no lanes wait for each other."""

    def __init__(self, count: int) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(count)]

    def mark(self) -> Future:
        done: Future = Future()
        done.set_result(None)  # the caller's work is done when its calls return
        return done

    def run(self, lane: int, after: Sequence[Future], delay_s: float, work: Callable[[], None]) -> Future:
        def late() -> None:
            self.join(after)
            time.sleep(delay_s)
            work()

        return self.pools[lane].submit(late)

    def join(self, marks: Sequence[Future]) -> None:
        for mark in marks:
            mark.result()

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown()


class Storm(PeerStores):
    """The engine, for calls that run as they are made: its host counts their rounds, which a replayed graph does not.

    A word of `arrived` gets a piece's round after all bytes of that piece, at every peer at once, and after the round
    before: words only grow. Pieces come in any order.

    Args:
        lanes: of a device, and how many there are.
        copies: the bytes are taken from copies of the sources, which are made in the caller's order, and land any time
            later, while the caller packs the next mail. Without, sources are read as late as a call may read them: the
            caller's work goes on after the last part.
    """

    def __init__(self, lanes: Callable[[torch.device], Lanes], count: int, *, seed: int, copies: bool) -> None:
        self._make, self.count, self.seed, self.copies = lanes, count, seed, copies
        self._lanes: dict[torch.device, Lanes] = {}
        self._numbers: dict[torch.device, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._sent: dict[tuple[int, Channel], int] = defaultdict(int)
        self._signaled: dict[tuple[int, Channel, Piece], list[Any]] = defaultdict(list)

    def prepare(self, mails: Sequence[RankMail]) -> None:
        """Make what the ranks' calls use, before the first; then be their engine."""
        for mail in mails:
            device = mail.memory.device
            if device not in self._lanes:
                self._lanes[device] = self._make(device)
                self._numbers[device] = torch.arange(MOST_ROUNDS, device=device)
            if self.copies:
                self._held[mail.parts.rank] = torch.zeros_like(mail.memory)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            mail.engine = self

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """As of `Engine`."""
        rank, lanes = mail.parts.rank, self._lanes[mail.memory.device]
        number = self._sent[rank, channel] = self._sent[rank, channel] + 1
        random = Random(f"{self.seed} {rank} {channel} {number}")
        whole = [of_round(one, number) for one in pieces]
        if self.copies:
            whole = [self._copied(mail, one) for one in whole]
        ready = lanes.mark()
        parts = [(one.piece, part) for one in whole for part in parts_of(one, random)]
        random.shuffle(parts)
        brought: dict[Piece, list[Any]] = defaultdict(list)
        left = [piece for piece, _ in parts]
        for piece, part in parts:
            put = partial(mail.put, channel, [part])
            brought[piece].append(lanes.run(random.randrange(self.count), [ready], _delay(random), put))
            left.remove(piece)
            if piece not in left:
                before = self._signaled[rank, channel, piece]
                signal = partial(self._signal, mail, channel, piece, number)
                mark = lanes.run(random.randrange(self.count), [*brought[piece], *before], _delay(random), signal)
                self._signaled[rank, channel, piece] = [mark]
        if not self.copies:
            lanes.join([mark for marks in brought.values() for mark in marks])

    def settle(self) -> None:
        """Have the caller's further work wait for all that was put."""
        for lanes in self._lanes.values():
            lanes.join([lanes.run(lane, [], 0, lambda: None) for lane in range(self.count)])

    def close(self) -> None:
        """Wait for all lanes and give them back."""
        for lanes in self._lanes.values():
            lanes.close()

    def _copied(self, mail: RankMail, one: Put) -> Put:
        """The same piece from a copy. When a source is packed again its last copy has landed at every peer."""
        held = self._held[mail.parts.rank]
        for node in range(mail.cfg.nodes) if one.step else [0]:
            begin = one.source + node * one.step
            held[begin : begin + one.nbytes].copy_(mail.memory[begin : begin + one.nbytes], non_blocking=True)
        return one._replace(source=one.source + held.data_ptr() - mail.base)

    def _signal(self, mail: RankMail, channel: Channel, piece: Piece, number: int) -> None:
        """Store a round in every peer's word of a piece. The mail's own count may be a later one."""
        numbers = self._numbers[mail.memory.device]
        word = mail.map.arrived.at(channel, mail.node, piece)
        mails, round_at = mail.base + mail.map.mails.at(), numbers[number].data_ptr()
        mail._launch("signal_mail", SignalMailArgs(mail._group(channel), mails, word, 1, round_at), 1)


def of_round(one: Put, number: int) -> Put:
    """A piece of one round, whatever the parity is when it is brought."""
    parity = number & 1
    source, to = one.source + parity * one.source_turn, one.to + parity * one.to_turn
    return one._replace(source=source, to=to, source_turn=0, to_turn=0)


def parts_of(one: Put, random: Random) -> list[Put]:
    """A piece in parts; half of them begin at any byte, the others at vectors."""
    unit = random.choice((1, 16))
    most = min(random.randint(1, MOST_PARTS), -(-one.nbytes // unit))
    cuts = sorted(random.sample(range(unit, one.nbytes, unit), most - 1))
    ends = [0, *cuts, one.nbytes]
    return [
        one._replace(source=one.source + begin, to=one.to + begin, nbytes=end - begin) for begin, end in pairwise(ends)
    ]


def _delay(random: Random) -> float:
    """Mostly none, else up to LONGEST_S."""
    return random.choice((0, 0, random.random())) * LONGEST_S
