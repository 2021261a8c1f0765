"""NaN and infinities on GPUs: every format makes of them what the reference does. `check_finite` finds them, also in
graph replays, on several streams, and where ranks share a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.local_ops import quantize
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import LIBRARY, connected

ROOT = Path(__file__).parents[2]
NAN, INF = torch.nan, torch.inf
HIDDEN = 1024
PLACES = [0, 3, 31, 127, 128, 1023]


def told(ep: Communicator, words: str | None) -> None:
    """What `synchronize` says of the check, once; None: nothing."""
    if words is not None:
        with pytest.raises(EPInputError, match=f"^rank {ep.rank}: {words}"):
            ep.synchronize()
    ep.synchronize()


def broken_rows() -> torch.Tensor:
    """Rows with NaN and infinities among ones and zeros at the ends of blocks, words and rows, and all over."""
    rows = []
    for at in PLACES:
        for base in (0.0, 1.0):
            for value in (NAN, INF, -INF):
                row = torch.full((HIDDEN,), base)
                row[at] = value
                rows.append(row)
    rows += [torch.full((HIDDEN,), value) for value in (NAN, INF, -INF)]
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize("fmt", [name for name, record in FORMATS.items() if record.scale])
def test_broken_rows_have_the_bytes_of_the_reference(fmt: str) -> None:
    """So what docs/reference.md says of them, which tests compute with the reference, holds on GPUs."""
    x = broken_rows()
    got, want = quantize(x.cuda(), fmt, library=str(LIBRARY)), reference.quantize(x, fmt)
    for name in want._fields:
        if getattr(want, name) is not None:
            assert_bits(getattr(got, name).cpu(), getattr(want, name), f"{fmt} {name}")


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_round_with_broken_tokens_has_the_bytes_of_the_reference(fmt: str, check: bool) -> None:
    """With the check on one rank it is the same round, which no other rank notices."""
    rows = broken_rows()
    cfg = EPConfig(HIDDEN, 8, 2, len(rows), 2, fmt, 30)
    inputs = make_inputs(cfg, [len(rows), 7], "uniform", 1)
    inputs[0].x.copy_(rows)
    with connected(cfg, ["cuda:0"] * 2) as communicators:
        communicators[0].check_finite = communicators[1].check_finite = check
        try:
            check_round(communicators, inputs, RoundOptions(modes=["unweighted"]))
        except EPInputError as error:
            assert check and str(error).startswith("rank 0: token 0 of dispatch call 1 has a NaN")
        else:
            assert not check
        communicators[1].synchronize()
        communicators[0].check_finite = False
        check_round(communicators, inputs, RoundOptions(modes=["unweighted"]))


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2], ids=["one rank", "two virtual ranks"])
def test_every_replay_of_a_captured_dispatch_looks(devices: list[str]) -> None:
    """A call keeps the number that it had when it was captured, and an error is told once."""
    cfg = EPConfig(HIDDEN, 8, 2, 32, len(devices), "nvfp4", 30)
    ids = torch.arange(64, dtype=torch.int32, device="cuda").view(32, 2) % 8
    with connected(cfg, devices) as communicators:
        xs = [torch.ones(32, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in communicators]
        outs = [ep.allocate() for ep in communicators]
        graphs = [torch.cuda.CUDAGraph() for _ in communicators]
        for ep in communicators:
            ep.check_finite = True
        for turn in range(2):  # a warm-up, and the capture
            for ep, x, out, graph in zip(communicators, xs, outs, graphs, strict=True):
                if turn:
                    with torch.cuda.graph(graph, stream=ep.stream if len(devices) > 1 else None):
                        ep.dispatch(x, ids, out=out)
                        ep.dispatch(x, ids, out=out)
                else:
                    ep.dispatch(x, ids, out=out)
            torch.cuda.synchronize()

        def replay() -> None:
            for ep, graph in zip(communicators, graphs, strict=True):
                with torch.cuda.stream(ep.stream if len(devices) > 1 else torch.cuda.current_stream()):
                    graph.replay()
            torch.cuda.synchronize()

        last = communicators[-1]
        for token, value, what in ((5, NAN, "a NaN"), (31, INF, "an infinity"), (0, -INF, "an infinity")):
            replay()
            told(last, None)
            xs[-1][token, 77] = value
            torch.cuda.synchronize()
            replay()
            for ep in communicators[:-1]:
                told(ep, None)
            told(last, f"token {token} of dispatch call 2 has {what}")
            xs[-1][token, 77] = 1
            torch.cuda.synchronize()


def test_it_cannot_be_set_during_a_capture() -> None:
    cfg = EPConfig(HIDDEN, 8, 2, 32, 1, "bf16", 30)
    with connected(cfg, ["cuda:0"]) as (ep,):
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.add_(1)
            with pytest.raises(EPError, match="check_finite: must be set before a CUDA graph is captured"):
                ep.check_finite = True
        assert not ep.check_finite


def test_calls_on_several_streams_are_all_looked_at() -> None:
    """The first call with a broken token is named, whichever stream it was on."""
    cfg = EPConfig(HIDDEN, 8, 2, 32, 1, "fp8", 30)
    ids = torch.zeros(32, 2, dtype=torch.int32, device="cuda")
    with connected(cfg, ["cuda:0"]) as (ep,):
        ep.check_finite = True
        streams = [torch.cuda.Stream() for _ in range(3)]
        for broken in (1, 4, 8):
            called, before = ep._finite._calls, None
            for number in range(9):
                x = torch.ones(32, HIDDEN, dtype=torch.bfloat16, device="cuda")
                if number >= broken:
                    x[number, 3] = NAN
                torch.cuda.current_stream().synchronize()
                stream = streams[number % 3]
                if before is not None:
                    stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    ep.dispatch(x, ids)
                before = stream
            told(ep, f"token {broken} of dispatch call {called + broken + 1} has a NaN")


@pytest.mark.parametrize("tokens", [1, 5, 64, 4096])
def test_its_first_use_waits_for_no_rank(tokens: int) -> None:
    """CUDA may load a kernel at its first launch and wait for an idle device meanwhile: a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.test_check_finite", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def first_use(tokens: int) -> None:
    """Rank 0 has one token, rank 1 many, and looks for the first time while rank 0 waits for it."""
    cfg = EPConfig(HIDDEN, 8, 2, max(tokens, 64), 2, "nvfp4", 20)
    with connected(cfg, ["cuda:0"] * 2) as communicators:
        counts = 1, tokens
        xs = [torch.ones(count, HIDDEN, dtype=torch.bfloat16, device="cuda") for count in counts]
        ids = [torch.zeros(count, 2, dtype=torch.int32, device="cuda") for count in counts]
        outs = [ep.allocate() for ep in communicators]
        for ep in communicators:
            ep.check_finite = True
        torch.cuda.synchronize()
        started = time.monotonic()
        for ep, *given, out in zip(communicators, xs, ids, outs, strict=True):
            ep.dispatch(*given, out=out)
        for ep in communicators:
            ep.synchronize()
        took = time.monotonic() - started
    assert took < 5, f"{took:.1f} s: the check has waited for rank 0"


if __name__ == "__main__":
    first_use(int(sys.argv[1]))
