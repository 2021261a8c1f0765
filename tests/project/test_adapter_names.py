"""Names by which pages and entry points reach adapters, looked up in the sources: most libraries are not installed."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache

import pytest

from .test_imports import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "api").glob("*.rst")]
NAME = re.compile(r"\bcute_ep\.integrations(?:\.\w+)+")
SHORT = re.compile(r"from (cute_ep\.integrations[\w.]*) import (\w+)")


def pages() -> set[str]:
    """Every name of an adapter, or of a part of one, on a page."""
    texts = [page.read_text() for page in PAGES]
    found = {name for text in texts for name in NAME.findall(text)}
    return found | {".".join(pair) for text in texts for pair in SHORT.findall(text)}


def entry_points() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {one.replace(":", ".") for group in project["entry-points"].values() for one in group.values()}


@cache
def defined(module: str) -> dict[str, str] | None:
    """Names that a module defines or imports, and where those are from; None: there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(one): "" for one in targets}
    return found


def is_there(name: str) -> bool:
    """Whether a module has this name, or what defines it, or whether it is a module."""
    if defined(name) is not None:
        return True
    module, _, last = name.rpartition(".")
    own = defined(module)
    if own is None or last not in own:
        return False
    return not own[last].startswith("cute_ep.") or is_there(own[last])


@pytest.mark.parametrize("name", sorted(pages() | entry_points()))
def test_there_is_what_pages_and_entry_points_name(name: str) -> None:
    assert is_there(name)


def test_the_names_of_each_framework_are_among_them() -> None:
    rooms = {name.split(".")[2] for name in pages()}
    assert rooms >= {"deep_ep", "flashinfer", "megatron", "sglang", "torchtitan", "transformers", "vllm"}
    assert entry_points() == {"cute_ep.integrations.sglang.plugin", "cute_ep.integrations.vllm.register"}


@pytest.mark.parametrize("name", ["torchtitan.absent", "absent", "deep_ep.Buffer.absent", "transformers.__version__"])
def test_a_name_that_there_is_not_is_found(name: str) -> None:
    assert not is_there(f"cute_ep.integrations.{name}")
