"""What tests of the vLLM adapter share: what stubs of vLLM do not compute, and experts whose outputs are exact."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.integrations.groups import ThreadGroup, on_groups

HIDDEN = 512
EXPERTS, SLOTS, TMAX, RANKS = 12, 3, 12, 3
TOKENS = (12, 0, 7)
LOCAL = EXPERTS // RANKS
FP8 = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}

CONFIG = "vllm.model_executor.layers.fused_moe"


def import_adapter(stubs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter on stubs that do what it needs: a manager knows its group, there is no forward context, blocks of FP8
    are quantised, and micro-batches are those of `take_turns`."""
    base: Any = stubs["vllm.distributed.device_communicators.base_device_communicator"]

    def init(self: Any, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.cpu_group, self.internode = cpu_group, False
        self.rank, self.world_size = cpu_group.rank(), cpu_group.size()

    base.All2AllManagerBase.__init__ = init
    stubs["vllm.forward_context"].is_forward_context_available = lambda: False  # type: ignore[attr-defined]
    stubs[f"{CONFIG}.utils"].moe_kernel_quantize_input = lambda rows, *_, **__: quantised(rows)  # type: ignore[attr-defined]
    ubatching: Any = stubs["vllm.v1.worker.ubatching"]
    ubatching.dbo_enabled = lambda: TURN.hooks is not None
    ubatching.dbo_current_ubatch_id, ubatching.dbo_maybe_run_recv_hook = current_number, run_hook
    rebuilt = SimpleNamespace(rebuild_dataclass=lambda cls, force: True)
    monkeypatch.setitem(sys.modules, "pydantic.dataclasses", rebuilt)  # type: ignore[arg-type]
    adapter = importlib.import_module("cute_ep.integrations.vllm")
    importlib.import_module("cute_ep.integrations.vllm.standard")
    importlib.import_module("cute_ep.integrations.vllm.batched")
    return adapter


# ---- micro-batches


class Turn(threading.local):
    """Of a rank, while its micro-batches take turns: which one's turn it is, and hooks by micro-batch."""

    number: int | None = None
    hooks: dict[int, Callable[[], None]] | None = None


TURN = Turn()
MicroBatch = Generator[Callable[[], None], None, None]


def current_number() -> int:
    if TURN.hooks is None:
        return 0
    assert TURN.number is not None, "a thread that has left its micro-batch asks for its number"
    return TURN.number


def run_hook() -> None:
    if TURN.hooks is not None and TURN.number in TURN.hooks:
        TURN.hooks.pop(TURN.number)()


def take_turns(*batches: MicroBatch) -> None:
    """Run micro-batches as vLLM's threads do, of which one runs at a time. A micro-batch yields a hook, which the next
    one has to run, and continues when all others had a turn; at its end it runs the hook that it was given."""
    TURN.hooks, waiting = {}, deque(enumerate(batches))
    while waiting:
        TURN.number, batch = waiting.popleft()
        hook = next(batch, None)
        if hook is None:
            last, TURN.number = TURN.hooks.pop(TURN.number, None), None
            if last is not None:
                last()
            continue
        following = (TURN.number + 1) % len(batches)
        assert following not in TURN.hooks, "a hook was not run"
        TURN.hooks[following] = hook
        waiting.append((TURN.number, batch))
    assert not TURN.hooks
    TURN.hooks = None


def experts_of(
    *, expects_unquantized_inputs: bool = False, packed: bool = False, padding: int = 0, **quant: Any
) -> Any:
    """Experts, as far as prepare asks them."""
    own = {"quant_dtype": None, "block_shape": None, "per_act_token_quant": False, "is_scale_swizzled": True}
    own |= {"is_scale_transposed": False, "mx_alignment": 0, "a1_scale": None, "a1_gscale": None}
    return SimpleNamespace(
        quant_config=SimpleNamespace(**(own | quant)),
        expects_unquantized_inputs=expects_unquantized_inputs,
        supports_packed_ue8m0_act_scales=lambda: packed,
        output_hidden_dim=lambda hidden: hidden - padding,
    )


def row_of(row: torch.Tensor, expert: int) -> torch.Tensor:
    """An expert's output for a row: another one for each expert."""
    return (row.float() * (1 + expert / 8)).bfloat16()


def apply_blocks(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """[L, S, hidden], of experts from `first` on; NaN behind the last row of a block."""
    out = torch.full_like(rows, float("nan"))
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = row_of(rows[expert, :count], first + expert)
    return out


def apply_experts(rows: torch.Tensor, ids: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """[N, hidden]; NaN where the row's expert is not `local`, [E] bool."""
    out = torch.full_like(rows, float("nan"))
    own = local.tolist()
    for place, expert in enumerate(ids[:, 0].tolist()):
        if own[expert]:
            out[place] = row_of(rows[place], expert)
    return out


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in blocks of 128: [n, hidden] float8_e4m3fn, and [n, hidden / 128] float32."""
    payload, scales, _ = reference.quantize(rows, "fp8")
    return payload, scales


# ---- layers on ranks in threads


class Layer(NamedTuple):
    """One rank's."""

    layer: Any
    rank: int
    group: ThreadGroup


def run(
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[Layer], Any],
    quant: dict | None = None,
    top_k: int = SLOTS,
    batched: bool = False,
    ranks_per_node: int | None = None,
    **options: Any,
) -> list:
    """What program(layer) returns on each rank."""
    from cute_ep.integrations.vllm import manager, standard
    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import Options

    def on_rank(group: ThreadGroup) -> Any:
        made = manager.CuteEPAll2AllManager(group)  # type: ignore[arg-type]
        sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": top_k, "max_tokens": TMAX}
        make = CuteEPBatched if batched else standard.CuteEPStandard
        layer: Any = make(made, tuple(sizes.values()), options=Options(**options))
        layer.post_init_setup(experts_of(**(quant or {})))
        try:
            return program(Layer(layer, group.rank(), group))
        finally:
            made.destroy()

    return on_groups(monkeypatch, RANKS, on_rank, ranks_per_node=ranks_per_node)


def say_tokens(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What vLLM's forward context says: `num_tokens_across_dp_cpu`, which may be changed."""
    from cute_ep.integrations.vllm import layer

    metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([24, 0, 13], dtype=torch.int32))
    monkeypatch.setattr(layer, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(layer, "get_forward_context", lambda: SimpleNamespace(dp_metadata=metadata))
    return metadata


def inputs(routing: str, seed: int = 7) -> list[RankInputs]:
    return make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, TMAX, RANKS), TOKENS, routing, seed)


def prepare(one: Layer, given: RankInputs, quant: dict | None = None, **changes: Any) -> tuple:
    return one.layer.prepare(**arguments_of(given, quant, **changes))


def arguments_of(given: RankInputs, quant: dict | None = None, **changes: Any) -> dict[str, Any]:
    """Of prepare."""
    arguments: dict[str, Any] = {
        "a1": given.x,
        "topk_weights": given.router_weights,
        "topk_ids": given.topk_ids.long(),
        "num_experts": EXPERTS,
        "expert_map": None,
        "apply_router_weight_on_input": False,
        "quant_config": experts_of(**(quant or {})).quant_config,
        "defer_input_quant": False,
    }
    return arguments | changes


def finalize(one: Layer, output: torch.Tensor, rows: torch.Tensor, how: str = "finalize") -> None:
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    hooks = getattr(one.layer, how)(output, rows, None, None, False, TopKWeightAndReduceDelegate())
    for hook in hooks or ():
        hook()


def expected_rows(rank: int, given: list[RankInputs]) -> list[tuple[int, torch.Tensor]]:
    """(expert, token's row) of each row of a rank, by expert, source rank, token."""
    found = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        for one in given:
            for row, chosen in zip(one.x, one.topk_ids.tolist(), strict=True):
                found += [(expert, row)] * chosen.count(expert)
    return found


def expected_sum(one: RankInputs, mode: str) -> torch.Tensor:
    """[T, hidden] bfloat16: in exact mode slots are added one by one; in partial mode those of each rank first."""
    out = torch.zeros(len(one.x), HIDDEN)
    for token, chosen in enumerate(one.topk_ids.tolist()):
        parts = {}
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                rank = expert // LOCAL if mode == "partial" else slot
                term = one.router_weights[token, slot] * row_of(one.x[token], expert).float()
                parts[rank] = parts[rank] + term if rank in parts else term
        for _, part in sorted(parts.items()):
            out[token] += part.bfloat16().float() if mode == "partial" else part
    return out.bfloat16()
