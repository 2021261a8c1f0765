"""What makes the communicator of a node that of a rank over nodes, with a process a rank and a rail over NVSHMEM."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.join_nodes import mail_kernels, mail_parts, rail_status
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.rails.shmem import ShmemRail, check_room, chosen_start
from cute_ep.runtime.rails.shmem_library import Begun, ShmemLibrary
from cute_ep.runtime.status import Status


@dataclass(frozen=True)
class _OverShmem:
    """A `Rail`.

    Attributes:
        held: gives back the mail's kernels and records.
    """

    mail: RankMail
    status: Status
    engine: ShmemRail
    held: ExitStack

    def leave(self, patience: float, *, abort: bool) -> None:
        """As of `Rail`."""
        if abort:
            self.engine.give_up()
        elif self.engine.close(patience):
            self.held.close()


def join_shmem(cfg: EPConfig, node: Communicator, library: Library, meeting: Meeting) -> _OverShmem:
    """This process's part of its rail over NVSHMEM; collective over the ranks of the meeting. What NVSHMEM has begun
    and allocated before a failure stays, as it ends and frees with all ranks only.

    Args:
        node: the communicator of the own node.
    """
    rank, shmem = meeting.rank, ShmemLibrary.load()

    def look() -> tuple[Begun, tuple[int, int], bytes]:
        begun = shmem.begun()
        begins = rank == 0 and begun == Begun.NOT
        return begun, shmem.place(), shmem.unique_id() if begins else b""

    def prepare() -> tuple[Status, dict[str, Kernel], ExitStack]:
        with ExitStack() as undo:
            status = rail_status(cfg, rank, undo, landings_apart=True)
            if unique_id is not None:
                check_room(node.device, cfg.mail)
            return status, mail_kernels(cfg, node.device, library, undo), undo.pop_all()

    def make_mail() -> RankMail:
        parts = mail_parts(cfg, node, status, kernels, engine.allocate(cfg.mail))
        mail = RankMail(replace(parts, second=cfg.mail.allocation), engine)
        engine.introduce(mail)
        return mail

    _, heard = meeting.on_all_ranks(look, lambda found: found, doing="look for NVSHMEM")
    unique_id = heard[0][2] if chosen_start([(begun, place) for begun, place, _ in heard]) else None
    (status, kernels, held), _ = meeting.on_all_ranks(
        prepare, undo=lambda made: made[2].close(), doing="load kernels of the mail"
    )
    engine = ShmemRail(shmem, node.device, status.peers)
    doing = "connect the nodes by NVSHMEM"
    try:
        meeting.on_all_ranks(lambda: engine.connect(unique_id, rank, meeting.size), doing=doing)
        mail, _ = meeting.on_all_ranks(make_mail, doing=doing)
        meeting.on_all_ranks(lambda: engine.exchange_all(mail), doing=doing)
    except BaseException:
        held.close()  # none of these kernels has been launched
        raise
    return _OverShmem(mail, status, engine, held)
