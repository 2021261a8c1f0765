"""A Mixture-of-Experts layer as a torch module, for inference, training and `torch.compile` (docs/layer.md)."""

from __future__ import annotations

from cute_ep.nn.connections import Connections, connect, disconnect
from cute_ep.nn.layer import MoELayer
from cute_ep.nn.mlp import GatedMLP
from cute_ep.nn.parameters import expert_parameters, shard_state_dict
from cute_ep.nn.router import Router, Routing

__all__ = [
    "Connections",
    "GatedMLP",
    "MoELayer",
    "Router",
    "Routing",
    "connect",
    "disconnect",
    "expert_parameters",
    "shard_state_dict",
]
