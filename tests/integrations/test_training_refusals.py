"""Calls of torchtitan's, Megatron-core's and transformers' adapters with bad arguments on one rank: see `refusals`."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.integrations.common import pools
from cute_ep.runtime import process_connection
from cute_ep.runtime.group_pool import GroupPool

from .groups import ThreadGroup, on_groups
from .refusals import changed, refused
from .rigs import EXPERTS, HIDDEN, RANKS, RIGS, SLOTS
from .test_deep_ep_refusals import META, Changes
from .test_wrong_ids import expected, tokens

Patch = pytest.MonkeyPatch
Cases = list[tuple[Changes, str]]


def check(call: Any, given: Changes, cases: Cases) -> None:
    for changes, words in cases:
        refused(partial(call, **changed(given, changes)), words)


# ---- torchtitan

TITAN_SEND: Cases = [
    ({"x_TD": "tokens"}, "x_TD = str: must be a torch.Tensor"),
    ({"x_TD": lambda x: x[0]}, "x_TD.shape = (128,): must be (n, m)"),
    ({"x_TD": lambda x: x.int()}, "x_TD.dtype = torch.int32: must be torch.float32 or torch.bfloat16"),
    ({"x_TD": lambda x: x.to(META)}, "x_TD.device = meta: must be cpu"),
    ({"x_TD": lambda x: x[:, :36]}, "x_TD.shape[1] = 36: must be a multiple of 8 in [8, 65536] for bf16"),
    ({"x_TD": torch.zeros(40000, HIDDEN)}, "x_TD.shape[0] = 40000: must not exceed 32768 tokens of a rank; lower trai"),
    ({"topk_scores_TK": lambda one: one[:2]}, "topk_scores_TK.shape = (2, 3): must be (5, 3)"),
    ({"topk_scores_TK": lambda one: one.long()}, "topk_scores_TK.dtype = torch.int64: must be torch.float32 or"),
    (
        {"topk_expert_ids_TK": lambda ids: ids.float()},
        "topk_expert_ids_TK.dtype = torch.float32: must be torch.int32 o",
    ),
    ({"topk_expert_ids_TK": lambda ids: ids[:, :2]}, "topk_expert_ids_TK.shape = (5, 2): must be (5, 3)"),
    ({"topk_expert_ids_TK": [1]}, "topk_expert_ids_TK = list: must be a torch.Tensor"),
    ({"num_local_tokens_per_expert_E": lambda one: one[:4]}, "num_local_tokens_per_expert_E.shape = (4,): must be (8)"),
]
TITAN_HOME: Cases = [
    ({"routed_output_RD": lambda rows: rows[1:]}, "routed_output_RD.shape = ("),
    ({"routed_output_RD": lambda rows: rows[:, :64]}, "routed_output_RD.shape = ("),
    ({"routed_output_RD": lambda rows: rows.int()}, "routed_output_RD.dtype = torch.int32: must be torch.float32 or"),
    ({"metadata": None}, "metadata = NoneType: must be what dispatch returned"),
    ({"x_TD": lambda x: x[:2]}, "x_TD.shape = (2, 128): must be (5, n)"),
]


def test_torchtitan(monkeypatch: Patch) -> None:
    framework, make = RIGS["torchtitan"]

    def program(group: ThreadGroup) -> tuple:
        rig: Any = make(group)
        given = tokens(group.rank())
        sent = dict(zip(("x_TD", "topk_expert_ids_TK", "topk_scores_TK"), given, strict=True))
        sent["num_local_tokens_per_expert_E"] = torch.zeros(EXPERTS, dtype=torch.int64)
        try:
            for _ in range(2):
                if group.rank() == 0:
                    check(rig.one.dispatch, sent, TITAN_SEND)
                rows, _, metadata = rig.dispatch(given)
                if group.rank() == 0:
                    home = {"routed_output_RD": rows, "metadata": metadata, "x_TD": given[0]}
                    check(rig.one.combine, home, TITAN_HOME)
                out = rig.combine(given, (rows, None, metadata))
        finally:
            rig.close()
        return rig, given, out

    with framework(monkeypatch):
        for rig, given, out in on_groups(monkeypatch, RANKS, program):
            assert torch.equal(out, expected(rig, given))
        kind: Any = importlib.import_module("cute_ep.integrations.torchtitan").CuteEPTokenDispatcher
        mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None)

        def build(**changes: Any) -> Any:
            made = kind(kind.Config(**{"num_experts": EXPERTS, "top_k": SLOTS, **changes}))
            made.init_buffer = lambda: None
            made.wire_meshes(ep_mesh=mesh)
            return made

        for changes, words in (
            ({"mode": "unweighted"}, "mode = 'unweighted': must be 'partial' or 'exact'"),
            ({"sms": 0}, "sms = 0: must be an integer that is positive"),
            ({"non_blocking_capacity_factor": 1.5}, "non_blocking_capacity_factor = 1.5: must be in (0, 1], or None"),
            ({"non_blocking_capacity_factor": "1"}, "non_blocking_capacity_factor = '1'"),
            ({"pad_multiple": 24}, "pad_multiple = 24: must be a divisor of 128"),
            ({"pad_multiple": -4}, "pad_multiple = -4: must be an integer that is positive"),
            ({"num_experts": 7}, "num_experts = 7: must be a multiple of 2 in [2, 1024] (ep_mesh.size() = 2)"),
            ({"num_experts": 1030}, "num_experts = 1030: must be a multiple of 2 in [2, 1024]"),
            ({"top_k": 33}, "top_k = 33: must be an integer in [1, 8] (num_experts = 8)"),
            ({"hidden_dim": 36}, "hidden_dim = 36: must be a multiple of 8 in [8, 65536] for bf16"),
            (
                {"num_max_tokens_per_rank": 32769},
                "num_max_tokens_per_rank = 32769: must not exceed 32768 tokens of a r",
            ),
            ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank = 0: must be an integer in [1, 32768]"),
        ):
            refused(partial(build, **changes), words, own=("top_k",))


# ---- Megatron-core

MEGATRON_SEND: Cases = [
    ({"hidden_states": [1]}, "hidden_states = list: must be a torch.Tensor"),
    ({"hidden_states": lambda x: x[0]}, "hidden_states.shape = (128,): must be (n, m)"),
    (
        {"hidden_states": lambda x: x.half()},
        "hidden_states.dtype = torch.float16: must be torch.bfloat16; train with b",
    ),
    ({"hidden_states": lambda x: x[1:]}, "hidden_states.shape[0] = 4: must be 5, as of routing_map"),
    (
        {"hidden_states": lambda x: x[:, :36]},
        "hidden_states.shape[1] = 36: must be a multiple of 8 in [8, 65536] for bf16",
    ),
    ({"hidden_states": lambda x: x.to(META)}, "hidden_states.device = meta: must be cpu"),
    (
        {"hidden_states": torch.zeros(40000, 8).bfloat16()},
        "hidden_states.shape[0] = 40000: must not exceed 32768 tokens",
    ),
]
MEGATRON_HOME: Cases = [
    ({"hidden_states": lambda rows: rows[1:]}, "hidden_states.shape = ("),
    ({"hidden_states": lambda rows: rows[:, :64]}, "hidden_states.shape = ("),
    ({"hidden_states": lambda rows: rows.float()}, "hidden_states.dtype = torch.float32: must be torch.bfloat16"),
]
ROUTING: Cases = [
    ({"routing_map": [True]}, "routing_map = list: must be a torch.Tensor"),
    ({"routing_map": lambda one: one.int()}, "routing_map.dtype = torch.int32: must be torch.bool"),
    ({"routing_map": lambda one: one.flatten(1)}, "routing_map.shape = (5, 8): must be (n, 2, 4)"),
    ({"probs": lambda one: one[1:]}, "probs.shape = (4, 2, 4): must be (5, 2, 4)"),
    ({"probs": lambda one: one.long()}, "probs.dtype = torch.int64: must be torch.float32 or"),
]


def options(**changes: Any) -> SimpleNamespace:
    given = {"overlap_moe_expert_parallel_comm": False, "moe_router_padding_for_quantization": False}
    return SimpleNamespace(**{**given, "moe_deepep_num_sms": 20, "moe_router_dtype": "fp32", **changes})


def test_megatron(monkeypatch: Patch) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install megatron-core==0.16.1")
    megatron: Any = importlib.import_module("cute_ep.integrations.megatron")

    def program(group: ThreadGroup) -> None:
        one = megatron.CuteEPManager(group, EXPERTS // RANKS, SLOTS, EXPERTS, options())
        x, ids, _ = tokens(group.rank())
        routing = torch.zeros(len(x), EXPERTS + 1, dtype=torch.bool).scatter_(1, ids % (EXPERTS + 1), True)[:, :EXPERTS]
        shape = len(x), RANKS, EXPERTS // RANKS
        given = {"routing_map": routing.view(shape), "probs": torch.ones(shape)}
        try:
            with torch.no_grad():
                refused(partial(one.dispatch, x), "dispatch: setup_metadata must be called first", EPError)
                refused(partial(one.combine, x), "combine: there was no dispatch", EPError)
                for _ in range(2):
                    if group.rank() == 0:
                        check(one.setup_metadata, given, ROUTING)
                    one.setup_metadata(**given)
                    if group.rank() == 0:
                        check(one.dispatch, {"hidden_states": x}, MEGATRON_SEND)
                    rows = one.dispatch(x)
                    if group.rank() == 0:
                        check(one.combine, {"hidden_states": rows}, MEGATRON_HOME)
                    out = one.combine(rows)
                    assert torch.equal(out, x * routing.sum(1, keepdim=True).bfloat16())
        finally:
            pools.release(group, None)  # type: ignore[arg-type]

    on_groups(monkeypatch, RANKS, program)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    for arguments, words in (
        (("world", 4, 3, 8, options()), "group = str: must be a torch.distributed process group"),
        ((group, 4, 40, 8, options()), "router_topk = 40: must be an integer in [1, 8] (num_experts = 8)"),
        ((group, 515, 3, 1030, options()), "num_experts = 1030: must be a multiple of 2 in [2, 1024]"),
        (
            (group, 4, 3, 8, options(moe_deepep_num_sms=0)),
            "moe_deepep_num_sms = 0: must be an integer that is positive",
        ),
        ((group, 4, 3, 8, options(overlap_moe_expert_parallel_comm=True)), "overlap_moe_expert_parallel_comm = True"),
    ):
        refused(partial(megatron.CuteEPManager, *arguments), words, EPConfigError)
    for mode in ("unweighted", "Exact", None):
        refused(partial(megatron.install, mode), f"mode = {mode!r}: must be 'partial' or 'exact'", EPConfigError)


# ---- transformers

ROUTED: Cases = [
    ({"hidden_states": None}, "hidden_states = NoneType: must be a torch.Tensor"),
    ({"hidden_states": lambda x: x[None]}, "hidden_states.shape = (1, 4, 64): must be"),
    ({"hidden_states": lambda x: x.int()}, "hidden_states.dtype = torch.int32: must be a floating type"),
    ({"top_k_index": lambda ids: ids.float()}, "top_k_index.dtype = torch.float32: must be torch.int32 or torch.int64"),
    ({"top_k_index": lambda ids: ids[:3]}, "top_k_index.shape = (3, 2): must be (4, n)"),
    ({"top_k_index": lambda ids: ids[0]}, "top_k_index.shape = (2,): must be (4, n)"),
    ({"top_k_index": lambda ids: ids.repeat(1, 20)}, "top_k_index.shape[1] = 40: must be an integer in [1, 32]"),
    ({"top_k_index": lambda ids: ids.to(META)}, "top_k_index.device = meta: must be cpu"),
    ({"top_k_weights": lambda one: one[:, :1]}, "top_k_weights.shape = (4, 1): must be (4, 2)"),
    ({"top_k_weights": lambda one: one.long()}, "top_k_weights.dtype = torch.int64: must be a floating type"),
    ({"top_k_weights": lambda one: one.to(META)}, "top_k_weights.device = meta: must be cpu"),
]


def routed() -> Changes:
    return {
        "hidden_states": torch.zeros(4, 64),
        "top_k_index": torch.zeros(4, 2, dtype=torch.int64),
        "top_k_weights": torch.ones(4, 2),
    }


def test_transformers_attached() -> None:
    """When the model is attached, not at its first pass."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    from cute_ep.integrations.transformers import attach
    from tests.integrations.models import build

    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    with attach(model, devices=["cpu"] * 2, max_tokens=18) as one:
        check(experts, routed(), ROUTED)
        refused(
            partial(experts, torch.zeros(4, 32), *list(routed().values())[1:]), "hidden_states.shape = (4, 32): must"
        )
        top = {"top_k_index": torch.zeros(4, 7, dtype=torch.int64), "top_k_weights": torch.zeros(4, 7)}
        refused(
            partial(experts, torch.zeros(4, 64), **top),
            "top_k_index.shape[1] = 7: must be an integer in [1, 6] (num_experts = 6)",
        )
        long = torch.zeros(70000, 64), torch.zeros(70000, 2, dtype=torch.int64), torch.zeros(70000, 2)
        refused(
            partial(experts, *long), "hidden_states.shape[0] = 70000: must not exceed 32768 tokens a rank, here 65536"
        )
        assert experts(**routed()).shape == (4, 64) and one.max_tokens == 18
    sizes: Changes = {"hidden_size": 60, "head_dim": 16}
    many: Changes = {"num_local_experts": 1030, "num_experts": 1030, "intermediate_size": 8}
    first = "model.layers.0.mlp.experts"
    for made, changes, words in (
        (build("mixtral", **sizes), {}, f"{first}: hidden size = 60: must be a multiple of 8 in [8, 65536] for bf16"),
        (build("mixtral", **many), {}, f"{first}: experts, padded to equal parts of the ranks, = 1030"),
        (model, {"devices": ["cpu", "cuda:0"]}, "devices = ['cpu', 'cuda:0']: must be all CUDA or all cpu"),
        (model, {"devices": ["meta", "meta"]}, "devices = ['meta', 'meta']: must be all CUDA or all cpu"),
        (model, {"devices": ["cpu"] * 33}, "len(devices) = 33: must be in [1, 32]"),
        (model, {"max_tokens": 70000}, "max_tokens = 70000: must be an integer in [1, 65536]"),
        (model, {"max_tokens": True}, "max_tokens = True"),
    ):
        given: Any = {"devices": ["cpu"] * 2, "max_tokens": 18, **changes}
        refused(partial(attach, made, **given), words, EPConfigError)
    assert model.config._experts_implementation != "cute_ep"


