"""The kernel library on disk: `<folder>/<arch>/<symbol>.cubin` and `<folder>/manifest.json`.

Folders are searched in this order: the one given by the caller, the one in the wheel, the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from cute_ep.errors import VariantMissing
from cute_ep.layouts.variants import Variant

PACKAGE_FOLDER = Path(__file__).parent / "library"
MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """Where kernels that are built on demand go (XDG cache folder)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_ep"


def build_command(variant: Variant) -> str:
    """The command line that builds `variant` into the user's cache."""
    words = ["cute-ep", "build", "--arch", variant.arch]
    if variant.format:
        words += ["--format", variant.format]
    if variant.hidden:
        words += ["--hidden", str(variant.hidden)]
    if variant.top_k:
        words += ["--top-k", str(variant.top_k)]
    if variant.hidden or variant.top_k:
        words.append("--specialise")
    return shlex.join([*words, "--out", str(cache_folder())])


@dataclass(frozen=True)
class LibraryEntry:
    """One row of a manifest, with the cubin's path made absolute.

    params: (name, "i32" | "i64") in the order of the kernel's parameter buffer.
    """

    variant: Variant
    path: Path
    sha256: str
    source_hash: str
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
        """Read the manifests again (after a build)."""
        self.entries = {}
        for path in reversed(self.folders):
            self.entries.update(read_manifest(path))

    def find(self, kernel: str, arch: str, fmt: str | None, hidden: int, top_k: int | None) -> LibraryEntry:
        """The most specialised variant that serves these sizes.

        Raises:
            VariantMissing: there is none; the message holds the command that builds it.
        """
        wanted = [
            Variant(kernel, arch, fmt, hidden, top_k),
            Variant(kernel, arch, fmt, hidden),
            Variant(kernel, arch, fmt),
        ]
        for variant in wanted:
            if variant in self.entries:
                return self.entries[variant]
        folders = ", ".join(str(folder) for folder in self.folders)
        raise VariantMissing(f"no {wanted[-1].symbol} for {arch} in {folders}; build it: {build_command(wanted[-1])}")
