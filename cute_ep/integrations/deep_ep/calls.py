"""What the calls of all buffers begin and end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch

from cute_ep.api.errors import EPError, EPInputError
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


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that calls run on. EPError: there is no GPU."""
    if device.type == "cpu":
        raise EPError("get_comm_stream: there are no streams without a GPU")
    return torch.cuda.current_stream()


def absent(name: str) -> Callable[..., NoReturn]:
    """A method that DeepEP has: it raises EPError."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise EPError(f"{name}: this adapter does not have it (docs/deep_ep.md)")

    refuse.__name__, refuse.__doc__ = name, "Not supported: raises EPError."
    return refuse


def check_payload(payload: torch.Tensor, scales: torch.Tensor | None) -> None:
    """EPInputError unless these are `Rows`: scale factors of 32 bits, as many rows as the payload."""
    wanted = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    require(payload.dim() == 2, f"x.dim() = {payload.dim()}: must be 2")
    require(payload.dtype == wanted, f"x.dtype = {payload.dtype}: must be {wanted}")
    if scales is not None:
        ok = scales.dtype in (torch.float32, torch.int32)
        require(ok, f"x[1].dtype = {scales.dtype}: must be torch.float32 or torch.int32")
        rows = len(payload)
        require(scales.dim() == 2 and len(scales) == rows, f"x[1].shape = {tuple(scales.shape)}: must be ({rows}, n)")
