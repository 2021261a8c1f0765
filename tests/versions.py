"""Runs tests with the oldest releases that pyproject.toml takes, with the oldest torch of `cute_ep.ops`, and with the
newest releases that pip finds:

    python -m tests.versions [NAME ...]

Each in an environment of its own in build/versions, 5 to 7 GB. torch's builds for CUDA serve: no GPU is used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "numpy", "setuptools>=77"]
CORE = ["tests/test_torch_internals.py", "tests/runtime", "tests/api", "tests/cli"]
OPS = ["tests/ops", "tests/nn"]


class Versions(NamedTuple):
    """What is installed, as pip takes it, and the tests that run with it."""

    packages: list[str]
    tests: list[str]


def oldest_of_ops() -> str:
    """The oldest torch that `cute_ep.ops` takes, which only it can say."""
    (found,) = re.findall(r'^OLDEST_TORCH = "(.+)"', (ROOT / "cute_ep/ops/library.py").read_text(), re.MULTILINE)
    return found


def exactly(requirement: str) -> str:
    """The first release that "name>=1.2" takes."""
    name, _, version = requirement.partition(">=")
    return f"{name}=={version}{'.0' * (2 - version.count('.'))}"


def sets() -> dict[str, Versions]:
    """By name."""
    bounds = PROJECT["dependencies"]
    with_ops = [f"torch>={oldest_of_ops()}" if one.startswith("torch>=") else one for one in bounds]
    dsl = PROJECT["optional-dependencies"]["build"]
    return {
        # torch 2.7 names no cuda-bindings, so the oldest too can be had
        "oldest": Versions([exactly("cuda-bindings>=12.9"), *map(exactly, bounds), *dsl], CORE),
        "oldest-ops": Versions([*map(exactly, with_ops), *dsl], CORE + OPS),
        "newest": Versions([one.partition(">=")[0] for one in bounds] + dsl, CORE + OPS),
    }


def prepare(name: str, packages: list[str]) -> Path:
    """The python of an environment with these packages."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / name)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-cache-dir", "--upgrade"]
    subprocess.run([*pip, *packages, *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
    return python


def main() -> None:
    """Run from the command line."""
    jobs = str(os.cpu_count() or 2)
    failed = []
    for name in sys.argv[1:] or sets():
        packages, tests = sets()[name]
        python = prepare(name, packages)
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-n", jobs, "--dist", "worksteal", *tests]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
