"""Fixtures of tests of the interface."""

from .one_rank import lone_rank

__all__ = ["lone_rank"]
