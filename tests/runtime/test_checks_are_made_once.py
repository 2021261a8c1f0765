"""What a communicator checks or binds once, however often it is used: the caller's buffers, and its own batches."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from cute_ep.api import validate, validate_combine
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.runtime import communicator as communicator_module
from cute_ep.runtime import launch_cache
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import Launches, MakeRank, RecordingKernel, address, expert_rows, inputs


def test_output_buffers_are_checked_at_their_first_use(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = communicator_module.check_buffers

    def counted(cfg: EPConfig, out: DispatchBuffers, device: torch.device) -> None:
        checked.append(id(out))
        check(cfg, out, device)

    monkeypatch.setattr(communicator_module, "check_buffers", counted)
    one, two = rank.allocate(16), rank.allocate(16)
    for out in (one, two, one, two):
        rank.dispatch(*inputs(), out=out)
    assert checked == [id(one), id(two)]


@pytest.mark.parametrize("inference", [False, True])
def test_output_buffers_that_were_made_for_the_communicator_are_not_looked_at(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    """In inference mode, where models are served, their tensors are inference tensors."""
    monkeypatch.delattr(validate, "buffer_shapes")
    with torch.inference_mode(inference):
        for out in (rank.allocate(16), DispatchBuffers.carve(rank.cfg, rank.device, 16)):
            for _ in range(3):
                rank.dispatch(*inputs(), out=out)
            assert launches.last().arguments["out.src_info"] == out.src_info.data_ptr()


def test_output_buffers_that_were_refused_are_refused_again(rank: Communicator) -> None:
    out = rank.allocate(16)
    wrong = replace(out, num_rows=out.num_rows.float())
    for _ in range(2):
        with pytest.raises(EPInputError, match=r"out\.num_rows"):
            rank.dispatch(*inputs(), out=wrong)


def test_kernels_are_bound_to_output_buffers_that_come_again(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each of several, for each kernel that receives; buffers of one call only are arguments of its launch."""
    bound: list[int] = []
    real = RecordingKernel.bind

    def counted(kernel: RecordingKernel, record: str, values: tuple) -> None:
        if record == "out":
            bound.append(values.tokens)
        real(kernel, record, values)

    monkeypatch.setattr(RecordingKernel, "bind", counted)
    one, two = rank.allocate(), rank.allocate()
    for out, times_bound in ((one, 0), (two, 0), (None, 0), (one, 1), (two, 2)):
        batch = rank.dispatch(*inputs(), out=out)
        assert launches.last().arguments["out.tokens"] == batch.tokens.data_ptr()
        assert len(bound) == times_bound
    for _ in range(2):
        rank.dispatch_wait(rank.dispatch_async(*inputs()), one)
        assert launches.last("dispatch_wait").arguments["out.tokens"] == one.tokens.data_ptr()
    assert bound == [out.tokens.data_ptr() for out in (one, two, one)]


