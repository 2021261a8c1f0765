"""The source of the kernels as a syntax tree, for tests of how it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def files() -> Iterator[tuple[str, str]]:
    """(path, source) of each file of kernels."""
    for path in sorted(KERNELS.rglob("*.py")):
        yield path.relative_to(KERNELS).as_posix(), path.read_text()


def nodes(source: str) -> Iterator[tuple[str, ast.AST]]:
    """(function, node) of each node; a function in a function belongs to the outer one, and what is in none to
    "module"."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if name == "module" and isinstance(child, ast.FunctionDef) else name
            yield inside, child
            yield from below(child, inside)

    return below(ast.parse(source), "module")


def functions(source: str) -> Iterator[ast.FunctionDef]:
    """Functions and methods that are in no other function."""
    for name, node in nodes(source):
        if isinstance(node, ast.FunctionDef) and name == node.name:
            yield node


def dotted(node: ast.AST) -> str:
    """A name with its attributes, "a.b.c"; "" for what is none."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
