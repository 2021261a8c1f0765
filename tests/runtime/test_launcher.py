"""The compiled launcher as such: that it compiles, why it may be missing, and what it says of wrong arguments."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cute_ep.api.errors import EPError
from cute_ep.runtime import launcher
from tests.fake_gpu import MakeRank, inputs

SOURCE = Path(launcher.__file__).with_suffix(".c")
EXCHANGE = b"dlpack_exchange_api"
COMPILER = shutil.which("gcc")
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers")
STABLE = ("-Wno-deprecated-declarations",)
"""PyWeakref_GetObject is deprecated since 3.13, and its successor is not in the stable ABI of 3.11."""


@pytest.fixture
def asked_again() -> Iterator[None]:
    """What is missing is looked for in this test and after it."""
    launcher.missing.cache_clear()
    yield
    launcher.missing.cache_clear()


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    """As it does in a wheel, whose flags are fewer; and what was compiled can be imported."""
    made, include = tmp_path / "_launcher.abi3.so", sysconfig.get_path("include")
    subprocess.run([COMPILER, *FLAGS, *STABLE, "-Werror", f"-I{include}", SOURCE, "-o", made], check=True)
    code = "import _launcher; assert _launcher.Calls.__doc__"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.usefixtures("asked_again")
def test_without_it_python_launches(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cute_ep.runtime._launcher", None)
    why = launcher.missing()
    assert why is not None and why.startswith("it was not compiled, or not for this Python")
    with pytest.raises(EPError, match="compiled launcher: it was not compiled"):
        launcher.make_calls(5, (0, 0, 4), tensors=1, written=0, keys=1)
    rank = make_rank()
    for _ in range(3):
        assert rank.dispatch(*inputs()).is_whole(rank.origin)


@pytest.mark.usefixtures("asked_again")
@pytest.mark.skipif(launcher.missing() is not None, reason="it is not here")
def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert launcher.missing() == f"torch {torch.__version__} has no DLPack exchange API, as 2.11 has"


@pytest.mark.usefixtures("asked_again")
@pytest.mark.skipif(launcher.missing() is not None, reason="it is not here")
def test_a_torch_with_another_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a later major version, or none at all."""
    table = (ctypes.c_uint32 * 32)(2)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule(ctypes.addressof(table), EXCHANGE, None))
    assert launcher.missing() == f"torch {torch.__version__}: exchange: must be DLPack 1"
    launcher.missing.cache_clear()
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", 5)
    assert str(launcher.missing()).startswith(f"torch {torch.__version__}: ")


def test_without_a_driver_there_are_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with one that does not know the calls."""

    def gone(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    real = ctypes.CDLL
    for found, rule in ((gone, r"libcuda\.so\.1: cannot open"), (lambda name: real(None), "cuLaunchKernelEx")):
        monkeypatch.setattr(launcher.ctypes, "CDLL", found)
        with pytest.raises(EPError, match=rf"^CUDA driver: .*{rule}"):
            launcher.driver_addresses()


def packed(*numbers: int) -> bytes:
    """As int64."""
    return struct.pack(f"{len(numbers)}q", *numbers)


BLOCKED = """
#include <unistd.h>
int launch(const void *config, volatile int *opened, void **parameters, void **extra) {
    for (int i = 0; i < 5000; i++)
        if (*opened) return 0; else usleep(1000);
    return 1;
}
int current(void **context) { *context = 0; return 0; }
"""
"""A driver whose queue is full until a word is not 0, for 5 s at most."""


@pytest.mark.skipif(launcher.missing() is not None or COMPILER is None, reason="it is not here, or no C compiler")
def test_other_threads_run_while_the_driver_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have to launch what the queue waits for."""
    (tmp_path / "driver.c").write_text(BLOCKED)
    command = [COMPILER, "-shared", "-fPIC", tmp_path / "driver.c", "-o", tmp_path / "driver.so"]
    subprocess.run(command, check=True)
    library, opened = ctypes.CDLL(str(tmp_path / "driver.so")), ctypes.c_int(0)
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in (library.launch, library.current)]
    monkeypatch.setattr(launcher, "driver_addresses", lambda: addresses)
    calls, one, found = launcher.make_calls(0, (0, 0, 4), 1, 0, 1), torch.ones(3), []
    kernel = ctypes.addressof(opened), 512, 48, bytes(8), bytes(2)
    assert calls.add((one,), (None,), packed(0, 0, 0), 1, packed(0), kernel, 4, False, False, b"", None, 0, "launched")
    thread = threading.Thread(target=lambda: found.append(calls.launch(0, False, one, None)))
    thread.start()
    time.sleep(0.05)
    opened.value = 1
    thread.join()
    assert found == [("launched", None)]


