"""Calls that the compiled launcher leaves to Python: what Python refuses, with the same words, and what needs more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.api.types import FormatName
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.launcher import missing
from cute_ep.testing.launches import by_python
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning
from tests.compiled_launches import CONTEXT, compiled
from tests.fake_gpu import CFG, Launches, MakeRank, expert_rows, inputs, report

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"there is no compiled launcher: {missing()}")

Given = dict[str, Any]


class Subclass(torch.Tensor):
    """A tensor that torch asks about all that is done with it."""


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy two bytes off an address that is a multiple of 16."""
    memory = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    return memory[1 : 1 + tensor.numel()].view(tensor.shape)


def grads(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that requires a gradient."""
    return tensor.clone().requires_grad_()


def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    """A copy made in inference mode."""
    with torch.inference_mode():
        return tensor.clone()


DISPATCH_MISTAKES: dict[str, Callable[[Given], Given]] = {
    "x of another type": lambda given: {"x": given["x"].float()},
    "x of another width": lambda given: {"x": given["x"][:, :64].contiguous()},
    "x of three dimensions": lambda given: {"x": given["x"][None]},
    "x off its alignment": lambda given: {"x": shifted(given["x"])},
    "x with other strides": lambda given: {"x": given["x"].t().contiguous().t()},
    "x elsewhere": lambda given: {"x": given["x"].to("meta")},
    "x sparse": lambda given: {"x": given["x"].to_sparse()},
    "x with a gradient": lambda given: {"x": grads(given["x"])},
    "x a parameter": lambda given: {"x": torch.nn.Parameter(given["x"])},
    "x no tensor": lambda given: {"x": given["x"].tolist()},
    "x None": lambda given: {"x": None},
    "ids of another number": lambda given: {"topk_ids": given["topk_ids"][:3]},
    "ids of a type": lambda given: {"topk_ids": given["topk_ids"].short()},
    "ids of reals": lambda given: {"topk_ids": given["topk_ids"].float()},
    "ids transposed": lambda given: {"topk_ids": given["topk_ids"].t().contiguous().t()},
    "weights of another type": lambda given: {"router_weights": given["router_weights"].double()},
    "weights of integers": lambda given: {"router_weights": given["topk_ids"]},
    "weights with a gradient": lambda given: {"router_weights": grads(given["router_weights"])},
    "scale of two elements": lambda given: {"input_scale": torch.ones(2)},
    "scale of zero": lambda given: {"input_scale": 0.0},
    "scales": lambda given: {"scales": torch.ones(1)},
    "row scales": lambda given: {"row_scales": torch.ones(5).bfloat16()},
    "no frame": lambda given: {"frame": 4},
    "frame of a type": lambda given: {"frame": "5"},
    "out a tensor": lambda given: {"out": given["x"]},
    "out over x": lambda given: {
        "x": given["out"].tokens.view(torch.bfloat16).view(-1)[: given["x"].numel()].view(5, -1)
    },
    "out over weights": lambda given: {"router_weights": given["out"].row_weights[:10].view(5, 2)},
    "out without a tensor": lambda given: {"out": replace(given["out"], num_rows=None)},
}
COMBINE_MISTAKES: dict[str, Callable[[Given], Given]] = {
    "rows of another type": lambda given: {"rows": given["rows"].half()},
    "rows of another width": lambda given: {"rows": given["rows"][:, :64].contiguous()},
    "rows off their alignment": lambda given: {"rows": shifted(given["rows"])},
    "rows with a gradient": lambda given: {"rows": grads(given["rows"])},
    "rows no tensor": lambda given: {"rows": 5},
    "no batch": lambda given: {"dispatched": given["rows"]},
    "batch of other ids": lambda given: {"dispatched": replace(given["dispatched"], topk_ids=given["rows"])},
    "batch without weights": lambda given: {"dispatched": replace(given["dispatched"], weighted=False)},
    "weights in partial mode": lambda given: {"router_weights": given["dispatched"].router_weights},
    "an unknown mode": lambda given: {"mode": "whole"},
    "exact without weights": lambda given: {
        "mode": "exact",
        "dispatched": replace(given["dispatched"], router_weights=None),
    },
    "exact with others": lambda given: {"mode": "exact", "router_weights": torch.ones(4, 2)},
    "out of another type": lambda given: {"out": given["out"].double()},
    "out of another shape": lambda given: {"out": given["out"][:4]},
    "out with a gradient": lambda given: {"out": grads(given["out"])},
    "out a parameter": lambda given: {"out": torch.nn.Parameter(given["out"], requires_grad=False)},
    "out of inference mode": lambda given: {"out": of_inference(given["out"])},
    "out over rows": lambda given: {"out": given["rows"][:5]},
    "type of integers": lambda given: {"out": None, "dtype": torch.int32},
    "epilogue data": lambda given: {"epilogue_data": torch.ones(4)},
}


def refusal(call: Callable[[], object]) -> tuple[type, str]:
    """The error of a call."""
    with pytest.raises(EPError) as raised:
        call()
    return raised.type, str(raised.value)


def warm(rank: Communicator, launches: Launches) -> tuple[Given, Given]:
    """Arguments of a dispatch and of a combine that the compiled launcher knows, of which it has made the dispatch."""
    out = rank.allocate()
    result = torch.zeros(5, CFG.hidden, dtype=torch.bfloat16)
    for _ in range(3):
        given = dict(zip(("x", "topk_ids", "router_weights"), inputs(), strict=True)) | {"out": out}
        returned = {"dispatched": rank.dispatch(**given), "out": result}
        returned["rows"] = expert_rows(returned["dispatched"])
        for mode in ("exact", "partial"):
            rank.combine(**returned, mode=mode)
        rank.combine(returned["rows"], returned["dispatched"])
    assert launches.kernels[-4:] == ["dispatch", "combine_exact", "combine_partial", "combine_partial"]
    assert launches.compiled.count == 1 + 2 * 3
    return given, returned


@pytest.mark.parametrize("name", DISPATCH_MISTAKES)
def test_a_dispatch_is_refused_in_the_words_of_python(rank: Communicator, launches: Launches, name: str) -> None:
    given, _ = warm(rank, launches)
    wrong = given | DISPATCH_MISTAKES[name](given)
    with launches.forbidden():
        found = refusal(lambda: rank.dispatch(**wrong))
        with by_python(rank):
            assert refusal(lambda: rank.dispatch(**wrong)) == found
        assert found[0] is EPInputError
    with compiled(launches):
        rank.dispatch(**given)


@pytest.mark.parametrize("name", COMBINE_MISTAKES)
def test_a_combine_is_refused_in_the_words_of_python(rank: Communicator, launches: Launches, name: str) -> None:
    _, given = warm(rank, launches)
    wrong = given | COMBINE_MISTAKES[name](given)
    with launches.forbidden():
        found = refusal(lambda: rank.combine(**wrong))
        with by_python(rank):
            assert refusal(lambda: rank.combine(**wrong)) == found
        assert found[0] is EPInputError
    with compiled(launches):
        rank.combine(**given)


def test_a_stale_batch_is_refused(rank: Communicator, launches: Launches, make_rank: MakeRank) -> None:
    given, returned = warm(rank, launches)
    with compiled(launches):
        rank.dispatch(**given)
    with launches.forbidden(), pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        rank.combine(**returned)
    other = make_rank().dispatch(*inputs())
    with launches.forbidden(), pytest.raises(EPInputError, match="batch of another communicator"):
        rank.combine(**returned | {"dispatched": other})


def test_buffers_that_require_a_gradient_by_now_are_refused(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(replace(CFG, dispatch_format="bf16"))
    given, _ = warm(rank, launches)
    given["out"].tokens.requires_grad_()
    with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.tokens\.requires_grad = True"):
        rank.dispatch(**given)


def carved(rank: Communicator) -> DispatchBuffers:
    return DispatchBuffers.carve(rank.cfg, rank.device)


def requiring_gradients(rank: Communicator, given: Given) -> Given:
    out = carved(rank)
    out.tokens.requires_grad_()
    return {"out": out}


CARVED_MISTAKES: dict[str, Callable[[Communicator, Given], Given]] = {
    "over x": lambda rank, given: {"out": (out := carved(rank)), "x": out.tokens.view(-1)[: 5 * 128].view(5, 128)},
    "over weights": lambda rank, given: {"out": (out := carved(rank)), "router_weights": out.weights[0, :5]},
    "over row weights": lambda rank, given: {
        "out": (out := carved(rank)),
        "router_weights": torch.as_strided(out.row_weights, (5, 2), (2, 1), 0),
    },
    "with a gradient": requiring_gradients,
    "of inference mode": lambda rank, given: {"out": torch.inference_mode()(carved)(rank)},
    "of another configuration": lambda rank, given: {
        "out": DispatchBuffers.carve(replace(rank.cfg, max_tokens_per_rank=8), rank.device)
    },
    "without rows": lambda rank, given: {"out": carved(rank).without_rows()},
}


@pytest.mark.parametrize("name", CARVED_MISTAKES)
def test_carved_buffers_are_refused_in_the_words_of_python(make_rank: MakeRank, launches: Launches, name: str) -> None:
    rank = make_rank(replace(CFG, dispatch_format="bf16"))
    given: Given = dict(zip(("x", "topk_ids", "router_weights"), inputs(), strict=True))
    for _ in range(3):
        rank.dispatch(**given, out=carved(rank))
    assert launches.compiled.count == 1
    wrong = given | CARVED_MISTAKES[name](rank, given)
    with launches.forbidden():
        found = refusal(lambda: rank.dispatch(**wrong))
        with by_python(rank):
            assert refusal(lambda: rank.dispatch(**wrong)) == found
    with compiled(launches):
        rank.dispatch(**given, out=carved(rank))


@pytest.mark.parametrize("fmt", FORMATS)
def test_buffers_without_rows_are_no_memory_for_any(make_rank: MakeRank, launches: Launches, fmt: FormatName) -> None:
    rank = make_rank(replace(CFG, dispatch_format=fmt))
    with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.tokens"):
        rank.dispatch(*inputs(), out=carved(rank).without_rows())


def test_buffers_that_were_put_together_are_not_taken_for_carved_ones(make_rank: MakeRank, launches: Launches) -> None:
    rank, row_map = make_rank(), torch.zeros(2, 16, 2, dtype=torch.int32)
    for _ in range(3):
        rank.dispatch(*inputs(), out=carved(rank).changed({"row_map": row_map}))
        assert launches.last().arguments["out.row_map"] == row_map.data_ptr()
        rank.dispatch(*inputs(), out=carved(rank))
        assert launches.last().arguments["out.row_map"] != row_map.data_ptr()


def closed(rank: Communicator) -> None:
    rank.close()


def timed_out(rank: Communicator) -> None:
    report(rank, Phase.MESSAGE, 3, 5, 3, peer=1)


def interrupted(rank: Communicator) -> None:
    rank._interrupted = True


def sent(rank: Communicator) -> None:
    rank.combine_async(expert_rows(batch := rank.dispatch(*inputs())), batch)
    rank.dispatch_async(*inputs())


@pytest.mark.parametrize("become", [closed, timed_out, interrupted, sent], ids=lambda one: one.__name__)
def test_a_communicator_that_takes_no_call_refuses_it(
    rank: Communicator, launches: Launches, become: Callable[[Communicator], None]
) -> None:
    given, returned = warm(rank, launches)
    become(rank)
    for call in (lambda: rank.dispatch(**given), lambda: rank.combine(**returned)):
        with launches.forbidden():
            found = refusal(call)
            with by_python(rank):
                assert refusal(call) == found
            assert found[0] is {"timed_out": EPTimeout, "sent": EPInputError}.get(become.__name__, EPError)


def elsewhere(rank: Communicator, launches: Launches) -> None:
    launches.compiled.context = CONTEXT + 1


def refusing(rank: Communicator, launches: Launches) -> None:
    launches.compiled.status = 1


def looking(rank: Communicator, launches: Launches) -> None:
    rank.check_finite = True


def tuned(rank: Communicator, launches: Launches) -> None:
    some = Entry(tokens=MANY, grid=3, senders=0, slices=1)
    rank.tuning = Tuning((some,), (some,))


def profiled(rank: Communicator, launches: Launches) -> Any:
    return torch.profiler.profile()


def inference(rank: Communicator, launches: Launches) -> Any:
    return torch.inference_mode()


@pytest.mark.parametrize(
    "become", [elsewhere, refusing, looking, tuned, profiled, inference], ids=lambda one: one.__name__
)
def test_python_launches_what_needs_more_than_a_launch(
    rank: Communicator, launches: Launches, become: Callable[[Communicator, Launches], Any]
) -> None:
    """The results are as ever; a driver that refuses is asked again by Python, which says what it answers."""
    given, _ = warm(rank, launches)
    with become(rank, launches) or nullcontext():
        before, refused = launches.compiled.count, 2 if become is refusing else 0
        batch = rank.dispatch(**given)
        out = torch.zeros(5, CFG.hidden, dtype=torch.bfloat16)
        rank.combine(expert_rows(batch), batch, out=out)
        assert launches.compiled.count - before == refused
        assert launches.kernels[-2:] == ["dispatch", "combine_partial"] and batch.is_whole(rank.origin)
        assert launches.last().arguments["sums.out"] == out.data_ptr()
        if become is tuned:
            assert [launch.grid for launch in list(launches)[-2:]] == [3, 3]


def test_subclasses_are_left_to_python(rank: Communicator, launches: Launches) -> None:
    given, _ = warm(rank, launches)
    before = launches.compiled.count
    with torch.no_grad():
        for x in (torch.nn.Parameter(given["x"]), given["x"].as_subclass(Subclass)) * 2:
            rank.dispatch(**given | {"x": x})
            assert launches.last().arguments["input.x"] == x.data_ptr()
    assert launches.compiled.count == before


def test_gradients_that_nobody_computes_are_no_reason_to_decline(rank: Communicator, launches: Launches) -> None:
    given, returned = warm(rank, launches)
    given |= {"x": grads(given["x"])}
    with torch.no_grad():
        rank.dispatch(**given)
        with compiled(launches):
            rank.dispatch(**given)
        returned |= {"dispatched": rank.dispatch(*inputs()), "out": grads(returned["out"])}
        with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.requires_grad = True"):
            rank.combine(**returned)
    with launches.forbidden(), pytest.raises(EPInputError, match=r"x\.requires_grad = True: must be False while"):
        rank.dispatch(**given)


PLAIN_MISTAKES: dict[str, Callable[[Given], Given]] = {
    "offsets of another type": lambda tensors: {"row_offsets": tensors["row_offsets"].long()},
    "numbers of rows": lambda tensors: {"num_rows": torch.zeros(2, dtype=torch.int32)},
    "map of another shape": lambda tensors: {"row_map": tensors["row_map"][:, :3]},
    "headers with other strides": lambda tensors: {"headers": tensors["headers"].t().contiguous().t()},
    "weights of another type": lambda tensors: {"weights": tensors["weights"].double()},
    "tokens elsewhere": lambda tensors: {"tokens": tensors["tokens"].to("meta")},
    "another rank": lambda tensors: {"rank": 1},
    "slices": lambda tensors: {"return_slices_log2": 40},
}


@pytest.mark.parametrize("name", PLAIN_MISTAKES)
def test_a_batch_of_tensors_is_launched_again_or_refused(rank: Communicator, launches: Launches, name: str) -> None:
    """What was put together from tensors is as good as what its tensors are, in fused calls and halves."""
    batch = rank.dispatch(*inputs())
    rows, tensors = expert_rows(batch), tensors_of(batch)
    about = {"rank": 0, "topk_ids": batch.topk_ids, "router_weights": None, "weighted": True, "return_slices_log2": 0}

    def put_together(**changes: Any) -> Dispatched:
        others = {name: changes.pop(name) for name in list(changes) if name in about}
        return Dispatched.of_tensors(tensors | changes, **about | others)

    def both(batch: Dispatched) -> None:
        rank.combine(rows, batch)
        rank.combine_wait(rank.combine_async(rows, batch))

    both(put_together())
    with compiled(launches, 3):
        both(put_together())
    want = batch.row_map.data_ptr(), batch.headers.data_ptr(), batch.weights.data_ptr()
    assert launches.last("combine_async").values("batch.row_map", "batch.headers", "batch.weights") == want
    wrong = put_together(**PLAIN_MISTAKES[name](tensors))
    for call in (lambda: rank.combine(rows, wrong), lambda: rank.combine_async(rows, wrong)):
        with launches.forbidden():
            found = refusal(call)
            with by_python(rank):
                assert refusal(call) == found


def test_ranks_that_share_a_gpu_launch_on_their_stream(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(shared=True)
    for _ in range(3):
        rank.dispatch(*inputs())
    assert launches.compiled.count == 2
