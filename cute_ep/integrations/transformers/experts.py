"""What the experts of a rank compute between dispatch and combine, for every experts class of transformers. Classes
differ by the flags that their decorator `use_experts_implementation` gives them, and by `_apply_gate`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cute_ep import EPConfigError, Gate, fused_silu
from cute_ep.api.config import is_number
from cute_ep.api.host import host_list
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import demand, of_type, require
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.routing import MAX_TOP_K
from cute_ep.nn.gates import add_bias, plain
from cute_ep.torch_internals import versions_of

KNOWN_FLAGS = {"has_gate", "has_bias", "has_post_expert_norm"}
"""What `run` computes. A class with another flag of this kind computes something else, so it is refused."""
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
"""Types of experts' weights."""
SMALLEST_LARGEST = 20.0
"""Gates are compared on numbers up to twice this, or twice a larger limit."""


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' experts interface calls this module."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")


def check_experts(name: str, module: nn.Module) -> None:
    """EPConfigError unless `run` computes what this experts module does."""
    demand(is_experts(module), "{} = {}: must be experts", name, type(module).__name__)
    unknown = {flag for flag in vars(module) if flag.startswith("has_")} - KNOWN_FLAGS
    if wanted := sorted(flag for flag in unknown if getattr(module, flag)):
        rule = f"must be one of {', '.join(sorted(KNOWN_FLAGS))}; this version of cute_ep does not know what such"
        raise EPConfigError(f"{name}.{wanted[0]} = {getattr(module, wanted[0])}: {rule} experts compute")
    for weight in weight_names(module):
        own = hasattr(module, weight)
        demand(own, "{} = {}: must have a parameter {}", name, type(module).__name__, weight)
        kind, rule = getattr(module, weight).dtype, "{}.{}.dtype = {}: must be one of {}; quantised experts are not "
        known = ", ".join(map(str, WEIGHTS))
        demand(kind in WEIGHTS, rule + "supported", name, weight, kind, known)


def check_routed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, hidden: int | None = None) -> None:
    """EPInputError unless they are [T, hidden], [T, K] and [T, K] on one device. `hidden`: None for any."""
    checks.given("hidden_states", hidden_states, shape=(None, hidden))
    tokens, place = hidden_states.shape[0], hidden_states.device
    rule = "{}.dtype = {}: must be a floating type"
    require(hidden_states.is_floating_point(), rule, "hidden_states", hidden_states.dtype)
    checks.given("top_k_index", top_k_index, shape=(tokens, None), dtype=checks.ID_TYPES, device=place)
    checks.integer("top_k_index.shape[1]", top_k_index.shape[1], 1, MAX_TOP_K)
    checks.given("top_k_weights", top_k_weights, shape=tuple(top_k_index.shape), device=place)
    require(top_k_weights.is_floating_point(), rule, "top_k_weights", top_k_weights.dtype)


def hidden_size(module: Any) -> int:
    """Elements of a row that the experts take."""
    whole = getattr(module, weight_names(module)[0])
    return int(whole.shape[1] if module.is_transposed else whole.shape[2])


def weight_names(module: Any) -> tuple[str, ...]:
    """Names of the parameters whose first dimension counts experts."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if module.has_bias else names


class FoundGate(NamedTuple):
    """An experts module's gate, as arguments of `cute_ep.fused_silu`."""

    gate: Gate
    interleaved: bool


def find_gate(module: Any) -> FoundGate | None:
    """What `cute_ep.fused_silu` is to be told of an experts module's gate, None if it does not compute that: gates are
    compared on a few numbers, on the module's device."""
    whole = module.gate_up_proj if module.has_gate else module.up_proj
    width = whole.shape[2] if module.is_transposed else whole.shape[1]
    alphas, limits = (_numbers_of(module, name) for name in ("alpha", "limit"))
    largest = 2 * max([SMALLEST_LARGEST, *(limit for limit in limits if limit is not None)])
    plainly: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    numbers = torch.rand(16, width, generator=torch.Generator().manual_seed(0), **plainly) * 2 - 1
    probe = (numbers * torch.tensor([4.0, largest], **plainly).repeat(8)[:, None]).to(whole.device)
    with torch.no_grad(), torch.autocast(whole.device.type, enabled=False):
        if not module.has_gate:
            found = Gate("relu2")
            return FoundGate(found, False) if _is_close(module.act_fn(probe), plain(found, probe)) else None
        own = module._apply_gate(probe)
        for interleaved in (False, True):
            rows = torch.cat([probe[:, ::2], probe[:, 1::2]], dim=1) if interleaved else probe
            for limit, offset in itertools.product(limits, (0, 1)):
                gates = [Gate("silu", alpha, limit, offset) for alpha in alphas]
                for found in (*gates, Gate("gelu_tanh", None, limit, offset)):
                    if _is_close(own, plain(found, rows)):
                        return FoundGate(found, interleaved)
    return None


