"""The compiled library of all architectures, and its machine code as text."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from cute_ep.aot.build import build
from cute_ep.aot.library import LibraryEntry
from cute_ep.layouts.maps.variants import Hooks, Variant, variants

FOLDER = Path(__file__).parents[2] / "build" / "library"
DISASSEMBLER = "nvidia-cuda-nvdisasm"
RESIDUAL = Hooks(epilogue="cute_ep.kernels.hooks:residual_add")
WANTED = (*variants(), *variants(("sm_90a",), hooks=RESIDUAL))
"""All kernels of all architectures, and those with a hook on one of them."""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one of the test processes builds; the others then find everything up to date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where tests find and build kernels besides `FOLDER`: an empty place, not the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cute_ep"


@pytest.fixture(scope="session")
def library() -> dict[Variant, LibraryEntry]:
    """Every variant of WANTED, built where `make` has not."""
    pytest.importorskip("cutlass")
    with _locked(FOLDER.parent / "library.lock"):
        return {entry.variant: entry for entry in build(WANTED, FOLDER)}


@cache
def _nvdisasm() -> str:
    try:
        files = importlib.metadata.files(DISASSEMBLER) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISASSEMBLER} is not installed")
    return str(next(file.locate() for file in files if file.name == "nvdisasm"))


def disassemble(cubin: Path) -> list[str]:
    """Instructions in program order, without addresses and comments.

    The disassembler takes 0.4 s to start, so what it says of a cubin is kept for other test processes and runs.
    """
    program = _nvdisasm()
    folder = FOLDER.parent / f"sass-{importlib.metadata.version(DISASSEMBLER)}"
    digest = hashlib.sha256(cubin.read_bytes()).hexdigest()
    kept = folder / f"{digest}.txt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{digest}.{os.getpid()}"
        new.write_text(subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout)
        new.replace(kept)
    lines = [line.strip() for line in kept.read_text().splitlines() if line.strip().startswith("/*")]
    return [line.split("*/", 1)[1].split(";")[0].strip() for line in lines]


@pytest.fixture(scope="session")
def sass(library: dict[Variant, LibraryEntry]) -> Callable[[Variant], list[str]]:
    """`disassemble` of a variant."""
    return cache(lambda variant: disassemble(library[variant].path))
