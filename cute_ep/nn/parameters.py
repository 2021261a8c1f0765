"""Experts' parameters among the others of a model: whose they are, and a rank's part of a whole checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cute_ep.api.config import is_integer
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.nn.layer import MoELayer


def expert_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that each rank has its own of: those of the experts in every `MoELayer` of a module.

    Their gradients are sums over the tokens of all ranks already, so data parallelism must not reduce them over the
    ranks that share the experts. All other parameters are replicated.
    """
    for layer in _layers(module):
        yield from layer.expert_parameters()


def shard_state_dict(module: torch.nn.Module, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """One rank's state dict, for `module.load_state_dict`, of one that has all experts.

    Args:
        module: what the state is for; every `MoELayer` in it gets its part of `gate_up`, `down` and their biases.
        state: names as in `module.state_dict()`, experts' tensors [num_experts, ...]. Names that are missing stay so.
        rank: the rank in the expert-parallel group.

    Returns:
        The same tensors, of the experts' ones views of [local_experts, ...].

    Raises:
        EPInputError: an experts' tensor has not all experts, or `rank` is none.
        EPConfigError: the module has no `MoELayer`, or its `state_dict()` has copies of parameters.
    """
    layers = _layers(module)
    if not layers:
        raise EPConfigError(f"module = {type(module).__name__}: must be or contain a MoELayer")
    for layer in layers:
        if not (is_integer(rank) and 0 <= rank < layer.cfg.world_size):
            raise EPInputError(f"rank = {rank!r}: must be an integer in [0, {layer.cfg.world_size})")
    experts = {id(getattr(layer, name)): layer.cfg for layer in layers for name in layer.expert_names()}
    result, names = dict(state), module.state_dict(keep_vars=True)  # wrappers of modules rename what is in them
    if not experts.keys() <= set(map(id, names.values())):
        raise EPConfigError(
            f"module = {type(module).__name__}: its state_dict() must have the experts' parameters themselves, and has "
            "copies, as FSDP1's; take the part before the model is wrapped"
        )
    for key, own in names.items():
        cfg = experts.get(id(own))
        if cfg is None or key not in result:
            continue
        if not result[key].dim() or result[key].shape[0] != cfg.num_experts:
            raise EPInputError(
                f"state[{key!r}].shape = {tuple(result[key].shape)}: must begin with num_experts = "
                f"{cfg.num_experts}, all experts; load one rank's part with load_state_dict alone"
            )
        result[key] = result[key][rank * cfg.local_experts : (rank + 1) * cfg.local_experts]
    return result


def _layers(module: torch.nn.Module) -> list[MoELayer]:
    """The layers in a module."""
    return [one for one in module.modules() if isinstance(one, MoELayer)]
