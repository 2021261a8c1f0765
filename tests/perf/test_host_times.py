"""What `perf.host_times` says of its measurements, and that its rounds run (on the CPU)."""

from __future__ import annotations

import pytest

from cute_ep import EPConfig, connect_local
from perf.host_times import line, rounds, slowest


def test_ways_are_compared_turn_by_turn() -> None:
    """A slow turn of both does not count, and of ranks the slowest does."""
    ranks = [{"pair": {"compiled": [1.0, 4.0, 1.5], "Python": [2.0, 8.0, one]}} for one in (3.0, 2.0)]
    found = slowest(ranks)
    assert found == {"pair": {"compiled": [1.0, 4.0, 1.5], "Python": [2.0, 8.0, 3.0]}}
    assert line("pair", found["pair"]) == "pair: compiled 1.5 (1.0 to 4.0), Python 3.0 (2.0 to 8.0), 0.50"


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_rounds_run(fmt: str) -> None:
    cfg = EPConfig(hidden=128, num_experts=4, top_k=2, max_tokens_per_rank=3, world_size=1, dispatch_format=fmt)
    (ep,) = connect_local(cfg, ["cpu"])
    works = rounds(ep, 3)
    assert ("ops with gradients" in works) == (fmt == "bf16")
    for work in works.values():
        work()
    ep.synchronize()
