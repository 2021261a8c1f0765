"""Threads that stand for the processes of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from cute_ep.runtime import meeting, process_connection

RANKS = 3


def collective(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], object], ranks: int = RANKS) -> list[object]:
    """What call(rank) returns, or raises, on each rank; the test ends with an error where one of them is left waiting
    for another."""
    mine = threading.local()

    def work(rank: int) -> object:
        mine.rank = rank
        try:
            return call(rank)
        except Exception as error:
            return error

    dist = SimpleNamespace(
        PrefixStore=torch.distributed.PrefixStore,
        get_rank=lambda group: mine.rank,
        GroupMember=torch.distributed.GroupMember,
        get_world_size=lambda group: ranks,
        get_process_group_ranks=lambda group: list(range(ranks)),
        group=SimpleNamespace(WORLD=SimpleNamespace(group_name="0")),
        is_initialized=lambda: True,
    )
    monkeypatch.setattr(process_connection, "dist", dist)
    monkeypatch.setattr(meeting, "dist", dist)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(meeting, "PATIENCE_S", 30.0)  # to meet
    monkeypatch.setattr(meeting, "default_store", lambda: store)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
