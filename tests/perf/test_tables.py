"""What tables and texts say of measured runs."""

from __future__ import annotations

import pytest

from cute_ep.bench import machine
from cute_ep.bench.measure import CHAINED, CONDITIONS
from perf import losses, model, pages, report, runs, tables, values
from perf.cases import MAIN
from tests.perf.example import case, example_run


def test_tables_show_the_numbers() -> None:
    run = example_run()
    text = tables.page(run)
    dispatch = next(one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 4096))
    assert f"| 4096 | bf16 | {dispatch['p50_us']:.1f} ({dispatch['p99_us']:.1f}) |" in text
    assert "SM stores to a peer 400 GB/s (ring), 350 GB/s" in text and "one flag 1.20 us" in text
    assert "2 x NVIDIA H200, NV18 between GPUs" in text
    assert "| 64 | 2048 | bf16 | 4.0 / 4.0 (50% / 50%) | 6.0 / 6.0 (50% / 50%) |  |" in text
    assert "| operation | format | tokens per rank | 8 SMs | 132 SMs |" in text
    assert "| operation | format | tokens per rank | expert major | rank major |" in text
    floor = run["orders"][0]["floor_us"]
    assert f"| dispatch | bf16 | 128 | 30.0 ({30 / floor:.2f}) | 20.0 ({20 / floor:.2f}) |" in text
    beside = text.partition("## Beside other libraries: pair")[2].partition("##")[0].splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in beside if line.startswith("| ")] == [
        "tokens per rank",
        "cute_ep bf16 partial (default)",
        "cute_ep bf16 exact",
        "cute_ep fp8 partial",
        "nccl ag rs bf16",
    ]
    assert any(line.startswith("| nccl ag rs bf16 | 50.5 |") for line in beside)
    assert "- deepep_normal: not present: no module deep_ep" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))
    assert tables.markdown(("a", "b"), []) == ""


def test_tables_of_a_run_that_found_nothing_have_its_notes() -> None:
    run = example_run() | {"ceilings": {}, "cases": [], "notes": ["ceilings: EPError: no kernel"]}
    assert "ceilings: EPError" in tables.page(run)


def test_the_report_says_where_peers_are_faster() -> None:
    run = example_run()
    (loss, *_) = losses.losses(run)
    ours = values.medians(run, "pair")[4096, "bf16"]
    assert loss == losses.Loss("partial pair", "nccl ag rs bf16", ((4096, 1.5, ours),))
    other = losses.Loss("partial pair", "deepep bf16", ((1, 2.0, 3.0), (16, 4.0, 5.0)))
    text = f"partial pair: nccl ag rs bf16 at 4096 (1.5, ours {ours:.1f})"
    change = losses.CHANGES["partial pair"]
    both = f"{text}; deepep bf16 at 1, 16 (4.0, ours 5.0); to change it: {losses.LATENCY} and {change}"
    assert pages.loss_lines([loss, other]) == [both]
    assert f"- {text}; to change it: {change}" in pages.losses_text(run).splitlines()
    run["peers"] = run["peers"][:1]
    assert list(losses.losses(run)) == [] and pages.losses_text(run) == ""


def test_the_report_says_where_exact_combine_and_few_sms_lose() -> None:
    def case(operation: str, p50_us: float, tokens: int = 9) -> dict:
        return {"shape": MAIN.text, "routing": "uniform", "tokens": tokens, "format": "bf16"} | {
            "operation": operation,
            "p50_us": p50_us,
        }

    def row(peer: str, operation: str, p50_us: float, tokens: int = 9) -> dict:
        return {"peer": peer, "operation": operation, "tokens": tokens, "format": "bf16", "p50_us": p50_us}

    run = {
        "cases": [case("pair", 8.0), case("dispatch", 3.0), case("combine_exact", 9.5)],
        "peers": [
            row("nccl_ag_rs", "pair", 12.0),
            row("deepep_normal", "combine", 6.0),
            row("nccl_ag_rs", "combine", 1.0),
        ],
        "sweep": [case("combine_partial", time) | {"sms": sms} for sms, time in ((16, 9.0), (32, 7.0), (132, 5.0))],
        "orders": [case("dispatch", 1.0) | {"order": "rank_major"}, case("pair", 7.0) | {"order": "expert_major"}],
        "swiglu": [],
        "compiled": [],
    }
    budget = losses.Loss("combine partial, 24 SMs (ours 32)", "deepep normal bf16", ((9, 6.0, 7.0),))
    assert list(losses.losses(run)) == [losses.Loss("exact pair", "nccl ag rs bf16", ((9, 12.0, 12.5),)), budget]
    more = [case("dispatch", 5.0, 1), case("combine_exact", 6.0, 1)]
    run["cases"], run["peers"] = run["cases"] + more, [*run["peers"], row("nccl_ag_rs", "pair", 10.0, 1)]
    (loss, _) = losses.losses(run)
    assert loss.points == ((1, 10.0, 11.0), (9, 12.0, 12.5))
    change = losses.CHANGES["exact pair"]
    assert pages.loss_lines([loss]) == [
        f"exact pair: nccl ag rs bf16 at 1, 9 (12.0, ours 12.5); to change it: {change}"
    ]
    assert f"- {pages.loss_lines([loss])[0]}" in pages.losses_text(run).splitlines()
    run["cases"].append(case("pair_exact", 11.0))  # measured as a pair it wins
    assert next(losses.losses(run)).points == ((1, 10.0, 11.0),)
    run["orders"].append(case("pair", 12.5) | {"order": "rank_major"})
    assert next(losses.losses(run)) == losses.Loss("rank-major pair", "nccl ag rs bf16", ((9, 12.0, 12.5),))


