"""Packages of libraries that exclude each other, or that want another NCCL than torch's: a folder for each library, by
its name in `perf.peer_list.LIBRARIES`, and one of NEW_NCCL."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from perf.peer_list import LIBRARIES, NEW_NCCL

NCCL = "new_nccl"
"""The folder of NEW_NCCL."""
TOOLKIT = Path("/usr/local/cuda")
"""Where nvcc is if neither CUDA_HOME nor PATH says it."""


def cuda_home() -> Path:
    """The folder of the CUDA toolkit. FileNotFoundError: there is no nvcc."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).parents[1], TOOLKIT]
    for root in filter(None, roots):
        if (Path(root) / "bin" / "nvcc").exists():
            return Path(root)
    raise FileNotFoundError(f"no nvcc in CUDA_HOME, PATH or {TOOLKIT}")


def environment_of(name: str, packages: Path | None) -> dict[str, str]:
    """Variables of a library's processes. FileNotFoundError, ModuleNotFoundError: what is missing."""
    library, folder = LIBRARIES[name], None if packages is None else packages.resolve() / name
    found = dict(library.environment)
    if library.new_nccl:
        root = None if packages is None else packages.resolve() / NCCL / "nvidia" / "nccl"
        if root is None or not (root / "lib" / "libnccl.so.2").exists():
            raise FileNotFoundError(f"no {NEW_NCCL} in {'a folder --packages' if root is None else packages}")
        found |= {
            "LD_PRELOAD": str(root / "lib" / "libnccl.so.2"),
            "EP_NCCL_ROOT_DIR": str(root),
            "NCCL_HOME": str(root),
        }
    if library.compiles:
        found["CUDA_HOME"] = str(cuda_home())
    if library.wheels and folder is not None and folder.is_dir():
        found["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    elif library.module is not None and importlib.util.find_spec(library.module.partition(".")[0]) is None:
        raise ModuleNotFoundError(f"no module {library.module}")
    return found


def wheel_commands(packages: str = "DIR") -> list[str]:
    """Commands that make the folders of packages."""
    folders = {NCCL: (NEW_NCCL,)} | {name: one.wheels for name, one in LIBRARIES.items() if one.wheels}
    return [f"pip install --no-deps --target {packages}/{name} {' '.join(own)}" for name, own in folders.items()]
