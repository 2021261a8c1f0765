"""Decoding: one token of each sequence a step, the layer captured in a CUDA graph and replayed.

    torchrun --standalone --nproc-per-node 2 examples/cuda_graph_decode.py

Each process takes a GPU of its own where there are GPUs. Without any there are no graphs: the same loop calls the
layer in every step, on the CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from cute_ep import EPConfig
from cute_ep.nn import MoELayer, connect

SEQUENCES, STEPS = 4, 16

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu is not None:
    torch.cuda.set_device(gpu)
dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
rank, device = dist.get_rank(), gpu or torch.device("cpu")

cfg = EPConfig(256, num_experts=8, top_k=2, max_tokens_per_rank=SEQUENCES, world_size=dist.get_world_size())
torch.manual_seed(0)
layer = MoELayer(cfg, inner=128, device=device).eval()
torch.manual_seed(1 + rank)
layer.reset_parameters()
begin = torch.randn(SEQUENCES, cfg.hidden, device=device).bfloat16()
x = begin.clone()  # a graph reads and writes the same memory each time


def step() -> None:
    """The next x from this one, in place."""
    x.copy_(torch.nn.functional.rms_norm(x + layer(x), (cfg.hidden,)))


def run(advance: Callable[[], None]) -> torch.Tensor:
    """The last x of STEPS steps."""
    x.copy_(begin)
    for _ in range(STEPS):
        advance()
    return x.clone()


with torch.no_grad(), connect(layer) as connections:  # before capture
    want, advance = run(step), step  # eager; loads all kernels
    connections.synchronize()
    if gpu is not None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # runs nothing, makes no round
            step()
        advance = graph.replay
    run(advance)
    connections.synchronize()
    start = time.perf_counter()
    got = run(advance)  # every rank replays as often
    connections.synchronize()
    each = (time.perf_counter() - start) / STEPS
assert torch.equal(got, want), "replays and eager steps differ"
how = "without a graph, on the CPU" if gpu is None else "replayed"
print(f"rank {rank}: {STEPS} steps {how}, {each * 1e6:.0f} us each")
dist.destroy_process_group()
