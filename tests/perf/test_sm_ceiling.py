"""The ceiling of so many SMs where it needs no GPU: which rows it moves, the kernels' table, what tables show."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.types import RowOrder
from cute_ep.bench.traffic import LAUNCHES, count_routing, traffic
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR, ROW_ORDERS
from cute_ep.testing.workloads import RankInputs, make_inputs
from perf import pages, runs, sm_ceiling, suite, tables
from perf.row_buffers import ITEM_WORDS, MOST_SOURCES, RowBuffers
from perf.row_moves import BUFFERS, NONE, ROW_BITS, buffer_of, buffer_rows, moves_of
from tests.perf.example import case, example_run

HIDDEN = 64
TOKENS = 11
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"ranks{ranks}")
OPERATIONS = pytest.mark.parametrize("operation", LAUNCHES)
ORDERED_OPERATIONS = pytest.mark.parametrize(
    ("order", "operation"),
    [(EXPERT_MAJOR, name) for name in LAUNCHES] + [(RANK_MAJOR, "dispatch"), (RANK_MAJOR, "combine_partial")],
)


def workload(
    ranks: int, routing: str = "uniform", order: RowOrder = EXPERT_MAJOR
) -> tuple[EPConfig, list[RankInputs], torch.Tensor]:
    cfg = EPConfig(HIDDEN, 8, 3, TOKENS, ranks, row_order=order)
    inputs = make_inputs(cfg, [TOKENS] * ranks, routing, 1)
    return cfg, inputs, torch.stack([one.topk_ids for one in inputs])


def move(buffers: RowBuffers) -> None:
    """What the kernels do, twice, from the tables that they read."""
    for _ in range(2):
        for rank in range(len(buffers.devices)):
            for words in buffers.table(rank).tolist():
                sources, targets = words[0] & 0xFFFFFFFF, words[0] >> 32
                total = 0
                for address in words[1 : 1 + sources]:
                    total ^= int.from_bytes(ctypes.string_at(address, buffers.row_bytes), "little")
                for address in words[1 + sources : 1 + sources + targets]:
                    ctypes.memmove(address, total.to_bytes(buffers.row_bytes, "little"), buffers.row_bytes)


def rows_of(buffers: RowBuffers, rank: int, name: str, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, buffers.row_bytes // 8, dtype=torch.int64)
    return torch.stack([buffers.row((buffer_of(rank, name) << ROW_BITS) + row) for row in range(count)])


@RANKS
@ORDERED_OPERATIONS
def test_the_bytes_are_those_of_the_traffic(order: RowOrder, operation: str, ranks: int) -> None:
    cfg, _, ids = workload(ranks, order=order)
    want = traffic(cfg, count_routing(cfg, list(ids)), operation)
    size, remote, memory = 2 * HIDDEN, torch.zeros(ranks, ranks, dtype=torch.int64), [0] * ranks
    for rank, own in enumerate(moves_of(cfg, ids, operation)):
        for places, counted in ((own.sources, memory), (own.targets, memory)):
            for place in places[places != NONE].tolist():
                owner = (place >> ROW_BITS) // len(BUFFERS)
                counted[owner] += size
                assert places is own.targets or owner == rank, "only its own rows are read"
                if owner != rank:
                    remote[rank, owner] += size
    assert remote.equal(want.remote) and tuple(memory) == want.memory


@RANKS
@ORDERED_OPERATIONS
def test_no_two_items_write_a_row(order: RowOrder, operation: str, ranks: int) -> None:
    cfg, _, ids = workload(ranks, "masked", order)
    written = torch.cat([own.targets[own.targets != NONE] for own in moves_of(cfg, ids, operation)])
    assert written.unique().numel() == written.numel() > 0
    sizes = buffer_rows(cfg, ids, operation)
    for place in written.tolist():
        rank, name = divmod(place >> ROW_BITS, len(BUFFERS))
        assert (place & 0xFFFFFFFF) < sizes[rank][BUFFERS[name]]


@RANKS
@pytest.mark.parametrize("order", ROW_ORDERS)
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated"])
def test_a_dispatch_leaves_the_rows_of_the_reference(routing: str, order: RowOrder, ranks: int) -> None:
    cfg, inputs, ids = workload(ranks, routing, order)
    buffers = RowBuffers(cfg, ["cpu"] * ranks, ids, "dispatch")
    move(buffers)
    x = [rows_of(buffers, rank, "x", TOKENS).view(torch.bfloat16) for rank in range(ranks)]
    for rank, batch in enumerate(reference.dispatch(cfg, x, [one.topk_ids for one in inputs])):
        count = int(batch.num_rows)
        assert torch.equal(rows_of(buffers, rank, "rows", count), batch.tokens[:count].view(torch.int64))


@RANKS
@pytest.mark.parametrize("operation", [name for name in LAUNCHES if name != "dispatch"])
def test_a_combine_sums_all_rows_of_a_token(operation: str, ranks: int) -> None:
    cfg, inputs, ids = workload(ranks, "masked")
    buffers = RowBuffers(cfg, ["cpu"] * ranks, ids, operation)
    move(buffers)
    x = [one.x for one in inputs]
    row_maps = [batch.row_map for batch in reference.dispatch(cfg, x, [one.topk_ids for one in inputs])]
    seen = 0
    for source in range(ranks):
        for token, out in enumerate(rows_of(buffers, source, "out", TOKENS)):
            rows = [(rank, row) for rank in range(ranks) for row in row_maps[rank][source, token].tolist() if row >= 0]
            want = torch.zeros_like(out)
            for rank, row in rows:
                want ^= buffers.row((buffer_of(rank, "rows") << ROW_BITS) + row)
            assert not rows or torch.equal(out, want)
            seen += len(rows)
    assert seen == (ids >= 0).sum()


@OPERATIONS
def test_wrong_rows_are_counted(operation: str) -> None:
    cfg, _, ids = workload(2)
    buffers = RowBuffers(cfg, ["cpu"] * 2, ids, operation)
    written = [own.targets[own.targets != NONE] for own in buffers.moves]
    assert buffers.wrong_rows() > max(len(places) for places in written), "memory is poisoned"
    move(buffers)
    assert buffers.wrong_rows() == 0
    last = "rows" if operation == "dispatch" else "out"
    (place,) = (places[(places >> ROW_BITS) == buffer_of(1, last)][-1:] for places in written[1:])
    buffers.row(int(place))[-1] ^= 1
    assert buffers.wrong_rows() == 1
    buffers.poison()
    assert buffers.wrong_rows() > 1


def test_an_item_that_the_ring_has_no_room_for_is_refused() -> None:
    cfg = EPConfig(HIDDEN, 16, MOST_SOURCES + 1, 1, 1)
    ids = torch.arange(MOST_SOURCES + 1, dtype=torch.int32).view(1, 1, -1)
    with pytest.raises(EPError, match=f"top_k: items have at most {MOST_SOURCES} sources"):
        RowBuffers(cfg, ["cpu"], ids, "combine_partial").table(0)
    assert RowBuffers(cfg, ["cpu"], ids, "dispatch").table(0)[0, 0] == 1 | (MOST_SOURCES + 1) << 32


def test_the_kernels_are_those_of_the_source() -> None:
    text = sm_ceiling.SOURCE.read_text()
    plain = re.findall(r"^PLAIN\((\w+), (\d+), (\d+), (\d+)\)$", text, re.MULTILINE)
    bulk = re.findall(r"^BULK\((\w+), (\d+), (\d+), (\d+)\)$", text, re.MULTILINE)
    threads = {name: int(count) for name, count, *_ in plain} | {name: 32 * int(count) for name, count, *_ in bulk}
    assert {name: count for name, (count, _) in sm_ceiling.KERNELS.items()} == threads
    for name, count, vectors, together in plain:
        assert name == f"plain_{count}_{vectors}x{int(together) + 1}"
    for name, count, size, _ in bulk:
        assert name.removesuffix("_sums") == f"bulk_{count}_{size}"
    assert f"ITEM_WORDS = {ITEM_WORDS};" in text and f"MOST_SOURCES = {MOST_SOURCES};" in text
    (shared,) = re.findall(r"SHARED_BYTES = (.*);", text)
    assert eval(shared) == sm_ceiling.ALL_SHARED
    assert all(14336 % (16 * 32 * int(vectors)) == 0 for _, _, vectors, _ in plain)


def test_without_a_compiler_the_suite_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm_ceiling.shutil, "which", lambda name: None)
    with pytest.raises(sm_ceiling.NoCompilerError, match="nvcc: neither on the path nor"):
        sm_ceiling.compile_kernels("sm_90a", 14336)

    def fails(*words: object) -> list[dict]:
        return [{"cubin": sm_ceiling.compile_kernels("sm_90a", 14336)}]

    monkeypatch.setattr(suite, "measure_sweep_ceilings", fails)
    notes: list[tuple[str, bool]] = []
    run = SimpleNamespace(
        run={"sm_ceilings": []}, devices=["cuda:0"], say=print, note=lambda text, failure: notes.append((text, failure))
    )
    suite.Suite.measure_sm_ceilings(run)
    assert run.run["sm_ceilings"] == [] and notes == [(f"SM ceilings: {no_nvcc()}", False)]


def no_nvcc() -> str:
    return f"nvcc: neither on the path nor {sm_ceiling.NVCC}"


def test_the_table_of_budgets_has_times_over_the_ceiling() -> None:
    run = example_run()
    ceiling = {"operation": "dispatch", "format": "bf16", "tokens": 128, "p50_us": 24.0, "kernel": "bulk_1_14336"}
    run["sm_ceilings"] = [ceiling | {"sms": 8}]
    text = tables.page(run)
    assert "## SM budgets (over the ceiling)\n\n| operation" in text
    assert "| dispatch | bf16 | 128 | 30.0 (1.25) | 30.0 |" in text
    assert "| dispatch | bf16 | 128 | 24.0 bulk_1_14336 |" in text and tables.SM_CEILING_TEXT in text
    run["sm_ceilings"] = []
    old = tables.page(run)
    assert "## SM budgets\n\n" in old and "| dispatch | bf16 | 128 | 30.0 | 30.0 |" in old
    assert tables.SM_CEILING_TEXT not in old


def test_the_page_has_budgets_of_many_tokens_where_their_ceilings_were_measured() -> None:
    run = example_run()
    ceiling = {"operation": "dispatch", "format": "bf16", "tokens": 1024, "p50_us": 48.0, "sms": 8}
    assert pages.budgets_text(run | {"sm_ceilings": [ceiling]}) == ""
    run["sweep"] += [case("dispatch", "bf16", 1024, 60.0, [[1, 1]], sms=8)]
    assert pages.budgets_text(run) == ""
    run["sm_ceilings"] = [ceiling]
    assert pages.budgets_text(run).splitlines()[2:] == [
        "| operation | format | tokens per rank | 8 SMs |",
        "|---|---|---|---|",
        "| dispatch | bf16 | 1024 | 60.0 (1.25) |",
    ]


def test_a_kept_run_has_its_ceilings(tmp_path: Path) -> None:
    about = {"operation": "dispatch", "format": "bf16", "tokens": 4096}
    found = [about | {"sms": sms, "p50_us": 9000.125 / sms, "kernel": f"k{sms}"} for sms in (8, 24)]
    path = runs.keep_run(example_run() | {"sm_ceilings": found}, tmp_path)
    assert runs.read_run(path)["sm_ceilings"] == [one | {"p50_us": round(one["p50_us"], 3)} for one in found]
    path = runs.keep_run(example_run(), tmp_path)
    assert runs.read_run(path)["sm_ceilings"] == [] and "sm_ceilings" not in path.read_text()


def test_a_budget_that_only_one_operation_has_leaves_a_cell_empty() -> None:
    sweep = [case(name, "bf16", 128, 2.0, [[1, 1]], sms=sms) for name, sms in (("dispatch", 8), ("combine_exact", 24))]
    assert tables.sweep_table(sweep).splitlines()[2:] == [
        "| dispatch | bf16 | 128 | 2.0 |  |",
        "| combine exact | bf16 | 128 |  | 2.0 |",
    ]
