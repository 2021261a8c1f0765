"""What becomes of measured runs: the model, tables, the documents on speed, plots."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from cute_ep.bench import machine
from cute_ep.bench.measure import CHAINED, CONDITIONS
from perf import losses, model, plots, report, tables
from perf.cases import MAIN
from tests.perf_example import CEILINGS, case, example_run, synthetic

# The model


def test_fit_recovers_constants() -> None:
    run = example_run() | {"cases": synthetic(overhead=7.5, link=0.62, memory=0.44)}
    fits = model.fit_model([run, run])
    assert set(fits) == {("dispatch", "bf16"), ("dispatch", "fp8"), ("combine_exact", None), ("combine_partial", None)}
    for fit in fits.values():
        assert (fit.overhead_us, fit.link, fit.memory) == pytest.approx((7.5, 0.62, 0.44), rel=0.02)


def test_fit_has_no_negative_overhead() -> None:
    fit = model.fit_constants([(10.0, 0.0, 10.0, 12.0), (20.0, 0.0, 25.0, 27.0)])
    assert fit.overhead_us == 0 and 0.8 <= fit.link <= 1
    assert model.fit_constants([(0.0, 0.0, 5.0, 7.0)]).overhead_us == pytest.approx(5.0)


def test_a_pair_is_its_launches() -> None:
    cases = synthetic()
    fits = model.fit_model([example_run() | {"cases": cases}])
    for one in cases:
        assert model.predict(one, fits, CEILINGS) == pytest.approx(one["p50_us"], rel=0.01)
    assert model.predict(cases[0] | {"format": "mxfp4"}, fits, CEILINGS) is None
    text = model.errors_table(cases, fits, CEILINGS)
    assert text.count("+0%") + text.count("-0%") == len(cases)
    graphs = sum(one["operation"] not in ("pair_chained", *CONDITIONS) for one in cases)
    text = model.summary_table(example_run() | {"cases": cases}, fits)
    launches = sum(one["operation"] in model.LAUNCHES for one in cases)
    assert f"| fitted | {launches} | {launches} | 0% | 0% |" in text
    assert f"| not fitted | {graphs - launches} | {graphs - launches} | 0% | 0% |" in text


def test_ranks_that_share_a_gpu_are_another_machine() -> None:
    alone, shared = example_run(), example_run()
    shared["machine"] = shared["machine"] | {"devices": ["cuda:0", "cuda:0"]}
    shared["cases"] = synthetic(overhead=50.0)
    assert model.page(alone, [alone, shared]) == model.page(alone, [alone])
    assert "NVL72" not in model.page(shared, [alone, shared]) and "| 50." in model.page(shared, [alone, shared])


def test_other_machines_scale_with_their_nominal_rates() -> None:
    there = model.ceilings_elsewhere(CEILINGS, "NVIDIA H200", "B200")
    assert there is not None and there.push == 2 * CEILINGS.push and there.flag == CEILINGS.flag
    assert there.memory == pytest.approx(CEILINGS.memory * 8 / 4.8)
    assert model.ceilings_elsewhere(CEILINGS, "GeForce", "B200") is None
    eight = model.expected_case("dispatch", "bf16", 8, 64)
    assert eight["parts"][0][0] / (64 * 14336) == pytest.approx(4.63, rel=0.1)  # remote ranks of a token, top-8 of 256
    text = model.page(example_run(), [example_run()])
    assert "NVL72" in text and "8 x H200" in text


# Tables, report and plots


def test_tables_show_the_numbers() -> None:
    run = example_run()
    text = tables.page(run)
    dispatch = next(one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 4096))
    assert f"| 4096 | bf16 | {dispatch['p50_us']:.1f} ({dispatch['p99_us']:.1f}) |" in text
    assert "SM stores to a peer 400 GB/s (ring), 350 GB/s" in text and "one flag 1.20 us" in text
    assert "2 x NVIDIA H200, NV18 between GPUs" in text
    assert "| 64 | 2048 | bf16 | 4.0 / 4.0 (50% / 50%) | 6.0 / 6.0 (50% / 50%) |  |" in text
    assert "| operation | format | tokens per rank | 8 SMs | 132 SMs |" in text
    assert (
        "| tokens per rank | cute_ep bf16 partial | cute_ep bf16 exact (default) | cute_ep fp8 partial | nccl ag"
        in text
        and "| 50.5 |" in text
    )
    assert "- deepep_normal: not present: no module deep_ep" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))
    assert tables.markdown(("a", "b"), []) == ""


def test_tables_of_a_run_that_found_nothing() -> None:
    run = example_run() | {"ceilings": {}, "cases": [], "notes": ["ceilings: EPError: no kernel"]}
    assert "ceilings: EPError" in tables.page(run)


def test_report_writes_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, readme = tmp_path / "run", tmp_path / "README.md"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(example_run()))
    markers = ["<!-- headline:begin -->", "<!-- headline:end -->", "<!-- perf:begin -->", "<!-- perf:end -->"]
    readme.write_text("before\n{}\nold words\n{}\n{}\nold numbers\n{}\nafter\n".format(*markers))
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    words = ["--readme", str(readme), "--more", str(page)]
    monkeypatch.setattr(sys, "argv", ["report", str(folder), *words])
    assert report.main() == 0
    once = readme.read_text()
    assert once.startswith(f"before\n{markers[0]}\nOn 2 x NVIDIA H200") and once.endswith(f"{markers[3]}\nafter\n")
    assert not {"old words", "old numbers"} & set(once.splitlines()) and all(
        once.count(marker) == 1 for marker in markers
    )
    assert (folder / "tables.md").read_text() == tables.page(model.read_run(folder))
    assert "](run/tables.md)" in once and "](docs/performance.md)" in once
    assert page.read_text().count("## 2 x NVIDIA H200") == page.read_text().count("runs of this commit") == 1
    assert report.main() == 0 and readme.read_text() == once
    another = tmp_path / "another"
    another.mkdir()
    faster = example_run()
    faster["machine"]["commit"] = "feed123"
    faster["mirror"] = [
        {"operation": operation, "format": fmt, "tokens": tokens, "p50_us": 1000 * tokens, "ranks": 4}
        for fmt, operation, tokens in (("bf16", "pair", 9), ("bf16", "dispatch", 7), ("fp8", "dispatch", 7))
    ]
    (another / "run.json").write_text(json.dumps(faster))
    monkeypatch.setattr(sys, "argv", ["report", str(folder), str(another), *words])
    assert report.main() == 0 and readme.read_text() == once, "as many GPUs: nothing to add"
    faster["machine"]["gpus"] = {"cuda:0": "NVIDIA H200"}
    (another / "run.json").write_text(json.dumps(faster))
    assert report.main() == 0
    added = set(readme.read_text().splitlines()) - set(once.splitlines())
    assert len(added) == 1 and added.pop().startswith(
        "- On 1 GPUs: pairs with partial combine: nccl ag rs bf16 at 4096"
    )
    faster["machine"]["gpus"] = example_run()["machine"]["gpus"]
    (another / "run.json").write_text(json.dumps(faster))
    assert report.main() == 0
    both = page.read_text()
    assert both.count("## 2 x NVIDIA H200") == 2 and both.count("feed123") == 1
    assert both.count("Where it loses") == 2 and both.count("runs of this commit") == 2
    assert "](../another/tables.md)" in both
    assert (
        "traffic of 4 ranks" in both
        and "| tokens per rank | dispatch bf16 | dispatch fp8 | pair, partial bf16 |" in both
    )
    assert "| 7 | 7000.0 | 7000.0 |  |\n| 9 |  |  | 9000.0 |" in both
    readme.write_text("no markers\n")
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code == 2 and readme.read_text() == "no markers\n"


def test_documents_are_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README, the page, and the tables beside every run, byte for byte."""
    root = Path(__file__).parents[1]
    text = report.MORE.read_text()
    (line,) = re.findall(r"`python -m perf.model ([^`]+)`", text)
    folders = []
    for name in line.split():
        folders.append(tmp_path / name)
        shutil.copytree(root / name, folders[-1])
    (tmp_path / "docs").mkdir()
    readme, page = shutil.copy(report.README, tmp_path), tmp_path / "docs" / report.MORE.name
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "LOG", tmp_path / "perf" / "LOG.md")
    monkeypatch.setattr(sys, "argv", ["report", *map(str, folders), "--readme", str(readme), "--more", str(page)])
    assert report.main() == 0
    again = "; python -m perf.report " + line
    assert page.read_text() == text and Path(readme).read_text() == (root / "README.md").read_text(), again
    runs = [path.parent for path in (root / "perf" / "results").glob("*/run.json")]
    assert len(runs) > 9
    for folder in runs:
        assert (folder / "tables.md").read_text() == tables.page(model.read_run(folder)), folder.name