def test_a_kernel_whose_binding_was_interrupted_is_bound_by_the_next_call(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be launched with the addresses of other buffers."""
    real, interrupts = RecordingKernel.bind, [KeyboardInterrupt]

    def interrupted(kernel: RecordingKernel, record: str, values: tuple) -> None:
        if record == "scales" and interrupts:
            raise interrupts.pop()
        real(kernel, record, values)

    out = rank.allocate()
    rank.dispatch(*inputs(), out=out)
    rank.dispatch(*inputs())
    monkeypatch.setattr(RecordingKernel, "bind", interrupted)
    with launches.forbidden(), pytest.raises(KeyboardInterrupt):
        rank.dispatch(*inputs(), out=out)
    for _ in range(2):
        rank.dispatch(*inputs(), out=out)
        given = launches.last().arguments
        assert (given["out.tokens"], given["scales.data"]) == (out.tokens.data_ptr(), out.scales.data_ptr())


def test_what_lies_between_output_buffers_is_not_compared_with_each(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocators mix tensors of all kinds: here x is between tokens and src_info. Only what touches a buffer is."""
    memory = torch.zeros(64 * rank.cfg.hidden, dtype=torch.bfloat16)
    made = rank.allocate(16)
    _, ids, weights = inputs()
    row, payload = rank.cfg.hidden, made.tokens.nbytes // 2
    tokens = memory[:payload].view(torch.uint8).view(made.tokens.shape)
    x = memory[payload:][: 5 * row].view(5, row)
    src_info = memory[payload + 5 * row :].view(torch.int32)[: made.src_info.numel()].view(made.src_info.shape)
    out = replace(made, tokens=tokens, src_info=src_info)
    rank.dispatch(x, ids, weights, out=out)
    with pytest.raises(EPInputError, match=r"out\.tokens: shares memory with x"):
        rank.dispatch(memory[payload - 8 :][: 5 * row].view(5, row), ids, weights, out=out)
    with pytest.raises(EPInputError, match=r"out\.src_info: shares memory with x"):
        rank.dispatch(memory[payload + 8 :][: 5 * row].view(5, row), ids, weights, out=out)
    monkeypatch.delattr(launch_cache, "check_apart")
    rank.dispatch(x, ids, weights, out=out)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was looked at of batches: tensors by name, and their router weights."""
    found: list[str] = []
    look, weigh = validate_combine.check_tensor, validate_combine.check_router_weights

    def looked(name: str, *words: object, **how: object) -> None:
        if name.startswith("dispatched."):
            found.append(name)
        look(name, *words, **how)

    def weighed(*words: object) -> None:
        found.append("router_weights")
        weigh(*words)

    monkeypatch.setattr(validate_combine, "check_tensor", looked)
    monkeypatch.setattr(validate_combine, "check_router_weights", weighed)
    return found


def test_batches_that_a_communicator_made_are_not_checked(rank: Communicator, checked: list[str]) -> None:
    """Neither the latest one nor earlier ones, fused or split."""
    batch = rank.dispatch(*inputs())
    for mode in ("exact", "partial"):
        rank.combine(expert_rows(batch), batch, mode=mode)
        rank.combine_wait(rank.combine_async(expert_rows(batch), batch, mode))
    assert checked == []
    later = rank.dispatch(*inputs())
    rank.combine(expert_rows(batch), batch)
    rank.combine(expert_rows(later), later)
    assert checked == []


def test_batches_without_an_origin_are_checked(make_rank: MakeRank, checked: list[str]) -> None:
    rebuilt = replace(make_rank().dispatch(*inputs()), stamp=None)
    make_rank().combine(expert_rows(rebuilt), rebuilt, mode="exact")
    assert {"dispatched.row_map", "dispatched.headers", "dispatched.topk_ids", "router_weights"} < set(checked)


def test_weights_that_combine_is_given_are_checked(rank: Communicator) -> None:
    batch = rank.dispatch(*inputs())
    with pytest.raises(EPInputError, match=r"router_weights\.shape"):
        rank.combine(expert_rows(batch), batch, batch.router_weights[:2], "exact")


def test_without_its_rows_a_batch_is_as_it_was_made(rank: Communicator, launches: Launches, checked: list[str]) -> None:
    """It has no weights of its own rank, so none that would not be checked."""
    x, ids, weights = inputs()
    batch = rank.dispatch(x, ids, weights)
    kept, rows = batch.without_rows(), expert_rows(batch)
    rank.combine(rows, kept, mode="partial")
    assert checked == [] and kept.is_whole(rank.origin)
    want = address(batch.row_map), address(batch.headers), address(batch.weights)
    assert launches.last().values("batch.row_map", "batch.headers", "batch.weights") == want
    rank.combine(rows, kept, weights, "exact")
    with launches.forbidden():
        for wrong, rule in ((None, "router_weights = None"), (weights[:2], r"router_weights\.shape")):
            with pytest.raises(EPInputError, match=rule):
                rank.combine(rows, kept, wrong, "exact")
    rank.dispatch(x, ids, out=batch)
    with launches.forbidden(), pytest.raises(EPInputError, match="a later dispatch"):
        rank.combine(rows, kept)


def test_a_batch_has_no_attributes_besides_its_fields(rank: Communicator) -> None:
    batch = rank.dispatch(*inputs())
    assert vars(batch).keys() == {field.name for field in dataclasses.fields(batch)}
