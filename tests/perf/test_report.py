"""What becomes of measured runs: the model, tables, the documents on speed, plots."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cute_ep.bench import machine
from cute_ep.bench.measure import CHAINED, CONDITIONS
from perf import losses, model, pages, plots, report, runs, tables, values
from perf.cases import MAIN
from tests.perf.example import CEILINGS, case, example_run, synthetic

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


MARKERS = {"README.md": ("headline", "perf"), "perf/results/README.md": ("runs",)}
"""File -> the sections of it that the report writes."""


def project(root: Path) -> Path:
    """A project without runs, but with all places that the report writes to."""
    for file, names in MARKERS.items():
        sections = "".join(f"<!-- {name}:begin -->\nold {name}\n<!-- {name}:end -->\n" for name in names)
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"before\n{sections}after\n")
    (root / "docs").mkdir()
    return root


def write_run(folder: Path, run: dict) -> Path:
    """A run in full, as the suite leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / runs.RUN).write_text(json.dumps(run))
    return folder


def reported(monkeypatch: pytest.MonkeyPatch, root: Path, *folders: Path) -> int:
    """The report's exit code; without matplotlib plots are empty files."""
    monkeypatch.setattr(sys, "argv", ["report", *map(str, folders), "--root", str(root)])
    return report.main()


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are empty files, drawn without matplotlib."""

    def draw(run: dict, folder: Path, fits: dict, names: Sequence[str], prefix: str) -> list[Path]:
        paths = [folder / f"{prefix}{name}.svg" for name in names]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr(plots, "have_matplotlib", lambda: True)
    monkeypatch.setattr(plots, "draw", draw)


def with_gpus(run: dict, count: int, **machine_facts: str) -> dict:
    """The run with as many GPUs and ranks."""
    devices = [f"cuda:{number}" for number in range(count)]
    facts = {"gpus": dict.fromkeys(devices, "NVIDIA H200"), "devices": devices}
    return run | {"machine": run["machine"] | facts | machine_facts}


@pytest.mark.usefixtures("no_plots")
def test_report_keeps_runs_and_writes_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project(tmp_path)
    folder = write_run(tmp_path / "build/run", example_run())
    results, readme, page = (root / name for name in ("perf/results", "README.md", "docs/performance.md"))
    assert reported(monkeypatch, root, folder) == 0
    assert {path.name for path in results.iterdir()} == {
        "README.md",
        "h200x2.json",
        "h200x2-peers.svg",
        "h200x2-latency.svg",
    }
    once, more, catalogue = readme.read_text(), page.read_text(), (results / "README.md").read_text()
    assert once.startswith("before\n<!-- headline:begin -->\nOn 2 x NVIDIA H200") and once.endswith("\nafter\n")
    assert "old" not in once + catalogue and once.count("<!-- perf:end -->") == 1
    assert "](docs/performance.md)" in once and "](perf/results/h200x2-peers.svg)" in once
    assert more.count("## h200x2: 2 x NVIDIA H200") == 1 and "](../perf/results/h200x2.json)" in more
    assert "[h200x2.json](h200x2.json) | 2 x NVIDIA H200" in catalogue and "`python -m perf.suite`" in catalogue
    kept = (results / "h200x2.json").read_text()
    assert reported(monkeypatch, root) == 0 and readme.read_text() == once and page.read_text() == more
    assert reported(monkeypatch, root, results / "h200x2.json") == 0
    assert (results / "h200x2.json").read_text() == kept, "a kept run is kept as it is"

    slower = with_gpus(example_run(), 1)
    one = write_run(tmp_path / "build/one", slower)
    assert reported(monkeypatch, root, one) == 0
    added = sorted(set(readme.read_text().splitlines()) - set(once.splitlines()))
    assert len(added) == 2 and added[0].startswith("- h200x1, partial pair: nccl ag rs bf16 at 4096 (1.5, ours ")
    assert "of other runs only partial pairs, they lose more" in added[1]
    slower["cases"] = [one for one in slower["cases"] if one["operation"] not in ("pair_exact", "combine_exact")]
    assert reported(monkeypatch, root, write_run(one, slower)) == 0
    assert "lose more" not in readme.read_text()
    both = page.read_text()
    assert both.index("## h200x2") < both.index("## h200x1") and both.count("Others were faster:") == 2
    assert reported(monkeypatch, root, write_run(tmp_path / "build/four", with_gpus(example_run(), 4))) == 0
    assert readme.read_text().count("4 x NVIDIA H200") == 2 and not (results / "h200x2-latency.svg").exists()

    readme.write_text("no markers\n")
    with pytest.raises(SystemExit) as stop:
        reported(monkeypatch, root)
    assert stop.value.code == 2 and readme.read_text() == "no markers\n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quick": True}, "a quick run is not kept"),
        ({"cases": []}, "a run without ceilings or cases is not kept"),
        ({"machine": {"devices": ["cuda:0", "cuda:0"]}}, "a run of ranks that share GPUs is not kept"),
        ({"machine": {"commit": None}}, "a run of an unknown commit"),
    ],
)
@pytest.mark.usefixtures("no_plots")
def test_what_is_not_kept(
    change: dict, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    root, run = project(tmp_path), example_run()
    change = change | ({"machine": run["machine"] | change["machine"]} if "machine" in change else {})
    good = write_run(tmp_path / "good", example_run())
    with pytest.raises(SystemExit) as stop:
        reported(monkeypatch, root, good, write_run(tmp_path / "bad", run | change))
    assert stop.value.code == 2 and why in capsys.readouterr().err
    assert not list((root / "perf/results").glob("*.json"))


def test_runs_are_not_kept_without_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(plots, "have_matplotlib", lambda: False)
    with pytest.raises(SystemExit):
        reported(monkeypatch, project(tmp_path), write_run(tmp_path / "run", example_run()))
    assert "need matplotlib" in capsys.readouterr().err and not list((tmp_path / "perf/results").glob("*.json"))


def test_a_kept_run_says_what_the_run_in_full_says(tmp_path: Path) -> None:
    """Byte for byte where times have 1 ns and shares 4 digits; what is dropped and what is computed again included."""
    full = example_run()
    full |= {"seconds": {"cases": 1.25, "all": 2.5}, "gpu_state": {"cases": [{"clocks.sm": "1980 MHz"}]}}
    full["ceilings"] = {name: float(f"{value:.6g}") for name, value in full["ceilings"].items()}
    for one in full["cases"]:
        one |= {"p50_us": round(one["p50_us"], 3), "p99_us": round(one["p99_us"], 3)}
    full["cases"].append(full["cases"][3] | {"routing": "zipf"})  # a pair whose launches are not measured alone
    assert full["cases"][-1]["operation"] == "pair"
    full["peers"][0]["host_us"] = 25.5
    path = runs.keep_run(runs.read_run(write_run(tmp_path / "run", full)), tmp_path)
    read, kept = runs.read_run(tmp_path / "run"), runs.read_run(path)
    assert path.name == "h200x2.json" and tables.page(kept) == tables.page(read)
    assert model.page(kept, [kept]) == model.page(read, [read])
    for one, other in zip(read["cases"], kept["cases"], strict=True):
        assert {name: one[name] for name in other} == other | {"floor_us": one["floor_us"]}
        assert set(one) - set(other) <= runs.DROPPED and one["parts"] == other["parts"]
    assert (kept["peers"], kept["seconds"], kept["gpu_state"]) == (full["peers"], {"all": 2.5}, full["gpu_state"])
    content = json.loads(path.read_text())
    assert content["swiglu"]["same"]["width"] == 2048 and "sample" not in content["swiglu"]["columns"]
    parts = content["cases"]["columns"].index("parts")
    assert sum(row[parts] is None for row in content["cases"]["rows"]) > len(full["cases"]) / 2
    assert "p95_us" not in path.read_text() and max(map(len, path.read_text().splitlines())) < 1000


def test_rows_are_what_they_were_packed_from() -> None:
    rows = [{"a": 1, "b": 2.00049, "x_us": 1234.56789, "share": 0.123456}, {"a": 1, "x_us": 1.0, "share": 2.0}]
    assert runs.unpack(runs.pack(rows)) == [
        {"a": 1, "b": 2.00049, "x_us": 1234.568, "share": 0.1235},
        {"a": 1, "x_us": 1.0, "share": 2.0},
    ]
    assert runs.unpack(runs.pack([{"a": 1}, {"a": 1}])) == [{"a": 1}, {"a": 1}]
    assert runs.unpack(runs.pack([])) == []


def test_swiglu_is_carried_over(tmp_path: Path) -> None:
    """From the run that is replaced, with where it is from, also the second time; peers are not."""
    first = with_gpus(example_run(), 2, commit="first")
    later = example_run() | {"swiglu": [], "peers": []}
    path = runs.keep_run(first, tmp_path)
    assert "taken_from" not in runs.read_run(path)
    for commit in ("second", "third"):
        runs.keep_run(with_gpus(later, 2, commit=commit), tmp_path)
        kept = runs.read_run(path)
        assert kept["machine"]["commit"] == commit and kept["swiglu"] == first["swiglu"] and not kept["peers"]
        assert kept["taken_from"]["swiglu"]["commit"] == "first"
        assert "SwiGLU is of 2026-11-21, commit first." in tables.page(kept)
    kept["compiled"] = [kept["swiglu"][0] | {"p50_us": 1.0}]
    assert [loss.other for loss in losses.losses(kept)] == ["torch.compile bf16 of another run"]
    runs.keep_run(first, tmp_path)
    assert not runs.read_run(path).get("taken_from")


def test_documents_are_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README, the page, and the list of runs, byte for byte; every plot that they show is there, and no other."""
    root = report.ROOT
    files = [*MARKERS, "docs/performance.md"]
    shutil.copytree(root / "perf/results", tmp_path / "perf/results")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(root / name, tmp_path / name)
    assert reported(monkeypatch, tmp_path) == 0
    for name in files:
        assert (tmp_path / name).read_text() == (root / name).read_text(), f"{name}; python -m perf.report"
    text = "".join((root / name).read_text() for name in files)
    results = root / "perf/results"
    for path in results.iterdir():
        assert path.name in text, path.name
    for name, run in runs.read_kept(results).items():
        assert runs.kept_text(run) == (results / f"{name}.json").read_text(), name
        assert name == runs.machine_key(run) and runs.refusal(run) is None
    assert sum(path.stat().st_size for path in results.iterdir()) < 500_000


