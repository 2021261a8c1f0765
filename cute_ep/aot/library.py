"""The kernel library on disk: `<folder>/<arch>/<symbol>.cubin` and `<folder>/manifest.json`.

Folders are searched in this order: the one given by the caller, the one in the wheel, the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import cute_ep
from cute_ep.api.errors import EPConfigError, VariantMissing
from cute_ep.layouts.maps.variants import ARCHITECTURES, NO_HOOKS, Hooks, Variant

LOG = logging.getLogger(__name__)
PACKAGE_FOLDER = Path(cute_ep.__file__).parent / "library"
MANIFEST = "manifest.json"
DSL_PACKAGE = "nvidia-cutlass-dsl"


def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, None where there is none."""
    try:
        return version(DSL_PACKAGE)
    except PackageNotFoundError:
        return None


def dsl_install() -> str:
    """The command that installs the DSL, in the version that this package's metadata asks for; in any version where
    the package has no metadata, since it runs from a folder."""
    try:
        needed = requires("cute-ep") or []
    except PackageNotFoundError:
        needed = []
    found = (one.partition(";")[0].strip() for one in needed if one.startswith(DSL_PACKAGE))
    return f"pip install {next(found, DSL_PACKAGE)}"


def source_folders() -> tuple[Path, ...]:
    """Where the sources are that a cubin is made from. Finding them imports nothing."""
    specs = [importlib.util.find_spec(name) for name in ("cute_ep.layouts", "cute_ep.kernels")]
    return tuple(Path(spec.origin).resolve().parent for spec in specs if spec and spec.origin)


@cache
def source_hash(hooks: Hooks = NO_HOOKS) -> str:
    """Digest of the sources of layouts, kernels and hooks: a cubin made from others is never launched."""
    digest = hashlib.sha256()
    for root in source_folders():
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    for name in filter(None, asdict(hooks).values()):
        with suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(name.partition(":")[0])
            if spec is not None and spec.origin is not None:
                digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where kernels that are built on demand go (XDG cache folder)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_ep"


def build_arguments(variant: Variant) -> list[str]:
    """Arguments of `cute-ep` that build `variant` into the user's cache."""
    words = ["build", "--arch", variant.arch]
    if variant.format:
        words += ["--format", variant.format]
    for field in fields(variant.hooks):
        if name := getattr(variant.hooks, field.name):
            words += [f"--{field.name.replace('_', '-')}", name]
    return [*words, "--out", str(cache_folder())]


def build_command(variant: Variant) -> str:
    """The command line that builds `variant` into the user's cache."""
    return shlex.join(["cute-ep", *build_arguments(variant)])


@dataclass(frozen=True)
class LibraryEntry:
    """One row of a manifest, with the cubin's path made absolute.

    seconds: time it took to compile. params: (name, "i32" | "i64") in the order of the kernel's parameter buffer.
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
    seconds: float
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
            "hooks": asdict(variant.hooks),
            "arch": variant.arch,
            "cubin": f"{variant.arch}/{variant.symbol}.cubin",
            "sha256": self.sha256,
            "source_hash": self.source_hash,
            "dsl": self.dsl,
            "entry": self.entry,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "smem_bytes": self.smem_bytes,
            "seconds": self.seconds,
            "params": [list(param) for param in self.params],
        }


def read_manifest(folder: Path) -> dict[Variant, LibraryEntry]:
    """Entries of one library folder; empty when it has no manifest, or one of another version of this package.

    Raises:
        EPConfigError: the manifest is damaged; the message names it.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        return _entries(folder, content["variants"]) if content["version"] == cute_ep.__version__ else {}
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise EPConfigError(f"{path}: no manifest ({type(error).__name__}: {error}); remove the file") from None


def _entries(folder: Path, rows: list[dict]) -> dict[Variant, LibraryEntry]:
    entries = {}
    for row in rows:
        variant = Variant(row["kernel"], row["arch"], row["format"], Hooks(**row["hooks"]))
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
            seconds=row["seconds"],
            params=tuple((name, kind) for name, kind in row["params"]),
        )
    return entries


class Library:
    """Finds the cubin of a kernel.

    Args:
        folder: searched before the wheel's and the user's folders.

    Raises:
        EPConfigError: it is no folder, or a manifest is damaged.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        if folder and not (isinstance(folder, str | os.PathLike) and Path(folder).is_dir()):
            raise EPConfigError(f"library = {str(folder)!r}: must be a folder")
        self.folders = [Path(folder)] if folder else []
        self.folders += [PACKAGE_FOLDER, cache_folder()]
        self.entries: dict[Variant, LibraryEntry] = {}
        self.reload()

    def reload(self) -> None:
        """Read the manifests again (after a build). Entries made from other sources do not count."""
        self.entries = {}
        for path in reversed(self.folders):
            found = read_manifest(path)
            self.entries |= {
                variant: entry
                for variant, entry in found.items()
                if entry.source_hash == source_hash(variant.hooks) and entry.path.exists()
            }

    def find(self, kernel: str, arch: str, fmt: str | None = None, hooks: Hooks = NO_HOOKS) -> LibraryEntry:
        """The variant of `kernel` with those of the hooks that it calls; built into the user's cache where the DSL is
        installed.

        Raises:
            VariantMissing: there is none for such GPUs at all; or there is none here, and no DSL (or it failed, which
                the message then says): the message holds the command that builds it.
        """
        if arch not in ARCHITECTURES:
            raise VariantMissing(f"{arch}: there are kernels for {', '.join(ARCHITECTURES)} only")
        wanted = Variant(kernel, arch, fmt, hooks.of_kernel(kernel))
        if wanted in self.entries:
            return self.entries[wanted]
        failure = ""
        if dsl_version() is not None:
            LOG.info("no %s for %s yet: compiling its kernels into %s", wanted.symbol, arch, cache_folder())
            command = [sys.executable, "-m", "cute_ep", *build_arguments(wanted)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                failure = f" (building it has failed: {' '.join(done.stderr.split()) or f'exit {done.returncode}'})"
            self.reload()
        if wanted in self.entries:
            return self.entries[wanted]
        folders = ", ".join(str(folder) for folder in self.folders)
        raise VariantMissing(f"no {wanted.symbol} for {arch} in {folders}{failure}; build it: {build_command(wanted)}")
