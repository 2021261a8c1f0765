"""The kernel library on disk: `<folder>/<arch>/<symbol>.cubin` and `<folder>/manifest.json`.

Folders are searched in this order: the one given by the caller, the one in the wheel, the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cute_ep.errors import VariantMissing
from cute_ep.layouts.variants import ARCHITECTURES, Variant

PACKAGE_FOLDER = Path(__file__).parent / "library"
MANIFEST = "manifest.json"
DSL_PACKAGE = "nvidia-cutlass-dsl"


def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, None where there is none."""
    try:
        return version(DSL_PACKAGE)
    except PackageNotFoundError:
        return None


def source_folders() -> tuple[Path, ...]:
    """Where the sources are that a cubin is made from. Finding them imports nothing."""
    specs = [importlib.util.find_spec(name) for name in ("cute_ep.layouts", "cute_ep.kernels")]
    return tuple(Path(spec.origin).parent for spec in specs if spec and spec.origin)


def source_hash() -> str:
    """Digest of the sources of layouts and kernels: a cubin made from others is never launched."""
    digest = hashlib.sha256()
    for root in source_folders():
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where kernels that are built on demand go (XDG cache folder)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_ep"


def build_arguments(variant: Variant) -> list[str]:
    """Arguments of `cute-ep` that build `variant` into the user's cache."""
    words = ["build", "--arch", variant.arch]
    if variant.format:
        words += ["--format", variant.format]
    if variant.hidden:
        words += ["--hidden", str(variant.hidden)]
    if variant.top_k:
        words += ["--top-k", str(variant.top_k)]
    if variant.hidden or variant.top_k:
        words.append("--specialise")
    return [*words, "--out", str(cache_folder())]


def build_command(variant: Variant) -> str:
    """The command line that builds `variant` into the user's cache."""
    return shlex.join(["cute-ep", *build_arguments(variant)])


@dataclass(frozen=True)
class LibraryEntry:
    """One row of a manifest, with the cubin's path made absolute.

    params: (name, "i32" | "i64") in the order of the kernel's parameter buffer.
    """

    variant: Variant
    path: Path
    sha256: str
    source_hash: str
    dsl: str
    entry: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    params: tuple[tuple[str, str], ...]

    def read(self) -> bytes:
        """The cubin's bytes; VariantMissing when they do not match the manifest."""
        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise VariantMissing(
                f"{self.path}: content does not match the manifest; rebuild: {build_command(self.variant)}"
            )
        return data

    def to_json(self) -> dict:
        """The manifest row."""
        variant = self.variant
        return {
            "symbol": variant.symbol,
            "kernel": variant.kernel,
            "format": variant.format,
            "hidden": variant.hidden,
            "top_k": variant.top_k,
            "arch": variant.arch,
            "cubin": f"{variant.arch}/{variant.symbol}.cubin",
            "sha256": self.sha256,
            "source_hash": self.source_hash,
            "dsl": self.dsl,
            "entry": self.entry,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "smem_bytes": self.smem_bytes,
            "params": [list(param) for param in self.params],
        }


def read_manifest(folder: Path) -> dict[Variant, LibraryEntry]:
    """Entries of one library folder; empty when it has no manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    entries = {}
    for row in json.loads(path.read_text())["variants"]:
        variant = Variant(row["kernel"], row["arch"], row["format"], row["hidden"], row["top_k"])
        entries[variant] = LibraryEntry(
            variant=variant,
            path=folder / row["cubin"],
            sha256=row["sha256"],
            source_hash=row["source_hash"],
            dsl=row["dsl"],
            entry=row["entry"],
            registers=row["registers"],
            spill_bytes=row["spill_bytes"],
            smem_bytes=row["smem_bytes"],
            params=tuple((name, kind) for name, kind in row["params"]),
        )
    return entries


class Library:
    """Finds the cubin of a kernel.

    Args:
        folder: searched before the wheel's and the user's folders.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folders = [Path(folder)] if folder else []
        self.folders += [PACKAGE_FOLDER, cache_folder()]
        self.entries: dict[Variant, LibraryEntry] = {}
        self.reload()

    def reload(self) -> None:
        """Read the manifests again (after a build). Entries made from other sources do not count."""
        current = source_hash()
        self.entries = {}
        for path in reversed(self.folders):
            found = read_manifest(path)
            self.entries |= {variant: entry for variant, entry in found.items() if entry.source_hash == current}

    def find(self, kernel: str, arch: str, fmt: str | None, hidden: int, top_k: int | None) -> LibraryEntry:
        """The most specialised variant that serves these sizes; built into the user's cache where the DSL is installed.

        Raises:
            VariantMissing: there is none, and no DSL (or it failed); the message holds the command that builds it.
        """
        general = Variant(kernel, arch, fmt)
        for variant in (Variant(kernel, arch, fmt, hidden, top_k), Variant(kernel, arch, fmt, hidden), general):
            if variant in self.entries:
                return self.entries[variant]
        if dsl_version() is not None and arch in ARCHITECTURES:
            sys.stderr.write(f"cute_ep: building {general.symbol} for {arch}\n")
            subprocess.run([sys.executable, "-m", "cute_ep.cli", *build_arguments(general)], check=False)
            self.reload()
        if general in self.entries:
            return self.entries[general]
        folders = ", ".join(str(folder) for folder in self.folders)
        raise VariantMissing(f"no {general.symbol} for {arch} in {folders}; build it: {build_command(general)}")
