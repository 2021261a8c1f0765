"""Rows move in one way, `move` with the atoms of `kernels/device/atoms.py`: what other files of kernels have of their
own does not move rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
ATOMS = "device/atoms.py"
ELSEWHERE = {
    "codec/fp8.py clamp_pair": "minimum of two bfloat16 at once, with the sign of one",
    "device/arith.py add": "rounded on its own, never part of an fma",
    "device/arith.py multiply": "the same",
    "device/arith.py opaque": "hides a value from the compiler",
    "device/arith.py unit_amax": "maximum of two bfloat16 at once",
    "device/slices.py draw": "a ticket of a CTA: an atomic of shared memory that counts around",
    "device/sync.py twin_all": "a barrier that has a number and reduces",
}
"""File and function -> why the DSL's own words do not do."""
ACCESS = re.compile(r"(?<!barrier\.cta\.)\b(ld|st|red|cp|prefetch|atom\.global)\.")


def with_ptx() -> Iterator[tuple[str, str]]:
    """("file function", source) of functions that call `inline_ptx`."""
    for path in KERNELS.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                if any(getattr(one, "attr", None) == "inline_ptx" for one in ast.walk(node)):
                    yield f"{path.relative_to(KERNELS)} {node.name}", ast.get_source_segment(source, node) or ""


def test_ptx_outside_of_the_atoms_moves_nothing() -> None:
    found = {name: source for name, source in with_ptx() if not name.startswith(ATOMS)}
    assert found.keys() == ELSEWHERE.keys()
    for name, source in found.items():
        assert not ACCESS.search(source), name


def test_atoms_are_copy_atoms_but_two() -> None:
    """Those whose reasons stand in the file: loads that are polled or streamed, and bulk copies."""
    assert {name for name, _ in with_ptx() if name.startswith(ATOMS)} == {f"{ATOMS} _load", f"{ATOMS} bulk"}


def test_a_load_would_be_seen() -> None:
    assert ACCESS.search('inline_ptx("ld.global.b32 {$w0}, [{$r0}];")')


# ---- copies


COPIES = {"copy", "autovec_copy", "basic_copy", "make_tiled_copy_tv", "make_copy_atom"}
"""Of `cute`: what would move a row beside `move`."""


def calls_of(names: set[str], source: str) -> Iterator[tuple[str, ast.Call]]:
    """(function, call) of calls of attributes with these names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for one in ast.walk(node):
                if isinstance(one, ast.Call) and getattr(one.func, "attr", None) in names:
                    yield node.name, one


def test_only_the_mover_copies() -> None:
    found = set()
    for path in KERNELS.rglob("*.py"):
        name = str(path.relative_to(KERNELS))
        if name != ATOMS:
            found |= {f"{name} {function}" for function, _ in calls_of(COPIES, path.read_text())}
    assert not found


def test_a_copy_would_be_seen() -> None:
    assert [name for name, _ in calls_of(COPIES, "def f(a, b):\n    cute.copy(a, b)\n")] == ["f"]
