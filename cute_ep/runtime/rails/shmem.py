"""The rail of ranks with a process each over NVSHMEM: puts with a signal, which the host queues in stream order.

The mail is in NVSHMEM's symmetric heap, and a PE is a rank of the group. A put adds 1 to the piece's word of `arrived`
behind its bytes, so that the word is the round, in replays too; a piece without bytes is a signal alone. Puts and
signals come whatever kernels have found (`docs/protocol.md`, "Between nodes"):

- `free` says that this rank's stream is past its reading of a round, of which that may have been none.
- Sums of each landing are counted apart: a graph of one combine lands in the same place in each replay.

Kernels' waits are bounded, so nothing watches this engine. A put to a host that is lost is not: on NVLink it ends, on a
network NVSHMEM may wait for it, or end the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.layouts.maps.arena import PAGE_BYTES
from cute_ep.layouts.maps.mail import Channel, Mail
from cute_ep.layouts.maps.record import align_up
from cute_ep.runtime import driver_calls
from cute_ep.runtime.driver import allocate, on_device
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.shmem_library import Addition, Begun, ShmemLibrary
from cute_ep.runtime.rails.waiting import START_S, wait_until, within

LOG = logging.getLogger(__name__)


class ShmemRail:
    """An engine.

    Args:
        pes: of the rail's ranks, by node.
    """

    queued, one_sided = True, True
    entries_refused = "with transport = 'nvshmem': take transport = 'nccl' for the other modes"

    def __init__(self, library: ShmemLibrary, device: torch.device, pes: Sequence[int]) -> None:
        self._library, self._device, self._pes = library, device, list(pes)
        self._address, self._left = 0, False

    # ---- an engine of mail

    def introduce(self, mail: RankMail) -> None:
        """Prepare the words of a mail whose memory is zero, before any put comes."""
        mail.count_landings_apart()

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """As of `Engine`."""
        self._put(mail, channel, pieces, 1)

    def free(self, mail: RankMail, channel: Channel, landing: int) -> None:
        """As of `Engine`."""
        self._free(mail, channel, landing, 1)

    def tell_exchanged(self, mail: RankMail, channel: Channel) -> None:
        """As of `Engine`: nobody asks."""

    def progress(self, channel: Channel) -> int:
        """As of `Engine`: kernels wait, and give up by themselves."""
        return 0

    def _put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put], count: int) -> None:
        stream = mail.stream
        for one in pieces:
            word = mail.words_at(one.landing) + mail.map.arrived.at(channel, mail.node, one.piece)
            for node in self._others(mail):
                source = mail.base + one.source + node * one.step
                signal = Addition(word, count, self._pes[node])
                self._library.put(mail.base + one.to, source, one.nbytes, signal, stream)

    def _free(self, mail: RankMail, channel: Channel, landing: int, count: int) -> None:
        stream, word = mail.stream, mail.words_at(landing) + mail.map.free.at(channel, mail.node)
        for node in self._others(mail):
            self._library.signal(Addition(word, count, self._pes[node]), stream)

    def _others(self, mail: RankMail) -> list[int]:
        """The other nodes, the next one first: no rank is everybody's first."""
        if self._left:
            raise EPError(f"rank {mail.parts.rank}: NVSHMEM between nodes has ended; close, and connect again")
        return [(mail.node + step) % mail.cfg.nodes for step in range(1, mail.cfg.nodes)]

    # ---- begin and end

    def connect(self, unique_id: bytes | None, pe: int, pes: int) -> None:
        """Begin NVSHMEM with the other ranks; None: it has begun. EPError: they do not come in START_S, or NVSHMEM
        cannot."""
        if unique_id is None:
            self._library.join()
            return

        def begin() -> None:
            with on_device(self._device):
                self._library.begin(unique_id, pe, pes, self._device.index)

        within(START_S, begin, "begin NVSHMEM with the other ranks")

    def allocate(self, layout: Mail) -> tuple[int, int]:
        """(address, bytes) of zeros in the symmetric heap, for a mail and the words of the second landing behind it;
        collective. EPError: there is not enough, or the others do not come in START_S."""
        nbytes = heap_bytes(layout)

        def work() -> None:
            with on_device(self._device):
                self._address = self._library.allocate(nbytes)
                driver_calls.fill(self._address, 0, nbytes)
                torch.cuda.synchronize(self._device)

        within(START_S, work, f"allocate {nbytes >> 20} MiB of NVSHMEM's symmetric heap")
        return self._address, nbytes

    def exchange_all(self, mail: RankMail) -> None:
        """One exchange of each channel, as large as any, which counts as none: what is loaded at first use is there
        before a graph is captured. EPError: it has not ended in START_S."""
        frame, done = mail.cfg.max_tokens_per_rank, torch.cuda.Event()
        self._put(mail, Channel.FRAMES, mail.frame_puts(frame, frame), 0)
        self._put(mail, Channel.SUMS, [mail.sums_put(frame, 0)], 0)
        self._free(mail, Channel.FRAMES, 0, 0)
        done.record()
        if not wait_until(done.query, START_S):
            raise EPError(f"the first exchange over NVSHMEM has not ended in {START_S:g} s")

    def close(self, patience: float) -> bool:
        """Give back the memory, and leave NVSHMEM; collective, after all work of all ranks has ended. False: some rank
        has not come, and everything stays."""
        self._left = True

        def work() -> None:
            with on_device(self._device):
                self._library.free(self._address)
                self._library.leave()

        try:
            within(patience, work, "leave NVSHMEM with the other ranks")
        except EPError as error:
            LOG.warning("NVSHMEM and its memory stay: %s", error)
            return False
        return True

    def give_up(self) -> None:
        """Leave NVSHMEM and its memory as they are, without the other ranks: it does not end without all of them."""
        self._left = True


def heap_bytes(layout: Mail) -> int:
    """Of a mail, and of the words of the second landing behind it."""
    return layout.allocation + align_up(layout.payload.at(), PAGE_BYTES)


def check_room(device: torch.device, layout: Mail) -> None:
    """EPError unless a GPU has as much memory free, for a heap that begins now: the other ranks would wait in NVSHMEM
    for one that has not."""
    with on_device(device):
        driver_calls.free(allocate(heap_bytes(layout)))


def chosen_start(heard: Sequence[tuple[Begun, tuple[int, int]]]) -> bool:
    """Whether ranks begin NVSHMEM, else they join what has begun. EPConfigError: they cannot do either together.

    Args:
        heard: by rank, how far NVSHMEM is in its process, and its (PE, number of PEs) there.
    """
    if all(begun == Begun.NOT for begun, _ in heard):
        return True
    for rank, (begun, place) in enumerate(heard):
        if begun != Begun.WITH_GPU or place != (rank, len(heard)):
            told = {
                Begun.NOT: "has not begun",
                Begun.WITHOUT_GPU: "has begun without a GPU",
                Begun.WITH_GPU: f"is PE {place[0]} of {place[1]}",
            }[begun]
            raise EPConfigError(
                f"transport = 'nvshmem': NVSHMEM in the process of rank {rank} {told}: must be PE {rank} of "
                f"{len(heard)}, or have begun in no process; after a rank was lost it cannot begin again in the "
                "processes that are left: take transport = 'nccl', or start all processes again"
            )
    return False