def test_farthest_from_the_floor() -> None:
    run = example_run()
    far = max(
        (one for one in run["cases"] if one["operation"] in model.LAUNCHES and one["tokens"] >= losses.BYTES_TOKENS),
        key=lambda one: values.ratio(one),
    )
    name = far["operation"].replace("_", " ")
    assert losses.farthest_text(run, "uniform") == f"{name} {far['format']} {far['tokens']}: {values.ratio(far):.2f}"
    assert losses.farthest_text(run, "zipf") == ""


def test_exact_pairs_say_what_they_are() -> None:
    run = example_run()
    pairs = [case for case in run["cases"] if case["operation"] == "pair_exact"]
    assert values.exact_pairs(run) == {(one["tokens"], one["format"]): one["p50_us"] for one in pairs}
    assert tables.exact_text(run).endswith("measured as a pair")
    run["cases"] = [case for case in run["cases"] if case["operation"] != "pair_exact"]
    (dispatch,) = (
        one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 16) and "bf" in one["format"]
    )
    key = (16, "bf16")
    assert values.exact_pairs(run)[key] == pytest.approx(dispatch["p50_us"] + values.medians(run, "combine_exact")[key])
    for one in run["cases"]:
        if one["operation"] == "pair":
            one["p50_us"] *= 1.1 if one["tokens"] == 16 else 1.0
    text = tables.exact_text(run)
    assert "**summed from dispatch and combine, not measured as a pair**" in text and "+0% to +10%" in text
    root = report.ROOT
    for name, kept in runs.read_kept().items():
        page = (root / "docs/performance.md").read_text()
        assert tables.exact_text(kept) in page.partition(f"## {name}:")[2].partition("## ")[0], name


def test_pairs_under_other_conditions_have_a_table() -> None:
    run = example_run()
    text = tables.page(run)
    times = [values.medians(run, name)[4096, "fp8"] for name in tables.CONDITIONS]
    (row,) = (line for line in text.splitlines() if line.endswith(" | ".join(f"{time:.1f}" for time in times) + " |"))
    assert row.startswith("| 4096 |") and tables.CONDITIONS_TEXT in text
    run["orders"].append(case("pair", "bf16", 4096, 12.5, [[1, 1]], order="rank_major"))
    text, points = pages.conditions_text(run), (1, 16, 128, 4096)
    assert text.startswith("BF16 partial pairs under other conditions:\n\n| tokens per rank | 1 | 16 | 128 | 4096 |\n")
    for name in tables.CONDITIONS:
        assert " | ".join(f"{values.medians(run, name)[tokens, 'bf16']:.1f}" for tokens in points) in text
    assert "| rows by source rank, as others have them |  |  |  | 12.5 |\n" in text
    assert set(tables.CONDITIONS) == {"pair", *CONDITIONS}
    run["cases"] = [one for one in run["cases"] if one["operation"] not in CONDITIONS]
    assert pages.conditions_text(run | {"orders": []}) == "" and tables.CONDITIONS_TEXT not in tables.page(run)


