"""Schedules over nodes that find mistakes in mail, on GPUs and with emulated kernels on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.runtime.driver import Kernel
from tests.heedless_rail import Heedless
from tests.storm_rail import CYCLES_PER_S, Lanes, Storm

from .node_rounds import FRAMES, MOST, Rounds, Step, by_turns, stream_of

NODES = {"storm": 3, "given up": 2}
"""Schedule of a mutant -> nodes, of a rank each."""
LANES = 3
DISTINCT = 11
"""Different rounds, by turns: no multiple of 2 or 3, so each comes fused and in halves, in both parities."""
BETWEEN_CHECKS = 200
"""Turns that the host does not wait for."""
HALVES = 3
"""Every third turn has two rounds outstanding."""
LATE = 2.5
"""Timeouts by which a rank is late whom another one does not wait for."""


def storm(
    made: Sequence[EPCommunicator],
    lanes: Callable[[torch.device, int], Lanes],
    *,
    turns: int,
    seed: int,
    copies: bool,
    run: Callable = by_turns,
) -> None:
    """Rounds whose mail comes in parts, in any order and late, `copies` as of `Storm`.

    Raises:
        AssertionError, EPError: something is wrong.
    """
    given = Rounds(made, DISTINCT, FRAMES, wide=True, run=run)
    rail = Storm(lambda device: lanes(device, LANES), LANES, seed=seed, copies=copies)
    rail.prepare([ep.mail for ep in made])
    with closing(rail):
        for first in range(1, turns + 1, BETWEEN_CHECKS):
            some = range(first, min(first + BETWEEN_CHECKS, turns + 1))
            given.run([step for turn in some for step in of_turn(given, turn)])
            given.check()
        twice = turns // HALVES
        for ep in made:
            completed = ep.flags().completed
            assert completed["frames received"] == turns + twice
            assert completed["sums received"] == turns + 2 * twice


def of_turn(given: Rounds, turn: int) -> list[Step]:
    """What ranks do in a turn of a storm."""
    number, other = turn % DISTINCT, (turn + HALVES) % DISTINCT
    return given.fused(number) if turn % HALVES else given.halves(number, other)


class Late:
    """A kernel that begins late, in stream order."""

    def __init__(self, kernel: Kernel, device: torch.device, seconds: float) -> None:
        self.kernel, self.device, self.seconds = kernel, device, seconds

    def launch(self, grid: int, given: Sequence[int], stream: int) -> None:
        hold_up(self.device, self.seconds)
        self.kernel.launch(grid, given, stream)


def hold_up(device: torch.device, seconds: float) -> None:
    """Let the rank's further work begin so much later."""
    if device.type == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def given_up(made: Sequence[EPCommunicator], run: Callable = by_turns) -> None:
    """Two nodes, of a rank each. Rank 1 has rank 0's frame of round 2, and reads it late. Rank 0 meanwhile gives up,
    since rank 1's sums do not come, and is asked for its frame of round 3. Its engine brings what there is.

    Rank 1 must read round 2, and must not take what came for round 3.

    Raises:
        AssertionError, EPError: something is wrong.
    """
    engine = Heedless()
    engine.prepare([ep.mail for ep in made])
    rounds = Rounds(made, 3, [MOST], run=run)
    with stream_of(made[1]):
        hold_up(made[1].device, 0)  # first use of everything
    rounds.enqueue(0)
    rounds.check()
    late = made[1].mail
    unpack = Late(late.parts.kernels["unpack_frames"], made[1].device, LATE * made[1].cfg.timeout_s)
    late.parts = replace(late.parts, kernels={**late.parts.kernels, "unpack_frames": unpack})

    done: dict[int, tuple[Dispatched, torch.Tensor]] = {}

    def work(rank: int) -> None:
        ep = made[rank]
        batch = rounds.dispatch(1, rank)
        home = rounds.combine(1, rank, batch)
        given = rounds.given[2][rank]
        with stream_of(ep):  # the host of a rank that has given up would refuse a call
            ep.mail.send_frame(QuantizedRows(given["x"], None, None), given["topk_ids"], given["router_weights"], MOST)
        done[rank] = batch, home

    rounds.run([work])
    told = [what_is_told(ep) for ep in made]
    with stream_of(made[1]):
        rounds.compare(1, 1, *done[1])
        assert int(rounds.wrong[1]) == 0, "rank 1 has read what came for round 3"
    assert "SUMS of rank 1" in told[0], told
    assert "FRAME of rank 0: its frame of dispatch round 3 has not come" in told[1], told


def what_is_told(ep: EPCommunicator) -> str:
    """The words of the failure that a rank has found, or ""."""
    try:
        ep.synchronize()
    except EPError as error:
        return f"{type(error).__name__}: {error}"
    return ""
