"""`import deep_ep`, where the folder above is on `sys.path`: the adapter in place of DeepEP (docs/deep_ep.md)."""

from cute_ep import __version__ as _of_cute_ep
from cute_ep.integrations.deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t

__version__ = f"0+cute_ep.{_of_cute_ep}"

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
