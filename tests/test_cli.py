"""The `cute-ep` program: every command runs, refuses politely, and prints the numbers that it should."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from cute_ep import demo, library, machine, reference
from cute_ep.build import dsl_version
from cute_ep.cli import COMMANDS, main, make_parser
from cute_ep.commands import build as build_module
from cute_ep.commands import layout
from cute_ep.commands.common import bytes_text, one_thread_on_a_cpu, seconds_text, step, write_json
from cute_ep.commands.info import memory_parts
from cute_ep.commands.layout import parse_extents
from cute_ep.config import EPConfig, memory_bytes
from cute_ep.errors import EPConfigError, EPInputError
from cute_ep.layouts import eager
from cute_ep.layouts.formats import FORMATS
from cute_ep.layouts.variants import Hooks, Variant, variants
from cute_ep.library import build_command, read_manifest
from cute_ep.machine import describe_devices, parse_devices

ROOT = Path(__file__).parents[1]
(PINNED_DSL,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["build"]

needs_dsl = pytest.mark.skipif(dsl_version() is None, reason="the CuTe DSL is not installed")
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")


def test_help_is_fast_to_import() -> None:
    """Help, build's arguments and layouts must not wait for torch or the DSL."""
    code = (
        "import sys; from cute_ep.cli import make_parser, main; make_parser(); main(['layout', '(2,2):(2,1)']);"
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
    monkeypatch.setattr("cute_ep.build.dsl_version", lambda: version)
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
    with pytest.raises(EPInputError, match="must be extents such as 4x8"):
        parse_extents("4x0")
    assert parse_extents("(4, 8)") == parse_extents("4x8") == (4, 8)


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
    assert "470 MB" in out and "15 GB" in out and "│ total " in out
    for tokens, size in ((128, "7.34 MB"), (4096, "235 MB")):
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
    from cute_ep.commands import verify

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
    from cute_ep.commands import verify

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
    from cute_ep.commands import verify

    cases = list(verify.cases_of(verify.SHAPES[0], 4, verify.TOKENS, verify.ROUTINGS))
    assert len(cases) == len(set(cases)) and {case.split for case in cases} == {False, True}
    small = {(case.fmt, case.tokens[0], case.routing) for case in cases if case.tokens[0] < verify.LARGEST}
    sizes = [size for size in (*verify.TOKENS, verify.OPTION_TOKENS) if size < verify.LARGEST]
    assert small >= {(fmt, size, routing) for fmt in FORMATS for size in sizes[:-1] for routing in verify.ROUTINGS}
    large = [case.routing for case in cases if case.tokens[0] >= verify.LARGEST]
    assert len(large) == len(FORMATS) and set(large) == set(verify.ROUTINGS)
    assert verify.formats_of(2880) == [fmt for fmt in FORMATS if FORMATS[fmt].block < 128]


def test_verify_reports_a_difference(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    from cute_ep import reference
    from cute_ep.commands import verify

    monkeypatch.setattr(verify, "QUICK_SHAPES", ((128, 12, 3),))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (5,))
    monkeypatch.setattr(verify, "OPTIONS", {verify.PLAIN: verify.Options()})
    truth = reference.combine
    monkeypatch.setattr(reference, "combine", lambda *args: [out * 2 for out in truth(*args)])
    assert main(["verify", "--devices", "cpu:2"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "rank 0 combine exact" in out and "14 of 14 cases differ" in out


def test_devices() -> None:
    assert parse_devices("cpu") == ["cpu"] * 4 and parse_devices("cpu:2") == ["cpu"] * 2
    for text in ("cpu:0", "cpu:x", "cpu:33", "tpu:0", "cuda:x", "cuda:99", ""):
        with pytest.raises(EPConfigError, match="devices = "):
            parse_devices(text)


@pytest.mark.parametrize(
    ("gpus", "experts", "devices"),
    [
        (4, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, 8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, 6, ["cuda:0", "cuda:1", "cuda:2"]),
        (4, 7, ["cuda:0"]),
        (1, 8, ["cuda:0"] * 4),
    ],
)
def test_auto_takes_gpus_that_divide_the_experts(
    gpus: int, experts: int | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as do; one GPU is that of all virtual ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert parse_devices("auto", experts) == devices


@pytest.mark.parametrize("text", ["auto", "virtual:2"])
def test_a_machine_without_gpus_has_none_to_take(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    begins = "" if text == "auto" else f"devices = '{text}': "
    with pytest.raises(EPConfigError, match=f"^{begins}there is no CUDA GPU on this machine"):
        parse_devices(text)
    assert parse_devices("auto", 6, or_cpu=True) == ["cpu"] * 4


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a command line can tell."""
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_devices_in_words(two_gpus: None) -> None:
    two = ["cuda:0", "cuda:1"]
    assert describe_devices(two) == "2 ranks on 2 GPUs (NVIDIA H200)"
    assert describe_devices(two, 16) == "2 ranks on 2 GPUs (NVIDIA H200), 16 SMs per rank"
    assert describe_devices(["cuda:1"] * 3) == "3 ranks on 1 GPU (NVIDIA H200)"
    assert describe_devices(["cpu"]) == "1 rank of the reference backend on the CPU"


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize("sms", [-1, 0, 133])
def test_sms_that_no_rank_can_have(
    command: str, sms: int, two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """An error before anything is measured: a measurement would raise something else here."""
    monkeypatch.setattr(machine, "environment", lambda devices, command_line: {})
    assert main([command, "--sms", str(sms)]) == 2
    assert f"sms = {sms}: must be in [1, 132], the SMs of cuda:0" in capsys.readouterr().err


def test_link_matrix(monkeypatch) -> None:
    topology = (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV18\t0-31\t0\n"
        "GPU1\tNV18\t X \t0-31\t0\n\nLegend:\n\n  X    = Self\n"
    )
    monkeypatch.setattr(machine, "_output", lambda *command: topology.strip())
    assert machine.link_matrix() == [["X", "NV18"], ["NV18", "X"]]
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.link_matrix() is None and machine.driver_version() is None


def test_numbers_have_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 234_881_024, 15e9)] == ["0 B", "999 B", "1 kB", "235 MB", "15 GB"]
    assert [seconds_text(t) for t in (12.34e-6, 0.25, 3.0)] == ["12.3 us", "250 ms", "3 s"]


def test_demo_on_the_cpu(tmp_path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 20)
    assert main(["demo", str(text), "--devices", "cpu:2", "--preset", "qwen3-30b", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "2 x 64 bytes" in out and "1024 (token, expert) pairs" in out
    for word in (
        "gate|up",
        "swiglu",
        "combine partial",
        *FORMATS,
        "expert weights",
        "tokens received",
        "sizes are reduced",
        "all formats agree",
    ):
        assert word in out
    assert main(["demo", str(tmp_path / "missing.txt"), "--devices", "cpu:2"]) == 2
    given = ["--hidden", "256", "--experts", "96", "--top-k", "2", "--tokens", "16"]
    assert main(["demo", str(text), "--devices", "cpu:3", *given]) == 0
    assert "hidden 256, 96 SwiGLU experts" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [torch.zeros_like, lambda sums: sums * torch.nan])
def test_demo_fails_where_the_layer_is_wrong(
    broken: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = reference.combine_source
    monkeypatch.setattr(reference, "combine_source", lambda *given, **named: broken(right(*given, **named)))
    assert main(["demo", "--devices", "cpu:2", "--experts", "8", "--top-k", "2", "--tokens", "16"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "bf16 exact: rms error" in out and "must be at most 1%" in out and "all formats agree" not in out


def test_demo_layer_agrees_with_the_dense_layer() -> None:
    """The layer through dispatch and combine is within bfloat16's and NVFP4's roundings of the float64 layer."""
    from cute_ep.connection import connect_local
    from cute_ep.presets import Preset

    shape, devices = Preset("tiny", 128, 128, 8, 2), ["cpu"] * 2
    batches = demo.text_batches(b"To be, or not to be, that is the question. " * 4, shape, 2, 48, seed=3)
    assert len({tuple(row.tolist()) for row in batches[0].topk_ids}) > 4
    assert torch.allclose(batches[0].router_weights.sum(dim=1), torch.ones(48))
    for fmt in FORMATS:
        cfg = demo.EPConfig(128, 8, 2, 48, 2, fmt)
        experts = demo.make_experts(cfg, shape, devices, seed=0)
        wanted = demo.dense_layer(cfg, batches, experts)
        assert 0.2 < torch.cat(wanted).std() < 2
        with one_thread_on_a_cpu(devices):
            results, times = demo.run_layer(connect_local(cfg, devices), batches, experts, ("exact", "partial"))
        assert set(times.seconds) == {
            "dispatch",
            "decode rows",
            "gate|up",
            "swiglu",
            "down",
            "combine exact",
            "combine partial",
        }
        for mode in results:
            largest, rms = demo.relative_errors(results[mode], wanted)
            limit = demo.rms_limit(cfg)
            assert limit / 8 < rms < limit and largest < 2 * limit, (fmt, mode)


def test_demo_shares_weights_when_memory_is_short() -> None:
    from cute_ep.presets import Preset

    weights = demo.ExpertWeights(Preset("tiny", 16, 16, 4, 1), 0, 4, torch.device("cpu"), sets=3, seed=1)
    assert weights.sets == 3 and weights.nbytes == 3 * 3 * 16 * 16 * 2
    assert weights.of(3)[0].data_ptr() == weights.of(0)[0].data_ptr() != weights.of(1)[0].data_ptr()


def test_demo_refuses_an_empty_text(tmp_path, capsys: pytest.CaptureFixture) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert main(["demo", str(empty), "--devices", "cpu:2"]) == 2
    assert "must have at least one for each of 2 ranks" in capsys.readouterr().err