def test_transformers_plan(monkeypatch: Patch) -> None:
    """Before ranks meet."""
    pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23 or newer")
    from cute_ep.integrations.transformers import expert_parallel
    from tests.integrations.models import build

    experts = build("mixtral").model.layers[0].mlp.experts
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: group)
    alone = SimpleNamespace(size=lambda: 1, get_group=lambda: None)
    monkeypatch.setattr("transformers.distributed.expert_parallel.get_process_group_ranks", lambda group: [])
    monkeypatch.setattr(expert_parallel.pools, "pool_of", GroupPool)
    monkeypatch.setattr(process_connection, "connect_checked", None)
    one: Any = expert_parallel.CuteEP(experts, mesh, alone)
    check(one, routed(), ROUTED)
    wide = {**routed(), "hidden_states": torch.zeros(4, 36)}
    refused(
        partial(one, **wide),
        "hidden_states.shape[1] = 36: must be a multiple of 8 in [8, 65536] for bf16",
        EPInputError,
    )
    top = {"top_k_index": torch.zeros(4, 20, dtype=torch.int64), "top_k_weights": torch.zeros(4, 20)}
    refused(
        partial(one, torch.zeros(4, 64), **top),
        "top_k_index.shape[1] = 20: must be an integer in [1, 12] (experts of all ranks = 12)",
    )
    many = torch.zeros(40000, 64), torch.zeros(40000, 2, dtype=torch.int64), torch.zeros(40000, 2)
    refused(
        partial(one, *many), "hidden_states.shape[0] = 40000: must not exceed 32768 tokens of a rank; use shorter or f"
    )
    experts.num_experts = 515
    refused(partial(expert_parallel.CuteEP, experts, mesh, alone), "experts of all ranks = 1030", EPConfigError)
