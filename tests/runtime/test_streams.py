"""On which streams a communicator works, and for which of them `synchronize` waits."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.buffers import tensors_of
from cute_ep.runtime import communicator as communicator_module
from cute_ep.runtime import streams
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import STREAM, Launches, MakeRank, expert_rows, inputs


def test_a_rank_that_has_its_gpu_to_itself_works_on_the_callers_stream(rank: Communicator, launches: Launches) -> None:
    rank.dispatch(*inputs())
    assert launches.only().stream == STREAM


def test_ranks_that_share_a_gpu_have_streams_of_their_own(
    make_rank: MakeRank, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch waits for what the caller's stream was given before, and all that it reads or writes stays until it has
    run."""
    waits: list[tuple[int, int]] = []
    kept: set[tuple[int, int]] = set()
    own = SimpleNamespace(cuda_stream=8, wait_stream=lambda other: waits.append((other.cuda_stream, len(launches))))
    monkeypatch.setattr(communicator_module, "take_stream", lambda device: own)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.add((tensor.data_ptr(), stream.cuda_stream))
    )
    rank = make_rank(shared=True)
    (x, ids, weights), scale, out, sums = inputs(), torch.tensor([2.0]), rank.allocate(), torch.zeros(5, 128)
    rows = expert_rows(out)
    buffers = [tensor for tensor in tensors_of(out).values() if tensor is not None]
    batch = [ids, weights, out.row_map, out.headers, out.weights]

    def keeps(result: object, *tensors: torch.Tensor) -> object:
        """The result of a call that keeps these tensors and no others for the rank's stream."""
        assert kept == {(tensor.data_ptr(), 8) for tensor in tensors}
        kept.clear()
        return result

    fused = keeps(rank.dispatch(x, ids, weights, scale, out), x, ids, weights, scale, *buffers)
    keeps(rank.combine(rows, fused, mode="exact", out=sums), rows, sums, *batch)
    pending = keeps(rank.dispatch_async(x, ids, weights, scale), x, ids, weights, scale)
    split = keeps(rank.dispatch_wait(pending, out), *buffers)
    sending = (tensor for tensor in batch if tensor is not weights)
    sent = keeps(rank.combine_async(rows, split, "exact"), rows, *sending)
    keeps(rank.combine_wait(sent, out=sums), rows, sums, *batch)
    assert waits == [(STREAM, before) for before in range(6)], "each launch waits once, before it"

    monkeypatch.setattr(communicator_module.torch.cuda, "current_stream", lambda device: own)
    keeps(rank.dispatch(x, ids, weights, scale, out))
    assert len(waits) == 6, "the rank's own stream has nothing to wait for"
    assert [launch.stream for launch in launches] == [8] * 7


def test_synchronize_waits_for_the_current_stream_or_for_the_device_where_others_had_work(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    streams = [SimpleNamespace(cuda_stream=raw, synchronize=lambda raw=raw: waits.append(raw)) for raw in (7, 8)]
    current = [streams[0]]
    monkeypatch.setattr(communicator_module.torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(communicator_module.torch.cuda, "synchronize", lambda device=None: waits.append("device"))
    rank.synchronize()
    batch = rank.dispatch(*inputs())
    rank.synchronize()
    assert waits == [7, 7]
    current[0] = streams[1]
    rank.combine(expert_rows(batch), batch)
    current[0] = streams[0]
    rank.synchronize()
    rank.synchronize()
    assert waits[2:] == ["device", 7]


def test_after_an_interrupted_synchronize_the_next_one_waits_for_the_same_streams(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    rank._streams = {7, 9}

    def synchronize(device: object) -> None:
        waited.append("device")
        if len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(communicator_module.torch.cuda, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        rank.synchronize()
    rank.synchronize()
    rank.synchronize()
    assert waited == ["device"] * 2


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Handles of the streams that a driver has created, which no other test has."""
    handles: list[int] = []

    def create() -> int:
        handles.append(len(handles) + 100)
        return handles[-1]

    monkeypatch.setattr(streams, "_unused", {})
    monkeypatch.setattr(streams, "create_stream", create)
    monkeypatch.setattr(streams, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle, device=device)
    )
    return handles


def test_no_two_open_ranks_have_one_stream_however_many_there_are(
    make_rank: MakeRank, created: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has 32. What ranks gave back is taken again, so a process makes no more streams than it has ranks."""
    monkeypatch.setattr(communicator_module, "take_stream", streams.take_stream)
    monkeypatch.setattr(communicator_module, "give_back", streams.give_back)
    for _ in range(3):
        ranks = [make_rank(rank=number % 2, shared=True) for number in range(40)]
        assert sorted(rank.stream.cuda_stream for rank in ranks) == created
        assert len(created) == 40
        for rank in ranks:
            rank.close()
            rank.close()


def test_a_stream_stays_on_its_device(created: list[int]) -> None:
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    first = streams.take_stream(here)
    streams.give_back(first)
    assert streams.take_stream(there) is not first
    assert streams.take_stream(here) is first


def test_the_default_stream_is_found_by_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As others are; torch makes a new stream of a handle of 0."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    device = torch.device("cuda", 1)
    assert [streams.stream_of(device, handle) for handle in (0, 9)] == [("default", device), (9, device)]