def _numbers_of(module: Any, name: str) -> list[float | None]:
    """None, and what a module calls `name`, alone or behind another word."""
    found = (value for key, value in vars(module).items() if key == name or key.endswith(f"_{name}"))
    return [None, *(float(value) for value in found if is_number(value) and value > 0)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other, rtol=1e-5, atol=1e-5)


class Shards:
    """The weights of each rank's experts, from a module that has those of all: `counts` of them on each device. A rank
    on the module's device gets views. One on another device gets copies: with gradients at every call, without them
    once, as long as the parameter stays the same tensor, at the same address, of the same version."""

    def __init__(self, counts: Sequence[int], devices: Sequence[torch.device]) -> None:
        self.counts, self.devices = list(counts), devices
        self._kept: dict[str, tuple[weakref.ref[Tensor], tuple[int, tuple[int, ...]], list[Tensor]]] = {}

    def of(self, module: nn.Module, name: str) -> list[Tensor]:
        """Each rank's part of a parameter, differentiable if gradients are enabled."""
        whole = getattr(module, name)
        have, want = whole.shape[0], sum(self.counts)
        demand(have == want, "{}.shape[0] = {}: must be the number of experts, {}", name, have, want)
        keep = any(device != whole.device for device in self.devices) and not whole.is_inference()
        keep = keep and not (torch.is_grad_enabled() and whole.requires_grad)
        if not keep:
            self._kept.pop(name, None)
            return self._parts(whole)
        found = self._kept.get(name)
        state = whole.data_ptr(), versions_of(whole)
        if found is None or found[0]() is not whole or found[1] != state:
            with torch.inference_mode(False), torch.no_grad():  # a later call may need gradients of something else
                found = self._kept[name] = (weakref.ref(whole), state, self._parts(whole))
        return found[2]

    def _parts(self, whole: Tensor) -> list[Tensor]:
        parts = whole.split(self.counts)  # one node for all of them: its gradient is put together once
        return [part.to(device, non_blocking=True) for part, device in zip(parts, self.devices, strict=True)]


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """A linear layer with weights of each group of rows: [N, in], of the weights' type, to [N, out], whose rows behind
    the last group hold anything. Weights are [G, out, in], `transposed` [G, in, out], `ends` [G] int32 ascending, where
    each group's rows end, on the device. Without a grouped matmul for them the host reads these."""
    weight = weight if transposed else weight.mT
    _, rows, columns = weight.shape
    aligned = not (rows * weight.itemsize % VECTOR_BYTES or columns * weight.itemsize % VECTOR_BYTES)
    if aligned and hasattr(nn.functional, "grouped_mm"):  # torch 2.10 or newer
        return nn.functional.grouped_mm(x, weight, offs=ends)
    bounds = [0, *host_list(ends)]
    done = [x[start:end] @ one for start, end, one in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat([*done, x.new_zeros(len(x) - bounds[-1], weight.shape[2])])


def _fits(gate: Gate, rows: Tensor, bias: Tensor | None) -> bool:
    """Whether `cute_ep.fused_silu` takes the rows and the bias: bfloat16, of which no gradient is wanted."""
    read = [rows] if bias is None else [rows, bias]
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in read)
    whole = rows.shape[1] // gate.columns * rows.element_size() % VECTOR_BYTES == 0
    return whole and not wanted and all(one.dtype == torch.bfloat16 for one in read)


def run(
    module: Any, found: FoundGate | None, weights: dict[str, Tensor], tokens: Tensor, row_offsets: Tensor
) -> Tensor:
    """The outputs of a rank's experts for its rows, [N, hidden] bfloat16, from tokens of that kind in the order of
    experts. `weights` has the rank's part of each of `weight_names`, G experts; `row_offsets` is [groups + 1] int32,
    groups beyond G have no rows. bfloat16 experts without gradients, of a `found` gate, use `fused_silu`."""
    up, down, *_ = weight_names(module)
    groups = weights[up].shape[0]
    if not groups or not tokens.shape[0]:
        return tokens
    offsets = row_offsets if row_offsets.shape[0] == groups + 1 else row_offsets[: groups + 1]
    ends = offsets[1:]

    def product(x: Tensor, name: str) -> Tensor:
        return grouped_linear(of_type(x, weights[name].dtype), weights[name], ends, module.is_transposed)

    def biased(out: Tensor, name: str) -> Tensor:
        return add_bias(out, offsets, weights[f"{name}_bias"]) if module.has_bias else out

    inner, bias = product(tokens, up), weights.get(f"{up}_bias")
    if found is not None and _fits(found.gate, inner, bias):
        bias = None if bias is None else bias.contiguous()
        inner = fused_silu(inner, offsets, gate=found.gate, bias=bias, interleaved=found.interleaved)
    else:
        inner = biased(inner, up)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = biased(product(inner, down), down)
    if getattr(module, "has_post_expert_norm", False):
        norm = module.post_expert_norm
        tensors = dict(norm.named_parameters()) | dict(norm.named_buffers())  # on the module's device, maybe another
        out = functional_call(norm, {name: one.to(out.device) for name, one in tensors.items()}, (out,))
    return of_type(out, torch.bfloat16)
