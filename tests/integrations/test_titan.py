"""torchtitan's token dispatch and its MoE models over cute_ep, in processes over gloo. No requirement of the tests
installs torchtitan, so most machines have only what stands in for it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import upstream
from tests.processes import ROOT, WITHOUT_GPU, run_ranks

ADAPTER = "cute_ep.integrations.torchtitan"
STUBS = ROOT / "tests" / "integrations" / "stubs"
needs_torchtitan = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "spmd_types", "tyro")),
    reason="needs torchtitan: pip install torchtitan==0.3.0",
)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports find what stands in for torchtitan, and import the adapter anew."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if f"{name}.".startswith(("torchtitan.", f"{ADAPTER}."))]

    monkeypatch.syspath_prepend(STUBS)
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in loaded():
        del sys.modules[name]


@pytest.mark.usefixtures("stubs")
def test_methods_and_stubs_take_what_torchtitan_gives() -> None:
    """By signatures that were read from its wheel."""
    theirs = upstream.build(upstream.load("torchtitan"))
    dispatcher: Any = theirs["torchtitan.models.common.token_dispatcher"].BaseEPTokenDispatcher  # type: ignore[attr-defined]
    assert not upstream.differences(importlib.import_module(ADAPTER).CuteEPTokenDispatcher, dispatcher)
    for function in ("derive", "override"):
        ours = inspect.signature(getattr(importlib.import_module("torchtitan.config"), function)).parameters
        want = inspect.signature(getattr(theirs["torchtitan.config.override"], function)).parameters
        assert {name: one.kind for name, one in ours.items()}.items() <= {k: v.kind for k, v in want.items()}.items()


@pytest.mark.usefixtures("stubs")
def test_overrides_are_found_by_the_paths_that_pages_name() -> None:
    """torchtitan takes the module that defines a factory for its path."""
    importlib.import_module(ADAPTER)
    assert set(importlib.import_module("torchtitan.config").OVERRIDES) == {
        f"{ADAPTER}.cute_ep_dispatcher",
        f"{ADAPTER}.cute_ep_selective_ac",
    }


def run(module: str, folder: Path, *first: Path) -> None:
    path = {"PYTHONPATH": os.pathsep.join(map(str, [*first, ROOT]))}
    run_ranks(f"tests.integrations.{module}", 2, folder / "store", environment=[WITHOUT_GPU | path] * 2, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [pytest.param([STUBS], id="stub"), pytest.param([], id="real", marks=needs_torchtitan)]
)
def test_rows_sums_and_gradients_are_those_of_a_dense_layer(tmp_path: Path, first: list[Path]) -> None:
    run("titan_worker", tmp_path, *first)


@pytest.mark.slow
@needs_torchtitan
def test_a_model_trains_as_with_the_standard_dispatcher(tmp_path: Path) -> None:
    """Also with activation checkpointing and compiled."""
    run("titan_training", tmp_path)
