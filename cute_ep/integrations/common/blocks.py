"""Dispatch into blocks as masked grouped matmuls read them: each of L local experts has S rows, of which the first ones
hold tokens, and scale factors of neighbouring rows lie beside each other, for Blackwell as exponents."""

from __future__ import annotations

from typing import Any

import torch

from cute_ep import DispatchBuffers, EPCommunicator, EPConfig, EPError, EPInputError
from cute_ep.api.types import FormatName
from cute_ep.integrations.common.checks import Names, Sizes, named_config
from cute_ep.layouts.maps.formats import FP8
from cute_ep.layouts.maps.record import align_up

PACKED, EXPONENT = 4, 23
"""Exponents (UE8M0) in an int32, and the place of the exponent's lowest bit in a float32."""
PACKED_COLUMNS = FP8.block * PACKED
"""Elements of a row that share an int32 of packed exponents."""


def packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Of [..., n] float32 powers of two, or uint8 exponents, n a multiple of PACKED and rows contiguous: exponents as
    [..., n / PACKED] int32, the first in the lowest byte. Of uint8 it is the same memory."""
    bits = scales if scales.dtype == torch.uint8 else (scales.view(torch.int32) >> EXPONENT).to(torch.uint8)
    return bits.view(torch.int32)


def columns_first(rows: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """A copy of [N, n] with neighbours along N, columns at multiples of so many elements."""
    number, columns = rows.shape
    memory = torch.empty((columns, align_up(number, multiple)), dtype=rows.dtype, device=rows.device)
    return memory[:, :number].t().copy_(rows)


def block_config(
    names: Names, sizes: Sizes, dispatch_format: FormatName, *, error: type[EPError] = EPInputError, **options: Any
) -> EPConfig:
    """`named_config` of blocks with room for every row that may come: S = ranks * tokens. Rows are bf16, or fp8 or
    fp8_pow2, quantised while they are sent, a scale factor per 128 elements."""
    layout, rows = None if dispatch_format == "bf16" else "transposed", sizes[3] * sizes[4]
    options |= {"dispatch_format": dispatch_format, "scale_layout": layout, "block_rows": rows}
    return named_config(names, sizes, error=error, **options)


class Blocks:
    """New memory for one dispatch into blocks of S = `slots` rows, of a communicator of a `block_config`. Dispatch
    writes `out`. Of that are views `rows`, [L, S, hidden] bfloat16 or float8_e4m3fn, and `scales`, None or [L, S,
    hidden / 128] float32, neighbours along S. With `packed` they are powers of two, as [L, S, hidden / 512] int32
    exponents; `hidden` must be a multiple of PACKED_COLUMNS."""

    def __init__(self, communicator: EPCommunicator, slots: int, *, packed: bool = False) -> None:
        experts = communicator.cfg.local_experts
        self.out: DispatchBuffers = DispatchBuffers.carve(communicator.cfg, communicator.device, experts * slots)
        self.rows, self.scales, self._packed = self.out.tokens.view(experts, slots, -1), None, packed
        if (scales := self.out.scales) is not None:
            if packed:
                scales = scales.new_empty((experts, scales.shape[1] // PACKED, slots), dtype=torch.int32)
            self.scales = scales.transpose(1, 2)

    def received(self) -> None:
        """To be called when the stream has been given the dispatch: packs scale factors."""
        if self._packed:
            assert self.scales is not None and self.out.scales is not None
            self.scales.copy_(packed_exponents(self.out.scales.transpose(1, 2).contiguous()))
