"""One rank in a process of its own: `python -m tests.integrations.deep_ep_worker STORE RANK WORLD`, with the shims on
PYTHONPATH. A program that knows DeepEP only; on GPUs if there are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.elastic_model import Case, check_by_rank, check_expanded
from tests.processes import join_group

TOKENS, HIDDEN, SLOTS, EXPERTS = 24, 512, 4, 16


def normal(deep_ep: Any, buffer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    by_rank, _, by_expert, goes, event = buffer.get_dispatch_layout(ids, EXPERTS, async_finish=True)
    layout = {"num_tokens_per_rank": by_rank, "is_token_in_rank": goes, "num_tokens_per_expert": by_expert}
    rows, own, received, counts, handle, event = buffer.dispatch(
        x, **layout, topk_idx=ids, topk_weights=weights, previous_event=event, async_finish=True,
        allocate_on_comm_stream=True, config=deep_ep.Buffer.get_dispatch_config(buffer.group_size),
    )  # fmt: skip
    event.current_stream_wait()
    assert [int((own == expert).sum()) for expert in range(EXPERTS // buffer.group_size)] == counts
    again, *_ = buffer.dispatch(x, handle=handle, config=deep_ep.Config(24, 8, 256))
    assert torch.equal(again, rows)
    out, total, _ = buffer.combine(rows, handle, received)
    assert torch.equal(out, x * goes.sum(1, keepdim=True)) and torch.equal(total, weights)


def low_latency(buffer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int = TOKENS) -> None:
    (rows, scales), _, handle, _, hook = buffer.low_latency_dispatch(x, ids, most, EXPERTS, return_recv_hook=True)
    hook()
    values = rows.float().unflatten(2, (-1, 128)) * scales[..., None]
    out, _, hook = buffer.low_latency_combine(values.flatten(2).bfloat16(), ids, weights, handle, return_recv_hook=True)
    hook()
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True).bfloat16(), rtol=0.1, atol=0.01)


def grow(buffer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Calls with more tokens take the place of those with fewer, which ranks agree on; and with fewer again."""
    weights = weights.masked_fill(ids < 0, 0)
    for most, room in ((100, 128), (200, 256), (TOKENS, 256)):
        low_latency(buffer, x, ids, weights, most)
        in_blocks = [
            one.cfg.max_tokens_per_rank for one in buffer._pool.communicators if one.cfg.block_rows is not None
        ]
        assert in_blocks == [room], in_blocks


def elastic(deep_ep: Any, group: dist.ProcessGroup, device: str) -> None:
    """V2's buffer, against the model of all ranks' inputs."""
    world, generator = group.size(), torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    counts = [TOKENS, 0, 5, 1][:world]
    x = [random(count, HIDDEN).bfloat16().to(device) for count in counts]
    chosen = [random(count, EXPERTS).softmax(1).topk(SLOTS) for count in counts]
    ids = [one.indices.to(device) for one in chosen]
    ids[0][::7, 1] = -1
    weights = [one.values.to(device).masked_fill(own < 0, 0) for one, own in zip(chosen, ids, strict=True)]
    for reduce in (True, False):
        sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "allow_multiple_reduction": reduce}
        buffer = deep_ep.ElasticBuffer(group, **sizes, explicitly_destroy=True)
        buffer.barrier()
        for alignment, sync in ((1, True), (16, False)):
            case = Case(x, ids, weights, EXPERTS, TOKENS, alignment)
            biases = [random(*x[buffer.rank_idx].shape).bfloat16().to(device) for _ in range(2)]
            check_by_rank(buffer, case, sync, biases)
            check_expanded(buffer, case, sync, biases)
        buffer.destroy()


def main(store: str, rank: int, world: int) -> None:
    deep_ep = importlib.import_module("deep_ep")
    event = importlib.import_module("deep_ep.utils").EventOverlap
    assert deep_ep.__version__.startswith("0+cute_ep") and event is deep_ep.EventOverlap
    device = join_group(Path(store), rank, world) or torch.device("cpu")
    torch.set_default_dtype(torch.bfloat16)  # as DeepEP's tests do
    torch.set_default_device(device)
    torch.manual_seed(rank)
    buffer = deep_ep.Buffer(dist.new_group(list(range(world))), int(1e9), explicitly_destroy=True)
    x = torch.randn(TOKENS - rank, HIDDEN)
    weights, ids = torch.rand(len(x), EXPERTS, dtype=torch.float32).topk(SLOTS)
    ids[::7, 1] = -1
    for _ in range(2):
        normal(deep_ep, buffer, x, ids, weights.masked_fill(ids < 0, 0))
        low_latency(buffer, x, ids, weights.masked_fill(ids < 0, 0))
    grow(buffer, x, ids, weights)
    buffer.destroy()
    elastic(deep_ep, dist.new_group(list(range(world))), str(device))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
