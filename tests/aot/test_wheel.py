"""The wheel: carries the cubins, and finds them where neither the DSL nor a compiler nor torch is installed. An sdist
makes the same one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import cute_ep
from cute_ep.aot.library import LibraryEntry
from cute_ep.layouts.maps.variants import Variant, variants

from .conftest import FOLDER

ROOT = Path(__file__).parents[2]
ARCH = "sm_90a"
MANIFEST = "cute_ep/library/manifest.json"
COPY = Variant("copy", ARCH)
"""The variant that compiles fastest."""

FIND = """
import sys
import cute_ep
from cute_ep.aot.library import PACKAGE_FOLDER, Library
from cute_ep.layouts.maps.variants import variants
library = Library()
for v in variants():
    entry = library.find(v.kernel, v.arch, v.format)
    assert entry.path.is_relative_to(PACKAGE_FOLDER) and entry.read()[:4] == b"\\x7fELF"
assert not {"torch", "cutlass"} & set(sys.modules)
print(cute_ep.__version__, len(library.entries))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a program prints, also on standard error; AssertionError when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def pip_wheel(source: Path, out: Path, *options: str) -> tuple[str, dict[str, bytes]]:
    """(what pip prints, name -> content of the files in the wheel)"""
    printed = run(
        *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", *options, "--wheel-dir", out, source),
        cwd=source,
    )
    (wheel,) = out.glob("cute_ep-*-cp311-abi3-linux_*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return printed, {name: archive.read(name) for name in archive.namelist()}


def cubins(some: list[Variant]) -> set[str]:
    return {f"cute_ep/library/{variant.arch}/{variant.symbol}.cubin" for variant in some}


def built(printed: str) -> list[tuple[int, int]]:
    """(kernels compiled, taken as they were), each time that the build says so."""
    return [(int(new), int(old)) for new, old in re.findall(r"(\d+) built, (\d+) up to date", printed)]


@pytest.fixture(scope="module")
def source(library: dict[Variant, LibraryEntry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that holds all kernels but one."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "wheel_backend.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__", "library", "*.so")
    for name in ("cute_ep", "kernels", "layouts", "docs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copytree(FOLDER, folder / "build" / "library")
    (folder / "build" / "library" / library[COPY].path.relative_to(FOLDER)).unlink()
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    left = folder / "build" / platform / "cute_ep" / "left_by_an_earlier_wheel.py"
    left.parent.mkdir(parents=True)
    left.touch()
    return folder


@pytest.mark.slow
def test_the_wheel_and_the_sdist(source: Path, tmp_path: Path) -> None:
    """pip compiles what is missing and takes the rest; the wheel alone is enough to find all kernels; from an sdist
    comes the same wheel, with one architecture where one is asked for."""
    printed, whole = pip_wheel(source, tmp_path / "whole")
    everything = variants()
    assert built(printed) == [(1, len(everything) - 1), (0, len(everything))]
    assert re.search(rf"{len(everything)} of {len(everything)}  {ARCH} {COPY.symbol}\n", printed), "progress"
    assert {name for name in whole if name.endswith(".cubin")} == cubins(everything)
    assert "cute_ep/py.typed" in whole and MANIFEST in whole
    assert ("cute_ep/runtime/_launcher.abi3.so" in whole) == (shutil.which("gcc") is not None)
    info = f"cute_ep-{cute_ep.__version__}.dist-info"
    assert {name.split("/")[0] for name in whole} == {"cute_ep", info}, "no bare kernels or layouts"
    modules = set()
    for folder in ("cute_ep", "kernels", "layouts"):
        for path in (source / folder).rglob("*.py"):
            inside = path.relative_to(source).as_posix()
            modules.add(inside if folder == "cute_ep" else f"cute_ep/{inside}")
    assert {name for name in whole if name.endswith(".py")} == modules

    (wheel,) = (tmp_path / "whole").iterdir()
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, cwd=tmp_path)
    assert run(python, "-c", FIND, cwd=tmp_path).split() == [cute_ep.__version__, str(len(everything))]

    run(sys.executable, "-c", f"import wheel_backend as b; b.build_sdist({str(tmp_path)!r})", cwd=source)
    with tarfile.open(tmp_path / f"cute_ep-{cute_ep.__version__}.tar.gz") as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert not list(unpacked.rglob("*.cubin"))
    shutil.copytree(source / "build" / "library", unpacked / "build" / "library")
    options = ("--no-build-isolation", "--config-settings", f"arch={ARCH}")
    printed, some = pip_wheel(unpacked, tmp_path / "some", *options)
    assert built(printed) == [(0, len(variants((ARCH,))))] * 2
    assert some.keys() == whole.keys() - cubins(everything) | cubins(variants((ARCH,)))
    differ = {name for name in some if some[name] != whole[name]}
    assert differ <= {MANIFEST, f"{info}/RECORD"}
    rows = [row for row in json.loads(whole[MANIFEST])["variants"] if row["arch"] == ARCH]
    assert json.loads(some[MANIFEST])["variants"] == rows


@pytest.mark.parametrize("setting", ["arhc=sm_90a", "arch=sm_80"])
def test_settings_that_no_wheel_has(source: Path, tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    code = f"import wheel_backend as b; b.build_wheel({str(tmp_path)!r}, {{{name!r}: {value!r}}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode and not list(tmp_path.iterdir())
    rule = "config setting 'arhc': must be arch" if name == "arhc" else "arch = 'sm_80': must be one of sm_90a"
    assert rule in done.stderr
