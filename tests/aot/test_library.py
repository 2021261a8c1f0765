"""The library on disk: names, manifest, what is rebuilt when, and what a broken or missing cubin says."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import cute_ep
from cute_ep.aot import library
from cute_ep.aot.build import add_to_manifest, build, copy_kernels
from cute_ep.aot.cubin import read_resources
from cute_ep.aot.library import MANIFEST, Library, LibraryEntry, build_command, read_manifest, source_hash
from cute_ep.api.errors import EPConfigError, VariantMissing
from cute_ep.layouts.maps.variants import (
    ARCHITECTURES,
    DISPATCH_KERNELS,
    GATE_KERNELS,
    HOOKED_KERNELS,
    MAIL_KERNELS,
    NO_HOOKS,
    QUANTIZE_KERNEL,
    SEND_KERNELS,
    WEIGHING_KERNELS,
    Hooks,
    Variant,
    variants,
)

from .conftest import FOLDER, WANTED

COPY = Variant("copy", "sm_90a")
"""The variant that compiles fastest."""
SCALE = Hooks(epilogue="cute_ep.kernels.hooks:scale")
ALL_HOOKS = Hooks("cute_ep.kernels.hooks:scale", "package.one:read", "package.two:read")


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
    manifest = {"version": cute_ep.__version__, "variants": [entry.to_json()]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    return tmp_path


@pytest.fixture
def fresh_hash() -> Iterator[None]:
    """`source_hash` remembers what it read: forget it before and after a test that changes the sources."""
    source_hash.cache_clear()
    yield
    source_hash.cache_clear()


def test_symbols_are_unique() -> None:
    """Also with hooks: the same function in another place, or one of the same name in another module."""
    names = ("cute_ep.kernels.hooks:scale", "package.one:read", "package.two:read", None)
    hooks = {Hooks(*choice) for first in names for choice in ((first, None), (None, first), (None, None, first))}
    hooks |= {ALL_HOOKS, Hooks("package.one:read", "package.two:read"), Hooks("package.two:read", "package.one:read")}
    check_unique([*variants(), *(variant for one in hooks for variant in variants(hooks=one))])


@pytest.mark.parametrize("forgotten", [{"format": None}, {"hooks": NO_HOOKS}], ids=["format", "hooks"])
def test_a_shared_symbol_is_noticed(monkeypatch: pytest.MonkeyPatch, forgotten: dict) -> None:
    """The check above fails as soon as the symbol leaves one field of the key out."""
    complete = Variant.symbol.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Variant, "symbol", property(lambda one: complete(replace(one, **forgotten))))
    with pytest.raises(AssertionError, match="variants share"):
        test_symbols_are_unique()


def test_kernels_have_the_hooks_that_they_call() -> None:
    """Sends read weights and the scale, sums end in the epilogue and read weights where none have travelled; no other
    kernel has a variant."""
    made = {(variant.kernel, variant.hooks) for variant in variants(hooks=ALL_HOOKS)}
    sends = {(kernel, replace(ALL_HOOKS, epilogue=None)) for kernel in SEND_KERNELS}
    weighing = {(kernel, replace(ALL_HOOKS, input_scale=None)) for kernel in WEIGHING_KERNELS}
    others = set(HOOKED_KERNELS) - set(WEIGHING_KERNELS)
    assert made == sends | weighing | {(kernel, Hooks(epilogue=ALL_HOOKS.epilogue)) for kernel in others}
    combines = {name for name in HOOKED_KERNELS if name.startswith("combine")}
    assert {v.kernel for v in variants(hooks=SCALE)} == set(HOOKED_KERNELS) == combines
    assert {v.kernel for v in variants(hooks=Hooks(input_scale="a:b"))} == set(SEND_KERNELS) <= set(DISPATCH_KERNELS)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"version": "VERSION"}', '{"version": "VERSION", "variants": [{}]}']
)
def test_a_damaged_manifest_is_named(tmp_path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text.replace("VERSION", cute_ep.__version__))
    with pytest.raises(EPConfigError, match=re.escape(str(tmp_path / MANIFEST)) + ".*remove the file"):
        Library(tmp_path)


def test_a_library_is_a_folder(tmp_path) -> None:
    """A slip in its name must not let other kernels be measured."""
    with pytest.raises(EPConfigError, match="must be a folder"):
        Library(tmp_path / "missing")


def test_every_variant_is_a_file_of_its_own(library: dict[Variant, LibraryEntry]) -> None:
    assert set(library) == set(WANTED) >= set(variants())
    assert {v.arch for v in library} == set(ARCHITECTURES)
    paths = {entry.path for entry in library.values()}
    assert len(paths) == len(library)
    for variant, entry in library.items():
        assert entry.path == FOLDER / variant.arch / f"{variant.symbol}.cubin"
        assert entry.entry.startswith(variant.symbol)
        assert entry.source_hash == source_hash(variant.hooks)


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
    """Names are unique, and all kernels of one operation take the same arguments in every format."""
    taken: dict[str, set] = {}
    for variant, entry in library.items():
        assert len({name for name, _ in entry.params}) == len(entry.params)
        assert {kind for _, kind in entry.params} <= {"i32", "i64"}
        alone = {name: name for name in MAIL_KERNELS} | dict.fromkeys(GATE_KERNELS, QUANTIZE_KERNEL)
        operation = alone.get(variant.kernel, variant.kernel.split("_")[0])
        taken.setdefault(operation, set()).add(entry.params)
    assert set(taken) == {*"dispatch combine quantize count tell label mark sum copy".split(), *MAIL_KERNELS}
    assert {operation: len(params) for operation, params in taken.items()} == dict.fromkeys(taken, 1)


def test_manifest_says_how_long_it_took(library: dict[Variant, LibraryEntry]) -> None:
    assert all(0 < entry.seconds < 600 for entry in library.values())


def test_manifest_of_another_version_does_not_count(private: Path) -> None:
    manifest = private / MANIFEST
    content = json.loads(manifest.read_text())
    assert set(read_manifest(private)) == {COPY}
    manifest.write_text(json.dumps(content | {"version": "0.0"}))
    assert not read_manifest(private)


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


def test_build_copies_what_another_folder_has(private: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whole cubins of the same sources, and of those only the wanted ones; what is damaged or stale is compiled."""
    good = read_manifest(private)[COPY]
    folder = tmp_path_factory.mktemp("library")
    done: list[tuple[Variant, bool]] = []

    def rebuild() -> LibraryEntry:
        shutil.rmtree(folder)
        copy_kernels([COPY], folder, private)
        (entry,) = build([COPY], folder, on_done=lambda *one: done.append(one))
        assert set(read_manifest(folder)) == {COPY} and entry.path.is_relative_to(folder)
        assert entry.read() == good.path.read_bytes() or entry.sha256 == good.sha256
        return entry

    other = replace(good, variant=replace(COPY, arch="sm_120a"))
    add_to_manifest(private, {other.variant: other})
    assert replace(rebuild(), path=good.path) == good and done.pop() == (COPY, False)
    good.path.write_bytes(b"damaged")
    assert rebuild().sha256 == good.sha256 and done.pop() == (COPY, True)
    good.path.write_bytes((folder / COPY.arch / f"{COPY.symbol}.cubin").read_bytes())
    add_to_manifest(private, {COPY: replace(good, source_hash="0" * 16)})
    rebuild()
    assert done.pop() == (COPY, True)


