"""What a GPU could do at most: floors of a case, copies between GPUs, and the ping-pong kernel."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from cute_ep.bench import ceilings as ceilings_module
from cute_ep.bench.ceilings import floors
from tests.perf.example import CEILINGS


def test_the_floor_of_each_launch_is_its_link_or_its_memory_and_the_launch() -> None:
    """One launch bound by its link, one by memory: 4e5 / 4e11 s = 1 us, 8.4e6 / 4.2e12 s = 2 us, twice 2.2 us."""
    found = floors([(400_000, 4_200), (4_000, 8_400_000)], CEILINGS)
    assert found["link_floor_us"] == pytest.approx(1.01) and found["memory_floor_us"] == pytest.approx(2.001)
    assert found["floor_us"] == pytest.approx(1 + 2 + 2 * 2.2)
    assert floors([(0, 0)], CEILINGS)["floor_us"] == pytest.approx(2.2)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_in_each_turn_every_gpu_copies_to_another_one_and_together_all_bytes(count: int) -> None:
    """No two to the same, each byte once."""
    turns = range(ceilings_module.TURNS)
    for turn in turns:
        peers_now = {lane: ceilings_module.peer_of(lane, turn, count) for lane in range(count)}
        assert sorted(peers_now.values()) == list(range(count))
        assert all(lane != peer for lane, peer in peers_now.items())
    assert {ceilings_module.peer_of(0, turn, count) for turn in turns} == set(range(1, count))
    parts = [ceilings_module.part_of(turn) for turn in turns]
    assert parts[0].start == 0 and parts[-1].stop == ceilings_module.COPY_BYTES
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert all((part.stop - part.start) % 16 == 0 for part in parts)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_the_ping_pong_kernel_assembles(arch: str, tmp_path: Path) -> None:
    source = tmp_path / "ping_pong.ptx"
    source.write_bytes(ceilings_module.PING_PONG.rstrip(b"\0"))
    subprocess.run(
        ["ptxas", f"-arch={arch}", "-o", str(tmp_path / "out"), str(source)], check=True, capture_output=True
    )
    assert len(ceilings_module._TYPES) == ceilings_module.PING_PONG.count(b".param ")
