"""The interface of DeepEP V1 over this library: `Buffer` in normal and in low-latency mode (docs/deep_ep.md)."""

from __future__ import annotations

import torch

from cute_ep.integrations.deep_ep.buffer import Buffer
from cute_ep.integrations.deep_ep.events import Config, EventHandle, EventOverlap

topk_idx_t = torch.int64
"""Element type of `topk_idx`."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
