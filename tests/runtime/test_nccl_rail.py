"""The rail over NCCL and its watch, with emulated kernels, nodes on the CPU and a library of queues between threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPConfigError, EPError, EPTimeout
from cute_ep.layouts.maps.mail import Channel
from cute_ep.runtime.rails import nccl, nccl_library
from cute_ep.runtime.rails.nccl_library import FUNCTIONS, Config, NcclLibrary, UniqueId, code_of, version_text
from cute_ep.runtime.rails.waiting import within
from cute_ep.testing.compare import assert_bits
from tests.reference.ranks import at_once, rows_for

from .emulated_nccl import Board, Queues, over_nccl
from .emulated_nodes import SHAPES, TOKENS, batch_of, config, fused_round, two_halves
from .test_nodes import send_again


@pytest.mark.parametrize("changes", [{}, {"dispatch_format": "nvfp4_row"}], ids=["bf16", "nvfp4_row"])
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_are_those_of_the_reference(nodes: int, ranks: int, changes: dict) -> None:
    cfg = config(nodes, ranks, **changes)
    with over_nccl(cfg) as (made, _):
        for number in range(4):
            fused_round(cfg, made, number)
        for turn in range(3):
            two_halves(cfg, made, turn)
        at_once(range(len(made)), lambda rank: made[rank].synchronize())
        for ep in made:
            begun, ended = ep.mail.engine.rounds(Channel.FRAMES)
            assert begun == ended > 0 and ep.mail.engine.rounds(Channel.SUMS) == (3 * 3 + 4,) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["exact", "unweighted"])
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_modes_that_bring_every_row_have_the_bits_of_one_node(
    nodes: int, ranks: int, mode: str, dtype: torch.dtype
) -> None:
    """Fused, and with two outstanding; also rows of NaN, infinity and -0, and entries that are masked."""
    cfg = config(nodes, ranks)
    with over_nccl(cfg) as (made, _):
        for seed in range(4):
            given, want = batch_of(cfg, seed, None if seed % 2 else TOKENS)
            rows = rows_for(want, cfg, seed)
            for one in rows:
                one.view(-1)[: 6 * 7 : 7] = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf"), 1e-40, 3e38])
            weights = [one.router_weights for one in given]
            sums = reference.combine(cfg, rows, want, weights, mode, dtype)
            frame = want[0].frame

            def work(rank: int, given=given, rows=rows, frame=frame, sums=sums) -> list[torch.Tensor]:
                ep = made[rank]
                batch = ep.dispatch(**vars(given[rank]), frame=frame)
                fused = ep.combine(rows[rank], batch, mode=mode, dtype=dtype)
                sent = [ep.combine_async(rows[rank], batch, mode) for _ in range(2)]
                out = torch.full_like(sums[rank], 7)
                return [fused, ep.combine_wait(sent[0], dtype=dtype), ep.combine_wait(sent[1], out=out)]

            for rank, results in enumerate(at_once(range(len(made)), work)):
                for number, one in enumerate(results):
                    assert_bits(one, sums[rank], f"{seed}, {mode}, result {number} of rank {rank}")


def test_the_rank_that_does_not_come_is_named_and_not_who_waits_for_it() -> None:
    """One waiting rank begins late, so that its own time is not over when the first one's is."""
    cfg = config(3, 1, timeout_s=1)
    with over_nccl(cfg) as (made, watches):
        given, _ = batch_of(cfg, 2, None)
        for watch in watches:
            watch.start()

        def work(rank: int) -> str:
            if rank == 2:
                return ""
            time.sleep(0.5 * rank)
            try:
                made[rank].dispatch_async(**vars(given[rank]))
                made[rank].synchronize()
            except EPTimeout as error:
                assert error.missing == (2,), error
                return str(error)
            return "nothing"

        told = at_once(range(3), work)
        for rank in range(2):
            assert "FRAME of rank 2: its frame of dispatch round 1 has not come" in told[rank]
            assert made[rank].failed
        for watch in watches:
            watch.stop()


