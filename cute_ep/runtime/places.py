"""Where the ranks of a group run: which machines make nodes, and whether ranks may go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig, check_alike
from cute_ep.api.errors import EPConfigError
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.process import machine


def ranks_per_node(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks of a process group each machine has, for `EPConfig.ranks_per_node`; collective, through the
    group's store.

    Args:
        group: an initialised process group; None: the default group.

    Raises:
        EPConfigError: this process is no rank of the group, the ranks of a machine do not follow one another, or
            machines have different numbers of ranks.
        EPError: another rank did not come, or called something else.
    """
    return count_ranks(group, "count the ranks of a node")


def count_ranks(group: dist.ProcessGroup | None, call: str) -> int:
    """`ranks_per_node`, as part of a call that is named in errors."""
    check_initialised(group)
    check_member(group)
    with Meeting(group, call) as meeting:
        return equal_runs(meeting.gather(machine()))


def equal_runs(machines: Sequence[str]) -> int:
    """The number of ranks of each of these machines, given by rank; EPConfigError as of `ranks_per_node`."""
    runs = [[rank for rank, _ in run] for _, run in groupby(enumerate(machines), key=lambda one: one[1])]
    if len(runs) > len(set(machines)):
        told = ", ".join(map(str, runs))
        raise EPConfigError(f"ranks {told} are on machines in turns: the ranks of a machine must follow one another")
    other = next((run for run in runs if len(run) != len(runs[0])), None)
    if other is not None:
        raise EPConfigError(f"ranks {runs[0]} are on one machine and ranks {other} on another: must be as many on each")
    return len(runs[0])


def check_initialised(group: dist.ProcessGroup | None, otherwise: str = "") -> None:
    """EPConfigError unless there are process groups; `otherwise` ends its message."""
    if not dist.is_initialized():
        first = "call torch.distributed.init_process_group first"
        raise EPConfigError(f"group = {group}: must be initialised, {first}{otherwise}")


def check_member(group: dist.ProcessGroup | None) -> None:
    """EPConfigError unless this process is a rank of the group."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise EPConfigError(
            f"group = {group}: must have this process, global rank {dist.get_rank()}, as one of its own"
        )


@dataclass(frozen=True)
class Place:
    """What ranks of one group compare: their configurations, and where they run."""

    cfg: EPConfig
    machine: str
    gpu: str | None

    @classmethod
    def of(cls, cfg: EPConfig, device: torch.device | None) -> Place:
        """This process's; device: None without a GPU."""
        return cls(cfg, machine(), None if device is None else str(torch.cuda.get_device_properties(device).uuid))


def check_places(rank: int, places: Sequence[Place]) -> None:
    """EPConfigError unless all ranks have rank `rank`'s configuration, those of its node its machine, and each a GPU of
    its own. On the CPU all are on one machine."""
    own = places[rank]
    check_alike([place.cfg for place in places])
    cfg = own.cfg
    for peer, place in enumerate(places):
        if (place.gpu is None) != (own.gpu is None):
            without, other = (peer, rank) if place.gpu is None else (rank, peer)
            raise EPConfigError(f"rank {without} has no CUDA GPU, but rank {other} has: must be all ranks or none")
        if place.machine != own.machine:
            if own.gpu is None:
                raise EPConfigError(f"rank {peer} and rank {rank} are on different machines: must be on one on the CPU")
            if cfg.node(peer) == cfg.node(rank):
                whose = "" if cfg.nodes == 1 else f", as ranks of node {cfg.node(rank)}"
                raise EPConfigError(f"rank {peer} and rank {rank} are on different machines: must be on one{whose}")
    for peer, place in enumerate(places):
        if place.gpu and (first := [other for other in range(peer) if places[other].gpu == place.gpu]):
            raise EPConfigError(
                f"rank {first[0]} and rank {peer} are both on GPU {place.gpu}: each must call torch.cuda.set_device "
                "with a GPU of its own (several ranks on one GPU: connect_local)"
            )