def test_mirrored_times_are_corrected_by_what_is_known() -> None:
    """Here GPUs of their own took 1.25 times what the mirror of the same kernels took for 16 tokens, 1 for others."""

    def mirrored(commit: str, factor: float) -> dict:
        run = example_run()
        run["machine"] |= {"commit": commit}
        pairs = [case for case in run["cases"] if (case["operation"], case["format"]) == ("pair", "bf16")]
        run["mirror"] = [
            {"operation": "pair", "format": "bf16", "tokens": one["tokens"], "ranks": 2}
            | {"p50_us": factor * one["p50_us"] / (1.25 if one["tokens"] == 16 else 1)}
            for one in pairs
        ]
        return run

    known, later = mirrored("abc", 1.0), mirrored("feed", 0.5)
    real = values.medians(known, "pair")[16, "bf16"]
    bias = values.mirror_bias(later, [known, later])
    assert {one["commit"] for one in bias} == {"feed"}, "its own commit first: this run has GPUs of their own as well"
    later["machine"] |= {"gpus": {"cuda:0": "NVIDIA H200"}}
    later["mirror_bias"] = bias = values.mirror_bias(later, [known, later])
    assert {one["commit"] for one in bias} == {"abc"} and [one["ratio"] for one in bias] == pytest.approx(
        [1, 1.25, 1, 1]
    )
    text = tables.page(later)
    assert "kernels of abc (2026-11-21) 2 GPUs took 1.000 to 1.250 times as long, 1.062 on average over 4 cases" in text
    assert f"| 16 | {real / 2.5:.1f} ({real / 2:.1f}) |" in text
    later["mirror_bias"] = []
    assert "unknown amount" in tables.page(later) and f"| 16 | {real / 2.5:.1f} |" in tables.page(later)
    assert values.mirror_bias(later, [later]) == [] == values.mirror_bias(example_run(), [known])
    other = known | {"machine": known["machine"] | {"gpus": dict.fromkeys(("cuda:0", "cuda:1"), "NVIDIA B200")}}
    assert values.mirror_bias(later, [later, other]) == [], "of another kind of GPU"


def test_tables_say_which_kernels_at_which_clocks_were_measured() -> None:
    run = example_run()
    assert tables.provenance_text(run) == "" and tables.versions_text(run) == "Other libraries: versions not recorded."
    run["machine"] |= {
        "commit": "0123456789abcdef-dirty",
        "library": {"sources": "5ace", "cubins": "c0b1", "dsl": ["4.8.1"]},
    }
    state = dict(zip(machine.GPU_STATE, ("1755 MHz", "3201 MHz", "402.10 W", "700.00 W", "50"), strict=True))
    run["gpu_state"] = {"ceilings": [state, state | {"clocks.sm": "1980 MHz"}], "peers": []}
    run["peer_versions"] = {"nccl": "2.28.9", "some-deepep": "1.2"}
    text = tables.page(run)
    assert "Kernels of sources 5ace, cubins c0b1, DSL 4.8.1. At the ends of sections SM clocks were 1755 MHz" in text
    assert "at most 402 of 700 W" in text and "commit 0123456789ab-dirty" in text
    assert "Other libraries: nccl 2.28.9, some-deepep 1.2." in text


def test_host_times_have_a_table_where_they_were_measured() -> None:
    run = example_run()
    run["cases"] = [*run["cases"], case(CHAINED, "bf16", 1, 9.0, [[1, 1]], host_us=33.25)]
    run["peers"] = [*run["peers"], run["peers"][0] | {"operation": CHAINED, "host_us": 25.5}]
    assert "host time" not in tables.page(example_run())
    host = tables.page(run).partition("libraries: host time")[2]
    assert "| cute_ep bf16 | 33.2 |" in host and "| nccl ag rs bf16 | 25.5 |" in host
    assert pages.host_text(example_run(), "runs/README.md") == ""
    run["cases"].append(case(CHAINED, "fp8", 2, 9.0, [[1, 1]], host_us=50.75))
    text = pages.host_text(run, "runs/README.md")
    assert ": 33 to 51 us (" in text and "](runs/README.md)" in text and text.endswith("; nccl ag rs 26 to 26.")


@pytest.mark.parametrize(
    ("own", "other", "lost"),
    [
        ((9.0, 33.0), (31.0, 25.0), (31.0, 33.0)),
        ((9.0, 30.0), (31.0, 25.0), None),
        ((9.0, 33.0), (8.0, 40.0), None),
    ],
    ids=["slower on the host than on the device there", "faster than its device time", "faster than its host time"],
)
def test_without_a_graph_the_longer_of_two_times_counts(
    own: tuple[float, float], other: tuple[float, float], lost: tuple[float, float] | None
) -> None:
    run = example_run()
    run["cases"] = [case(CHAINED, "bf16", 1, own[0], [[1, 1]], host_us=own[1])]
    run["peers"] = [run["peers"][0] | {"operation": CHAINED, "p50_us": other[0], "host_us": other[1]}]
    found = [loss for loss in losses.losses(run) if "no graph" in loss.case]
    assert [(loss.other, *loss.points) for loss in found] == ([("nccl ag rs bf16", (1, *lost))] if lost else [])
