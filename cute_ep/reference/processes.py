"""The reference backend with one process per rank: what `connect` makes on a machine without GPUs.

The process group introduces the ranks to each other. Messages then travel over sockets of the communicator's own, so
its calls may be interleaved with the caller's collectives in any order that works on GPUs. A sending half returns once
its message is on the way. A receiving half, and so a fused call, returns once every rank has sent and its results are
in place, as any operation on CPU tensors does; it raises EPTimeout after `cfg.timeout_s`, or as soon as a rank that it
waits for has closed its communicator or ended. A program dead-locks here and not on GPUs only where another rank waits
on the host, before its own call, for something that this rank does after its receiving half.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import BytesIO
from threading import Condition, Thread
from typing import Any, Protocol, TypeVar

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.flags import Flag
from cute_ep.api.waits import Wait
from cute_ep.layouts.maps.routing import Phase
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.reference.rounds import Collective, Exchange, Receiver, Round

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
MEETING_S = 60.0
"""How long ranks that connect wait for each other's sockets, which all exist by then."""
HELLO_S = 10.0
"""How long who connects may take to say who it is."""
LEAST_S = 1.0
"""Least time to take a message in, however short `timeout_s` is: the other end may not have a core at the moment."""
TOKEN_BYTES = 16
HELLO = struct.Struct(f"!{TOKEN_BYTES}sI")
"""The listener's token, and the rank that connects."""
HEADER = struct.Struct("!IQQ")
"""Of a message: phase, number of the round, bytes that follow."""

Made = TypeVar("Made")
Key = tuple[Phase, int]


class OnAllRanks(Protocol):
    """Collective: this rank's make(), and share() of what every rank made; where it fails, it fails on all ranks."""

    def __call__(
        self,
        make: Callable[[], Made],
        share: Callable[[Made], Any] = ...,
        undo: Callable[[Made], None] = ...,
        doing: str = ...,
    ) -> tuple[Made, list]: ...


def connect_processes(cfg: EPConfig, rank: int, on_all_ranks: OnAllRanks) -> ReferenceCommunicator:
    """This process's communicator, rank `rank` of `cfg`; collective.

    Raises:
        EPError: a rank could not be reached.
    """
    if cfg.skip_a2a:
        alone = Exchange([rank])
        return ReferenceCommunicator(cfg, rank, alone, group=alone)
    (listener, token), doors = on_all_ranks(
        lambda: (socket.create_server((HOST, 0), backlog=cfg.world_size), secrets.token_bytes(TOKEN_BYTES)),
        lambda made: (made[0].getsockname()[1], made[1]),
        lambda made: made[0].close(),
        "open a socket",
    )
    with listener:
        mail, _ = on_all_ranks(
            lambda: _meet(rank, doors, listener, token, cfg.timeout_s),
            undo=lambda made: made.close(),
            doing="connect to its peers' sockets",
        )
    joint = ProcessExchange(cfg, rank, mail)
    communicator = ReferenceCommunicator(cfg, rank, joint, group=joint)
    weakref.finalize(communicator, mail.close)  # the listening threads keep `mail`, and it its sockets
    return communicator


def _meet(
    rank: int, doors: Sequence[tuple[int, bytes]], listener: socket.socket, token: bytes, timeout_s: float
) -> Mail:
    """A socket to every peer, and one from each. `doors`: (port, token) of every rank's listener. EPError: some peers
    could not be reached, or did not connect within MEETING_S."""
    with ExitStack() as undo:
        to: dict[int, socket.socket] = {}
        of: dict[int, socket.socket] = {}
        for peer, (port, theirs) in enumerate(doors):
            if peer != rank:
                try:
                    to[peer] = undo.enter_context(socket.create_connection((HOST, port), MEETING_S))
                    to[peer].sendall(HELLO.pack(theirs, rank))
                except OSError as error:
                    raise EPError(f"rank {rank}: rank {peer} could not be reached on port {port}: {error}") from error
        wait = Wait(MEETING_S, LOG)
        while len(of) < len(to):
            listener.settimeout(max(wait.until_word, 1e-3))
            try:
                link = undo.enter_context(listener.accept()[0])
            except TimeoutError:
                absent = sorted(set(to) - set(of))
                if wait.left <= 0:
                    raise EPError(f"rank {rank}: rank(s) {absent} did not connect within {MEETING_S:g} s") from None
                wait.say(rank, f"rank(s) {absent}", "connect to its socket")
                continue
            source = _introduced(link, token)
            if source is None:
                link.close()
            else:
                link.settimeout(None)
                of[source] = link
        undo.pop_all()
    return Mail(rank, to, of, max(timeout_s, LEAST_S))


def _introduced(link: socket.socket, token: bytes) -> int | None:
    """The rank at the other end of a socket; None: a stranger's, who says something else, nothing in HELLO_S, or
    resets."""
    link.settimeout(HELLO_S)
    try:
        said = _read(link, HELLO.size)
    except OSError:
        return None
    given, peer = HELLO.unpack(said) if said else (b"", None)
    return peer if secrets.compare_digest(given, token) else None


