"""One rank in a process of its own, on a GPU if there is one:
`python -m tests.integrations.vllm_worker STORE RANK WORLD stubs|vllm|triton`.

With `vllm` all but the experts is vLLM: configuration, groups, factory, modular kernel, and the contexts of threads in
which micro-batches take turns. With `triton`, for GPUs, the batched experts are vLLM's too. With `stubs` the adapter's
own classes meet.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_ep.testing.compare import assert_bits
from tests.integrations.upstream import installed
from tests.integrations.vllm_parts import HIDDEN, apply_blocks, apply_experts, experts_of, import_adapter, row_of
from tests.processes import join_group

EXPERTS, SLOTS, TMAX = 8, 3, 24
COMPILED = "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"
"""Modules of operations that vLLM imports for a GPU. No layer here calls one, so vLLM's Python files will do; a model
calls the first one's."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[list[Batch]], list[torch.Tensor]]
"""A layer's outputs for (x, weights, ids) of batches; several are micro-batches that take turns."""


# ---- on stubs


def stub_layer(static_rows: int | None) -> tuple[Forward, Callable[[], None]]:
    """A layer on stubs; of the batched format where `static_rows` is None."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager, Options
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    group = dist.group.WORLD
    assert group is not None
    manager = CuteEPAll2AllManager(group)
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": SLOTS, "max_tokens": TMAX}
    layer: Any
    if static_rows is None:
        layer = CuteEPBatched(manager, tuple(sizes.values()))
    else:
        layer = CuteEPStandard(manager, tuple(sizes.values()), options=Options(mode="exact", static_rows=static_rows))
    layer.post_init_setup(experts_of())
    local = torch.arange(EXPERTS) * dist.get_world_size() // EXPERTS == dist.get_rank()

    def forward(batches: list[Batch]) -> list[torch.Tensor]:
        ((x, weights, ids),) = batches
        quant = experts_of().quant_config
        rows, _, meta, where, _ = layer.prepare(x, weights, ids, EXPERTS, None, False, quant, False)
        if static_rows is None:
            made = apply_blocks(rows, meta.expert_num_tokens, dist.get_rank() * rows.shape[0])
        else:
            made = apply_experts(rows, where, local)
        out = torch.empty_like(x)
        layer.finalize(out, made, weights, ids, False, TopKWeightAndReduceDelegate())
        return [out]

    return forward, manager.destroy


# ---- in vLLM


def missing() -> list[str]:
    """Those of COMPILED that vLLM lacks, all of them where there is no vLLM. Imports none of its packages."""
    vllm = find_spec("vllm")
    folder = Path(vllm.origin).parent if vllm and vllm.origin else Path()
    files = [folder.joinpath(*name.split(".")[1:]) for name in COMPILED]
    return [name for name, file in zip(COMPILED, files, strict=True) if not any(file.parent.glob(f"{file.name}.*"))]


def choose_platform(device: torch.device) -> None:
    """Have vLLM run on a device, in this process from now on; it would ask NVML which platform this is."""
    import vllm.platforms

    platform: Any
    if device.type == "cpu":
        from vllm.platforms.cpu import CpuPlatform as platform
    else:
        without = missing()
        sys.modules.update({name: ModuleType(name) for name in without})
        if COMPILED[0] in without:
            torch.ops._C.cutlass_scaled_mm_supports_block_fp8 = lambda capability: False
        from vllm.platforms.cuda import CudaPlatform as platform
    vllm.platforms._current_platform = platform()
    assert vllm.platforms.current_platform.device_type == device.type
    if dist.get_backend() == "gloo":  # so ranks may share a GPU, which NCCL refuses
        os.environ["VLLM_DISABLE_PYNCCL"] = "1"
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(device, num_ubatches=2)


def start_vllm(device: torch.device, static_rows: int | None, graphs: bool) -> Any:
    """Its configuration, with expert parallel groups of all ranks."""
    from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from cute_ep.integrations.vllm import register

    register()
    parallel = ParallelConfig(
        data_parallel_size=dist.get_world_size(),
        data_parallel_rank=dist.get_rank(),
        data_parallel_master_ip="127.0.0.1",
        enable_expert_parallel=True,
        all2all_backend="cute_ep_batched" if static_rows is None else "cute_ep",
        ubatch_size=2,
    )
    options = {} if static_rows is None else {"mode": "exact", "static_rows": static_rows}
    config = VllmConfig(parallel_config=parallel, additional_config={"cute_ep": options})
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, "env://", device.index or 0, dist.get_backend())
        parallel_state.initialize_model_parallel(1, 1)
    return config


def vllm_layer(
    device: torch.device, static_rows: int | None, *, triton: bool = False, graphs: bool = False
) -> tuple[Forward, Callable[[], None]]:
    """A layer in vLLM's kernel; of the batched format where `static_rows` is None. `triton`: its experts are vLLM's.
    `graphs`: for a model with CUDA graphs."""
    config, rank, world = start_vllm(device, static_rows, graphs), dist.get_rank(), dist.get_world_size()
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    from tests.integrations.vllm_experts import INNER, Batched, Experts, Triton, expert_weights

    with set_current_vllm_config(config):
        moe = FusedMoEConfig(
            num_experts=EXPERTS, experts_per_token=SLOTS, hidden_dim=HIDDEN, intermediate_size=INNER,
            num_local_experts=EXPERTS // world, num_logical_experts=EXPERTS, activation=MoEActivation.SILU,
            device=device, routing_method=RoutingMethodType.Default, in_dtype=torch.bfloat16, max_num_tokens=TMAX,
            moe_parallel_config=FusedMoEParallelConfig.make(1, 1, world, 1, config.parallel_config),
        )  # fmt: skip
        layer = all2all_utils.maybe_make_prepare_finalize(moe, FUSED_MOE_UNQUANTIZED_CONFIG, allow_new_interface=True)
        batched = moe.moe_parallel_config.use_batched_activation_format
        assert batched is (layer.activation_format == mk.FusedMoEActivationFormat.BatchedExperts)
        experts: Any = Experts(moe, FUSED_MOE_UNQUANTIZED_CONFIG)
        if batched:
            sizes = layer.max_num_tokens_per_rank(), layer.num_dispatchers()
            experts = (Triton if triton else Batched)(moe, FUSED_MOE_UNQUANTIZED_CONFIG, *sizes)
        kernel = mk.FusedMoEKernel(layer, experts)
    wanted = "CuteEPBatched" if static_rows is None else "CuteEPStandard"
    assert type(layer).__name__ == wanted and kernel.output_is_reduced()
    own, local = EXPERTS // world, torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)
    mine = slice(rank * own, (rank + 1) * own)
    local[mine] = torch.arange(own, dtype=torch.int32, device=device)
    w1, w2 = (one[mine].to(device) for one in expert_weights(EXPERTS))

    def apply(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, local, False)

    def context(x: torch.Tensor) -> Any:
        tokens = torch.zeros(world, dtype=torch.int32)
        tokens[rank] = len(x)
        dist.all_reduce(tokens, group=parallel_state.get_dp_group().cpu_group)
        return create_forward_context(None, config, DPMetadata.make(config.parallel_config, len(x), tokens))

    def forward(batches: list[Batch]) -> list[torch.Tensor]:
        contexts = [context(x) for x, *_ in batches]
        if len(batches) > 1:
            return in_threads(device, apply, contexts, batches)
        with override_forward_context(contexts[0]):
            return [apply(*batches[0])]

    return forward, parallel_state.destroy_model_parallel


def in_threads(device: torch.device, apply: Callable, contexts: list, batches: list[Batch]) -> list[torch.Tensor]:
    """What micro-batches, each in a forward context, have after two layers, both of the same input."""
    from vllm.utils.torch_utils import current_stream
    from vllm.v1.worker.ubatching import make_ubatch_contexts

    on_gpu = device.type == "cuda"
    streams = (current_stream(), torch.cuda.Stream(device)) if on_gpu else (None, None)
    ready, made = threading.Barrier(len(batches) + 1), {}
    turns = make_ubatch_contexts(len(batches), *streams, contexts, ready)

    @torch.inference_mode()
    def run(turn: Any, batch: Batch) -> None:
        if on_gpu:
            torch.cuda.set_device(device)
        with turn:
            made[turn.id] = apply(*batch), apply(*batch)

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in zip(turns, batches, strict=True)]
    for thread in threads:
        thread.start()
    ready.wait()
    turns[0].cpu_wait_event.set()
    for thread in threads:
        thread.join(60)  # one that fails leaves the other waiting
    for first, second in made.values():
        assert_bits(first, second, "two layers")
    return [made[number][1] for number in range(len(batches))]


# ---- checks


def draw(rank: int, step: int) -> Batch:
    """A rank's tokens, router weights and ids, on the CPU."""
    torch.manual_seed(10 * step + rank)
    tokens = (TMAX, 5, 1)[(rank + step) % 3]
    x = torch.randn(tokens, HIDDEN).bfloat16()
    weights, ids = torch.rand(tokens, EXPERTS).topk(SLOTS)
    ids[::4, 1] = -1
    return x, weights, ids.int()


