"""Build backend of this project: setuptools, and compiled kernels inside every wheel.

Loaded by pip as a module of its own (`backend-path` in pyproject.toml), outside the package. Kernels are compiled into
build/library of the source tree, so what is there already and was made from the same sources is not compiled again.
`pip wheel . --config-settings arch=sm_90a` (`-C arch=sm_90a,sm_100a`) compiles and packs these architectures only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

ROOT = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "library"
PACKED = ROOT / "cute_ep" / "library"
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
    """Compile what is missing (about a second per kernel and core, no GPU), then build the wheel that contains it.

    Args:
        wheel_directory: where the wheel goes.
        config_settings: `arch`, architectures with commas between them (default all); the rest is for setuptools.
        metadata_directory: as for setuptools.

    Raises:
        ValueError: a setting that nothing reads.
        subprocess.CalledProcessError: compiling has failed, or there is no such architecture.
    """
    settings = dict(config_settings or {})
    arch = settings.pop("arch", None)
    for name in settings:
        if not name.startswith("--"):
            raise ValueError(f"config setting {name!r}: must be arch, or an option of setuptools (--build-option)")
    some = ["--arch", arch if isinstance(arch, str) else ",".join(arch)] if arch else []
    _forget()
    try:
        paths = os.pathsep.join([str(ROOT), *sys.path])
        for words in (["--out", str(BUILT)], ["--out", str(PACKED), "--reuse", str(BUILT)]):
            command = [sys.executable, "-m", "cute_ep", "build", *some, *words]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=True)
        if not (PACKED / "manifest.json").exists():
            raise RuntimeError("the kernels were not built")
        return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    finally:
        _forget()


def _forget() -> None:
    """Remove what an earlier wheel has left: setuptools packs everything that lies in its build/lib.PLATFORM."""
    for folder in (PACKED, *(ROOT / "build").glob("lib.*")):
        shutil.rmtree(folder, ignore_errors=True)
