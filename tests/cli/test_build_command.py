"""`cute-ep build`: which variants it builds, what it says, and what it refuses."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from cute_ep.aot import library
from cute_ep.aot.cubin import find_nvdisasm, sections
from cute_ep.aot.library import build_command, read_manifest
from cute_ep.api.errors import EPConfigError
from cute_ep.cli import build as build_module
from cute_ep.cli.common import bytes_text, seconds_text
from cute_ep.cli.main import main, make_parser
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import Hooks, Variant, variants

from .marks import ROOT, needs_dsl

(PINNED_DSL,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["build"]


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
    assert made == variants(("sm_90a",), ("fp8",), Hooks("a:one", None, "b:two")) and len(made) == 10


@needs_dsl
def test_build_is_incremental(tmp_path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "library"
    command = ["build", "--preset", "gpt-oss-120b", "--kernel", "copy", "--arch", "sm_90a", "--out", str(folder)]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "(hidden 2880, top-k 4) is served in bf16, mxfp8, mxfp6_e2m3, mxfp6_e3m2, mxfp4, nvfp4, nvfp4_row\n" in first
    assert "1 of 1  sm_90a cute_ep_copy\n" in first and "1 built, 0 up to date" in first
    (entry,) = read_manifest(folder).values()
    assert entry.variant == Variant("copy", "sm_90a") and str(entry.registers) in first
    before = entry.path.stat().st_mtime_ns
    assert main(command) == 0
    again = capsys.readouterr()
    (_, *lines) = filter(None, again.out.splitlines())  # rich 13 prints an empty one for progress that is not shown
    assert len(lines) == 1 and "0 built, 1 up to date" in lines[0]
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
        (["--format", "fp7"], f"format = 'fp7': must be one of {', '.join(FORMATS)}"),
        (["--kernel", "fly"], "kernel = 'fly': must be one of"),
        (["--kernel", "copy", "--epilogue", "a:b"], "kernel = 'copy': must be one of combine_exact, combine_exact_"),
        (["--jobs", "0"], "jobs = 0: must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_build_names_the_broken_rule(words: list[str], rule: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(EPConfigError, match=rule):
        build_module.wanted_variants(make_parser().parse_args(["build", *words]))
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cute-ep: ") and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize("version", [None, "4.8.1"], ids=["no DSL", "no folder"])
def test_build_without_the_dsl_or_a_folder_stops_before_it_compiles(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("cute_ep.aot.build.dsl_version", lambda: version)
    (tmp_path / "file").touch()
    assert main(["build", "--arch", "sm_90a", "--kernel", "copy", "--out", str(tmp_path / "file")]) == 2
    rule = f"folder = '{tmp_path / 'file'}': File exists" if version else f"pip install {PINNED_DSL}"
    assert rule in capsys.readouterr().err.replace("\n", " ")


@needs_dsl
def test_build_says_what_is_wrong_with_a_hook(tmp_path, capsys: pytest.CaptureFixture) -> None:
    words = ["--arch", "sm_90a", "--kernel", "combine_wait_exact", "--epilogue", "math:fly", "--out", str(tmp_path)]
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert "hook = 'math:fly': must be module:function" in error and "Traceback" not in error
    assert main(["build", "--epilogue", "fly", "--out", str(tmp_path)]) == 2
    assert "epilogue = 'fly': must be \"module:function\" or None" in capsys.readouterr().err


def test_a_package_without_metadata_knows_no_version_of_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "requires", requires)
    assert library.dsl_install() == "pip install nvidia-cutlass-dsl"


@needs_dsl
def test_build_keeps_what_the_compiler_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With the source line of each instruction, of kernels that are up to date too; the instructions are the same."""
    folder, keep = tmp_path / "library", tmp_path / "keep"
    command = ["build", "--kernel", "copy", "--arch", "sm_90a", "--out", str(folder)]
    assert main(command) == 0
    (plain,) = read_manifest(folder).values()
    code = [content for name, content in sections(plain.read()) if name.startswith(".text.")]
    assert main([*command, "--keep", str(keep)]) == 0
    (kept,) = read_manifest(folder).values()
    assert "1 built, 0 up to date" in capsys.readouterr().out and kept.sha256 != plain.sha256
    assert [content for name, content in sections(kept.read()) if name.startswith(".text.")] == code
    assert "kernels/local/copy.py" in (keep / "sm_90a" / "cute_ep_copy.ptx").read_text()
    if find_nvdisasm() is not None:
        assert re.search(
            r'//## File ".*kernels/local/copy.py", line \d+', (keep / "sm_90a" / "cute_ep_copy.sass").read_text()
        )
    assert main([*command, "--keep", str(keep), "--reuse", str(folder)]) == 2
    assert f"keep = {str(keep)!r}: must be None with reuse" in capsys.readouterr().err


@needs_dsl
def test_build_says_where_there_is_no_sass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "find_nvdisasm", lambda: None)
    words = ["--kernel", "copy", "--arch", "sm_90a", "--out", str(tmp_path), "--keep", str(tmp_path / "keep")]
    assert main(["build", *words]) == 0
    assert "there is no SASS: nvdisasm is not installed" in capsys.readouterr().out
