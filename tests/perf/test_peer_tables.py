"""The fastest of several ways is shown and named, small differences are ties, what failed is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import losses, pages, peer_tables, plots, runs, tables, values
from perf.losses import Loss
from perf.peer_list import CHAINED, PEERS
from tests.perf.example import example_run


def row(peer: str, tokens: int, p50_us: float, fmt: str = "bf16", operation: str = "pair", **other: object) -> dict:
    """A result of `perf.peers.run_peers`."""
    about = {"peer": peer, "format": fmt, "tokens": tokens, "operation": operation, "p50_us": p50_us, "error": 0.0}
    return about | other


WAYS = [
    row("nccl_ag_rs", 1, 10.8),
    row("nccl_ag_rs_windows", 1, 8.7),
    row("nccl_ag_rs", 4096, 536.0),
    row("nccl_ag_rs_windows", 4096, 623.0),
    row("nccl_ag_rs_registered", 4096, 540.0),
    row("nccl_all_to_all", 4096, 900.0),
]


def test_the_fastest_way_of_each_size_is_named() -> None:
    found = [(one["peer"], one["tokens"], one["p50_us"], one["way"]) for one in peer_tables.fastest_ways(WAYS)]
    assert found == [
        ("nccl_ag_rs", 1, 8.7, "windows"),
        ("nccl_ag_rs", 4096, 536.0, "plain"),
        ("nccl_all_to_all", 4096, 900.0, ""),
    ]
    assert [one["way"] for one in peer_tables.fastest_ways(WAYS[:1])] == [""], "the only way of a run, as of older ones"


def test_operations_have_their_own_fastest_way() -> None:
    more = [row("nccl_ag_rs", 1, 4.0, operation="dispatch"), row("nccl_ag_rs_windows", 1, 5.0, operation="dispatch")]
    found = {(one["operation"], one["tokens"]): one["way"] for one in peer_tables.fastest_ways(WAYS[:-1] + more)}
    assert found == {("pair", 1): "windows", ("pair", 4096): "plain", ("dispatch", 1): "plain"}


def test_tables_show_the_fastest_way_and_how_it_was_called() -> None:
    run = example_run() | {"cases": []}
    tuned = {"how": "24 SMs, chunks of 20 and 7", "sms": 24}
    run["peers"] = [
        *WAYS,
        row("deepep_normal", 4096, 800.0),
        row("deepep_normal_tuned", 4096, 700.0, **tuned),
        row("nccl_ag_rs", 1, 20.0, operation=CHAINED, host_us=70.0),
        row("nccl_ag_rs_windows", 1, 21.0, operation=CHAINED, host_us=60.0),
    ]
    assert peer_tables.peers_table(run, "pair") == (
        "| tokens per rank | 1 | 4096 |\n"
        "|---|---|---|\n"
        "| nccl ag rs bf16 | 8.7 (windows) | 536.0 (plain) |\n"
        "| nccl all to all bf16 |  | 900.0 |\n"
        "| deepep normal bf16 |  | 800.0 |\n"
        "| deepep normal tuned bf16 |  | 700.0 (24 SMs, chunks of 20 and 7) |\n"
    )
    assert "| nccl ag rs bf16 | 60.0 (windows) |" in peer_tables.peers_table(run, CHAINED, "host_us")
    assert pages.fastest_table(run) == (
        "| tokens per rank | 1 | 4096 |\n"
        "|---|---|---|\n"
        "| NCCL bf16 | 8.7 (windows) | 536.0 (plain) |\n"
        "| DeepEP bf16 |  | 700.0 |\n"
    )
    assert "none was tuned" not in pages.times_text(run, "more") and "none was tuned" in pages.times_text(
        run | {"peers": WAYS}, "more"
    )
    assert "| nccl ag rs bf16 | 8.7 (windows) | 536.0 (plain) |" in tables.page(run)


def test_texts_say_what_the_peers_of_runs_do_and_no_others() -> None:
    text = peer_tables.peers_text([example_run(), example_run() | {"peers": WAYS[1:2]}])
    assert text == f"*nccl ag rs*: {PEERS['nccl_ag_rs'].does}; *nccl ag rs windows*: {PEERS['nccl_ag_rs_windows'].does}"


@pytest.mark.parametrize(
    ("theirs", "lost"),
    [(99.0, True), (99.01, False), (100.0, False), (101.0, False)],
    ids=["1% less", "almost 1% less", "the same", "more"],
)
def test_less_than_a_hundredth_is_a_tie(theirs: float, lost: bool) -> None:
    """In the lines of other libraries and of torch.compile."""
    assert values.faster(theirs, 100.0) == lost
    assert bool(list(losses.lost_to("pair", [row("nccl_ag_rs", 1, theirs)], "pair", {(1, "bf16"): 100.0}))) == lost
    run = example_run()
    silu = run["swiglu"][0] | {"p50_us": 100.0, "groups": 1}
    run |= {"swiglu": [silu], "compiled": [silu | {"p50_us": theirs}], "peers": []}
    assert bool([loss for loss in losses.losses(run) if loss.case.startswith("SwiGLU")]) == lost


def test_a_line_names_the_fastest_peer_of_a_library() -> None:
    rows = [
        *WAYS,
        row("deepep_normal", 4096, 500.0),
        row("deepep_normal_tuned", 4096, 450.0),
        row("deepep_normal", 1, 60.0),
        row("deepep_low_latency", 1, 9.0),
        row("deepep_v2", 4096, 480.0),
    ]
    own = {(1, "bf16"): 12.0, (4096, "bf16"): 600.0}
    assert list(losses.lost_to("partial pair", rows, "pair", own)) == [
        Loss("partial pair", "nccl ag rs bf16 (windows)", ((1, 8.7, 12.0),)),
        Loss("partial pair", "nccl ag rs bf16 (plain)", ((4096, 536.0, 600.0),)),
        Loss("partial pair", "deepep normal tuned bf16", ((4096, 450.0, 600.0),)),
        Loss("partial pair", "deepep low latency bf16", ((1, 9.0, 12.0),)),
        Loss("partial pair", "deepep v2 bf16", ((4096, 480.0, 600.0),)),
    ]


@pytest.mark.parametrize("case", [losses.PARTIAL, losses.EXACT, losses.UNQUEUED, "dispatch, 24 SMs (ours 24)"])
def test_what_is_lost_is_listed_with_what_would_change_it(case: str) -> None:
    (line,) = pages.loss_lines([Loss(case, "nccl ag rs bf16", ((4096, 1.0, 2.0),))])
    change = next(text for start, text in losses.CHANGES.items() if case.startswith(start))
    assert line == f"{case}: nccl ag rs bf16 at 4096 (1.0, ours 2.0); to change it: {change}"


def test_every_case_that_can_be_lost_has_what_would_change_it() -> None:
    run = example_run()
    run["peers"] = [
        row("deepep_normal", 128, 0.1, operation=operation, host_us=0.1)
        for operation in ("pair", CHAINED, "dispatch", "combine")
    ]
    run["sweep"] = [
        one | {"operation": operation, "sms": 24}
        for one in run["cases"]
        for operation in ("dispatch", "combine_partial")
    ]
    run["compiled"] = [run["swiglu"][0] | {"groups": 1, "p50_us": 0.1}]
    chained = {"operation": CHAINED, "host_us": 5.0}
    run["cases"] = [*run["cases"], *(one | chained for one in run["cases"] if one["operation"] == "pair")]
    found = list(losses.losses(run))
    assert len({loss.case for loss in found}) == 6 and len(pages.loss_lines(found)) == 6


def test_what_failed_has_its_message_on_the_page() -> None:
    run = example_run()
    assert pages.failures_text(run) == ""
    run["notes"] += [
        "nccl_ep_low_latency: failed: no nvcc",
        "nccl_ag_rs: 1 of 2 results without CUDA graphs",
        "x: failed: y",
    ]
    assert pages.failures_text(run).splitlines()[2:] == ["- nccl_ep_low_latency: failed: no nvcc"]


def test_results_with_and_without_tuning_are_kept_together(tmp_path: Path) -> None:
    run = example_run()
    run["peers"] = [row("deepep_normal", 1, 2.0), row("deepep_normal_tuned", 1, 1.0, how="24 SMs", sms=24)]
    kept = runs.read_run(runs.keep_run(run, tmp_path))["peers"]
    assert [(one["peer"], one.get("how"), one.get("sms")) for one in kept] == [
        ("deepep_normal", None, None),
        ("deepep_normal_tuned", "24 SMs", 24),
    ]
    assert "1.0 (24 SMs)" in peer_tables.peers_table(run | {"peers": kept}, "pair")


@pytest.mark.skipif(not plots.have_matplotlib(), reason="there is no matplotlib")
def test_plots_show_the_fastest_way(tmp_path: Path) -> None:
    run = example_run() | {"peers": [*WAYS, row("deepep_v2_expanded", 1, 30.0)]}
    (path,) = plots.draw(run, tmp_path, None, ("peers",))
    text = path.read_text()
    assert "nccl ag rs bf16" in text and "deepep v2 expanded bf16" in text and "windows" not in text
