"""The library on disk: names, manifest, what is rebuilt when, and what a broken or missing cubin says."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cute_ep import library
from cute_ep.build import build
from cute_ep.cubin import read_resources
from cute_ep.errors import VariantMissing
from cute_ep.layouts.variants import ARCHITECTURES, Variant, variants
from cute_ep.library import MANIFEST, Library, LibraryEntry, build_command, dsl_version, read_manifest, source_hash

from .conftest import FOLDER

COPY = Variant("copy", "sm_90a")
"""The variant that compiles fastest."""


def check_unique(wanted: Iterable[Variant]) -> None:
    """AssertionError when two variants would have the same kernel and file name."""
    names = Counter((variant.arch, variant.symbol) for variant in set(wanted))
    shared = [name for name, count in names.items() if count > 1]
    assert not shared, f"variants share {shared}"


@pytest.fixture
def private(library: dict[Variant, LibraryEntry], tmp_path: Path) -> Path:
    """A library folder of its own with the copy kernel only."""
    entry = library[COPY]
    target = tmp_path / entry.path.relative_to(FOLDER)
    target.parent.mkdir(parents=True)
    shutil.copy(entry.path, target)
    manifest = {"version": "0", "dsl": dsl_version(), "variants": [entry.to_json()]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    return tmp_path


def test_symbols_are_unique() -> None:
    special = [v for hidden in (7168, 2880) for top_k in (4, 8) for v in variants(hidden=hidden, top_k=top_k)]
    check_unique([*variants(), *special])


@pytest.mark.parametrize("forgotten", ["format", "hidden", "top_k"])
def test_a_shared_symbol_is_noticed(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """The check above fails as soon as the symbol leaves one field of the key out."""
    complete = Variant.symbol.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Variant, "symbol", property(lambda one: complete(replace(one, **{forgotten: None}))))
    with pytest.raises(AssertionError, match="variants share"):
        test_symbols_are_unique()


def test_every_variant_is_a_file_of_its_own(library: dict[Variant, LibraryEntry]) -> None:
    assert set(library) == set(variants())
    assert {v.arch for v in library} == set(ARCHITECTURES)
    paths = {entry.path for entry in library.values()}
    assert len(paths) == len(library)
    for variant, entry in library.items():
        assert entry.path == FOLDER / variant.arch / f"{variant.symbol}.cubin"
        assert entry.entry.startswith(variant.symbol)
        assert entry.source_hash == source_hash()


def test_manifest_round_trip(library: dict[Variant, LibraryEntry]) -> None:
    read = read_manifest(FOLDER)
    assert {variant: read[variant] for variant in library} == library
    for entry in library.values():
        data = entry.read()
        assert hashlib.sha256(data).hexdigest() == entry.sha256
        resources = read_resources(data)
        assert (resources.entry, resources.registers, resources.spill_bytes) == (
            entry.entry,
            entry.registers,
            entry.spill_bytes,
        )


def test_parameters_are_those_of_the_kernel(library: dict[Variant, LibraryEntry]) -> None:
    """Names are unique, and split and fused kernels of one operation take the same arguments."""
    for variant, entry in library.items():
        names = [name for name, _ in entry.params]
        assert len(set(names)) == len(names)
        assert {kind for _, kind in entry.params} <= {"i32", "i64"}
        fused = replace(variant, kernel=re.sub(r"_(async|wait)\b|_(async|wait)(?=_)", "", variant.kernel))
        assert library[fused].params == entry.params


def test_build_is_incremental(private: Path) -> None:
    before = (private / "sm_90a" / f"{COPY.symbol}.cubin").stat().st_mtime_ns
    compiled: list[bool] = []
    build([COPY], private, on_done=lambda _, fresh: compiled.append(fresh))
    assert compiled == [False]
    assert (private / "sm_90a" / f"{COPY.symbol}.cubin").stat().st_mtime_ns == before


@pytest.mark.parametrize("harm", ["stale", "missing"])
def test_stale_or_missing_is_rebuilt(private: Path, harm: str) -> None:
    manifest = private / MANIFEST
    path = private / "sm_90a" / f"{COPY.symbol}.cubin"
    good = path.read_bytes()
    if harm == "stale":
        content = json.loads(manifest.read_text())
        content["variants"][0]["source_hash"] = "0" * 16
        manifest.write_text(json.dumps(content))
        path.write_bytes(b"of another version")
    else:
        path.unlink()
    compiled: list[bool] = []
    (entry,) = build([COPY], private, on_done=lambda _, fresh: compiled.append(fresh))
    assert compiled == [True]
    assert entry.source_hash == source_hash()
    assert entry.read() == good, "compilation is deterministic"


def test_source_hash_covers_every_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = source_hash()
    layouts, kernels = library.source_folders()
    shutil.copytree(kernels, tmp_path / "kernels")
    monkeypatch.setattr(library, "source_folders", lambda: (layouts, tmp_path / "kernels"))
    assert source_hash() == original
    changed = tmp_path / "kernels" / "codec" / "e2m1.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert source_hash() != original


def test_corrupt_cubin_is_refused(private: Path) -> None:
    path = private / "sm_90a" / f"{COPY.symbol}.cubin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(VariantMissing, match="does not match the manifest"):
        Library(private).find("copy", "sm_90a", None, 0, None).read()


def commanded(message: str) -> list[Variant]:
    """The variants that the command at the end of an error message builds."""
    from cute_ep.cli import make_parser
    from cute_ep.commands.build import wanted_variants

    words = shlex.split(message[message.index("cute-ep build") :])
    return wanted_variants(make_parser().parse_args(words[1:]))


@pytest.fixture
def empty_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cute_ep.library.PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr("cute_ep.library.dsl_version", lambda: None)
    return Library()


@pytest.mark.parametrize("variant", variants(("sm_90a", "sm_120a")), ids=lambda v: f"{v.arch}-{v.symbol}")
def test_missing_variant_names_the_command(empty_library: Library, variant: Variant) -> None:
    """The message ends in a command line that the program accepts and that builds what is missing."""
    with pytest.raises(VariantMissing) as caught:
        empty_library.find(variant.kernel, variant.arch, variant.format, 7168, 8)
    assert variant.symbol in str(caught.value)
    assert variant in commanded(str(caught.value))
    assert variant in commanded(build_command(variant))


@pytest.mark.slow
def test_the_command_works(empty_library: Library) -> None:
    from cute_ep.cli import main

    with pytest.raises(VariantMissing) as caught:
        empty_library.find("combine_wait_exact", "sm_90a", None, 7168, 8)
    message = str(caught.value)
    words = shlex.split(message[message.index("cute-ep build") :])
    assert main([*words[1:], "--kernel", "combine_wait_exact"]) == 0
    empty_library.reload()
    assert empty_library.find("combine_wait_exact", "sm_90a", None, 7168, 8).read()[:4] == b"\x7fELF"


def test_the_most_specialised_variant_wins(library: dict[Variant, LibraryEntry], tmp_path: Path) -> None:
    general = Variant("dispatch", "sm_90a", "bf16")
    rows = [general, replace(general, hidden=7168), replace(general, hidden=7168, top_k=8)]
    written = [replace(library[general], variant=row).to_json() for row in rows]
    (tmp_path / MANIFEST).write_text(json.dumps({"variants": written}))
    found = Library(tmp_path)
    for hidden, top_k, expected in ((7168, 8, rows[2]), (7168, 4, rows[1]), (4096, 8, rows[0])):
        assert found.find("dispatch", "sm_90a", "bf16", hidden, top_k).variant == expected


def test_not_a_cubin() -> None:
    with pytest.raises(ValueError, match="ELF"):
        read_resources(b"MZ" + bytes(100))


def test_missing_variant_is_built_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the DSL is installed, a kernel that no folder has is built on first use, without asking."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "none")
    entry = Library().find(COPY.kernel, COPY.arch, None, 0, None)
    assert entry.path == library.cache_folder() / "sm_90a" / f"{COPY.symbol}.cubin"
    assert entry.read()[:4] == b"\x7fELF"
    assert Library().find(COPY.kernel, COPY.arch, None, 0, None) == entry
