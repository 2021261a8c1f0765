"""Several nodes in one process: what makes the communicators of nodes those of ranks over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.variants import MAIL_KERNELS, QUANTIZE_KERNEL
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import DeviceMemory, Kernel, architecture, on_device
from cute_ep.runtime.local_kernels import local_kernel
from cute_ep.runtime.mail import MailParts, RankMail
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.parts import unload_kernels
from cute_ep.runtime.rails.peers import PeerStores
from cute_ep.runtime.status import Status


class _Bytes:
    """Device memory as an array of bytes, which torch makes a tensor of."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
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
        peer, _ = cfg.place(rank)
        rail = tuple(range(peer, cfg.world_size, cfg.peers))
        status = Status(rank, rail)
        undo.callback(status.free)
        parts = _mail_parts(cfg, node, status, library, undo)
        mail = RankMail(parts, PeerStores())
        rails[peer].append(mail)
        made.append(NodesCommunicator(node, mail, status, release=release))
    for rail_mails in rails:
        for mail in rail_mails:
            mail.introduce([one.base for one in rail_mails])
    for node in ranks:
        torch.cuda.synchronize(node.device)
    return made


def _mail_parts(cfg: EPConfig, node: Communicator, status: Status, library: Library, undo: ExitStack) -> MailParts:
    """What a rank's mail is made of."""
    device, arch = node.device, architecture(node.device)
    entries = {name: library.find(name, arch, None) for name in MAIL_KERNELS}
    kernels: dict[str, Kernel] = {}
    undo.callback(unload_kernels, kernels, device)
    with on_device(device):
        kernels |= {name: Kernel(entry) for name, entry in entries.items()}
    if cfg.format.scale:  # a load in the first call could wait for a kernel that waits for a rank
        local_kernel(device.index, QUANTIZE_KERNEL, cfg.dispatch_format, None)
    layout = cfg.mail
    memory = DeviceMemory(device, layout.allocation)
    undo.callback(memory.free)
    view = torch.as_tensor(_Bytes(memory, layout.nbytes), device=device)
    abort = node.arena.address + int(node.cfg.arena.state.at(int(StateWord.ABORT)))
    return MailParts(cfg, status.rank, view, kernels, status.address, abort, node.max_ctas)
