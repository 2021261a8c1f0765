"""The compiled library of all architectures, and its machine code as text."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from cute_ep.aot.build import build
from cute_ep.aot.cubin import DISASSEMBLER, find_nvdisasm, sections
from cute_ep.aot.library import LibraryEntry
from cute_ep.layouts.maps.variants import Hooks, Variant, variants

FOLDER = Path(__file__).parents[2] / "build" / "library"
INSTRUCTION_BYTES = 16
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
    return find_nvdisasm() or pytest.skip(f"{DISASSEMBLER} is not installed")


def _program_lines(*arguments: str | Path) -> list[str]:
    """What the disassembler says: instructions in program order, without addresses and comments."""
    said = subprocess.run([_nvdisasm(), *arguments], capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith("/*")]
    return [line.split("*/", 1)[1].split(";")[0].strip() for line in lines]


def disassemble(cubin: Path) -> list[str]:
    """Instructions of a cubin, which jump to labels."""
    return _program_lines("-c", cubin)


def disassemble_all(arch: str, cubins: Sequence[Path]) -> dict[Path, list[str]]:
    """Instructions of cubins of one architecture, each with one kernel; they jump to addresses.

    The disassembler takes 0.4 s to start, so all are given to it at once, as one raw binary.
    """
    codes = []
    for path in cubins:
        (code,) = (content for name, content in sections(path.read_bytes()) if name.startswith(".text."))
        codes.append(code)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        lines = _program_lines("--binary", arch.replace("sm_", "SM"), file.name)
    assert len(lines) * INSTRUCTION_BYTES == sum(map(len, codes))
    ends = accumulate(len(code) // INSTRUCTION_BYTES for code in codes)
    return {path: lines[first:end] for path, (first, end) in zip(cubins, pairwise((0, *ends)), strict=True)}


@pytest.fixture(scope="session")
def sass(library: dict[Variant, LibraryEntry]) -> Callable[[Variant], list[str]]:
    """The instructions of a variant, as `disassemble_all` has them."""

    @cache
    def of_arch(arch: str) -> dict[Path, list[str]]:
        return disassemble_all(arch, [entry.path for variant, entry in library.items() if variant.arch == arch])

    return lambda variant: of_arch(variant.arch)[library[variant].path]
