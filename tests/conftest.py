"""Fixtures for all tests; `tests.fake_gpu` says what each of them is."""

from tests.fake_gpu import gpus, launches, local_launches, make_rank, rank

__all__ = ["gpus", "launches", "local_launches", "make_rank", "rank"]
