"""What a communicator on a GPU does with calls that come out of order, are interrupted, or are given what is another's.

The GPU is that of `tests.test_communicator`: launches are recorded.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.dispatched import tensors_of
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.routing import BEYOND, Phase
from cute_ep.runtime import communicator as module
from cute_ep.runtime.communicator import Communicator
from tests.test_communicator import (
    ALONE,
    CFG,
    LAUNCHES,
    Make,
    RecordingKernel,
    arguments,
    expert_rows,
    launched,
    make,
    rank,
)

__all__ = ["make", "rank"]  # fixtures


def test_addresses_of_peers_are_in_the_arena(rank: Communicator) -> None:
    """What a launch reads is nobody's to collect."""
    assert rank.arena.stored == {int(CFG.arena.peers.offset): [4096, 8192]}
    rank.dispatch(*arguments())
    tensors = [value for value in vars(rank).values() if isinstance(value, torch.Tensor)]
    assert not tensors and LAUNCHES[0].arguments["peers_at"] == CFG.arena.peers.offset


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_launch_ends_the_communicator(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether the round was sent is not known: no later call may send it again, or leave it out."""
    real = RecordingKernel.launch

    def launch(self: RecordingKernel, *args: object, **options: object) -> None:
        if when == "after":
            real(self, *args, **options)
        raise KeyboardInterrupt

    batch = rank.dispatch(*arguments())
    monkeypatch.setattr(RecordingKernel, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        rank.dispatch_async(*arguments())
    monkeypatch.setattr(RecordingKernel, "launch", real)
    before = len(LAUNCHES)
    for call in (
        lambda: rank.dispatch(*arguments()),
        lambda: rank.dispatch_async(*arguments()),
        lambda: rank.combine(expert_rows(batch), batch),
        rank.allocate,
    ):
        with pytest.raises(EPError, match="rank 0: a call was interrupted while it was being launched"):
            call()
    assert len(LAUNCHES) == before
    rank.close()


def test_a_launch_that_fails_is_not_counted(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordingKernel.launch

    def launch(self: RecordingKernel, *args: object, **options: object) -> None:
        raise EPError("CUDA driver: CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(RecordingKernel, "launch", launch)
    for call in (rank.dispatch, rank.dispatch_async):
        with pytest.raises(EPError, match="LAUNCH_FAILED"):
            call(*arguments())
    monkeypatch.setattr(RecordingKernel, "launch", real)
    rank.dispatch(*arguments())
    assert launched() == ["dispatch"]


def test_a_lost_pending_can_be_received(rank: Communicator) -> None:
    """Of dispatch and of combine, the oldest first; afterwards fused calls go on."""
    given = [arguments(3), arguments(5)]
    for one in given:
        rank.dispatch_async(*one)
    with pytest.raises(EPInputError, match=r"2 split round\(s\) outstanding; receive them first with dispatch_wait"):
        rank.dispatch(*arguments())
    batches = [rank.dispatch_wait() for _ in given]
    assert [batch.topk_ids for batch in batches] == [ids for _, ids, _ in given]
    rank.combine_async(expert_rows(batches[0]), batches[0], "partial")
    assert rank.combine_wait().shape == (3, 128)
    assert launched()[-2:] == ["combine_async_partial", "combine_wait_partial"]
    rank.dispatch(*arguments())
    for wait in (rank.dispatch_wait, rank.combine_wait):
        with pytest.raises(EPInputError, match="no round is outstanding"):
            wait()


def test_what_is_outstanding_stays_alive(rank: Communicator) -> None:
    """Until it is received, and no longer."""
    x, ids, weights = arguments()
    kept = weakref.ref(x)
    rank.dispatch_async(x, ids, weights)
    del x
    gc.collect()
    assert kept() is not None
    rank.dispatch_wait()
    gc.collect()
    assert kept() is None


def test_a_batch_whose_buffers_were_used_again_is_refused(rank: Communicator) -> None:
    """By another batch that lives, or is gone; not by one in other buffers."""
    buffers = rank.allocate()
    first = rank.dispatch(*arguments(5), out=buffers)
    rank.dispatch(*arguments(3))
    rank.combine(expert_rows(first), first)
    second = rank.dispatch(*arguments(3), out=buffers)
    for call in (rank.combine, rank.combine_async):
        with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
            call(expert_rows(first), first)
    rank.combine(expert_rows(second), second)
    third = rank.dispatch(*arguments(3), out=second)
    assert third.tokens is buffers.tokens
    del third
    with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        rank.combine(expert_rows(second), second)


def test_buffers_of_two_ranks_hold_the_batch_of_one(make: Make) -> None:
    ranks = [make(rank=number) for number in range(2)]
    shared = ranks[0].allocate()
    batches = [one.dispatch(*arguments(), out=shared) for one in ranks]
    with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        ranks[0].combine(expert_rows(batches[0]), batches[0])
    ranks[1].combine(expert_rows(batches[1]), batches[1])


@pytest.mark.parametrize("change", [{"num_experts": 14, "fused_shared_expert": True}, {}])
def test_a_batch_of_another_communicator_is_refused(make: Make, change: dict) -> None:
    """Also where all shapes agree: 14 experts and a shared one make as many groups as 16."""
    other, here = make(replace(CFG, **change)), make(replace(CFG, num_experts=16 if change else 8))
    batch = other.dispatch(*arguments())
    with pytest.raises(EPInputError, match=r"batch of another communicator \(its rank 0\): must be what a dispatch of"):
        here.combine(expert_rows(batch), batch)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_copy_of_a_batch_is_not_taken_for_it(rank: Communicator, copied) -> None:
    """A batch is of a communicator's own rounds, in memory that the communicator knows."""
    batch = rank.dispatch(*arguments())
    with pytest.raises(EPInputError, match="dispatched"):
        rank.combine(expert_rows(batch), copied(batch))
    rank.combine(expert_rows(batch), batch)


def test_a_plan_belongs_to_the_stream_of_its_making(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """On which its scale was filled and its output allocated."""
    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(module, "current_stream", lambda ordinal: stream.cuda_stream)
    batch = rank.dispatch(*arguments())
    plans = [rank.plan_dispatch(*arguments(), input_scale=2.0), rank.plan_combine(expert_rows(batch), batch)]
    stream.cuda_stream = 2
    before = len(LAUNCHES)
    for plan in plans:
        with pytest.raises(EPInputError, match="the current stream is 0x2: must be 0x1, on which the call was planned"):
            plan.launch()
    assert len(LAUNCHES) == before
    stream.cuda_stream = 1
    for plan in plans:
        plan.launch()
    assert [launch.stream for launch in LAUNCHES[before:]] == [1, 1]


def test_timeout_of_skip_a2a_names_the_rank(make: Make) -> None:
    one = make(ALONE, 1)
    one._status.memory.words[0:4] = [Phase.GRID, 0, 4, 3]
    with pytest.raises(EPTimeout, match=r"rank 1 gave up waiting in phase GRID for rank\(s\) \[1\]") as error:
        one.synchronize()
    assert (error.value.rank, error.value.missing) == (1, (1,))


@pytest.mark.parametrize(
    ("word", "name"),
    [(StateWord.DISPATCH_SEND_EPOCH, "dispatch"), (StateWord.COMBINE_SEND_EPOCH, "combine")],
)
def test_a_fused_launch_out_of_order_is_told(rank: Communicator, word: StateWord, name: str) -> None:
    """Kernels report it in the own rank's record; it is no timeout, and names none."""
    rank._status.memory.words[0:4] = [Phase.ORDER, word, 4, 5]
    assert rank.failed
    for call in (rank.synchronize, lambda: rank.dispatch(*arguments())):
        with pytest.raises(EPError, match=f"a fused {name} ran when 5 rounds had been sent and 4 received") as error:
            call()
        assert not isinstance(error.value, EPTimeout)


def test_an_id_beyond_32_bits_is_told(rank: Communicator) -> None:
    rank._status.memory.words[8:12] = [Phase.EXPERT_ID, 7, 8, BEYOND % (1 << 32)]
    with pytest.raises(
        EPInputError, match=r"topk_ids\.flatten\(\)\[7\] = -2147483648 or beyond 32 bits: must be -1 or in \[0, 8\)"
    ):
        rank.synchronize()


def test_the_guides_capture_keeps_what_its_graph_writes(rank: Communicator) -> None:
    """The block as printed. A graph holds addresses only: all memory that its launches name has an owner as long as
    what `capture` returns lives, and none afterwards."""
    guide = Path(__file__).parents[1] / "docs" / "use.md"
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "def capture" in one]
    cuda = SimpleNamespace(synchronize=lambda: None, CUDAGraph=object, graph=lambda graph: nullcontext())
    scope: dict = {"torch": SimpleNamespace(empty_like=torch.empty_like, cuda=cuda)}
    exec(block, scope)
    x, ids, weights = arguments()
    made = []
    allocate = rank.allocate
    rank.allocate = lambda: made.append(allocate()) or made[-1]
    owners = {x.data_ptr(): weakref.ref(x), ids.data_ptr(): weakref.ref(ids), weights.data_ptr(): weakref.ref(weights)}
    kept = scope["capture"](rank, x, ids, weights, expert_rows)
    for tensor in (*tensors_of(made.pop()).values(), kept[1]):
        if tensor is not None:
            owners[tensor.data_ptr()] = weakref.ref(tensor)
    del x, ids, weights, tensor, rank.allocate
    gc.collect()
    dispatched, combined = LAUNCHES[-2:]
    outputs = {"out_tokens", "out_scales", "row_offsets", "row_map", "headers", "num_rows", "src_info", "weights"}
    named = {dispatched.arguments[name] for name in outputs | {"x", "topk_ids", "router_weights"}}
    named |= {combined.arguments[name] for name in ("out", "topk_ids", "router_weights", "row_map", "headers")}
    assert named <= owners.keys() and all(owners[address]() is not None for address in named)
    del kept
    gc.collect()
    assert not any(owners[address]() is not None for address in named), "nobody else owns them"


def test_a_replaced_batch_is_as_old_as_its_buffers(rank: Communicator) -> None:
    """`dataclasses.replace` makes no batch young: its buffers may hold another one by then."""
    buffers = rank.allocate()
    first = rank.dispatch(*arguments(5), out=buffers)
    early = replace(first, router_weights=first.router_weights * 2)
    rank.combine(expert_rows(early), early)
    rank.dispatch(*arguments(3), out=buffers)
    for stale in (early, replace(first), copy.copy(first)):
        with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
            rank.combine(expert_rows(first), stale)


def test_a_plan_is_of_the_batch_that_its_buffers_hold_when_it_is_launched(rank: Communicator) -> None:
    buffers = rank.allocate()
    first = rank.dispatch(*arguments(5), out=buffers)
    plan = rank.plan_combine(expert_rows(first), first)
    rank.dispatch(*arguments(3), out=buffers)
    before = len(LAUNCHES)
    with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        plan.launch()
    assert len(LAUNCHES) == before


def test_a_batch_that_an_interrupt_lost_is_in_the_way_of_none_before(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers hold it, whoever has it: what they held before is gone."""
    buffers = rank.allocate()
    first = rank.dispatch(*arguments(5), out=buffers)

    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank.dispatch(*arguments(3), out=buffers)
    with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        rank.combine(expert_rows(first), first)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ({"topk_ids": torch.zeros(16, 0)}, r"dispatched\.topk_ids\.shape"),
        ({"topk_ids": torch.zeros(5, 2)}, r"dispatched\.topk_ids\.dtype"),
        ({"topk_ids": torch.zeros(1000, 2, dtype=torch.int32)}, r"dispatched\.topk_ids\.shape\[0\] = 1000: must not"),
        ({"headers": torch.zeros(1, dtype=torch.uint8)}, r"dispatched\.headers\.shape"),
        ({"weights": torch.zeros(2, 16, 2).double()}, r"dispatched\.weights\.dtype"),
    ],
)
def test_a_batch_that_was_put_together_is_checked(rank: Communicator, part: dict, rule: str) -> None:
    """All that kernels form addresses from."""
    batch = rank.dispatch(*arguments())
    before = len(LAUNCHES)
    with pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), replace(batch, origin=None, **part))
    assert len(LAUNCHES) == before


@pytest.mark.parametrize("state", ["closed", "failed", "interrupted"])
def test_what_ended_the_communicator_is_told_first(rank: Communicator, state: str) -> None:
    """In every call, however wrong its arguments are."""
    if state == "closed":
        rank.close()
    elif state == "failed":
        rank._status.memory.words[0:4] = [Phase.ROUTE, 0, 1, 0]
    else:
        rank._interrupted = True
    assert rank.failed == (state != "closed") and state[:6].replace("interr", "failed") in repr(rank)
    rule = {"closed": "is closed", "failed": "gave up waiting", "interrupted": "was interrupted"}[state]
    for call in (
        lambda: rank.dispatch(None, None),
        lambda: rank.dispatch_async(None, None),
        rank.dispatch_wait,
        lambda: rank.combine(None, None),
        lambda: rank.combine_async(None, None),
        rank.combine_wait,
        rank.allocate,
    ):
        with pytest.raises(EPError, match=rule):
            call()


def test_an_interrupted_synchronize_is_made_up_for(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one waits for the same streams."""
    waited: list[str] = []
    rank._streams = {7, 9}

    def synchronize(device: object) -> None:
        waited.append("device")
        if len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.torch.cuda, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        rank.synchronize()
    rank.synchronize()
    rank.synchronize()
    assert waited == ["device"] * 2


def test_memory_that_a_call_reads_is_not_written(rank: Communicator, make: Make) -> None:
    plain = make(replace(CFG, dispatch_format="bf16"))
    buffers = plain.allocate()
    _, ids, weights = arguments()
    with pytest.raises(EPInputError, match=r"out\.tokens: shares memory with x"):
        plain.dispatch(buffers.tokens[3:8], ids, weights, out=buffers)
    batch = rank.dispatch(*arguments())
    rows = expert_rows(batch)
    with pytest.raises(EPInputError, match="out: shares memory with rows"):
        rank.combine(rows, batch, out=rows[4:9])
    rank.combine(rows[5:], batch, out=rows[:5])


def test_buffers_that_may_not_be_written_any_more(rank: Communicator) -> None:
    """Also where they were checked before."""
    with torch.inference_mode():
        buffers = rank.allocate()
        rank.dispatch(*arguments(), out=buffers)
    with pytest.raises(EPInputError, match=r"out\.tokens.*inference"):
        rank.dispatch(*arguments(), out=buffers)
