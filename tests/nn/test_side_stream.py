"""What a layer enqueues on its stream and on the side stream, in which order, and whose memory is kept how long.

Streams are recorded, not run: `tests/gpu/test_side_stream.py` runs them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep import connect_local
from cute_ep.nn import GatedMLP, MoELayer, layer, side_stream
from cute_ep.nn.side_stream import SideStream, side_stream_of
from cute_ep.testing.compare import assert_bits

from .layers import INNER, config

CFG = config(1)


class Stream:
    """A stream that writes down for whom it waits."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Logged(torch.nn.Module):
    """A shared expert that writes down on which stream it computes, and its backward pass, and its gradients."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.mlp, self.streams, self.outputs = GatedMLP(CFG.hidden, INNER), streams, []
        for parameter in self.mlp.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: streams.log.append("gradient of shared"))

    def forward(self, x: Tensor) -> Tensor:
        self.streams.log.append(f"shared on {self.streams.current.name}")
        out = self.mlp(x)
        self.outputs.append(weakref.ref(out.untyped_storage()))
        return out


class Streams:
    """The caller's stream and the side stream, which is current, and what happened.

    Attributes:
        log: in the order of the host.
        recorded: (data pointer, name of the stream) of each `record_stream`.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recorded: list[tuple[int, str]] = []
        self.main, self.other, self.side = (Stream(name, self.log) for name in ("main", "other", "side"))
        self.current = self.main

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    cuda = SimpleNamespace(Stream=lambda device: made.side, stream=made.on, current_stream=lambda device: made.current)
    monkeypatch.setattr(side_stream, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: made.recorded.append((tensor.data_ptr(), stream.name))
    )
    return made