def test_report_says_where_it_loses() -> None:
    run = example_run()
    (line, *_) = losses.peers_lines(run)
    assert line.startswith("Pairs with partial combine: nccl ag rs bf16 at 4096 tokens: 1.5 us, here ")
    run["peers"] = run["peers"][:1]
    assert list(losses.peers_lines(run)) == []


def test_report_says_where_exact_combine_and_few_sms_lose() -> None:
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
    }
    budget = "Few SMs, combine: deepep normal bf16 on 24 SMs at 9 tokens: 6.0 us, here 7.0 us, on 32 SMs."
    exact = "Pairs with exact (the default) combine: nccl ag rs bf16 at 9 tokens: 12.0 us, here 12.5 us"
    assert list(losses.peers_lines(run)) == [f"{exact}.", budget]
    more = [case("dispatch", 5.0, 1), case("combine_exact", 6.0, 1)]
    run["cases"], run["peers"] = more + run["cases"], [row("nccl_ag_rs", "pair", 10.0, 1), *run["peers"]]
    assert next(losses.peers_lines(run)) == f"{exact} (also at 1)."
    run["cases"].append(case("pair_exact", 11.0))  # measured as a pair it wins
    assert "at 9 tokens" not in next(losses.peers_lines(run))


def test_losses_of_other_runs_say_what_is_left_out() -> None:
    run, other = example_run(), example_run()
    other["machine"]["gpus"]["cuda:2"] = "NVIDIA H200"
    other["peers"] = [other["peers"][0] | {"p50_us": 1.5}]
    exact = "(listed are partial pairs in graphs only; exact loses more often: [docs/performance.md](more.md))."
    text = report.section(run, Path("run"), Path("page.md"), Path("more.md"), [other])
    (line,) = (line for line in text.splitlines() if line.startswith("- On 3 GPUs: pairs with partial combine"))
    assert line.endswith("in graphs only: [docs/performance.md](more.md)).")
    for one in other["cases"]:
        if one["operation"] == "pair_exact":
            one["p50_us"] = 1e6
    other["peers"].append(other["peers"][0] | {"peer": "deepep_normal", "p50_us": 1e5})
    text = report.section(run, Path("run"), Path("page.md"), Path("more.md"), [other])
    assert any(line.endswith(exact) for line in text.splitlines() if line.startswith("- On 3 GPUs")), text


