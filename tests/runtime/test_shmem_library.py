"""The functions of NVSHMEM by ctypes, which library they are of, and how ranks begin it together."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime.rails import shmem_library
from cute_ep.runtime.rails.shmem import chosen_start
from cute_ep.runtime.rails.shmem_library import (
    FUNCTIONS,
    SONAME,
    WHEEL_FOLDER,
    Addition,
    Begun,
    InitArgs,
    InitAttributes,
    ShmemLibrary,
    UniqueId,
    UniqueIdArgs,
)

NOT, NO_GPU, GPU = Begun.NOT, Begun.WITHOUT_GPU, Begun.WITH_GPU


class Fake:
    """A shared library of Python functions with C's types, which return `results` by name, else 0."""

    def __init__(self, version: tuple[int, int, int] = (3, 4, 5), **results: Any) -> None:
        self.version, self.results, self.calls = version, results, list[tuple]()
        for name, (types, result) in FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(result, *types)(self.function(name)))

    def function(self, name: str) -> Callable:
        def call(*given: Any) -> Any:
            if name == "nvshmemx_vendor_get_version_info":
                for one, number in zip(given, self.version, strict=True):
                    one[0] = number
                return None
            if name == "nvshmemx_get_uniqueid":
                ctypes.memset(given[0], 7, ctypes.sizeof(UniqueId))
            if name == "nvshmemx_set_attr_uniqueid_args":
                args = given[3][0].args.by_id
                args.rank, args.ranks, args.id = given[0], given[1], given[2]
            if name == "nvshmemx_hostlib_init_attr":
                one = given[1][0]
                by_id = one.args.by_id
                versions = one.version, one.args.version, by_id.version
                place = by_id.rank, by_id.ranks, one.args.cuda_device_id
                given = given[0], versions, place, bytes(memoryview(by_id.id[0]))
            self.calls.append((name, *given))
            result = self.results.get(name, 0)
            return result.pop(0) if isinstance(result, list) else result

        return call


def test_structures_are_those_of_the_headers() -> None:
    """Asserted there by their sizes; what later releases add stands where it does there."""
    sizes = [ctypes.sizeof(one) for one in (UniqueId, UniqueIdArgs, InitArgs, InitAttributes)]
    assert sizes == [128, 24, 128, 144]
    offsets = UniqueIdArgs.id.offset, InitArgs.by_id.offset, InitArgs.cuda_device_id.offset, InitAttributes.args.offset
    assert offsets == (8, 8, 32, 16)


def test_a_process_begins_as_its_pe_on_its_gpu() -> None:
    fake = Fake(nvshmemx_init_status=[0, 3], nvshmem_my_pe=1, nvshmem_n_pes=4)
    library = ShmemLibrary(fake)
    assert library.version == (3, 4, 5) and library.begun() == NOT
    library.begin(library.unique_id(), 1, 4, 2)
    versions = (1 << 16) + 144, (1 << 16) + 128, (1 << 16) + 24
    assert fake.calls[-2] == ("nvshmemx_hostlib_init_attr", 8, versions, (1, 4, 2), bytes([7] * 128))
    assert library.place() == (1, 4)


def test_puts_and_signals_are_additions() -> None:
    fake = Fake()
    library = ShmemLibrary(fake)
    library.put(1 << 40, 2 << 40, 48, Addition(3 << 40, 1, 5), 9)
    library.put(1 << 40, 2 << 40, 0, Addition(3 << 40, 1, 5), 9)  # of no bytes: the signal alone
    library.signal(Addition(3 << 40, 1, 6), 9)
    assert fake.calls[-3:] == [
        ("nvshmemx_putmem_signal_on_stream", 1 << 40, 2 << 40, 48, 3 << 40, 1, 10, 5, 9),
        ("nvshmemx_signal_op_on_stream", 3 << 40, 1, 10, 5, 9),
        ("nvshmemx_signal_op_on_stream", 3 << 40, 1, 10, 6, 9),
    ]


# ---- what does not work


def test_errors_have_the_words_of_the_library() -> None:
    library = ShmemLibrary(Fake(nvshmemx_hostlib_init_attr=7))
    with pytest.raises(EPError, match=r"^nvshmemx_hostlib_init_attr: status 7, INTERNAL; NVSHMEM_DEBUG=WARN has"):
        library.begin(bytes(128), 0, 2, 0)
    with pytest.raises(EPError, match=r"^nvshmemx_get_uniqueid: status 1, INVALID_VALUE; "):
        ShmemLibrary(Fake(nvshmemx_get_uniqueid=1)).unique_id()


def test_a_start_that_has_failed_without_a_word_is_an_error() -> None:
    """3.4.5 returns 0 where the GPU could not be used, and then ends the process in the next call."""
    library = ShmemLibrary(Fake(nvshmemx_init_status=1))
    with pytest.raises(EPError, match=r"^nvshmemx_hostlib_init_attr: PE 1 has not begun on cuda:3; NVSHMEM_DEBUG"):
        library.begin(bytes(128), 1, 2, 3)