@pytest.fixture
def moe(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> MoELayer:
    """A layer that computes as on a GPU."""
    torch.manual_seed(0)
    (ep,) = connect_local(CFG, ["cpu"])
    made = MoELayer(CFG, INNER, shared=Logged(streams))
    made.attach(ep)
    made.kept = ep
    for name in ("dispatch", "combine"):
        monkeypatch.setattr(ep, name, logged(streams, name, getattr(ep, name)))
    side = SideStream(torch.device("cpu"))
    monkeypatch.setattr(made, "_side_stream", lambda tokens: side if made.overlap_shared else None)
    return made


def logged(streams: Streams, name: str, call: Any) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        streams.log.append(f"{name} on {streams.current.name}")
        return call(*arguments, **named)

    return run


def tokens() -> Tensor:
    return torch.randn(7, CFG.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_shared_expert_is_enqueued_behind_dispatch_and_awaited_behind_combine(
    moe: MoELayer, streams: Streams
) -> None:
    with torch.no_grad():
        moe(tokens())
    want = ["side waits for main", "dispatch on main", "shared on side", "combine on main", "main waits for side"]
    assert streams.log == want
    assert streams.current is streams.main


def test_a_backward_pass_waits_for_the_side_stream_when_all_of_the_shared_expert_is_enqueued(
    moe: MoELayer, streams: Streams
) -> None:
    """Before anything that comes before the layer, such as FSDP's reduction of its gradients, and behind the launch of
    dispatch's backward pass."""
    x = tokens().requires_grad_()
    before = x * 1
    before.register_hook(lambda grad: streams.log.append("layer's gradient is there"))
    out = moe(before)
    streams.log.clear()
    out.backward(x.detach())
    assert streams.log == [
        "dispatch on main",  # of combine
        "combine on main",
        "gradient of shared",
        "gradient of shared",
        "combine on main",  # of dispatch
        "side waits for main",
        "main waits for side",
        "layer's gradient is there",
    ]


@pytest.mark.parametrize("trained", [True, False], ids=["training", "inference"])
def test_the_bits_are_those_of_one_stream(moe: MoELayer, trained: bool) -> None:
    made = []
    for overlap in (True, False):
        moe.overlap_shared = overlap
        moe.zero_grad()
        x = tokens().requires_grad_(trained)
        with torch.set_grad_enabled(trained):
            parts = [moe(x)]
        if trained:
            parts[0].backward(x.detach())
            parts += [x.grad, *(one.grad.clone() for one in moe.parameters())]
        made.append([part.detach() for part in parts])
    for number, pair in enumerate(zip(*made, strict=True)):
        assert_bits(*pair, f"part {number}")


@pytest.mark.parametrize("broken", ["dispatch", "shared", "combine"])
def test_the_stream_waits_for_the_side_stream_also_after_an_error(
    moe: MoELayer, streams: Streams, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Otherwise the caller's tokens could be given back while the side stream reads them, and a capture could not
    end."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("broken")

    owner, name = (moe.shared, "forward") if broken == "shared" else (moe.kept, broken)
    monkeypatch.setattr(owner, name, fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="broken"):
        moe(tokens())
    assert (streams.log[0], streams.log[-1]) == ("side waits for main", "main waits for side")
    assert streams.current is streams.main


@pytest.mark.parametrize(
    ("trains", "x_trains", "recorded"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
    ids=["training", "frozen before", "frozen", "inference"],
)
def test_tokens_are_recorded_where_a_backward_pass_reads_them_on_the_side_stream(
    moe: MoELayer, streams: Streams, trains: bool, x_trains: bool, recorded: bool
) -> None:
    moe.requires_grad_(trains)
    x = tokens().requires_grad_(x_trains)
    moe(x)
    assert streams.recorded == [(x.data_ptr(), "side")] * recorded


def test_an_output_is_kept_until_the_side_stream_has_waited_for_its_reader(moe: MoELayer, streams: Streams) -> None:
    """Of the call before, not of all: memory of one output. Where another stream is current by then, for which the side
    stream does not wait, the reader is recorded."""
    alive: list[list[bool]] = []
    follow = streams.side.wait_stream

    def wait_stream(other: Stream) -> None:
        follow(other)
        gc.collect()
        alive.append([kept() is not None for kept in moe.shared.outputs])

    streams.side.wait_stream = wait_stream
    with torch.no_grad():
        for _ in range(3):
            moe(tokens())
        assert streams.recorded == []
        with streams.on(streams.other):
            moe(tokens())
        assert [stream for _, stream in streams.recorded] == ["main"]
        moe(tokens())
        assert [stream for _, stream in streams.recorded] == ["main", "other"]
    assert alive == [[False] * (calls - 1) + [True] if calls else [] for calls in range(5)]


def test_a_layer_keeps_one_stream_where_another_cannot_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, in compiled code, if told so, and if the shared expert makes calls of its own."""
    (ep,) = connect_local(CFG, ["cpu"])
    made = MoELayer(CFG, INNER, shared=GatedMLP(CFG.hidden, INNER))
    made.attach(ep)
    sides: list[Any] = []
    monkeypatch.setattr(layer, "side_stream_of", lambda communicator: sides.append(communicator) or "side")
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(layer, "needs_op", lambda **named: False)
    assert made._side_stream(tokens()) is None
    assert made._side_stream(on_gpu) == "side"
    monkeypatch.setattr(layer, "needs_op", lambda **named: True)
    assert made._side_stream(on_gpu) is None
    monkeypatch.setattr(layer, "needs_op", lambda **named: False)
    made.overlap_shared = False
    assert made._side_stream(on_gpu) is None
    made.overlap_shared, made.shared = True, torch.nn.Sequential(MoELayer(CFG, INNER))
    assert made._side_stream(on_gpu) is None
    assert sides == [ep]


def test_each_communicator_has_a_side_stream_of_its_own(streams: Streams) -> None:
    (one,), (other,) = connect_local(CFG, ["cpu"]), connect_local(CFG, ["cpu"])
    assert side_stream_of(one) is side_stream_of(one)
    assert side_stream_of(one) is not side_stream_of(other)
    gone = weakref.ref(side_stream_of(one))
    del one
    gc.collect()
    assert gone() is None, "it goes with its communicator"
