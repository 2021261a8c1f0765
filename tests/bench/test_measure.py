"""What is measured: operations and conditions of a pair, sets of batches, and the bytes that a case moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.bench import measure as measure_module
from cute_ep.bench.measure import CHAINED, CONDITIONS, OPERATIONS, PARTS, make_sets, measure
from cute_ep.bench.timing import rounds_per_graph
from cute_ep.bench.traffic import count_routing, traffic
from cute_ep.runtime.connection import connect_local

from .counting_runner import CountingRunner

RANKS = 2


def test_measure_runs_every_operation_on_every_set() -> None:
    cfg = EPConfig(64, 8, 2, 16, 1, "nvfp4")
    communicators = connect_local(cfg, ["cpu"])
    sets = make_sets(cfg, ["cpu"], 9, "zipf")
    batches = [batch for own in sets.batches for batch in own]
    assert set(OPERATIONS) | set(CONDITIONS) == set(PARTS)
    results = measure(communicators, sets, samples=7, runner=CountingRunner(communicators))
    assert [one["operation"] for one in results] == list(OPERATIONS)
    assert all(batch.dispatched is not None and batch.result.abs().sum() > 0 for batch in batches)
    for one in results:
        assert (one["samples"], one["tokens"], one["format"], one["routing"]) == (7, 9, "nvfp4", "zipf")
        assert one["rounds"] == (1 if one["operation"] == "pair_chained" else rounds_per_graph(9))
        assert len(one["parts"]) == len(PARTS[one["operation"]])
        assert one.get("host_us") == (2 if one["operation"] == CHAINED else None)
    with pytest.raises(EPInputError, match="operation = 'fly': must be one of"):
        measure(communicators, sets, ("fly",))


@pytest.mark.parametrize("operation", CONDITIONS)
def test_what_stands_before_a_launch_runs_each_time_and_is_taken_off(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `pair_roomy` nothing stands there, and buffers of the default size serve all sets."""
    cfg = EPConfig(64, 8, 2, 16, 1, "nvfp4")
    communicators = connect_local(cfg, ["cpu"])
    sets = make_sets(cfg, ["cpu"], 9)
    done: list[str] = []
    make, dispatch, combine = measure_module.stand_in, communicators[0].dispatch, communicators[0].combine
    capacities = set()

    def stand_in(*words: Any) -> Callable[[], None] | None:
        between = make(*words)
        return between and (lambda: done.append("between") or between())

    def launch(name: str, call: Callable) -> Callable:
        def run(*words: Any, **options: Any) -> Any:
            done.append(name)
            if name == "dispatch":
                capacities.add(options["out"].tokens.shape[0])
            return call(*words, **options)

        return run

    monkeypatch.setattr(measure_module, "stand_in", stand_in)
    monkeypatch.setattr(communicators[0], "dispatch", launch("dispatch", dispatch))
    monkeypatch.setattr(communicators[0], "combine", launch("combine", combine))
    (one,) = measure(communicators, sets, (operation,), 3, CountingRunner(communicators))
    assert len(one["parts"]) == 2 and one["rounds"] == rounds_per_graph(9)
    last = done[-4 * one["rounds"] :] if operation != "pair_roomy" else done[-2 * one["rounds"] :]
    if operation == "pair_roomy":
        assert last == ["dispatch", "combine"] * one["rounds"] and "between_us" not in one
        assert one["p50_us"] == pytest.approx(1) and cfg.max_rows in capacities
    else:
        assert last == ["between", "dispatch", "between", "combine"] * one["rounds"]
        assert one["between_us"] == pytest.approx(1) and one["p50_us"] == pytest.approx(2 - 1)
        assert cfg.max_rows not in capacities


def test_sets_differ_from_each_other_and_are_the_same_each_time() -> None:
    cfg = EPConfig(64, 8, 2, 16, RANKS)
    sets, again = (make_sets(cfg, ["cpu"] * RANKS, 16) for _ in range(2))
    ids = [tuple(batch.topk_ids.flatten().tolist()) for own in sets.batches for batch in own]
    assert len(set(ids)) == len(ids)
    for one, other in zip(sets.batches, again.batches, strict=True):
        assert all(
            torch.equal(a.x, b.x) and torch.equal(a.topk_ids, b.topk_ids) for a, b in zip(one, other, strict=True)
        )
    for number, counts in enumerate(sets.counts):
        for rank, own in enumerate(sets.batches):
            assert own[number].buffers.tokens.shape[0] == own[number].rows.shape[0] == counts.rows_received(rank)
    for words in ({"tokens": 17}, {"tokens": 1, "routing": "none"}):
        with pytest.raises(EPInputError):
            make_sets(cfg, ["cpu"] * RANKS, **words)


def test_a_pair_moves_the_bytes_of_both_its_halves() -> None:
    cfg = EPConfig(64, 8, 2, 16, RANKS)
    sets = make_sets(cfg, ["cpu:0", "cpu:1"], 16, sets=1)
    (pair,) = measure(connect_local(cfg, ["cpu"] * RANKS), sets, ("pair",), 1, CountingRunner([]))
    counts = count_routing(cfg, [own[0].topk_ids for own in sets.batches])
    moved = [traffic(cfg, counts, name) for name in ("dispatch", "combine_partial")]
    devices = list(sets.devices)
    assert pair["parts"] == [[one.busiest_link(devices), one.busiest_memory(devices)] for one in moved]
    assert pair["remote_bytes"] == sum(one.remote_bytes for one in moved)
