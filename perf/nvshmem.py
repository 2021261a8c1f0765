"""Makes DeepEP's wheel load: NVSHMEM's host library in the process before torch, and a libmlx5 where there is none.

DeepEP links libnvshmem_host.so.3 by a path of its builder's machine; the copy in the nvidia-nvshmem package, loaded
with global symbols before, takes its place. Its low-latency kernels have NVSHMEM load the IBGDA plugin, which needs
libmlx5.so.1 to load, though not to work: without InfiniBand it then says that it cannot, and NVLink is used. On a
machine without that library a stub with its versioned symbols, each of which fails, is compiled and loaded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOST_LIBRARY = Path("nvidia", "nvshmem", "lib", "libnvshmem_host.so.3")
MLX5 = "libmlx5.so.1"
MLX5_SYMBOLS = {
    "MLX5_1.2": "init_obj",
    "MLX5_1.3": "create_qp",
    "MLX5_1.7": "devx_alloc_uar devx_free_uar devx_general_cmd devx_obj_create devx_obj_destroy devx_obj_modify "
    "devx_query_eqn devx_umem_dereg devx_umem_reg",
    "MLX5_1.19": "devx_umem_reg_ex",
}
"""Version node -> names, each after `mlx5dv_`, that the plugin imports."""


def loads(name: str) -> bool:
    """Whether the dynamic loader finds a library (which stays loaded)."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def compile_stub(folder: Path) -> Path:
    """The stub libmlx5 in `folder`; FileNotFoundError without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError(f"{MLX5}: there is none, and no C compiler to make a stub")
    names = {version: [f"mlx5dv_{word}" for word in words.split()] for version, words in MLX5_SYMBOLS.items()}
    source, versions = folder / "stub.c", folder / "stub.map"
    source.write_text("".join(f"int {name}() {{ return -1; }}\n" for every in names.values() for name in every))
    blocks, before = [], ""
    for version, every in names.items():
        hidden = "" if before else " local: *;"
        blocks.append(f"{version} {{ global: {'; '.join(every)};{hidden} }}{before};\n")
        before = f" {version}"
    versions.write_text("".join(blocks))
    target = folder / MLX5
    options = ["-shared", "-fPIC", f"-Wl,-soname,{MLX5}", f"-Wl,--version-script={versions}"]
    subprocess.run([compiler, *options, "-o", str(target), str(source)], check=True, capture_output=True)
    return target


def preload() -> None:
    """Load what DeepEP needs; call before torch is imported. FileNotFoundError says what is missing."""
    if not loads(MLX5):
        with tempfile.TemporaryDirectory() as folder:
            ctypes.CDLL(str(compile_stub(Path(folder))), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    for path in sys.path:
        library = Path(path or ".") / HOST_LIBRARY
        if library.exists():
            ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            return
    raise FileNotFoundError(f"{HOST_LIBRARY.name}: not in any folder of sys.path (package nvidia-nvshmem-cu13)")
