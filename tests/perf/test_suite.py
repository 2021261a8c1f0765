"""The suite where it needs no GPU: what it covers, and that what is missing on a machine becomes a note."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cute_ep
from cute_ep.aot import library
from cute_ep.aot.library import LibraryEntry, source_hash
from cute_ep.api.errors import EPError
from cute_ep.bench.measure import CHAINED, OPERATIONS, PARTS, make_sets, measure, run_round
from cute_ep.layouts.maps.formats import formats_of
from cute_ep.layouts.maps.variants import Variant
from cute_ep.runtime.connection import connect_local
from perf import peers, suite
from perf.cases import BASIC, MAIN, MEASURED_FORMATS, ORDER_OPERATIONS, OTHERS, TOKENS, Shape, case_groups
from perf.orders import in_order
from tests.bench.counting_runner import CountingRunner
from tests.perf.example import CEILINGS, example_run


def test_the_suite_covers_what_it_promises() -> None:
    groups = case_groups(quick=False)
    main = {group.format: group for group in groups if group.shape == MAIN}
    assert tuple(main) == MEASURED_FORMATS
    for group in main.values():
        assert [tokens for tokens, routing in group.points if routing == "uniform"] == list(TOKENS)
        assert any(routing == "zipf" for _, routing in group.points) and group.max_tokens == 8192
    assert {group.shape for group in groups} == {MAIN, *OTHERS}
    assert {group.format for group in groups if group.shape.hidden == 2880} == set(formats_of(2880, MEASURED_FORMATS))
    for group in groups:
        group.shape.config(group.format, 4, group.max_tokens)
    assert {group.shape for group in case_groups(quick=True)} == {MAIN}
    measured = {
        (group.format, tokens): group.operations(tokens, routing)
        for group in main.values()
        for tokens, routing in group.points
        if routing == "uniform"
    }
    assert set(measured["bf16", 4096]) == set(PARTS) and set(measured["nvfp4", 8]) == set(OPERATIONS)
    assert measured["mxfp4", 1] == BASIC == groups[-1].operations(128, "uniform")


@pytest.mark.parametrize("order", ORDER_OPERATIONS)
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_all_rows_have_room_in_any_order(fmt: str, order: str) -> None:
    """Whatever experts tokens choose."""
    cfg = in_order(Shape(64, 8, 2).config(fmt, 2, 64), order)
    sets = make_sets(cfg, ["cpu"] * 2, 64, "one_rank", sets=1)
    ranks = connect_local(cfg, ["cpu"] * 2)
    for launch in (launch for operation in ORDER_OPERATIONS[order] for launch in PARTS[operation]):
        for ep, own in zip(ranks, sets.batches, strict=True):
            run_round(ep, own[0], launch)
        for ep in ranks:
            ep.synchronize()
    assert not any(bool(own[0].dispatched.any_lost()) for own in sets.batches)


def test_peers_call_the_chained_pair_what_the_measurement_does() -> None:
    assert peers.CHAINED == CHAINED


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_the_suite_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for words, rule in (
        ([], "there is no CUDA GPU on this machine"),
        (["--devices", "cpu:2"], "devices = 'cpu'"),
        (["--devices", "cuda:0"], "devices = 'cuda:0'"),
    ):
        monkeypatch.setattr(sys, "argv", ["suite", *words])
        with pytest.raises(SystemExit) as stop:
            suite.main()
        assert stop.value.code == 2 and rule in capsys.readouterr().err


def test_a_section_that_fails_becomes_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but GPUs: communicators are the reference's, times made up, and one section fails."""
    run = example_run()
    monkeypatch.setattr(suite, "environment", lambda devices, command: run["machine"] | {"command": command})
    monkeypatch.setattr(suite, "link_matrix", lambda: run["machine"]["links"])
    monkeypatch.setattr(suite, "measure_ceilings", lambda devices, library: CEILINGS)
    monkeypatch.setattr(suite.torch.cuda, "empty_cache", lambda: None)
    group = suite.Group(Shape(64, 8, 2), "bf16", ((4, "uniform"),))
    impossible = suite.Group(Shape(64, 1, 2), "bf16", ((4, "uniform"),))
    monkeypatch.setattr(suite, "case_groups", lambda quick: [group, impossible])
    monkeypatch.setattr(
        suite, "measure", lambda c, sets, names: measure(c, sets, names, samples=3, runner=CountingRunner(c))
    )
    state = [{"clocks.sm": "1980 MHz"}]
    monkeypatch.setattr(suite, "gpu_state", lambda: state)
    monkeypatch.setattr("cute_ep.reference.backend.ReferenceCommunicator.close", lambda self: None)

    def broken(*words: object) -> list:
        raise EPError("no such kernel")

    monkeypatch.setattr(suite, "measure_swiglu", broken)
    monkeypatch.setattr("sys.argv", ["suite.py", "--out", str(tmp_path / "run"), "--quick"])
    console = SimpleNamespace(print=lambda *words, **options: None)
    made = suite.Suite(["cpu"], tmp_path / "run", None, True, console, "feed" * 10)
    suite.run_suite(made, ("cases", "swiglu", "peers"))
    content = json.loads((tmp_path / "run" / suite.RUN).read_text())
    assert [one["operation"] for one in content["cases"]] == list(BASIC) and made.failed
    assert content["machine"]["commit"] == "feed" * 10 and content["peer_versions"] == {}
    assert content["machine"]["library"]["sources"] == source_hash()
    assert content["gpu_state"] == {"ceilings": state, "cases": state, "peers": state}
    assert all(one["shape"] == "64/8/2" and one["floor_us"] > 2 for one in content["cases"])
    notes = "\n".join(content["notes"])
    assert "swiglu: EPError: no such kernel" in notes and "64/1/2 bf16: top_k = 2" in notes
    assert (
        "deepep_normal: failed: needs at least 2 GPUs" in notes
        and "no such kernel" in (tmp_path / "run" / suite.TABLES).read_text()
    )
    assert {"ceilings", "64/8/2 bf16", "swiglu", "peers"} <= set(content["seconds"])
    assert content["machine"]["command"] == "python -m perf.suite --quick"
    check_that_more_can_be_added(made, content)


