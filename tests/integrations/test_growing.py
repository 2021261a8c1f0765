"""Memory of DeepEP's buffers is for the most tokens seen: larger communicators take the place of smaller ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_ep.api.config_rules import memory_bytes
from cute_ep.integrations.common.checks import LEAST_TOKENS
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.runtime.group_pool import GroupPool

from .groups import on_buffers
from .refusals import refused
from .rigs import EXPERTS, HIDDEN, RANKS, SLOTS

Patch = pytest.MonkeyPatch
ORDERS = {
    "ascending": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "descending": [256, 128, 64, 32, 16, 8, 4, 2, 1],
    "any": [100, 7, 300, 8, 129, 300, 64],
}


def room(buffer: Any, *, hidden: int = HIDDEN) -> list[int]:
    """Tokens that the open communicators for rows of so many elements have room for."""
    return [one.cfg.max_tokens_per_rank for one in buffer._pool.communicators if one.cfg.hidden == hidden]


def tokens(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, whose sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (count, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator).topk(SLOTS).indices
    return x, ids, 2.0 ** torch.randint(-1, 2, ids.shape, generator=generator)


def low_latency(buffer: Buffer, most: int, count: int | None = None, **options: Any) -> tuple:
    """(rows, handle) of a dispatch, checked."""
    x, ids, _ = tokens(buffer.rank, min(most, 5) if count is None else count)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, most, EXPERTS, **{"use_fp8": False, **options})
    payload = rows[0] if isinstance(rows, tuple) else rows
    assert payload.shape == (EXPERTS // RANKS, RANKS * most, HIDDEN) and counts.shape == (EXPERTS // RANKS,)
    assert handle[0].shape == payload.shape[:2] and tuple(handle[2:]) == (most, HIDDEN, EXPERTS)
    if isinstance(rows, tuple):
        assert rows[1].shape == (*payload.shape[:2], HIDDEN // 128) and rows[1].stride(1) == 1
    return payload, handle


def home(buffer: Buffer, rows: torch.Tensor, handle: Any, **options: Any) -> None:
    """Its combine, checked."""
    x, ids, weights = tokens(buffer.rank, min(handle[2], 5))
    out, *_ = buffer.low_latency_combine(rows, ids, weights, handle, **options)
    assert torch.equal(out, x * weights.sum(1, keepdim=True).bfloat16())


@pytest.mark.parametrize("kept", [False, True], ids=["", "handles kept"])
@pytest.mark.parametrize("order", ORDERS)
def test_low_latency_mode_has_one_communicator_for_the_most_tokens(monkeypatch: Patch, order: str, kept: bool) -> None:
    """With the shapes of each call; a handle whose rows were combined keeps nothing open."""

    def program(buffer: Buffer) -> None:
        handles = []
        for number, most in enumerate(ORDERS[order]):
            rows, handle = low_latency(buffer, most)
            home(buffer, rows, handle)
            handles += [handle] if kept else []
            largest = max(ORDERS[order][: number + 1])
            assert room(buffer) == [max(LEAST_TOKENS, 1 << (largest - 1).bit_length())]
        cfg = buffer._pool.communicators[0].cfg
        hint = buffer.get_low_latency_rdma_size_hint(max(ORDERS[order]), HIDDEN, RANKS, EXPERTS)
        assert memory_bytes(cfg) <= hint

    on_buffers(monkeypatch, RANKS, program)


def test_formats_have_a_communicator_each(monkeypatch: Patch) -> None:
    def program(buffer: Buffer) -> None:
        for most in (32, 100, 200):
            for options in ({"use_fp8": False}, {"use_fp8": True}, {"use_fp8": True, "round_scale": True}):
                low_latency(buffer, most, **options)
        assert room(buffer) == [256] * 3
        assert {one.cfg.dispatch_format for one in buffer._pool.communicators} == {"bf16", "fp8", "fp8_pow2"}

    on_buffers(monkeypatch, RANKS, program)


def test_a_handle_that_waits_for_its_combine_keeps_its_communicator(monkeypatch: Patch) -> None:
    """On one rank is enough; until the next larger one connects."""

    def program(buffer: Buffer) -> None:
        rows, handle = low_latency(buffer, 64)
        if buffer.rank == 1:
            spare = handle
            del handle
        low_latency(buffer, 128)
        assert room(buffer) == [64, 128]
        home(buffer, rows, handle if buffer.rank == 0 else spare)
        home(buffer, *low_latency(buffer, 64))  # by the larger one
        home(buffer, *low_latency(buffer, 256))
        assert room(buffer) == [256]

    on_buffers(monkeypatch, RANKS, program)


def test_a_handle_of_what_was_given_back_is_named(monkeypatch: Patch) -> None:
    def program(buffer: Buffer) -> None:
        rows, handle = low_latency(buffer, 64)
        home(buffer, rows, handle)
        home(buffer, rows, handle)
        home(buffer, *low_latency(buffer, 128))
        _, ids, weights = tokens(buffer.rank, 5)
        rule = "handle: the memory that it needs was given back, by destroy() or, once it had been combined, for a disp"
        refused(lambda: buffer.low_latency_combine(rows, ids, weights, handle), rule)

    on_buffers(monkeypatch, RANKS, program)


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_what_a_graph_was_captured_with_stays_open(monkeypatch: Patch, who: tuple[int, ...]) -> None:
    """Replays run no Python. Also where only one rank has captured, and whatever becomes of handles."""
    capturing: set[int] = set()
    monkeypatch.setattr(GroupPool, "capturing", lambda self: self.rank in capturing)

    def program(buffer: Buffer) -> None:
        home(buffer, *low_latency(buffer, 64))  # connects
        buffer._pool.group.on_all_ranks(lambda: None)
        capturing.update(who)
        buffer._pool.group.on_all_ranks(lambda: None)
        home(buffer, *low_latency(buffer, 64))
        buffer._pool.group.on_all_ranks(lambda: None)
        capturing.clear()
        buffer._pool.group.on_all_ranks(lambda: None)
        (captured,) = buffer._pool.communicators
        for most in (128, 256, 512):
            home(buffer, *low_latency(buffer, most))
            assert room(buffer) == [64, 1 << (most - 1).bit_length()] and not captured.closed
        home(buffer, *low_latency(buffer, 64))

    on_buffers(monkeypatch, RANKS, program)


def test_memory_for_combine_is_for_the_most_rows(monkeypatch: Patch) -> None:
    def program(buffer: Buffer) -> None:
        made = []
        for most in (16, 64, 32, 64):
            rows, handle = low_latency(buffer, most)
            memory = buffer.get_next_low_latency_combine_buffer(handle)
            assert memory.shape == rows.shape and memory.is_contiguous()
            assert buffer.get_next_low_latency_combine_buffer(handle) is memory
            memory.copy_(rows)
            home(buffer, torch.full_like(rows, torch.nan), handle, zero_copy=True)
            made.append(memory)
        assert len({one.data_ptr() for one in made[1:]}) == 1
        assert made[2].untyped_storage().nbytes() == made[1].nbytes

    on_buffers(monkeypatch, RANKS, program)


def test_normal_mode_has_one_communicator_for_the_most_tokens(monkeypatch: Patch) -> None:
    """While no handle needs another: one that lives can be combined, and its layout be used again."""

    def send(buffer: Buffer, count: int) -> tuple:
        x, ids, weights = tokens(buffer.rank, count)
        by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        entry = {"topk_idx": ids, "topk_weights": weights}
        rows, _, received, _, handle, _ = buffer.dispatch(x, None, by_rank, None, goes, by_expert, **entry)
        return x, goes, rows, received, handle

    def back(buffer: Buffer, x: Any, goes: Any, rows: Any, received: Any, handle: Any) -> None:
        out, _, _ = buffer.combine(rows, handle, received)
        assert torch.equal(out, x * goes.sum(1, keepdim=True))
        assert torch.equal(buffer.dispatch(x, handle)[0], rows)

    def program(buffer: Buffer) -> None:
        for count in (1, 3, 70, 200, 300, 5):
            back(buffer, *send(buffer, count))
        assert room(buffer) == [512]
        words = [one.cfg for one in buffer._pool.communicators if one.cfg.hidden not in (HIDDEN, 24)]
        assert [cfg.max_tokens_per_rank for cfg in words] == [512]
        first = send(buffer, 300)
        back(buffer, *send(buffer, 600))
        assert room(buffer) == [512, 1024]
        back(buffer, *first)
        del first
        back(buffer, *send(buffer, 1500))
        assert room(buffer) == [2048]

    on_buffers(monkeypatch, RANKS, program)


def test_an_elastic_buffer_has_one_communicator_for_the_most_tokens(monkeypatch: Patch) -> None:
    def program(buffer: ElasticBuffer) -> None:
        for most in (8, 16, 64, 32, 100):
            for expand in (False, True):
                x, ids, _ = tokens(buffer.rank_idx, 5)
                rows, _, _, handle, _ = buffer.dispatch(
                    x, ids, num_experts=EXPERTS, num_max_tokens_per_rank=most, do_expand=expand
                )
                buffer.combine(rows, handle)
                del handle
        assert room(buffer) == [100, 100]

    on_buffers(monkeypatch, RANKS, program, ElasticBuffer)
