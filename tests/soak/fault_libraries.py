"""Faults of the kernel library: what is wrong with it is an error that says what to do, and never a launch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

import cute_ep
from cute_ep.aot import library as runtime
from cute_ep.aot.library import MANIFEST, Library, LibraryEntry, source_hash
from cute_ep.api.errors import EPConfigError, VariantMissing
from cute_ep.layouts.maps.variants import ARCHITECTURES, Variant
from cute_ep.runtime.driver import architecture

from .group import expect, group_of, small_input

KERNEL = "dispatch_wait"
"""The kernel that is damaged; all configurations have it."""


def _made_up(folder: Path, arch: str) -> None:
    """A library of one cubin that is none."""
    data = b"cubin" * 100
    path = folder / arch / f"{KERNEL}.cubin"
    path.parent.mkdir()
    path.write_bytes(data)
    digest, made_of = hashlib.sha256(data).hexdigest(), source_hash()
    variant = Variant(KERNEL, arch, None)
    entry = LibraryEntry(variant, path, digest, made_of, "", KERNEL, 0, 0, 0, 0.0, ())
    row = entry.to_json() | {"cubin": str(path.relative_to(folder))}
    (folder / MANIFEST).write_text(json.dumps({"version": cute_ep.__version__, "variants": [row]}))


@contextmanager
def _alone(devices: Sequence[str], library: Path | None) -> Iterator[tuple[Path, dict, Path, Callable[[], object]]]:
    """A library of its own that is the only one, where no DSL is installed: (folder, manifest, a cubin in it, what uses
    that)."""
    with TemporaryDirectory() as name:
        folder, empty = Path(name) / "library", Path(name) / "empty"
        empty.mkdir()
        on_gpu = devices[0] != "cpu"
        arch = architecture(torch.device(devices[0])) if on_gpu else ARCHITECTURES[0]
        if on_gpu:
            shutil.copytree(library or runtime.PACKAGE_FOLDER, folder, ignore=shutil.ignore_patterns("*.lock"))
        else:
            folder.mkdir()
            _made_up(folder, arch)
        manifest = json.loads((folder / MANIFEST).read_text())
        (row,) = [row for row in manifest["variants"] if (row["kernel"], row["arch"]) == (KERNEL, arch)]

        def use() -> None:
            if on_gpu:
                with group_of(devices, folder, small_input(len(devices))):
                    pass
            else:
                Library(folder).find(KERNEL, arch).read()

        with (
            mock.patch.object(runtime, "PACKAGE_FOLDER", empty),
            mock.patch.object(runtime, "cache_folder", lambda: empty),
            mock.patch.object(runtime, "dsl_version", lambda: None),
        ):
            use()  # as it is, nothing is wrong
            yield folder, manifest, folder / row["cubin"], use


def damaged_cubin(devices: Sequence[str], library: Path | None) -> str:
    """A cubin that lacks its end, or has another byte, or is gone: VariantMissing with the command that builds it."""
    with _alone(devices, library) as (_, _, cubin, use):
        data = cubin.read_bytes()
        for wrong in (data[: len(data) // 2], b"", data[:50] + bytes([data[50] ^ 1]) + data[51:]):
            cubin.write_bytes(wrong)
            said = expect(VariantMissing, "rebuild: cute-ep build", use)
        cubin.unlink()
        expect(VariantMissing, "build it: cute-ep build", use)
        cubin.write_bytes(data)
        use()
    return said


def stale_cubin(devices: Sequence[str], library: Path | None) -> str:
    """A cubin that was made from other sources: VariantMissing with the command that builds it."""
    with _alone(devices, library) as (folder, manifest, cubin, use):
        for row in manifest["variants"]:
            if folder / row["cubin"] == cubin:
                row["source_hash"] = "0" * 16
        (folder / MANIFEST).write_text(json.dumps(manifest))
        return expect(VariantMissing, "build it: cute-ep build", use)


def corrupt_manifest(devices: Sequence[str], library: Path | None) -> str:
    """A manifest that lacks its end, its rows, or fields, or is of another kind: EPConfigError that names it."""
    with _alone(devices, library) as (folder, manifest, _, use):
        path = folder / MANIFEST
        text = path.read_text()
        rows = [{name: value for name, value in row.items() if name != "params"} for row in manifest["variants"]]
        for wrong in (text[:-40], "", "[]", "\0" * 64, json.dumps(manifest | {"variants": rows}), '{"variants": []}'):
            path.write_text(wrong)
            said = expect(EPConfigError, f"{path}: no manifest", use)
        path.write_text(text)
        use()
    return said.replace(str(folder.parent), "...")
