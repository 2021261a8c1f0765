"""Ahead-of-time build: variants to cubins and a manifest, in parallel, skipping what is up to date.

The only module of the runtime package that imports the kernels, and only inside its worker processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import cute_ep
from cute_ep.aot.cubin import find_nvdisasm, read_resources
from cute_ep.aot.library import MANIFEST, LibraryEntry, dsl_install, dsl_version, read_manifest, source_hash
from cute_ep.api.errors import EPConfigError, EPError, VariantMissing
from cute_ep.layouts.maps.variants import Variant

LOG = logging.getLogger(__name__)
LOCK = "manifest.lock"
"""Beside a manifest: who changes it holds this file."""


def build_one(variant: Variant, folder: Path, keep: Path | None = None) -> LibraryEntry:
    """Compile one variant and write its cubin (by atomic rename), with `keep` as `build` says."""
    from cute_ep.kernels.build import compile_variant

    started = time.perf_counter()
    compiled = compile_variant(variant, line_info=keep is not None)
    seconds = round(time.perf_counter() - started, 2)
    resources = read_resources(compiled.cubin)
    path = folder / variant.arch / f"{variant.symbol}.cubin"
    _write(path, compiled.cubin)
    if keep is not None:
        place = keep / variant.arch / variant.symbol
        _write(place.with_suffix(".ptx"), compiled.ptx.encode())
        if (nvdisasm := find_nvdisasm()) is not None:
            said = subprocess.run([nvdisasm, "-c", "-g", str(path)], capture_output=True, check=True)
            _write(place.with_suffix(".sass"), said.stdout)
    return LibraryEntry(
        variant=variant,
        path=path,
        sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        source_hash=source_hash(variant.hooks),
        dsl=str(dsl_version()),
        entry=resources.entry,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        smem_bytes=compiled.shared_bytes,
        seconds=seconds,
        params=compiled.params,
    )


def build(
    wanted: Iterable[Variant],
    folder: Path,
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    on_done: Callable[[Variant, bool], None] | None = None,
) -> list[LibraryEntry]:
    """Bring `folder` up to date with `wanted`; other entries of its manifest stay.

    Args:
        wanted: variants to have.
        folder: library folder, created when missing.
        jobs: worker processes (default: one per core).
        keep: a folder that gets the PTX of all of `wanted`, and where there is an nvdisasm their SASS, as
            architecture/symbol.ptx and .sass. All are compiled, with line info: both name source lines, and so do
            profilers of the kernels in `folder`.
        on_done: called with each variant and whether it was compiled (False: it was up to date).

    Returns:
        The entries of `wanted`, in order.

    Raises:
        EPConfigError: `folder` or `keep` cannot be made.
        EPError: the DSL is not installed, or a variant does not compile; finished ones are kept.
    """
    wanted = list(wanted)
    if dsl_version() is None:
        raise EPError(f"the CuTe DSL is not installed: {dsl_install()}")
    _make_folder("folder", folder)
    if keep is not None:
        _make_folder("keep", keep)
    entries = {} if keep else _fresh(folder)
    made: dict[Variant, LibraryEntry] = {}
    todo = [variant for variant in wanted if variant not in entries]
    for variant in wanted:
        if variant not in todo and on_done:
            on_done(variant, False)
    try:
        if todo:
            LOG.info("compiling %d kernels into %s, about one per second and core", len(todo), folder)
            context = multiprocessing.get_context("spawn")
            workers = min(jobs or os.cpu_count() or 1, len(todo))
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                futures = {pool.submit(build_one, variant, folder, keep): variant for variant in todo}
                for future in as_completed(futures):
                    variant = futures[future]
                    try:
                        made[variant] = future.result()
                    except Exception as error:
                        raise EPError(f"{variant.symbol} ({variant.arch}) did not compile: {error}") from error
                    if on_done:
                        on_done(variant, True)
    finally:
        add_to_manifest(folder, made)
    entries |= made
    return [entries[variant] for variant in wanted]


def _fresh(folder: Path) -> dict[Variant, LibraryEntry]:
    """Entries of a library folder that this DSL would make again from the sources as they are."""
    return {
        variant: entry
        for variant, entry in read_manifest(folder).items()
        if (entry.source_hash, entry.dsl) == (source_hash(variant.hooks), dsl_version()) and entry.path.exists()
    }


def copy_kernels(wanted: Iterable[Variant], folder: Path, source: Path) -> None:
    """Copy into `folder` what it lacks of `wanted` and library folder `source` has whole, of the same sources and DSL:
    `build` then finds it up to date. EPConfigError: `folder` cannot be made."""
    _make_folder("folder", folder)
    here, there = _fresh(folder), _fresh(source)
    made = {}
    for variant in wanted:
        if variant in here or variant not in there:
            continue
        with suppress(VariantMissing):
            path = folder / variant.arch / f"{variant.symbol}.cubin"
            _write(path, there[variant].read())
            made[variant] = replace(there[variant], path=path)
    add_to_manifest(folder, made)


def add_to_manifest(folder: Path, made: dict[Variant, LibraryEntry]) -> None:
    """Add to a folder's manifest, which other processes may be adding to."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = read_manifest(folder) | made
        rows = [entries[variant].to_json() for variant in sorted(entries, key=lambda v: (v.arch, v.symbol))]
        manifest = {"version": cute_ep.__version__, "variants": rows}
        _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _make_folder(name: str, place: Path) -> None:
    """EPConfigError, with the argument's name, where there can be no such folder."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EPConfigError(f"{name} = {str(place)!r}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
        temporary.write(data)
    os.chmod(temporary.name, 0o644)
    os.replace(temporary.name, path)
