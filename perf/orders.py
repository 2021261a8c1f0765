"""Dispatch and combine by the order of rows: by expert, by expert in blocks of a fixed size, by source rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cute_ep.api.config import EPConfig
from cute_ep.bench.ceilings import Ceilings, floors
from cute_ep.bench.measure import make_sets, measure
from cute_ep.runtime.connection import connected
from perf.cases import BLOCK_TOKENS, MAIN, ORDER_OPERATIONS, ORDER_TOKENS, PEER_TOKENS, QUICK_FORMATS


def in_order(cfg: EPConfig, order: str) -> EPConfig:
    """The configuration with rows in an order of ORDER_OPERATIONS."""
    if order == "blocks":
        return replace(cfg, block_rows=cfg.world_size * cfg.max_tokens_per_rank)
    return replace(cfg, row_order=order)  # type: ignore[arg-type]


def measure_orders(
    devices: Sequence[str], library: str | None, ceilings: Ceilings, say: Callable[[str], None]
) -> list[dict]:
    """`cute_ep.bench.measure.measure` of each format, order and batch size, with "order" and the floor in every
    result."""
    results = []
    for fmt in QUICK_FORMATS:
        for order, operations in ORDER_OPERATIONS.items():
            for tokens in PEER_TOKENS if "pair" in operations else ORDER_TOKENS:
                if order == "blocks" and tokens > BLOCK_TOKENS:
                    continue
                measured = operations if tokens in ORDER_TOKENS else ("pair",)
                cfg = in_order(MAIN.config(fmt, len(devices), max(tokens, BLOCK_TOKENS)), order)
                with connected(cfg, devices, library=library) as communicators:
                    for case in measure(communicators, make_sets(cfg, devices, tokens), measured):
                        results.append({"order": order} | case | floors(case["parts"], ceilings))
        say(f"orders of rows, {fmt}")
    return results