@pytest.mark.skipif(launcher.missing() is not None, reason="it is not here")
class TestArguments:
    """Mistakes of Python's side, none of which may read or write memory that is not there."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> launcher.Calls:
        """Of two tensors and two keys, for no driver."""
        monkeypatch.setattr(launcher, "driver_addresses", lambda: (0, 0))
        return launcher.make_calls(0, (0, 0, 4), tensors=2, written=2, keys=2)

    def added(self, calls: launcher.Calls, tensor: object = None, **changes: object) -> bool:
        """What `add` returns for a kernel of two numbers, both addresses."""
        one = torch.ones(3)
        given = {
            "parts": packed(0, 0, 0, 1, 1, 0),
            "read": 1,
            "extents": packed(0, 0),
            "values": bytes(16),
            "order": b"\1\0\0\0",
            "spans": b"",
            "made": 0,
        } | changes
        tensors = one.clone() if tensor is None else tensor, one
        kernel = 9, 512, 48, given["values"], given["order"]
        where = given["parts"], given["read"], given["extents"]
        return calls.add(tensors, (None, 5), *where, kernel, 4, False, False, given["spans"], None, given["made"], 7)

    @pytest.mark.parametrize("tensors", [0, 17])
    def test_numbers_of_tensors(self, monkeypatch: pytest.MonkeyPatch, tensors: int) -> None:
        monkeypatch.setattr(launcher, "driver_addresses", lambda: (0, 0))
        with pytest.raises(ValueError, match="too many tensors or keys"):
            launcher.make_calls(0, (0, 0, 4), tensors=tensors, written=0, keys=1)

    def test_launches_of_other_numbers(self, calls: launcher.Calls) -> None:
        with pytest.raises(TypeError, match="must be given a stream, early, and all tensors and keys"):
            calls.launch(0, False, None)

    @pytest.mark.parametrize(
        "change",
        [
            {"parts": packed(0, 2, 0)},
            {"parts": packed(0, -1, 0)},
            {"parts": packed(0, 1 << 16, 0)},
            {"parts": packed(0, 1 << 32, 0)},
            {"parts": packed(2, 0, 0)},
            {"parts": packed(3, 0, 0), "made": 1},
            {"parts": packed(1 << 32, 0, 0)},
            {"parts": packed(-1, 0, 0)},
            {"order": b"\2\0\0\0"},
            {"made": 25},
            {"made": -1},
            {"extents": b""},
        ],
        ids=str,
    )
    def test_parts_of_what_is_not_there(self, calls: launcher.Calls, change: dict) -> None:
        with pytest.raises(ValueError, match="parts must be of tensors and numbers that there are"):
            self.added(calls, **change)

    def test_what_cannot_be_kept(self, calls: launcher.Calls) -> None:
        """A tensor of six dimensions, one without elements, and more of what a launch has than there is room for."""
        many = {"values": bytes(8 * 256), "order": bytes(2 * 256), "spans": bytes(16 * 32), "parts": bytes(24 * 48)}
        assert self.added(calls) and self.added(calls, **many)
        for tensor in (torch.ones(1, 1, 1, 1, 1, 1), torch.ones(0), torch.ones(3).to_sparse(), 5):
            assert not self.added(calls, tensor)
        assert not self.added(calls, values=bytes(8 * 257), order=bytes(2 * 257))
        assert not self.added(calls, spans=bytes(16 * 33)) and not self.added(calls, parts=bytes(24 * 49))
        assert not self.added(calls, extents=packed(0, 0, 0, 0))

    def test_bytes_that_are_no_whole_numbers_are_not_kept(self, calls: launcher.Calls) -> None:
        """As many numbers as there is room for, and a part of one more; spans with a begin and no end."""
        assert not self.added(calls, values=bytes(8 * 256 + 7), order=bytes(2 * 256))
        assert not self.added(calls, spans=bytes(24)) and not self.added(calls, parts=bytes(23))
        assert not self.added(calls, extents=bytes(17)) and not self.added(calls, order=b"\1\0\0")

    def test_a_number_that_is_no_address_is_declined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By both functions, and without an error that would come out elsewhere."""
        driver = (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda context: 0),)
        monkeypatch.setattr(launcher, "driver_addresses", lambda: (0, ctypes.cast(driver[0], ctypes.c_void_p).value))
        calls = launcher.make_calls(0, (0, 0, 4), tensors=1, written=0, keys=1, addresses=1)
        kernel = 9, 512, 48, bytes(8), bytes(2)
        assert calls.launch(0, False, 1 << 64, None) is None
        rest = packed(0, 0, 0), 1, packed(0), kernel, 4, False, False, b"", None, 0, 7
        assert calls.add((1 << 64,), (None,), *rest) is False
