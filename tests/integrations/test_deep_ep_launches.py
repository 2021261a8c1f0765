"""What the adapter launches on a GPU, and that nothing waits on the host where DeepEP does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime import group_pool, process_connection
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import Launches, MakeRank, report

TOKENS, HIDDEN, SLOTS, EXPERTS = 16, 1024, 4, 8
IDS = torch.rand(TOKENS, EXPERTS).topk(SLOTS).indices
WEIGHTS = torch.rand(TOKENS, SLOTS)
X = torch.randn(TOKENS, HIDDEN).bfloat16()

Connected = list[tuple[EPConfig, int | None]]


@pytest.fixture
def connected() -> Connected:
    """What was connected, and for how many SMs."""
    return []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, make_rank: MakeRank, connected: Connected) -> Any:
    """That of rank 0 of two. Kernels write nothing, so outputs are zeros."""

    def connect(check: object, cfg: EPConfig, group: object, sms: int | None) -> Communicator:
        connected.append((cfg, sms))
        return make_rank(cfg)

    monkeypatch.setattr(process_connection, "connect_checked", connect)
    monkeypatch.setattr(group_pool, "count_ranks", lambda group, call: group.size())
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return SimpleNamespace(rank=lambda: 0, size=lambda: 2)


@pytest.fixture
def buffer(group: Any) -> Buffer:
    return Buffer(group)


def layout(buffer: Buffer) -> tuple:
    by_rank, by_node, by_expert, goes, _ = buffer.get_dispatch_layout(IDS, EXPERTS)
    return by_rank, by_node, goes, by_expert


def test_normal_mode_moves_rows_without_a_copy(
    buffer: Buffer, launches: Launches, connected: Connected, no_wait: None
) -> None:
    rows, *_, handle, _ = buffer.dispatch(X, None, *layout(buffer), IDS, WEIGHTS, num_worst_tokens=2 * TOKENS)
    assert launches.kernels == ["dispatch_rank_major"] * 2
    assert [cfg.hidden for cfg, _ in connected] == [24, HIDDEN] and {sms for _, sms in connected} == {20}
    _, moved = launches
    assert moved.values("input.x", "out.tokens") == (X.data_ptr(), rows.data_ptr())
    buffer.dispatch(X, handle)
    weights = torch.rand(2 * TOKENS, SLOTS)
    buffer.combine(rows, handle, weights)
    again = ["dispatch_rank_major", "combine_partial", "dispatch_rank_major", "combine_unweighted"]
    assert launches.kernels[2:] == again
    home = launches.last("combine_partial")
    assert home.values("rows.data", "rows.capacity") == (rows.data_ptr(), 2 * TOKENS)
    assert len(connected) == 3


def test_counts_are_exchanged_in_the_same_memory_for_each_number_of_experts(
    buffer: Buffer, launches: Launches, no_wait: None
) -> None:
    """It is filled when it is made, which the capture of a graph would only record."""
    found = []
    for experts in (EXPERTS, 2 * EXPERTS) * 2:
        by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(IDS, experts)
        buffer.dispatch(X, None, by_rank, None, goes, by_expert, IDS, WEIGHTS, num_worst_tokens=2 * TOKENS)
        found.append(launches.of("dispatch")[-2].values("ids.data", "out.tokens"))
    assert found[:2] == found[2:] and found[0] != found[1]


def test_normal_mode_moves_rows_of_8_bits_as_they_are(buffer: Buffer, launches: Launches, no_wait: None) -> None:
    payload, scales = X.to(torch.float8_e4m3fn), torch.rand(TOKENS, HIDDEN // 128)
    (rows, factors), *_ = buffer.dispatch(
        (payload, scales), None, *layout(buffer), IDS, WEIGHTS, num_worst_tokens=2 * TOKENS
    )
    _, moved = launches
    assert moved.variant.format == "bf16"  # the kernel that encodes nothing
    assert moved.values("input.x", "input.scales", "out.tokens") == (
        payload.data_ptr(), scales.data_ptr(), rows.data_ptr()
    )  # fmt: skip
    assert factors.shape == (2 * TOKENS, HIDDEN // 128)


@pytest.mark.parametrize("hook", [False, True], ids=["at once", "hook"])
def test_low_latency_mode_never_waits(
    buffer: Buffer, launches: Launches, connected: Connected, no_wait: None, hook: bool
) -> None:
    for options in ({"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}):
        rows, _, handle, _, receive = buffer.low_latency_dispatch(
            X, IDS, TOKENS, EXPERTS, return_recv_hook=hook, **options
        )
        if receive is not None:
            receive()
        rows = rows[0].bfloat16() if isinstance(rows, tuple) else rows
        _, _, receive = buffer.low_latency_combine(rows, IDS, WEIGHTS, handle, return_recv_hook=hook)
        if receive is not None:
            receive()
        home = launches.last("combine_async" if hook else "combine")
        assert home.values("rows.data", "rows.capacity") == (rows.data_ptr(), rows.shape[0] * rows.shape[1])
    fused, halves = ["dispatch", "combine_exact"], ["dispatch_async", "dispatch_wait"]
    halves += ["combine_async_exact", "combine_wait_exact"]
    assert launches.kernels == (halves if hook else fused) * 3
    assert [cfg.dispatch_format for cfg, _ in connected] == ["bf16", "fp8", "fp8_pow2"]
    assert {sms for _, sms in connected} == {None}


def test_an_elastic_buffer_moves_rows_without_a_copy_and_never_waits(
    group: Any, launches: Launches, connected: Connected, no_wait: None
) -> None:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, num_gpu_timeout_secs=7)
    static: dict[str, Any] = {"num_experts": EXPERTS, "do_cpu_sync": False, "num_sms": 8}
    bias = torch.zeros_like(X)
    for expand in (False, True):
        first = len(launches)
        rows, _, weights, handle, _ = buffer.dispatch(X, IDS, WEIGHTS, **static, do_expand=expand)
        assert list(launches)[first].values("input.x", "out.tokens") == (X.data_ptr(), rows.data_ptr())
        buffer.dispatch(X, handle=handle, do_expand=expand, num_sms=8)
        buffer.combine(rows, handle)
        buffer.combine(rows, handle, weights, bias)
    sums = ["combine_exact", "combine_unweighted", "dispatch_rank_major", "combine_unweighted"]
    by_rank, expanded = ["dispatch_rank_major", "dispatch_rank_major", *sums], ["dispatch", "dispatch", *sums]
    assert launches.kernels == by_rank + expanded
    assert [(cfg.max_tokens_per_rank, cfg.timeout_s, sms) for cfg, sms in connected] == [(TOKENS, 7.0, 8)] * 3


def test_an_elastic_buffer_sends_expanded_rows_from_where_they_are(group: Any, launches: Launches) -> None:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, allow_multiple_reduction=False)
    rows, *_, handle, _ = buffer.dispatch(X, IDS, num_experts=EXPERTS, do_cpu_sync=False, do_expand=True)
    buffer.combine(rows, handle)
    home = launches.last("combine_exact")
    assert home.values("rows.data", "rows.capacity") == (rows.data_ptr(), len(rows))


def test_an_elastic_buffer_makes_padding_zero_when_it_is_asked(
    group: Any, launches: Launches, connected: Connected
) -> None:
    """Each dispatch by itself, also with a handle, by one communicator; without padding nothing is asked of it."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)
    static: dict[str, Any] = {"do_cpu_sync": False, "do_expand": True}
    for alignment, zeroed in ((8, [0, 1, 1, 0]), (1, [0, 0, 0, 0])):
        first = len(launches)
        made: dict[str, Any] = {"num_experts": EXPERTS, "expert_alignment": alignment}
        for zeros in (False, True):
            *_, handle, _ = buffer.dispatch(X, IDS, **made, **static, do_zero_padding=zeros)
            buffer.dispatch(X, handle=handle, do_expand=True, do_zero_padding=not zeros)
        assert [launch.arguments["out.zeroed"] for launch in list(launches)[first:]] == zeroed
    assert len(connected) == 2


