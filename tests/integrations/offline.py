"""Packs what tests on a machine with a GPU and PyTorch but no network shall run with: frameworks, or the newest
cuda-python.

    python -m tests.integrations.offline cuda|frameworks|sglang|vllm OUT.tar.xz [--python 3.12]

and on that machine, in a checkout with kernels in build/library:

    mkdir DIR && tar xf OUT.tar.xz -C DIR && PYTHONPATH=DIR:. python -m pytest tests/gpu/test_processes.py

or, after python -m compileall -q -j 0 DIR/vllm, PYTHONPATH=DIR:. python -m tests.gpu.servers vllm; or, with an absolute
DIR, PYTHONPATH=DIR make test-gpu, whose last lines name the versions that it found.

An archive has the files that tests import, without sources of kernels that they never compile, and no package that
comes with PyTorch and transformers. vLLM wants an older transformers than the others, so it has an archive of its own.
SGLang's dispatcher needs only `frameworks`, its server `sglang`: with sources that it compiles at run time, and with
older kernels than it asks for, the last that work with torch 2.11.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ARCHITECTURE = 90
"""Of the cubins that stay in libraries."""
SYSTEMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
SYSTEMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
SOURCES = ("*.cu", "*.cuh", "*.h", "*.hpp", "*/__pycache__/*")
FATBIN = struct.pack("<IH", 0xBA55ED50, 1)
CUBIN = 2


class Frameworks(NamedTuple):
    """What goes into an archive.

    Attributes:
        packages: as pip takes them; none is installed for another one's sake.
        without: patterns of files to leave out.
        lean: libraries that keep the cubins of ARCHITECTURE only.
        empty: modules to add, in place of what is left out and looked for at an import.
    """

    packages: str
    without: tuple[str, ...]
    lean: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


SETS = {
    # newest of each: what pip brings to users
    "cuda": Frameworks("cuda-bindings cuda-pathfinder cuda-python", ("*.cpp", "*.pyx", "*.pxd", "*.pxi", "*.h")),
    "frameworks": Frameworks(
        "transformers==5.24.0 megatron-core==0.16.1 torchtitan==0.3.0 sglang==0.5.23 flashinfer-python==0.7.2.post1 "
        "annotated-doc annotated-types apache-tvm-ffi==0.1.11 docstring_parser fastapi interegular msgspec orjson "
        "partial_json_parser pybase64 pydantic==2.14.4 pydantic_core==2.50.5 python-multipart pyzmq setproctitle shtab "
        "spmd_types==0.2.3 starlette torch_checkpointing torchdata typeguard typing_inspection tyro uvicorn "
        "xgrammar==0.2.7",
        (*SOURCES, "flashinfer/data/*", "sglang/multimodal_gen/*", "sglang/srt/rust_extensions/*.so"),
        empty=("sglang/kernels/jit/csrc/__init__.py", "sglang/kernels/jit/include/__init__.py"),
    ),
    "sglang": Frameworks(
        "sglang==0.5.23 sglang-kernel==0.4.6 sgl-deep-gemm==0.1.5.post1 aiohttp aiohappyeyeballs aiosignal "
        "annotated-doc annotated-types anyio apache-tvm-ffi==0.1.11 asttokens attrs cffi click cloudpickle "
        "compressed-tensors==0.18.0 decorator dill distro docstring_parser einops executing fastapi frozenlist gguf "
        "h11 httpcore httpx idna importlib_metadata interegular IPython ipython-pygments-lexers jiter jsonschema "
        "jsonschema-specifications loguru matplotlib-inline msgspec multidict nvidia-ml-py openai==2.8.0 "
        "opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions orjson parso partial_json_parser "
        "pexpect prometheus-client prompt_toolkit propcache psutil ptyprocess pure_eval pybase64 pycparser "
        "pydantic==2.14.4 pydantic_core==2.50.5 pygments python-dateutil python-multipart pyzmq referencing requests "
        "rpds-py setproctitle six sniffio soundfile==0.13.1 stack_data starlette traitlets typing_inspection uvicorn "
        "uvloop watchfiles wcwidth xgrammar==0.2.7 yarl zipp",
        ("*/__pycache__/*", "sglang/multimodal_gen/*", "sglang/srt/rust_extensions/*.so", "sgl_kernel/flash*.so")
        + ("sgl_kernel/infllm*.so", "sgl_kernel/sm100/*"),
        ("sgl_kernel/sm90/common_ops.abi3.so",),
    ),
    "vllm": Frameworks(
        "vllm==0.33.0 aiohttp aiohappyeyeballs aiosignal annotated-doc annotated-types anthropic anyio "
        "apache-tvm-ffi==0.1.11 astor attrs blake3 cachetools cbor2 certifi click cloudpickle "
        "compressed-tensors==0.17.0 depyf==0.20.0 dill distro docstring_parser einops fastapi<0.137 frozenlist h11 "
        "httpcore2 httpx2 idna ijson interegular jiter jmespath jsonschema jsonschema-specifications lark==1.2.2 "
        "llguidance<1.8 lm-format-enforcer==0.11.3 loguru mcp<3 mistral_common "
        "model-hosting-container-standards<1 msgspec multidict openai opentelemetry-api opentelemetry-sdk "
        "opentelemetry-semantic-conventions orjson oss-harmony partial-json-parser prometheus_client "
        "prometheus-fastapi-instrumentator propcache protobuf psutil py-cpuinfo pybase64 pycountry "
        "pydantic==2.14.4 pydantic_core==2.50.5 pydantic-extra-types pydantic-settings python-json-logger "
        "python-multipart pyzmq referencing requests rpds-py setproctitle six sniffio sse-starlette starlette "
        "truststore typing_inspection uvicorn uvloop watchfiles xgrammar==0.2.8 yarl",
        (*SOURCES, "vllm/vllm_flash_attn/*.so", "vllm/vllm-rs", "vllm/third_party/*.so", "vllm/_[dfq]*.so", "*.js")
        + ("mistral_common/data/*", "pycountry/locales/*"),
        ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.py",),
    ),
}


def download(packages: list[str], python: str, folder: Path) -> list[Path]:
    """Wheels of packages for Linux on x86-64 and a version of Python."""
    words = [
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        "--dest",
        str(folder),
    ]
    words += [f"--platform={system}" for system in SYSTEMS] + ["--implementation=cp"]
    subprocess.run([sys.executable, "-m", "pip", *words, *packages], check=True)
    return sorted(folder.glob("*.whl"))


def lean(library: bytes, architecture: int) -> bytes:
    """A shared library in which PTX and cubins of other architectures are zeros, which compress to nothing. A fat
    binary is a header (magic, version, size of the header, of the rest) and entries, each of them a header (kind, its
    size, size of the rest; at byte 28 the architecture) and an image."""
    data, at = bytearray(library), library.find(FATBIN)
    while at >= 0:
        header, rest = struct.unpack_from("<HQ", data, at + 6)
        end, entry = at + header + rest, at + header
        if header != 16 or end > len(data):  # not one
            at = library.find(FATBIN, at + len(FATBIN))
            continue
        while entry < end:
            kind, _, own, size = struct.unpack_from("<HHIQ", data, entry)
            (found,) = struct.unpack_from("<I", data, entry + 28)
            if kind != CUBIN or found != architecture:
                data[entry + own : entry + own + size] = bytes(size)
            entry += own + size
        at = library.find(FATBIN, end)
    return bytes(data)


def unpack(wheel: Path, wanted: Frameworks, folder: Path) -> None:
    """The files of a wheel that are wanted."""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith("/") or any(fnmatch(name, pattern) for pattern in wanted.without):
                continue
            data = files.read(name)
            to = folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(lean(data, ARCHITECTURE) if name in wanted.lean else data)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("frameworks", choices=SETS)
    parser.add_argument("out", type=Path, metavar="OUT.tar.xz")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of that machine (default: %(default)s)")
    args = parser.parse_args()
    wanted = SETS[args.frameworks]
    with tempfile.TemporaryDirectory() as there:
        wheels, site = Path(there) / "wheels", Path(there) / "site"
        for wheel in download(wanted.packages.split(), args.python, wheels):
            unpack(wheel, wanted, site)
        for name in wanted.empty:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).touch()
        with tarfile.open(args.out, "w:xz", preset=2) as archive:
            archive.add(site, arcname=".")
    sys.stdout.write(f"{args.out}: {args.out.stat().st_size / 2**20:.0f} MiB\n")


if __name__ == "__main__":
    main()
