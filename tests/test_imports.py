"""Imports go one way: layouts, then kernels, then cute_ep. Read from the sources, so no module needs to run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"cute_ep": "cute_ep", "kernels": "cute_ep.kernels", "layouts": "cute_ep.layouts"}
"""Folder -> what it imports as (see pyproject.toml)."""

DSL_FILES = {"layouts/eager.py", "layouts/device.py", "layouts/device_tile.py"}
"""Files of `layouts` that bridge to the CuTe DSL."""
BUILD_FILE = "cute_ep/build.py"
"""The one runtime file that may import kernels or the DSL."""
TORCH_STACK = {"torch", "cuda", "rich"}


def sources() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def imports(path: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import statement of a file, also those inside functions."""
    folder, *inner = Path(path).with_suffix("").parts
    package = ".".join([FOLDERS[folder], *inner[:-1]])
    for node in ast.walk(ast.parse((ROOT / path).read_text(), path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


def allowed(path: str, name: str) -> bool:
    """Whether the file at `path` may import `name`."""
    folder = Path(path).parts[0]
    if is_standard(name):
        return True
    if folder == "layouts":
        return within(name, "cute_ep.layouts") or (within(name, "cutlass") and path in DSL_FILES)
    if folder == "kernels":
        return any(within(name, package) for package in ("cute_ep.layouts", "cute_ep.kernels", "cutlass"))
    if within(name, "cute_ep.kernels") or within(name, "cutlass"):
        return path == BUILD_FILE
    return within(name, "cute_ep") or name.split(".")[0] in TORCH_STACK


def violations(path: str) -> list[str]:
    return [f"{path}:{line} imports {name}" for line, name in imports(path) if not allowed(path, name)]


@pytest.mark.parametrize("path", sources())
def test_direction(path: str) -> None:
    assert not violations(path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("layouts/formats.py", "torch"),
        ("layouts/formats.py", "cutlass"),
        ("layouts/device.py", "cute_ep.kernels.block"),
        ("layouts/device.py", "cute_ep.config"),
        ("kernels/send.py", "torch"),
        ("kernels/send.py", "cute_ep.config"),
        ("cute_ep/tuning.py", "cute_ep.kernels.block.launch_config"),
        ("cute_ep/library.py", "cutlass"),
        ("cute_ep/cli.py", "kernels.block"),
        ("cute_ep/cli.py", "layouts.formats"),
        ("kernels/send.py", "layouts.formats"),
        ("cute_ep/cli.py", "numpy"),
    ],
)
def test_the_rule_forbids(path: str, name: str) -> None:
    assert not allowed(path, name)


@pytest.mark.parametrize("path", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")))
def test_no_bare_folder_names(path: str) -> None:
    """`import kernels` works from the repository root and would load every file a second time."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(), path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        assert not [name for name in names if name.split(".")[0] in ("kernels", "layouts")], path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cute_ep", ("torch", "cutlass", "cuda", "rich")),
        ("cute_ep.layouts", ("torch", "cutlass", "cuda")),
        ("cute_ep.library", ("torch", "cutlass", "cuda")),
        ("cute_ep.config", ("torch", "cutlass", "cuda")),
        ("cute_ep.build", ("torch", "cutlass", "cuda")),
        ("cute_ep.reference", ("cutlass",)),
    ],
)
def test_light_imports(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({set(absent)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
