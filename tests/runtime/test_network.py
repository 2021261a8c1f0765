"""Who is told that NCCL has nothing faster than TCP sockets between nodes: a table of machines, as forged folders."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.runtime.places import Place
from cute_ep.runtime.rails.network import slow_network, warn_of_slow_mail

ACTIVE, DOWN = "4: ACTIVE\n", "1: DOWN\n"
SLOW = "NCCL probably carries mail between nodes over TCP sockets ({}); NCCL_DEBUG=INFO tells"


def forged(folder: Path, ports: dict[str, str]) -> Path:
    """A folder of devices, with the states of their ports by "device/port"; one that cannot be read is a folder."""
    for port, state in ports.items():
        device, number = port.split("/")
        file = folder / device / "ports" / number / "state"
        file.parent.mkdir(parents=True)
        file.write_text(state) if state else file.mkdir()
    return folder


@pytest.mark.parametrize(
    ("environment", "ports", "why"),
    [
        ({}, {}, "no port in {} is active"),
        ({}, {"mlx5_0/1": ACTIVE}, None),
        ({}, {"mlx5_0/1": DOWN, "mlx5_1/1": DOWN, "mlx5_1/2": ACTIVE}, None),
        ({}, {"mlx5_0/1": DOWN}, "no port in {} is active"),
        ({}, {"mlx5_0/1": ""}, "no port in {} is active"),
        ({"NCCL_IB_DISABLE": "1"}, {"mlx5_0/1": ACTIVE}, "NCCL_IB_DISABLE=1"),
        ({"NCCL_IB_DISABLE": "0"}, {"mlx5_0/1": ACTIVE}, None),
        ({"NCCL_NET": "Socket"}, {"mlx5_0/1": ACTIVE}, "NCCL_NET=Socket"),
        ({"NCCL_NET": "socket", "NCCL_NET_PLUGIN": "efa"}, {}, "NCCL_NET=socket"),
        ({"NCCL_NET": "IB"}, {}, "no port in {} is active"),
        ({"NCCL_NET": "AWS Libfabric"}, {}, None),
        ({"NCCL_NET_PLUGIN": "efa"}, {}, None),
        ({"NCCL_NET_PLUGIN": "none"}, {}, "no port in {} is active"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "tcpx"}, {"mlx5_0/1": ACTIVE}, None),
    ],
)
def test_sockets_are_told_with_the_reason(
    tmp_path: Path, environment: dict[str, str], ports: dict[str, str], why: str | None
) -> None:
    folder = forged(tmp_path, ports)
    assert slow_network(environment, folder) == (None if why is None else SLOW.format(why.format(folder)))


@pytest.mark.parametrize(
    ("machines", "slow", "told"),
    [
        ("aabb", "slow", [0, 2]),
        ("aaaa", "slow", []),
        ("aabb", None, []),
    ],
    ids=["two machines", "one machine", "a fast network"],
)
def test_the_first_rank_of_each_node_warns_where_mail_leaves_the_machine(
    caplog: pytest.LogCaptureFixture, machines: str, slow: str | None, told: list[int]
) -> None:
    cfg = EPConfig(32, 8, 2, 5, 4, ranks_per_node=2)
    places = [Place(cfg, machine, f"GPU-{rank}") for rank, machine in enumerate(machines)]
    with caplog.at_level(logging.WARNING, "cute_ep"):
        for rank in range(4):
            warn_of_slow_mail(cfg, rank, places, slow)
    assert caplog.messages == [f"rank {rank}: {slow}" for rank in told]
