"""One Mixture-of-Experts layer on real text: tokenise, embed, route, dispatch, experts, combine, and a check.

Every rank holds its own slice of the text and its own experts. The grouped matmul is a plain loop over experts,
so what the times of the expert stages say is only how much of a layer communication is.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.presets import Preset
from cute_ep.runtime.decode import decode_rows
from cute_ep.runtime.local_ops import fused_silu

DEFAULT_MODULE = "turtle"
"""A large module of the standard library, more prose than most: its source is the text when none is given."""
VOCABULARY = 256
CONTEXT = 6
"""Earlier bytes that reach a token's row, each with MIXING times the weight of the one after it."""
MIXING = 0.6
SILU_RMS = 0.6
"""Root mean square of silu(g) * u for standard normal g and u: keeps expert outputs near 1."""
WEIGHT_SHARE = 0.4
"""Largest part of a GPU's free memory that expert weights may take."""
LEAST_RMS, RMS_PER_ROUNDOFF = 0.01, 0.8
"""Largest `relative_errors` of a layer, root mean squares: at least LEAST_RMS, and RMS_PER_ROUNDOFF of what rounding to
an element of the dispatch format may change (`Element.roundoff`). Layers of this module show 0.005 with bf16, 0.04 with
e4m3 (limit 0.05) and 0.16 with e2m1 (limit 0.2), whatever the text and the widths."""
CPU_PRESET_DIVISOR = 8
CPU_EXPERTS = 64


def read_text(path: str | None) -> tuple[str, bytes]:
    """(name, bytes) of a file, or of a standard library module's source; EPInputError when it cannot be read."""
    if path is None:
        spec = importlib.util.find_spec(DEFAULT_MODULE)
        if spec is None or spec.origin is None:
            raise EPInputError(f"text: this Python has no module {DEFAULT_MODULE}, name a file instead")
        return f"the source of Python's {DEFAULT_MODULE}", Path(spec.origin).read_bytes()
    try:
        return path, Path(path).read_bytes()
    except OSError as error:
        raise EPInputError(f"text = {path!r}: {error.strerror}") from None