def test_tables_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path, example_run())
    monkeypatch.setattr(sys, "argv", ["tables", str(folder)])
    tables.main()
    assert capsys.readouterr().out == tables.page(runs.read_run(folder)) + "\n"
    monkeypatch.setattr(sys, "argv", ["model"])
    model.main()
    said = capsys.readouterr().out
    assert all(f"{name}\n\n" in said for name in runs.read_kept())


def test_report_says_where_it_loses() -> None:
    run = example_run()
    (loss, *_) = losses.losses(run)
    ours = values.medians(run, "pair")[4096, "bf16"]
    assert loss == losses.Loss("partial pair", "nccl ag rs bf16", ((4096, 1.5, ours),))
    assert pages.loss_line(loss) == f"partial pair: nccl ag rs bf16 at 4096 (1.5, ours {ours:.1f})"
    assert f"- partial pair: nccl ag rs bf16 at 4096: 1.5; ours {ours:.1f}" in pages.losses_text(run).splitlines()
    run["peers"] = run["peers"][:1]
    assert list(losses.losses(run)) == [] and pages.losses_text(run) == ""


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
        "swiglu": [],
        "compiled": [],
    }
    budget = losses.Loss("combine partial, 24 SMs (ours 32)", "deepep normal bf16", ((9, 6.0, 7.0),))
    assert list(losses.losses(run)) == [losses.Loss("exact pair", "nccl ag rs bf16", ((9, 12.0, 12.5),)), budget]
    more = [case("dispatch", 5.0, 1), case("combine_exact", 6.0, 1)]
    run["cases"], run["peers"] = run["cases"] + more, [*run["peers"], row("nccl_ag_rs", "pair", 10.0, 1)]
    (loss, _) = losses.losses(run)
    assert loss.points == ((1, 10.0, 11.0), (9, 12.0, 12.5))
    assert pages.loss_line(loss) == "exact pair: nccl ag rs bf16 at 1, 9 (12.0, ours 12.5)"
    line = "- exact pair: nccl ag rs bf16 at 1, 9: 10.0, 12.0; ours 11.0, 12.5"
    assert line in pages.losses_text(run).splitlines()
    run["cases"].append(case("pair_exact", 11.0))  # measured as a pair it wins
    assert next(losses.losses(run)).points == ((1, 10.0, 11.0),)


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
    text, points = pages.conditions_text(run), (1, 16, 128, 4096)
    assert text.startswith("BF16 partial pairs of 1, 16, 128, 4096 tokens: as above ")
    for name in tables.CONDITIONS:
        assert pages.commas(values.medians(run, name)[tokens, "bf16"] for tokens in points) in text
    assert set(tables.CONDITIONS) == {"pair", *CONDITIONS}
    run["cases"] = [case for case in run["cases"] if case["operation"] not in CONDITIONS]
    assert pages.conditions_text(run) == "" and tables.CONDITIONS_TEXT not in tables.page(run)


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
    times = [time["p50_us"] for time in later["mirror"]]
    line = pages.mirror_line(later)
    assert pages.commas([times[0], *times[2:]]) in line and ", corrected " in line and "1.062 on average" in line
    later["mirror_bias"] = []
    assert "unknown amount" in tables.page(later) and f"| 16 | {real / 2.5:.1f} |" in tables.page(later)
    assert "unknown amount" in pages.mirror_line(later) and "corrected" not in pages.mirror_line(later)
    assert values.mirror_bias(later, [later]) == [] == values.mirror_bias(example_run(), [known])
    other = known | {"machine": known["machine"] | {"gpus": dict.fromkeys(("cuda:0", "cuda:1"), "NVIDIA B200")}}
    assert values.mirror_bias(later, [later, other]) == [], "of another kind of GPU"
    assert pages.mirror_line(example_run()) == ""


