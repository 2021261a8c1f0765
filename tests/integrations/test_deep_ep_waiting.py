"""Dispatches of DeepEP's interface for which the host waits, on an emulated GPU: what is queued before the host polls,
what it allocates, and that no torch operation reads counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_ep.api.errors import EPInputError, EPTimeout
from cute_ep.integrations.common import pools
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime import host_words
from tests.fake_gpu import Launches, report

from .absent_peer import EXPERTS, Group, Waits

HIDDEN, SLOTS, ROOM = 1024, 4, 64
MOVED = "dispatch_rank_major"


@pytest.fixture
def buffer(absent_group: Any, waits: Waits) -> Buffer:
    made = Buffer(absent_group)
    waits.pool = made._pool
    return made


def dispatching(buffer: Buffer, tokens: int, *, scaled: bool = False) -> Callable[[], tuple]:
    """A dispatch of so many tokens, with the layout that the buffer has made; `scaled`: of FP8 rows with fewer scale
    factors than travel."""
    ids, weights = torch.rand(tokens, EXPERTS).topk(SLOTS).indices, torch.rand(tokens, SLOTS)
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    x, layout = torch.randn(tokens, HIDDEN), (by_rank, None, goes, by_expert)
    sent = (x.to(torch.float8_e4m3fn), torch.rand(tokens, 3)) if scaled else x.bfloat16()
    return lambda: buffer.dispatch(sent, None, *layout, ids, weights)


def test_rows_are_sent_before_the_host_polls(buffer: Buffer, waits: Waits, launches: Launches, no_wait: None) -> None:
    """Once the ranks are connected: into memory for all that may come, of which a view is returned."""
    dispatching(buffer, 3)()
    assert waits.queued == [[MOVED]] and launches.kernels == [MOVED] * 2
    assert launches.last().arguments["out.capacity"] == 2 * waits.tokens
    rows, ids, weights, received, handle, _ = dispatching(buffer, 3)()
    assert waits.queued[1] == launches.kernels == [MOVED] * 4
    assert launches.last().values("out.tokens", "out.capacity") == (rows.data_ptr(), 2 * ROOM)
    assert [len(one) for one in (rows, ids, weights, handle.recv_src_idx)] == [2 * waits.tokens] * 4
    assert received == [2 * waits.tokens, 0, 0, 0]
    buffer.combine(rows, handle)
    assert launches.last().values("rows.data", "rows.capacity") == (rows.data_ptr(), 2 * waits.tokens)


def test_prefixes_of_ranks_are_found_in_memory_of_the_rows_too(buffer: Buffer, waits: Waits) -> None:
    """First in memory of their own, and where rows are sent again: that of the first ones may go."""
    sizes = []
    for tokens in (3, 3, ROOM + 1):
        waits.tokens = tokens
        *_, handle, _ = dispatching(buffer, 3)()
        assert handle[0].tolist() == [[tokens, 0], [2 * tokens, 0]]
        sizes.append(handle[0].untyped_storage().nbytes())
    assert sizes[0] == sizes[2] == 16 < sizes[1]


def test_what_is_returned_may_be_changed_in_gradients(buffer: Buffer, waits: Waits, launches: Launches) -> None:
    """Whether it is all of its memory or not: torch refuses that of views that were made without gradients."""
    for _ in range(2):
        rows, _, weights, *_ = dispatching(buffer, 3)()
        for one in (rows, weights):
            assert one.mul_(torch.ones((), requires_grad=True)).requires_grad


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])
def test_a_rank_with_too_many_tokens_sends_none_and_all_send_again(
    buffer: Buffer, waits: Waits, launches: Launches, scaled: bool
) -> None:
    dispatching(buffer, 3, scaled=scaled)()
    first = len(launches)
    waits.tokens = ROOM + 6
    rows, *_ = dispatching(buffer, waits.tokens, scaled=scaled)()
    rows = rows[0] if scaled else rows
    _, early, again = list(launches)[first:]
    assert waits.queued[1] == launches.kernels[:-1]
    assert early.values("input.tokens", "out.capacity") == (0, 2 * ROOM)
    assert again.values("input.tokens", "out.capacity") == (waits.tokens, len(rows)) == (ROOM + 6, 2 * (ROOM + 6))
    assert early.arguments["group.arena"] == again.arguments["group.arena"]
    dispatching(buffer, waits.tokens, scaled=scaled)()
    assert launches.kernels[first + 3 :] == [MOVED] * 2


def test_a_rank_sends_again_where_another_had_too_many_tokens(buffer: Buffer, waits: Waits, launches: Launches) -> None:
    dispatching(buffer, 3)()
    first = len(launches)
    waits.tokens = ROOM + 1
    dispatching(buffer, 5)()
    _, early, again = list(launches)[first:]
    assert early.arguments["input.tokens"] == again.arguments["input.tokens"] == 5


def test_more_memory_than_a_guess_may_take_is_allocated_when_rows_are_known(
    buffer: Buffer, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, bound in enumerate((2 * ROOM * 2 * HIDDEN, 2 * ROOM * 2 * HIDDEN - 1)):
        monkeypatch.setattr(pools, "EARLY_BYTES", bound)
        dispatching(buffer, 3)()
        dispatching(buffer, 3)()
        assert launches.last().arguments["out.capacity"] == (2 * ROOM, 2 * waits.tokens)[number]


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "fewer rows": lambda x, weights: {"x": x[:2]},
    "rows of a type": lambda x, weights: {"x": x.float()},
    "rows elsewhere": lambda x, weights: {"x": x.to("meta")},
    "rows of bytes without scales": lambda x, weights: {"x": x.to(torch.float8_e4m3fn)},
    "rows of no width that there is": lambda x, weights: {"x": x[:, :12]},
    "a list of rows": lambda x, weights: {"x": x.tolist()},
    "rows and scales of another number": lambda x, weights: {"x": (x.to(torch.float8_e4m3fn), torch.ones(2, 3))},
    "fewer weights": lambda x, weights: {"topk_weights": weights[:, :1]},
    "weights of a type": lambda x, weights: {"topk_weights": weights.double()},
    "no weights": lambda x, weights: {"topk_weights": None},
    "no entries": lambda x, weights: {"topk_idx": None},
    "too little room": lambda x, weights: {"num_worst_tokens": 5},
    "no alignment": lambda x, weights: {"expert_alignment": 0},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_call_is_told_behind_right_ones(
    buffer: Buffer, waits: Waits, launches: Launches, change: Callable[..., dict[str, Any]]
) -> None:
    """Whose layout it has."""
    ids, weights, x = torch.rand(3, EXPERTS).topk(SLOTS).indices, torch.rand(3, SLOTS), torch.randn(3, HIDDEN)
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    given = {"x": x.bfloat16(), "topk_idx": ids, "topk_weights": weights, "is_token_in_rank": goes}
    given |= {"num_tokens_per_rank": by_rank, "num_tokens_per_expert": by_expert}
    for _ in range(3):
        buffer.dispatch(**given)
    wrong = change(given["x"], weights)
    with launches.forbidden(), pytest.raises(EPInputError) as told:
        buffer.dispatch(**given | wrong)
    with launches.forbidden(), pytest.raises(EPInputError) as first:
        Buffer(Group()).dispatch(**given | wrong)
    assert str(told.value) == str(first.value)


@pytest.mark.parametrize("experts", [7, 0, True, [EXPERTS], "8", 1 << 20], ids=str)
def test_a_wrong_number_of_experts_is_told_behind_right_ones(buffer: Buffer, launches: Launches, experts: Any) -> None:
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for _ in range(2):
        buffer.get_dispatch_layout(ids, EXPERTS)
        buffer.get_dispatch_layout(ids, 2)
    with pytest.raises(EPInputError, match="num_experts = "):
        buffer.get_dispatch_layout(ids, experts)


@pytest.mark.parametrize(
    "change",
    [lambda ids: ids.float(), lambda ids: ids[0], lambda ids: ids.tolist(), lambda ids: ids.repeat(1, EXPERTS)],
    ids=["a type", "one row", "a list", "more entries than experts"],
)
def test_wrong_entries_are_told_behind_right_ones(buffer: Buffer, change: Callable[[torch.Tensor], Any]) -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for _ in range(2):
        buffer.get_dispatch_layout(ids, EXPERTS)
    with pytest.raises(EPInputError, match="topk_idx"):
        buffer.get_dispatch_layout(change(ids), EXPERTS)


def test_a_timeout_of_the_counts_ends_the_call(
    buffer: Buffer, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatching(buffer, 3)()
    (counting,) = buffer._pool._counting.values()

    def fail(seconds: float) -> None:
        report(counting.communicator, Phase.ROUTE_TABLE, 0, 2, 1, peer=1)

    monkeypatch.setattr(host_words, "give_way", fail)
    with pytest.raises(EPTimeout, match="ROUTE_TABLE of rank 1"):
        dispatching(buffer, 3)()


def test_an_interrupted_wait_leaves_a_usable_buffer(
    buffer: Buffer, waits: Waits, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rounds were launched, so the other ranks' calls end."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    dispatching(buffer, 3)()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_words, "give_way", interrupt)
        dispatching(buffer, 3)()
    assert launches.kernels == [MOVED] * 4
    rows, *_ = dispatching(buffer, 3)()
    assert len(rows) == 2 * waits.tokens


@pytest.mark.parametrize("expand", [False, True], ids=["by rank", "expanded"])
def test_an_elastic_buffer_sends_rows_before_the_host_polls(
    absent_group: Any, waits: Waits, launches: Launches, no_wait: None, expand: bool
) -> None:
    buffer = ElasticBuffer(absent_group, num_max_tokens_per_rank=16)
    waits.pool = buffer._pool
    ids, x = torch.rand(3, EXPERTS).topk(SLOTS).indices, torch.randn(3, HIDDEN).bfloat16()
    kernel = "dispatch" if expand else MOVED
    for turn in range(2):
        rows, *_, handle, _ = buffer.dispatch(x, ids, num_experts=EXPERTS, do_expand=expand, expert_alignment=4)
        assert len(rows) == handle.room == (8 if expand else 6)
        assert waits.queued[turn][2 * turn :] == [MOVED, kernel][: 1 + turn]
        worst = 2 * 16 * SLOTS + 3 * 4 if expand else 2 * 16
        assert launches.last().arguments["out.capacity"] == (worst if turn else len(rows))


class Operations(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counted[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_waiting_dispatch_takes_few_operations_of_torch(
    buffer: Buffer, waits: Waits, launches: Launches, no_wait: None
) -> None:
    """Each takes the host microseconds. None reads counts or copies."""
    call = dispatching(buffer, 3)
    call()
    first, operations = len(launches), Operations()
    with operations:
        call()
    assert len(launches) - first == 2
    # memory of rows and of all else; a tensor that says how many rows there is room for; counts as a row; three
    # tensors of as many rows as came; `detach` is of views
    made = {"empty": 3, "expand": 2, "slice": 1, "view": 3, "narrow": 1, "as_strided": 2}
    assert {name: count for name, count in operations.counted.items() if name != "detach"} == made
