"""DeepEP V1's calls with bad arguments on one rank of two, on the CPU: see `refusals`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.testing.workloads import make_inputs

from .groups import on_buffers, wide_ids
from .refusals import changed, refused

HIDDEN, EXPERTS, SLOTS, MOST = 512, 12, 3, 10
GIVEN = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, 2), (9, 5), "uniform", 7)
IDS = wide_ids(GIVEN)
FP8 = (torch.zeros(9, HIDDEN).to(torch.float8_e4m3fn), torch.ones(9, HIDDEN // 128))
META = torch.device("meta")
Changes = dict[str, Any]

LAYOUT: list[tuple[Changes, str]] = [
    ({"topk_idx": [[0]]}, "topk_idx = list: must be a torch.Tensor"),
    ({"topk_idx": lambda ids: ids[0]}, "topk_idx.shape = (3,): must be (n, m)"),
    ({"topk_idx": lambda ids: ids.float()}, "topk_idx.dtype = torch.float32: must be torch.int32 or torch.int64"),
    ({"topk_idx": lambda ids: ids > 2}, "topk_idx.dtype = torch.bool"),
    ({"topk_idx": lambda ids: ids.to(META)}, "topk_idx.device = meta: must be cpu"),
    ({"topk_idx": lambda ids: ids[:, :0]}, "topk_idx.shape[1] = 0: must be an integer in [1, 12]"),
    ({"topk_idx": lambda ids: ids.repeat(1, 11)}, "topk_idx.shape[1] = 33: must be an integer in [1, 12]"),
    ({"num_experts": 7}, "num_experts = 7: must be a positive multiple of the group's 2 ranks"),
    ({"num_experts": 0}, "num_experts = 0: must be an integer in [1, 1024]"),
    ({"num_experts": -12}, "num_experts = -12"),
    ({"num_experts": 12.0}, "num_experts = 12.0"),
    ({"num_experts": 1030}, "num_experts = 1030"),
    ({"previous_event": 3}, "previous_event = int: must be an EventOverlap, or None"),
    ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream = True: must come with"),
]
ROWS: list[tuple[Changes, str]] = [
    ({"x": "rows"}, "x = str: must be a torch.Tensor"),
    ({"x": [*FP8]}, "x = list: must be a torch.Tensor"),
    ({"x": lambda x: x[0]}, "x.shape = (512,): must be (n, m)"),
    ({"x": lambda x: x.half()}, "x.dtype = torch.float16: must be torch.bfloat16"),
    ({"x": lambda x: x.to(META)}, "x.device = meta: must be cpu"),
    ({"x": lambda x: x[:, :36]}, "x.shape[1] = 36: must be a multiple of 8 in [8, 65536] for bf16"),
    ({"x": lambda x: x[:, :0]}, "x.shape[1] = 0: must be a multiple of 8 in [8, 65536] for bf16"),
    ({"x": torch.zeros(9, 65544).bfloat16()}, "x.shape[1] = 65544: must be a multiple of 8 in [8, 65536] for bf16"),
]
PAIRS: list[tuple[Changes, str]] = [
    ({"x": (*FP8, FP8[1])}, "len(x) = 3: must be 2"),
    ({"x": lambda x: (x, x)}, "x[0].dtype = torch.bfloat16: must be torch.float8_e4m3fn"),
    ({"x": lambda x: (FP8[0], x)}, "x[1].dtype = torch.bfloat16: must be torch.float32 or torch.int32"),
    ({"x": (FP8[0], FP8[1][:4])}, "x[1].shape = (4, 4): must be (9, n)"),
    ({"x": (FP8[0], FP8[1].repeat(1, 2))}, "x[1].shape[1] = 8: must not exceed x[0].shape[1] / 128 = 4"),
    ({"x": (FP8[0][:, :64], FP8[1][:, :0])}, "x[0].shape[1] = 64: must be a multiple of 128"),
]
NORMAL: list[tuple[Changes, str]] = [
    *ROWS,
    *PAIRS,
    ({"x": lambda x: x[:2]}, "x.shape[0] = 2: must be 9, as of is_token_in_rank"),
    ({"x": torch.zeros(40000, HIDDEN).bfloat16()}, "x.shape[0] = 40000: must not exceed 32768 tokens of a rank"),
    (
        {"num_tokens_per_rank": None},
        "num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: must be what get_di",
    ),
    ({"num_tokens_per_rank": [1, 2]}, "num_tokens_per_rank = list: must be a torch.Tensor"),
    ({"num_tokens_per_rank": lambda one: one[:1]}, "num_tokens_per_rank.shape = (1,): must be (2)"),
    ({"num_tokens_per_rank": lambda one: one.float()}, "num_tokens_per_rank.dtype = torch.float32"),
    ({"is_token_in_rank": lambda one: one.int()}, "is_token_in_rank.dtype = torch.int32: must be torch.bool"),
    ({"is_token_in_rank": lambda one: one[:, :1]}, "is_token_in_rank.shape = (9, 1): must be (n, 2)"),
    ({"num_tokens_per_expert": lambda one: one[None]}, "num_tokens_per_expert.shape = (1, 12): must be (n)"),
    ({"num_tokens_per_expert": lambda one: one[:7]}, "num_tokens_per_expert.shape[0] = 7: must be a positive multiple"),
    (
        {"num_tokens_per_expert": torch.zeros(1024, dtype=torch.int32)},
        "num_tokens_per_expert.shape[0] = 1024: must not exceed 1022 with an is_token_in_rank of one's own",
    ),
    ({"topk_idx": None}, "topk_idx, topk_weights: must both be given, or neither"),
    ({"topk_weights": None}, "topk_idx, topk_weights: must both be given, or neither"),
    ({"topk_idx": lambda ids: ids[:4]}, "topk_idx.shape = (4, 3): must be (9, n)"),
    ({"topk_idx": lambda ids: ids.double()}, "topk_idx.dtype = torch.float64"),
    (
        {"topk_idx": torch.zeros(9, 31, dtype=torch.int64), "topk_weights": torch.zeros(9, 31)},
        "topk_idx.shape[1] = 31: must be an integer in [1, 12]",
    ),
    ({"topk_weights": lambda one: one[:, :1]}, "topk_weights.shape = (9, 1): must be (9, 3)"),
    ({"topk_weights": lambda one: one.half()}, "topk_weights.dtype = torch.float16: must be torch.float32"),
    ({"topk_weights": [0.5]}, "topk_weights = list: must be a torch.Tensor"),
    ({"expert_alignment": 0}, "expert_alignment = 0: must be an integer that is positive"),
    ({"expert_alignment": -1}, "expert_alignment = -1"),
    ({"expert_alignment": 2.5}, "expert_alignment = 2.5"),
    ({"num_worst_tokens": -4}, "num_worst_tokens = -4: must be an integer in [0, 65536]"),
    ({"num_worst_tokens": 4}, "num_worst_tokens = 4: must be at least 2 * 9 tokens"),
    ({"num_worst_tokens": 1 << 20}, "num_worst_tokens = 1048576"),
    ({"num_worst_tokens": True}, "num_worst_tokens = True"),
    ({"topk_idx": None, "topk_weights": None, "num_worst_tokens": 99}, "num_worst_tokens = 99: must be 0 without topk"),
    ({"handle": (1, 2)}, "topk_idx: must be None with a handle"),
    ({"previous_event": "event"}, "previous_event = str"),
    ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream = True: must come with"),
]
AGAIN: list[tuple[Changes, str]] = [
    *ROWS,
    *PAIRS,
    ({"x": lambda x: x[:1]}, "x.shape[0] = 1: must be 9, as of the handle"),
    ({"handle": lambda handle: tuple(handle)}, "handle = tuple: must be what dispatch returned"),
    ({"handle": 3}, "handle = int: must be what dispatch returned"),
]
HOME: list[tuple[Changes, str]] = [
    ({"x": None}, "x = NoneType: must be a torch.Tensor"),
    ({"x": lambda x: x[:1]}, "x.shape = (1, 512): must be ("),
    ({"x": lambda x: x[:, :256]}, ", 256): must be ("),
    ({"x": lambda x: x.float()}, "x.dtype = torch.float32: must be torch.bfloat16"),
    ({"x": lambda x: x.to(META)}, "x.device = meta"),
    ({"handle": lambda handle: tuple(handle)}, "handle = tuple: must be what dispatch returned, not a copy"),
    ({"topk_weights": lambda one: one[:1]}, "topk_weights.shape = (1, 3): must be ("),
    ({"topk_weights": lambda one: one[0]}, "topk_weights.shape = (3,): must be ("),
    ({"topk_weights": lambda one: one.bfloat16()}, "topk_weights.dtype = torch.bfloat16: must be torch.float32"),
    ({"topk_weights": lambda one: one.repeat(1, 11)}, "topk_weights.shape[1] = 33: must be an integer in [1, 32]"),
    ({"bias": lambda one: one[:1]}, "bias.shape = (1, 512): must be (9, 512)"),
    ({"bias": lambda one: one.float()}, "bias.dtype = torch.float32: must be torch.bfloat16"),
    ({"bias": lambda one: (one, one, one)}, "len(bias) = 3: must be at most 2"),
    ({"bias": lambda one: (one, one[:, :8])}, "bias[1].shape = (9, 8): must be (9, 512)"),
    ({"bias": lambda one: [one]}, "bias = list: must be a torch.Tensor"),
    ({"previous_event": 3}, "previous_event = int"),
]
STATS = "cumulative_local_expert_recv_stats"
with torch.inference_mode():
    INFERENCE = torch.zeros(6, dtype=torch.int32)
SEND: list[tuple[Changes, str]] = [
    *ROWS,
    ({"x": FP8}, "x = tuple: must be a torch.Tensor"),
    (
        {"use_fp8": True, "x": lambda x: x[:, :192]},
        "x.shape[1] = 192: must be a multiple of 128 in [128, 65536] for fp8",
    ),
    ({"use_fp8": True, "use_ue8m0": True}, "use_ue8m0 = True: must come with use_fp8, round_scale"),
    (
        {"use_fp8": True, "use_ue8m0": True, "round_scale": True, "x": lambda x: x[:, :384]},
        "x.shape[1] = 384: must be a multiple of 512",
    ),
    ({"topk_idx": lambda ids: ids.float()}, "topk_idx.dtype = torch.float32: must be torch.int32 or torch.int64"),
    ({"topk_idx": lambda ids: ids[0]}, "topk_idx.shape = (3,): must be (9, n)"),
    ({"topk_idx": lambda ids: ids[:4]}, "topk_idx.shape = (4, 3): must be (9, n)"),
    ({"topk_idx": None}, "topk_idx = NoneType: must be a torch.Tensor"),
    ({"topk_idx": lambda ids: ids[:, :0]}, "topk_idx.shape[1] = 0: must be an integer in [1, 12] (num_experts = 12)"),
    (
        {"topk_idx": lambda ids: ids.repeat(1, 11)},
        "topk_idx.shape[1] = 33: must be an integer in [1, 12] (num_experts = 12)",
    ),
    (
        {"topk_idx": lambda ids: ids.repeat(1, 5)},
        "topk_idx.shape[1] = 15: must be an integer in [1, 12] (num_experts = 12)",
    ),
    ({"num_max_dispatch_tokens_per_rank": 8}, "x.shape[0] = 9: must not exceed num_max_dispatch_tokens_per_rank = 8"),
    ({"num_max_dispatch_tokens_per_rank": 0}, "num_max_dispatch_tokens_per_rank = 0: must be an integer in [1, 32768]"),
    ({"num_max_dispatch_tokens_per_rank": 40000}, "num_max_dispatch_tokens_per_rank = 40000"),
    ({"num_max_dispatch_tokens_per_rank": 10.0}, "num_max_dispatch_tokens_per_rank = 10.0"),
    ({"num_experts": 7}, "num_experts = 7: must be a positive multiple"),
    ({"num_experts": "12"}, "num_experts = '12'"),
    ({STATS: torch.zeros(5, dtype=torch.int32)}, f"{STATS}.shape = (5,): must be (6)"),
    ({STATS: INFERENCE}, f"{STATS}.is_inference() = True: must be False outside of torch.inference_mode()"),
    ({STATS: torch.zeros(6)}, f"{STATS}.dtype = torch.float32: must be torch.int32"),
    ({STATS: [0] * 6}, f"{STATS} = list: must be a torch.Tensor"),
    ({"dispatch_wait_recv_cost_stats": torch.zeros(2)}, "dispatch_wait_recv_cost_stats = tensor: must be None"),
    ({"async_finish": True, "return_recv_hook": True}, "return_recv_hook = True: must be False with async_finish"),
]
RETURN: list[tuple[Changes, str]] = [
    ({"x": None}, "x = NoneType: must be a torch.Tensor"),
    ({"x": lambda x: x[:1]}, "x.shape = (1, 20, 512): must be (6, 20, 512)"),
    ({"x": lambda x: x.flatten(0, 1)}, "x.shape = (120, 512): must be (6, 20, 512)"),
    ({"x": lambda x: x.float()}, "x.dtype = torch.float32: must be torch.bfloat16"),
    ({"topk_idx": lambda ids: ids[:, :1]}, "topk_idx.shape = (9, 1): must be (9, 3)"),
    ({"topk_idx": lambda ids: ids.float()}, "topk_idx.dtype = torch.float32"),
    ({"topk_weights": lambda one: one[:1]}, "topk_weights.shape = (1, 3): must be (9, 3)"),
    ({"topk_weights": lambda one: one.half()}, "topk_weights.dtype = torch.float16: must be torch.float32"),
    ({"topk_weights": None}, "topk_weights = NoneType"),
    ({"handle": lambda handle: tuple(handle)}, "handle = tuple: must be what low_latency_dispatch returned"),
    ({"out": torch.zeros(9, HIDDEN)}, "out.dtype = torch.float32: must be torch.bfloat16"),
    ({"out": torch.zeros(8, HIDDEN).bfloat16()}, "out.shape = (8, 512): must be (9, 512)"),
    ({"out": torch.zeros(HIDDEN, 9).bfloat16().t()}, "out.stride() = (1, 9): must be row-major contiguous"),
    ({"out": torch.nn.Parameter(torch.zeros(9, HIDDEN).bfloat16())}, "out = Parameter: must be a tensor of its own"),
    ({"combine_wait_recv_cost_stats": torch.zeros(2)}, "combine_wait_recv_cost_stats = tensor: must be None"),
    ({"async_finish": True, "return_recv_hook": True}, "return_recv_hook = True: must be False with async_finish"),
]


def check(call: Any, given: Changes, cases: list[tuple[Changes, str]]) -> None:
    for changes, words in cases:
        refused(lambda changes=changes: call(**changed(given, changes)), words)


def own_layout(layout: Changes) -> Changes:
    """The same numbers, which `get_dispatch_layout` has not made."""
    return {name: one.clone() for name, one in layout.items()}


@pytest.mark.parametrize("own", [False, True], ids=["layout of the call", "own layout"])
def test_normal_mode_refuses_bad_arguments_and_sends_nothing(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    def program(buffer: Buffer) -> None:
        x, ids, weights = GIVEN[buffer.rank].x, IDS[buffer.rank], GIVEN[buffer.rank].router_weights
        by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        layout = {"num_tokens_per_rank": by_rank, "is_token_in_rank": goes, "num_tokens_per_expert": by_expert}
        layout = own_layout(layout) if own else layout
        sent = {"x": x, **layout, "topk_idx": ids, "topk_weights": weights}
        if buffer.rank == 0:
            check(buffer.get_dispatch_layout, {"topk_idx": ids, "num_experts": EXPERTS}, LAYOUT)
            check(buffer.dispatch, sent, NORMAL)
        rows, _, received, _, handle, _ = buffer.dispatch(**sent)
        home = {"x": rows, "handle": handle, "topk_weights": received, "bias": torch.zeros_like(x)}
        if buffer.rank == 0:
            check(buffer.dispatch, {"x": x, "handle": handle}, AGAIN)
            check(buffer.combine, home, HOME)
        out, total, _ = buffer.combine(**home)
        assert torch.equal(out, x * goes.sum(1, keepdim=True)) and torch.equal(total, weights)

    on_buffers(monkeypatch, 2, program)


def test_low_latency_mode_refuses_bad_arguments_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(buffer: Buffer) -> None:
        x, ids, weights = GIVEN[buffer.rank].x, IDS[buffer.rank], GIVEN[buffer.rank].router_weights
        sent: Changes = {"x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
        sent |= {"use_fp8": False}
        for _ in range(2):  # before there is a communicator, and then
            if buffer.rank == 0:
                check(buffer.low_latency_dispatch, sent, SEND)
            rows, _, handle, *_ = buffer.low_latency_dispatch(**sent)
        home = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": handle}
        if buffer.rank == 0:
            check(buffer.low_latency_combine, home, RETURN)
            refused(
                lambda: buffer.get_next_low_latency_combine_buffer(tuple(handle)), "handle = tuple: must be what low"
            )
        out, *_ = buffer.low_latency_combine(**home)
        torch.testing.assert_close(out, x, rtol=2**-6, atol=0)

    on_buffers(monkeypatch, 2, program)


def test_what_was_destroyed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles and hooks from before `destroy`; later calls connect again."""

    def program(buffer: Buffer) -> None:
        x, ids, weights = GIVEN[buffer.rank].x, IDS[buffer.rank], GIVEN[buffer.rank].router_weights
        for _ in range(2):
            by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            rows, *_, handle, _ = buffer.dispatch(x, None, by_rank, None, goes, by_expert)
            sent = x, ids, MOST, EXPERTS
            blocks, _, own, *_ = buffer.low_latency_dispatch(*sent, use_fp8=False)
            *_, hook = buffer.low_latency_dispatch(*sent, use_fp8=False, return_recv_hook=True)
            buffer.destroy()
            given_back = "handle: the memory that it needs was given back, by destroy()"
            refused(partial(buffer.combine, rows, handle), given_back)
            refused(partial(buffer.low_latency_combine, blocks, ids, weights, own), given_back)
            refused(hook, "hook of low_latency_dispatch: its round was given up by destroy()", EPError)
            again, *_ = buffer.dispatch(x, handle)
            assert torch.equal(again, rows)
            assert torch.equal(buffer.combine(again, handle)[0], x * goes.sum(1, keepdim=True))

    on_buffers(monkeypatch, 2, program)


