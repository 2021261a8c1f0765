"""Whole layers on all ranks: dispatch, grouped matmul, SwiGLU, grouped matmul, combine.

A layer's output, normalised, is the next one's input.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import grouped_mm, rms_norm, silu

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.dispatched import Dispatched
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.local_ops import fused_silu
from cute_ep.testing.workloads import make_inputs

from .conftest import LIBRARY
from .runs import Streams, delay, draw_delay, settle

MODES = ("exact", "partial")
ROUTINGS = ("uniform", "repeated", "zipf", "masked")
BLOCK = 128


@dataclass(frozen=True)
class Experts:
    """The groups of one rank: up [G, hidden, 2 * inner], gate columns first, and down [G, inner, hidden], bfloat16."""

    up: torch.Tensor
    down: torch.Tensor

    def dense(self, group: int, x: torch.Tensor) -> torch.Tensor:
        """What one group makes of tokens [T, hidden], in float32."""
        gate, up = (x.float() @ self.up[group].float()).chunk(2, dim=1)
        return (silu(gate) * up) @ self.down[group].float()


def plain_experts(groups: int, hidden: int, inner: int, device: torch.device, seed: int) -> Experts:
    """Normal weights, scaled so that sums have about the size of normalised tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (groups, hidden, 2 * inner), (groups, inner, hidden)
    made = [torch.randn(s, generator=generator, device=device).mul_(2 * s[1] ** -0.5).bfloat16() for s in shapes]
    return Experts(*made)


def fp8_experts(groups: int, hidden: int, inner: int, device: torch.device, seed: int) -> Experts:
    """What 8-bit weights with a scale for each 128x128 block are, as bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def weight(rows: int, columns: int, size: float) -> torch.Tensor:
        payload = torch.randn(rows, columns, generator=generator, device=device).to(torch.float8_e4m3fn)
        scales = 0.5 + torch.rand(rows // BLOCK, columns // BLOCK, generator=generator, device=device)
        values = payload.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return (values * (scales * size * rows**-0.5)[:, None, :, None]).view(rows, columns).bfloat16()

    pairs = [(weight(hidden, 2 * inner, 1.0), weight(inner, hidden, 0.35)) for _ in range(groups)]
    return Experts(*(torch.stack(column) for column in zip(*pairs, strict=True)))


def dequantized(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of 8-bit elements with transposed scale factors [blocks, rows], as bfloat16. Rows without data are any."""
    wide = payload.float().view(payload.shape[0], -1, BLOCK)
    return (wide * scales.t()[:, :, None]).view(payload.shape).bfloat16()


def apply_experts(batch: Dispatched, experts: Experts, fmt: str) -> torch.Tensor:
    """Expert outputs of all rows of a batch, bfloat16, on the current stream; only the device knows how many."""
    ends, quantized = batch.row_offsets[1:], fmt != "bf16"
    tokens = dequantized(batch.tokens, batch.scales) if quantized else batch.tokens
    gate_up = grouped_mm(tokens, experts.up, offs=ends)
    inner = fused_silu(gate_up, batch.row_offsets, fmt=fmt, library=str(LIBRARY))
    return grouped_mm(dequantized(*inner) if quantized else inner, experts.down, offs=ends)


class Network:
    """Layers of one group, with the same experts in each.

    Args:
        communicators: all ranks.
        tokens: of each rank.
        experts: of each rank.
        depth: layers.
    """

    def __init__(
        self, communicators: Sequence[Communicator], tokens: Sequence[int], experts: Sequence[Experts], depth: int
    ) -> None:
        self.communicators, self.experts, self.depth = communicators, experts, depth
        self.cfg = communicators[0].cfg
        made = [make_inputs(self.cfg, tokens, ROUTINGS[n % 4], n) for n in range(depth)]
        devices = [c.device for c in communicators]
        self.x = [torch.randn(t, self.cfg.hidden).bfloat16().to(d) for t, d in zip(tokens, devices, strict=True)]
        self.ids = [[one.topk_ids.to(d) for one, d in zip(layer, devices, strict=True)] for layer in made]
        self.weights = [[one.router_weights.to(d) for one, d in zip(layer, devices, strict=True)] for layer in made]
        self.buffers: list[list[DispatchBuffers]] = [[c.allocate() for c in communicators] for _ in range(depth)]
        self.streams = Streams.of_ranks(communicators, False)

    def input(self, n: int, rank: int, outs: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Tokens of a layer, after the outputs of those before it."""
        return rms_norm(outs[n - 1][rank], (self.cfg.hidden,)) if n else self.x[rank]

    def run(self, seed: int | None = None) -> list[list[torch.Tensor]]:
        """Each layer's output, a rank each. With a seed, rank by rank without a word from the host, and with delays;
        else every step on all ranks, and then the end of it, before the next."""
        ranks = range(len(self.communicators))
        outs = [[torch.empty_like(self.x[rank]) for rank in ranks] for _ in range(self.depth)]
        tokens, batches, rows = ({} for _ in range(3))
        generator = random.Random(seed)

        def step(rank: int, n: int, part: str) -> None:
            c, streams = self.communicators[rank], self.streams[rank]
            with streams.on("D") if streams else nullcontext():
                if seed is not None:
                    delay(c.device, draw_delay(generator))
                if part == "tokens":
                    tokens[rank] = self.input(n, rank, outs)
                elif part == "dispatch":
                    given = tokens[rank], self.ids[n][rank], self.weights[n][rank]
                    batches[rank] = c.dispatch(*given, out=self.buffers[n][rank])
                elif part == "experts":
                    rows[rank] = apply_experts(batches[rank], self.experts[rank], self.cfg.dispatch_format)
                else:
                    c.combine(rows[rank], batches[rank], mode=MODES[n % 2], out=outs[n][rank])

        steps = [(n, part) for n in range(self.depth) for part in ("tokens", "dispatch", "experts", "combine")]
        settle([c.device for c in self.communicators])
        if seed is not None:
            for rank in ranks:
                for n, part in steps:
                    step(rank, n, part)
        for n, part in steps if seed is None else ():
            for rank in ranks:
                step(rank, n, part)
            for communicator in self.communicators:
                communicator.synchronize()
            settle([c.device for c in self.communicators])
        for communicator in self.communicators:
            communicator.synchronize()
        return outs

    def dense(self, n: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What layer n must make of tokens of all ranks, in float32, to rounding: every expert on every token that
        chose it, without any of this package."""
        local, shared = self.cfg.local_experts, int(self.cfg.fused_shared_expert)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in inputs]
        for owner, experts in enumerate(self.experts):
            device = experts.up.device
            for source, x in enumerate(inputs):
                for expert in range(local):
                    token, slot = (self.ids[n][source] == owner * local + expert).nonzero(as_tuple=True)
                    rows = experts.dense(expert + shared, x[token].to(device)).to(x.device)
                    sums[source].index_add_(0, token, rows * self.weights[n][source][token, slot, None])
            if shared:
                sums[owner] += experts.dense(0, inputs[owner])
        return sums
