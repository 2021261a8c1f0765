"""Where the ranks of a group run: which of them make nodes, and whether ranks may go together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import check_alike
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.routing import MAX_RANKS
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.nvlink import clique_of
from cute_ep.runtime.process import machine
from cute_ep.runtime.symmetric import Kind, refusal

LOG = logging.getLogger(__name__)


def ranks_per_node(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks of a process group make a node, for `EPConfig.ranks_per_node`: those in one NVLink domain, which
    may have several machines (docs/nodes.md), else those on one machine. Of more than 32, the most that divide them.
    Collective, through the group's store; each rank is on its current CUDA device.

    Args:
        group: an initialised process group; None: the default group.

    Raises:
        EPConfigError: this process is no rank of the group, the ranks of a domain do not follow one another, or domains
            have different numbers of ranks.
        EPError: another rank did not come, or called something else.
    """
    return count_ranks(group, "count the ranks of a node")


def count_ranks(group: dist.ProcessGroup | None, call: str) -> int:
    """`ranks_per_node`, as part of a call that is named in errors."""
    check_initialised(group)
    check_member(group)
    with Meeting(group, call) as meeting:
        return equal_parts(domains(meeting.gather(Seat.own())))


class Seat(NamedTuple):
    """Where a rank is.

    Attributes:
        clique: of NVLink (`clique_of`).
        refusal: why it does not share memory with other machines of its clique.
    """

    machine: str
    clique: str | None = None
    refusal: str | None = None

    @classmethod
    def own(cls) -> Self:
        """This process's, on its current CUDA device where it has one."""
        if not torch.cuda.device_count():
            return cls(machine())
        device = torch.device("cuda", torch.cuda.current_device())
        clique = clique_of(device)
        return cls(machine(), clique, None if clique is None else refusal(Kind.FABRIC, device))


def domains(seats: Sequence[Seat]) -> list[str]:
    """A name of each rank's NVLink domain, the same for all in it: its clique, where that is known and all of its ranks
    share memory over machines, else its machine."""
    refused = {seat.clique: f"rank {rank}: {seat.refusal}" for rank, seat in enumerate(seats) if seat.refusal}
    over_machines = Counter(clique for clique, _ in {(seat.clique, seat.machine) for seat in seats})
    for clique, why in refused.items():
        if over_machines[clique] > 1:
            LOG.warning(
                "the %d machines of an NVLink domain are taken as nodes, since it has no fabric handles (%s)",
                over_machines[clique],
                why,
            )
    return [seat.machine if seat.clique is None or seat.clique in refused else seat.clique for seat in seats]


def equal_parts(domains: Sequence[str]) -> int:
    """The number of ranks of each of these domains, given by rank, or of equal parts of at most MAX_RANKS.

    EPConfigError as of `ranks_per_node`.
    """
    runs = [[rank for rank, _ in run] for _, run in groupby(enumerate(domains), key=lambda one: one[1])]
    if len(runs) > len(set(domains)):
        told = ", ".join(map(str, runs))
        raise EPConfigError(
            f"ranks {told} are on machines, or in NVLink domains, in turns: the ranks of one must follow one another"
        )
    other = next((run for run in runs if len(run) != len(runs[0])), None)
    if other is not None:
        raise EPConfigError(
            f"ranks {runs[0]} are on one machine, or in one NVLink domain, and ranks {other} in another: must be as "
            "many in each"
        )
    count = len(runs[0])
    return next(part for part in range(min(count, MAX_RANKS), 0, -1) if count % part == 0)


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
    """What ranks of one group compare: their configurations, and where they run.

    Attributes:
        clique: of NVLink (`clique_of`).
    """

    cfg: EPConfig
    machine: str
    gpu: str | None
    clique: str | None = None

    @classmethod
    def of(cls, cfg: EPConfig, device: torch.device | None) -> Place:
        """This process's; device: None without a GPU."""
        if device is None:
            return cls(cfg, machine(), None)
        return cls(cfg, machine(), str(torch.cuda.get_device_properties(device).uuid), clique_of(device))


def check_places(rank: int, places: Sequence[Place]) -> None:
    """EPConfigError unless all ranks have rank `rank`'s configuration, those of its node its machine or its clique, and
    each a GPU of its own. On the CPU all are on one machine."""
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
            reach = own.clique is not None and place.clique == own.clique
            if cfg.node(peer) == cfg.node(rank) and not reach:
                whose = "" if cfg.nodes == 1 else f", as ranks of node {cfg.node(rank)}"
                raise EPConfigError(
                    f"rank {peer} and rank {rank} are on different machines: must be on one, or in one NVLink "
                    f"domain{whose}"
                )
    for peer, place in enumerate(places):
        if place.gpu and (first := [other for other in range(peer) if places[other].gpu == place.gpu]):
            raise EPConfigError(
                f"rank {first[0]} and rank {peer} are both on GPU {place.gpu}: each must call torch.cuda.set_device "
                "with a GPU of its own (several ranks on one GPU: connect_local)"
            )
