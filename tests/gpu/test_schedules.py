"""Rounds that follow each other without a word from the host: split, ahead, in a row, on two streams, of two groups, in
captures, with random delays. Every tensor of every call is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from cute_ep.api.config import EPConfig

from . import mutants
from .conftest import connected
from .mistakes import MUTANTS, UNCHANGED, expected
from .queues import run_with_queues
from .replays import Replays, run_replays
from .runs import Run, run_schedules, sms_of
from .schedules import CASES, MANY, config_of

Groups = Callable[..., list]
MANY_RANKS = 16
"""More than the 8 queues that a device has for streams unless it is told otherwise."""


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Communicators by (cfg, devices, SM budget, which of several equal groups), made once. One that has failed is of
    no use to the next test, which gets a new one."""
    with ExitStack() as stack:
        made: dict[tuple, list] = {}

        def group(cfg: EPConfig, devices: list[str], share: int = 1, number: int = 0, sms: int | None = None) -> list:
            key = cfg, tuple(devices), share, number, sms
            if key not in made or any(communicator.failed for communicator in made[key]):
                made[key] = stack.enter_context(connected(cfg, devices, sms=sms or sms_of(devices, share)))
            return made[key]

        yield group


@pytest.mark.parametrize("name", CASES)
def test_schedule(devices: list[str], groups: Groups, name: str) -> None:
    case = CASES[name]
    if case.streams and len(set(devices)) < len(devices):
        pytest.skip("ranks that share a GPU have one stream each")
    communicators = groups(config_of(case, len(devices)), devices, 1 + case.streams, sms=case.sms)
    assert case.sms is None or all(communicator.ring_bytes for communicator in communicators)
    run_schedules(Run(communicators, case), seed=1)


def test_two_streams_of_a_rank_alone(groups: Groups) -> None:
    """Where there is only one GPU."""
    case = CASES["streams"]
    run_schedules(Run(groups(config_of(case, 1), ["cuda:0"], 2), case), seed=1)


def unshared(devices: list[str]) -> bool:
    """Whether every rank has a GPU to itself."""
    return len(set(devices)) == len(devices)


def for_two(devices: list[str]) -> list[str]:
    """Devices for two groups: all streams of a GPU need a queue of their own, of which there are 8."""
    return devices if unshared(devices) else devices[:4]


def test_two_groups_by_turns(devices: list[str], groups: Groups) -> None:
    """Two communicators a rank, of different formats and orders, on the same GPUs and, where ranks have a GPU each, the
    same streams: calls of one stand between those of the other."""
    devices = for_two(devices)
    one, other = CASES["ahead"], replace(CASES["split"], slow=False)
    first, second = (groups(config_of(case, len(devices)), devices, 2) for case in (one, other))
    run = Run(first, one)
    run_schedules(run, Run(second, other, 1, run.streams if unshared(devices) else None), seed=2)


@pytest.mark.parametrize(("cell", "layers"), [((24, 24), 2), ((1, 0), 3), ((24, 5), 3), ((MANY, 24), 3)], ids=str)
def test_captured_layers(devices: list[str], groups: Groups, cell: tuple[int, int], layers: int) -> None:
    """Several layers in one capture, replayed with tokens, routes and rows changed in place; two leave every layer its
    parity, three change it."""
    communicators = groups(EPConfig(1024, 8 * len(devices), 4, MANY, len(devices), "nvfp4_row", 30), devices)
    run_replays(Replays(communicators, [cell[rank % 2] for rank in range(len(devices))], layers))


def test_captured_layers_of_two_groups(devices: list[str], groups: Groups) -> None:
    """Two communicators on the same GPUs, replayed by turns."""
    devices = for_two(devices)
    cfg = EPConfig(1024, 8 * len(devices), 4, MANY, len(devices), "bf16", 30)
    first, second = (groups(cfg, devices, 2, number) for number in range(2))
    tokens = [(24, 5, 0, 100)[rank % 4] for rank in range(len(devices))]
    one = Replays(first, tokens, 3)
    run_replays(one, Replays(second, tokens[::-1], 2, streams=one.streams if unshared(devices) else None), seed=3)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("tokens", [(24, 0, 5, 100), (MANY, 0, MANY, 24)], ids=["few", "many"])
def test_groups_that_alternate_in_one_graph(
    devices: list[str], groups: Groups, tokens: tuple[int, ...], layers: int
) -> None:
    """Layers of two communicators by turns in one capture, each layer's sums the next one's tokens, replayed with
    routes changed in place and NaN in all sums before; some rank has no tokens. With three layers each replay leaves
    the groups another parity."""
    devices = for_two(devices)
    cfg = EPConfig(1024, 8 * len(devices), 4, MANY, len(devices), "nvfp4_row", 30)
    first, second = (groups(cfg, devices, 2, number) for number in range(2))
    counts = [tokens[rank % 4] for rank in range(len(devices))]
    run_replays(Replays(first, counts, layers, others=[second]), seed=layers)


def test_more_virtual_ranks_than_queues() -> None:
    """Rank by rank, so a rank's calls are all queued before the next one's."""
    run_with_queues("many_ranks", MANY_RANKS, timeout_s=120)


def test_every_mistake_is_found() -> None:
    """Kernels with one mistake in the protocol each (`mistakes`), on the schedule that must find it; the kernels of the
    library, run in the same way, are found to have none."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("mutants are compiled for sm_90a")
    outcomes = mutants.run([UNCHANGED, *MUTANTS])
    absent = [name for name in MUTANTS if outcomes[name].verdict == "absent"]
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if name not in absent and outcome.verdict not in expected(name)
    }
    assert not wrong, "\n".join(f"{name}: {outcome.verdict}, {outcome.words}" for name, outcome in wrong.items())
    if absent:
        pytest.skip(f"no kernels of these sources for {', '.join(absent)}: `make mutants` where the DSL is installed")
