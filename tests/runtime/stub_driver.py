"""What each function of `driver_calls` tells a driver: `python -m tests.runtime.stub_driver FOLDER` makes the calls of
CASES, on the driver that `build` has put into the folder, and writes a JSON object of (result, notes) by case."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cute_ep.api.errors import EPError
from cute_ep.runtime import driver_calls as calls

SOURCE = Path(__file__).with_name("stub_driver.c")
NAME = "libcuda.so.1"
COMPILER = shutil.which("gcc") or shutil.which("cc")


class Case(NamedTuple):
    """A call.

    Attributes:
        call: what it returns, or the text of an EPError, is `result`.
        notes: the driver's, a line each.
    """

    call: Callable[[], Any]
    result: Any = None
    notes: tuple[str, ...] = ()


def filled(write: Callable[[int], object], nbytes: int = 16) -> str:
    """The bytes of a new allocation of zeros, as hexadecimal digits, after `write(address)`."""
    address = calls.allocate(nbytes)
    assert address
    calls.fill(address, 0, nbytes)
    write(address)
    found = ctypes.string_at(address, nbytes).hex()
    calls.free(address)
    return found


def launched(early: bool, context: int = 5, *, pairs: bool = False, threads: int = 512) -> None:
    """Launches a kernel of two parameters, of context 6, where `context` is the current one."""
    values = (ctypes.c_int64 * 2)(-11, 1 << 40)
    first = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * 2)(first, first + 8)
    launcher = calls.Launcher(9, 6, 48)
    calls.set_context(context)
    launcher.launch(4, threads, 77, ctypes.addressof(pointers), early, pairs)


def through_handle() -> list[bool]:
    """Whether a mapping of an allocation is where the driver says, and its handle as long as it says."""
    address = calls.allocate(16)
    assert address
    handle = calls.ipc_handle(address)
    mapped = calls.open_ipc_handle(handle)
    calls.close_ipc_handle(mapped)
    calls.free(address)
    return [mapped == address, len(handle) == 64, handle[8:] == bytes((3 + 7 * i) % 256 for i in range(8, 64))]


def mapped(memory: int, nbytes: int) -> int:
    """Where device 3 may use memory."""
    address = calls.reserve_addresses(nbytes)
    calls.map_memory(address, nbytes, memory)
    calls.allow_access(address, nbytes, 3)
    return address


def through_memory(*, fabric: bool) -> list:
    """What is read through a mapping of imported memory, and of what kind its handle is."""
    step = calls.granularity(3, fabric)
    memory = calls.create_memory(3, step, fabric)
    assert memory is not None
    here = mapped(memory, step)
    if fabric:
        handle = calls.export_fabric(memory)
        told: object = [len(handle), handle[8:] == bytes((5 + 3 * i) % 256 for i in range(8, 64))]
        imported = calls.import_fabric(handle)
    else:
        descriptor = calls.export_descriptor(memory)
        told = os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:memory")
        imported = calls.import_descriptor(descriptor)
        os.close(descriptor)
    there = mapped(imported, step)
    calls.release_memory(imported)
    calls.write(here + 8, b"\x01\x02\x03")
    content = ctypes.string_at(there + 7, 5)
    for address in (there, here):
        calls.unmap_memory(address, step)
        calls.free_addresses(address, step)
    calls.release_memory(memory)
    return [there != here, content.hex(), told]


def through_memory_notes(kind: int) -> tuple[str, ...]:
    """The driver's."""
    placed = ("reserve 65536 0 0 0", "map 65536 0 0", "access 65536: 1 13, 3, 1")
    created = (f"granularity 1 {kind}, on 1 13, 1", f"create 65536: 1 {kind}, on 1 13, (nil) 0 0, 0")
    left = ("unmap 65536", "free_addresses 65536")
    return (*created, *placed, f"export {kind} 0", f"import {kind}", *placed, "release", *left, *left, "release")


def relaxed() -> None:
    with calls.relaxed_capture():
        calls.create_stream()


def copied(address: int) -> None:
    calls.write(address, b"\x01\x02\x03")
    calls.copy(address + 4, address, 3, 77)


