"""Where the library's own tensors are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "cute_ep"
FOLDERS = ("api", "runtime", "ops", "nn", "integrations")
FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "tensor", "zeros"}
FACTORIES |= {"rand", "randint", "randn", "randperm"}


def without_device(source: str) -> list[str]:
    """Calls of torch that make a tensor on its default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func) in {f"torch.{name}" for name in FACTORIES}]
    return [ast.unparse(one) for one in made if not {"device", None} & {word.arg for word in one.keywords}]


@pytest.mark.parametrize("folder", FOLDERS)
def test_new_tensors_name_their_device(folder: str) -> None:
    """Callers set torch's default device, as DeepEP's tests do."""
    found = {path.name: without_device(path.read_text()) for path in (SOURCES / folder).rglob("*.py")}
    assert found and not any(found.values()), found


def test_a_call_without_a_device_is_found() -> None:
    assert without_device("torch.empty(3, pin_memory=True)\ntorch.ones(2, device=x)\ntorch.full(*a, **b)") == [
        "torch.empty(3, pin_memory=True)"
    ]
