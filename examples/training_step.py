"""Training: gradients of the experts stay on their rank, those of all other parameters are summed over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/training_step.py

Each process takes a GPU of its own where there are GPUs; without any, all compute on the CPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from cute_ep import EPConfig
from cute_ep.nn import MoELayer, Router, connect, expert_parameters

HIDDEN, EXPERTS, TOP_K, TOKENS, STEPS = 64, 8, 2, 128, 40

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu is not None:
    torch.cuda.set_device(gpu)
dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
rank, world, device = dist.get_rank(), dist.get_world_size(), gpu or torch.device("cpu")


class Block(nn.Module):
    """x + experts(norm(x)), and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        cfg = EPConfig(HIDDEN, EXPERTS, TOP_K, max_tokens_per_rank=TOKENS, world_size=world)
        router = Router(HIDDEN, EXPERTS, TOP_K, renormalize=True, dtype=torch.float32)
        self.norm, self.outlet = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.experts = MoELayer(cfg, 2 * HIDDEN, router=router, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(x + self.experts(self.norm(x)))


torch.manual_seed(0)  # replicated parameters begin equal
model = Block().to(device)
torch.manual_seed(1 + rank)  # the experts' do not
model.experts.reset_parameters()
own = set(expert_parameters(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)

target = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9)).to(device) / HIDDEN**0.5
x = torch.randn(TOKENS, HIDDEN, device=device)
y = (x @ target).tanh()

losses = []
with connect(model):
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() / world  # of all ranks' tokens together
        loss.backward()  # on every rank: it makes rounds too
        loss = loss.detach()
        for shared in [parameter.grad for parameter in model.parameters() if parameter not in own] + [loss]:
            dist.all_reduce(shared)
        optimizer.step()
        losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
dist.destroy_process_group()
