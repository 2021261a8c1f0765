"""Calls of vLLM's, SGLang's and FlashInfer's adapters with bad arguments on one rank of two: see `refusals`."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.integrations.common import pools

from .groups import ThreadGroup, on_groups
from .refusals import changed, refused
from .rigs import EXPERTS, HIDDEN, MOST, RANKS, RIGS, Rig, flashinfer, sglang, vllm
from .test_deep_ep_refusals import META, Changes
from .test_wrong_ids import expected, tokens

Patch = pytest.MonkeyPatch
Cases = list[tuple[Changes, str]]


def table(rows: str, ids: str, weights: str, device: str = "cpu") -> Cases:
    """Of tensors that every interface takes; by its names."""
    return [
        ({"x": "tokens"}, f"{rows} = str: must be a torch.Tensor"),
        ({"x": lambda x: x[0]}, f"{rows}.shape = (128,): must be"),
        ({"x": lambda x: x.to(META)}, f"{rows}.device = meta: must be {device}"),
        ({"ids": None}, f"{ids}"),
        ({"ids": lambda ids: ids.float()}, f"{ids}.dtype = torch.float32: must be torch.int32 or torch.int64"),
        ({"ids": lambda ids: ids[0]}, f"{ids}.shape = (3,): must be"),
        ({"ids": lambda ids: ids[:, :2]}, f"{ids}.shape = (5, 2): must be (5, 3)"),
        ({"ids": lambda ids: ids[:2]}, f"{ids}.shape = (2, 3): must be (5, 3)"),
        ({"ids": lambda ids: ids.to(META)}, f"{ids}.device = meta: must be {device}"),
        ({"weights": lambda one: one[:, :1]}, f"{weights}"),
        ({"weights": lambda one: one.long()}, f"{weights}"),
        ({"weights": lambda one: one.to(META)}, f"{weights}"),
    ]


NO_ROWS: Cases = [({"x": lambda x: x.float()}, "torch.float32"), ({"x": lambda x: x[:, :64]}, "64")]
MANY = {"x": torch.zeros(7, HIDDEN).bfloat16()}
SEND: dict[str, Cases] = {
    "vLLM": [
        *table("a1", "topk_ids", "topk_weights"),
        *NO_ROWS,
        (
            {"x": lambda x: x.half()},
            "a1.dtype = torch.float16: must be torch.bfloat16, start vLLM with --dtype bfloat16",
        ),
        (MANY, f"a1.shape[0] = 7: must not exceed {MOST}, --max-num-batched-tokens of the server"),
    ],
    "SGLang": [
        *table("hidden_states", "topk_output.topk_ids", "topk_output.topk_weights")[:3],
        ({"ids": None}, "topk_output = "),
        *table("hidden_states", "topk_output.topk_ids", "topk_output.topk_weights")[4:],
        *NO_ROWS,
        (
            MANY,
            "hidden_states.shape[0] = 7: must not exceed SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK = 6; rai",
        ),
    ],
    "FlashInfer": [
        *table("hidden_states", "topk_ids", "topk_weights"),
        ({"x": lambda x: x.float()}, "hidden_states, hidden_states_scale: have 512 and 0 bytes a row: must be as"),
        ({"x": lambda x: x.repeat(1, 2)}, "hidden_states, hidden_states_scale: have 512 and 0 bytes a row: must be as"),
        (MANY, f"hidden_states.shape[0] = 7: must not exceed max_tokens_per_rank = {MOST}"),
    ],
    "FlashInfer, MoeAlltoAll": [
        *table("input_payloads[0]", "token_selected_experts", "")[:5],
        ({"ids": lambda ids: ids[0]}, "token_selected_experts.shape = (3,): must be (n, 3)"),
        ({"ids": lambda ids: ids[:, :2]}, "token_selected_experts.shape = (5, 2): must be (n, 3)"),
        ({"ids": lambda ids: ids[:2]}, "input_payloads[2]: is torch.float32 (5, 3): must be router weights (2, 3)"),
        ({"ids": lambda ids: ids.to(META)}, "token_selected_experts.device = meta: must be cpu"),
        (
            {"weights": lambda one: one[:, :1]},
            "input_payloads[2]: is torch.float32 (5, 1): must be router weights (5, 3)",
        ),
        (
            {"weights": lambda one: one.long()},
            "input_payloads[2]: is torch.int64 (5, 3): must be router weights (5, 3)",
        ),
        ({"weights": lambda one: one.to(META)}, "the router weights of input_payloads.device = meta: must be cpu"),
        (MANY, f"input_payloads[0].shape[0] = 7: must not exceed runtime_max_tokens_per_rank = {MOST}"),
    ],
}
HOME: dict[str, Cases] = {
    "vLLM": [
        ({"rows": None}, "fused_expert_output = NoneType: must be a torch.Tensor"),
        ({"rows": lambda rows: rows.float()}, "fused_expert_output.dtype = torch.float32: must be torch.bfloat16"),
        ({"rows": lambda rows: rows[..., :64]}, "fused_expert_output.shape = ("),
        ({"rows": lambda rows: rows.flatten(0, -2)[1:]}, "fused_expert_output.shape = ("),
        ({"rows": lambda rows: rows.to(META)}, "fused_expert_output.device = meta"),
    ],
    "SGLang": [
        ({"rows": None}, "combine_input.hidden_states = NoneType: must be a torch.Tensor"),
        ({"rows": lambda rows: rows[1:]}, "combine_input.hidden_states.shape = ("),
        ({"rows": lambda rows: rows[:, :64]}, "combine_input.hidden_states.shape = ("),
        (
            {"rows": lambda rows: rows.half()},
            "combine_input.hidden_states.dtype = torch.float16: must be torch.bfloat16",
        ),
    ],
    "FlashInfer": [
        ({"rows": [1]}, "expert_output = list: must be a torch.Tensor"),
        ({"rows": lambda rows: rows[1:]}, "expert_output.shape = (11, 128): must be (12, 128) or (2, 6, 128)"),
        ({"rows": lambda rows: rows.float()}, "expert_output.dtype = torch.float32: must be torch.bfloat16"),
        ({"rows": lambda rows: rows.to(META)}, "expert_output.device = meta"),
    ],
    "FlashInfer, MoeAlltoAll": [
        ({"rows": [1]}, "payload = list: must be a torch.Tensor"),
        ({"rows": lambda rows: rows[1:]}, "payload.shape = (1, 6, 128): must be (2, 6, 128)"),
        ({"rows": lambda rows: rows.float()}, "payload.dtype = torch.float32: must be torch.bfloat16"),
    ],
}
OWN = {"FlashInfer": ("max_tokens_per_rank", "topk_ids"), "vLLM": ("topk_ids",)}
"""Names that the interface shares with the core."""


@pytest.mark.parametrize("name", [one for one in RIGS if one.split(",")[0] in ("vLLM", "SGLang", "FlashInfer")])
def test_bad_arguments_are_refused_and_nothing_is_sent(monkeypatch: Patch, name: str) -> None:
    framework, make = RIGS[name]
    kind = name if name in SEND else name.split(",")[0]
    own = OWN.get(kind, ())

    def program(group: ThreadGroup) -> tuple:
        rig = make(group)
        given = tokens(group.rank())
        try:
            for _ in range(2):
                if group.rank() == 0:
                    refuse_dispatch(rig, given, SEND[kind], own)
                sent = rig.dispatch(given)
                if group.rank() == 0:
                    for changes, words in HOME[kind]:
                        rows = changed({"rows": sent}, changes)["rows"]
                        refused(partial(rig.combine, given, rows), words, own=own)
                out = rig.combine(given, sent)
        finally:
            rig.close()
        return rig, given, out

    with framework(monkeypatch):
        for rig, given, out in on_groups(monkeypatch, RANKS, program):
            assert torch.equal(out, expected(rig, given))


def refuse_dispatch(rig: Rig, given: Any, cases: Cases, own: tuple[str, ...]) -> None:
    x, ids, weights = given
    for changes, words in cases:
        bad = changed({"x": x, "ids": ids, "weights": weights}, changes)
        if changes is MANY:
            bad |= {"ids": ids[:1].repeat(7, 1), "weights": weights[:1].repeat(7, 1)}
        refused(partial(rig.dispatch, tuple(bad.values())), words, own=own)


# ---- arguments of one interface


def alone(monkeypatch: Patch, name: str, check: Any) -> None:
    """`check(rig, given)` on each rank, and then a round."""
    framework, make = RIGS[name]

    def program(group: ThreadGroup) -> None:
        rig, given = make(group), tokens(group.rank())
        try:
            check(rig, given)
            assert torch.equal(rig.combine(given, rig.dispatch(given)), expected(rig, given))
        finally:
            rig.close()

    with framework(monkeypatch):
        on_groups(monkeypatch, RANKS, program)


def test_vllm(monkeypatch: Patch) -> None:
    def check(rig: Any, given: Any) -> None:
        x, ids, weights = given
        quant = rig.experts.quant_config

        def prepare(experts: Any = EXPERTS, weighted: bool = False) -> Any:
            return rig.layer.prepare(x, weights, ids, experts, None, weighted, quant, False)

        refused(partial(prepare, 12), "num_experts = 12: must be 8, as the layer's")
        refused(partial(prepare, weighted=True), "topk_ids.shape[1] = 3: must be 1 to weight inputs", own=("topk_ids",))
        finalize = partial(rig.layer.finalize, topk_weights=None, topk_ids=None, apply_router_weight_on_input=False)
        finalize = partial(finalize, weight_and_reduce_impl=None)
        refused(partial(finalize, x, x), "finalize must follow a prepare of the same layer")
        rows, good = prepare()[0], torch.zeros_like(x)
        for bad, words in (
            (good[:1], "output.shape = (1, 128): must be ("),
            (good.double(), "output.dtype = torch.float64: must be torch.bfloat16 or"),
            (good.t().contiguous().t(), "output.stride() = "),
            (torch.nn.Parameter(good), "output = Parameter: must be a tensor of its own"),
        ):
            refused(partial(finalize, bad, rows), words)
        finalize(good, rows)
        other = RIGS["vLLM"][1](rig.group)
        other.close()
        destroyed = "the layer's all2all manager was destroyed: make the layer again"
        refused(partial(other.dispatch, given), destroyed, EPError)

    alone(monkeypatch, "vLLM", check)
    with vllm(monkeypatch):
        options: Any = importlib.import_module("cute_ep.integrations.vllm.manager").Options
        standard: Any = importlib.import_module("cute_ep.integrations.vllm.standard").CuteEPStandard
        batched: Any = importlib.import_module("cute_ep.integrations.vllm.batched").CuteEPBatched
        for given, words in (
            ({"mode": "unweighted"}, "['mode'] = 'unweighted': must be 'partial' or 'exact'"),
            ({"static_rows": -1}, "['static_rows'] = -1: must be an integer of at least 0"),
            ({"timeout_s": 0}, "['timeout_s'] = 0: must be a number of seconds up to 3600"),
            ({"sms": 2.5}, "['sms'] = 2.5: must be a positive integer or None"),
            ({"rows": 3}, "['rows']: must be one of mode, static_rows, timeout_s, sms"),
            ("exact", "additional_config['cute_ep'] = 'exact': must be a mapping of options"),
        ):
            refused(partial(options.of, {"cute_ep": given}), words, EPConfigError)
        sizes = {"hidden": 128, "num_experts": 8, "top_k": 2, "max_tokens": 16}
        for changes, words in (
            ({"hidden": 36}, "hidden = 36: must be a multiple of 8 in [8, 65536] for bf16"),
            ({"num_experts": 1030}, "num_experts = 1030: must be a multiple of 2 in [2, 1024]"),
            ({"num_experts": 7}, "num_experts = 7: must be a multiple of 2 in [2, 1024] (expert parallel ranks = 2)"),
            ({"top_k": 33}, "top_k = 33: must be an integer in [1, 8] (num_experts = 8)"),
            ({"max_tokens": 40000}, "--max-num-batched-tokens = 40000: must be an integer in [1, 32768]"),
        ):
            for make in (standard, batched):
                call = partial(make, SimpleNamespace(world_size=2), tuple({**sizes, **changes}.values()))
                refused(call, words, EPConfigError, own=("hidden", "top_k"))


def test_sglang(monkeypatch: Patch) -> None:
    """Refused arguments of combine leave the batch to be combined, or to be given up."""

    def check(rig: Any, given: Any) -> None:
        x, ids, weights = given
        given_up = rig.module.DeepEPv2CombineInput(x, None)
        refused(partial(rig.one.combine, given_up), "combine: there was no dispatch", EPError)
        refused(partial(rig.one.dispatch, x, (weights, ids)), "topk_output = tuple: must be StandardTopKOutput")
        rig.dispatch(given)
        refused(partial(rig.dispatch, given), "has not been combined; or drop it with give_up()", EPError)
        refused(partial(rig.one.combine, (x, None)), "combine_input = tuple: must be DeepEPv2CombineInput")
        rig.one.give_up()
        refused(partial(rig.one.combine, given_up), "combine: there was no dispatch", EPError)
        rig.dispatch(given)
        rig.module.pools.pool_of(rig.group).close()
        refused(partial(rig.one.combine, given_up), "combine: the ranks were closed after the dispatch; drop", EPError)
        rig.one.give_up()

    alone(monkeypatch, "SGLang, extend", check)
    with sglang(monkeypatch):
        make: Any = importlib.import_module("cute_ep.integrations.sglang.dispatcher").CuteEPDispatcher
        sizes = {"router_topk": 2, "num_experts": 8, "num_local_experts": 4, "hidden_size": 128}
        sizes |= {"params_dtype": torch.bfloat16, "use_fp8_dispatch": False}
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        for changes, words in (
            ({"group": "world"}, "group = str: must be a torch.distributed process group"),
            ({"hidden_size": 36}, "hidden_size = 36: must be a multiple of 8 in [8, 65536] for bf16"),
            ({"router_topk": 9}, "router_topk = 9: must be an integer in [1, 8] (num_experts = 8)"),
            (
                {"num_experts": 1030, "num_local_experts": 515},
                "num_experts = 1030: must be a multiple of 2 in [2, 1024]",
            ),
            ({"num_experts": 8.0, "num_local_experts": 4.0}, "num_local_experts = 4.0: must be an integer"),
        ):
            refused(partial(make, **{"group": group, **sizes, **changes}), words, EPConfigError)


def test_flashinfer(monkeypatch: Patch) -> None:
    def check(rig: Any, given: Any) -> None:
        x, ids, weights = given
        mask = torch.zeros(1)
        refused(partial(rig.one.combine, x), "combine: there must be a dispatch first", EPError)
        send = partial(rig.one.dispatch, x, ids, weights)
        own = ("max_tokens_per_rank",)
        for bad in (0, 7, 2.0, True):
            refused(partial(send, max_tokens_per_rank=bad), f"max_tokens_per_rank = {bad}: must be", own=own)
        refused(partial(send, max_tokens_per_rank=3), "must not exceed max_tokens_per_rank = 3", own=own)
        refused(partial(send, eplb_local_stats=mask), "eplb_local_stats = tensor: must be None")
        refused(partial(send, hidden_states_scale=x[0]), "hidden_states_scale.shape = (128,): must be (")
        refused(partial(send, hidden_states_scale=x), "have 256 and 256 bytes a row")
        got = send().hidden_states
        refused(send, "the one before must have its combine first, or be given up with give_up()", EPError)
        home = partial(rig.one.combine, got)
        refused(partial(home, output=torch.zeros(1, HIDDEN)), "output.shape = (1, 128): must be (")
        refused(partial(home, output=torch.zeros(len(x), HIDDEN).double()), "output.dtype = torch.float64: must be")
        refused(partial(home, output=got[: len(x)]), "output: shares memory with expert_output")
        rig.one.give_up()
        refused(home, "combine: there must be a dispatch first", EPError)

    alone(monkeypatch, "FlashInfer", check)
    with flashinfer(monkeypatch):
        adapter: Any = importlib.import_module("cute_ep.integrations.flashinfer.communication")
        shared = set(pools.SHARED)
        group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        bootstrap = adapter.moe_ep.BootstrapConfig(world_size=2, rank=0, process_group=group)
        for changes, words in (
            ({"hidden_size": 20}, "params.hidden_size = 20: must be a multiple of 8 in [8, 65536] for bf16"),
            ({"top_k": 40}, "params.top_k = 40: must be an integer in [1, 8] (params.num_experts = 8)"),
            (
                {"num_experts": 9},
                "params.num_experts = 9: must be a multiple of 2 in [2, 1024] (bootstrap.world_size = 2)",
            ),
            (
                {"max_tokens_per_rank": 1 << 20},
                "params.max_tokens_per_rank = 1048576: must be an integer in [1, 32768]",
            ),
        ):
            sizes = {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 128, **changes}
            params = adapter.moe_ep.MoEEpCommParams(**sizes)
            refused(partial(adapter.CuteEPCommunication, bootstrap, params), words, EPConfigError)
        params = adapter.moe_ep.MoEEpCommParams(num_experts=8, top_k=2, max_tokens_per_rank=8, hidden_size=128)
        for options, words in (
            ({"sms": 0}, "config.sms = 0: must be an integer that is positive"),
            ({"timeout_s": -1}, "config.timeout_s = -1: must be a number"),
        ):
            config = adapter.CuteEPConfig(**options)
            refused(partial(adapter.CuteEPCommunication, bootstrap, params, config), words, EPConfigError)
        assert set(pools.SHARED) == shared


def test_flashinfers_alltoall(monkeypatch: Patch) -> None:
    def check(rig: Any, given: Any) -> None:
        x, ids, weights = given
        mask, one = torch.zeros(1), rig.one
        sent = {"token_selected_experts": ids, "input_payloads": [x, ids, weights], "runtime_max_tokens_per_rank": MOST}
        refused(partial(one.combine, x, MOST), "combine: there must be a dispatch first", EPError)
        for changes, words in (
            ({"eplb_local_stats": mask}, "eplb_local_stats = tensor: must be None"),
            ({"active_rank_mask": mask}, "active_rank_mask = tensor: must be None"),
            ({"input_payloads": []}, "input_payloads = []: must be hidden states"),
            ({"input_payloads": x}, "input_payloads = Tensor: must be a list of hidden states"),
            ({"input_payloads": [x, None]}, "input_payloads[1] = NoneType: must be a torch.Tensor"),
            ({"input_payloads": [x, x, x, ids]}, "has 4 tensors: must be hidden states, their scale factors"),
            ({"input_payloads": [x, ids, weights, weights]}, "has 4 tensors: must be"),
            ({"input_payloads": [x, x, ids]}, "have 256 and 256 bytes a row"),
            (
                {"input_payloads": [x[:, :36]]},
                "elements of a row of input_payloads[0] = 36: must be a multiple of 8 in [8, 65536] for bf16",
            ),
            ({"expert_id_payload_index": 2}, "expert_id_payload_index = 2: must be that of token_selected_experts"),
            ({"invalid_token_expert_id": 1.5}, "invalid_token_expert_id = 1.5: must be an integer or None"),
            ({"runtime_max_tokens_per_rank": 7}, "runtime_max_tokens_per_rank = 7: must be an integer in [1, 6]"),
            ({"runtime_max_tokens_per_rank": 0}, "runtime_max_tokens_per_rank = 0: must be an integer in [1, 6]"),
        ):
            refused(partial(one.dispatch, **{**sent, **changes}), words)
        rows = one.dispatch(**sent)[0]
        refused(partial(one.dispatch, **sent), "must have its combine first, or be given up with give_up()", EPError)
        home = {"payload": rows, "runtime_max_tokens_per_rank": MOST}
        for changes, words in (
            ({"runtime_max_tokens_per_rank": 5}, "runtime_max_tokens_per_rank = 5: must be 6, as in the dispatch"),
            ({"output_dtype": torch.float16}, "output_dtype = torch.float16: must be torch.bfloat16"),
            ({"output_scales": mask}, "output_scales = tensor: must be None"),
            ({"active_rank_mask": mask}, "active_rank_mask = tensor: must be None"),
            ({"use_low_precision": True}, "use_low_precision = True: must be False"),
            ({"output": torch.zeros(len(x), HIDDEN)}, "output.dtype = torch.float32: must be torch.bfloat16"),
            ({"output": torch.zeros(1, HIDDEN).bfloat16()}, "output.shape = (1, 128): must be ("),
        ):
            refused(partial(one.combine, **{**home, **changes}), words)
        memory = one.get_combine_payload_tensor_in_workspace
        refused(partial(memory, MOST, HIDDEN, torch.float16), "dtype = torch.float16: must be torch.bfloat16")
        refused(partial(memory, MOST, 64, torch.bfloat16), "hidden_size = 64: must be 128, as in the dispatch")
        one.give_up()

    alone(monkeypatch, "FlashInfer, MoeAlltoAll", check)
    with flashinfer(monkeypatch):
        make: Any = importlib.import_module("cute_ep.integrations.flashinfer.alltoall").MoeAlltoAll
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        good = {"mapping": SimpleNamespace(moe_ep_rank=0, moe_ep_size=2), "max_num_tokens": 8, "top_k": 2}
        good |= {"num_experts": 8, "mnnvl_config": SimpleNamespace(comm_backend=SimpleNamespace(_group=group))}
        make(**good)
        for changes, words in (
            ({"mapping": object()}, "mapping = object: must be FlashInfer's Mapping, with moe_ep_rank"),
            ({"max_num_tokens": 0}, "max_num_tokens = 0: must be an integer in [1, 32768]"),
            ({"top_k": 40}, "top_k = 40: must be an integer in [1, 8] (num_experts = 8)"),
            ({"num_experts": 7}, "num_experts = 7: must be a multiple of 2 in [2, 1024] (mapping.moe_ep_size = 2)"),
            ({"hidden_size": 36}, "hidden_size = 36: must be a multiple of 8 in [8, 65536] for bf16"),
            ({"eplb_stats_num_experts": 4}, "eplb_stats_num_experts = 4: must be 0"),
            ({"enable_rank_mask": True}, "enable_rank_mask = True: must be False"),
        ):
            refused(partial(make, **{**good, **changes}), words, EPConfigError, own=("top_k",))