def test_source_hash_covers_every_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_hash: None) -> None:
    original = source_hash()
    layouts, kernels = library.source_folders()
    shutil.copytree(kernels, tmp_path / "kernels")
    monkeypatch.setattr(library, "source_folders", lambda: (layouts, tmp_path / "kernels"))
    source_hash.cache_clear()
    assert source_hash() == original
    changed = tmp_path / "kernels" / "codec" / "e2m1.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    source_hash.cache_clear()
    assert source_hash() != original


def test_source_hash_covers_the_hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_hash: None) -> None:
    """A changed hook makes its own variants stale and no others; one whose source is not found adds nothing."""
    package = tmp_path / "hooks_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    source = package / "inner.py"
    source.write_text("def double(coords, value, context): return value * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    plain, hooks = source_hash(), Hooks(epilogue="hooks_of_a_test.inner:double")
    first = source_hash(hooks)
    source.write_text("# another\n")
    source_hash.cache_clear()
    assert len({plain, first, source_hash(hooks)}) == 3 and source_hash() == plain
    source.unlink()
    importlib.invalidate_caches()
    source_hash.cache_clear()
    assert source_hash(hooks) == source_hash(Hooks(epilogue="no_such_package.inner:double")) == plain


def test_hooked_variant(library: dict[Variant, LibraryEntry], tmp_path: Path) -> None:
    """Built beside the plain one under another name, kept in the manifest, and found by its hooks only."""
    plain = Variant("combine_wait_exact", "sm_90a")
    (entry,) = build([replace(plain, hooks=SCALE)], tmp_path)
    assert read_manifest(tmp_path) == {entry.variant: entry}
    assert entry.to_json()["hooks"] == {"epilogue": SCALE.epilogue, "router_weights": None, "input_scale": None}
    assert "scale" in entry.path.name and entry.entry.startswith(entry.variant.symbol) != plain.symbol
    assert entry.sha256 != library[plain].sha256 and entry.params == library[plain].params
    shutil.copy(library[plain].path, entry.path.parent)
    (tmp_path / MANIFEST).write_text(
        json.dumps({"version": cute_ep.__version__, "variants": [entry.to_json(), library[plain].to_json()]})
    )
    found = Library(tmp_path)
    assert found.find("combine_wait_exact", "sm_90a", hooks=SCALE).variant == entry.variant
    assert found.find("combine_wait_exact", "sm_90a").variant == plain
    assert found.find("combine_wait_exact", "sm_90a", hooks=Hooks(input_scale="a:b")).variant == plain


@pytest.mark.parametrize("field", ["epilogue", "router_weights", "input_scale"])
@pytest.mark.parametrize("hook", [print, "nothing", "", ":sin", "math:", "math:a.b", "math sin:a", ("a:b",)])
def test_hooks_are_names(field: str, hook: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f'{field} = {hook!r}: must be "module:function" or None')):
        Hooks(**{field: hook})