def check_that_what_failed_is_kept(made: suite.Suite, content: dict) -> None:
    """Also where the run is stopped while other peers are still at work."""

    def stopped(*words: object, save: Callable[[dict], None], **options: object) -> dict:
        save({"rows": [], "versions": {}, "notes": ["nccl_ep: failed: a reason"]})
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(peers, "run_peers", stopped)
        suite.run_suite(made, ("peers",))
    kept = json.loads((made.folder / suite.RUN).read_text())
    assert kept["notes"] == [*content["notes"], "nccl_ep: failed: a reason"] and kept["peers"] == content["peers"]


def check_that_more_can_be_added(made: suite.Suite, content: dict) -> None:
    """Sections of another call, where nothing but that has changed; ceilings are not measured again."""
    known = example_run()["peers"][:1]
    more = suite.Suite(["cpu"], made.folder, None, True, made.console, "feed" * 10, others=("deepep_v2",))
    earlier = deepcopy(content) | {"ceilings": content["ceilings"] | {"flag": 7.0}, "peers": known}
    earlier["peer_versions"] = {"nccl": "2.28.9"}
    more.add_to(earlier, ("peers",))
    suite.run_suite(more, ("peers",))
    both = json.loads((made.folder / suite.RUN).read_text())
    assert both["cases"] == content["cases"] and both["ceilings"]["flag"] == 7.0
    assert both["machine"]["command"] == "python -m perf.suite --quick && python -m perf.suite --quick"
    assert both["peers"] == known and both["notes"][:-1] == content["notes"]
    assert both["peer_versions"] == {"nccl": "2.28.9"}
    assert both["notes"][-1].startswith("deepep_v2: failed")
    check_that_what_failed_is_kept(more, both)
    with pytest.raises(ValueError, match="is of commit feedf"):
        suite.Suite(["cpu"], made.folder, None, True, made.console, "dead" * 10).add_to(content, ("peers",))
    with pytest.raises(ValueError, match=f"has sweep, {known[0]['peer']} already"):
        more.peers = [known[0]["peer"]]
        more.add_to(earlier | {"gpu_state": {"sweep": [], "peers": []}}, ("sweep", "peers"))


def test_a_run_tells_which_kernels_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of those that the library would launch: a rebuilt cubin shows, sources that no longer fit do not count."""

    def entry(kernel: str, sha256: str, source: str) -> dict:
        variant = Variant(kernel, "sm_90a", None)
        path = tmp_path / f"{variant.arch}/{variant.symbol}.cubin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        return LibraryEntry(variant, path, sha256, source, "4.8.1", "entry", 1, 0, 0, 0.0, ()).to_json()

    def facts(*rows: dict) -> dict:
        content = {"version": cute_ep.__version__, "variants": list(rows)}
        (tmp_path / library.MANIFEST).write_text(json.dumps(content))
        return suite.library_facts(str(tmp_path))

    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "none")
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path / "none")
    one = facts(entry("copy", "aa", source_hash()), entry("quantize", "bb", "other sources"))
    assert (one["sources"], one["kernels"], one["arches"], one["dsl"]) == (source_hash(), 1, ["sm_90a"], ["4.8.1"])
    assert facts(entry("copy", "cc", source_hash()))["cubins"] != one["cubins"]