def cpu_preset(preset: Preset, *, widths: bool = True, experts: bool = True) -> Preset:
    """`preset` made small enough for a CPU: `widths` divided by 8 (whole 128s), at most 64 `experts`."""

    def narrow(width: int) -> int:
        return max(128, width // CPU_PRESET_DIVISOR // 128 * 128) if widths else width

    count = min(preset.num_experts, CPU_EXPERTS) if experts else preset.num_experts
    return Preset(f"{preset.name}, reduced", narrow(preset.hidden), narrow(preset.moe_hidden), count, preset.top_k)


@dataclass(frozen=True)
class TextBatch:
    """One rank's tokens: x [T, hidden] bfloat16, topk_ids [T, K] int32, router_weights [T, K] float32 (sum 1)."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    router_weights: torch.Tensor


def embed(text: bytes, hidden: int, seed: int) -> torch.Tensor:
    """[len(text), hidden] float32 rows of unit root mean square: a byte's embedding plus those of earlier bytes."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCABULARY, hidden, generator=generator)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).int()
    rows = torch.zeros(len(text), hidden)
    for distance in range(min(CONTEXT, len(text))):
        rows[distance:] += MIXING**distance * table[ids[: len(text) - distance]].roll(distance, dims=1)
    return rows / rows.square().mean(dim=1, keepdim=True).sqrt()


def route(rows: torch.Tensor, num_experts: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k softmax router with a random projection: ([T, K] int32 ids, [T, K] float32 weights that sum to 1)."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(rows.shape[1], num_experts, generator=generator) / rows.shape[1] ** 0.5
    weights, ids = (rows @ projection).softmax(dim=1).topk(top_k, dim=1)
    return ids.int(), weights / weights.sum(dim=1, keepdim=True)


def text_batches(text: bytes, preset: Preset, ranks: int, tokens: int, seed: int) -> list[TextBatch]:
    """`ranks` consecutive pieces of the text, `tokens` bytes each (fewer when the text is short), on the CPU.

    Raises:
        EPInputError: the text has fewer bytes than there are ranks.
    """
    tokens = min(tokens, len(text) // ranks)
    if not tokens:
        raise EPInputError(f"text = {len(text)} bytes: must have at least one for each of {ranks} ranks")
    rows = embed(text[: tokens * ranks], preset.hidden, seed)
    ids, weights = route(rows, preset.num_experts, preset.top_k, seed + 1)
    parts = (rows.bfloat16().split(tokens), ids.split(tokens), weights.split(tokens))
    return [TextBatch(*(part.contiguous() for part in one)) for one in zip(*parts, strict=True)]


class ExpertWeights:
    """SwiGLU experts of one rank, seeded by their global number: gate|up [2 * I, hidden], down [hidden, I], bfloat16.

    With fewer weight sets than experts, the rank's expert e uses set e % sets.

    Args:
        experts: global numbers of the rank's experts.
        sets: weight sets at most.

    Attributes:
        sets: weight sets in memory.
        nbytes: their bytes.
    """

    def __init__(self, preset: Preset, experts: range, device: torch.device, sets: int, seed: int) -> None:
        self.sets = min(sets, len(experts))
        inner, hidden = preset.moe_hidden, preset.hidden
        self.gate_up = torch.empty(self.sets, 2 * inner, hidden, dtype=torch.bfloat16, device=device)
        self.down = torch.empty(self.sets, hidden, inner, dtype=torch.bfloat16, device=device)
        generator = torch.Generator(device=device)
        for index, expert in enumerate(experts[: self.sets]):
            generator.manual_seed(seed + expert)
            for weight, scale in ((self.gate_up[index], hidden**-0.5), (self.down[index], inner**-0.5 / SILU_RMS)):
                weight.copy_(torch.randn(weight.shape, generator=generator, device=device) * scale)
        self.nbytes = self.gate_up.nbytes + self.down.nbytes

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate|up, down) of a local expert."""
        return self.gate_up[expert % self.sets], self.down[expert % self.sets]


def make_experts(cfg: EPConfig, preset: Preset, devices: Sequence[str], seed: int) -> list[ExpertWeights]:
    """The weights of every rank, in as many sets as WEIGHT_SHARE of each GPU's free memory holds."""
    one = 3 * preset.hidden * preset.moe_hidden * 2
    made = []
    for rank, name in enumerate(devices):
        device, sets = torch.device(name), cfg.local_experts
        if device.type == "cuda":
            still_to_come = devices[rank:].count(name)
            free = torch.cuda.mem_get_info(device)[0]
            sets = max(1, min(sets, int(free * WEIGHT_SHARE) // still_to_come // one))
        first = rank * cfg.local_experts
        made.append(ExpertWeights(preset, range(first, first + cfg.local_experts), device, sets, seed))
    return made


@dataclass
class StageTimes:
    """Host wall-clock seconds of each stage, all ranks together, from idle devices to idle devices."""

    devices: tuple[torch.device, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed work to stage `name`."""
        _settle(self.devices)
        start = time.perf_counter()
        yield
        _settle(self.devices)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _settle(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def as_linear(cfg: EPConfig) -> EPConfig:
    """The same deployment with scale factors beside the rows that they are of, as a decoder wants them."""
    return cfg if cfg.format.scale is None else replace(cfg, scale_layout="linear")


def run_experts(
    cfg: EPConfig,
    received: Sequence[Dispatched],
    experts: Sequence[ExpertWeights],
    times: StageTimes,
    library: str | None = None,
) -> list[torch.Tensor]:
    """Per rank [num_rows, hidden] bfloat16: down(silu(gate x) * up x) of every received row.

    Reads `row_offsets` on the host once per rank. bfloat16 between the stages, on the CPU the products are float32.

    Args:
        cfg: the ranks', `as_linear`.
        received: what dispatch returned, with `input_scale` 1.
        experts, library: as of `run_layer`.
        times: gets a stage for each step.
    """
    slices, inputs, inner, outputs = [], [], [], []
    with times.stage("row offsets"):
        for batch in received:
            ends = pairwise(batch.row_offsets.tolist())
            slices.append({group: slice(*pair) for group, pair in enumerate(ends) if pair[1] > pair[0]})
    with times.stage("decode rows"):
        for batch, groups in zip(received, slices, strict=True):
            rows = max((own.stop for own in groups.values()), default=0)
            scales, row_scales = (None if part is None else part[:rows] for part in (batch.scales, batch.row_scales))
            inputs.append(decode_rows(cfg.format, batch.tokens[:rows], scales, row_scales, None))
    with times.stage("gate|up"):
        for batch, groups, x, weights in zip(received, slices, inputs, experts, strict=True):
            product = _empty(batch, weights.gate_up.shape[1])
            for expert, own in groups.items():
                product[own] = _matmul(x[own], weights.of(expert)[0])
            inner.append(product)
    with times.stage("swiglu"):
        inner = [
            fused_silu(product, batch.row_offsets, library=library)
            for product, batch in zip(inner, received, strict=True)
        ]
    with times.stage("down"):
        for batch, groups, product, weights in zip(received, slices, inner, experts, strict=True):
            output = _empty(batch, cfg.hidden)
            for expert, own in groups.items():
                output[own] = _matmul(product[own], weights.of(expert)[1])
            outputs.append(output)
    return outputs


def _empty(batch: Dispatched, columns: int) -> torch.Tensor:
    return torch.empty(int(batch.num_rows), columns, dtype=torch.bfloat16, device=batch.num_rows.device)


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in bfloat16; a CPU multiplies in float32, since few have bfloat16 units."""
    if x.device.type == "cpu":
        return (x.float() @ weight.float().T).bfloat16()
    return x @ weight.T


def run_layer(
    communicators: Sequence,
    batches: Sequence[TextBatch],
    experts: Sequence[ExpertWeights],
    modes: Sequence[str],
    library: str | None = None,
) -> tuple[dict[str, list[torch.Tensor]], StageTimes]:
    """One layer on all ranks of this process, driven from this thread.

    Args:
        communicators: all ranks, in order, of a configuration that is `as_linear`.
        batches: per rank, on the rank's device.
        modes: combine modes to run on the same expert outputs.
        library: folder of compiled kernels to look in first.

    Returns:
        {mode: per rank [T, hidden] bfloat16}, and the times (stage "combine MODE" for each mode).
    """
    cfg = communicators[0].cfg
    times = StageTimes(tuple(dict.fromkeys(batch.x.device for batch in batches)))
    results = {}
    with times.stage("dispatch"):
        received = [
            communicator.dispatch(batch.x, batch.topk_ids, batch.router_weights)
            for communicator, batch in zip(communicators, batches, strict=True)
        ]
    for communicator in communicators:
        communicator.synchronize()
    outputs = run_experts(cfg, received, experts, times, library)
    for mode in modes:
        with times.stage(f"combine {mode}"):
            results[mode] = [
                communicator.combine(rows, batch, mode=mode)
                for communicator, rows, batch in zip(communicators, outputs, received, strict=True)
            ]
        for communicator in communicators:
            communicator.synchronize()
    return results, times


def dense_layer(cfg: EPConfig, batches: Sequence[TextBatch], experts: Sequence[ExpertWeights]) -> list[torch.Tensor]:
    """The same layer with neither communication nor quantisation: per rank [T, hidden] float64, on rank 0's device."""
    device = batches[0].x.device
    x = torch.cat([batch.x.to(device) for batch in batches]).double()
    ids = torch.cat([batch.topk_ids.to(device) for batch in batches])
    weights = torch.cat([batch.router_weights.to(device) for batch in batches]).double()
    total = torch.zeros_like(x)
    for expert in range(cfg.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            gate_up, down = experts[expert // cfg.local_experts].of(expert % cfg.local_experts)
            gate, up = (x[token] @ gate_up.to(device).double().T).chunk(2, dim=1)
            row = (F.silu(gate) * up) @ down.to(device).double().T
            total.index_add_(0, token, row * weights[token, slot, None])
    return list(total.split([batch.x.shape[0] for batch in batches]))


def rms_limit(cfg: EPConfig) -> float:
    """The largest error of a layer with a configuration's dispatch format."""
    return max(LEAST_RMS, RMS_PER_ROUNDOFF * cfg.format.element.roundoff)


def relative_errors(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(max, rms) of the error over all ranks: max |a - e| / max |e| and |a - e| / |e| in the Euclidean norm."""
    wanted = torch.cat(list(expected))
    error = torch.cat([one.to(wanted.device) for one in actual]).double() - wanted
    return float(error.abs().max() / wanted.abs().max()), float(error.norm() / wanted.norm())