def test_after_a_failure_of_a_kernel_the_engine_is_ended_soon() -> None:
    """So that what is queued comes to its end; what peers were sent before stays."""
    cfg = config(2, 1, timeout_s=0.4)
    with over_nccl(cfg) as (made, watches):
        given, _ = batch_of(cfg, 3, None)
        at_once(range(2), lambda rank: made[rank].dispatch_async(**vars(given[rank])))
        watches[0].start()
        made[0].mail.interrupted = True
        at_once(range(1), lambda rank: send_again(made[0], given[0], TOKENS + 2))  # returns: rank 1 never comes
        with pytest.raises(EPError, match=r"^rank 0: NCCL between nodes was aborted; close, and connect again$"):
            made[0].mail.engine.put(made[0].mail, Channel.FRAMES, made[0].mail.frame_puts(1, 1))
        watches[0].stop()


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_store_that_does_not_answer_hides_no_late_rank(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """As where the rank that has it ended, or its host lost the network."""
    cfg = config(3, 1, timeout_s=0.6)
    with over_nccl(cfg) as (made, watches):
        given, _ = batch_of(cfg, 2, None)
        monkeypatch.setattr(Board, how, True)
        watches[0].start()
        made[0].dispatch_async(**vars(given[0]))
        with pytest.raises(EPTimeout, match=r"(?s)FRAME of rank 1: .*FRAME of rank 2: ") as caught:
            made[0].synchronize()
        assert caught.value.missing == (1, 2)
        watches[0].stop()


def test_a_channel_that_the_library_does_not_let_go_of_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort waits for what is queued behind an exchange, as that of the other channel, and for graphs."""
    library = Queues()
    abort, held = library.abort, threading.Event()

    def slow(communicator: tuple) -> None:
        if communicator[0].endswith(b"0"):  # of frames
            held.wait()
        abort(communicator)

    monkeypatch.setattr(library, "abort", slow)
    with over_nccl(config(2, 1), library) as (made, _):
        engine = made[0].mail.engine
        engine.give_up()
        assert {one[0][-1:] for one in library.ended} == {b"1"} and not engine.close(0.05)
        held.set()
        assert engine.close(5)


def test_the_engine_ends_also_where_the_device_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Queues()
    with over_nccl(config(2, 1), library) as (made, _):
        monkeypatch.setattr(nccl.driver_calls, "copy", lambda *arguments: 1 / 0)
        made[0].mail.engine.give_up()
        assert len(library.ended) == 2


def test_old_mail_of_a_rank_that_has_given_up_is_no_new_mail() -> None:
    cfg = config(2, 1, timeout_s=0.5)
    with over_nccl(cfg) as (made, _):
        given, _ = batch_of(cfg, 3, None)
        at_once(range(2), lambda rank: made[rank].dispatch(**vars(given[rank])))
        torch.frombuffer((ctypes.c_int64 * 1).from_address(made[0].mail.parts.abort), dtype=torch.int64).fill_(1)
        at_once(range(2), lambda rank: send_again(made[rank], given[rank], TOKENS + 2))
        with pytest.raises(
            EPTimeout, match=r"FRAME of rank 0: its frame of dispatch round 2 .*its last mail is of round 1"
        ):
            made[1].synchronize()


def test_what_hangs_in_the_library_is_left_alone() -> None:
    hung = threading.Event()
    with pytest.raises(EPError, match=r"^could not end NCCL in 0.05 s$"):
        within(0.05, hung.wait, "end NCCL")
    hung.set()
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0, "divide")
    assert within(5, lambda: 7, "count") == 7


# ---- the library


class Fake:
    """A shared library of Python functions with C's types, which return `codes` by name, else 0."""

    def __init__(self, version: int, codes: dict[str, int] | None = None) -> None:
        self.version, self.codes, self.calls = version, codes or {}, list[tuple]()
        self.config, self.functions = dict[str, object](), list[object]()
        for name, types in FUNCTIONS.items():
            self.add(name, ctypes.c_int, types, self.function(name))
        said, last = (ctypes.create_string_buffer(text) for text in (b"unhandled system error", b"no socket found "))
        self.add("ncclGetErrorString", ctypes.c_void_p, [ctypes.c_int], lambda code: ctypes.addressof(said))
        self.add("ncclGetLastError", ctypes.c_void_p, [ctypes.c_void_p], lambda comm: ctypes.addressof(last))

    def add(self, name: str, result: type, types: list, function: Callable) -> None:
        setattr(self, name, ctypes.CFUNCTYPE(result, *types)(function))

    def function(self, name: str) -> Callable:
        def call(*given: object) -> int:
            if name == "ncclGetVersion":
                given[0][0] = self.version  # type: ignore[index]
            elif name == "ncclGetUniqueId":
                ctypes.memset(given[0], 7, ctypes.sizeof(UniqueId))  # type: ignore[arg-type]
            elif name == "ncclCommInitRankConfig":
                made, *rest, config = given
                made[0] = 77  # type: ignore[index]
                self.config = {field: getattr(config[0], field) for field, _ in Config._fields_}  # type: ignore[index]
                given = rest[0], bytes(memoryview(rest[1])), rest[2]
            self.calls.append((name, *given))
            return self.codes.get(name, 0)

        return call


def test_a_communicator_has_single_ctas_and_few() -> None:
    fake = Fake(22809)
    library = NcclLibrary(fake)  # type: ignore[arg-type]
    made = library.connect(library.unique_id(), 1, 3, 8)
    assert made == 77 and fake.calls[-1] == ("ncclCommInitRankConfig", 3, bytes([7] * 128), 1)
    undefined = -(2**31)
    assert fake.config == {
        "size": 48, "magic": 0xCAFEBEEF, "version": 21800, "blocking": 1, "cga_cluster_size": 1,
        "min_ctas": undefined, "max_ctas": 8, "net_name": None, "split_share": undefined,
    }  # fmt: skip
    with library.group():
        library.send(1 << 40, 5, 2, made, 9)
        library.receive(2 << 40, 6, 2, made, 9)
    sent = ("ncclSend", 1 << 40, 5, 0, 2, 77, 9), ("ncclRecv", 2 << 40, 6, 0, 2, 77, 9)
    assert fake.calls[-4:] == [("ncclGroupStart",), *sent, ("ncclGroupEnd",)]


def test_errors_have_the_words_of_the_library() -> None:
    library = NcclLibrary(Fake(22809, {"ncclCommInitRankConfig": 2, "ncclSend": 4}))  # type: ignore[arg-type]
    with pytest.raises(EPError, match=r"^ncclCommInitRankConfig: unhandled system error; no socket found$"):
        library.connect(bytes(128), 0, 2, 8)
    with pytest.raises(EPError, match=r"^ncclSend: "):
        library.send(0, 1, 1, 77, 0)


def test_a_library_that_is_missing_or_old_is_refused() -> None:
    with pytest.raises(EPConfigError, match=r"^libnccl\.so\.2: is NCCL 2.17.1, must be 2.18.0 or newer$"):
        NcclLibrary(Fake(21701))  # type: ignore[arg-type]
    with pytest.raises(EPConfigError, match=r"^libnccl.so.2: .*ncclGetVersion.*; must be NCCL 2.18.0 or newer$"):
        NcclLibrary(SimpleNamespace())  # type: ignore[arg-type]
    if not torch.backends.cuda.is_built():
        with pytest.raises(EPConfigError, match=r"^several nodes need NCCL, but this PyTorch has not loaded libnccl"):
            NcclLibrary.loaded()
    assert version_text(code_of((2, 28, 9))) == "2.28.9" and nccl_library.OLDEST >= (2, 18, 0)
