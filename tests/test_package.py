"""What `import cute_ep` gives to its users."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import cute_ep

CALLS = "allocate dispatch dispatch_async dispatch_wait combine combine_async combine_wait".split()
PUBLIC = [cute_ep.connect, cute_ep.connect_local, cute_ep.quantize, cute_ep.fused_silu]
PUBLIC += [getattr(cute_ep.Communicator, name) for name in CALLS]


def test_every_name_is_listed_and_found() -> None:
    """By a process that has imported nothing else."""
    code = (
        "import cute_ep; listed = dir(cute_ep); assert set(cute_ep.__all__) <= set(listed), listed;"
        "cute_ep.distributed.DistributedEPCombine; [getattr(cute_ep, name) for name in listed];"
        "assert not hasattr(cute_ep, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


def classes(hint: Any) -> Iterator[type]:
    """The classes that a type hint names."""
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from classes(part)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__qualname__)
def test_types_of_public_functions_are_public(function: Any) -> None:
    ours = {
        one
        for hint in get_type_hints(function).values()
        for one in classes(hint)
        if one.__module__.startswith("cute_ep")
    }
    assert ours and all(getattr(cute_ep, one.__name__, None) is one for one in ours), ours
