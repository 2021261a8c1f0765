"""What adapters cost: every adapter that needs no framework is timed on the CPU; runs as tables and files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_ep.integrations.deep_ep import Buffer
from perf import adapter_worker, adapters, deepep_worker, peers
from perf.adapter_problem import Rank, Work
from perf.adapter_worker import WORKS, Clock, measure, time_work
from perf.adapters import ADAPTERS, MODULES, TINY, TINY_TOKENS
from perf.deepep_works import NORMAL_BYTES, normal_buffer
from perf.peer_list import NORMAL_SMS
from tests.perf.test_peers import WORKER

HERE = {"deepep_normal": 4, "deepep_low_latency": 2, "deepep_elastic": 3, "ops": 2, "layer": 1}
"""Adapters that run without a framework, and how many works each has of a batch size."""
IN_FRAMEWORKS = {
    "flashinfer": ["pair bf16"],
    "transformers": ["layer bf16"],
    "megatron": ["pair bf16"],
    "torchtitan": ["pair bf16", "pair bf16 non_blocking_capacity_factor"],
    "sglang": ["pair bf16 extend", "pair bf16 decode", "pair fp8 extend", "pair fp8 decode"],
    "vllm": ["pair bf16 standard", "pair bf16 standard, static_rows=0", "pair bf16 batched", "pair fp8 batched"],
}
"""What is measured of the others on a CPU, where vLLM does not quantise."""
ALONE = SimpleNamespace(highest=list)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default group of one rank; a sample is a call."""
    for name, value in {"CPU_SAMPLES": 1, "BURST": 1, "IN_STEP": 0}.items():
        monkeypatch.setattr(adapter_worker, name, value)
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_rows(rows: list[dict], name: str) -> None:
    """Of one rank on the CPU."""
    for row in rows:
        assert row["rows"] == TINY_TOKENS[0] * TINY.top_k and row["how"] == "waited", name
        times = [row[f"{prefix}{field}"] for prefix in ("", "native_") for field in ("p50_us", "host_us")]
        assert all(0 < one < 1e7 for one in times), name


@pytest.mark.usefixtures("group")
def test_adapters_are_timed_beside_a_communicator() -> None:
    assert ADAPTERS.keys() == WORKS.keys() == HERE.keys() | MODULES.keys()
    for name, works in HERE.items():
        rows: list[dict] = []
        me = Rank(TINY, list(TINY_TOKENS), torch.device("cpu"))
        measure(WORKS[name], me, Clock(ALONE, None), rows.append)
        me.close()
        operations = [row["operation"] for row in rows]
        assert operations == (["layer"] if name == "layer" else ["dispatch", "combine"] * works), name
        check_rows(rows, name)


@pytest.mark.usefixtures("group")
def test_deepep_itself_is_timed_where_its_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the adapter in its place, which is given what DeepEP's own buffer and calls need."""
    given: list[dict] = []

    class Recorded(Buffer):
        def dispatch(self, x: Any, *args: Any, **options: Any) -> tuple:
            given.append(options)
            return super().dispatch(x, *args, **options)

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Recorded, topk_idx_t=torch.int64))
    normal_buffer.cache_clear()
    rows: list[dict] = []
    me = Rank(TINY, list(TINY_TOKENS), torch.device("cpu"))
    measure(deepep_worker.deepep_normal, me, Clock(ALONE, None), rows.append)
    buffer = normal_buffer()
    buffer.destroy()
    normal_buffer.cache_clear()
    me.close()
    assert (buffer.num_nvl_bytes, buffer.explicitly_destroy) == (NORMAL_BYTES, True)
    assert Buffer.num_sms == NORMAL_SMS
    assert {options["num_worst_tokens"] for options in given} == {0}
    about = {"tokens": TINY_TOKENS[0], "rows": TINY_TOKENS[0] * TINY.top_k, "operation": "dispatch", "how": "waited"}
    for row, fmt in zip(rows, ("bf16", "fp8"), strict=True):
        times = row.pop("p50_us"), row.pop("host_us")
        assert row == about | {"format": fmt} and all(0 < one < 1e7 for one in times)


DEEPEP = "import perf.nvshmem as n, perf.deepep_worker as d; n.preload = d.preload = int; d.run(d.main)"
"""A rank of DeepEP itself where there is no NVSHMEM."""


@pytest.mark.slow
def test_deepep_itself_runs_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(*args: Any, module: str, budgets: dict) -> list[str]:
        assert module == "perf.deepep_worker"
        return [sys.executable, "-c", DEEPEP, *made(*args, budgets=budgets)[3:]]

    made = peers.worker_command
    monkeypatch.setattr(peers, "worker_command", command)
    monkeypatch.setattr(peers, "run_peers", lambda *args, **options: {"rows": [], "notes": []})
    shims = Path(sys.modules[Buffer.__module__].__file__ or "").parent / "shims"
    monkeypatch.syspath_prepend(shims)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sys.path)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = adapters.run_deepep(2, TINY, TINY_TOKENS, logs=tmp_path)
    assert found["notes"] == []
    about = [(row["peer"], row["format"], row["how"]) for row in found["rows"]]
    assert about == [("deepep_normal", fmt, "waited") for fmt in ("bf16", "fp8")]