def check(made: torch.Tensor, given: Batch, where: str, static_rows: int | None) -> None:
    """A layer's output against a loop over tokens. In blocks, where `static_rows` is None, ranks sum first, as they do
    if no mode is named."""
    x, weights, ids = given
    partial = static_rows is None
    share, want = EXPERTS // dist.get_world_size() if partial else EXPERTS, torch.zeros(x.shape)
    for first in range(0, EXPERTS, share):
        part = torch.zeros(x.shape)
        for slot in range(SLOTS):
            for token, expert in enumerate(ids[:, slot].tolist()):
                if first <= expert < first + share:
                    part[token] += weights[token, slot] * row_of(x[token], expert).float()
        want += part.bfloat16().float() if partial else part
    assert_bits(made, want.bfloat16(), where)


def check_triton(made: torch.Tensor, given: Batch, where: str, static_rows: int | None) -> None:
    """The output of a layer with vLLM's experts, within what rounding to bfloat16 explains."""
    from tests.integrations.vllm_experts import expert_weights, swiglu_loop

    want, bound = swiglu_loop(*given, *expert_weights(EXPERTS))
    off = (made.float() - want).abs()
    assert (off <= bound).all(), f"{where}: {(off / bound).max()} of the bound"


def check_locked(device: torch.device, rank: int) -> None:
    """Memory for experts does not grow when graphs were captured, however many rows come later."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

    class OnGPUs(type(mk.current_platform)):  # on a CPU the kernel takes its experts' memory elsewhere
        def is_cpu(self) -> bool:
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mk, "current_platform", OnGPUs())
        if device.type == "cpu":
            patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        forward, close = vllm_layer(device, 0, graphs=True)
        x, weights, ids = draw(rank, 2)
        forward([tuple(one.to(device) for one in (x, weights, ids))])
        lock_workspace()
        x, weights, ids = torch.randn(TMAX, HIDDEN).bfloat16(), torch.rand(TMAX, SLOTS), torch.arange(SLOTS).int()
        batch = x, weights, ids.expand(TMAX, SLOTS).contiguous()
        (made,) = forward([tuple(one.to(device) for one in batch)])
        check(made.cpu(), batch, f"rank {rank}, locked", 0)
        unlock_workspace()
        close()


def main(store: str, rank: int, world: int, kind: str) -> None:
    device = join_group(Path(store), rank, world) or torch.device("cpu")
    if kind != "stubs":
        choose_platform(device)

    for number, static_rows in enumerate((None,) if kind == "triton" else (10_000, 0, None)):
        if kind == "stubs":
            with installed("vllm", "cute_ep.integrations.vllm") as stubs, pytest.MonkeyPatch.context() as patch:
                import_adapter(stubs, patch)
                forward, close = stub_layer(static_rows)
        else:
            forward, close = vllm_layer(device, static_rows, triton=kind == "triton")
        for steps in ((0,), (1,), (2,), *([(0, 1)] if kind != "stubs" else [])):
            batches = [draw(rank, 3 * number + step) for step in steps]
            made = forward([tuple(one.to(device) for one in batch) for batch in batches])
            for step, output, batch in zip(steps, made, batches, strict=True):
                where = f"rank {rank}, step {3 * number + step} of {steps}"
                (check_triton if kind == "triton" else check)(output.cpu(), batch, where, static_rows)
        close()
    if kind == "vllm":
        check_locked(device, rank)
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
