"""What the calls of all buffers begin and end with."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeAlias, TypeVar

import torch

from cute_ep.api.errors import EPError, EPInputError
from cute_ep.integrations.deep_ep.events import EventHandle, EventOverlap

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bfloat16 rows, or float8_e4m3fn rows and their scale factors."""


def require(ok: bool, rule: str, *values: object) -> None:
    """EPInputError with the rule unless it holds; `values` fill its braces, and are not printed before."""
    if not ok:
        raise EPInputError(rule.format(*values))


def without_gradients(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """As `torch.no_grad`, in less of the host's time where gradients are not enabled anyway."""

    @wraps(call)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with torch.no_grad():
            return call(*args, **kwargs)

    return wrapped


def check_experts(num_experts: int, ranks: int) -> None:
    """EPInputError unless each rank has as many experts."""
    ok = num_experts > 0 and num_experts % ranks == 0
    require(ok, "num_experts = {}: must be a positive multiple of the group's {} ranks", num_experts, ranks)


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
    require(payload.dim() == 2, "x.dim() = {}: must be 2", payload.dim())
    require(payload.dtype == wanted, "x.dtype = {}: must be {}", payload.dtype, wanted)
    if scales is not None:
        ok = scales.dtype in (torch.float32, torch.int32)
        require(ok, "x[1].dtype = {}: must be torch.float32 or torch.int32", scales.dtype)
        shape, rows = scales.shape, payload.shape[0]
        require(len(shape) == 2 and shape[0] == rows, "x[1].shape = {}: must be ({}, n)", tuple(shape), rows)
