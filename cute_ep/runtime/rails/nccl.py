"""The rail of ranks with a process each: sends and receives of NCCL, in stream order.

A receive writes to this rank's memory when its own stream has come to it, and a send has read its sources when what is
behind it runs. So no rank waits for words of another one: kernels find them to be of a round that never comes, and only
compare the headers of mails. What NCCL lacks is a bound on its waits, and that is `Watch`'s.

Dispatch and combine may be on two streams, so each channel has a communicator of its own. NCCL's kernels have at most
FREE_SMS CTAs, and no clusters: clusters of 2 or 4 do not start beside a kernel that waits on 100 or 124 of an H100's
132 SMs, single CTAs do.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from functools import partial

import torch

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.launch import FREE_SMS
from cute_ep.layouts.maps.mail import Channel, RoundWord
from cute_ep.runtime import driver_calls
from cute_ep.runtime.driver import HostMemory, on_device
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.nccl_library import NcclLibrary
from cute_ep.runtime.rails.waiting import START_S, wait_until, within
from cute_ep.runtime.streams import give_back, take_stream

LOG = logging.getLogger(__name__)

BRIEFLY_S = 1.0
"""For what takes microseconds unless something hangs."""


class NcclRail:
    """An engine. Kernels tell the host by `words` which exchange has begun and which has ended, also in replays.

    Args:
        abort: address of the abort word of the rank's arena.
    """

    queued, one_sided, entries_refused = True, False, ""

    def __init__(self, library: NcclLibrary, device: torch.device, abort: int) -> None:
        self._library, self._device, self._abort = library, device, abort
        self._communicators: dict[Channel, int] = {}  # of the rail's ranks, which are numbered by node
        self._host = HostMemory(2 * (2 * len(Channel) + 1))
        self.words = (ctypes.c_int64 * (2 * len(Channel) + 1)).from_address(self._host.address)
        self.words[2 * len(Channel)] = 1  # for the abort word
        self._stream = take_stream(device)
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._ended, self._left = False, set[int]()  # communicators that are not gone yet

    # ---- an engine of mail

    def introduce(self, mail: RankMail) -> None:
        """Let the kernels of a mail tell the host when an exchange has ended, and wait for nobody."""
        mail.introduce([self._host.address] * mail.cfg.nodes)
        mail.wait_for_nobody()

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """As of `Engine`; and receive the same pieces of the other nodes' ranks."""
        stream = mail.stream
        with self._lock:
            if self._ended:
                raise EPError(f"rank {mail.parts.rank}: NCCL between nodes was aborted; close, and connect again")
            exchange(self._library, self._communicators[channel], mail, pieces, stream)

    def tell_exchanged(self, mail: RankMail, channel: Channel) -> None:
        """As of `Engine`."""
        mail.signal(channel, _ended_at(channel), 1, RoundWord.SENT)

    def free(self, mail: RankMail, channel: Channel, landing: int) -> None:
        """As of `Engine`: the next receive is behind on the stream."""

    def progress(self, channel: Channel) -> int:
        """As of `Engine`."""
        return self._host.address + _begun_at(channel)

    # ---- how far exchanges are

    def rounds(self, channel: Channel) -> tuple[int, int]:
        """The last exchange that has begun, and the last that has ended; 0: none."""
        return self.words[_begun_at(channel) // 8], self.words[_ended_at(channel) // 8]

    # ---- begin and end

    def connect(self, unique_ids: Sequence[bytes], node: int, nodes: int) -> None:
        """Meet the other ranks of the rail. EPError: they do not come in START_S, or NCCL cannot."""

        def meet() -> None:
            with on_device(self._device):
                for channel, one in zip(Channel, unique_ids, strict=True):
                    self._communicators[channel] = self._library.connect(one, node, nodes, FREE_SMS)

        within(START_S, meet, "connect the ranks of a rail by NCCL")

    def exchange_all(self, mail: RankMail) -> None:
        """One exchange of each channel, as large as any, so that connections are there before a graph is captured.
        EPError: it has not ended in START_S."""
        frame, done = mail.cfg.max_tokens_per_rank, torch.cuda.Event()
        self.put(mail, Channel.FRAMES, mail.frame_puts(frame, frame))
        self.put(mail, Channel.SUMS, [mail.sums_put(frame, 0)])
        done.record()
        if not wait_until(done.query, START_S):
            raise EPError(f"the first exchange over NCCL has not ended in {START_S:g} s")

    def give_up(self) -> None:
        """Have kernels of this rank wait for nobody any more, and end what NCCL has under way. It returns soon: NCCL
        may wait for graphs that hold a communicator, and the device for what is queued."""
        try:
            within(BRIEFLY_S, self._set_abort, "set the abort word")
        except Exception as error:  # of a device that has failed, or whose queue is full
            LOG.warning("kernels may wait until their own timeout: %s", error)
        finally:
            self._end(BRIEFLY_S)

    def _set_abort(self) -> None:
        with on_device(self._device), driver_calls.relaxed_capture():
            one = self._host.address + 8 * 2 * len(Channel)
            driver_calls.copy(self._abort, one, 8, self._stream.cuda_stream)
            wait_until(self._stream.query, BRIEFLY_S)

    def close(self, patience: float) -> bool:
        """End the communicators, whose work has ended everywhere. False: something still holds one, which may use its
        memory, and so that of the mail."""
        ended = self._end(patience)
        if ended:
            give_back(self._stream)
            self.words = type(self.words)(*self.words)
            self._host.free()
        return ended

    def _end(self, seconds: float) -> bool:
        """Abort the communicators, once. Whether they are gone in so many seconds. Each in a thread of its own: NCCL
        waits for what is queued behind a channel's exchanges, which may be those of the other one."""
        locked = self._lock.acquire(timeout=BRIEFLY_S)  # a call of the library that hangs has it
        with self._ending:
            begins, self._ended = not self._ended, True
        if locked:
            self._lock.release()
        if begins:
            for communicator in list(self._communicators.values()):
                self._left.add(communicator)
                work = partial(self._abort_one, communicator)
                threading.Thread(target=work, name="cute_ep", daemon=True).start()
        return wait_until(lambda: not self._left, seconds)

    def _abort_one(self, communicator: int) -> None:
        try:
            with on_device(self._device), driver_calls.relaxed_capture():
                self._library.abort(communicator)
            self._left.discard(communicator)
        except Exception as error:
            LOG.warning("a communicator of NCCL stays: %s", error)


def exchange(library: NcclLibrary, communicator: int, mail: RankMail, pieces: Sequence[Put], stream: int) -> None:
    """Queue pieces to the other nodes' ranks, and theirs to where they land in this mail."""
    with library.group():
        for one in pieces:
            for node in range(mail.cfg.nodes):
                if node != mail.node:
                    source = mail.base + one.source + node * one.step
                    to = mail.base + one.to + (node - mail.node) * one.to_step
                    library.send(source, one.nbytes, node, communicator, stream)
                    library.receive(to, one.nbytes, node, communicator, stream)


def _begun_at(channel: Channel) -> int:
    """Offset of a word in `NcclRail.words`."""
    return 16 * channel


def _ended_at(channel: Channel) -> int:
    return 16 * channel + 8
