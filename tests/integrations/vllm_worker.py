"""One rank in a process of its own: `python -m tests.integrations.vllm_worker STORE RANK WORLD stubs|vllm`.

With `vllm` all but the experts is vLLM, on its CPU platform: configuration, groups, factory, modular kernel. With
`stubs` the adapter's own classes meet over gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_ep.testing.compare import assert_bits
from tests.integrations.upstream import installed
from tests.integrations.vllm_parts import HIDDEN, experts_of, import_adapter, row_of
from tests.processes import join_group

EXPERTS, SLOTS, TMAX = 8, 3, 24

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_blocks(rows: torch.Tensor, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """[L, S, hidden]; NaN behind the last row of a block."""
    out = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = row_of(rows[expert, :count], rank * len(rows) + expert)
    return out


def apply_experts(rows: torch.Tensor, ids: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """[N, hidden]; NaN where the row's expert is not `local`, [E] bool."""
    out = torch.full((len(rows), HIDDEN), float("nan"), dtype=torch.bfloat16)
    for place, expert in enumerate(ids[:, 0].tolist()):
        if local[expert]:
            out[place] = row_of(rows[place], expert)
    return out


# ---- on stubs


def stub_layer(static_rows: int | None) -> tuple[Forward, Callable[[], None]]:
    """A layer on stubs; of the batched format where `static_rows` is None."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager
    from cute_ep.integrations.vllm.options import Options
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    group = dist.group.WORLD
    assert group is not None
    manager = CuteEPAll2AllManager(group, group)
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": SLOTS, "max_tokens": TMAX}
    layer: Any
    if static_rows is None:
        layer = CuteEPBatched(manager, **sizes)
    else:
        layer = CuteEPStandard(manager, **sizes, options=Options(mode="exact", static_rows=static_rows))
    layer.post_init_setup(experts_of())
    local = torch.arange(EXPERTS) * dist.get_world_size() // EXPERTS == dist.get_rank()

    def forward(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        quant = experts_of().quant_config
        rows, _, meta, where, _ = layer.prepare(x, weights, ids, EXPERTS, None, False, quant, False)
        if static_rows is None:
            made = apply_blocks(rows, meta.expert_num_tokens, dist.get_rank())
        else:
            made = apply_experts(rows, where, local)
        out = torch.empty_like(x)
        layer.finalize(out, made, weights, ids, False, TopKWeightAndReduceDelegate())
        return out

    return forward, manager.destroy


# ---- in vLLM


def start_vllm(rank: int, world: int, static_rows: int | None) -> Any:
    """Its configuration, with expert parallel groups of all ranks."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # a wheel for GPUs finds none here
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from cute_ep.integrations.vllm import register

    register()
    parallel = ParallelConfig(
        data_parallel_size=world,
        data_parallel_rank=rank,
        data_parallel_master_ip="127.0.0.1",
        enable_expert_parallel=True,
        all2all_backend="cute_ep_batched" if static_rows is None else "cute_ep",
    )
    options = {} if static_rows is None else {"mode": "exact", "static_rows": static_rows}
    config = VllmConfig(parallel_config=parallel, additional_config={"cute_ep": options})
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    return config


