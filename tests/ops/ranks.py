"""Ranks of a group in threads, as their processes would run, and which calls they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.reference.backend import connect_reference
from tests.reference.ranks import at_once, processes

CFG = EPConfig(hidden=32, num_experts=6, top_k=3, max_tokens_per_rank=9, world_size=3, timeout_s=30)
ALONE = EPConfig(hidden=32, num_experts=4, top_k=2, max_tokens_per_rank=8, world_size=1, row_alignment=8)


def counted(communicator: EPCommunicator) -> list[str]:
    """The names of the calls that a communicator makes from now on, of combine with the mode."""
    calls: list[str] = []
    dispatch, combine = communicator.dispatch, communicator.combine

    def dispatched(*arguments: Any, **named: Any) -> Any:
        calls.append("dispatch")
        return dispatch(*arguments, **named)

    def combined(*arguments: Any, mode: Any = "partial", **named: Any) -> Any:
        calls.append(mode)
        return combine(*arguments, mode=mode, **named)

    communicator.dispatch, communicator.combine = dispatched, combined  # type: ignore[method-assign]
    return calls


def keep_rounds(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """A policy of selective checkpoints that saves what rounds returned, and computes all else again."""
    ours = getattr(op, "namespace", "") == "cute_ep"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def on_all_ranks(cfg: EPConfig, program: Callable[[int, str], Any]) -> tuple[list, list[list[str]]]:
    """(what program(rank, name of its communicator) returns on each rank, each rank's calls)."""
    if cfg.skip_a2a or cfg.world_size == 1:
        ranks = connect_reference(cfg)
        calls = [counted(ep) for ep in ranks]
        return [program(ep.rank, cute_ep.ops.register(ep)) for ep in ranks], calls
    with processes(cfg) as ranks:
        calls = [counted(ep) for ep in ranks]
        names = [cute_ep.ops.register(ep) for ep in ranks]
        made = at_once(range(cfg.world_size), lambda rank: program(rank, names[rank]))
    for one in made:
        if isinstance(one, Exception):
            raise one
    return made, calls
