"""Rows that are sent while the host still waits for their number, into memory for as many as may come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from cute_ep import DispatchBuffers, EPCommunicator
from cute_ep.integrations.common.checks import Names
from cute_ep.integrations.common.pools import OwnSizes, config_for, may_send_early
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE
from cute_ep.runtime.counts import CountExchange, ReceiveCounts
from cute_ep.runtime.group_pool import GroupPool

Sent = TypeVar("Sent")
CODES = {torch.int32: "i", torch.int64: "q"}
"""What `array` calls types."""


class Way(NamedTuple):
    """What finds the communicators of calls whose host waits: as of `pools.communicator_for`. `own` is with as many
    tokens as this rank has, `options` are the same on all ranks."""

    ranks: GroupPool
    names: Names
    own: OwnSizes
    sms: int | None
    options: dict[str, Any]

    def known(self) -> EPCommunicator | None:
        """The communicator that all ranks find before they know each other's tokens; None: there is none yet."""
        hidden, experts, top_k, _ = self.own
        cfg = config_for(self.ranks, self.names, (hidden, experts, top_k, 1), **self.options)
        return self.ranks.known(cfg, self.sms)


def host_tensor(numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers, at least one, on the CPU. `torch.tensor` takes 40 us for 128 of them (a CPU, 2026-11-28)."""
    return torch.frombuffer(array(CODES[dtype], numbers), dtype=dtype)


def send_early(
    way: Way,
    ids: torch.Tensor,
    exchange: CountExchange,
    send: Callable[[EPCommunicator, Callable[[], int]], Sent],
) -> tuple[Sent | None, ReceiveCounts]:
    """Send bfloat16 rows, if there is a communicator and memory for all that may come of its most tokens is not too
    much, and wait for the counts. All ranks decide alike. Over nodes none is sent early: a dispatch there is told the
    most tokens of a rank.

    Args:
        ids: [T, K] of the rows.
        exchange: of the ranks' counts, which has begun.
        send: makes a dispatch on a communicator, with room for `cfg.max_rows`; then asks its second argument how many
            rows, padding included, come.

    Returns:
        What `send` has returned, None unless all rows have come; the counts.

    Raises:
        What `send` raises, and `CountExchange.wait`.
    """
    communicator, found = way.known(), list[ReceiveCounts]()
    if communicator is None or way.ranks.ranks_per_node is not None:
        return None, exchange.wait()
    cfg = communicator.cfg
    if not may_send_early(cfg.max_rows * cfg.hidden * COMBINE_ITEMSIZE):
        return None, exchange.wait()

    def arrived() -> int:
        found.append(exchange.wait())
        return min(sum(found[0].padded(cfg.alignment)), cfg.max_rows)

    made = None
    if len(ids) <= cfg.max_tokens_per_rank:
        made = send(communicator, arrived)
    else:  # too many: the others' dispatches must not wait for this rank
        nothing = torch.empty((0, cfg.hidden), dtype=torch.bfloat16, device=ids.device)
        communicator.dispatch(nothing, ids[:0], out=DispatchBuffers.carve(cfg, communicator.device))
        arrived()
    counts = found[0]
    return (made if counts.tokens <= cfg.max_tokens_per_rank else None), counts
