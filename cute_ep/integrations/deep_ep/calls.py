"""What the calls of both modes begin and end with."""

from __future__ import annotations

from typing import TypeAlias

import torch

from cute_ep.api.errors import EPInputError
from cute_ep.integrations.deep_ep.events import EventHandle, EventOverlap

Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bfloat16 rows, or float8_e4m3fn rows and their scale factors."""


def require(ok: bool, rule: str) -> None:
    """EPInputError with the rule unless it holds."""
    if not ok:
        raise EPInputError(rule)


def check_experts(num_experts: int, ranks: int) -> None:
    """EPInputError unless each rank has as many experts."""
    ok = num_experts > 0 and num_experts % ranks == 0
    require(ok, f"num_experts = {num_experts}: must be a positive multiple of the group's {ranks} ranks")


def begin(previous_event: EventOverlap | None, async_finish: bool, on_comm_stream: bool) -> None:
    """Have the current stream wait for the event, if there is one. EPInputError: the options do not go together."""
    event = None if previous_event is None else previous_event.event
    ok = not on_comm_stream or (event is not None and async_finish)
    require(ok, "allocate_on_comm_stream = True: must come with previous_event and async_finish")
    if event is not None:
        event.current_stream_wait()


def finished(async_finish: bool) -> EventOverlap:
    """The event to return, of what the current stream has been given."""
    return EventOverlap(EventHandle() if async_finish else None)
