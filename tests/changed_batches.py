"""Batches with other tensors, of any name: what `Dispatched.derived` lets nobody replace, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from cute_ep.api.buffers import BUFFERS
from cute_ep.api.dispatched import Dispatched

Batch = TypeVar("Batch", bound=Dispatched)


def changed(batch: Batch, **parts: Any) -> Batch:
    """The same batch with other tensors of its buffers, or other fields."""
    tensors = {name: parts.pop(name) for name in BUFFERS if name in parts}
    return replace(batch, buffers=replace(batch.buffers, **tensors), **parts)


def on_device(batch: Batch, device: torch.device | str) -> Batch:
    """Copies of all its tensors on another device."""
    parts = {name: getattr(batch, name) for name in (*BUFFERS, "topk_ids", "router_weights")}
    return changed(batch, **{name: None if one is None else one.to(device) for name, one in parts.items()})
