"""What `perf.adapters` asks of adapters to frameworks, and the same of a communicator: as `perf.adapter_works`. Each
function imports its adapter, whose framework may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from cute_ep.runtime.gpus import sms_beside_nccl
from perf.adapter_problem import INNER, LOW_LATENCY_TOKENS, Native, Rank, Work, swiglu_experts

MEGATRON_SMS = 20
"""Megatron-core's default."""


def flashinfer(me: Rank) -> Iterator[Work]:
    from flashinfer import moe_ep

    from cute_ep.integrations.flashinfer import register

    register()
    for tokens in me.tokens:
        given, shape = me.inputs(tokens), me.shape
        bootstrap = moe_ep.BootstrapConfig(world_size=me.world, rank=me.rank, process_group=me.group)
        params = moe_ep.MoEEpCommParams(shape.num_experts, shape.top_k, tokens, shape.hidden)
        comm = moe_ep.create_communication(bootstrap, params, "cute_ep")
        native = Native(me, given, "partial")

        def pair(comm=comm, given=given) -> None:
            comm.combine(comm.dispatch(given.x, given.ids, given.weights).hidden_states)

        yield Work("bf16", tokens, native.count, {"pair": pair}, {"pair": native.pair})
        comm.destroy()


def megatron(me: Rank) -> Iterator[Work]:
    """The flex dispatcher's manager, once it has the routing; its host waits for the numbers of rows."""
    from cute_ep.integrations.megatron import CuteEPManager, close

    config = SimpleNamespace(
        overlap_moe_expert_parallel_comm=False,
        moe_router_padding_for_quantization=False,
        moe_router_dtype="fp32",
        moe_deepep_num_sms=MEGATRON_SMS,
    )
    local = me.shape.num_experts // me.world
    for tokens in me.tokens:
        given = me.inputs(tokens)
        native = Native(me, given, CuteEPManager.mode, sms=MEGATRON_SMS)
        manager = CuteEPManager(me.group, local, me.shape.top_k, me.shape.num_experts, config)
        manager.token_indices, manager.token_probs = given.ids.long(), given.weights

        def pair(manager=manager, given=given) -> None:
            manager.combine(manager.dispatch(given.x))

        yield Work("bf16", tokens, native.count, {"pair": pair}, {"pair": native.pair}, frozenset(["pair"]))
    close()


def transformers(me: Rank) -> Iterator[Work]:
    """The expert parallel plan's experts of Mixtral; its host waits for the numbers of rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from cute_ep.integrations.transformers import close
    from cute_ep.integrations.transformers.expert_parallel import CuteEP

    local = me.shape.num_experts // me.world
    config = MixtralConfig(hidden_size=me.shape.hidden, intermediate_size=INNER, num_local_experts=local)
    config._experts_implementation = "grouped_mm"
    with me.device:
        module = MixtralExperts(config).bfloat16().requires_grad_(False)
    for weight in (module.gate_up_proj, module.down_proj):
        weight.normal_(std=0.02)
    mesh = init_device_mesh(me.device.type, (me.world, 1), mesh_dim_names=("ep", "tp"))
    plan = CuteEP(module, mesh["ep"], mesh["tp"])
    compute = swiglu_experts(module.gate_up_proj, module.down_proj)
    for tokens in me.tokens:
        given = me.inputs(tokens)
        native = Native(me, given, "partial", compute=compute, sms=sms_beside_nccl(me.device))

        def layer(given=given) -> None:
            plan(given.x, given.ids, given.weights)

        yield Work("bf16", tokens, native.count, {"layer": layer}, {"layer": native.pair}, frozenset(["layer"]))
    close()


def torchtitan(me: Rank) -> Iterator[Work]:
    """The dispatcher of a model that is not compiled, with the host's wait for the number of rows, and without it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

    from cute_ep.integrations.torchtitan import close, cute_ep_dispatcher

    mesh = init_device_mesh(me.device.type, (me.world,), mesh_dim_names=("ep",))
    base = BaseEPTokenDispatcher.Config(num_experts=me.shape.num_experts, top_k=me.shape.top_k)
    for tokens in me.tokens:
        given = me.inputs(tokens)
        ids = given.ids.long()
        counts = torch.bincount(ids.flatten(), minlength=me.shape.num_experts)
        for factor in (None, 1.0):
            config = cute_ep_dispatcher(base, non_blocking_capacity_factor=factor)
            native = Native(me, given, config.mode, sms=sms_beside_nccl(me.device))
            dispatcher = config.build()
            dispatcher.wire_meshes(ep_mesh=mesh)

            def pair(dispatcher=dispatcher, given=given, ids=ids, counts=counts) -> None:
                rows, _, metadata = dispatcher.dispatch(given.x, given.weights, ids, counts)
                dispatcher.combine(rows, metadata, given.x)

            waits, about = frozenset([] if factor else ["pair"]), "non_blocking_capacity_factor" if factor else ""
            yield Work("bf16", tokens, native.count, {"pair": pair}, {"pair": native.pair}, waits, about)
    close()


def outputs_for(rows: torch.Tensor) -> torch.Tensor:
    """What stands for the experts' outputs of rows as they came: bfloat16, as many."""
    return rows if rows.dtype == torch.bfloat16 else torch.randn(rows.shape, device=rows.device).bfloat16()


