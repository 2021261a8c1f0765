"""What `import cute_ep` gives to its users."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import cute_ep

CALLS = "allocate dispatch dispatch_async dispatch_wait combine combine_async combine_wait".split()
PUBLIC = [cute_ep.connect, cute_ep.connect_local, cute_ep.quantize, cute_ep.fused_silu]
PUBLIC += [getattr(cute_ep.Communicator, name) for name in CALLS]

ROOT = Path(__file__).parents[2]


def test_every_name_is_listed_and_found() -> None:
    """By a process that has imported nothing else."""
    code = (
        "import cute_ep; listed = dir(cute_ep); assert set(cute_ep.__all__) <= set(listed), listed;"
        "cute_ep.distributed.DistributedEPCombine; [getattr(cute_ep, name) for name in listed];"
        "assert not hasattr(cute_ep, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_library_that_logs_prints_nothing() -> None:
    """Neither on its own nor through Python's handler of last resort; an application's handlers see it."""
    code = (
        "import logging, sys, cute_ep; logger = logging.getLogger('cute_ep.test');"
        "logger.warning('not shown'); logging.basicConfig(stream=sys.stdout, level='INFO'); logger.info('shown')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("INFO:cute_ep.test:shown\n", "")


def test_metadata_changelog_and_package_have_one_version() -> None:
    """One version; the classifiers name no Python that the package does not take."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == cute_ep.__version__
    versions = re.findall(r"^## (\S+?)(?:, \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [version for version in versions if version != "Unreleased"]
    assert released[0] == cute_ep.__version__ and versions in (released, ["Unreleased", *released])
    python = "Programming Language :: Python :: "
    named = [one.removeprefix(python) for one in project["classifiers"] if re.fullmatch(rf"{python}\d\.\d+", one)]
    oldest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert named and min(tuple(map(int, one.split("."))) for one in named) == oldest


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
