"""Finite numbers give finite numbers in every format (`tests/finite.py` says what that is), on GPUs."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.gates import Gate
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import LINEAR
from tests.finite import GATES, TABLE, all_numbers, check_gates, check_round
from tests.reference.oracle import FINITE_BF16

from .conftest import LIBRARY, connected

FUSED = [name for name, fmt in FORMATS.items() if not fmt.row_scale]


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounds_of_every_number_beside_others(devices: list[str], fmt: str) -> None:
    """Through dispatch, and their decoded rows through combine."""
    most, ranks, layout = 128, len(devices), LINEAR if FORMATS[fmt].scale else None
    cfg = EPConfig(1024, 2 * ranks, ranks, most, ranks, fmt, 60, scale_layout=layout)
    with connected(cfg, devices) as communicators:
        for other in TABLE:
            rows = all_numbers(FORMATS[fmt].block, other).flatten()
            for part in rows[: len(rows) // 1024 * 1024].view(-1, 1024).split(most * ranks):
                check_round(communicators, part)


@pytest.mark.parametrize("fmt", FUSED)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gates_of_every_number_beside_others(fmt: str, gate: Gate) -> None:
    """Below 2**62, whose products are finite."""
    below = FINITE_BF16[FINITE_BF16.abs() < 2.0**62]
    g = below[: len(below) // 1024 * 1024].view(-1, 1024).cuda()
    for up in (one for one in TABLE if abs(one) < 2.0**62):
        x = torch.cat([g, torch.full_like(g, up)][: gate.columns], dim=1)
        check_gates(x, fmt, gate, str(LIBRARY))