@pytest.mark.usefixtures("no_plots")
def test_what_is_known_of_a_mirror_is_kept(tmp_path: Path) -> None:
    """The bias of an earlier commit stays with later mirrors, when runs of that commit are replaced."""
    real = with_gpus(example_run(), 4, commit="old")
    mirror = [{"operation": "pair", "format": "bf16", "tokens": 16, "ranks": 4, "p50_us": 2.0}]
    half = with_gpus(example_run() | {"mirror": mirror}, 2, commit="old")
    for run in (half, real, with_gpus(half, 2, commit="new"), with_gpus(real, 4, commit="new2")):
        report.keep(run, tmp_path)
    (bias,) = runs.read_run(tmp_path / "h200x2.json")["mirror_bias"]
    assert bias["commit"] == "old"
    assert bias["ratio"] == pytest.approx(values.medians(real, "pair")[16, "bf16"] / 2, rel=1e-3)


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
    text = pages.headline(run)
    assert "take 10.0 / 40.0 / 900 us" in text and "1.5 / 2.0 / 1.3 times as fast" in text
    assert "6.0 / 2.5 / 2.0 times as fast as DeepEP" in text and "takes 12.5 / 60.0 / 1600 us" in text
    assert "with 4096 tokens it loses to NCCL." in text and "timed separately" not in text
    assert pages.headline(run | {"peers": []}) == ""


