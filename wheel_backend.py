"""Build backend of this project: setuptools, and the kernels of all architectures inside every wheel.

Loaded by pip as a module of its own (`backend-path` in pyproject.toml), outside the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

ROOT = Path(__file__).resolve().parent
LIBRARY = ROOT / "cute_ep" / "library"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPILER = [
    *PROJECT["optional-dependencies"]["build"],
    *(one for one in PROJECT["dependencies"] if one.startswith("rich")),
]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """What setuptools needs, and the compiler."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *COMPILER]


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Compile the library (about a second a kernel and core, no GPU), then build the wheel that contains it."""
    shutil.rmtree(LIBRARY, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            package = Path(scratch) / "cute_ep"
            shutil.copytree(ROOT / "cute_ep", package)
            for part in ("kernels", "layouts"):
                shutil.copytree(ROOT / part, package / part)
            command = [sys.executable, "-m", "cute_ep.cli", "build", "--out", str(LIBRARY)]
            paths = os.pathsep.join([scratch, *sys.path])
            subprocess.run(command, cwd=scratch, env={**os.environ, "PYTHONPATH": paths}, check=True)
        if not (LIBRARY / "manifest.json").exists():
            raise RuntimeError("the kernels were not built")
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(LIBRARY, ignore_errors=True)