LAUNCH = "launch_ex 9: grid 4 1 1, block 512 1 1, 48 bytes, stream 77, -11 1099511627776, 0"
WORDS = (ctypes.c_uint64, ctypes.c_uint32)
CASES = {
    "no current context": Case(calls.current_context, 0),
    "current context": Case(lambda: [calls.set_context(5), calls.current_context()], [None, 5], ("set_current 5",)),
    "primary context": Case(lambda: calls.primary_context(3), 113, ("retain 13",)),
    "peers": Case(lambda: calls.enable_peer_access(1 << 40), None, ("enable_peer 1099511627776 0",)),
    "peers that were": Case(lambda: calls.enable_peer_access(1), None, ("enable_peer 1 0",)),
    "no peers": Case(
        lambda: calls.enable_peer_access(2), "CUDA driver: CUDA_ERROR_INVALID_VALUE", ("enable_peer 2 0",)
    ),
    "load": Case(lambda: calls.load(b"code\0"), 7, ("load code 0 0",)),
    "unload": Case(lambda: calls.unload(7), None, ("unload 7",)),
    "function": Case(lambda: calls.function_of(7, "one"), 9, ("get_kernel 7 one", "get_function 8")),
    "shared memory": Case(lambda: calls.allow_shared_memory(9, 227 << 10), None, ("set_attribute 9 8 232448",)),
    "launch": Case(lambda: launched(False), None, ("set_current 5", LAUNCH)),
    "early launch": Case(lambda: launched(True), None, ("set_current 5", LAUNCH, "attribute 6 1")),
    "launch in pairs": Case(lambda: launched(False, pairs=True), None, ("set_current 5", LAUNCH, "attribute 4 2 1 1")),
    "early launch in pairs": Case(
        lambda: launched(True, pairs=True), None, ("set_current 5", LAUNCH, "attribute 4 2 1 1", "attribute 6 1")
    ),
    "launch of a thread without a context": Case(
        lambda: launched(False, 404), None, ("set_current 404", "set_current 6", LAUNCH)
    ),
    "launch of one thread": Case(
        lambda: calls.launch_thread(9, 77, (1 << 40, 7), WORDS),
        None,
        ("launch 9: grid 1 1 1, block 1 1 1, 0 bytes, stream 77, 1099511627776 7, 0",),
    ),
    "hold": Case(lambda: calls.hold_stream(77, 1 << 40, 5), None, ("wait_value 77 1099511627776 5 0",)),
    "stream": Case(calls.create_stream, 21, ("create_stream 1",)),
    "capture": Case(relaxed, None, ("capture_mode 2", "create_stream 1", "capture_mode 0")),
    "no memory": Case(lambda: calls.allocate(1 << 25), None, ("allocate 33554432",)),
    "allocation that fails": Case(
        lambda: calls.allocate(1 << 30), "CUDA driver: CUDA_ERROR_INVALID_VALUE", ("allocate 1073741824",)
    ),
    "bytes": Case(
        lambda: filled(lambda at: calls.fill(at + 1, 0xFF, 2)), "00ffff" + "00" * 13, ("allocate 16", "free")
    ),
    "words": Case(
        lambda: filled(lambda at: calls.fill_words(at + 4, 0x3FFFFFFF, 2)),
        "00000000" + "ffffff3f" * 2 + "00000000",
        ("allocate 16", "free"),
    ),
    "content": Case(lambda: filled(copied), "0102030001020300" + "00" * 8, ("allocate 16", "copy 3 on 77", "free")),
    "host memory": Case(lambda: calls.free_host(calls.allocate_host(16)), None, ("allocate_host 16 3", "free_host")),
    "handle": Case(through_handle, [True] * 3, ("allocate 16", "open_handle 1", "close_handle", "free")),
    "handle of another driver": Case(
        lambda: calls.open_ipc_handle(bytes(64)), "CUDA driver: CUDA_ERROR_INVALID_VALUE", ()
    ),
    "handle cut short": Case(lambda: calls.open_ipc_handle(bytes(63)), "handle of 63 bytes: must be 64"),
    "memory by descriptor": Case(
        lambda: through_memory(fabric=False), [True, "0001020300", True], through_memory_notes(1)
    ),
    "memory by fabric handle": Case(
        lambda: through_memory(fabric=True), [True, "0001020300", [64, True]], through_memory_notes(8)
    ),
    "fabric handle of another driver": Case(
        lambda: calls.import_fabric(bytes(64)), "CUDA driver: CUDA_ERROR_INVALID_VALUE", ("import 8",)
    ),
    "fabric handle cut short": Case(lambda: calls.import_fabric(bytes(65)), "handle of 65 bytes: must be 64"),
    "too little memory to create": Case(
        lambda: calls.create_memory(3, 1 << 25, fabric=True), None, ("create 33554432: 1 8, on 1 13, (nil) 0 0, 0",)
    ),
    "memory that is refused": Case(
        lambda: calls.create_memory(3, 1 << 30, fabric=True),
        "CUDA driver: CUDA_ERROR_NOT_PERMITTED",
        ("create 1073741824: 1 8, on 1 13, (nil) 0 0, 0",),
    ),
}
"""By name; each is made after all before it."""


def build(folder: Path) -> None:
    """Put the driver into a folder. CalledProcessError, or TypeError where there is no compiler."""
    command = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{NAME}", "-o", str(folder / NAME)]
    subprocess.run([*command, str(SOURCE)], check=True)  # type: ignore[list-item]


def main() -> None:
    """Run from the command line."""
    driver = ctypes.CDLL(str(Path(sys.argv[1]) / NAME))  # which is then the one of its name
    driver.stub_notes.restype = ctypes.c_char_p
    found = {}
    for name, case in CASES.items():
        driver.stub_forget()
        try:
            result = case.call()
        except EPError as error:
            result = str(error)
        found[name] = result, driver.stub_notes().decode().splitlines()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
