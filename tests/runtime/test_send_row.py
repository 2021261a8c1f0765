"""Dispatches of one row, the same ids and the same buffers: the launches of `dispatch`, and none where it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.counts import counting_config
from cute_ep.runtime.launcher import missing
from cute_ep.testing.launches import by_python
from tests.compiled_launches import compiled
from tests.fake_gpu import Launches, MakeRank, report

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"there is no compiled launcher: {missing()}")

WORDS, RANKS = 16, 3
CFG = counting_config(WORDS, RANKS, 5.0)
IDS = torch.arange(RANKS, dtype=torch.int32).view(1, RANKS)


def row() -> torch.Tensor:
    return torch.randint(0, 100, (WORDS,), dtype=torch.int32)


@pytest.fixture
def one(make_rank: MakeRank) -> Communicator:
    return make_rank(CFG)


@pytest.fixture
def out(one: Communicator) -> DispatchBuffers:
    """Of two calls before."""
    made = DispatchBuffers.carve(CFG, one.device, RANKS)
    for _ in range(2):
        one._send_row(row(), IDS, made)
    return made


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
def test_a_row_is_sent_as_a_dispatch_sends_it(
    one: Communicator, out: DispatchBuffers, launches: Launches, inference: bool
) -> None:
    with torch.inference_mode(inference):
        one._send_row(row(), IDS, out)
        before, sent = out.memory.generation.number, row()
        with compiled(launches):
            one._send_row(sent, IDS, out)
        assert out.memory.generation.number == before + 1
        got = launches.last()
        with by_python(one):
            one.dispatch(sent.view(torch.bfloat16).expand(1, -1), IDS, out=out)
    assert got == launches.last() and got.arguments["input.x"] == sent.data_ptr()
    assert (one._dispatches.sent, one._dispatches.received) == (5, 5)


def close(one: Communicator) -> None:
    one.close()


def interrupt(one: Communicator) -> None:
    one._interrupted = True


def fail(one: Communicator) -> None:
    report(one, Phase.ROUTE_TABLE, 0, 1, 0, peer=2)


def send(one: Communicator) -> None:
    one.dispatch_async(torch.zeros(1, 2 * WORDS, dtype=torch.bfloat16), IDS)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [(close, EPError), (interrupt, EPError), (fail, EPTimeout), (send, EPInputError)],
    ids=["closed", "interrupted", "failed", "a round is outstanding"],
)
def test_a_row_is_refused_where_a_dispatch_is(
    one: Communicator,
    out: DispatchBuffers,
    launches: Launches,
    spoil: Callable[[Communicator], None],
    error: type[Exception],
) -> None:
    spoil(one)
    with launches.forbidden(), pytest.raises(error):
        one._send_row(row(), IDS, out)


def test_python_sends_a_row_with_other_ids_or_to_other_buffers(
    one: Communicator, out: DispatchBuffers, launches: Launches
) -> None:
    other, ids = DispatchBuffers.carve(CFG, one.device, RANKS), IDS.clone()
    before = launches.compiled.count
    one._send_row(row(), ids, out)
    one._send_row(row(), IDS, other)
    assert launches.compiled.count == before
    assert launches.last().arguments["out.tokens"] == other.tokens.data_ptr()
    assert list(launches)[-2].arguments["ids.data"] == ids.data_ptr()


def test_a_row_is_looked_at_where_that_is_wanted(one: Communicator, out: DispatchBuffers, launches: Launches) -> None:
    one.check_finite = True
    before = launches.compiled.count
    one._send_row(torch.full((WORDS,), -1, dtype=torch.int32), IDS, out)
    assert launches.compiled.count == before
    with pytest.raises(EPInputError, match="has a NaN"):
        one.synchronize()
