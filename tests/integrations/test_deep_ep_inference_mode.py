"""A DeepEP buffer that is used in inference mode and outside of it, as where a model is evaluated, then trained."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs

from .groups import on_buffers

HIDDEN, EXPERTS, SLOTS, MOST, RANKS = 256, 12, 3, 10, 2
GIVEN = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, RANKS), (9, 5), "masked", 7)


def test_normal_mode_serves_in_inference_mode_and_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(buffer: Buffer) -> list:
        own, got = GIVEN[buffer.rank], []
        ids = own.topk_ids.long()
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
                rows, *_, handle, _ = buffer.dispatch(own.x, None, by_rank, None, goes, by_expert)
                got.append(buffer.combine(rows, handle)[0])
        return got

    for inside, outside, again in on_buffers(monkeypatch, RANKS, program):
        assert_bits(outside, inside.clone(), "outside")
        assert_bits(again.clone(), outside, "again")
        assert not outside.is_inference()


def test_memory_for_combine_can_be_filled_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was first asked for inside."""

    def program(buffer: Buffer) -> None:
        own = GIVEN[buffer.rank]
        with torch.inference_mode():
            _, _, handle, *_ = buffer.low_latency_dispatch(own.x, own.topk_ids.long(), MOST, EXPERTS, use_fp8=False)
            buffer.get_next_low_latency_combine_buffer(handle)
        buffer.get_next_low_latency_combine_buffer(handle).fill_(1)

    on_buffers(monkeypatch, RANKS, program)
