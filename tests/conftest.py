"""Fixtures for all tests; `tests.fake_gpu` says what each of them is."""

import pytest
from hypothesis import settings

from tests.fake_gpu import gpus, launches, local_launches, make_rank, rank

__all__ = ["gpus", "launches", "local_launches", "make_rank", "rank"]

settings.register_profile("cute_ep", deadline=None)  # machines that run tests are busy
settings.load_profile("cute_ep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-bindings", metavar="VERSION", help="the cuda-bindings that must be found (tests.bindings)")
