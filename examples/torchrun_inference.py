"""A layer over several processes, each with its part of one checkpoint, against the whole layer in one. Then its tokens
travel as 8-bit numbers, a bit more than half the bytes.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_inference.py

Each process takes a GPU of its own where there are GPUs; without any, all compute on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from cute_ep import EPConfig
from cute_ep.nn import MoELayer, connect, shard_state_dict

INNER, TOKENS = 128, 48

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu is not None:
    torch.cuda.set_device(gpu)
dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
rank, device = dist.get_rank(), gpu or torch.device("cpu")

cfg = EPConfig(256, num_experts=8, top_k=2, max_tokens_per_rank=64, world_size=dist.get_world_size())
torch.manual_seed(0)
whole = MoELayer(replace(cfg, world_size=1), INNER).to(device)  # stands for a checkpoint: all experts

layer = MoELayer(cfg, INNER, device=device).eval()
layer.load_state_dict(shard_state_dict(layer, whole.state_dict(), rank))
quantised = MoELayer(replace(cfg, dispatch_format="mxfp8"), INNER, device=device).eval()
quantised.load_state_dict(layer.state_dict())

torch.manual_seed(1 + rank)  # each rank has tokens of its own, and as many as it likes
x = torch.randn(TOKENS - 8 * rank, cfg.hidden, device=device).bfloat16()
with torch.no_grad(), connect(torch.nn.ModuleList([layer, quantised])) as connections:
    out, near = layer(x), quantised(x)
    connections.synchronize()
    alone = whole(x)
torch.testing.assert_close(out, alone, rtol=2**-6, atol=2**-6)
off = ((near - alone).norm() / alone.norm()).item()
assert off < 0.1, off
print(f"rank {rank}: {len(x)} tokens over {cfg.world_size} ranks as in one process, in mxfp8 off by {off:.1%}")
dist.destroy_process_group()