@pytest.mark.parametrize(
    ("gpus", "name", "present"),
    [(1, "deepep_normal", True), (2, "ops", True), (2, "deepep_normal", False)],
    ids=["one GPU", "another adapter", "no module"],
)
def test_deepep_is_not_asked_to_wait_where_it_cannot(
    gpus: int, name: str, present: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "run_peers", lambda *args, **options: {"rows": [], "notes": []})
    monkeypatch.setattr(peers, "run_workers", lambda *args, **options: pytest.fail("was run"))
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda module: present or None)
    assert adapters.run_deepep(gpus, TINY, TINY_TOKENS, [name])["rows"] == []


def test_deepep_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "at('deepep_normal', 'running'); sys.exit('RuntimeError: DeepEP error: CPU recv timeout' if rank else stuck())"
    )
    before = {"peer": "deepep_normal", "format": "bf16", "tokens": 8, "operation": "dispatch", "p50_us": 1.0}

    def command(names: list, rank: int, *others: Any, module: str, budgets: dict) -> list[str]:
        return [sys.executable, "-c", WORKER + code, ",".join(names), str(rank), str(others[-1])]

    monkeypatch.setattr(peers, "worker_command", command)
    monkeypatch.setattr(peers, "run_peers", lambda *args, **options: {"rows": [before], "notes": ["a note"]})
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda module: True)
    found = adapters.run_deepep(2, TINY, TINY_TOKENS)
    why = "rank 1 ended with 1 at running: RuntimeError: DeepEP error: CPU recv timeout"
    assert found == {
        "rows": [before],
        "notes": ["a note", f"DeepEP where its host waits: deepep_normal: failed: {why}"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_adapters_to_installed_frameworks_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a framework's groups and settings stay."""
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"needs {name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = adapters.run_adapters(1, TINY, TINY_TOKENS, [name])
    if any("pip install" in note for note in found["notes"]):
        pytest.skip(found["notes"][0])  # of another version
    assert not found["notes"]
    made = [f"{row['operation']} {row['format']} {row.get('about', '')}".strip() for row in found["rows"]]
    assert made == IN_FRAMEWORKS[name]
    check_rows(found["rows"], name)


class Fake(Clock):
    """A GPU's clock: a graph takes 1 s, a queued call 2 s, one that is waited for 3 s."""

    def __init__(self, graphs: bool) -> None:
        graph = SimpleNamespace(reset=lambda: None)
        self.captured: list[object] = []
        super().__init__(ALONE, SimpleNamespace(
            capture=lambda work: self.captured.append(work()) or (graph if graphs else None),
            time=lambda samples, enqueue: ([1.0 if graphs else 2.0], True),
            stream=SimpleNamespace(synchronize=lambda: None),
        ))  # fmt: skip

    def on_stream(self) -> Any:
        return torch.no_grad()

    def waited(self, call: Callable, tokens: int) -> float:
        return 3.0

    def host_time(self, call: Callable, tokens: int) -> float:
        return 4.0


@pytest.mark.parametrize(("graphs", "how", "seconds"), [(True, "graph", 1 / 32), (False, "queued", 2.0)])
def test_the_host_times_only_what_it_waits_for(graphs: bool, how: str, seconds: float) -> None:
    """Both times of a row are taken in the same way, and a combine has a dispatch of its own before it."""
    calls: list[str] = []
    names = ("dispatch", "combine")
    made = [{name: partial(calls.append, who + name) for name in names} for who in ("", "native ")]
    work = Work("bf16", 8, 16, *made, waits=frozenset(["dispatch"]))
    clock = Fake(graphs)
    first = time_work(work, clock)
    row = next(first)
    assert (row["how"], row["p50_us"], row["native_p50_us"], row["host_us"]) == ("waited", 3e6, 3e6, 4e6)
    assert not clock.captured
    calls.clear()
    row = next(first)
    assert calls[:4] == ["dispatch", "native dispatch", "combine", "native combine"]
    assert (row["how"], row["p50_us"], row["native_p50_us"]) == (how, 1e6 * seconds, 1e6 * seconds)
    assert len(clock.captured) == (2 if graphs else 1)


def test_an_adapter_that_ends_badly_costs_no_other_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "at(names[0]); row(names[0]) if names[0] == 'ops' else sys.exit('ValueError: bad')"

    def command(names: list, rank: int, *others: Any, module: str, budgets: dict) -> list[str]:
        assert module == "perf.adapter_worker" and set(names) <= set(budgets)
        return [sys.executable, "-c", WORKER + code, ",".join(names), str(rank), str(others[-1])]

    monkeypatch.setattr(peers, "worker_command", command)
    monkeypatch.setattr(adapters, "MODULES", {"flashinfer": "no_such_module"})
    found = adapters.run_adapters(1, TINY, TINY_TOKENS, ("flashinfer", "layer", "ops"))
    assert found["notes"] == [
        "flashinfer: not present: no module no_such_module",
        "layer: failed: rank 0 ended with 1 at pair, timing: ValueError: bad",
    ]
    assert [row["adapter"] for row in found["rows"]] == ["ops"]


def example() -> dict:
    about = {"format": "bf16", "rows": 16, "operation": "dispatch", "host_us": 40.0, "native_host_us": 10.0}
    waits = {"adapter": "deepep_normal", "how": "waited"} | about
    worst = waits | {"about": "num_worst_tokens", "how": "graph"}
    machine = {"gpus": {"cuda:0": "NVIDIA H200"}, "devices": ["cuda:0"], "driver": "1", "cuda": "2", "torch": "3"}
    return {
        "machine": machine | {"python": "4", "date": "2026-11-23T00:00:00", "commit": "abc"},
        "shape": "7168/256/8",
        "notes": ["flashinfer: not present"],
        "rows": [
            worst | {"tokens": 4096, "p50_us": 300.00001, "native_p50_us": 200.0},
            worst | {"tokens": 16, "p50_us": 30.0, "native_p50_us": 10.0},
            waits | {"tokens": 16, "p50_us": 90.0, "native_p50_us": 30.0},
        ],
        "peers": [{"peer": "deepep_normal", "format": "bf16", "tokens": 16, "operation": "dispatch", "p50_us": 25.0}],
    }


def test_a_table_has_a_line_for_all_batch_sizes() -> None:
    lines = adapters.table(example()).splitlines()
    assert lines[0] == "| adapter | operation | format | how | 16 | 4096 | host / native |"
    assert lines[2:] == [
        "| DeepEP V1, normal, num_worst_tokens | dispatch | bf16 | graph | 30.0 (3.00, DeepEP 25.0) | 300.0 (1.50) "
        "| 40 / 10 |",
        "| DeepEP V1, normal | dispatch | bf16 | waits | 90.0 (3.00) |  | 40 / 10 |",
    ]


def test_deepep_is_beside_an_adapter_that_waits_as_it_does() -> None:
    run = example()
    own = {"peer": "deepep_normal", "format": "bf16", "tokens": 16, "rows": 16, "operation": "dispatch"}
    run["peers"].append(own | {"how": "waited", "p50_us": 120.0, "host_us": 110.0})
    before, lines = adapters.table(example()).splitlines(), adapters.table(run).splitlines()
    assert lines[:-1] == before[:-1]
    waits = "| DeepEP V1, normal | dispatch | bf16 | waits | 90.0 (3.00, DeepEP 120.0) |  | 40 / 10, DeepEP 110 |"
    assert lines[-1] == waits


def test_combines_that_take_as_long_at_every_size_are_shown_once() -> None:
    run = example()
    about = {"format": "bf16", "operation": "combine", "how": "graph", "host_us": 4.0, "native_host_us": 1.0}

    def combines(times: tuple[float, float], **other: str) -> list[dict]:
        sizes = zip((16, 4096), times, strict=True)
        every = [about | {"tokens": tokens, "p50_us": time, "native_p50_us": 8.0} for tokens, time in sizes]
        return [{"adapter": "deepep_normal"} | one | other for one in every]

    first, same, slower = (10.0, 600.0), (10.4, 580.0), (10.4, 640.0)
    run["rows"] += combines(first) + combines(same, format="fp8") + combines(slower, about="num_worst_tokens")
    run["rows"] += combines(first, adapter="deepep_elastic")
    left = [row for row in adapters.without_repetition(run)["rows"] if row["operation"] == "combine"]
    assert [row["p50_us"] for row in left] == [*first, *slower, *first]
    text = adapters.section({"h200x1-adapters": run})
    assert "| combine | fp8 |" not in text and f"{adapters.SAME_TEXT}." in text
    assert len(adapters.without_repetition(run)["rows"]) == len(run["rows"]) - 2


def test_a_kept_run_is_a_section_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.section(adapters.kept(tmp_path)) == adapters.NOTHING_TEXT
    (tmp_path / "h200x1-adapters.json").write_text(adapters.text_of(example()))
    (tmp_path / "h200x1-soak.json").write_text("{}")
    runs = adapters.kept(tmp_path)
    assert runs["h200x1-adapters"]["rows"][0]["p50_us"] == 300.0 and len(runs) == 1
    text = adapters.section(runs)
    assert adapters.table(example()) in text and text.endswith("- flashinfer: not present")
    assert "[Data](../perf/results/h200x1-adapters.json): 1 x NVIDIA H200, 1 rank" in text
    monkeypatch.setattr(sys, "argv", ["adapters", "--table", str(tmp_path / "h200x1-adapters.json")])
    assert adapters.main() == 0
    other = example()["rows"][0] | {"adapter": "flashinfer"}
    both = adapters.section(runs | {"h200x1-other-adapters": example() | {"rows": [other], "notes": []}})
    assert "not present" not in both  # measured in another run


def test_kernels_of_a_folder_are_found_by_processes_that_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({}))
    for before in (None, "/elsewhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", before) if before else monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        with adapters.kernels_from(str(tmp_path)):
            assert (Path(os.environ["XDG_CACHE_HOME"]) / "cute_ep/manifest.json").exists()
        assert os.environ.get("XDG_CACHE_HOME") == before
