"""Memory for the rows that `perf.row_moves` names, on the devices of their ranks, and whether they came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE
from perf.row_moves import BUFFERS, NONE, ROW_BITS, ROW_MASK, buffer_of, buffer_rows, moves_of, to_the_front

ITEM_WORDS, MOST_SOURCES = 16, 12
"""Of an item: words of the kernels' table, and rows that the smallest ring has room for."""
POISON = 0x5A5A5A5A5A5A5A5A
CHECKED_ITEMS = 2048
"""Items that are compared at a time."""


class RowBuffers:
    """Memory of all ranks for what one operation moves: random rows where it begins, POISON elsewhere.

    Attributes:
        moves: of each rank.
        row_bytes: of a token in BF16.
    """

    def __init__(self, cfg: EPConfig, devices: Sequence[str], ids: torch.Tensor, operation: str) -> None:
        """ids: [R, T, K] as for `moves_of`; devices: of the ranks."""
        self.row_bytes, self.devices = cfg.hidden * COMBINE_ITEMSIZE, list(devices)
        self.moves = moves_of(cfg, ids, operation)
        self._first = "x" if operation == "dispatch" else "rows"
        self._buffers: dict[int, torch.Tensor] = {}
        for rank, (device, sizes) in enumerate(zip(devices, buffer_rows(cfg, ids, operation), strict=True)):
            random = torch.Generator(device).manual_seed(rank)
            for name, rows in sizes.items():
                made = torch.empty(rows, self.row_bytes // 8, dtype=torch.int64, device=device)
                if name == self._first:
                    made.random_(generator=random)
                self._buffers[buffer_of(rank, name)] = made
        self.poison()

    def poison(self) -> None:
        """Make all that an operation writes wrong."""
        for number, buffer in self._buffers.items():
            if BUFFERS[number % len(BUFFERS)] != self._first:
                buffer.fill_(POISON)

    def table(self, rank: int) -> torch.Tensor:
        """A rank's items for the kernels, [N, ITEM_WORDS] int64 on its device; perf/sm_ceiling.cu has the format.

        Raises:
            EPError: an item is too large.
        """
        sources, targets = self.moves[rank]
        starts = torch.zeros(len(self.devices) * len(BUFFERS), dtype=torch.int64)
        for number, buffer in self._buffers.items():
            starts[number] = buffer.data_ptr()
        every = to_the_front(torch.cat([sources, targets], dim=1))
        if (sources >= 0).sum(dim=1).max() > MOST_SOURCES or (every >= 0).sum(dim=1).max() >= ITEM_WORDS:
            raise EPError(f"top_k: items have at most {MOST_SOURCES} sources, {ITEM_WORDS - 1} with their targets")
        addresses = starts[(every >> ROW_BITS).clamp(min=0)] + (every & ROW_MASK) * self.row_bytes
        heads = (sources >= 0).sum(dim=1) | (targets >= 0).sum(dim=1) << 32
        words = torch.zeros(len(every), ITEM_WORDS, dtype=torch.int64)
        words[:, 0] = heads
        width = min(ITEM_WORDS - 1, every.shape[1])
        words[:, 1 : 1 + width] = torch.where(every < 0, 0, addresses)[:, :width]
        return words.to(self.devices[rank])

    def sums(self, rank: int, sources: torch.Tensor) -> torch.Tensor:
        """What a rank's items with these sources, [N, S] places, write: [N, row_bytes / 8] int64 on its device."""
        made = torch.zeros(len(sources), self.row_bytes // 8, dtype=torch.int64, device=self.devices[rank])
        for column in sources.T:
            for chosen, rows in self._rows_at(column):
                made[chosen.to(made.device)] ^= rows
        return made

    def _rows_at(self, column: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """By buffer, which of some places are in it, and the rows that are there."""
        for number in (column[column != NONE] >> ROW_BITS).unique().tolist():
            chosen = (column >> ROW_BITS) == number
            buffer = self._buffers[number]
            yield chosen, buffer[(column[chosen] & ROW_MASK).to(buffer.device)]

    def row(self, place: int) -> torch.Tensor:
        """The row at a place, [row_bytes / 8] int64, itself."""
        return self._buffers[place >> ROW_BITS][place & ROW_MASK]

    def wrong_rows(self) -> int:
        """Rows that are not what their item writes, once all items have run twice after `poison`."""
        wrong = 0
        for rank, own in enumerate(self.moves):
            for sources, targets in zip(*(table.split(CHECKED_ITEMS) for table in own), strict=True):
                made = self.sums(rank, sources)
                for column in targets.T:
                    for chosen, there in self._rows_at(column):
                        wrong += int((there != made[chosen.to(made.device)].to(there.device)).any(dim=1).sum())
        return wrong
