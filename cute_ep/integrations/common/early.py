"""Rows that are sent while the host still waits for their number, into memory for as many as may come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from cute_ep import DispatchBuffers, EPCommunicator, EPConfig, EPInputError
from cute_ep.integrations.common.checks import Names, room_for
from cute_ep.integrations.common.pools import OwnSizes, config_for, may_send_early, room_of
from cute_ep.layouts.maps.routing import max_rows
from cute_ep.runtime.counts import CountExchange, ReceiveCounts
from cute_ep.runtime.group_pool import GroupPool

Sent = TypeVar("Sent")
Send = Callable[[EPCommunicator, int, Callable[[], int]], Sent]
CODES = {torch.int32: "i", torch.int64: "q"}
"""What `array` calls types."""


class Way(NamedTuple):
    """What finds the communicators of calls whose host waits, as of `pools.communicator_for`; the same on all ranks but
    for the tokens of `own`."""

    ranks: GroupPool
    names: Names
    own: OwnSizes
    sms: int | None
    options: dict[str, Any]

    def config(self) -> EPConfig:
        """The configuration that all ranks know before they know each other's tokens."""
        hidden, experts, top_k, _ = self.own
        return config_for(self.ranks, self.names, (hidden, experts, top_k, 1), **self.options)


def host_tensor(numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers, at least one, int32 or int64, on the CPU. `torch.tensor` takes 40 us for 128 of them (a CPU,
    2026-11-28)."""
    return torch.frombuffer(array(CODES[dtype], numbers), dtype=dtype)


def early_room(
    exchange: CountExchange, alignment: int, most: int, row_bytes: int
) -> tuple[int, Callable[[], ReceiveCounts]]:
    """How many rows to make room for where `most` may come, and what waits for their numbers, to be asked once: for all
    of them, before the host knows how many come, if that is not too much memory, or else for those that come, padded to
    `alignment`. All ranks must ask alike.

    Raises:
        As of `CountExchange.wait`.
    """
    if may_send_early(most * row_bytes):
        return most, exchange.wait
    counts = exchange.wait()
    return room_of(counts.rows(alignment)), lambda: counts


def send_early(
    way: Way, ids: torch.Tensor, exchange: CountExchange, send: Send[Sent]
) -> tuple[Sent | None, ReceiveCounts]:
    """Send bfloat16 rows into memory for all that may come, if that is not too much, and wait for the counts. Nothing
    is sent in the first call of a way, and over nodes, where a dispatch is told the most tokens of a rank. Ranks that
    have made the same calls decide alike. For calls without gradients: what is returned keeps all of the memory.

    Memory is for as many tokens of a rank as the call before had, rounded up (`room_for`). A rank with more sends none,
    and then all ranks must send again.

    Args:
        ids: [T, K] of the rows.
        exchange: of the ranks' counts, which has begun.
        send: makes a dispatch on a communicator, into memory for so many rows; then it must ask its last argument,
            once, how many rows, padding included, have come.

    Returns:
        What `send` has returned, None unless all rows have come; the counts.

    Raises:
        What `send` raises, and `CountExchange.wait`.
    """
    ranks, key, found = way.ranks, way.config(), list[ReceiveCounts]()
    if (owed := ranks.owed.pop(key, None)) is not None:
        with suppress(EPInputError):  # too many exchanges were begun since
            ranks.latest[key] = owed.wait().tokens
    communicator, latest = ranks.known(key, way.sms), ranks.latest.get(key)
    made, most = None, 0
    with ranks.owing(key, exchange, found):
        if communicator is not None and latest is not None and communicator.cfg.nodes == 1:
            cfg = communicator.cfg
            most = min(room_for(latest), cfg.max_tokens_per_rank)
            room = max_rows(ranks.size * most * cfg.top_k, cfg.groups, cfg.alignment)

            def arrived() -> int:
                found.append(exchange.wait())
                return min(found[0].rows(cfg.alignment), room)

            early = may_send_early(room * cfg.hidden * torch.bfloat16.itemsize)
            if early and ids.shape[0] <= most:
                made = send(communicator, room, arrived)
            elif early:  # the others' dispatches must not wait for this rank
                nothing = torch.empty((0, cfg.hidden), dtype=torch.bfloat16, device=ids.device)
                out = DispatchBuffers.carve(cfg, communicator.device, room)
                communicator.dispatch(nothing, ids[:0], out=out)
        if not found:
            found.append(exchange.wait())
    ranks.latest[key] = found[0].tokens
    return (made if found[0].tokens <= most else None), found[0]
