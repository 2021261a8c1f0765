"""The names of DeepEP's extension module that Python code imports."""

from cute_ep.integrations.deep_ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
