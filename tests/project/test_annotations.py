"""Types in the signatures of device code and layouts, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("kernels", "layouts") for path in (ROOT / folder).rglob("*.py")
)
MAY_SAY_ANY = {"kernels/codec/__init__.py": "codecs of formats without row scales have no `row_scale`"}
"""Files in which a type may be Any, and why."""


def untyped(source: str) -> list[str]:
    """`function(parameter)` of each parameter without a type; `self` and `cls` need none, nor do lambdas."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            stars = [star for star in (given.vararg, given.kwarg) if star is not None]
            for parameter in (*given.posonlyargs, *given.args, *stars, *given.kwonlyargs):
                if parameter.annotation is None and parameter.arg not in ("self", "cls"):
                    found.append(f"{node.name}({parameter.arg})")
    return found


def says_any(source: str) -> bool:
    """Whether the name Any is used, or stands in an annotation that is a string."""
    nodes = list(ast.walk(ast.parse(source)))
    for node in ast.walk(ast.parse(source)):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            nodes += ast.walk(ast.parse(annotation.value))
    names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}
    return "Any" in names


@pytest.mark.parametrize("path", SOURCES)
def test_every_parameter_has_a_type(path: str) -> None:
    assert untyped((ROOT / path).read_text()) == []


def test_no_type_is_any_without_a_reason() -> None:
    assert [path for path in SOURCES if says_any((ROOT / path).read_text())] == list(MAY_SAY_ANY)


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("class A:\n    def f(self, a, b: int, *c, d, **e): ...", ["f(a)", "f(c)", "f(e)", "f(d)"]),
        ("def f():\n    def g(a, /): ...", ["g(a)"]),
        ("def f(a: int, *b: int, **c: int): ...", []),
    ],
    ids=["method", "nested", "typed"],
)
def test_a_parameter_without_a_type_is_found(source: str, parameters: list[str]) -> None:
    assert untyped(source) == parameters


@pytest.mark.parametrize("source", ["a: dict[str, Any]", "def f() -> typing.Any: ...", 'def f(a: "Any"): ...'])
def test_any_is_found(source: str) -> None:
    assert says_any(source)
