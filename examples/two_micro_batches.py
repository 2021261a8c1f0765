"""Overlap: tokens of one micro-batch travel while the experts compute those of the other.

    torchrun --standalone --nproc-per-node 2 examples/two_micro_batches.py

Each process takes a GPU of its own where there are GPUs; without any, all compute on the CPU, where nothing overlaps.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cute_ep import EPConfig
from cute_ep.nn import MoELayer, connect

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu is not None:
    torch.cuda.set_device(gpu)
dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
rank, device = dist.get_rank(), gpu or torch.device("cpu")

cfg = EPConfig(256, num_experts=8, top_k=2, max_tokens_per_rank=64, world_size=dist.get_world_size())
torch.manual_seed(0)
layer = MoELayer(cfg, inner=128, device=device).eval()
torch.manual_seed(1 + rank)
layer.reset_parameters()
x = torch.randn(64, cfg.hidden, device=device).bfloat16()


def overlapped(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's outputs for two micro-batches. Ranks make these calls in the same order."""
    ep = layer.communicator
    a_ids, a_weights = layer.router(first)
    b_ids, b_weights = layer.router(second)

    a_sent = ep.dispatch_async(first, a_ids, a_weights)
    b_sent = ep.dispatch_async(second, b_ids, b_weights)
    a = ep.dispatch_wait(a_sent)
    a_rows = layer.compute(a.tokens, a.row_offsets)  # the second dispatch is on its way
    a_back = ep.combine_async(a_rows, a)
    b = ep.dispatch_wait(b_sent)
    b_rows = layer.compute(b.tokens, b.row_offsets)  # the first combine is on its way
    b_back = ep.combine_async(b_rows, b)
    return ep.combine_wait(a_back), ep.combine_wait(b_back)


with torch.no_grad(), connect(layer) as connections:
    first, second = x.chunk(2)
    outputs = overlapped(first, second)
    wanted = layer(first), layer(second)
    connections.synchronize()
assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
print(f"rank {rank}: two micro-batches in flight, the same bits as one after the other")
dist.destroy_process_group()
