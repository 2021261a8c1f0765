"""Adapters over `cute_ep.ops` whose host waits for numbers of rows, on an emulated GPU: what is sent before the host
polls, into which memory, and when it is sent again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cute_ep.integrations.common import pools
from cute_ep.layouts.maps.routing import max_rows
from cute_ep.runtime import group_pool, host_words
from tests.fake_gpu import Launches
from tests.integrations import rigs

from .absent_peer import EXPERTS, RANKS, Group, Waits

HIDDEN, SLOTS, ROOM = 64, 3, 64
MOVED = "dispatch_rank_major"
"""The kernel that exchanges counts."""
MOST = max_rows(RANKS * ROOM * SLOTS, EXPERTS // RANKS, 1)
"""Rows that may come where each rank has ROOM tokens."""
MAKE = {
    "empty",
    "as_strided",
    "slice",
    "view",
    "expand",
    "detach",
    "detach_",
    "to",
    "resolve_conj",
    "resolve_neg",
    "narrow",
}
"""Operations of torch that launch nothing, where types are what they are to be."""
Call = Callable[[int], tuple[torch.Tensor, Callable[[], torch.Tensor]]]
"""A dispatch of so many tokens: the rows that it returns, and their combine."""


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, EXPERTS).topk(SLOTS).indices
    return torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, SLOTS)


def megatron(group: Any, monkeypatch: pytest.MonkeyPatch, *, padded: bool = False) -> Call:
    pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install megatron-core==0.16.1")
    from cute_ep.integrations.megatron import CuteEPManager

    config = SimpleNamespace(
        overlap_moe_expert_parallel_comm=False,
        moe_router_padding_for_quantization=padded,
        fp8=None,
        fp8_recipe=None,
        fp4=None,
        moe_router_dtype="fp32",
        moe_deepep_num_sms=None,
    )
    manager = CuteEPManager(group, EXPERTS // RANKS, SLOTS, EXPERTS, config)

    def dispatch(tokens: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        x, manager.token_indices, manager.token_probs = inputs(tokens)
        with torch.no_grad():
            rows = manager.dispatch(x)
        assert len(manager.dispatched_probs) == len(rows) == manager.tokens_per_expert.numpy().sum()
        assert manager.tokens_per_expert.dtype == torch.int64

        def combine() -> torch.Tensor:
            with torch.no_grad():
                return manager.combine(rows)

        return rows, combine

    return dispatch


def torchtitan(group: Any, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(rigs, "SLOTS", SLOTS)
    one = rigs.Titan(group, None)

    def dispatch(tokens: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        given = inputs(tokens)
        sent = one.dispatch(given)
        assert len(sent[1]) == EXPERTS // RANKS
        return sent[0], lambda: one.combine(given, sent)

    return dispatch


class Alone(Group):
    """A group of one rank."""

    def size(self) -> int:
        return 1


def transformers(group: Any, monkeypatch: pytest.MonkeyPatch) -> Call:
    pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23 or newer")
    from transformers.distributed import expert_parallel

    from cute_ep.integrations.transformers.expert_parallel import CuteEP

    found: list[torch.Tensor] = []

    class Echo(CuteEP):
        """Experts that return what they get."""

        def _run(self, tokens: torch.Tensor, batch: Any, dtype: torch.dtype) -> torch.Tensor:
            found.append(tokens)
            return tokens

    module = torch.nn.Module()
    module.num_experts = EXPERTS // RANKS
    monkeypatch.setattr(expert_parallel, "get_process_group_ranks", lambda group: list(range(group.size())))
    meshes = [SimpleNamespace(size=one.size, get_group=lambda one=one: one) for one in (group, Alone())]
    one = Echo(module, *meshes)

    def dispatch(tokens: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        with torch.no_grad():
            out = one(*inputs(tokens))
        return found[-1], lambda: out

    return dispatch


@pytest.fixture(params=[megatron, torchtitan, transformers], ids=lambda make: make.__name__)
def call(
    request: pytest.FixtureRequest, absent_group: Any, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Call]:
    """An adapter of rank 0; what it connects is gone behind the test."""
    monkeypatch.setattr(pools.SHARED, "_pools", {})
    waits.pool = pools.pool_of(absent_group)
    with rigs.torchtitan(monkeypatch):
        importlib.invalidate_caches()
        yield request.param(absent_group, monkeypatch)


@pytest.fixture
def unequal(request: pytest.FixtureRequest) -> None:
    """For adapters whose ranks may have other numbers of tokens each."""
    if "torchtitan" in request.node.name:
        pytest.skip("all ranks have as many tokens, and connect again before they send")


def dispatches(launches: Launches, since: int = 0) -> list[str]:
    """Names of the launches from one on, without combines."""
    return [kernel for kernel in launches.kernels[since:] if not kernel.startswith("combine")]


def test_rows_are_sent_before_the_host_polls(call: Call, waits: Waits, launches: Launches, no_wait: None) -> None:
    """Once the ranks are connected: into memory for all that may come, of which as many are returned as come."""
    call(3)
    first = len(launches)
    queued = len(waits.queued)
    rows, combine = call(3)
    assert waits.queued[queued][first:] == dispatches(launches, first) == [MOVED, "dispatch"]
    moved = launches.last("dispatch")
    assert moved.values("out.tokens", "out.capacity") == (rows.data_ptr(), MOST)
    assert rows.shape == (RANKS * waits.tokens, HIDDEN) and combine().shape == (3, HIDDEN)
    home = launches.last("combine")
    assert home.values("rows.data", "rows.capacity") == (rows.data_ptr(), len(rows))
    assert home.values("batch.row_map", "batch.headers") == moved.values("out.row_map", "out.headers")


def test_calls_of_other_tokens_are_launched_again(call: Call, waits: Waits, launches: Launches) -> None:
    """By the compiled launcher, since the memory is as large whatever comes."""
    for waits.tokens in (3, 3, 4):
        call(3)[1]()
    before = launches.compiled.count
    for waits.tokens in (5, 3):
        call(3)[1]()
    assert launches.compiled.count - before == 6, "exchanges, dispatches and combines"


@pytest.mark.parametrize("gradients", [False, True], ids=["early", "with gradients"])
def test_torch_only_makes_tensors(
    call: Call, waits: Waits, monkeypatch: pytest.MonkeyPatch, no_wait: None, gradients: bool
) -> None:
    """What fills, copies or computes would be a launch more on a GPU."""
    given, emulated = inputs(3), "emulated"
    monkeypatch.setitem(globals(), "inputs", lambda tokens: given)
    for owner, name in ((host_words, "give_way"), (group_pool, "count_routes")):  # which a GPU does by kernels
        monkeypatch.setattr(owner, name, record_function(emulated)(getattr(owner, name)))
    if gradients:
        monkeypatch.setattr(torch, "no_grad", nullcontext)
    for _ in range(3):
        call(3)[1]()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call(3)[1]()

    def own(event: Any) -> bool:
        return event is None or (event.name != emulated and own(event.cpu_parent))

    names = {one.name.removeprefix("aten::") for one in seen.events() if one.name.startswith("aten::") and own(one)}
    given_by_rig = {"zeros", "zero_", "fill_"}  # torchtitan's own counts
    assert "empty" in names and names - given_by_rig <= MAKE, names - MAKE


def test_more_memory_than_a_guess_may_take_is_allocated_when_rows_are_known(
    call: Call, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "EARLY_BYTES", MOST * HIDDEN * 2 - 1)
    call(3)
    call(3)
    assert launches.last("dispatch").arguments["out.capacity"] == RANKS * waits.tokens
    for waits.tokens in (59, 60, 59):  # of 117 to 120 rows
        before = launches.compiled.count
        rows, _ = call(3)
        assert len(rows) == RANKS * waits.tokens and launches.last("dispatch").arguments["out.capacity"] == 120
    assert launches.compiled.count >= before + 2, "the exchange and the dispatch"


def test_a_rank_with_too_many_tokens_sends_none_and_all_send_again(
    call: Call, waits: Waits, launches: Launches, unequal: None
) -> None:
    call(3)
    first, waits.tokens = len(launches), ROOM + 6
    rows, combine = call(ROOM + 6)
    counts, early, again = (one for one in list(launches)[first:] if not one.kernel.startswith("combine"))
    assert counts.kernel == MOVED and early.values("input.tokens", "out.capacity") == (0, MOST)
    assert again.values("input.tokens", "out.capacity") == (ROOM + 6, pools.room_of(RANKS * (ROOM + 6)))
    assert rows.data_ptr() == again.arguments["out.tokens"] and combine().shape == (ROOM + 6, HIDDEN)
    second = len(launches)
    call(ROOM + 6)
    assert dispatches(launches, second) == [MOVED, "dispatch"], "the next call makes room for as many"
    assert launches.last("dispatch").arguments["out.capacity"] == 2 * MOST
    waits.tokens = 3
    for room in (2 * MOST, MOST):
        call(3)
        assert launches.last("dispatch").arguments["out.capacity"] == room


def test_a_rank_sends_again_where_another_had_too_many_tokens(
    call: Call, waits: Waits, launches: Launches, unequal: None
) -> None:
    call(3)
    first, waits.tokens = len(launches), ROOM + 1
    rows, _ = call(5)
    sent = [one for one in list(launches)[first:] if one.kernel == "dispatch"]
    assert [one.arguments["input.tokens"] for one in sent] == [5, 5]
    assert sent[1].values("out.tokens", "out.capacity") == (rows.data_ptr(), pools.room_of(RANKS * (ROOM + 1)))


def test_an_interrupted_call_learns_what_the_other_ranks_have(
    call: Call, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch, unequal: None
) -> None:
    """Or ranks would make room for other numbers of tokens, and some would send twice."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    for waits.tokens in (ROOM + 6, 3):
        call(3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_words, "give_way", interrupt)
        call(3)
    first, waits.tokens = len(launches), ROOM + 6  # of the interrupted call, too
    call(ROOM + 6)
    assert dispatches(launches, first) == [MOVED, "dispatch"]
    assert launches.last("dispatch").arguments["out.capacity"] == 2 * MOST


def test_padding_has_room_and_is_returned(
    absent_group: Any, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert's rows become a multiple of 16."""
    monkeypatch.setattr(pools.SHARED, "_pools", {})
    waits.pool = pools.pool_of(absent_group)
    call, experts = megatron(absent_group, monkeypatch, padded=True), EXPERTS // RANKS
    call(3)
    rows, _ = call(3)
    assert launches.last("dispatch").arguments["out.capacity"] == max_rows(RANKS * ROOM * SLOTS, experts, 16) > MOST
    assert len(rows) == 16, "all rows are of one expert"


def test_with_gradients_nothing_is_sent_early(
    absent_group: Any, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's saved rows would keep memory for all that may come."""
    monkeypatch.setattr(pools.SHARED, "_pools", {})
    waits.pool = pools.pool_of(absent_group)
    call = transformers(absent_group, monkeypatch)
    monkeypatch.setattr(torch, "no_grad", nullcontext)
    for _ in range(2):
        call(3)
        assert launches.last("dispatch").arguments["out.capacity"] == RANKS * waits.tokens
