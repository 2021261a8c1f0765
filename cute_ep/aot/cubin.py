"""Resource report of a cubin, read from its ELF sections (no CUDA tool needed), and the tool that disassembles it."""

from __future__ import annotations

import importlib.metadata
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass

DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""The package that brings nvdisasm where there is no CUDA toolkit."""
_SECTION = "<IIQQQQIIQQ"
_KIND_SIZED = 4
_ATTR_FRAME_SIZE, _ATTR_REGISTERS = 0x11, 0x2F


@dataclass(frozen=True)
class Resources:
    """Registers a thread and bytes of local memory a thread (stack frame: 0 means nothing spilled)."""

    entry: str
    registers: int
    spill_bytes: int


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each ELF section; ValueError when it is no ELF file."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from(_SECTION, cubin, table + index * size) for index in range(count)]
    for name_offset, _, _, _, offset, length, *_ in headers:
        start = headers[names][4] + name_offset
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + length]


def read_resources(cubin: bytes) -> Resources:
    """Entry point, registers and stack frame of a cubin with one kernel; ValueError when it is not one."""
    entries, registers, frames = [], [0], [0]
    for name, content in sections(cubin):
        if name.startswith(".text."):
            entries.append(name.removeprefix(".text."))
        elif name == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute == _ATTR_REGISTERS:
                    registers.append(struct.unpack_from("<II", value)[1])
                elif attribute == _ATTR_FRAME_SIZE:
                    frames.append(struct.unpack_from("<II", value)[1])
    kernels = [entry for entry in entries if not entry.startswith("$")]
    if not kernels:
        raise ValueError("no kernel in this cubin")
    return Resources(kernels[-1], max(registers), max(frames))


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of every sized record of an .nv.info section."""
    found, at = [], 0
    while at + 4 <= len(data):
        kind, attribute, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _KIND_SIZED:
            found.append((attribute, data[at : at + length]))
            at += length
    return found


def find_nvdisasm() -> str | None:
    """Where nvdisasm is: of DISASSEMBLER, else on the PATH; None: nowhere."""
    try:
        files = importlib.metadata.files(DISASSEMBLER) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = (str(file.locate()) for file in files if file.name == "nvdisasm")
    return next(installed, None) or shutil.which("nvdisasm")