@pytest.mark.parametrize("name", ["nothing", "no.such.module:function", "math:no_such_function", ":sin", "math:"])
def test_hook_that_names_nothing(name: str) -> None:
    pytest.importorskip("cutlass")
    from cute_ep.kernels.build import resolve

    with pytest.raises(ValueError, match=f"hook = '{name}': must be module:function"):
        resolve(name)
    assert resolve(None) is None and resolve("math:sin")(0) == 0


def test_corrupt_cubin_is_refused(private: Path) -> None:
    path = private / "sm_90a" / f"{COPY.symbol}.cubin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(VariantMissing, match="does not match the manifest"):
        Library(private).find("copy", "sm_90a").read()


def commanded(message: str) -> list[Variant]:
    """The variants that the command at the end of an error message builds."""
    from cute_ep.cli.build import wanted_variants
    from cute_ep.cli.main import make_parser

    words = shlex.split(message[message.index("cute-ep build") :])
    return wanted_variants(make_parser().parse_args(words[1:]))


@pytest.fixture
def empty_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    monkeypatch.setattr("cute_ep.aot.library.PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr("cute_ep.aot.library.dsl_version", lambda: None)
    return Library()


@pytest.mark.parametrize("hooks", [NO_HOOKS, SCALE, ALL_HOOKS], ids=["none", "scale", "all"])
def test_missing_variant_names_the_command(empty_library: Library, hooks: Hooks) -> None:
    """The message ends in a command line that the program accepts and that builds what is missing."""
    for variant in variants(("sm_90a", "sm_120a"), hooks=hooks):
        with pytest.raises(VariantMissing) as caught:
            empty_library.find(variant.kernel, variant.arch, variant.format, hooks)
        assert f"no {variant.symbol} for {variant.arch}" in str(caught.value)
        assert variant in commanded(str(caught.value))
        assert variant in commanded(build_command(variant))


@pytest.mark.slow
def test_the_command_works(empty_library: Library) -> None:
    from cute_ep.cli.main import main

    with pytest.raises(VariantMissing) as caught:
        empty_library.find("combine_wait_exact", "sm_90a", hooks=SCALE)
    message = str(caught.value)
    words = shlex.split(message[message.index("cute-ep build") :])
    assert main([*words[1:], "--kernel", "combine_wait_exact"]) == 0
    empty_library.reload()
    assert empty_library.find("combine_wait_exact", "sm_90a", hooks=SCALE).read()[:4] == b"\x7fELF"


def test_the_given_folder_comes_first(empty_library: Library, private: Path) -> None:
    """And what was made from other sources is not found anywhere."""
    entry = Library(private).find(COPY.kernel, COPY.arch)
    assert entry.path.is_relative_to(private)
    stale = replace(entry, source_hash="0" * 16).to_json()
    (private / MANIFEST).write_text(json.dumps({"version": cute_ep.__version__, "variants": [stale]}))
    with pytest.raises(VariantMissing, match="no cute_ep_copy for sm_90a"):
        Library(private).find(COPY.kernel, COPY.arch)


def test_a_cubin_that_is_gone_counts_as_missing(empty_library: Library, private: Path) -> None:
    """And does not hide a good one in a later folder."""
    Library(private).find(COPY.kernel, COPY.arch).path.unlink()
    assert not Library(private).entries


def test_gpus_without_kernels(empty_library: Library) -> None:
    with pytest.raises(VariantMissing, match="sm_80a: there are kernels for sm_90a, sm_100a, sm_103a, sm_120a only"):
        empty_library.find("copy", "sm_80a")


def test_builders_side_by_side_keep_each_other_s_entries(library: dict[Variant, LibraryEntry], tmp_path: Path) -> None:
    entries = list(library.values())[:8]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: add_to_manifest(tmp_path, {entry.variant: entry}), entries))
    assert set(read_manifest(tmp_path)) == {entry.variant for entry in entries}


