"""What changes between releases of cuda-python and torch is touched in one file each, which has tests of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("cute_ep", "perf", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(("cute_ep/kernels/", "cute_ep/layouts/"))
]
DRIVER_FILE, TORCH_FILE = "cute_ep/runtime/driver_calls.py", "cute_ep/torch_internals.py"
MOVING = ("torch.distributed.distributed_c10d",)
"""Modules of torch that are private though their names do not say so."""
OF_OBJECTS = {
    name
    for kind in (torch.Tensor, torch.nn.Module, torch.distributed.ProcessGroup, torch.autograd.Function)
    for name in dir(kind)
    if name.startswith("_") and not name.startswith("__")
} | {"_get_backend", "_timeout"}
"""Private attributes of what torch makes."""


def names_of(tree: ast.AST) -> dict[str, str]:
    """By the name in a file, the dotted name of what it has imported."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{one.name}" for one in node.names)


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name that an expression has, "" where it has none."""
    if isinstance(node, ast.Attribute):
        above = dotted(node.value, names)
        return above and f"{above}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Whether a dotted name is a part of torch that may go in any release."""
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and (hidden or name.startswith(MOVING))


def private_torch(source: str) -> set[str]:
    """The private parts of torch that a file touches."""
    tree = ast.parse(source)
    names = names_of(tree)
    found = set(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(dotted(node, names))
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr in OF_OBJECTS and not own:
                found.add(f"torch.{node.attr}")
        elif isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            found |= {f"torch.{name}" for name in methods & OF_OBJECTS}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if isinstance(node.args[1], ast.Constant):
                found.add(f"{dotted(node.args[0], names)}.{node.args[1].value}")
    return {name for name in found if is_private(name)}


def driver_imports(source: str) -> set[str]:
    """What a file imports of cuda-python."""
    return {name for name in imported(ast.parse(source)) if name.split(".")[0] == "cuda"}


def test_one_file_touches_the_types_of_the_driver() -> None:
    assert [path for path in SOURCES if driver_imports((ROOT / path).read_text())] == [DRIVER_FILE]


@pytest.mark.parametrize("path", SOURCES)
def test_one_file_touches_private_torch(path: str) -> None:
    assert path == TORCH_FILE or not private_torch((ROOT / path).read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._cuda_getCurrentRawStream(0)",
        "import torch\ndef f():\n    return torch.cuda._sleep(1)",
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch import _dynamo",
        "from torch.autograd import _profiler_enabled",
        "from torch._higher_order_ops.effects import anything",
        "from torch.distributed._functional_collectives import all_to_all_single",
        "from torch.distributed.distributed_c10d import get_rank",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch.distributed as dist\ndist._get_default_group()",
        "import torch\ngetattr(torch, '_C')",
        "def f(x):\n    return x._version",
        "def f(group, device):\n    return group._get_backend(device)",
        "class A:\n    def _apply(self, fn):\n        return self",
    ],
)
def test_private_torch_is_found(source: str) -> None:
    assert private_torch(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compiler.reset(), torch.__version__, torch.nn.functional",
        "class A:\n    def f(self):\n        return self._version, self._x._y",
        "from cute_ep.torch_internals import versions_of",
        "import os\nos._exit(0)",
    ],
)
def test_the_rest_is_not(source: str) -> None:
    assert not private_torch(source)


@pytest.mark.parametrize("source", ["from cuda.bindings import driver", "import cuda.bindings.driver as d"])
def test_the_driver_is_found(source: str) -> None:
    assert driver_imports(source)
