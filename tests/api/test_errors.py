"""Errors as objects."""

from __future__ import annotations

import pickle

from cute_ep.api.errors import EPTimeout


def test_a_timeout_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(EPTimeout("MESSAGE", 2, (0, 3), ("a", "b"))))
    assert (error.phase, error.rank, error.missing, error.details) == ("MESSAGE", 2, (0, 3), ("a", "b"))
    assert "rank 2 gave up waiting in phase MESSAGE for rank(s) [0, 3]" in str(error)
