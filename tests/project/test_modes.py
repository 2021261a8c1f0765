"""Combine's mode: "partial" wherever an argument or a field has a default, and named in every call of our own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMBINES = {"combine", "plan_combine", "combine_async", "combine_into"}
"""Names of calls that take a mode."""
OTHERS = {
    "cute_ep/integrations/flashinfer/alltoall.py": {"communication"},
    "cute_ep/integrations/transformers/attachment.py": {"one"},
    "perf/adapter_works.py": {"buffer"},
    "perf/beside.py": {"work"},
    "perf/framework_works.py": {"comm", "manager", "dispatcher"},
    "perf/deepep_works.py": {"buffer"},
    "perf/elastic_works.py": {"buffer"},
    "perf/flashinfer_works.py": {"one_sided"},
    "perf/nccl_ep_works.py": {"own.handle"},
    "perf/peer_timing.py": {"work"},
}
"""By file: whose `combine` takes no mode, those of adapters' and other libraries' interfaces."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package and of perf, by its path."""
    paths = sorted(path for folder in ("cute_ep", "perf") for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def combines(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(what the method is called of, the call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COMBINES:
            yield ast.unparse(node.func.value), node


def defaults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, default) of arguments and fields that are called mode and have one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = node.args
            placed = [*given.posonlyargs, *given.args]
            pairs = [*zip(placed[len(placed) - len(given.defaults) :], given.defaults, strict=True)]
            pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
            for argument, value in pairs:
                if argument.arg == "mode" and value is not None:
                    yield value.lineno, ast.unparse(value)
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == "mode" and field.value is not None:
                    yield field.lineno, ast.unparse(field.value)


@pytest.mark.parametrize("path", sources())
def test_every_call_of_ours_names_its_mode(path: str) -> None:
    unnamed = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for owner, call in combines(sources()[path])
        if owner not in OTHERS.get(path, ()) and not owner.startswith("torch.ops.")
        if not any(keyword.arg == "mode" for keyword in call.keywords)
    ]
    assert not unnamed, "name the mode by its keyword"


def test_the_mode_is_named_in_many_calls_and_all_exceptions_are_met() -> None:
    owners = {path: {owner for owner, _ in combines(tree)} for path, tree in sources().items()}
    assert {path: own & owners[path] for path, own in OTHERS.items()} == OTHERS
    assert sum(len(own - OTHERS.get(path, set())) for path, own in owners.items()) > 12


def test_the_default_is_partial() -> None:
    found = [(path, line, value) for path, tree in sources().items() for line, value in defaults(tree)]
    assert len(found) >= 10 and {value for *_, value in found} == {"'partial'"}, found
