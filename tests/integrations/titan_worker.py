"""A rank of torchtitan's token dispatch in a process of its own: `python -m tests.integrations.titan_worker STORE RANK
WORLD`, on a GPU if there is one, with torchtitan or what stands in for it in `tests/integrations/stubs` on PYTHONPATH.

Batches and what comes of them are on the CPU; dispatchers have copies on the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tests.integrations.titan_stand_ins  # noqa: F401  before torchtitan
from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.integrations.common import pools
from cute_ep.integrations.common.checks import LEAST_TOKENS
from cute_ep.integrations.torchtitan import CuteEPTokenDispatcher, close, cute_ep_dispatcher
from cute_ep.integrations.torchtitan.dispatcher import WORDS
from cute_ep.ops.registry import communicator_of
from tests.processes import join_group

EXPERTS, TOP_K, HIDDEN = 8, 3, 64


class Batch(NamedTuple):
    x: Tensor
    scores: Tensor
    ids: Tensor
    grad: Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(one.to(device) for one in self))


def batch_of(ids: Tensor, dtype: torch.dtype) -> Batch:
    """Small integers, and scores that are powers of two: sums in any order are exact in bfloat16."""
    shape = (len(ids), HIDDEN)
    scores = 2.0 ** torch.randint(-1, 2, ids.shape)
    return Batch(torch.randint(-3, 4, shape).to(dtype), scores, ids, torch.randint(-1, 2, shape).to(dtype))


def factors_of(ids: Tensor) -> Tensor:
    """What expert e multiplies its rows by."""
    return (1 + ids % 3).float()


def expected(own: Batch, batches: list[Batch], local: range) -> dict[str, Tensor]:
    """What a rank gets, from all ranks' batches: rows by expert, source, token; sums; gradients."""
    rows = [one.x[token] for expert in local for one in batches for token, _ in (one.ids == expert).nonzero().tolist()]
    scaled = own.scores * factors_of(own.ids)
    total = scaled.sum(1, keepdim=True).to(own.x.dtype)
    inner = (own.grad.float() * own.x.float()).sum(1, keepdim=True)
    return {
        "rows": torch.stack(rows) if rows else own.x[:0],
        "counts": torch.stack([sum((one.ids == expert).sum() for one in batches) for expert in local]),  # type: ignore[arg-type]
        "out": own.x * total,
        "grad": own.grad * total,
        "grad_scores": inner * factors_of(own.ids),
    }


def through(dispatcher: Any, own: Batch, local: range) -> dict[str, Tensor]:
    """The same by the dispatcher, forward and backward. Padding and rows behind the last one are poisoned."""
    own = own.to(dispatcher.ep_mesh.device_type)
    x, scores = own.x.clone().requires_grad_(), own.scores.clone().requires_grad_()
    counts = torch.bincount(own.ids.flatten(), minlength=EXPERTS)
    rows, padded, metadata = dispatcher.dispatch(x, scores, own.ids, counts)
    offsets = metadata.row_offsets.tolist()
    valid = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    factors = torch.full((len(rows), 1), torch.nan, device=rows.device)
    for start, count, expert in zip(offsets, metadata.row_counts.tolist(), local, strict=False):
        valid[start : start + count] = True
        factors[start : start + count] = factors_of(torch.tensor(expert))
    assert (
        not rows[~valid].any() and offsets[-1] <= len(rows) and padded.tolist() == metadata.row_offsets.diff().tolist()
    )
    out = dispatcher.combine((rows * factors).to(rows.dtype), metadata, x)
    assert out.dtype == x.dtype == rows.dtype
    out.backward(own.grad)
    assert x.grad is not None and scores.grad is not None
    return {
        "rows": rows[valid].detach().cpu(),
        "counts": metadata.row_counts.cpu(),
        "out": out.detach().cpu(),
        "grad": x.grad.cpu(),
        "grad_scores": scores.grad.cpu(),
    }


