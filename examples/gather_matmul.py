"""Experts whose matmul gathers its rows: a token comes once to each rank, and all its experts there read that row.

    torchrun --standalone --nproc-per-node 2 examples/gather_matmul.py

Each process takes a GPU of its own where there are GPUs; without any, all compute on the CPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm, silu

from cute_ep import DispatchBuffers, EPConfig, connect, fused_silu

INNER, TOKENS = 128, 48

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu is not None:
    torch.cuda.set_device(gpu)
dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
rank, device = dist.get_rank(), gpu or torch.device("cpu")

cfg = EPConfig(256, 16, 4, max_tokens_per_rank=TOKENS, world_size=dist.get_world_size(), row_order="rank_major")
torch.manual_seed(0)  # the weights of all experts, of which a rank takes its own
all_up = torch.randn(16, cfg.hidden, 2 * INNER, device=device).bfloat16() / cfg.hidden**0.5
all_down = torch.randn(16, INNER, cfg.hidden, device=device).bfloat16() / INNER**0.5
up, down = (each.chunk(cfg.world_size)[rank] for each in (all_up, all_down))
torch.manual_seed(1 + rank)
x = torch.randn(TOKENS // (1 + rank), cfg.hidden, device=device).bfloat16()
weights, ids = torch.randn(len(x), cfg.num_experts, device=device).softmax(dim=1).topk(cfg.top_k)


def experts(batch: DispatchBuffers) -> torch.Tensor:
    """[rows, hidden] bfloat16, each row's weighted sum over its experts here. All shapes are static, and nothing waits
    for the device, so a CUDA graph captures it."""
    local = batch.row_expert_ids  # [rows, K]; -1: another rank's expert, or no token has the row
    assert local is not None  # the order is rank-major
    keys, order = torch.where(local < 0, len(up), local).flatten().sort(stable=True)  # by expert, those with -1 last
    begins = torch.arange(len(up) + 1, dtype=keys.dtype, device=device)
    offsets = torch.searchsorted(keys, begins, out_int32=True)  # expert e has entries offsets[e] to offsets[e + 1]
    # A kernel that gathers (in CUTLASS, quack, Triton) reads rows through order // K. grouped_mm needs a copy of them.
    rows = batch.tokens.index_select(0, order // cfg.top_k)
    hidden = fused_silu(grouped_mm(rows, up, offs=offsets[1:]), offsets)
    outputs = grouped_mm(hidden, down, offs=offsets[1:])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    total = torch.zeros(local.shape[0], cfg.hidden, device=device)
    for slot, at in enumerate(place.view(local.shape).unbind(1)):  # in this order, no atomics: always the same bits
        term = outputs.index_select(0, at).float() * batch.row_weights[:, slot, None]
        total += term.masked_fill_(local[:, slot, None] < 0, 0)  # whose output and weight may be anything
    return total.bfloat16()


def dense() -> torch.Tensor:
    """The layer's output in float32: every expert computes every token."""
    total = torch.zeros(x.shape, device=device)
    for expert, (first, second) in enumerate(zip(all_up.float(), all_down.float(), strict=True)):
        gate, value = (x.float() @ first).chunk(2, dim=1)
        total += (weights * (ids == expert)).sum(1, keepdim=True) * ((silu(gate) * value) @ second)
    return total


with connect(cfg) as ep:
    buffers, out = ep.allocate(), torch.empty_like(x)

    def layer() -> None:
        """Writes `out`."""
        batch = ep.dispatch(x, ids, weights, out=buffers)
        ep.combine(experts(batch), batch, out=out)  # adds a token's rows over ranks

    layer()
    ep.synchronize()
    if gpu is not None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # runs nothing, makes no round
            layer()
        out.zero_()
        graph.replay()
        ep.synchronize()
    wanted = dense()
    off = ((out - wanted).norm() / wanted.norm()).item()
    assert off < 0.01, off
    came = int(buffers.num_rows)
    read = int((buffers.row_weights[:came] > 0).sum())
print(f"rank {rank}: {came} rows came for {read} rows of experts, off by {off:.2%} from a dense layer")
dist.destroy_process_group()
