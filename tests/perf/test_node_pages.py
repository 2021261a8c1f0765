"""What the page on speed says of kept times of nodes."""

from __future__ import annotations

import json
from pathlib import Path

from perf.node_pages import sections
from perf.runs import kept_beside

TIMES = {"format": "fp8", "tokens": 16, "one node": 10.0, "nodes": 60.0, "frames": 20.9, "bare frames": 19.0}
RUN = {
    "environment": {
        "gpus": {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200"},
        "date": "2026-11-26T07:58:10+00:00",
        "commit": "0123456789",
        "nccl": "2.28.9",
        "driver": "580.1",
        "command": "perf.node_times --transport nccl",
    },
    "times": [TIMES | {"sums": 15.0, "bare sums": 20.0, "own": 24.1}],
    "one token": {"frame 16 of 16": 50.0, "frame 16 of 4096": 52.5},
}


def test_exchanges_stand_over_bare_ones_and_own_cost_over_one_node(tmp_path: Path) -> None:
    (tmp_path / "one-nodes.json").write_text(json.dumps(RUN))
    (tmp_path / "other.json").write_text("{}")
    runs = kept_beside("nodes", tmp_path)
    heading, text, table = sections(runs, {"one-nodes": "../one-nodes.json"})
    assert heading == "## Several nodes on one host, by NCCL: 2 x NVIDIA H200, each a node, 2026-11-26, commit 0123456"
    assert text.startswith("[Data](../one-nodes.json): NCCL 2.28.9") and "takes 1.05 times as long" in text
    assert table.splitlines()[-1] == "| 16 | fp8 | 10 | 60 | 21 (1.10) | 15 (0.75) | 24 (2.41) |"


def test_exchanges_by_nvshmem_stand_over_peer_copies_and_puts() -> None:
    """Of FP8 three puts and 19 us of copies a frame, one put and 20 us for the sums."""
    run = RUN | {"environment": RUN["environment"] | {"command": "perf.node_times --transport nvshmem"}}
    heading, text, table = sections({"one": run}, {"one": "../one.json"})
    assert "by NVSHMEM" in heading and "over 1.15 peer copies of the same bytes and 14 us a put" in text
    assert table.splitlines()[-1] == "| 16 | fp8 | 10 | 60 | 21 (0.33) | 15 (0.41) | 24 (2.41) |"