def sglang(me: Rank) -> Iterator[Work]:
    """A layer's dispatcher in extend batches, in which the host waits for the number of rows, and in decode batches of
    ranks that have batches of their own (attention DP)."""
    from perf.stand_ins import allow_sglang

    allow_sglang()
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_parallel

    from cute_ep.integrations.common.pools import close
    from cute_ep.integrations.sglang.dispatcher import CuteEPDispatcher

    most = envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK
    sizes = me.shape.top_k, me.shape.num_experts, me.shape.num_experts // me.world, me.shape.hidden
    for tokens in me.tokens:
        given = me.inputs(tokens)
        topk = StandardTopKOutput(given.weights, given.ids, given.weights)
        parallel = {"tp_size": me.world, "attn_dp_size": me.world, "attn_cp_size": 1, "tp_group": None}
        with get_parallel().override(**parallel), most.override(tokens):
            for fp8 in (False, True):
                dispatcher = CuteEPDispatcher(me.group, *sizes, torch.bfloat16, fp8)
                options = "dispatch_format", "scale_layout", "zero_padding"
                layout = {name: getattr(dispatcher.cfg, name) for name in options}
                native = Native(me, given, "partial", row_alignment=dispatcher.cfg.row_alignment, **layout)
                for extend in (True, False)[: 2 if tokens <= LOW_LATENCY_TOKENS else 1]:
                    set_is_extend_in_batch(extend)
                    rows = outputs_for(dispatcher.dispatch(given.x, topk).hidden_states)
                    dispatcher.combine(DeepEPv2CombineInput(rows, None))

                    def pair(dispatcher=dispatcher, given=given, topk=topk, rows=rows) -> None:
                        dispatcher.dispatch(given.x, topk)
                        dispatcher.combine(DeepEPv2CombineInput(rows, None))

                    waits, about = frozenset(["pair"] if extend else []), "extend" if extend else "decode"
                    calls = {"pair": pair}, {"pair": native.pair}
                    yield Work(dispatcher.cfg.dispatch_format, tokens, native.count, *calls, waits, about)
    close()


def start_vllm(me: Rank) -> Any:
    """vLLM's groups, with each rank as a data parallel one, and the adapter's manager of them."""
    import vllm.platforms

    if me.device.type == "cuda":
        from vllm.platforms.cuda import CudaPlatform as Platform
    else:
        from vllm.platforms.cpu import CpuPlatform as Platform
    vllm.platforms._current_platform = Platform()  # a vLLM that was built for GPUs finds no CPU
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager

    ranks = {"data_parallel_size": me.world, "data_parallel_rank": me.rank, "data_parallel_master_ip": "127.0.0.1"}
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(**ranks))):
        parallel_state.init_distributed_environment(1, 0, "env://", me.device.index or 0, dist.get_backend())
        parallel_state.initialize_model_parallel(1, 1)
        group = parallel_state.get_dp_group()
        return CuteEPAll2AllManager(group.cpu_group)


def vllm_work(me: Rank, layer: Any, quant: Any, native: Native, waits: bool, about: str) -> Work:
    """Prepare and finalize of a connected layer, one after the other: a finalize takes the prepare before it."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    x, ids, weights = (native.sent[name] for name in ("x", "topk_ids", "router_weights"))
    out, reduce = torch.empty_like(x), TopKWeightAndReduceDelegate()

    def prepare() -> torch.Tensor:
        return layer.prepare(x, weights, ids, me.shape.num_experts, None, False, quant, False)[0]

    def finalize(rows: torch.Tensor) -> None:
        layer.finalize(out, rows, weights, ids, False, reduce)

    rows = outputs_for(prepare())
    finalize(rows)

    def pair() -> None:
        prepare()
        finalize(rows)

    calls = {"pair": pair}, {"pair": native.pair}
    waiting = frozenset(["pair"] if waits else [])
    return Work(native.ep.cfg.dispatch_format, len(x), native.count, *calls, waiting, about)


def vllm(me: Rank) -> Iterator[Work]:
    """Layers of both formats for experts in bfloat16 and in FP8 with blocks of 128."""
    manager = start_vllm(me)
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config

    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import Options
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    scale = torch.ones(1, 1, 1, device=me.device)
    quants = {
        "bf16": FUSED_MOE_UNQUANTIZED_CONFIG,
        "fp8": fp8_w8a8_moe_quant_config(scale, scale, block_shape=[128, 128]),
    }
    for tokens in me.tokens:
        given, slots = me.inputs(tokens), tokens * me.world
        sizes = {"hidden": me.shape.hidden, "num_experts": me.shape.num_experts}
        sizes |= {"top_k": me.shape.top_k, "max_tokens": tokens}
        for fmt, quant in quants.items():
            experts = SimpleNamespace(quant_config=quant, expects_unquantized_inputs=False)
            experts.supports_packed_ue8m0_act_scales = lambda: False  # as on Hopper
            experts.output_hidden_dim = lambda hidden: hidden
            if fmt == "bf16" or me.device.type == "cuda":  # vLLM's kernels quantise for the standard format
                layout = {"dispatch_format": fmt, "scale_layout": "linear" if fmt == "fp8" else None}
                native = Native(me, given, Options.mode, **layout)
                room = me.shape.config(fmt, me.world, tokens).max_rows
                for static in (Options.static_rows, 0):
                    layer: Any = CuteEPStandard(manager, tuple(sizes.values()), options=Options(static_rows=static))
                    layer.post_init_setup(experts)
                    about = "standard" if static else "standard, static_rows=0"
                    yield vllm_work(me, layer, quant, native, room > static, about)
            if tokens <= LOW_LATENCY_TOKENS:
                layout = {"dispatch_format": fmt, "scale_layout": "transposed" if fmt == "fp8" else None}
                native = Native(me, given, Options.mode, block_rows=slots, **layout)
                layer = CuteEPBatched(manager, tuple(sizes.values()))
                layer.post_init_setup(experts)
                yield vllm_work(me, layer, quant, native, False, "batched")
    manager.destroy()
