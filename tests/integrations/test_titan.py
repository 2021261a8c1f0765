"""torchtitan's token dispatch and its MoE models over cute_ep, in processes over gloo. No requirement of the tests
installs torchtitan, so most machines have only what stands in for it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import ROOT, WITHOUT_GPU, run_ranks

STUBS = ROOT / "tests" / "integrations" / "stubs"
needs_torchtitan = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "spmd_types", "tyro")),
    reason="needs torchtitan: pip install torchtitan==0.3.0",
)


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
