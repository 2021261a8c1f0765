"""File descriptors that processes of a machine leave for each other, and what strangers leave."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from cute_ep.api.errors import EPError
from cute_ep.runtime import descriptors
from cute_ep.runtime.descriptors import BACKLOG, SENDER, Address, Inbox, leave


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """One that is closed at the end, when nothing of it may be open."""
    before = open_files()
    with closing(Inbox()) as made:
        yield made
    assert open_files() == before


@pytest.fixture
def file() -> Iterator[int]:
    """A descriptor."""
    made = os.memfd_create("file")
    yield made
    os.close(made)


def same(one: int, other: int) -> bool:
    """Whether two descriptors are of one file."""
    return os.fstat(one).st_ino == os.fstat(other).st_ino


def test_ranks_leave_descriptors_for_their_owner(inbox: Inbox, file: int) -> None:
    """In any order; no child of this process inherits them."""
    other = os.memfd_create("other")
    leave(other, 40, inbox.address)
    os.close(other)
    leave(file, 3, inbox.address)
    for rank, is_file in ((3, True), (40, False)):
        taken = inbox.take(rank)
        assert same(taken, file) == is_file and not os.get_inheritable(taken)
        os.close(taken)
    with pytest.raises(EPError, match=r"^no descriptor has come from rank 3: are both in one network namespace\?$"):
        inbox.take(3)


def test_what_nobody_takes_is_closed(inbox: Inbox, file: int) -> None:
    """The first of two of one rank, and what was looked at when another one was wanted."""
    for _ in range(2):
        leave(file, 3, inbox.address)
    with pytest.raises(EPError):
        inbox.take(4)
    leave(file, 4, inbox.address)


def strange(inbox: Inbox, message: bytes, *files: int) -> None:
    """Who knows the name leaves a message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(inbox.address.name)
        if message:
            socket.send_fds(line, [message], files)


def test_strangers_are_not_heard(inbox: Inbox, file: int) -> None:
    """They come without the token, with more or less than a message, or say nothing; ranks are heard all the same."""
    token, sender = inbox.address.token, SENDER.pack(3)
    for message in (b"", b"hello", bytes(len(token)) + sender, token, token + sender[:2]):
        strange(inbox, message, *[file] * 3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.connect(inbox.address.name)
        with pytest.raises(EPError, match="no descriptor has come from rank 3"):
            inbox.take(3)
    leave(file, 3, inbox.address)
    os.close(inbox.take(3))


def test_other_users_neither_leave_descriptors_nor_get_them(
    inbox: Inbox, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(file, 3, inbox.address)
    own = os.geteuid()
    monkeypatch.setattr(descriptors, "_user", lambda line: own + 1)
    with pytest.raises(EPError, match="no descriptor has come"):
        inbox.take(3)
    with pytest.raises(EPError, match=rf"^the socket is of user {own + 1}, not {own}$"):
        leave(file, 3, inbox.address)


def test_the_other_end_is_this_user(inbox: Inbox) -> None:
    """Of the owner, and of who has hung up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(inbox.address.name)
        assert descriptors._user(line) == os.geteuid()
    line, _ = inbox._socket.accept()
    with line:
        assert descriptors._user(line) == os.geteuid()


def test_a_closed_or_full_inbox_is_told_from_each_other(inbox: Inbox, file: int) -> None:
    with closing(Inbox()) as closed:
        pass
    for address in (closed.address, Address(b"\0cute_ep/nobody", bytes(16))):
        with pytest.raises(ConnectionRefusedError):
            leave(file, 3, address)
    for _ in range(BACKLOG + 1):
        strange(inbox, b"hello")
    with pytest.raises(BlockingIOError):
        leave(file, 3, inbox.address)


def test_a_descriptor_that_finds_no_room_is_an_error(inbox: Inbox, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then delivers the message without it, as where a process has too many."""
    leave(file, 3, inbox.address)
    monkeypatch.setattr(socket, "CMSG_LEN", lambda size: 0)
    with pytest.raises(EPError, match=r"^no room for the descriptor of rank 3: too many files are open$"):
        inbox.take(3)