def test_calls_tell_what_kernels_have_reported_before_they_launch(
    group: Any, launches: Launches, no_wait: None
) -> None:
    """Every call of both buffers, whichever call the report is of; made again it goes on."""
    buffer, elastic = Buffer(group), ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)
    given = (None, *layout(buffer), IDS, WEIGHTS)
    worst, most, static = {"num_worst_tokens": 2 * TOKENS}, (TOKENS, EXPERTS), {"num_experts": EXPERTS}
    rows, *_, handle, _ = buffer.dispatch(X, *given, **worst)
    blocks, _, own, *_ = buffer.low_latency_dispatch(X, IDS, *most, use_fp8=False)
    elastic_rows, _, _, other, _ = elastic.dispatch(X, IDS, **static, do_cpu_sync=False)
    calls: list[tuple[Any, Any]] = [
        (one, call)
        for one in (handle.route.of_rows.hold.communicator, own.hold.communicator)
        for call in (
            lambda: buffer.get_dispatch_layout(IDS, EXPERTS),
            lambda: buffer.dispatch(X, *given, **worst),
            lambda: buffer.dispatch(X, handle),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.low_latency_dispatch(X, IDS, *most, use_fp8=False),
            lambda: buffer.low_latency_dispatch(X, IDS, *most, use_fp8=False, return_recv_hook=True)[4](),
            lambda: buffer.low_latency_combine(blocks, IDS, WEIGHTS, own),
        )
    ]
    of_elastic = other.of_rows.hold.communicator
    calls += [
        (of_elastic, lambda: elastic.dispatch(X, IDS, **static, do_cpu_sync=False)),
        (of_elastic, lambda: elastic.dispatch(X, handle=other)),
        (of_elastic, lambda: elastic.combine(elastic_rows, other)),
    ]
    for one, call in calls:
        report(one, Phase.EXPERT_ID, 6, EXPERTS, EXPERTS + 3)
        rule = rf"rank 0: topk_idx\[1, 2\] = {EXPERTS + 3}: must be -1 or in \[0, {EXPERTS}\)"
        with launches.forbidden(), pytest.raises(EPInputError, match=rule):
            call()
        call()