def _read(link: socket.socket, size: int) -> bytearray | None:
    """The next `size` bytes; None when the other end has closed."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


class Mail:
    """Messages to and from every peer. A thread per peer takes them in, so no peer's send waits for a call here.

    Belongs to the process that makes it: a forked child has the same sockets, but none of the threads.
    """

    def __init__(
        self, rank: int, to: Mapping[int, socket.socket], of: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        """`to`, `of`: by peer, a socket to send to it and one to receive from it. `timeout_s`: to take a message."""
        self.rank, self._to, self._of, self._timeout_s = rank, to, of, timeout_s
        self._process = os.getpid()
        for link in to.values():
            link.setblocking(False)
        self._news = Condition()
        self._boxes: dict[Key, dict[int, bytearray]] = defaultdict(dict)
        self._gone: set[int] = set()
        for peer, link in of.items():
            Thread(target=self._listen, args=(peer, link), name=f"cute_ep rank {rank} of {peer}", daemon=True).start()

    def check_process(self) -> None:
        """EPError in another process than the one that connected."""
        if os.getpid() != self._process:
            raise EPError(f"rank {self.rank}: the communicator belongs to process {self._process}, connect in this one")

    def post(self, key: Key, message: memoryview) -> list[int]:
        """Send to all peers at once. One that has gone is left out: whoever waits for it will say so.

        Returns:
            The peers that did not take their message in time: what is sent to them next would be taken for its rest.
        """
        wait = Wait(self._timeout_s, LOG)
        whole = memoryview(HEADER.pack(*key, len(message)) + message)
        unsent = dict.fromkeys(self._to, whole)
        with selectors.DefaultSelector() as selector:
            for peer, link in self._to.items():
                selector.register(link, selectors.EVENT_WRITE, peer)
            while unsent and wait.left > 0:
                wait.say(self.rank, f"rank(s) {sorted(unsent)}", f"take the message of round {key[1]}")
                for ready, _ in selector.select(wait.until_word):
                    peer = ready.data
                    try:
                        unsent[peer] = unsent[peer][self._to[peer].send(unsent[peer]) :]
                    except BlockingIOError:
                        continue
                    except OSError:
                        unsent[peer] = unsent[peer][:0]
                    if not unsent[peer]:
                        del unsent[peer]
                        selector.unregister(ready.fileobj)
        return sorted(unsent)

    def collect(self, key: Key, timeout_s: float) -> tuple[dict[int, bytearray], list[int], bool]:
        """(messages by peer, peers whose message is missing, whether those have gone): all of them, or what there is
        once `timeout_s` is over or a missing peer has gone. EPError: as `check_process`."""
        self.check_process()
        wait = Wait(timeout_s, LOG)
        with self._news:
            while True:
                box = dict(self._boxes[key])
                absent = [peer for peer in self._of if peer not in box]
                gone = [peer for peer in absent if peer in self._gone]
                if gone or not absent or wait.left <= 0:
                    return box, gone or absent, bool(gone)
                wait.say(self.rank, f"rank(s) {absent}", f"send in round {key[1]} of phase {key[0].name}")
                self._news.wait(wait.until_word)

    def discard(self, key: Key) -> None:
        """Forget the messages of a round."""
        with self._news:
            self._boxes.pop(key, None)

    def close(self) -> None:
        """Peers still get what was sent, and then learn that this rank has gone. In a forked child they notice nothing:
        a shutdown would end the parent's connections."""
        for link in (*self._to.values(), *self._of.values()):
            if os.getpid() == self._process:
                with suppress(OSError):  # the other end was first, or it is closed already
                    link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _listen(self, peer: int, link: socket.socket) -> None:
        try:
            while (header := _read(link, HEADER.size)) is not None:
                phase, number, size = HEADER.unpack(header)
                message = _read(link, size)
                if message is None:
                    break
                with self._news:
                    self._boxes[Phase(phase), number][peer] = message
                    self._news.notify_all()
        except OSError:
            pass
        with self._news:
            self._gone.add(peer)
            self._news.notify_all()


class ProcessCollective(Collective):
    """The rounds of dispatch or of combine as the process of one rank sees them."""

    def __init__(self, cfg: EPConfig, name: str, phase: Phase, rank: int, mail: Mail) -> None:
        super().__init__(name, phase, range(cfg.world_size), [rank])
        self._mail, self._timeout_s = mail, cfg.timeout_s

    def _prepare_post(self, rank: int, arguments: Any) -> Callable[[int], None]:
        """What sends the arguments to all peers. EPTimeout from it: some did not take them within the time."""
        self._mail.check_process()
        packed = BytesIO()
        torch.save(arguments, packed)

        def post(number: int) -> None:
            if busy := self._mail.post((self.phase, number), packed.getbuffer()):
                lines = [f"rank {peer}: did not take the message of round {number}" for peer in busy]
                raise self.timeout(rank, number, busy, lines)

        return post

    def receive(self, rank: int, receiver: Receiver) -> bool:
        """As `Collective.receive`, once all messages are here. EPTimeout: one is not within the time."""
        number = self.order[rank].received + 1
        key = self.phase, number
        messages, missing, gone = self._mail.collect(key, self._timeout_s)
        if missing:
            ended = [f"rank {peer}: has closed its communicator, or its process has ended" for peer in missing]
            raise self.timeout(rank, number, missing, ended if gone else ())
        arguments = self._live.setdefault(number, Round(number)).arguments
        for peer, message in messages.items():
            arguments[peer] = torch.load(BytesIO(message), weights_only=False)
        filled = super().receive(rank, receiver)
        self._mail.discard(key)
        return filled

    def behind(self, rank: int) -> list[Flag]:
        order = self.order[rank]
        number = order.received + 1
        return self._calls(number, self._mail.collect((self.phase, number), 0.0)[1]) if order.sent >= number else []


class ProcessExchange(Exchange):
    """Dispatch and combine of one rank with those of other processes."""

    def __init__(self, cfg: EPConfig, rank: int, mail: Mail) -> None:
        self._mail = mail
        self.dispatch = ProcessCollective(cfg, "dispatch", Phase.ROUTE_TABLE, rank, mail)
        self.combine = ProcessCollective(cfg, "combine", Phase.RETURN_ROUND, rank, mail)

    def close(self, rank: int) -> None:
        self._mail.close()
