"""Holds `cute_ep.runtime.driver_calls` against releases of cuda-bindings that users may have:

    python -m tests.bindings [VERSION ...]

Each is unpacked into a folder of its own in build/bindings and found before the environment's, which stays as it is.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "bindings"
NEWEST = "newest"
VERSIONS = ("12.9.0", "12.9.10", "13.0.0", NEWEST)
"""The oldest that pyproject.toml takes; those with another IPC handle, and with other enums; the first of CUDA 13."""
TESTS = "tests/runtime/test_driver_calls.py"


def unpack(version: str) -> tuple[Path, str]:
    """A folder that has cuda-bindings and what it imports, and which version that is. CalledProcessError: pip cannot
    have it, and says why."""
    folder = FOLDER / version
    if version == NEWEST or not installed(folder):
        wanted = "cuda-bindings" if version == NEWEST else f"cuda-bindings=={version}"
        words = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
        command = [sys.executable, "-m", "pip", "install", *words, wanted, "cuda-pathfinder"]
        subprocess.run(command, check=True)
    return folder, installed(folder)


def installed(folder: Path) -> str:
    """The version of cuda-bindings in a folder; "": there is none, or not all of it."""
    found = [one.version for one in importlib.metadata.distributions(name="cuda-bindings", path=[str(folder)])]
    return found[0] if len(found) == 1 and (folder / "cuda" / "bindings").is_dir() else ""


def test(version: str) -> tuple[bool, str]:
    """Whether a version, or NEWEST, passes, and what is to be said about it."""
    try:
        folder, found = unpack(version)
    except subprocess.CalledProcessError:
        return False, f"cuda-bindings {version}: pip could not unpack it (above)"
    if version != NEWEST and found != version:
        return False, f"cuda-bindings {version}: {folder} has {found or 'none'}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--cuda-bindings={found}"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, TESTS], cwd=ROOT, env=environment, capture_output=True, text=True)
    passed = done.returncode == 0
    return passed, f"cuda-bindings {found}: {'passed' if passed else done.stdout[-4000:] + done.stderr[-4000:]}"


def main() -> None:
    """Run from the command line."""
    versions = sys.argv[1:] or VERSIONS
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(test, versions))
    for _, text in results:
        sys.stdout.write(f"{text}\n")
    sys.exit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
