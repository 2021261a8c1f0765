"""What makes the communicators of nodes those of ranks over all of them, in one process or with one a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.mail import Channel
from cute_ep.layouts.maps.variants import MAIL_KERNELS, QUANTIZE_KERNEL
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import DeviceMemory, Kernel, architecture, on_device
from cute_ep.runtime.local_kernels import local_kernel
from cute_ep.runtime.mail import MailParts, RankMail
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.parts import unload_kernels
from cute_ep.runtime.rails.nccl import NcclRail
from cute_ep.runtime.rails.nccl_library import NcclLibrary
from cute_ep.runtime.rails.peers import PeerStores
from cute_ep.runtime.rails.watch import Watch
from cute_ep.runtime.status import Status


class _Bytes:
    """Device memory as an array of bytes, which torch makes a tensor of."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def join_nodes(
    cfg: EPConfig,
    ranks: Sequence[Communicator],
    library: Library,
    undo: ExitStack,
    release: Callable[[EPCommunicator], None],
) -> list[EPCommunicator]:
    """The communicators of all ranks, whose rails copy between GPUs of this process.

    Args:
        ranks: by rank, each a communicator of its own node.
        undo: gives back what is made here.
        release: as of `Communicator`.
    """
    rails: list[list[RankMail]] = [[] for _ in range(cfg.peers)]
    made: list[EPCommunicator] = []
    for rank, node in enumerate(ranks):
        status = rail_status(cfg, rank, undo)
        mail = RankMail(_parts_of_its_own(cfg, node, status, library, undo), PeerStores())
        rails[cfg.place(rank)[0]].append(mail)
        made.append(NodesCommunicator(node, mail, status, release=release))
    for rail_mails in rails:
        for mail in rail_mails:
            mail.introduce([one.base for one in rail_mails])
    for node in ranks:
        torch.cuda.synchronize(node.device)
    return made


class Rail(Protocol):
    """A rank's part of its rail."""

    @property
    def mail(self) -> RankMail: ...

    @property
    def status(self) -> Status: ...

    def leave(self, patience: float, *, abort: bool) -> None:
        """End it, after all work of all ranks has ended; `abort`: without the others, which may still run. Memory that
        is still in use stays."""


@dataclass(frozen=True)
class _OverNccl:
    """A `Rail`.

    Attributes:
        memory: gives back the mail's memory and kernels.
    """

    mail: RankMail
    status: Status
    engine: NcclRail
    memory: ExitStack
    watch: Watch

    def leave(self, patience: float, *, abort: bool) -> None:
        """As of `Rail`."""
        self.watch.stop()
        if abort:
            self.engine.give_up()
        elif self.engine.close(patience / 2):  # others, whose communicators nothing holds, wait meanwhile
            self.memory.close()


def join_rail(cfg: EPConfig, node: Communicator, library: Library, meeting: Meeting) -> Rail:
    """This process's part of its rail over NCCL; collective over the ranks of the meeting.

    Args:
        node: the communicator of the own node.
    """
    rank, nccl = meeting.rank, NcclLibrary.loaded()
    peer, number = cfg.place(rank)[0], cfg.node(rank)

    def prepare() -> tuple[_OverNccl, list[bytes]]:
        with ExitStack() as undo:
            status = rail_status(cfg, rank, undo)
            parts = _parts_of_its_own(cfg, node, status, library, undo)
            engine = NcclRail(nccl, node.device, parts.abort)
            mail, ids = RankMail(parts, engine), [nccl.unique_id() for _ in Channel] if number == 0 else []
            failed = partial(has_failed, mail, status, node)
            watch = Watch(engine, status, meeting, failed=failed, timeout_s=cfg.timeout_s)
            return _OverNccl(mail, status, engine, undo.pop_all(), watch), ids

    def start() -> None:
        """What NCCL has done before a failure stays as it is, and so does the memory."""
        try:
            rail.engine.connect(shared[peer], number, cfg.nodes)  # ids of the rail's rank of node 0
            rail.engine.introduce(rail.mail)
            rail.engine.exchange_all(rail.mail)
        except BaseException:
            rail.engine.give_up()
            raise

    (rail, _), shared = meeting.on_all_ranks(
        prepare, lambda made: made[1], lambda made: made[0].memory.close(), "prepare its mail"
    )
    meeting.on_all_ranks(start, undo=lambda _: rail.engine.give_up(), doing="connect the nodes by NCCL")
    rail.watch.start()
    return rail


def has_failed(mail: RankMail, status: Status, node: Communicator) -> bool:
    """Whether a rank's calls have been interrupted, or some wait of it has failed."""
    return mail.interrupted or status.failed or node.failed


def rail_status(cfg: EPConfig, rank: int, undo: ExitStack, *, landings_apart: bool = False) -> Status:
    """A rank's records, one for each rank of its rail. `landings_apart` as of `Status`."""
    peer, _ = cfg.place(rank)
    status = Status(rank, tuple(range(peer, cfg.world_size, cfg.peers)), landings_apart=landings_apart)
    undo.callback(status.free)
    return status


def mail_kernels(cfg: EPConfig, device: torch.device, library: Library, undo: ExitStack) -> dict[str, Kernel]:
    """What runs around exchanges."""
    arch = architecture(device)
    entries = {name: library.find(name, arch, None) for name in MAIL_KERNELS}
    kernels: dict[str, Kernel] = {}
    undo.callback(unload_kernels, kernels, device)
    with on_device(device):
        kernels |= {name: Kernel(entry) for name, entry in entries.items()}
    if cfg.format.scale:  # a load in the first call could wait for a kernel that waits for a rank
        local_kernel(device.index, QUANTIZE_KERNEL, cfg.dispatch_format, None)
    return kernels


def mail_parts(
    cfg: EPConfig, node: Communicator, status: Status, kernels: dict[str, Kernel], memory: tuple[int, int]
) -> MailParts:
    """What a rank's mail is made of. `memory`: its address, and how many bytes."""
    view = torch.as_tensor(_Bytes(*memory), device=node.device)
    abort = node.arena.address + int(node.cfg.arena.state.at(int(StateWord.ABORT)))
    return MailParts(cfg, status.rank, view, kernels, status.address, abort, node.max_ctas)


def _parts_of_its_own(
    cfg: EPConfig, node: Communicator, status: Status, library: Library, undo: ExitStack
) -> MailParts:
    """In memory of the device's."""
    kernels = mail_kernels(cfg, node.device, library, undo)
    memory = DeviceMemory(node.device, cfg.mail.allocation)
    undo.callback(memory.free)
    return mail_parts(cfg, node, status, kernels, (memory.address, cfg.mail.nbytes))
