"""Rank 0 of two on an emulated GPU, and what comes of the other rank when the host first polls for counts in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cute_ep.runtime import group_pool, host_words, process_connection
from cute_ep.runtime.group_pool import GroupPool
from tests.emulated_counts import Stream, arrive
from tests.fake_gpu import Launches, MakeRank

RANKS, EXPERTS = 2, 8
"""Experts of both ranks. All tokens of the other rank go to the first."""


class Group:
    """That of rank 0 of two."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Waits:
    """What happens when the host first polls in vain: the counts of two ranks come.

    Attributes:
        tokens: of the other rank.
        queued: what was launched by then, in each wait.
    """

    def __init__(self, launches: Launches, telling: Stream) -> None:
        self.launches, self.telling, self.tokens = launches, telling, 3
        self.queued: list[list[str]] = []
        self.pool: GroupPool

    def come(self, seconds: float) -> None:
        self.queued.append(self.launches.kernels)
        with _disable_current_modes():
            for counting in self.pool._counting.values():
                row = torch.zeros(counting.table.shape[1], dtype=torch.int32)
                row[[0, 2, 2 + EXPERTS]] = self.tokens
                arrive(counting, torch.stack([row, row]))
        self.telling.run()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, launches: Launches, telling: Stream) -> Waits:
    made = Waits(launches, telling)
    telling.at_once = False
    monkeypatch.setattr(host_words, "give_way", made.come)
    return made


@pytest.fixture
def absent_group(monkeypatch: pytest.MonkeyPatch, make_rank: MakeRank) -> Any:
    """That of rank 0 of two."""
    monkeypatch.setattr(process_connection, "connect_checked", lambda check, cfg, group, sms: make_rank(cfg))
    monkeypatch.setattr(group_pool, "count_ranks", lambda group, call: group.size())
    monkeypatch.setattr(group_pool, "gather", lambda group, one: [one])
    return Group()