def test_not_a_cubin() -> None:
    with pytest.raises(ValueError, match="ELF"):
        read_resources(b"MZ" + bytes(100))


def test_missing_variant_is_built_into_the_cache(
    own_cache: Path,
    capfd: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the DSL is installed, a kernel that no folder has is built on first use, without asking; the package's
    logger says so once, and nothing is printed."""
    caplog.set_level(logging.INFO, "cute_ep")
    wanted = Variant("combine_wait_exact", "sm_90a", hooks=SCALE)
    entry = Library().find(wanted.kernel, wanted.arch, hooks=SCALE)
    text = f"no {wanted.symbol} for sm_90a yet: compiling its kernels into {own_cache}"
    assert caplog.record_tuples == [("cute_ep.aot.library", logging.INFO, text)]
    assert capfd.readouterr() == ("", "")
    assert entry.path == own_cache / "sm_90a" / f"{wanted.symbol}.cubin"
    assert entry.read()[:4] == b"\x7fELF"
    assert Library().find(wanted.kernel, wanted.arch, hooks=SCALE) == entry
    assert set(read_manifest(own_cache)) == set(variants(("sm_90a",), hooks=SCALE))


def test_a_build_that_fails_is_named() -> None:
    """With what it said, and still with the command."""
    hooks = Hooks(epilogue="math:no_such_function")
    with pytest.raises(VariantMissing) as caught:
        Library().find("combine_wait_exact", "sm_90a", hooks=hooks)
    message = str(caught.value)
    assert "(building it has failed: " in message and "hook = 'math:no_such_function': must be" in message
    assert message.endswith(
        build_command(Variant("combine_wait_exact", "sm_90a", None, hooks.of_kernel("combine_wait_exact")))
    )
