"""The wheel: carries the cubins, and finds them where neither the DSL nor a compiler nor torch is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import cute_ep
from cute_ep.layouts.variants import variants

ROOT = Path(__file__).parents[2]

FIND = """
import sys
import cute_ep
from cute_ep.library import PACKAGE_FOLDER, Library
from cute_ep.layouts.variants import variants
library = Library()
for v in variants():
    entry = library.find(v.kernel, v.arch, v.format)
    assert entry.path.is_relative_to(PACKAGE_FOLDER) and entry.read()[:4] == b"\\x7fELF"
assert not {"torch", "cutlass"} & set(sys.modules)
print(cute_ep.__version__, len(library.entries))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_brings_its_kernels(tmp_path: Path) -> None:
    """From a tree without kernels: pip builds them, and the wheel alone is enough to find them."""
    source, site = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "wheel_backend.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "library")
    for folder in ("cute_ep", "kernels", "layouts"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("cute_ep-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for variant in variants():
        assert f"cute_ep/library/{variant.arch}/{variant.symbol}.cubin" in names
    assert "cute_ep/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cute_ep", f"{wheel.name.split('-py3')[0]}.dist-info"}, "no bare kernels or layouts"
    for folder in ("cute_ep", "kernels", "layouts"):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if folder == "cute_ep" else f"cute_ep/{inside}") in names
    venv.create(site, with_pip=False, clear=True)
    python = site / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, cwd=tmp_path)
    assert run(python, "-c", FIND, cwd=tmp_path).split() == [cute_ep.__version__, str(len(variants()))]
