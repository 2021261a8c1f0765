"""A pair beside a matmul: the table."""

from __future__ import annotations

from perf import beside


def test_rows_become_a_table() -> None:
    row = {"peer": "cute_ep", "tokens": 4096, "sms": None, "left": 0, "pair_us": 387.4, "layer_us": 4503.0}
    head, _, line = beside.markdown_rows([row]).splitlines()
    assert dict(zip(head.split(" | "), line.split(" | "), strict=True)) == {
        "| peer": "| cute_ep",
        "tokens": "4096",
        "sms": "all",
        "left": "0",
        "pair_us": "387",
        "matmul_us": "",
        "pair_beside_us": "",
        "matmul_beside_us": "",
        "layer_us": "4503",
        "apart_us |": " |",
    }
