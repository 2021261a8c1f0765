"""A whole layer whose tokens, experts' weights and inner rows are quantised in one format, as large models are served,
and two dense layers to compare it with. Plain torch but for what is tested.

How far it may be from the layer with the original weights, in float32: let e be the root mean square of a quantiser's
error over that of what it quantises, the same for tokens, weights and inner rows, and all errors independent of each
other. A matmul adds the squares of its operands' e, so gate and up projections are off by r = sqrt(2) * e of their
size. With normal g and u of size 1, y = silu(g) * u is off by

    E[(silu'(g) * u * r)^2 + (silu(g) * r)^2] / E[y^2] = r^2 * (0.379 + 0.356) / 0.356 < 2.1 * r^2

and the second matmul adds 2 * e^2: n^2 < (2 * 2.1 + 2) * e^2 = 6.2 * e^2. Sums over experts and ranks change nothing,
errors of experts are independent as their outputs are. An error independent of the output leaves a cosine of
1 / sqrt(1 + n^2).

    e4m3: elements of a binade [a, 2 * a) are a / 8 apart, so errors are a / 8 / sqrt(12) in the mean square, and
          e < 0.0361 wherever in the binade they are: n^2 < 0.0081, a cosine above 0.9959.
    e2m1: a / 2 apart, 0.145 of them. Those below 1, where 6 is the block's maximum, are 0.5 apart, an error of 0.145
          too, beside a root mean square of 3 (the largest of 16 normal numbers is some 2 sigma): e^2 < 0.145^2 *
          (1 + 1/9), n^2 < 0.145, a cosine above 0.934.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, grouped_mm, silu

from cute_ep import dequantize, fused_silu, reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import LINEAR

LIMITS = {"nvfp4": 0.934, "mxfp8": 0.98, "fp8": 0.9959}
"""Least cosine of a token's output and that of a float32 layer with the original weights: of mxfp8 upstream's, of the
others as derived above (upstream's 0.995 for nvfp4 is to a layer that quantises too: `ALIKE`)."""
ALIKE = 0.995
"""The same to a float32 layer with the stored weights that quantises tokens and inner rows: what is left are roundings
to bfloat16, and elements that they push over a tie."""
WEIGHT_SCALE = 2.0**10
"""Global scale of quantised weights: their largest elements are some 2**-4, and nvfp4's factors would be subnormal."""
MODES = ("exact", "partial")


@dataclass(frozen=True)
class Sizes:
    """Of a layer over two ranks."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: tuple[int, int]

    def config(self, fmt: str) -> EPConfig:
        return EPConfig(self.hidden, self.experts, self.top_k, max(*self.tokens, 1), len(self.tokens), fmt, 60)


def quantised(rows: Tensor, fmt: str, scale: float = 1.0) -> Tensor:
    """What rows [N, n] are once quantised, bfloat16, by the definition of the format."""
    rows = rows.bfloat16()
    given = {"global_scale": scale} if FORMATS[fmt].global_scale else {}
    return reference.dequantize(reference.quantize(rows, fmt, **given), fmt, **given).bfloat16()


class Expert:
    """The original weights of one expert, bfloat16: gate_up [2 * inner, hidden], down [hidden, inner]."""

    def __init__(self, sizes: Sizes, number: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1000 + number)
        shapes = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
        self.gate_up, self.down = (
            torch.randn(shape, generator=generator, device=device).mul_(shape[1] ** -0.5).bfloat16() for shape in shapes
        )

    def stored(self, fmt: str) -> tuple[Tensor, Tensor]:
        """(gate_up, down) once quantised, bfloat16."""
        return quantised(self.gate_up, fmt, WEIGHT_SCALE), quantised(self.down, fmt, WEIGHT_SCALE)


class Layer:
    """The layer on all ranks of a process: what is tested."""

    def __init__(self, sizes: Sizes, ranks: Sequence[EPCommunicator], library: str | None = None) -> None:
        self.sizes, self.ranks, self.library = sizes, ranks, library
        self.fmt = ranks[0].cfg.dispatch_format
        self.weights = []
        for ep in ranks:
            first = ep.rank * ep.cfg.local_experts
            local = [Expert(sizes, first + e, ep.device).stored(self.fmt) for e in range(ep.cfg.local_experts)]
            self.weights.append(tuple(torch.stack(column).transpose(1, 2) for column in zip(*local, strict=True)))

    def experts(self, batch: Dispatched, gate_up: Tensor, down: Tensor) -> Tensor:
        """The experts' outputs of a batch, bfloat16."""
        ends = batch.row_offsets[1:]
        rows = dequantize(batch, self.fmt).bfloat16()
        between = grouped_mm(rows, gate_up, offs=ends)
        options = {"fmt": self.fmt, "scale_layout": LINEAR, "library": self.library}
        inner = fused_silu(between, batch.row_offsets, **options)
        held = dequantize(inner, self.fmt, scale_layout=LINEAR, row_offsets=batch.row_offsets)
        return grouped_mm(held.bfloat16(), down, offs=ends)

    def __call__(self, inputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
        """(mode of combine, output of each rank) of (tokens, ids, router weights) a rank."""
        batches = [ep.dispatch(*given) for ep, given in zip(self.ranks, inputs, strict=True)]
        self.wait()
        rows = [self.experts(batch, *held) for batch, held in zip(batches, self.weights, strict=True)]
        for mode in MODES:
            out = [ep.combine(*given, mode=mode) for ep, *given in zip(self.ranks, rows, batches, strict=True)]
            self.wait()
            yield mode, out

    def wait(self) -> None:
        for ep in self.ranks:
            ep.synchronize()


def dense(sizes: Sizes, given: tuple[Tensor, Tensor, Tensor], fmt: str | None) -> Tensor:
    """The layer in float32 for one rank's tokens, expert by expert. With a format tokens, weights and inner rows are
    quantised; None: nothing is."""
    x, ids, weights = given
    out = torch.zeros(x.shape, device=x.device)
    for number in range(sizes.experts):
        token, slot = (ids == number).nonzero(as_tuple=True)
        if not len(token):
            continue
        expert = Expert(sizes, number, x.device)
        gate_up, down = (expert.gate_up, expert.down) if fmt is None else expert.stored(fmt)
        rows = (x[token] if fmt is None else quantised(x[token], fmt)).float()
        g, u = (rows @ gate_up.float().t()).chunk(2, dim=1)
        y = silu(g) * u
        y = y if fmt is None else quantised(y, fmt).float()
        out.index_add_(0, token, (y @ down.float().t()) * weights[token, slot, None])
    return out


def inputs(sizes: Sizes, devices: Sequence[torch.device]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, ids, router weights) of each rank."""
    generator, made = torch.Generator().manual_seed(7), []
    for count, device in zip(sizes.tokens, devices, strict=True):
        x = torch.randn(count, sizes.hidden, generator=generator).bfloat16()
        scores = torch.randn(count, sizes.experts, generator=generator).softmax(dim=1)
        weights, ids = scores.topk(sizes.top_k, dim=1)
        made.append((x.to(device), ids.int().to(device), (weights / weights.sum(1, keepdim=True)).to(device)))
    return made


def check(sizes: Sizes, ranks: Sequence[EPCommunicator], library: str | None = None) -> None:
    """AssertionError unless each token's output is as near to both dense layers as it must be."""
    fmt = ranks[0].cfg.dispatch_format
    given = inputs(sizes, [ep.device for ep in ranks])
    wanted = {ALIKE: fmt, LIMITS[fmt]: None}
    dense_of = {limit: [dense(sizes, one, how) for one in given] for limit, how in wanted.items()}
    for mode, outs in Layer(sizes, ranks, library)(given):
        for limit, wants in dense_of.items():
            for rank, (out, want) in enumerate(zip(outs, wants, strict=True)):
                assert out.isfinite().all()
                least = cosine_similarity(out.float(), want, dim=1).min().item() if len(out) else 1.0
                assert least > limit, f"{fmt}, {mode}, rank {rank}: cosine {least:.5f}, must be above {limit}"
