"""Runs that are kept, and the documents and plots that are made of them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from perf import losses, model, plots, report, runs, tables, values
from tests.perf.example import example_run, with_gpus

MARKERS = {"README.md": ("headline", "perf"), "perf/results/README.md": ("runs",), "docs/adapters.md": ("adapters",)}
"""File -> the sections of it that the report writes."""


def project(root: Path) -> Path:
    """A project without runs, but with all places that the report writes to."""
    for file, names in MARKERS.items():
        sections = "".join(f"<!-- {name}:begin -->\nold {name}\n<!-- {name}:end -->\n" for name in names)
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"before\n{sections}after\n")
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
    assert once.startswith(
        "before\n<!-- headline:begin -->\nA dispatch and a combine on 2 x NVIDIA H200"
    ) and once.endswith("\nafter\n")
    assert "old" not in once + catalogue and once.count("<!-- perf:end -->") == 1
    assert "](docs/performance.md)" in once and "](perf/results/h200x2-peers.svg)" in once
    assert more.count("## h200x2: 2 x NVIDIA H200") == 1 and "](../perf/results/h200x2.json)" in more
    assert "| [h200x2.json](h200x2.json) | `python -m perf.suite` |" in catalogue
    kept = (results / "h200x2.json").read_text()
    assert reported(monkeypatch, root) == 0 and readme.read_text() == once and page.read_text() == more
    assert reported(monkeypatch, root, results / "h200x2.json") == 0
    assert (results / "h200x2.json").read_text() == kept, "a kept run is kept as it is"

    slower = with_gpus(example_run(), 1)
    one = write_run(tmp_path / "build/one", slower)
    assert reported(monkeypatch, root, one) == 0
    added = sorted(set(readme.read_text().splitlines()) - set(once.splitlines()))
    about = f"h200x1 ({tables.measured_text(slower)})"
    assert len(added) == 2 and added[0].startswith(f"- {about}, partial pair: nccl ag rs bf16 at 4096 (1.5, ours ")
    assert "of other runs only partial pairs, they lose more" in added[1]
    slower["cases"] = [one for one in slower["cases"] if one["operation"] not in ("pair_exact", "combine_exact")]
    assert reported(monkeypatch, root, write_run(one, slower)) == 0
    assert "lose more" not in readme.read_text()
    both = page.read_text()
    assert both.index("## h200x2") < both.index("## h200x1") and both.count("Others were faster at ") == 1
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
    for name in ("README.md", "docs/performance.md", "docs/adapters.md"):
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
    assert sum(path.stat().st_size for path in results.iterdir()) < 600_000


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


def test_runs_are_read_with_floors_of_one_rule(tmp_path: Path) -> None:
    """Whatever they were when the run was made; the copy engine counts."""
    run = example_run()
    run["ceilings"] = run["ceilings"] | {"copy_engine": 8e11}
    (tmp_path / "run.json").write_text(json.dumps(run))
    for old, new in zip(run["cases"], runs.read_run(tmp_path)["cases"], strict=True):
        assert new["link_floor_us"] == pytest.approx(old["link_floor_us"] / 2) and new["p50_us"] == old["p50_us"]


def test_plots_are_drawn_of_what_was_measured_and_the_same_again(tmp_path: Path) -> None:
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
    svg = f'<svg><metadata>\n who\n</metadata><!-- axes -->\n  <g id="text_1">\n    <g x="1">{path}</g></g></svg>'
    assert plots.slim(svg) == '<svg>\n<g x="1"><path id="m1" d="M 1.23 7.5"/></g></svg>'


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.draw(example_run(), tmp_path) == [] and not list(tmp_path.iterdir())


def test_tables_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path, example_run())
    monkeypatch.setattr(sys, "argv", ["tables", str(folder)])
    tables.main()
    assert capsys.readouterr().out == tables.page(runs.read_run(folder)) + "\n"
    monkeypatch.setattr(sys, "argv", ["model"])
    model.main()
    said = capsys.readouterr().out
    assert all(f"{name}\n\n" in said for name in runs.read_kept())