def vllm_layer(rank: int, world: int, static_rows: int | None) -> tuple[Forward, Callable[[], None]]:
    """A layer in vLLM's kernel; of the batched format where `static_rows` is None."""
    config = start_vllm(rank, world, static_rows)
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    class Experts(mk.FusedMoEExpertsModular):
        """Weights and reduces itself, as most of vLLM's experts do."""

        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
        _supports_quant_scheme = _supports_parallel_config = _supports_no_act_and_mul = staticmethod(lambda *_: True)
        _supports_activation = _supports_current_device = staticmethod(lambda *_: True)

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *_: Any) -> tuple:
            return (M, K), (M, N), (M, K)

        def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
            return TopKWeightAndReduceNoOP()

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
            global_num_experts: int, expert_map: Any, *_: Any, **__: Any,
        ) -> None:  # fmt: skip
            assert topk_ids.shape == (len(hidden_states), 1) and topk_ids.min() >= 0
            rows = apply_experts(hidden_states, topk_ids, expert_map >= 0)
            output.copy_(rows * topk_weights.bfloat16())

    class Batched(Experts):
        """Leaves weights and sums to finalize, as vLLM's batched experts do."""

        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.BatchedExperts)

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, experts: int, local: int, *_: Any) -> tuple:
            assert self.max_num_tokens is not None and self.num_dispatchers is not None
            slots = self.max_num_tokens * self.num_dispatchers
            return (local, slots, K), (local, slots, N), (local, slots, K)

        def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
            return TopKWeightAndReduceDelegate()

        def apply(self, output: Any, hidden_states: Any, *_: Any, **named: Any) -> None:
            assert hidden_states.shape == output.shape
            output.copy_(apply_blocks(hidden_states, named["expert_tokens_meta"].expert_num_tokens, rank))

    with set_current_vllm_config(config):
        moe = FusedMoEConfig(
            num_experts=EXPERTS, experts_per_token=SLOTS, hidden_dim=HIDDEN, intermediate_size=64,
            num_local_experts=EXPERTS // world, num_logical_experts=EXPERTS, activation=MoEActivation.SILU,
            device="cpu", routing_method=RoutingMethodType.Default, in_dtype=torch.bfloat16, max_num_tokens=TMAX,
            moe_parallel_config=FusedMoEParallelConfig.make(1, 1, world, 1, config.parallel_config),
        )  # fmt: skip
        layer = all2all_utils.maybe_make_prepare_finalize(moe, FUSED_MOE_UNQUANTIZED_CONFIG, allow_new_interface=True)
        batched = moe.moe_parallel_config.use_batched_activation_format
        assert batched is (layer.activation_format == mk.FusedMoEActivationFormat.BatchedExperts)
        experts: Any = Experts(moe, FUSED_MOE_UNQUANTIZED_CONFIG)
        if batched:
            sizes = layer.max_num_tokens_per_rank(), layer.num_dispatchers()
            experts = Batched(moe, FUSED_MOE_UNQUANTIZED_CONFIG, *sizes)
        kernel = mk.FusedMoEKernel(layer, experts)
    wanted = "CuteEPBatched" if static_rows is None else "CuteEPStandard"
    assert type(layer).__name__ == wanted and kernel.output_is_reduced()
    own, local = EXPERTS // world, torch.full((EXPERTS,), -1, dtype=torch.int32)
    local[rank * own : (rank + 1) * own] = torch.arange(own, dtype=torch.int32)
    w1, w2 = torch.empty(own, 128, HIDDEN), torch.empty(own, HIDDEN, 64)

    def forward(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(world, dtype=torch.int32)
        tokens[rank] = len(x)
        dist.all_reduce(tokens)
        with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=tokens):
            return kernel.apply(x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, local, False)

    return forward, parallel_state.destroy_model_parallel


def check(forward: Forward, rank: int, step: int) -> None:
    """A layer's output against a loop over tokens."""
    torch.manual_seed(10 * step + rank)
    tokens = (TMAX, 5, 1)[(rank + step) % 3]
    x = torch.randn(tokens, HIDDEN).bfloat16()
    weights, ids = torch.rand(tokens, EXPERTS).topk(SLOTS)
    ids[::4, 1] = -1
    want = torch.zeros(tokens, HIDDEN)
    for slot in range(SLOTS):
        for token in range(tokens):
            if ids[token, slot] >= 0:
                want[token] += weights[token, slot] * row_of(x[token], int(ids[token, slot])).float()
    assert_bits(forward(x, weights, ids.int()), want.bfloat16(), f"rank {rank}, step {step}")


def main(store: str, rank: int, world: int, kind: str) -> None:
    join_group(Path(store), rank, world)
    for number, static_rows in enumerate((10_000, 0, None)):
        if kind == "stubs":
            with installed("vllm", "cute_ep.integrations.vllm") as stubs, pytest.MonkeyPatch.context() as patch:
                import_adapter(stubs, patch)
                forward, close = stub_layer(static_rows)
        else:
            forward, close = vllm_layer(rank, world, static_rows)
        for step in range(3):
            check(forward, rank, 3 * number + step)
        close()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
