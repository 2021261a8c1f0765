"""One rank in a process of its own: `python -m tests.integrations.flashinfer_worker STORE RANK WORLD`, on GPUs if there
are. The installed FlashInfer, with its layer over the adapter; stubs where there is none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.flashinfer_library import INSTALLED, real, stubs
from tests.processes import join_group

HIDDEN, SLOTS, MOST, INNER = 128, 2, 16, 64


class Inputs:
    """All ranks' tokens and experts, the same in every process."""

    def __init__(self, world: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.experts = 4 * world

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        counts = [MOST, *(seed % 2 * 5 for _ in range(world - 1))]
        self.x = [random(count, HIDDEN).bfloat16().to(device) for count in counts]
        chosen = [random(count, self.experts).softmax(1).topk(SLOTS) for count in counts]
        self.weights = [one.values.to(device) for one in chosen]
        self.ids = [one.indices.int().to(device) for one in chosen]
        self.ids[0][3] = -1
        self.up = random(self.experts, HIDDEN, INNER).to(device)
        self.down = random(self.experts, INNER, HIDDEN).to(device)

    def rows(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mine: range) -> torch.Tensor:
        """What one rank makes of each row: the weighted sum over its experts."""
        out = torch.zeros(x.shape, device=x.device)
        for row in range(len(x)):
            for slot in range(SLOTS):
                if int(ids[row, slot]) in mine:
                    expert = int(ids[row, slot])
                    out[row] += weights[row, slot] * (x[row].float() @ self.up[expert]).relu() @ self.down[expert]
        return out.bfloat16()

    def wanted(self, rank: int, world: int) -> torch.Tensor:
        """A rank's output: sums by ascending rank, in float32, rounded once."""
        local, total = self.experts // world, torch.zeros(self.x[rank].shape, device=self.x[rank].device)
        for other in range(world):
            mine = range(other * local, (other + 1) * local)
            total += self.rows(self.x[rank], self.ids[rank], self.weights[rank], mine).float()
        return total.bfloat16()


def bootstrap_of(moe_ep: Any, rank: int, world: int) -> Any:
    return moe_ep.BootstrapConfig(world_size=world, rank=rank, process_group=dist.group.WORLD)


def by_hand(moe_ep: Any, rank: int, world: int, device: torch.device) -> None:
    """`create_communication`, and experts between dispatch and combine."""
    params = moe_ep.MoEEpCommParams(4 * world, SLOTS, MOST, HIDDEN)
    comm = moe_ep.create_communication(bootstrap_of(moe_ep, rank, world), params, "cute_ep")
    for seed in range(3):
        one = Inputs(world, seed, device)
        got = comm.dispatch(one.x[rank], one.ids[rank], one.weights[rank])
        rows = one.rows(got.hidden_states, got.topk_ids, got.topk_weights, range(rank * 4, rank * 4 + 4))
        assert torch.equal(comm.combine(rows), one.wanted(rank, world))
    comm.destroy()


def in_a_layer(moe_ep: Any, rank: int, world: int, device: torch.device) -> None:
    """FlashInfer's layer, with experts as an inner kernel; and its own inner kernel, which returns what came."""
    core: Any = importlib.import_module("flashinfer.moe_ep.core.kernel.base")
    registry: Any = importlib.import_module("flashinfer.moe_ep.core.kernel.registry")
    inputs = Inputs(world, 0, device)

    class Experts(core.SplitKernelBackend):
        kernel_name = "cute_ep_test"

        @classmethod
        def requires_weights(cls) -> bool:
            return False

        def compute(self, ctx: Any) -> torch.Tensor:
            ids = torch.where(ctx.recv_topk_idx < 0, -1, ctx.recv_topk_idx + rank * 4)
            x = ctx.expert_tensors.flatten(0, 1)
            return inputs.rows(x, ids, ctx.recv_topk_weights, range(rank * 4, rank * 4 + 4)).view_as(ctx.expert_tensors)

    class Kernel:
        kernel_name = "cute_ep_test"

    registry.register_split_kernel("cute_ep_test")(Experts)
    weights = moe_ep.MoEWeightPack(
        torch.zeros(4, 2 * INNER, HIDDEN, dtype=torch.bfloat16), torch.zeros(4, HIDDEN, INNER, dtype=torch.bfloat16)
    )
    sizes = moe_ep.FleetParams(4 * world, MOST, HIDDEN, layout=moe_ep.EpLayout.RANK_MAJOR)
    for kernel in (Kernel(), moe_ep.IdentityConfig()):
        backend = moe_ep.SplitConfig(comm="cute_ep", kernel=kernel)
        layer = moe_ep.MoEEpLayer(bootstrap_of(moe_ep, rank, world), sizes, weights, backend=backend)
        for _ in range(2):
            given = moe_ep.MoEEpTensors(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            out = layer(given)
            if isinstance(kernel, Kernel):
                assert torch.equal(out, inputs.wanted(rank, world))
            else:
                times = torch.stack([(inputs.ids[rank] // 4 == other).any(1) for other in range(world)], 1).sum(1)
                assert torch.equal(out, inputs.x[rank] * times[:, None])
        layer.destroy()


def main(store: Path, rank: int, world: int) -> None:
    gpu = join_group(store, rank, world)
    device = torch.device("cpu") if gpu is None else gpu
    with real() if INSTALLED else stubs() as (moe_ep, adapter):
        adapter.register()
        by_hand(moe_ep, rank, world, device)
        if INSTALLED:
            in_a_layer(moe_ep, rank, world, device)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
