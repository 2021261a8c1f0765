"""A shared expert on a side stream: it runs beside dispatch and combine, changes no bit, and all memory is there for as
long as a stream reads it. `tests/nn/test_side_stream.py` has what is enqueued where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.nn import GatedMLP, MoELayer
from cute_ep.testing.compare import assert_bits

from .conftest import connected

CFG = EPConfig(hidden=1024, num_experts=8, top_k=4, max_tokens_per_rank=2048, world_size=1, timeout_s=30)
DEVICE, INNER = torch.device("cuda:0"), 64
LONG = 40_000_000
"""Cycles, some 20 ms: much longer than the rest of the layer."""
CALLS, SHARED = r"cute_ep_(dispatch|combine)", r"spin_kernel"
"""Names of kernels: those of the communicator, and the one that only the shared expert of this file has."""
TRACES = 3
"""A trace beside three other processes of the GPU once had no combine (2 x H200, 2026-11-29)."""


class Fixed(torch.nn.Module):
    """A router that reads no tokens, so that the shared expert alone keeps them for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.linspace(0, 1, CFG.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.arange(x.shape[0], device=x.device)[:, None]
        ids = (first + torch.arange(CFG.top_k, device=x.device)) % CFG.num_experts
        return ids, self.scores.softmax(0)[ids]


class _Late(torch.autograd.Function):
    """Sleeps on the current stream before anything behind it is read, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return grad


class Late(torch.nn.Module):
    """An expert that reads its tokens, and in the backward pass what it has saved, long after it was enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP(CFG.hidden, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return _Late.apply(self.mlp(_Late.apply(x)))


class _Pour(torch.autograd.Function):
    """In the backward pass fills all memory that is free by then, of the size of the tokens, with NaN on its stream."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        size, poured, before = (CFG.max_tokens_per_rank, CFG.hidden), [], torch.cuda.memory_reserved(DEVICE)
        while torch.cuda.memory_reserved(DEVICE) == before:
            poured.append(torch.full(size, torch.nan, dtype=torch.bfloat16, device=DEVICE))
        return grad


@pytest.fixture
def ep() -> Iterator[EPCommunicator]:
    """A rank that leaves half of the SMs to others."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count // 2
    with connected(CFG, ["cuda:0"], sms=sms) as (ep,):
        yield ep
        ep.synchronize()


def layer_with(ep: EPCommunicator, shared: torch.nn.Module, *, overlap: bool = True) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CFG, INNER, router=Fixed(), shared=shared, overlap_shared=overlap).to(DEVICE)
    layer.attach(ep)
    return layer


def tokens(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(CFG.max_tokens_per_rank, CFG.hidden, generator=generator).bfloat16().to(DEVICE)


def kernels_of(run: Callable[[], None], path: Path) -> list[tuple[str, float, float]]:
    """(name, begin, end) of each kernel that `run` launches, from a trace of torch's profiler, in us. Of TRACES the
    first that has both calls."""
    for _ in range(TRACES):
        found = _traced(run, path)
        if len({call[1] for name, *_ in found if (call := re.search(CALLS, name))}) == 2:
            break
    return found


def _traced(run: Callable[[], None], path: Path) -> list[tuple[str, float, float]]:
    """One trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda._sleep(10 * LONG)  # the host enqueues all of it meanwhile
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events]


def overlaps(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Call -> the part of its time in which a kernel of the shared expert ran; the least of equal names."""
    shared = [(begin, end) for name, begin, end in kernels if re.search(SHARED, name)]
    assert len(shared) > 2, "the trace has no kernels of the shared expert"
    found: dict[str, float] = {}
    for name, begin, end in kernels:
        if re.search(CALLS, name):
            both = sum(max(0.0, min(end, one[1]) - max(begin, one[0])) for one in shared)
            found[name] = min(found.get(name, 1.0), both / (end - begin))
    assert any("dispatch" in name for name in found) and any("combine" in name for name in found)
    return found


def forward(layer: MoELayer, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def both_passes(layer: MoELayer, x: Tensor) -> Callable[[], None]:
    x, grad = x.clone().requires_grad_(), x.clone()

    def run() -> None:
        layer(x).backward(grad)
        layer.zero_grad()
        x.grad = None

    return run


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of what `run` does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("passes", [forward, both_passes])
def test_the_shared_expert_runs_beside_dispatch_and_combine(
    ep: EPCommunicator, tmp_path: Path, passes: Callable[..., Callable[[], None]], in_graph: bool
) -> None:
    """Of both passes; without a side stream it never does."""
    for overlap in (True, False):
        run = passes(layer_with(ep, Late(), overlap=overlap), tokens())
        run = captured(run) if in_graph else run
        run()
        torch.cuda.synchronize()
        for name, part in overlaps(kernels_of(run, tmp_path / f"{overlap}.json")).items():
            assert part > 0.5 if overlap else part < 0.02, (name, part)


def trained(layer: MoELayer, seed: int) -> list[Tensor]:
    """[output, gradients of tokens and parameters]; the tokens that the layer is given are nobody's afterwards."""
    layer.zero_grad()
    leaf = tokens(seed).requires_grad_()
    out = layer(leaf * 1)
    out.backward(tokens(seed + 100))
    return [out.detach(), leaf.grad, *(one.grad.clone() for one in layer.parameters())]


def pour_behind_dispatch(layer: MoELayer) -> None:
    """Have the layer's backward pass fill free memory between the enqueueing of the shared expert's and of
    dispatch's."""
    dispatch = layer._dispatch

    def dispatched(*arguments: Any) -> Any:
        batch = dispatch(*arguments)
        return batch._replace(tokens=_Pour.apply(batch.tokens)) if torch.is_grad_enabled() else batch

    layer._dispatch = dispatched


@pytest.mark.parametrize("shared", [partial(GatedMLP, CFG.hidden, INNER), Late], ids=["early", "late"])
def test_bits_are_those_of_one_stream(ep: EPCommunicator, shared: Callable[[], torch.nn.Module]) -> None:
    """Over many steps without a word from the host, in which freed memory is poisoned; inference, training, and a graph
    of several layers."""
    layer = layer_with(ep, shared())
    pour_behind_dispatch(layer)
    made = {}
    for overlap in (False, True):
        layer.overlap_shared = overlap
        parts = [trained(layer, seed) for seed in range(4)]
        with torch.no_grad():
            x = tokens()
            parts.append([x := layer(x) for _ in range(4)])
            graph, given = torch.cuda.CUDAGraph(), tokens(7)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = given
                for _ in range(4):
                    out = layer(out)
            graph.replay()
            parts.append([out.clone()])
        made[overlap] = [part for step in parts for part in step]
    for number, pair in enumerate(zip(made[True], made[False], strict=True)):
        assert_bits(*(part.cpu() for part in pair), f"part {number}")


def test_memory_that_is_not_recorded_is_overwritten(ep: EPCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shows that the test above can fail. By NaN, or by what was written there behind it."""
    layer = layer_with(ep, Late())
    pour_behind_dispatch(layer)
    want = trained(layer, 1)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    assert not all(torch.equal(*pair) for pair in zip(trained(layer, 1), want, strict=True))


def test_a_capture_of_many_layers_uses_the_memory_of_few(ep: EPCommunicator) -> None:
    layer, x = layer_with(ep, GatedMLP(CFG.hidden, INNER)), tokens()

    def captured_bytes(depth: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph, out = torch.cuda.CUDAGraph(), x
        with torch.cuda.graph(graph):
            for _ in range(depth):
                out = layer(out)
        return torch.cuda.memory_reserved() - before

    with torch.no_grad():
        layer(x)
        few, many = captured_bytes(3), captured_bytes(23)
    assert many - few < 10 * x.nbytes, f"{(many - few) / x.nbytes / 20:.1f} outputs for each layer"
