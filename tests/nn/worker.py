"""One rank in a process of its own: `python -m tests.nn.worker STORE RANK WORLD CHECK`; on GPUs if there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cute_ep import dequantize
from cute_ep.nn import GatedMLP, MoELayer, connect, disconnect, shard_state_dict
from cute_ep.reference.formats import quantize
from cute_ep.testing.compare import assert_bits
from tests.processes import join_group

from .layers import INNER, config, gradients_of
from .oracle import dense
from .test_exact import TOKENS, arguments, assert_exact, small_experts

ROUTING = "masked"


def layer_here(rank: int, world: int, device: torch.device) -> MoELayer:
    """Not connected."""
    layer = MoELayer(config(world), INNER, gate="relu2", device=device)
    state = {name: value.detach().bfloat16() for name, value in small_experts(layer.cfg).parameters().items()}
    layer.load_state_dict(shard_state_dict(layer, state, rank), strict=False)
    return layer


def made(layer: MoELayer, call: Callable[..., Tensor], rank: int) -> dict[str, Tensor]:
    """The output and all gradients of one rank, on the CPU."""
    own, device = arguments(layer.cfg, TOKENS[layer.cfg.world_size], ROUTING)[rank], layer.gate_up.device
    layer.zero_grad()
    x = own["x"].bfloat16().to(device).requires_grad_()
    weights = own["weights"].to(device, copy=True).requires_grad_()
    out = call(x, own["ids"].to(device), weights)
    out.backward(own["grad"].bfloat16().to(device))
    parts = {"output": out.detach(), "tokens": x.grad, "weights": weights.grad, **gradients_of(layer)}
    return {name: part.cpu() for name, part in parts.items()}


def assert_dense(got: dict[str, Tensor], rank: int, world: int) -> None:
    """What `made` returned is what a dense layer has, bit for bit."""
    cfg = config(world)
    experts = small_experts(cfg)
    for source, own in enumerate(arguments(cfg, TOKENS[world], ROUTING)):
        x, weights = (own[name].double().requires_grad_() for name in ("x", "weights"))
        out = dense(x, own["ids"], weights, experts)
        out.backward(own["grad"].double())
        if source == rank:
            for name, want in {"output": out, "tokens": x.grad, "weights": weights.grad}.items():
                assert_exact(got[name], want, f"rank {rank}: {name}")
    first = rank * cfg.local_experts
    for name, whole in experts.parameters().items():
        assert whole.grad is not None
        assert_exact(got[name], whole.grad[first : first + cfg.local_experts], f"rank {rank}: {name}")


def first_calls_connect_and_compute_what_a_dense_layer_does(rank: int, world: int, device: torch.device) -> None:
    """Then one whose tokens travel quantised, with a communicator of its own."""
    layer = layer_here(rank, world, device)
    assert_dense(made(layer, layer.experts, rank), rank, world)
    layer.communicator.synchronize()
    quantised = MoELayer(replace(layer.cfg, dispatch_format="mxfp8"), INNER, gate="relu2", device=device)
    quantised.load_state_dict(layer.state_dict())
    x = torch.randn(TOKENS[world][rank], layer.cfg.hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
    with torch.no_grad():
        routing = layer.router(x.to(device))
        got = quantised.experts(x.to(device), *routing)
        want = layer.experts(dequantize(quantize(x, "mxfp8"), "mxfp8").bfloat16().to(device), *routing)
    assert_bits(got.cpu(), want.cpu(), f"rank {rank}, mxfp8")
    quantised.communicator.synchronize()


def compiled_layers_compute_the_bits_of_eager_ones(rank: int, world: int, device: torch.device) -> None:
    layer = layer_here(rank, world, device)
    with connect(layer):
        want = made(layer, layer.experts, rank)
        got = made(layer, torch.compile(layer.experts, backend="aot_eager", fullgraph=True), rank)
        for name, part in want.items():
            assert_bits(got[name], part, f"rank {rank}: {name}")


def a_group_of_some_ranks_has_layers_of_its_own(rank: int, world: int, device: torch.device) -> None:
    """The last rank is a group of one."""
    groups = [dist.new_group(list(range(world - 1))), dist.new_group([world - 1])]
    alone = rank == world - 1
    layer = layer_here(0 if alone else rank, 1 if alone else world - 1, device)
    with connect(layer, groups[alone]) as opened:
        place = layer.communicator.rank
        got = made(layer, layer.experts, place)
        opened.synchronize()
    assert_dense(got, place, layer.cfg.world_size)


class Busy(GatedMLP):
    """An expert whose kernels take a whole GPU for a while, on each rank for another one."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            square = torch.ones(4096, 4096, dtype=torch.bfloat16, device=x.device)
            for _ in range(1 + 3 * dist.get_rank()):
                square = square @ square
        return super().forward(x)


def shared_experts_on_a_side_stream_change_no_bit(rank: int, world: int, device: torch.device) -> None:
    """Several layers deep, with nothing on the host between them."""
    layer = layer_here(rank, world, device)
    torch.manual_seed(1)
    layer.shared = Busy(layer.cfg.hidden, INNER, device=device)
    own, made = arguments(layer.cfg, TOKENS[world], ROUTING)[rank], []
    with connect(layer):
        for overlap in (False, True):
            layer.overlap_shared = overlap
            layer.zero_grad()
            x = own["x"].bfloat16().to(device).requires_grad_()
            out = x
            for _ in range(5):
                out = layer(out) / 4
            out.backward(own["grad"].bfloat16().to(device))
            made.append([part.cpu() for part in (out.detach(), x.grad, *(one.grad for one in layer.parameters()))])
        layer.communicator.synchronize()
    for number, pair in enumerate(zip(*made, strict=True)):
        assert_bits(*pair, f"rank {rank}: part {number}")


CHECKS: dict[str, Callable[[int, int, torch.device], None]] = {
    one.__name__: one
    for one in (
        first_calls_connect_and_compute_what_a_dense_layer_does,
        compiled_layers_compute_the_bits_of_eager_ones,
        a_group_of_some_ranks_has_layers_of_its_own,
        shared_experts_on_a_side_stream_change_no_bit,
    )
}


def main(store: Path, rank: int, world: int, name: str) -> None:
    gpu = join_group(store, rank, world)
    CHECKS[name](rank, world, gpu or torch.device("cpu"))
    disconnect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