def test_too_little_memory_says_what_to_set() -> None:
    assert ShmemLibrary(Fake(nvshmem_malloc=1 << 40)).allocate(5) == 1 << 40
    with pytest.raises(EPError, match=r"^nvshmem_malloc: no 3072 MiB of symmetric memory: set NVSHMEM_SYMMETRIC_SIZE"):
        ShmemLibrary(Fake(nvshmem_malloc=None)).allocate(3 << 30)


def test_a_library_that_is_old_or_is_another_one_is_refused() -> None:
    with pytest.raises(EPConfigError, match=r"^libnvshmem_host\.so\.3: is NVSHMEM 3.2.5, must be 3.3.9 or newer$"):
        ShmemLibrary(Fake((3, 2, 5)))
    with pytest.raises(EPConfigError, match=r"^libnvshmem_host.so.3: .*nvshmemx_.*; must be NVSHMEM 3.3.9 or newer$"):
        ShmemLibrary(SimpleNamespace())


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that is all of sys.path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    ShmemLibrary.load.cache_clear()
    yield tmp_path
    ShmemLibrary.load.cache_clear()


def test_a_library_that_is_missing_says_where_it_was_looked_for(search: Path) -> None:
    rule = (
        r"^transport = 'nvshmem': NVSHMEM is not here \(libnvshmem_host.so.3: this process has not loaded it; "
        r"nvidia/nvshmem/lib/libnvshmem_host.so.3: in no folder of sys.path\): install nvidia-nvshmem-cu13, or -cu12 "
        r"for CUDA 12, or take transport = 'nccl'$"
    )
    with pytest.raises(EPConfigError, match=rule):
        ShmemLibrary.load()
    folder = search / WHEEL_FOLDER
    folder.mkdir(parents=True)
    (folder / SONAME).write_text("no library")
    with pytest.raises(EPConfigError, match=r"has not loaded it; .*libnvshmem_host.so.3: .*(header|ELF|short)"):
        ShmemLibrary.load()


def test_the_one_that_is_loaded_goes_before_the_one_of_torch(monkeypatch: pytest.MonkeyPatch, search: Path) -> None:
    (search / WHEEL_FOLDER).mkdir(parents=True)
    (search / WHEEL_FOLDER / SONAME).touch()
    opened, loaded = [], set[str]()

    def load(name: str, mode: int) -> Fake:
        opened.append(name)
        if Path(name).is_absolute() or name in loaded:
            return Fake()
        raise OSError("not loaded")

    monkeypatch.setattr(shmem_library.ctypes, "CDLL", load)
    assert ShmemLibrary.load() is ShmemLibrary.load()
    assert opened == [SONAME, str(search / WHEEL_FOLDER / SONAME)]
    ShmemLibrary.load.cache_clear()
    loaded.add(SONAME)
    ShmemLibrary.load()
    assert opened[2:] == [SONAME]


# ---- who begins it, and who ends it


def test_it_ends_with_its_last_user() -> None:
    fake = Fake(nvshmemx_init_status=2)
    library = ShmemLibrary(fake)

    def ended() -> int:
        return sum(name == "nvshmemx_hostlib_finalize" for name, *_ in fake.calls)

    for number in range(1, 3):  # it can begin again
        library.begin(bytes(128), 0, 1, 0)
        library.join()
        library.leave()
        assert ended() == number - 1
        library.leave()
        assert ended() == number
    library.join()  # what somebody else has begun
    library.leave()
    assert ended() == 2


def test_ranks_begin_it_where_none_has_and_join_where_all_have() -> None:
    assert chosen_start([(NOT, (0, 0)), (NOT, (5, 7))])
    assert not chosen_start([(GPU, (0, 2)), (GPU, (1, 2))])


@pytest.mark.parametrize(
    ("heard", "told"),
    [
        ([(GPU, (0, 2)), (NOT, (0, 0))], "rank 1 has not begun: must be PE 1 of 2, or"),
        ([(NOT, (0, 0)), (GPU, (1, 2))], "rank 0 has not begun: must be PE 0 of 2, or"),
        ([(GPU, (1, 2)), (GPU, (0, 2))], "rank 0 is PE 1 of 2: must be PE 0 of 2, or"),
        ([(GPU, (0, 4)), (GPU, (1, 4))], "rank 0 is PE 0 of 4: must be PE 0 of 2, or"),
        ([(NO_GPU, (0, 2)), (NO_GPU, (1, 2))], "rank 0 has begun without a GPU: must be PE 0 of 2, or"),
    ],
    ids=["some not", "first not", "other order", "survivors", "no GPU"],
)
def test_others_are_told_what_to_do(heard: list, told: str) -> None:
    rule = rf"^transport = 'nvshmem': NVSHMEM in the process of {told} .*: take transport = 'nccl', or start all"
    with pytest.raises(EPConfigError, match=rule):
        chosen_start(heard)
