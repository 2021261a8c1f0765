"""One interface of two backends: the same calls with the same arguments and types, and the same manners."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

import cute_ep
from cute_ep import EPCommunicator, connect_local
from cute_ep.api.errors import EPError
from cute_ep.api.types import CombineMode, FormatName, ScaledFormat, ScaleLayout, SwigluFormat
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import CFG, MakeRank

from .one_rank import ONE_RANK, inputs_of

# ---- the same calls


@pytest.mark.parametrize("backend", [Communicator, ReferenceCommunicator])
def test_calls_are_those_of_the_interface_and_documented(backend: type) -> None:
    calls = {name for name, value in vars(EPCommunicator).items() if name[0] != "_" and callable(value)}
    assert {"dispatch", "combine_wait", "plan_dispatch", "synchronize", "close", "allocate"} <= calls
    for name in calls:
        mine, wanted = inspect.signature(getattr(backend, name)), inspect.signature(getattr(EPCommunicator, name))
        assert list(mine.parameters) == list(wanted.parameters), name
        assert len(inspect.getdoc(getattr(backend, name)) or "") > 40, name
    assert "topk_ids: [T, top_k] int32 or int64" in (inspect.getdoc(backend.dispatch) or "")


def public(kind: type) -> dict[str, object]:
    """What a class defines for its users."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and name != "free"}


def test_both_backends_define_the_same_calls_with_the_same_defaults() -> None:
    on_cpu, on_gpu = public(ReferenceCommunicator), public(Communicator)
    assert on_cpu.keys() == on_gpu.keys()
    for name, call in on_cpu.items():
        if inspect.isfunction(call):
            one, two = (inspect.signature(made).parameters.values() for made in (call, on_gpu[name]))
            assert [(p.name, p.kind, p.default) for p in one] == [(p.name, p.kind, p.default) for p in two], name


@pytest.mark.parametrize("name", ["dispatch", "plan_dispatch", "dispatch_async"])
def test_both_backends_take_tokens_of_the_same_types(name: str) -> None:
    ours, theirs = (get_type_hints(getattr(one, name)) for one in (Communicator, ReferenceCommunicator))
    assert ours.pop("return") and theirs.pop("return") and ours == theirs


def test_names_in_types_are_those_of_the_tables() -> None:
    assert get_args(FormatName) == tuple(FORMATS)
    assert get_args(ScaledFormat) == tuple(name for name, fmt in FORMATS.items() if fmt.scale)
    assert get_args(SwigluFormat) == tuple(name for name in get_args(ScaledFormat) if not FORMATS[name].row_scale)
    assert set(get_args(ScaleLayout)) == {layout for fmt in FORMATS.values() for layout in fmt.scale_layouts}
    assert get_args(CombineMode) == COMBINE_MODES


# ---- the same manners


def test_repr_of_a_rank_says_what_it_is_and_whether_it_is_open(make_rank: MakeRank) -> None:
    on_gpu, (on_cpu,) = make_rank(), connect_local(ONE_RANK, ["cpu"])
    on_gpu.device = torch.device("cuda", 3)
    size = cute_ep.memory_bytes(CFG) / 2**20
    sizes = (
        f"hidden {CFG.hidden}, {CFG.num_experts} experts, top-{CFG.top_k}, {CFG.max_tokens_per_rank} tokens per rank"
    )
    assert repr(on_gpu) == f"<Communicator rank 0 of 2 on cuda:3: nvfp4, {sizes}, {size:.0f} MiB; open>"
    assert repr(on_cpu) == f"<ReferenceCommunicator rank 0 of 1 on cpu: bf16, {sizes}; open>"
    on_cpu.close()
    assert repr(on_cpu).endswith("; closed>") and on_cpu.closed


def test_repr_of_a_batch_and_of_buffers_says_their_size_and_type(lone_rank: EPCommunicator) -> None:
    batch = lone_rank.dispatch(*inputs_of(), out=lone_rank.allocate(24))
    assert repr(batch) == f"Dispatched(rank 0, 5 tokens, room for 24 rows of {ONE_RANK.hidden} bfloat16 on cpu)"
    assert repr(lone_rank.allocate(8)) == f"DispatchBuffers(room for 8 rows of {ONE_RANK.hidden} bfloat16 on cpu)"
    quantised = repr(connect_local(replace(ONE_RANK, dispatch_format="fp8"), ["cpu"])[0].allocate(8))
    assert "rows of 128 float8_e4m3fn with scales in float32" in quantised


@pytest.mark.parametrize("held", [lambda rank: rank, lambda rank: {"ep": rank}], ids=["itself", "in a dict"])
@pytest.mark.parametrize(
    "take",
    [copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_model_that_holds_a_rank_is_not_copied(
    lone_rank: EPCommunicator, take: Callable[[Any], Any], held: Callable[[EPCommunicator], Any]
) -> None:
    model = torch.nn.Linear(1, 1)
    model.ep = held(lone_rank)
    with pytest.raises(EPError, match=r"rank 0 of 1 .*: it is one end of memory.*Connect again"):
        take(model)


def test_a_rank_is_not_copied(lone_rank: EPCommunicator) -> None:
    with pytest.raises(EPError, match=r"rank 0 of 1 .*: it is one end of memory.*Connect again"):
        copy.copy(lone_rank)
