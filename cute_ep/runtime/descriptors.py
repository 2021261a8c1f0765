"""File descriptors between the ranks of a machine, over an abstract Unix socket of each rank.

A descriptor is no number that a store could carry: the kernel copies it from process to process (SCM_RIGHTS). Each rank
opens an inbox, and all learn its address. A peer connects, leaves a descriptor and hangs up; nobody answers. The owner
looks once all peers have said elsewhere that they left theirs, so no call here waits, and a peer that has died is
missed by those who wait for its word.

An abstract socket ends with its process and needs no folder. Ranks reach each other's within one network namespace.
What comes from another user or without the inbox's token is dropped unread, and nobody leaves a descriptor with another
user. Another user of the machine can fill an inbox's queue, though; then ranks share by CUDA IPC, or `connect` fails.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from typing import NamedTuple

from cute_ep.api.errors import EPError

BACKLOG = 128
"""Peers, and strangers, that may have connected before an owner looks."""
TOKEN_BYTES = 16
CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of the process at the other end, as it was when that connected or began to listen."""
SENDER = struct.Struct("<I")
DESCRIPTOR = struct.Struct("i")


class Address(NamedTuple):
    """Of an inbox: the name of its socket, and what a message must begin with."""

    name: bytes
    token: bytes


class Inbox:
    """Where peers leave file descriptors for this process."""

    def __init__(self) -> None:
        self.address = Address(b"\0cute_ep/" + secrets.token_hex(16).encode(), secrets.token_bytes(TOKEN_BYTES))
        self._came: dict[int, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.address.name)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def take(self, rank: int) -> int:
        """The descriptor that a rank has left, which is then the caller's to close. EPError: it has left none."""
        self._look()
        if rank not in self._came:
            raise EPError(f"no descriptor has come from rank {rank}: are both in one network namespace?")
        return self._came.pop(rank)

    def close(self) -> None:
        """Close the socket and what nobody has taken."""
        self._socket.close()
        for descriptor in self._came.values():
            os.close(descriptor)
        self._came.clear()

    def _look(self) -> None:
        """Take in all that has come."""
        while True:
            try:
                line, _ = self._socket.accept()
            except BlockingIOError:
                return
            with line:
                self._take_in(line)

    def _take_in(self, line: socket.socket) -> None:
        """The message of one peer, unless a stranger connected, perhaps without a word. EPError: its descriptor is
        missing."""
        if _user(line) != os.geteuid():
            return
        line.setblocking(False)
        room = socket.CMSG_LEN(DESCRIPTOR.size)  # for one: the kernel drops others
        try:
            message, extra, _, _ = line.recvmsg(TOKEN_BYTES + SENDER.size, room, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionError):
            return
        descriptors = [DESCRIPTOR.unpack(content)[0] for _, kind, content in extra if kind == socket.SCM_RIGHTS]
        token, sender = message[:TOKEN_BYTES], message[TOKEN_BYTES:]
        if not hmac.compare_digest(token, self.address.token) or len(sender) != SENDER.size:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        (rank,) = SENDER.unpack(sender)
        if not descriptors:
            raise EPError(f"no room for the descriptor of rank {rank}: too many files are open")
        if rank in self._came:
            os.close(self._came[rank])
        self._came[rank] = descriptors[0]


def leave(descriptor: int, rank: int, address: Address) -> None:
    """Put a copy of a descriptor into an inbox as rank `rank`. ConnectionRefusedError: the inbox is closed, or in
    another network namespace; OSError: it is full; EPError: it is another user's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.setblocking(False)
        line.connect(address.name)
        if (user := _user(line)) != os.geteuid():
            raise EPError(f"the socket is of user {user}, not {os.geteuid()}")
        socket.send_fds(line, [address.token + SENDER.pack(rank)], [descriptor])


def _user(line: socket.socket) -> int:
    """Who is at the other end."""
    content = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(content)[1]
