"""Sockets between the processes of the reference backend: who is let in, and peers that take or say nothing."""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.routing import Phase
from cute_ep.reference import processes as reference_processes
from cute_ep.reference.processes import HEADER, HELLO, HOST, TOKEN_BYTES, Mail, _meet, _read


def test_a_peer_that_takes_no_messages_is_named_and_holds_up_no_other() -> None:
    """It alone is named: a peer behind it gets the whole message."""
    (to_stuck, stuck), (to_other, other) = socket.socketpair(), socket.socketpair()
    (of_stuck, _a), (of_other, _b) = socket.socketpair(), socket.socketpair()
    mail, message = Mail(0, {1: to_stuck, 2: to_other}, {1: of_stuck, 2: of_other}, 2.0), os.urandom(1 << 21)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(_read, other, HEADER.size + len(message))
        assert mail.post((Phase.ROUTE_TABLE, 1), memoryview(message)) == [1]
        mail.close()
        assert taken.result() == HEADER.pack(Phase.ROUTE_TABLE, 1, len(message)) + message
    for one in (stuck, other, _a, _b):
        one.close()


@pytest.mark.parametrize("does", ["says something else", "says nothing", "leaves", "resets"])
def test_a_stranger_is_not_let_in(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if does == "says nothing":
        monkeypatch.setattr(reference_processes, "HELLO_S", 0.2)
    listener = socket.create_server((HOST, 0))
    token, wrong = b"t" * TOKEN_BYTES, b"w" * TOKEN_BYTES
    port = listener.getsockname()[1]
    stranger, peer = (socket.create_connection((HOST, port)) for _ in range(2))
    if does == "says something else":
        stranger.sendall(HELLO.pack(wrong, 1))
    elif does == "resets":
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if does in ("leaves", "resets"):
        stranger.close()
    peer.sendall(HELLO.pack(token, 1))
    other = socket.create_server((HOST, 0))
    mail = _meet(0, [(port, token), (other.getsockname()[1], token)], listener, token, 1.0)
    assert stranger.fileno() == -1 or stranger.recv(1) == b""
    peer.close()
    assert mail.collect((Phase.ROUTE_TABLE, 1), 30.0) == ({}, [1], True)
    mail.close()
    for one in (listener, other, stranger):
        one.close()


def test_a_peer_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, whether nobody listens at its port or it comes to nobody's."""
    monkeypatch.setattr(reference_processes, "MEETING_S", 0.2)
    token = b"t" * TOKEN_BYTES
    with socket.create_server((HOST, 0)) as listener, socket.create_server((HOST, 0)) as other:
        doors = [(one.getsockname()[1], token) for one in (listener, other)]
        with pytest.raises(EPError, match=r"rank 0: rank\(s\) \[1\] did not connect within 0.2 s"):
            _meet(0, doors, listener, token, 1.0)
        other.close()
        with pytest.raises(EPError, match=f"rank 0: rank 1 could not be reached on port {doors[1][0]}"):
            _meet(0, doors, listener, token, 1.0)
