"""Reading signatures from a release, and the stubs that tests of adapters run on."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import upstream

LIBRARY = '''
import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
import helpers as hp

Kind = Literal["a", "b"]

class Shape(enum.Enum):
    Flat = 1
    Deep = ("deep",)

@dataclass
class Counts:
    """A docstring."""
    each: list[int]
    _hidden: int = 3
    more: list = field(default_factory=list)
    limit: int | None = None

class Base(ABC, hp.Unknown):
    def __init__(self, size, *, device="cpu"):
        self.size = size
    @property
    @abstractmethod
    def shape(self) -> Shape: ...
    @abstractmethod
    def send(self, x: torch.Tensor, ids: torch.Tensor, limit: int = LIMIT) -> Counts:
        return work(x)
    def _private(self): ...

if FAST:
    def helper(x, *, scale=1.0): return x
'''


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(upstream.WANTED, "lib", {"lib.core": ["Kind", "Shape", "Counts", "Base", "helper"]})
    monkeypatch.setattr(upstream, "FOLDER", tmp_path / "json")
    path = tmp_path / "lib-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("lib/core.py", LIBRARY)
    return path


def test_a_release_is_read_without_importing_it(wheel: Path) -> None:
    upstream.main("lib", str(wheel))
    known = json.loads((upstream.FOLDER / "lib.json").read_text())
    assert known["release"] == wheel.name and known["version"] == "1.2.0"
    assert known["modules"]["lib.core"]["Counts"] == [
        "@dataclass",
        "class Counts:",
        "    each: list[int]",
        "    _hidden: int = 3",
        "    more: list = ...",
        "    limit: int | None = None",
    ]
    assert known["modules"]["lib.core"]["Base"][-2:] == [
        "    @abstractmethod",
        "    def send(self, x: torch.Tensor, ids: torch.Tensor, limit: int=...) -> Counts: ...",
    ]
    assert known["modules"]["lib.core"]["helper"] == ["def helper(x, *, scale=1.0): ..."]


def test_a_folder_gives_the_same(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "source")
    of_wheel, of_folder = upstream.read("lib", wheel), upstream.read("lib", tmp_path / "source", "1.2.0")
    assert of_wheel["modules"] == of_folder["modules"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"lib.core": ["Gone", "Base.size", "Base.width"], "lib.none": ["x"]}, "lib.core.Base.width, lib.none.x"),
        ({"lib.core": ["Base.gone"]}, "lib.core.Base.gone"),
    ],
    ids=["names", "member"],
)
def test_what_is_gone_is_named(wheel: Path, wanted: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.WANTED, "lib", wanted)
    with pytest.raises(LookupError, match=message):
        upstream.read("lib", wheel)


def test_members_alone_can_be_wanted(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.WANTED, "lib", {"lib.core": ["Base.size", "Base._private"]})
    lines = upstream.read("lib", wheel)["modules"]["lib.core"]["Base"]
    assert lines == ["class Base(ABC, hp.Unknown):", "    def _private(self): ...", "    size: object"]


def test_stubs_are_imported_in_place_of_the_library(wheel: Path) -> None:
    upstream.main("lib", str(wheel))
    with upstream.installed("lib") as made:
        core = importlib.import_module("lib.core")
        assert core is made["lib.core"] and importlib.import_module("lib").__version__ == "1.2.0"
        assert core.Shape.Deep.value == ("deep",) and core.Counts([1]).limit is None and core.Counts([1])._hidden == 3
        with pytest.raises(TypeError, match="abstract"):
            core.Base(3)
        with pytest.raises(NotImplementedError):
            core.helper(3, scale=2)
        with pytest.raises(TypeError, match="unexpected"):
            core.helper(3, factor=2)
    assert not [name for name in sys.modules if name.split(".")[0] == "lib"]


@pytest.mark.parametrize(
    ("send", "right"),
    [
        (lambda self, x, ids, limit=4: None, True),
        (lambda self, x, ids, limit=4, more=None, **rest: None, True),
        (lambda self, x, ids: None, False),
        (lambda self, x, ids, limit: None, False),
        (lambda self, ids, x, limit=4: None, False),
        (lambda self, x, ids, limit=4, *, more: None, False),
    ],
    ids=["same", "more", "fewer", "no default", "order", "needs more"],
)
def test_an_override_that_callers_cannot_use_is_found(wheel: Path, send: Callable, right: bool) -> None:
    upstream.main("lib", str(wheel))
    with upstream.installed("lib") as made:
        base: Any = made["lib.core"].Base  # type: ignore[attr-defined]
        found = upstream.differences(type("Adapter", (base,), {"send": send}), base)
    assert (not found) if right else found[0].startswith("send(self")


@pytest.mark.parametrize("framework", [path.stem for path in sorted(upstream.FOLDER.glob("*.json"))])
def test_the_files_have_what_is_wanted(framework: str) -> None:
    known = upstream.load(framework)
    assert set(known["modules"]) == set(upstream.WANTED[framework])
    for module, names in upstream.WANTED[framework].items():
        assert set(known["modules"][module]) == {name.partition(".")[0] for name in names}
    assert set(upstream.build(known)) >= set(known["modules"])
