"""Ranks, each a process, that do not all do the same: who waits says for whom, and all ends in EPError with names.

The table of what may happen is in `tests/runtime/meeting_worker.py`, one program a row; `absent` is itself a table of
all kinds of first collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import WITHOUT_GPU, run_ranks

pytest.importorskip("cute_ep.ops", exc_type=ImportError)  # torch may be too old for it

from .meeting_worker import PROGRAMS

WORLD = 3


@pytest.mark.slow
@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_who_waits_for_ranks_says_for_whom_and_ends_with_their_names(program: str, tmp_path: Path) -> None:
    killed = [WORLD - 1] if program.startswith("killed") else []
    own = [WITHOUT_GPU] * WORLD
    where = ("tests.runtime.meeting_worker", WORLD, tmp_path / "store", program)
    run_ranks(*where, environment=own, timeout=150, killed=killed)
