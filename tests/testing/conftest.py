"""Fixtures for tests of role tests; `paper_stage` says what they are."""

from __future__ import annotations

from .paper_stage import make_stage

__all__ = ["make_stage"]