def test_exact_pairs_say_what_they_are() -> None:
    run = example_run()
    pairs = [case for case in run["cases"] if case["operation"] == "pair_exact"]
    assert tables.exact_pairs(run) == {(one["tokens"], one["format"]): one["p50_us"] for one in pairs}
    assert tables.exact_text(run).endswith("measured as a pair")
    run["cases"] = [case for case in run["cases"] if case["operation"] != "pair_exact"]
    (dispatch,) = (
        one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 16) and "bf" in one["format"]
    )
    key = (16, "bf16")
    assert tables.exact_pairs(run)[key] == pytest.approx(dispatch["p50_us"] + tables.medians(run, "combine_exact")[key])
    for one in run["cases"]:
        if one["operation"] == "pair":
            one["p50_us"] *= 1.1 if one["tokens"] == 16 else 1.0
    assert "not measured as a pair" in tables.exact_text(run) and "+0% to +10%" in tables.exact_text(run)


def test_pairs_under_other_conditions_have_a_table() -> None:
    run = example_run()
    text = tables.page(run)
    times = [tables.medians(run, name)[4096, "fp8"] for name in tables.CONDITIONS]
    (row,) = (line for line in text.splitlines() if line.endswith(" | ".join(f"{time:.1f}" for time in times) + " |"))
    assert row.startswith("| 4096 |") and tables.CONDITIONS_TEXT in text
    assert tables.CONDITIONS_TEXT in report.conditions_text(run)
    assert set(tables.CONDITIONS) == {"pair", *CONDITIONS}
    run["cases"] = [case for case in run["cases"] if case["operation"] not in CONDITIONS]
    assert report.conditions_text(run) == "" and tables.CONDITIONS_TEXT not in tables.page(run)


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
    real = tables.medians(known, "pair")[16, "bf16"]
    text = report.mirror_text(later, [known, later])
    assert "kernels of feed" in text  # its own commit first: this run has GPUs of their own as well
    later["machine"] |= {"gpus": {"cuda:0": "NVIDIA H200"}}
    text = report.mirror_text(later, [known, later])
    assert "kernels of abc, 2 GPUs took 1.000 to 1.250 times as long" in text
    assert f"| 16 | {real / 2.5:.1f} ({real / 2:.1f}) |" in text
    alone = report.mirror_text(later, [later])
    assert "unknown amount" in alone and f"| 16 | {real / 2.5:.1f} |" in alone
    assert report.mirror_text(example_run(), [known]) == ""


