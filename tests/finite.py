"""Finite numbers give finite numbers: what must hold of a round and of gates in every format, on CPU and GPU.

A format stores numbers only: no NaN code and no NaN or infinite factor. What they stand for is finite too below
`LARGEST`; above, rounding up may leave float32 (docs/numerics.md), and then it is an infinity of the right sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_ep import dequantize, fused_silu
from cute_ep.api.gates import Gate
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.row_tensors import SwigluRows
from cute_ep.layouts.maps.formats import E4M3, E8M0, FLOAT32, FORMATS
from cute_ep.layouts.maps.scales import LINEAR
from tests.reference.oracle import FINITE_BF16

LARGEST = 1.75 * 2.0**127
TABLE = (0.0, -0.0, 2.0**-133, -(2.0**-133), 2.0**-126, 2.0**-127, 1e-4, 1.0, -448.0, 2.0**64, 2.0**126, -3.3895314e38)
"""The others of a block, beside which every finite bfloat16 stands."""
GATES = (Gate(), Gate(alpha=1.702, limit=7.0, offset=1), Gate("gelu_tanh"), Gate("relu2"))


def all_numbers(block: int, other: float) -> Tensor:
    """[rows, 128]: every finite bfloat16 once in a block of so many elements, the others of which are `other`."""
    rows = torch.full((len(FINITE_BF16), block), other).bfloat16()
    places = torch.arange(len(FINITE_BF16)) % block
    rows[torch.arange(len(FINITE_BF16)), places] = FINITE_BF16
    return rows.reshape(-1, 128)


def assert_numbers(name: str, fmt: str, payload: Tensor, scales: Tensor | None, row_scales: Tensor | None) -> None:
    """AssertionError where a stored row has a NaN or an infinity."""
    record = FORMATS[fmt]
    if record.element is E4M3:
        assert (payload.view(torch.uint8) & 0x7F != 0x7F).all(), f"{name}: NaN in the payload"
    if record.scale in (E4M3, E8M0):
        code = 0x7F if record.scale is E4M3 else 0xFF
        assert scales is not None and (scales.view(torch.uint8) & code != code).all(), f"{name}: NaN in the factors"
    for wide in (scales if record.scale is FLOAT32 else None, row_scales, payload if record.scale is None else None):
        assert wide is None or wide.isfinite().all(), f"{name}: not finite"


def assert_values(name: str, got: Tensor, x: Tensor) -> None:
    """AssertionError unless decoded rows are finite, and infinite of the right sign only where rounding may leave
    float32."""
    assert not got.isnan().any(), f"{name}: NaN"
    infinite = got.isinf()
    assert (x.abs()[infinite] >= LARGEST).all(), f"{name}: infinite"
    assert torch.equal(got[infinite].sign(), x[infinite].sign().float()), f"{name}: the sign of an infinity"


def check_round(ranks: Sequence[EPCommunicator], x: Tensor) -> None:
    """Tokens x [T, hidden], split over the ranks, through dispatch and both modes of combine, each to one expert of
    each rank with weights that add up to 1."""
    cfg, fmt = ranks[0].cfg, ranks[0].cfg.dispatch_format
    parts = x.tensor_split(len(ranks))
    ids = [torch.arange(cfg.top_k).expand(len(one), -1) * cfg.local_experts % cfg.num_experts for one in parts]
    given = [
        (one.to(ep.device), each.int().contiguous().to(ep.device), torch.full(each.shape, 1 / cfg.top_k).to(ep.device))
        for ep, one, each in zip(ranks, parts, ids, strict=True)
    ]
    batches = [ep.dispatch(*one) for ep, one in zip(ranks, given, strict=True)]
    settle(ranks)
    rows = []
    for ep, batch in zip(ranks, batches, strict=True):
        count = int(batch.num_rows)
        held = [None if one is None else one[:count] for one in (batch.tokens, batch.scales, batch.row_scales)]
        assert_numbers(f"rank {ep.rank}", fmt, *held)
        got = dequantize(batch, fmt, scale_layout=cfg.scales_as)
        arrived = got[:count][batch.src_info[:count, 0] >= 0]  # not padding
        assert len(arrived) == len(x), "the first expert of each rank gets every token, by source"
        assert_values(f"rank {ep.rank}", arrived.cpu(), x)
        rows.append(got.nan_to_num().clamp(-(2.0**126), 2.0**126).bfloat16())
    for mode in ("exact", "partial"):
        outs = [ep.combine(*one, mode=mode) for ep, *one in zip(ranks, rows, batches, strict=True)]
        settle(ranks)
        assert all(out.isfinite().all() for out in outs), f"{mode}: sums"


def settle(ranks: Sequence[EPCommunicator]) -> None:
    for ep in ranks:
        ep.synchronize()


def check_gates(x: Tensor, fmt: str, gate: Gate, library: str | None = None) -> None:
    """Gates of [rows, columns] elements below 2**62, whose products are finite."""
    if FORMATS[fmt].scale is None:
        assert fused_silu(x, gate=gate, library=library).isfinite().all(), f"{gate}"
        return
    made = fused_silu(x, fmt=fmt, gate=gate, scale_layout=LINEAR, library=library)
    assert isinstance(made, SwigluRows)
    assert_numbers(f"{gate}", fmt, *made, None)
    assert dequantize(made, fmt, scale_layout=LINEAR).isfinite().all(), f"{gate}"
