"""Experts of a model of transformers over several ranks of this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cute_ep import EPConfigError, EPError
from cute_ep.api.host import refuse_capture
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import check_devices
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import Names, demand, named_config, require
from cute_ep.integrations.transformers import experts
from cute_ep.integrations.transformers.exchange import Exchange, Round
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_RANKS, MAX_TOKENS_PER_RANK
from cute_ep.runtime.gpus import check_gpu
from cute_ep.runtime.local_pool import LocalPool
from cute_ep.runtime.routes import count_routes

LOG = logging.getLogger(__name__)

NAME = "cute_ep"
"""Of the experts implementation, in transformers' registries."""
NAMES: Names = {
    "hidden": "hidden_states.shape[1]",
    "top_k": "top_k_index.shape[1]",
    "max_tokens_per_rank": "tokens of a rank",
    "world_size": "len(devices)",
}


class Attachment(AbstractContextManager["Attachment"]):
    """What `attach` returned: the ranks on which the experts of one model run, a device each. A context manager, which
    detaches. When nobody has the model any more, the next pass or `attach` of another one closes the ranks."""

    def __init__(
        self, model: nn.Module, devices: Sequence[str | torch.device], max_tokens: int, mode: CombineMode
    ) -> None:
        self.devices = check_devices(devices)
        ranks = len(self.devices)
        demand(1 <= ranks <= MAX_RANKS, "len(devices) = {}: must be in [1, {}], one a rank", ranks, MAX_RANKS)
        alike, given = {device.type for device in self.devices}, [str(device) for device in self.devices]
        demand(alike in ({"cpu"}, {"cuda"}), "devices = {}: must be all CUDA or all cpu", given)
        for device in self.devices:
            if device.index is not None and device.type == "cuda":
                check_gpu("devices", device.index)
        checks.integer("max_tokens", max_tokens, 1, ranks * MAX_TOKENS_PER_RANK, error=EPConfigError)
        checks.mode("mode", mode)
        self.max_tokens, self.mode = int(max_tokens), mode
        self._room = -(-self.max_tokens // ranks)  # tokens of a rank in such a pass
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        found = {name or "model": module for name, module in modules if experts.is_experts(module)}
        demand(found, "model = {}: has no experts that transformers' experts interface calls", type(model).__name__)
        for name, module in found.items():
            experts.check_experts(name, module)
            demand(module not in _LAYERS, "{}: is attached already, detach it first", name)
            rule = "{}: is split over processes already, by the model's expert parallel plan"
            demand(not _is_split(module), rule, name)
            padded = f"{name}: experts, padded to equal parts of the ranks,"
            names = {**NAMES, "hidden": f"{name}: hidden size", "num_experts": padded}
            sizes = experts.hidden_size(module), align_up(module.num_experts, ranks), 1, self._room, ranks
            named_config(names, sizes, error=EPConfigError)
        self._pool = LocalPool(self.devices, grows=True)
        self._pool.sweep()
        self._connecting = RLock()
        self._exchanges: dict[tuple[int, int, int], Exchange] = {}
        every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        configs = {id(one): one for one in every if hasattr(one, "_experts_implementation")}.values()
        self._before = [(config, _implementation_of(config, model)) for config in configs]
        found_now = {id(config): before for config, before in self._before}
        for other in _attachments():  # what was chosen since is what a detach in any order gives back
            other._before = [(config, found_now.get(id(config), before)) for config, before in other._before]
        for config, _ in self._before:
            config._experts_implementation = {"": NAME}
        for module in found.values():
            _LAYERS[module] = _Layer(self, module)
        self._modules = weakref.WeakSet(found.values())
        self._end = weakref.finalize(model, self._abandon)
        self._end.atexit = False

    def detach(self) -> None:
        """Give the model its experts implementation back, transformers' default where that was "cute_ep" as well, and
        close the ranks; may be called again. A backward pass through an output from before raises EPError then. A
        configuration that other attached parts of the model share is left to them."""
        with _ATTACHING:
            for module in list(self._modules):
                _LAYERS.pop(module, None)
            for config, before in self._before:
                shared = any(config is own for other in _attachments() for own, _ in other._before)
                if not shared and config._experts_implementation == NAME:
                    config._experts_implementation = {"": before}
            self._before = []
        self._end.detach()
        self._exchanges.clear()
        self._pool.close()

    def _abandon(self) -> None:
        self._exchanges.clear()
        self._pool.abandon()

    def __exit__(self, *error: object) -> None:
        self.detach()

    def exchange(self, hidden: int, number: int, top_k: int, tokens: int) -> Exchange:
        """The ranks for layers of so many experts, with room for `tokens` tokens: connected when first needed, and with
        twice the room or more when more come. EPInputError: the sizes break a rule, or there are too many tokens."""
        ranks = len(self.devices)
        key, need = (hidden, align_up(number, ranks), top_k), -(-tokens // ranks)
        with self._connecting:
            found = self._exchanges.get(key)
            if found is not None and need <= found.cfg.max_tokens_per_rank:
                return found
            most, rule = MAX_TOKENS_PER_RANK, "hidden_states.shape[0] = {}: must not exceed {} tokens a rank, here {}; "
            require(need <= most, rule + "use shorter or fewer sequences a pass", tokens, most, most * ranks)
            room = self._room
            if found is not None:
                room = 2 * found.cfg.max_tokens_per_rank
                LOG.info("%d tokens a rank, more than %d: connecting again", need, found.cfg.max_tokens_per_rank)
                del self._exchanges[key], found  # frees its memory, unless a graph needs it
            room = min(max(room, need), MAX_TOKENS_PER_RANK)
            made = self._exchanges[key] = Exchange(self._pool, named_config(NAMES, (*key, room, ranks)))
            return made


def attach(
    model: nn.Module, *, devices: Sequence[str | torch.device], max_tokens: int, mode: CombineMode = "partial"
) -> Attachment:
    """Run the experts of a model over several ranks of this process, until `Attachment.detach`.

    All experts modules in the model that transformers' experts interface serves get the implementation "cute_ep". The
    parameters stay where they are, and the model can be trained, saved and loaded as before (docs/transformers.md). The
    experts of a copy raise EPError until it is attached itself.

    Args:
        model: a model of transformers, or any module that contains one or its experts.
        devices: one a rank, as of `cute_ep.connect_local`.
        max_tokens: most tokens (sequences times their length) of a pass. If more come the ranks connect again.
        mode: of combine, and of the sums of gradients (docs/numerics.md).

    Raises:
        EPConfigError: the model has no such experts, or some that are attached already, are quantised, compute
            something that this version does not know, or have sizes that cannot travel; or an argument breaks its rule.
    """
    with _ATTACHING:
        return Attachment(model, devices, max_tokens, mode)


def _is_split(module: Any) -> bool:
    """Whether a process has only some of the experts. Before 5.23 transformers does not say so, but counts those."""
    first = getattr(module, experts.weight_names(module)[0])
    counted = isinstance(first, DTensor) and len(first) != module.num_experts
    return counted or getattr(module, "_is_expert_parallel", False)


def _implementation_of(config: Any, model: nn.Module) -> str | None:
    """The experts implementation to give back to a configuration: where another attachment has it, what was there
    before both; where it is that of a copy of an attached model, transformers' default."""
    found = config._experts_implementation
    if found != NAME:
        return found
    for other in _attachments():
        for own, before in other._before:
            if own is config:
                return before
    whole = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
    return "eager" if whole is None else whole.get_correct_experts_implementation(None)


def _attachments() -> list[Attachment]:
    """Those that have layers, once each."""
    return list({id(one.attachment): one.attachment for one in _LAYERS.values()}.values())


class _Layer:
    """What is known of an attached experts module."""

    def __init__(self, attachment: Attachment, module: Any) -> None:
        self.attachment = attachment
        ranks, number = len(attachment.devices), module.num_experts
        each = align_up(number, ranks) // ranks  # the last ranks may have fewer, or none
        counts = [max(0, min(each, number - rank * each)) for rank in range(ranks)]
        self.shards = experts.Shards(counts, attachment.devices)
        self.gates: list[experts.FoundGate | None] = []  # one, looked up by the first pass: before, weights may lack


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()
_ATTACHING = RLock()
"""Of whoever adds layers, removes them, or looks at all of them."""


@torch.compiler.disable
def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation "cute_ep", as transformers calls it. Differentiable in hidden states, weights and the
    module's parameters. Compiled code calls it as it is, behind a graph break.

    Takes [T, hidden] of any floating type, [T, K] int32 or int64 expert ids (one that is no expert's masks the entry,
    as transformers' own do with the number of experts), and [T, K] weights of any floating type. Returns [T, hidden] of
    the type and on the device of `hidden_states`, in memory of its own. EPError: the module is not attached.
    """
    layer = _LAYERS.get(module)
    if layer is None:
        why = "its model is a copy, was loaded, or shares its configuration with one that is attached"
        call = "call cute_ep.integrations.transformers.attach(model, ...)"
        raise EPError(f"{type(module).__name__}: is not attached to ranks ({why}); {call}")
    experts.check_routed(hidden_states, top_k_index, top_k_weights, experts.hidden_size(module))
    if not layer.gates:
        refuse_capture(hidden_states.device, "the first pass of a layer")
        layer.gates.append(experts.find_gate(module))
    names, number, attachment = experts.weight_names(module), module.num_experts, layer.attachment
    read = (hidden_states, top_k_weights, *module.parameters(), *(getattr(module, name) for name in names))
    with_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in read)
    ranks = attachment.exchange(hidden_states.shape[1], number, top_k_index.shape[1], len(hidden_states))
    # masks: transformers does it with `num_experts`
    routes = count_routes(top_k_index, number, len(attachment.devices), weights=top_k_weights.detach(), mask=True)
    one = Round(ranks, routes, gradients=with_gradient, mode=attachment.mode)
    shards = {name: layer.shards.of(module, name) for name in names}
    rows = []
    for rank, tokens in enumerate(one.dispatch(hidden_states)):
        own = {name: parts[rank] for name, parts in shards.items()}
        rows.append(experts.run(module, layer.gates[0], own, tokens, one.batches[rank].row_offsets))
    return one.combine(rows, top_k_weights, hidden_states)
