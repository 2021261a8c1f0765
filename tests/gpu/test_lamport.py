"""Rows that hold words of all ones, which stand for words that have not arrived (`SENTINEL`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.testing import verify
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import connected
from .test_features import DTYPES

ROUNDS = {1: 8, 16: 8, LAMPORT_TOKENS: 4, LAMPORT_TOKENS + 1: 4}
"""By tokens. Some in each parity, so that words that were not cleared again, or stay SENTINEL forever, meet others."""


def blanked(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy with all ones in a third of the rows, and in every tenth word of another third."""
    generator = torch.Generator().manual_seed(seed)
    width = rows.element_size() * rows.shape[1:].numel()
    chosen = torch.rand(rows.shape[0], 1, generator=generator)
    words = torch.rand(rows.shape[0], -(-width // 4), generator=generator) < 0.1
    mask = ((chosen < 1 / 3) | ((chosen > 2 / 3) & words)).repeat_interleave(4, dim=1)[:, :width]
    made = rows.clone().view(torch.uint8).view(rows.shape[0], width)
    made[mask.to(rows.device)] = 0xFF
    return made.view(rows.dtype).view(rows.shape)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_with_blank_words(devices: list[str], monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """Tokens, quantised rows with their scale factors, and the rows that the experts return."""
    expert_rows, quantize, seeds = verify.expert_rows, reference.quantize, count()
    scaled, element = FORMATS[fmt].scale is not None, FORMATS[fmt].element
    ones = -element.largest * 2.0**-element.largest_exponent if element.bits < 8 else -1.5

    def make_rows(*args: object) -> list[torch.Tensor]:
        return [blanked(rows, next(seeds)) for rows in expert_rows(*args)]

    def make_quantized(*args: object) -> QuantizedRows:
        return QuantizedRows(*(part if part is None else blanked(part, next(seeds)) for part in quantize(*args)))

    monkeypatch.setattr(verify, "expert_rows", make_rows)
    monkeypatch.setattr(reference, "quantize", make_quantized)
    cfg = EPConfig(1408, 8 * len(devices), 3, max(ROUNDS), len(devices), fmt, timeout_s=20)
    with connected(cfg, devices) as communicators:
        for tokens, rounds in ROUNDS.items():
            for turn in range(rounds):
                made = make_inputs(cfg, [tokens] * len(devices), "uniform", turn)
                inputs = [replace(one, x=blanked(one.x, next(seeds))) for one in made]
                for one in inputs:
                    one.x[turn // 2 :: 4] = ones  # as they are stored, in formats of fewer than 8 bits
                options = RoundOptions(
                    turn % 3 == 2, dtype=DTYPES[turn % 3], prequantized=scaled and turn // 2 % 2 == 1, seed=turn
                )
                try:
                    check_round(communicators, inputs, options)
                except AssertionError as error:
                    raise AssertionError(f"{tokens} tokens, round {turn}, {options}: {error}") from error