def test_provenance() -> None:
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


def test_runs_are_read_with_floors_of_one_rule(tmp_path: Path) -> None:
    """Whatever they were when the run was made; the copy engine counts."""
    run = example_run()
    run["ceilings"] = run["ceilings"] | {"copy_engine": 8e11}
    (tmp_path / "run.json").write_text(json.dumps(run))
    for old, new in zip(run["cases"], runs.read_run(tmp_path)["cases"], strict=True):
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
    assert plots.draw(run, tmp_path, None, ("peers",), "h200x2-") == [tmp_path / "h200x2-peers.svg"]


def test_plots_of_kept_runs_are_artefacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a run in full are beside it."""
    drawn = []
    monkeypatch.setattr(plots, "ARTEFACTS", tmp_path / "build")
    monkeypatch.setattr(plots, "draw", lambda run, folder, fits: drawn.append(folder) or [folder / "latency.svg"])
    full = write_run(tmp_path / "full", example_run())
    kept = runs.keep_run(runs.read_run(full), tmp_path)
    monkeypatch.setattr(sys, "argv", ["plots", str(full), str(kept)])
    assert plots.main() == 0 and drawn == [full, tmp_path / "build" / "h200x2"] and drawn[1].is_dir()


def test_slim_plots_are_the_same_picture() -> None:
    path = '<path id="m1" d="M 1.23456 7.5"/>'
    svg = f'<svg><metadata>\n who\n</metadata><!-- axes -->\n  <g id="text_1">\n    {path}</g></svg>'
    assert plots.slim(svg) == '<svg>\n<g>\n<path id="m1" d="M 1.23 7.5"/></g></svg>'


def test_no_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.draw(example_run(), tmp_path) == [] and not list(tmp_path.iterdir())


def test_host_times_have_a_table_where_they_were_measured() -> None:
    run = example_run()
    run["cases"] = [*run["cases"], case(CHAINED, "bf16", 1, 9.0, [[1, 1]], host_us=33.25)]
    run["peers"] = [*run["peers"], run["peers"][0] | {"operation": CHAINED, "host_us": 25.5}]
    assert "host time" not in tables.page(example_run())
    assert "| 1 | 33.2 | 25.5 |" in tables.page(run).partition("libraries: host time")[2]
    assert pages.host_text(example_run(), "runs/README.md") == ""
    run["cases"].append(case(CHAINED, "fp8", 2, 9.0, [[1, 1]], host_us=50.75))
    text = pages.host_text(run, "runs/README.md")
    assert ": 33 to 51 us," in text and "](runs/README.md)" in text and text.endswith("; nccl ag rs 26 to 26.")


@pytest.mark.parametrize(
    ("own", "other", "lost"),
    [
        ((9.0, 33.0), (31.0, 25.0), (31.0, 33.0)),
        ((9.0, 30.0), (31.0, 25.0), None),
        ((9.0, 33.0), (8.0, 40.0), None),
    ],
)
def test_without_a_graph_the_longer_of_two_times_counts(
    own: tuple[float, float], other: tuple[float, float], lost: tuple[float, float] | None
) -> None:
    run = example_run()
    run["cases"] = [case(CHAINED, "bf16", 1, own[0], [[1, 1]], host_us=own[1])]
    run["peers"] = [run["peers"][0] | {"operation": CHAINED, "p50_us": other[0], "host_us": other[1]}]
    found = [loss for loss in losses.losses(run) if "no graph" in loss.case]
    assert [(loss.other, *loss.points) for loss in found] == ([("nccl ag rs bf16", (1, *lost))] if lost else [])
