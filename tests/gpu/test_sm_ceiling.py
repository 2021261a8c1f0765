"""The kernels of `perf.sm_ceiling`: their bytes, and on how many SMs they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_ep.api.errors import EPError
from cute_ep.bench.timing import Runner
from cute_ep.bench.traffic import LAUNCHES
from cute_ep.runtime.driver import enable_all_peers
from perf import sm_ceiling
from perf.cases import MAIN
from perf.row_buffers import RowBuffers
from perf.row_moves import NONE

TOKENS = 50
SMS = (1, 5, 16)
"""Of each rank; eight virtual ones have SMs of their own."""


@pytest.fixture(scope="module")
def library() -> Iterator[int]:
    try:
        with sm_ceiling.loaded_kernels("cuda:0", 2 * MAIN.hidden) as library:
            yield library
    except sm_ceiling.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def runner(devices: list[str]) -> Iterator[Runner]:
    enable_all_peers(map(torch.device, dict.fromkeys(devices)))
    with Runner([torch.cuda.Stream(device) for device in devices]) as runner:
        yield runner


def mover_of(library: int, devices: list[str], operation: str) -> tuple[sm_ceiling.RowMover, RowBuffers]:
    cfg = MAIN.config("bf16", len(devices), TOKENS)
    buffers = RowBuffers(cfg, devices, sm_ceiling.uniform_ids(cfg, devices, TOKENS), operation)
    return sm_ceiling.RowMover(library, buffers), buffers


@pytest.mark.parametrize("operation", LAUNCHES)
def test_every_kernel_moves_all_rows_on_so_many_sms(
    operation: str, devices: list[str], library: int, runner: Runner
) -> None:
    mover, _ = mover_of(library, devices, operation)
    for sms in SMS:
        for name in sm_ceiling.KERNELS:
            mover.check_bytes(runner, name, sms)
            mover.check_sms(name, sms)


def test_a_time_is_of_the_sms_that_it_names(devices: list[str], library: int, runner: Runner) -> None:
    mover, _ = mover_of(library, devices, "combine_partial")
    name = "plain_512_4x4"
    assert mover.time(runner, name, SMS[1], rounds=2, samples=3) > 0
    runner.on_all(lambda rank: mover.launch(name, rank, SMS[1]))
    with pytest.raises(EPError, match=f"ran on {SMS[1]} SMs, not {SMS[2]}"):
        mover.check_sms(name, SMS[2])


def test_a_row_that_is_left_out_is_found(devices: list[str], library: int, runner: Runner) -> None:
    """As if a kernel skipped work: the items lack one that the check knows. Who waits for its rows copies poison, which
    is what is there."""
    _, buffers = mover_of(library, devices, "dispatch")
    whole = buffers.moves[0]
    buffers.moves[0] = type(whole)(whole.sources[:-1], whole.targets[:-1])
    mover = sm_ceiling.RowMover(library, buffers)
    buffers.moves[0] = whole
    missing = int((whole.targets[-1] != NONE).sum())
    with pytest.raises(EPError, match=f"bulk_4_3584: {missing} wrong rows"):
        mover.check_bytes(runner, "bulk_4_3584", SMS[1])
