"""Archives of frameworks for machines without a network."""

from __future__ import annotations

import json
import struct
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.integrations.offline import CUBIN, FATBIN, SETS, Frameworks, lean, unpack

PTX = 1
SIGNATURES = Path(__file__).parent / "upstream"


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """One of (kind, architecture, image) entries, with headers of 64 bytes."""
    made = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(image)) + bytes(12) + struct.pack("<I", architecture) + bytes(32) + image
        for kind, architecture, image in entries
    )
    return FATBIN + struct.pack("<HQ", 16, len(made)) + made


def test_a_lean_library_keeps_one_architecture() -> None:
    images = {"a": b"a" * 24, "b": b"b" * 16, "c": b"c" * 8, "d": b"d" * 8}
    first = fat_binary((CUBIN, 80, images["a"]), (CUBIN, 90, images["b"]))
    second = fat_binary((PTX, 90, images["c"]), (CUBIN, 90, images["d"]))
    library = b"code" + FATBIN + b"no fat binary" + first + b"more" + second
    made = lean(library, 90)
    assert made == library.replace(images["a"], bytes(24)).replace(images["c"], bytes(8))


def test_files_are_left_out_by_pattern(tmp_path: Path) -> None:
    wheel = tmp_path / "one.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in ("one/__init__.py", "one/csrc/deep/kernel.cu", "one/data/big.bin", "one/libs/fat.so"):
            files.writestr(name, fat_binary((CUBIN, 80, b"x" * 8)))
    unpack(wheel, Frameworks("one", ("*.cu", "one/data/*"), ("one/libs/fat.so",)), tmp_path / "site")
    found = {
        str(path.relative_to(tmp_path / "site")): path for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert sorted(found) == ["one/__init__.py", "one/libs/fat.so"]
    assert b"x" not in found["one/libs/fat.so"].read_bytes() and b"x" in found["one/__init__.py"].read_bytes()


@pytest.mark.parametrize("name", ["transformers", "megatron-core"])
def test_versions_are_those_that_ci_has(name: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wanted,) = [one for one in project["optional-dependencies"]["test"] if one.startswith(f"{name}==")]
    assert wanted in SETS["frameworks"].packages.split()


@pytest.mark.parametrize("path", sorted(SIGNATURES.glob("*.json")), ids=lambda path: path.stem)
def test_versions_are_those_of_the_stubs(path: Path) -> None:
    packed = " ".join(one.packages for one in SETS.values()).split()
    version = json.loads(path.read_text())["version"]
    assert {f"{path.stem}=={version}", f"{path.stem}-python=={version}"} & set(packed)
