"""What `sum_rows` (`cute_ep.runtime.sums`) adds where tensors are on the CPU."""

from __future__ import annotations

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.modes import no_modes
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import NO_ROW
from cute_ep.reference.formats import round_to


@no_modes()
def sum_rows(
    rows: torch.Tensor, batch: Dispatched, sums: torch.Tensor, last_map: torch.Tensor, *, by_token: bool
) -> None:
    """Fill `sums`, by token or by the tokens' last rows of a batch, and `last_map` [R, Tmax, K], with -1 behind
    tokens."""
    number = torch.arange(batch.row_map.shape[1], dtype=batch.row_map.dtype)
    for source, map_of in enumerate(batch.row_map):
        own = torch.where(number[:, None] < batch.headers[source, HeaderWord.TOKENS], map_of, NO_ROW)
        total, to = torch.zeros(len(own), rows.shape[1], dtype=torch.float32), torch.full_like(own[:, 0], NO_ROW)
        for row in own.unbind(1):
            here, lost = row >= 0, row >= len(rows)
            found = here & ~lost
            total[found] += rows[row[found].long()].float()
            total[lost] = torch.nan
            to = torch.where(here, source * len(own) + number if by_token else row, to)
        last = (own >= 0) & ~(own >= 0).flip(1).cumsum(1).flip(1).gt(1)
        last_map[source] = torch.where(last, to[:, None], NO_ROW)
        kept = (to >= 0) & (to < len(sums))
        sums[to[kept].long()] = round_to(total[kept], torch.bfloat16)
