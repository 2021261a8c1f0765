"""The rail over NCCL without a GPU: a library of queues between threads, and ranks on the CPU with a rail each."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.mail import Channel
from cute_ep.runtime.join_nodes import has_failed
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.rails import nccl
from cute_ep.runtime.rails.nccl import NcclRail
from cute_ep.runtime.rails.watch import Watch
from tests.plain_memory import PlainHostMemory

from .emulated_nodes import connected


class Queues:
    """A library whose groups end when all that was sent to them is here, as NCCL's do; a communicator is (id, rank)."""

    def __init__(self) -> None:
        self.sent: dict[tuple, deque[bytes]] = defaultdict(deque)
        self.changed, self.ended = threading.Condition(), set[tuple]()
        self.group_of_thread = threading.local()

    def connect(self, unique_id: bytes, rank: int, ranks: int, max_ctas: int) -> tuple:
        return unique_id, rank

    @contextmanager
    def group(self) -> Iterator[None]:
        self.group_of_thread.calls = []
        yield
        for call in self.group_of_thread.calls:
            call()

    def send(self, address: int, nbytes: int, peer: int, communicator: tuple, stream: int) -> None:
        where = communicator[0], communicator[1], peer
        with self.changed:
            self.sent[where].append(ctypes.string_at(address, nbytes))
            self.changed.notify_all()

    def receive(self, address: int, nbytes: int, peer: int, communicator: tuple, stream: int) -> None:
        def take() -> None:
            came = self.sent[communicator[0], peer, communicator[1]]
            with self.changed:
                self.changed.wait_for(lambda: came or communicator in self.ended)
                if communicator not in self.ended:
                    content = came.popleft()
                    assert len(content) == nbytes
                    ctypes.memmove(address, content, nbytes)

        self.group_of_thread.calls.append(take)

    def abort(self, communicator: tuple) -> None:
        with self.changed:
            self.ended.add(communicator)
            self.changed.notify_all()


class Board:
    """What a rank's store shows of all ranks' words, unless it is gone or silent."""

    gone = silent = False

    def __init__(self, rank: int, said: dict[tuple[str, int], str]) -> None:
        self.rank, self.said = rank, said

    def post(self, name: str, text: str) -> None:
        if self.gone:
            raise EPError("the store is gone")
        self.said[name, self.rank] = text

    def posted(self, name: str, rank: int) -> str:
        if self.silent:
            threading.Event().wait()
        return self.said.get((name, rank), "")


def leave_out_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rail does there it does in ordinary memory, at once."""

    @contextmanager
    def on_device(device: object) -> Iterator[None]:
        yield

    stream = SimpleNamespace(cuda_stream=0, query=lambda: True)
    monkeypatch.setattr(nccl, "HostMemory", PlainHostMemory)
    monkeypatch.setattr(nccl, "on_device", on_device)
    monkeypatch.setattr(nccl, "take_stream", lambda device: stream)
    monkeypatch.setattr(nccl, "give_back", lambda stream: None)
    monkeypatch.setattr(nccl.driver_calls, "copy", lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes))
    monkeypatch.setattr(nccl.driver_calls, "relaxed_capture", nullcontext)


@contextmanager
def over_nccl(cfg: EPConfig, library: object | None = None) -> Iterator[tuple[list[NodesCommunicator], list[Watch]]]:
    """The ranks of `connected` with a rail over NCCL each, and their watches, which have not started."""
    library, said = library or Queues(), {}
    with connected(cfg) as made, pytest.MonkeyPatch.context() as patch:
        leave_out_the_device(patch)
        watches = []
        for ep in made:
            mail = ep.mail
            engine = NcclRail(library, torch.device("cpu"), mail.parts.abort)  # type: ignore[arg-type]
            rail = cfg.place(ep.rank)[0]
            engine.connect([f"{rail} {channel}".encode() for channel in Channel], mail.node, cfg.nodes)
            mail.engine = engine
            engine.introduce(mail)
            watches.append(
                Watch(
                    engine,
                    ep._status,
                    Board(ep.rank, said),
                    failed=partial(has_failed, mail, ep._status, ep.node),
                    timeout_s=cfg.timeout_s,
                )
            )
        yield made, watches
