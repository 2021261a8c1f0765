"""What a batch says of itself beside its rows: how many there are, on the host, and whether some were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from cute_ep.api.errors import EPInputError
from cute_ep.api.host import host_memory, is_capturing, refuse_capture
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import LOST_ROW

if TYPE_CHECKING:
    from cute_ep.api.dispatched import Dispatched


class HostCounts:
    """Numbers of rows on their way to the host, made by `Dispatched.counts_to_host`.

    Attributes:
        row_counts: [G] int32 in pinned memory; defined after `wait`.
        event: recorded behind the copies; None on the CPU, where they are made at once.
    """

    def __init__(self, batch: Dispatched, stream: torch.cuda.Stream | None) -> None:
        for name in ("row_counts", "num_rows"):
            if getattr(batch, name) is None:
                raise EPInputError(f"dispatched.{name} = None: must be what dispatch wrote")
        self.event: torch.cuda.Event | None = None
        groups = batch.row_counts.shape[0]
        if batch.row_counts.device.type == "cpu":
            if int(batch.num_rows) < 0:
                raise EPInputError(f"dispatched: all ranks must dispatch before rank {batch.rank} reads its counts")
            self._words = torch.cat([batch.row_counts, batch.num_rows])
        else:
            self._words = self._copy(batch, stream or torch.cuda.current_stream(batch.row_counts.device))
        self.row_counts = self._words[:groups]

    def _copy(self, batch: Dispatched, stream: torch.cuda.Stream) -> torch.Tensor:
        """Enqueue the copies and the event. Returns their memory."""
        with torch.cuda.stream(stream):
            if is_capturing(batch.row_counts.device):
                raise EPInputError("stream: must not be capturing, a replay would not tell the host")
            groups = batch.row_counts.shape[0]
            words = host_memory((groups + 1,))
            words[:groups].copy_(batch.row_counts, non_blocking=True)
            words[groups:].copy_(batch.num_rows, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(stream)
        for tensor in (batch.row_counts, batch.num_rows):
            tensor.record_stream(stream)
        return words

    def wait(self) -> Self:
        """Block the host until the numbers are there. After a timeout of the dispatch they are 0. EPError: during
        a capture."""
        if self.event is not None:
            refuse_capture(torch.device("cuda"), "HostCounts.wait")
            self.event.synchronize()
        return self

    @property
    def num_rows(self) -> int:
        """Rows of the batch, padding included; defined after `wait`."""
        return int(self._words[-1])


def any_lost(batch: Dispatched) -> torch.Tensor:
    """`Dispatched.any_lost`. Rows of the map behind a source's tokens hold anything."""
    tokens = batch.headers[:, HeaderWord.TOKENS, None]
    exists = torch.arange(batch.row_map.shape[1], device=tokens.device) < tokens
    return ((batch.row_map == LOST_ROW) & exists[:, :, None]).any().view(1)
