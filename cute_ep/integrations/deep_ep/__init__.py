"""The interface of DeepEP (docs/deep_ep.md): V1, `Buffer` in normal and low-latency mode, and V2, `ElasticBuffer`."""

import torch

from cute_ep.integrations.deep_ep.buffer import Buffer
from cute_ep.integrations.deep_ep.calls import Config, EventHandle, EventOverlap
from cute_ep.integrations.deep_ep.elastic import ElasticBuffer
from cute_ep.integrations.deep_ep.elastic_mode import EPHandle

topk_idx_t = torch.int64
"""Element type of `topk_idx`."""

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
