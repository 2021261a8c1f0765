"""Limits of rows that callers of DeepEP's interface set: none is rounded, and what exceeds one is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPInputError
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.integrations.deep_ep.layout import GivenLayout

from .groups import on_buffers

HIDDEN, RANKS = 64, 2
Patch = pytest.MonkeyPatch


def to_first(tokens: int) -> dict[str, Any]:
    """Rows that all go to the first expert, and their entries."""
    ids = torch.tensor([[0, -1]]).repeat(tokens, 1)
    return {"x": torch.ones(tokens, HIDDEN).bfloat16(), "topk_idx": ids, "topk_weights": torch.ones(tokens, 2)}


def normal(buffer: Buffer, tokens: int, worst: int) -> torch.Tensor:
    given = to_first(tokens)
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(given["topk_idx"], 4)
    layout = {"num_tokens_per_rank": by_rank, "num_tokens_per_expert": by_expert, "is_token_in_rank": goes}
    return buffer.dispatch(**given, **layout, num_worst_tokens=worst)[0]


@pytest.mark.parametrize("worst", [32, 33])
def test_room_for_fewer_tokens_than_all_ranks_may_have_is_refused(monkeypatch: Patch, worst: int) -> None:
    """R times the tokens of any rank are needed: half of 33 is 16, not 17."""

    def program(buffer: Buffer) -> None:
        with pytest.raises(EPInputError, match=rf"num_worst_tokens = {worst}: must be at least 2 \* 17 tokens"):
            normal(buffer, 17, worst)
        assert len(normal(buffer, 17, 34)) == 34
        assert len(normal(buffer, 16, worst)) == worst

    on_buffers(monkeypatch, RANKS, program)


def test_a_row_beyond_num_worst_tokens_is_told(monkeypatch: Patch) -> None:
    """Where the ranks do not give the same number: 34 rows come to a rank with room for 33."""

    def program(buffer: Buffer) -> None:
        tokens, worst = ((16, 33), (18, 36))[buffer.rank]
        normal(buffer, tokens, worst)
        buffer.group.meet()
        if buffer.rank == 0:
            with pytest.raises(EPInputError, match="num_worst_tokens: left room for 33 rows, but 34 came"):
                buffer.get_dispatch_layout(torch.zeros(1, 2, dtype=torch.int64), 4)

    on_buffers(monkeypatch, RANKS, program)


def test_a_row_beyond_what_static_expanded_rows_have_room_for_is_told(monkeypatch: Patch) -> None:
    """A token that names an expert twice has two rows there, more than any rank's tokens should bring."""

    def program(buffer: ElasticBuffer) -> None:
        given = to_first(66)
        again = {"num_experts": 2, "do_cpu_sync": False, "do_expand": True}
        assert len(buffer.dispatch(**given, **again)[0]) == 132
        buffer.group.meet()
        if buffer.rank_idx == 1:
            given["topk_idx"][5, 1] = 0
        assert len(buffer.dispatch(**given, **again)[0]) == 132
        buffer.group.meet()
        if buffer.rank_idx == 0:
            with pytest.raises(EPInputError, match="left room for 132 rows, but 133 came"):
                buffer.dispatch(**given, **again)

    def make(group: Any) -> ElasticBuffer:
        return ElasticBuffer(group, num_max_tokens_per_rank=66, hidden=HIDDEN, explicitly_destroy=True)

    on_buffers(monkeypatch, RANKS, program, make=make)


def test_a_layout_that_was_counted_for_other_ranks_is_refused(monkeypatch: Patch) -> None:
    """Before anything is sent, though its tensors are of one layout."""

    def program(buffer: Buffer) -> None:
        given = to_first(3)
        routes, goes = GivenLayout.of(given["topk_idx"], 4, 4)
        layout = {"num_tokens_per_rank": routes.by_rank, "num_tokens_per_expert": routes.by_expert}
        for _ in range(2):
            with pytest.raises(EPInputError, match=r"num_tokens_per_rank.shape = \(4,\): must be \(2\)"):
                buffer.dispatch(**given, **layout, is_token_in_rank=goes)

    on_buffers(monkeypatch, RANKS, program)