def test_headline() -> None:
    def case(operation: str, tokens: int, p50_us: float) -> dict:
        about = {"shape": MAIN.text, "routing": "uniform", "format": "bf16"}
        return about | {"operation": operation, "tokens": tokens, "p50_us": p50_us}

    run = example_run()
    times = {"pair": (10.0, 40.0, 900.0), "pair_exact": (12.5, 60.0, 1600.0)}
    run["cases"] = [
        case(name, tokens, time)
        for name, every in times.items()
        for tokens, time in zip((1, 128, 4096), every, strict=True)
    ]
    run["peers"] = [
        {"peer": peer, "format": fmt, "operation": "pair", "tokens": tokens, "p50_us": time}
        for peer, fmt, every in (
            ("nccl_ag_rs", "bf16", (15.0, 80.0, 1200.0)),
            ("nccl_all_to_all", "bf16", (30.0, 90.0, 5000.0)),
            ("deepep_normal", "bf16", (60.0, 100.0, 1800.0)),
            ("deepep_low_latency", "fp8", (1.0, 1.0, 1.0)),
        )
        for tokens, time in zip((1, 128, 4096), every, strict=True)
    ]
    text = report.headline(run)
    assert "take 10.0 / 40.0 / 900 us" in text and "1.5 / 2.0 / 1.3 times as fast" in text
    assert "6.0 / 2.5 / 2.0 times as fast as DeepEP" in text and "takes 12.5 / 60.0 / 1600 us" in text
    assert "with 4096 tokens it loses to NCCL." in text and "timed separately" not in text
    assert report.headline(run | {"peers": []}) == ""


def test_provenance() -> None:
    run = example_run()
    assert tables.provenance_text(run) == "" and "Versions: not in this" in tables.peers_text(run)
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
    assert "Versions: nccl 2.28.9, some-deepep 1.2." in text


def test_runs_are_read_with_floors_of_one_rule(tmp_path: Path) -> None:
    """Whatever they were when the run was made; the copy engine counts."""
    run = example_run()
    run["ceilings"] = run["ceilings"] | {"copy_engine": 8e11}
    (tmp_path / "run.json").write_text(json.dumps(run))
    for old, new in zip(run["cases"], model.read_run(tmp_path)["cases"], strict=True):
        assert new["link_floor_us"] == pytest.approx(old["link_floor_us"] / 2) and new["p50_us"] == old["p50_us"]


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = example_run()
    assert {path.stem for path in plots.draw(run, tmp_path)} == set(plots.PLOTS)
    before = (tmp_path / "latency.svg").read_bytes()
    assert b"<svg" in before
    plots.draw(run, tmp_path)
    assert (tmp_path / "latency.svg").read_bytes() == before, "the same run draws the same file"
    few = plots.draw(run | {"peers": [], "sweep": [], "swiglu": []}, tmp_path)
    assert {path.stem for path in few} == {"latency", "ratio"}


def test_no_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.draw(example_run(), tmp_path) == [] and not list(tmp_path.iterdir())


def test_host_times_have_a_table_where_they_were_measured() -> None:
    run = example_run()
    run["cases"] = [*run["cases"], case(CHAINED, "bf16", 1, 9.0, [[1, 1]], host_us=33.25)]
    run["peers"] = [*run["peers"], run["peers"][0] | {"operation": CHAINED, "host_us": 25.5}]
    assert "host time" not in tables.page(example_run())
    assert "| 1 | 33.2 | 25.5 |" in tables.page(run).partition("libraries: host time")[2]
    folder = Path("runs/one")
    assert report.host_text(example_run(), folder, Path("page.md")) == ""
    run["cases"].append(case(CHAINED, "fp8", 2, 9.0, [[1, 1]], host_us=50.75))
    text = report.host_text(run, folder, Path("page.md"))
    assert "took 33 to 51 us" in text and "[README](runs/one/README.md)" in text and "| 1 | 33.2 |" in text


@pytest.mark.parametrize(
    ("own", "other", "lost"),
    [
        ((9.0, 33.0), (31.0, 25.0), "31.0 us, here 33.0 us"),
        ((9.0, 30.0), (31.0, 25.0), None),
        ((9.0, 33.0), (8.0, 40.0), None),
    ],
)
def test_without_a_graph_the_longer_of_two_times_counts(
    own: tuple[float, float], other: tuple[float, float], lost: str | None
) -> None:
    run = example_run()
    run["cases"] = [case(CHAINED, "bf16", 1, own[0], [[1, 1]], host_us=own[1])]
    run["peers"] = [run["peers"][0] | {"operation": CHAINED, "p50_us": other[0], "host_us": other[1]}]
    found = [line for line in losses.peers_lines(run) if "without a graph" in line]
    assert len(found) == (lost is not None) and all(f"nccl ag rs bf16 at 1 token: {lost}." in line for line in found)
