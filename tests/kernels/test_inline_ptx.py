"""Where kernels have PTX of their own: rows move by the atoms of `kernels/device/atoms.py`."""

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
}
"""File and function -> why the DSL's own words do not do."""
ACCESS = re.compile(r"\b(ld|st|red|cp|prefetch|atom\.global)\.")


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


def test_a_load_would_be_seen() -> None:
    assert ACCESS.search('inline_ptx("ld.global.b32 {$w0}, [{$r0}];")')