def test_constructors_and_facts_refuse_bad_arguments() -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    many: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1025)
    for arguments, words in (
        ({"group": None}, "group: must be a torch"),
        ({"group": "world"}, "group = str: must be a torch.distributed process group"),
        ({"group": many}, "group.size() = 1025: must not exceed 1024 ranks"),
        ({"group": group, "comm": object()}, "group: must be a torch"),
        ({"group": group, "enable_shrink": True}, "enable_shrink = True"),
    ):
        refused(lambda given=arguments: Buffer(**given), words, EPConfigError)
    for value in (3, 0, -2, 2.0, None, True):
        refused(lambda given=value: Buffer.set_num_sms(given), f"new_num_sms = {value}: must be", EPInputError)  # type: ignore[arg-type]
    hint = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_ranks": 8, "num_experts": 256}
    assert Buffer.get_low_latency_rdma_size_hint(**hint) > 0
    over_nodes = EPConfig(7168, 256, 8, 128, 64, ranks_per_node=8)
    assert Buffer.get_low_latency_rdma_size_hint(**{**hint, "num_ranks": 64}) == memory_bytes(over_nodes)
    bad = (
        ("num_max_dispatch_tokens_per_rank", 0),
        ("hidden", 36),
        ("num_ranks", 66),
        ("num_ranks", 3),
        ("num_experts", 0),
    )
    for name, value in bad:
        call = partial(Buffer.get_low_latency_rdma_size_hint, **{**hint, name: value})
        refused(call, f"{name} = {value}", own=("hidden",))
