"""No call of cute_ep waits for a GPU in a way that holds up other ranks of the process, read from the sources: copies
to pageable memory, and whatever a garbage collector may call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .test_imports import ROOT, sources

ELSEWHERE = (
    "cute_ep/aot/",
    "cute_ep/bench/",
    "cute_ep/cli/",
    "cute_ep/reference/",
    "cute_ep/testing/",
    "kernels/",
    "layouts/",
)
"""Programs of one thread, and what runs on a CPU only."""
PAGEABLE = {"tolist", "cpu", "item", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
"""Methods and functions that copy from a device to pageable memory and wait for it."""
HOST = "cute_ep/api/host.py"
COPIES = {
    (HOST, "host_list", "tolist"): "of the host's memory",
    ("cute_ep/runtime/flags.py", "_late", "nonzero"): "of the host's memory",
    ("cute_ep/runtime/flags.py", "_late", "tolist"): "of the host's memory",
    ("cute_ep/runtime/flags.py", "_dispatch", "nonzero"): "of the host's memory",
    ("cute_ep/runtime/flags.py", "_dispatch", "unique"): "of the host's memory",
    ("cute_ep/runtime/local_ops.py", "quantize", "item"): "on a CPU only",
    ("cute_ep/runtime/local_ops.py", "fused_silu", "tolist"): "on a CPU only",
    (
        "cute_ep/integrations/torchtitan/dispatcher.py",
        "_rows_by_collective",
        "to",
    ): "of compiled code, in a process per rank",
}
"""(file, function, name) of calls that are allowed, and why."""
COLLECTED = {
    ("cute_ep/reference/processes.py", "mail.close"): "closes sockets",
    ("cute_ep/runtime/local_pool.py", "_ABANDONED.append"): "leaves closing to the next call",
    ("cute_ep/integrations/transformers/attachment.py", "self._abandon"): "leaves closing to the next call",
}
"""(file, callback) of finalizers, and what they do."""


def calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """(name of the innermost function, call) of all calls."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call):
            yield inside, node
        yield from calls(node, inside)


def goes_to_the_cpu(call: ast.Call) -> bool:
    """Whether it is `to("cpu")`, or is given `device="cpu"` or page-locked memory under any name."""
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "device")]
    return any(isinstance(one, ast.Constant) and str(one.value).startswith("cpu") for one in given)


def pageable(text: str) -> Iterator[tuple[str, str]]:
    """(function, name) of calls that copy to pageable memory, or make page-locked memory by hand."""
    for function, call in calls(ast.parse(text)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in PAGEABLE or (name == "to" and goes_to_the_cpu(call)):
            yield function, name
        if any(one.arg == "pin_memory" for one in call.keywords) or name == "pin_memory":
            yield function, "pin_memory"


def finalizers(text: str) -> Iterator[str]:
    """Callbacks of `weakref.finalize`, and of `weakref.ref` and `__del__`."""
    for function, call in calls(ast.parse(text)):
        name = ast.unparse(call.func)
        if name in ("weakref.finalize", "finalize") or (name in ("weakref.ref", "ref") and len(call.args) > 1):
            yield ast.unparse(call.args[1])
        if function == "__del__":
            yield "__del__"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(x):\n    return x.sum().tolist()", [("f", "tolist")]),
        ("async def f(x):\n    return [g(x.cpu()) for _ in x]", [("f", "cpu")]),
        ("class A:\n    def f(self, x):\n        def g():\n            return int(x.to('cpu'))", [("g", "to")]),
        ("def f(x):\n    return x.to(device='cpu:0'), x.to(x.device)", [("f", "to")]),
        ("torch.nonzero(x)", [("", "nonzero")]),
        ("torch.empty(3, pin_memory=True)", [("", "pin_memory")]),
        ("torch.tensor(3, device='cpu')", []),
    ],
)
def test_copies_to_pageable_memory_are_found(text: str, found: list) -> None:
    assert list(pageable(text)) == found


def test_finalizers_are_found() -> None:
    text = "weakref.finalize(a, b.c, 1)\nweakref.ref(a)\nweakref.ref(a, d)\ndef __del__(self):\n    self.close()"
    assert list(finalizers(text)) == ["b.c", "d", "__del__"]


def test_numbers_of_a_gpu_come_to_the_host_by_one_file() -> None:
    used = {
        (path, *one)
        for path in sources()
        if not path.startswith(ELSEWHERE)
        for one in pageable((ROOT / path).read_text())
    }
    assert used - {(HOST, "host_memory", "pin_memory")} == COPIES.keys()


def test_a_garbage_collector_waits_for_nothing() -> None:
    used = {(path, one) for path in sources() for one in finalizers((ROOT / path).read_text())}
    assert used == COLLECTED.keys()
