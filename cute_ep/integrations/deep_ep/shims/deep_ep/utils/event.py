"""`deep_ep.utils.event`."""

from cute_ep.integrations.deep_ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