def routings(rank: int) -> Iterator[tuple[str, Tensor]]:
    """[T, TOP_K] int64, as many tokens on all ranks."""

    def random(tokens: int) -> Tensor:
        return torch.rand(tokens, EXPERTS).topk(TOP_K).indices

    room = LEAST_TOKENS
    yield "random", random(20)
    yield "all to the same experts", torch.arange(TOP_K).expand(16, -1).contiguous()
    yield "a rank sends to itself", random(16) % (EXPERTS // 2) + rank * (EXPERTS // 2)
    yield "no tokens", random(0)
    yield "as many tokens as there is room for", random(room)
    yield "more tokens than before", random(room + 1)


def dispatcher_of(mesh: DeviceMesh, cfg: Any, **options: Any) -> CuteEPTokenDispatcher:
    """What a model with this configuration and override builds and parallelises."""
    made = cute_ep_dispatcher(cfg, **options).build()
    made.wire_meshes(ep_mesh=mesh)
    return made


def check_dispatchers(mesh: DeviceMesh, cfg: Any) -> None:
    rank, world, experts = dist.get_rank(), dist.get_world_size(), EXPERTS // dist.get_world_size()
    local = range(rank * experts, (rank + 1) * experts)
    options: list[dict[str, Any]] = [
        {},
        {"mode": "exact"},
        {"non_blocking_capacity_factor": 1.0},
        {"pad_multiple": 16},
        {"pad_multiple": 16, "non_blocking_capacity_factor": 1.0, "hidden_dim": HIDDEN, "num_max_tokens_per_rank": 96},
    ]
    for chosen in options:
        dispatcher = dispatcher_of(mesh, cfg, **chosen)
        assert (dispatcher.communicator is not None) == ("hidden_dim" in chosen)
        for dtype in (torch.bfloat16,) if chosen else (torch.bfloat16, torch.float32):
            torch.manual_seed(rank)
            for name, ids in routings(rank):
                own, batches = batch_of(ids, dtype), [None] * world
                dist.all_gather_object(batches, own)
                wanted, got = expected(own, batches, local), through(dispatcher, own, local)  # type: ignore[arg-type]
                for field, value in wanted.items():
                    assert torch.equal(got[field], value), f"{chosen}, {dtype}, {name}: {field}\n{got[field]}\n{value}"
                if chosen.get("mode") == "exact":  # numbers of rows come another way
                    alone, total = through_without_grad(dispatcher, own), own.scores.sum(1, keepdim=True)
                    assert torch.equal(alone.cpu(), own.x * total.to(own.x.dtype)), name


def check_overflow(mesh: DeviceMesh, cfg: Any) -> None:
    """With too little room tokens of lost rows become NaN, and the next call that knows says so."""
    rank = dist.get_rank()
    dispatcher = dispatcher_of(mesh, cfg, non_blocking_capacity_factor=0.5)
    own, told = batch_of(torch.arange(TOP_K).expand(16, -1).contiguous(), torch.bfloat16), []
    out = through_without_grad(dispatcher, own, told)
    assert out.isnan().any(1).any()
    try:
        WORDS.synchronize(pools.pool_of(mesh.get_group()))
    except EPInputError as error:
        told.append(str(error))
    assert len(told) == (rank == 0) and all("non_blocking_capacity_factor: left room for" in one for one in told)


def through_without_grad(dispatcher: Any, own: Batch, told: list[str] | None = None) -> Tensor:
    """`told`: gets what combine says of the dispatch, if the host has heard of it by then."""
    own = own.to(dispatcher.ep_mesh.device_type)
    counts = torch.bincount(own.ids.flatten(), minlength=EXPERTS)
    with torch.no_grad():
        rows, _, metadata = dispatcher.dispatch(own.x, own.scores, own.ids, counts)
        try:
            return dispatcher.combine(rows, metadata, own.x)
        except EPInputError as error:
            if told is None:
                raise
            told.append(str(error))
            return dispatcher.combine(rows, metadata, own.x)


def check_refusals(mesh: DeviceMesh, cfg: Any) -> None:
    with pytest.raises(EPConfigError, match="expert_parallel_degree"):
        dispatcher_of(None, cfg)  # type: ignore[arg-type]
    with pytest.raises(EPConfigError, match=r"non_blocking_capacity_factor = 1.5"):
        dispatcher_of(mesh, cfg, non_blocking_capacity_factor=1.5)
    with pytest.raises(EPConfigError, match="pad_multiple = 24"):
        dispatcher_of(mesh, cfg, pad_multiple=24)
    with pytest.raises(EPInputError, match=r"= 32769: .* lower training.local_batch_size"):
        dispatcher_of(mesh, cfg, hidden_dim=HIDDEN, num_max_tokens_per_rank=32769)
    unconnected = dispatcher_of(mesh, cfg)
    own = batch_of(torch.arange(TOP_K)[None], torch.bfloat16)
    with mock.patch("torch.compiler.is_compiling", lambda: True), pytest.raises(EPError, match="moe_comm_backend"):
        through_without_grad(unconnected, own)


def check_compiled(mesh: DeviceMesh, cfg: Any) -> None:
    """Compiled code, which is compiled again for other numbers of tokens, computes the bits of eager code. On CPUs only
    torch's own kernels run."""
    dispatcher = dispatcher_of(mesh, cfg, hidden_dim=HIDDEN, num_max_tokens_per_rank=96)

    def layer(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        counts = torch.zeros(len(ids), EXPERTS, dtype=torch.bool, device=ids.device).scatter_(1, ids, True).sum(0)
        rows, _, metadata = dispatcher.dispatch(x, scores, ids, counts)
        return dispatcher.combine(rows * 2, metadata, x)

    backend = "inductor" if mesh.device_type == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for tokens in (20, 33, 7):
            torch.manual_seed(tokens + dist.get_rank())
            own = batch_of(torch.rand(tokens, EXPERTS).topk(TOP_K).indices, torch.bfloat16).to(mesh.device_type)
            made = []
            for call in (layer, compiled):
                x, scores = own.x.clone().requires_grad_(), own.scores.clone().requires_grad_()
                out = call(x, scores, own.ids)
                out.backward(own.grad)
                made.append((out.detach(), x.grad, scores.grad))
            for got, want in zip(*made, strict=True):
                assert torch.equal(got, want), f"{tokens} tokens"


def check_reconnected(mesh: DeviceMesh, cfg: Any) -> None:
    """A forward pass after `close` connects again."""
    dispatcher = dispatcher_of(mesh, cfg)
    own = batch_of(torch.arange(TOP_K).expand(16, -1).contiguous(), torch.bfloat16)
    before = through_without_grad(dispatcher, own)
    close()
    assert torch.equal(through_without_grad(dispatcher, own), before)


def check_patience(mesh: DeviceMesh, cfg: Any) -> None:
    """Ranks wait for each other as long as the mesh's collectives do."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    own = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("ep",))
    name = dispatcher_of(own, cfg, hidden_dim=HIDDEN, num_max_tokens_per_rank=96).communicator
    assert name is not None and communicator_of(name).cfg.timeout_s == 77.0


def main(store: Path, rank: int, world: int) -> None:
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

    gpu = join_group(store, rank, world)
    mesh = init_device_mesh("cpu" if gpu is None else "cuda", (world,), mesh_dim_names=("ep",))
    cfg = BaseEPTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    check_dispatchers(mesh, cfg)
    check_refusals(mesh, cfg)
    check_overflow(mesh, cfg)
    check_patience(mesh, cfg)
    check_reconnected(mesh, cfg)
    check_compiled(mesh, cfg)
    close()
    assert not pools.SHARED
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
