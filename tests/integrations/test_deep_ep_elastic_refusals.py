"""DeepEP V2's calls with bad arguments on one rank of two, on the CPU: see `refusals`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.integrations.deep_ep import ElasticBuffer
from cute_ep.testing.workloads import make_inputs

from .groups import on_buffers, wide_ids
from .refusals import refused
from .test_deep_ep_refusals import META, PAIRS, ROWS, Changes, check

HIDDEN, EXPERTS, SLOTS, MOST = 512, 8, 3, 9
GIVEN = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, 2), (9, 5), "uniform", 7)
IDS = wide_ids(GIVEN)
STATS = "cumulative_local_expert_recv_stats"
with torch.inference_mode():
    INFERENCE = torch.zeros(4, dtype=torch.int32)

SEND: list[tuple[Changes, str]] = [
    *ROWS,
    *PAIRS,
    ({"x": lambda x: x[:3]}, "topk_idx.shape = (9, 3): must be (3, n)"),
    ({"topk_idx": None}, "topk_idx, num_experts: must be given without a handle"),
    ({"num_experts": None}, "topk_idx, num_experts: must be given without a handle"),
    ({"topk_idx": [1]}, "topk_idx = list: must be a torch.Tensor"),
    ({"topk_idx": lambda ids: ids.int()}, "topk_idx.dtype = torch.int32: must be torch.int64"),
    ({"topk_idx": lambda ids: ids.double()}, "topk_idx.dtype = torch.float64: must be torch.int64"),
    ({"topk_idx": lambda ids: ids[0]}, "topk_idx.shape = (3,): must be (9, n)"),
    ({"topk_idx": lambda ids: ids.to(META)}, "topk_idx.device = meta: must be cpu"),
    ({"topk_idx": lambda ids: ids.repeat(1, 4)}, "topk_idx.shape[1] = 12: must be an integer in [1, 8]"),
    ({"topk_weights": lambda one: one[:3]}, "topk_weights.shape = (3, 3): must be (9, 3)"),
    ({"topk_weights": lambda one: one.half()}, "topk_weights.dtype = torch.float16: must be torch.float32"),
    ({"num_experts": 7}, "num_experts = 7: must be a positive multiple"),
    ({"num_experts": 2.0}, "num_experts = 2.0: must be an integer"),
    ({"num_max_tokens_per_rank": 8}, "x.shape[0] = 9: must not exceed num_max_tokens_per_rank = 8"),
    ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank = 0: must be positive, here or in the constructor"),
    ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank = -1: must be an integer in [1, 32768]"),
    ({"num_max_tokens_per_rank": 40000}, "num_max_tokens_per_rank = 40000"),
    ({"expert_alignment": 0}, "expert_alignment = 0: must be an integer that is positive"),
    ({"expert_alignment": -4}, "expert_alignment = -4"),
    (
        {"expert_alignment": 3, "do_expand": True},
        "expert_alignment = 3: must be one of 1, 4, 8, 16, 64, 128 with do_exp",
    ),
    ({"do_zero_padding": True}, "do_zero_padding = True: must come with do_expand"),
    ({"num_sms": -1}, "num_sms = -1: must be an integer of at least 0"),
    ({"num_sms": 2.5}, "num_sms = 2.5"),
    ({STATS: torch.zeros(5, dtype=torch.int32)}, f"{STATS}.shape = (5,): must be (4)"),
    ({STATS: INFERENCE}, f"{STATS}.is_inference() = True: must be False outside of torch.inference_mode()"),
    ({STATS: torch.zeros(4)}, f"{STATS}.dtype = torch.float32: must be torch.int32"),
    ({"previous_event": 3}, "previous_event = int: must be an EventHandle or EventOverlap, or None"),
    ({"previous_event": ElasticBuffer.capture()}, "previous_event: must come with allocate_on_comm_stream"),
    ({"previous_event_before_epilogue": "event"}, "previous_event_before_epilogue = str"),
    ({"handle": object(), "topk_idx": None}, "handle = object: must be what dispatch returned"),
]
AGAIN: list[tuple[Changes, str]] = [
    *ROWS,
    *PAIRS,
    ({"x": lambda x: x[:3]}, "x.shape[0] = 3: must be 9, as of the handle"),
    ({"topk_idx": IDS[0]}, "topk_idx: must be None with a handle"),
    ({"topk_weights": torch.zeros(2, 3)}, "topk_weights.shape = (2, 3): must be (9, 3)"),
    ({"num_experts": 16}, "num_experts = 16: must be 8, as of the handle"),
    ({"do_expand": lambda own: not own}, "as of the handle"),
    ({"do_cpu_sync": True}, "do_cpu_sync = True: must be False with a handle"),
]
HOME: list[tuple[Changes, str]] = [
    ({"x": [1]}, "x = list: must be a torch.Tensor"),
    ({"x": lambda x: x.float()}, "x.dtype = torch.float32: must be torch.bfloat16"),
    ({"x": lambda x: x[1:]}, ", 512): must be ("),
    ({"x": lambda x: x[:, :256]}, ", 256): must be ("),
    ({"x": lambda x: x.to(META)}, "x.device = meta"),
    ({"handle": (1, 2)}, "handle = tuple: must be what dispatch returned"),
    ({"topk_weights": lambda one: one[:2]}, "topk_weights.shape = (2"),
    ({"topk_weights": lambda one: one.double()}, "topk_weights.dtype = torch.float64: must be torch.float32"),
    ({"bias": lambda one: one[:1]}, "bias.shape = (1, 512): must be (9, 512)"),
    ({"bias": lambda one: one.float()}, "bias.dtype = torch.float32: must be torch.bfloat16"),
    ({"bias": lambda one: (one, one, one)}, "len(bias) = 3: must be at most 2"),
    ({"bias": lambda one: (one, None)}, "bias[1] = NoneType: must be a torch.Tensor"),
]


@pytest.mark.parametrize("expand", [False, True], ids=["by rank", "expanded"])
def test_bad_arguments_are_refused_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    def program(buffer: ElasticBuffer) -> None:
        x, ids, weights = GIVEN[buffer.rank_idx].x, IDS[buffer.rank_idx], GIVEN[buffer.rank_idx].router_weights
        sent: Changes = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS, "do_expand": expand}
        if buffer.rank_idx == 0:
            cases = [(changes, words) for changes, words in SEND if not (expand and "do_zero_padding" in changes)]
            check(buffer.dispatch, sent, cases)
        rows, _, received, handle, _ = buffer.dispatch(**sent)
        home = {"x": rows, "handle": handle, "topk_weights": received, "bias": torch.zeros_like(x)}
        if buffer.rank_idx == 0:
            check(buffer.dispatch, {"x": x, "handle": handle, "do_expand": expand}, AGAIN)
            check(buffer.combine, home, HOME)
        out, total, _ = buffer.combine(**home)
        assert torch.equal(total, weights) and out.shape == x.shape and not out.isnan().any()
        buffer.destroy()
        refused(lambda: buffer.combine(**home), "handle: the memory that it needs was given back, by destroy()")

    make = partial(ElasticBuffer, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
    on_buffers(monkeypatch, 2, program, lambda group: make(group))


def test_the_most_tokens_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(buffer: ElasticBuffer) -> None:
        sent = {"x": GIVEN[0].x, "topk_idx": IDS[0], "num_experts": EXPERTS}
        refused(lambda: buffer.dispatch(**sent), "num_max_tokens_per_rank = 0: must be positive, here or in the constr")

    on_buffers(monkeypatch, 1, program, ElasticBuffer)


def test_constructors_and_facts_refuse_bad_arguments() -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    good: dict[str, Any] = {"group": group, "num_max_tokens_per_rank": 16, "hidden": 512, "num_topk": 4}
    ElasticBuffer(**good)
    for changes, words in (
        ({"group": None}, "group: must be a torch"),
        ({"group": 7}, "group = int: must be a torch.distributed process group"),
        ({"num_cpu_bytes": 8}, "num_cpu_bytes = 8: must be 0"),
        ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank = -1: must be an integer in [0, 32768]"),
        ({"num_max_tokens_per_rank": 40000}, "num_max_tokens_per_rank = 40000"),
        ({"hidden": 36}, "hidden = 36: must be a multiple of 8 in [8, 65536] for bf16"),
        ({"num_topk": 40}, "num_topk = 40: must be an integer in [0, 32]"),
        ({"num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs = 0: must be a number of seconds up to 3600"),
        ({"num_gpu_timeout_secs": 86400}, "num_gpu_timeout_secs = 86400"),
        ({"num_gpu_timeout_secs": "long"}, "num_gpu_timeout_secs = 'long'"),
    ):
        refused(partial(ElasticBuffer, **{**good, **changes}), words, EPConfigError, own=("hidden",))
    hint = {"group": group, "num_max_tokens_per_rank": 16, "hidden": 512, "num_topk": 4}
    for name, value in (("num_max_tokens_per_rank", 0), ("hidden", 36), ("num_topk", -1)):
        call = partial(ElasticBuffer.get_buffer_size_hint, **{**hint, name: value})
        refused(call, f"{name} = {value}", own=("hidden",))
