"""The `cute-ep` program: every command runs, refuses politely, and prints the numbers that it should."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.table import Table

from cute_ep import reference
from cute_ep.aot import library
from cute_ep.aot.build import dsl_version
from cute_ep.aot.library import build_command, read_manifest
from cute_ep.api.config import EPConfig, memory_bytes
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.bench import machine
from cute_ep.cli.common import bytes_text, print_table, seconds_text, step, write_json
from cute_ep.cli.info import memory_parts
from cute_ep.cli.layout import parse_extents
from cute_ep.cli.main import COMMANDS, layout, main, make_parser
from cute_ep.cli.main import build as build_module
from cute_ep.layouts.algebra.algebra import eager
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import Hooks, Variant, variants

ROOT = Path(__file__).parents[1]
(PINNED_DSL,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["build"]

needs_dsl = pytest.mark.skipif(dsl_version() is None, reason="the CuTe DSL is not installed")
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")


def test_help_is_fast_to_import() -> None:
    """Help, build's arguments and layouts must not wait for torch or the DSL."""
    code = (
        "import sys; from cute_ep.cli.main import make_parser, main; make_parser(); main(['layout', '(2,2):(2,1)']);"
        "assert 'torch' not in sys.modules and 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"cute-ep {command}" in capsys.readouterr().out


def test_unknown_command_is_an_argument_error() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


@needs_dsl
def test_build_is_incremental(tmp_path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "library"
    command = ["build", "--preset", "gpt-oss-120b", "--kernel", "copy", "--arch", "sm_90a", "--out", str(folder)]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "(hidden 2880, top-k 4) is served in bf16, mxfp8, mxfp4, nvfp4, nvfp4_row\n" in first
    assert "1 of 1  sm_90a cute_ep_copy\n" in first and "1 built, 0 up to date" in first
    (entry,) = read_manifest(folder).values()
    assert entry.variant == Variant("copy", "sm_90a") and str(entry.registers) in first
    before = entry.path.stat().st_mtime_ns
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out.splitlines()[1:] == [line for line in again.out.splitlines() if "0 built, 1 up to date" in line]
    assert again.err == ""
    assert entry.path.stat().st_mtime_ns == before
    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "package")
    assert main(["info", "--library", str(folder)]) == 0
    known = [line for line in capsys.readouterr().out.splitlines() if "copy" in line or "library" in line]
    size, seconds = bytes_text(entry.path.stat().st_size), seconds_text(entry.seconds)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in known]
    assert cells == [[str(folder), "1", "0", size, seconds, entry.dsl], ["copy", "1", size, seconds]]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            ["--preset", "gpt-oss-120b", "--format", "fp8,fp8_pow2"],
            "hidden = 2880 fits none of the formats fp8, fp8_pow2",
        ),
        (["--preset", "gpt-2"], "preset = 'gpt-2': must be one of deepseek-v3"),
        (["--arch", "sm_80"], "arch = 'sm_80': must be one of sm_90a"),
        (["--format", "fp7"], "format = 'fp7': must be one of bf16, fp8, fp8_pow2, mxfp8, mxfp4, nvfp4, nvfp4_row"),
        (["--kernel", "fly"], "kernel = 'fly': must be one of"),
        (["--kernel", "copy", "--epilogue", "a:b"], "kernel = 'copy': must be one of combine_exact, combine_partial"),
        (["--jobs", "0"], "jobs = 0: must be at least 1"),
    ],
)
def test_build_names_the_broken_rule(words: list[str], rule: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(EPConfigError, match=rule):
        build_module.wanted_variants(make_parser().parse_args(["build", *words]))
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cute-ep: ") and error.count("\n") == 1 and "Traceback" not in error


def test_every_build_command_builds_its_variant() -> None:
    hooks = [Hooks(), Hooks("a:one"), Hooks(None, "a.b:two", "c:three"), Hooks("a:one", "a.b:two", "c:three")]
    for variant in {one for some in hooks for one in variants(hooks=some)}:
        program, *words = shlex.split(build_command(variant))
        args = make_parser().parse_args(words)
        assert program == "cute-ep" and args.out is not None
        assert variant in build_module.wanted_variants(args), build_command(variant)


def test_build_serves_all_presets_with_the_same_variants() -> None:
    args = make_parser().parse_args(["build", "--preset", "all", "--arch", "sm_90a"])
    assert build_module.wanted_variants(args) == variants(("sm_90a",))


def test_build_with_hooks_makes_the_kernels_that_call_them() -> None:
    words = ["build", "--arch", "sm_90a", "--format", "fp8", "--epilogue", "a:one", "--input-scale", "b:two"]
    made = build_module.wanted_variants(make_parser().parse_args(words))
    assert made == variants(("sm_90a",), ("fp8",), Hooks("a:one", None, "b:two")) and len(made) == 6


@pytest.mark.parametrize("version", [None, "4.8.1"])
def test_build_without_the_dsl_or_a_folder(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    """Said before anything is compiled."""
    monkeypatch.setattr("cute_ep.aot.build.dsl_version", lambda: version)
    (tmp_path / "file").touch()
    assert main(["build", "--arch", "sm_90a", "--kernel", "copy", "--out", str(tmp_path / "file")]) == 2
    rule = f"folder = '{tmp_path / 'file'}': File exists" if version else f"pip install {PINNED_DSL}"
    assert rule in capsys.readouterr().err.replace("\n", " ")


def test_a_package_without_metadata_knows_no_version_of_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(eager, "requires", requires)
    assert eager.dsl_install() == "pip install nvidia-cutlass-dsl"


@needs_dsl
def test_build_says_what_is_wrong_with_a_hook(tmp_path, capsys: pytest.CaptureFixture) -> None:
    words = ["--arch", "sm_90a", "--kernel", "combine_wait_exact", "--epilogue", "math:fly", "--out", str(tmp_path)]
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert "hook = 'math:fly': must be module:function" in error and "Traceback" not in error
    assert main(["build", "--epilogue", "fly", "--out", str(tmp_path)]) == 2
    assert "epilogue = 'fly': must be \"module:function\" or None" in capsys.readouterr().err


def test_layout(tmp_path, capsys: pytest.CaptureFixture) -> None:
    drawing = tmp_path / "drawings" / "row.svg"
    assert main(["layout", "(4,6):(6,1)", "--tile", "2x3", "--distribute", "(2,1):(1,1)", "--svg", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "size 24 elements" in out and "4 tiles of 2x3, each (2,3):(6,1)" in out and "1,1 at 15" in out
    assert "8 T1V2" in out
    assert drawing.read_text().startswith("<svg")
    for words in (["(4,6"], ["(4,6):(6,1)", "--tile", "3x3"], ["(4,6):(6,1)", "--tile", "no"]):
        assert main(["layout", *words]) == 2
    with pytest.raises(EPInputError, match="must be positive extents such as 4x8, one per mode"):
        parse_extents("4x0")
    assert parse_extents("(4, 8)") == parse_extents("4x8") == (4, 8)


@pytest.mark.parametrize("width", [10, 40, 80, 160])
def test_layout_shows_every_cell_at_any_width(width: int, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("cute_ep.cli.main.PIPE_WIDTH", width)
    assert main(["layout", "(4,40):(40,1)", "--distribute", "(2,8):(8,1)"]) == 0
    lines = capsys.readouterr().out.partition("offsets (elements)")[2].splitlines()
    rows = [line.split() for line in lines if line.startswith(" ") and "T" in line]
    assert all(len(line) <= width or len(line.split()) == 3 for line in lines if "T" in line)
    seen = {int(cell): (int(row[0]), owner) for row in rows for cell, owner in zip(row[1::2], row[2::2], strict=True)}
    assert seen == {n: (n // 40, f"T{n % 8 + 8 * (n // 40 % 2)}V{n % 40 // 8 + 5 * (n // 80)}") for n in range(160)}


@pytest.mark.parametrize("width", [20, 80])
def test_tables_wrap_between_words_and_cut_nothing(width: int, capsys: pytest.CaptureFixture) -> None:
    table = Table(title="times")
    for header in ("dispatch", "combine partial", "a slot per (expert, source, token)", "format"):
        table.add_column(header)
    table.add_row("4.73 ms", "111 us", "1.25 MiB", "nvfp4_row")
    print_table(Console(width=width), table)
    words = capsys.readouterr().out.split()
    for (
        word
    ) in "dispatch combine partial slot (expert, source, token) format 4.73 ms 111 us 1.25 MiB nvfp4_row".split():
        assert word in words, word


def test_files_that_cannot_be_written(tmp_path, capsys: pytest.CaptureFixture) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for path in (tmp_path, taken / "below.svg"):
        assert main(["layout", "4:1", "--svg", str(path)]) == 2
        assert f"svg='{path}':cannotbewritten(" in "".join(capsys.readouterr().err.split()), "wrapped anywhere"
        with pytest.raises(EPConfigError, match=r"json = '.*': cannot be written"):
            write_json(path, {})
    assert taken.read_text() == ""


def test_info(tmp_path, capsys: pytest.CaptureFixture) -> None:
    assert main(["info", "--preset", "deepseek-v3", "--library", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "448 MiB" in out and "14 GiB" in out and "│ total " in out
    for tokens, size in ((128, "7 MiB"), (4096, "224 MiB")):
        assert main(["info", "--max-tokens", str(tokens), "--library", str(tmp_path)]) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if "received in one call" in line)
        assert size in row, row
    assert main(["info", "--preset", "nobody"]) == 2
    assert main(["info", "--format", "bf16,fp8"]) == 2
    assert main(["info", "--library", str(tmp_path / "missing")]) == 2


def test_memory_in_words_is_all_of_it() -> None:
    """No name of a region of the code, and the parts add up."""
    for fmt in FORMATS:
        for ranks in (1, 4):
            cfg = EPConfig(7168, 256, 8, 4096, ranks, fmt)
            parts = memory_parts(cfg)
            assert sum(parts.values()) == memory_bytes(cfg) and min(parts.values()) >= 0
            assert not any(name in " ".join(parts).split() for name in cfg.arena.regions if "_" in name)


def test_info_as_json(tmp_path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """On standard output nothing else, so that another program can read it; in a file the same, beside the tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "package")
    words = ["info", "--preset", "qwen3-30b", "--format", "fp8", "--max-tokens", "128", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    file = tmp_path / "info.json"
    assert main([*words, str(file)]) == 0
    assert "symmetric memory of one rank" in capsys.readouterr().out
    written = json.loads(file.read_text())
    for one in (printed, written):
        assert one["machine"].pop("command").startswith("cute-ep info") and one["machine"].pop("date")
        for gpu in one["gpus"]:
            gpu.pop("free_bytes")
    assert printed == written
    assert len(printed["gpus"]) == torch.cuda.device_count() == len(printed["peer_access"])
    folders = [(one["folder"], one["variants"], one["stale"]) for one in printed["libraries"]]
    assert folders == [(str(tmp_path / "package"), 0, 0), (str(tmp_path / "cache" / "cute_ep"), 0, 0)]
    cfg = EPConfig(2048, 128, 8, 128, 4, "fp8")
    memory = printed["memory"]["by_ranks"]["4"]
    assert memory["total"] == memory_bytes(cfg) and memory["regions"]["messages"] == 0
    assert memory["regions"]["express_messages"] == cfg.arena.express_messages.nbytes


def test_info_of_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture) -> None:
    """Devices, memory, who reaches whom and over what."""
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    for name, fake in {
        "device_count": lambda: 2,
        "get_device_properties": lambda index: facts,
        "get_device_name": lambda device: facts.name,
        "mem_get_info": lambda index: (100 * 10**9 + index * 10**9, 140 * 10**9),
        "can_device_access_peer": lambda device, peer: device < peer,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(machine, "link_matrix", lambda: [["X", "NV18"], ["NV6", "X"]])
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    assert main(["info", "--library", str(tmp_path), "--json", str(tmp_path / "info.json")]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│ cuda:" in line]
    assert rows == [
        ["cuda:0", "NVIDIA H200", "sm_90", "132", "130 GiB", "93.1 GiB"],
        ["cuda:1", "NVIDIA H200", "sm_90", "132", "130 GiB", "94.1 GiB"],
        ["cuda:0", "-", "yes NV18"],
        ["cuda:1", "no NV6", "-"],
    ]
    assert "driver 580.1" in out
    written = json.loads((tmp_path / "info.json").read_text())
    assert written["machine"]["gpus"] == {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200"}
    assert written["peer_access"] == [[None, True], [False, None]] and written["links"][1] == ["NV6", "X"]
    assert [gpu["free_bytes"] for gpu in written["gpus"]] == [100 * 10**9, 101 * 10**9]


@needs_no_gpu
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_gpu_commands_refuse_politely(command: str, capsys: pytest.CaptureFixture) -> None:
    """The message names what was asked for, and nothing that was not."""
    for words in ([], ["--devices", "virtual:2"], ["--devices", "cuda:0"]):
        assert main([command, *words]) == 2
        captured = capsys.readouterr()
        assert "CUDA GPU" in captured.err and "Traceback" not in captured.err + captured.out
        assert ("devices = " in captured.err) == bool(words) and "auto" not in captured.err
        assert words[1:] == ["cuda:0"] or "verify and cute-ep demo also run on the CPU" in captured.err


def test_verify_without_a_gpu_takes_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """And says so first."""
    from cute_ep.cli.main import verify

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(verify, "QUICK_SHAPES", ((96, 12, 3),))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (3,))
    monkeypatch.setattr(verify, "OPTIONS", {verify.PLAIN: verify.Options()})
    assert main(["verify"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "4 ranks of the reference backend on the CPU, since this machine has no CUDA GPU"
    assert "bit-exact" in others[-1]


def test_python_m_cute_ep() -> None:
    words = [sys.executable, "-m", "cute_ep"]
    done = subprocess.run([*words, "layout", "(2,2):(2,1)"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("(2,2):(2,1)\n")
    wrong = subprocess.run([*words, "layout", "(2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.startswith("cute-ep: ")


def test_a_reader_that_leaves_is_no_difference() -> None:
    """`| head`: neither a traceback nor the exit code of a failed comparison."""
    words = [sys.executable, "-m", "cute_ep", "layout", "(256,64):(64,1)"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "(256,64):(64,1)\n"
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 141


def test_the_program_shows_what_is_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """On standard error, while a command runs; the library alone says nothing."""
    logger = logging.getLogger("cute_ep.test")
    monkeypatch.setattr(layout, "run", lambda args, console: logger.info("%d things", 3) or logger.debug("no") or 0)
    logger.info("before")
    assert main(["layout", "2:1"]) == 0
    logger.info("after")
    assert capsys.readouterr() == ("", "cute-ep: 3 things\n")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("cute_ep").handlers)


def test_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture) -> None:
    with step(Console(width=80), "measuring") as nothing:
        assert nothing is None and capsys.readouterr().out == "measuring ...\n"
    assert capsys.readouterr().out == ""


@needs_no_gpu
def test_make_test_gpu_needs_a_gpu(tmp_path) -> None:
    """Where every test would be left out, it fails, before it builds anything."""
    (tmp_path / "package.stamp").touch()
    words = ["make", "--no-print-directory", f"VENV={tmp_path}", f"PY={sys.executable}", "test-gpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and "test-gpu: torch finds no CUDA GPU here" in done.stderr and not done.stdout


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_no_times_of_the_cpu(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([command, "--devices", "cpu"]) == 2
    assert f"{command} measures GPUs" in capsys.readouterr().err


def test_verify_on_the_reference_backend(tmp_path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    from cute_ep.cli.main import verify

    monkeypatch.setattr(verify, "QUICK_SHAPES", ((128, 12, 3), (96, 12, 3)))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (0, 7))
    monkeypatch.setattr(verify, "OPTION_TOKENS", 9)
    report = tmp_path / "verify.json"
    assert main(["verify", "--devices", "cpu:3", "--json", str(report)]) == 0
    # 7 and 5 formats: 2 sizes by 2 routings; 5 options but 3 for bf16, fused and split
    wanted = (7 + 5) * 4 + 2 * (6 * 5 + 3 + 4 * 5 + 3)
    assert f"all {wanted} cases are bit-exact" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert len(content["cases"]) == wanted and content["machine"]["devices"] == ["cpu"] * 3
    assert content["machine"]["command"].startswith("cute-ep verify")
    assert {(case["fmt"], case["options"]) for case in content["cases"] if case["hidden"] == 128} == {
        (fmt, name)
        for fmt, one in FORMATS.items()
        for name, some in verify.OPTIONS.items()
        if one.scale or not some.scaled
    }


def test_verify_covers_every_format_size_and_routing() -> None:
    """Without --quick: each in every format; the largest batch has one routing a format, a different one each."""
    from cute_ep.cli.main import verify

    cases = list(verify.cases_of(verify.SHAPES[0], 4, verify.TOKENS, verify.ROUTINGS))
    assert len(cases) == len(set(cases)) and {case.split for case in cases} == {False, True}
    small = {(case.fmt, case.tokens[0], case.routing) for case in cases if case.tokens[0] < verify.LARGEST}
    sizes = [size for size in (*verify.TOKENS, verify.OPTION_TOKENS) if size < verify.LARGEST]
    assert small >= {(fmt, size, routing) for fmt in FORMATS for size in sizes[:-1] for routing in verify.ROUTINGS}
    large = [case.routing for case in cases if case.tokens[0] >= verify.LARGEST]
    assert len(large) == len(FORMATS) and set(large) == set(verify.ROUTINGS)
    assert verify.formats_of(2880) == [fmt for fmt in FORMATS if FORMATS[fmt].block < 128]


def test_verify_reports_a_difference(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    from cute_ep.cli.main import verify

    monkeypatch.setattr(verify, "QUICK_SHAPES", ((128, 12, 3),))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (5,))
    monkeypatch.setattr(verify, "OPTIONS", {verify.PLAIN: verify.Options()})
    truth = reference.combine
    monkeypatch.setattr(reference, "combine", lambda *args: [out * 2 for out in truth(*args)])
    assert main(["verify", "--devices", "cpu:2"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "rank 0 combine exact" in out and "14 of 14 cases differ" in out


def test_numbers_have_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 7 << 25, 14 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "224 MiB",
        "14 GiB",
    ]
    assert [seconds_text(t) for t in (12.34e-6, 0.25, 3.0)] == ["12.3 us", "250 ms", "3 s"]
