"""What calls of adapters are timed on, and what they are compared with: a communicator's calls on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm

import cute_ep
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from cute_ep.runtime.group_pool import GroupPool
from perf.cases import Shape

Calls = Mapping[str, Callable[[], object]]
LOW_LATENCY_TOKENS = 128
"""Most tokens per rank of low-latency calls and decode batches, whose memory has room for any routing."""
INNER = 256
"""Elements between the matmuls of the layers' experts: few, since calls are measured and not matmuls."""


@dataclass(frozen=True)
class Inputs:
    """x [T, hidden] bfloat16, ids [T, K] int32, weights [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Work:
    """One format and batch size of an adapter.

    Attributes:
        rows: that this rank receives, one per (token, expert).
        calls: the adapter's, by operation. A combine follows a dispatch.
        native: a communicator's that do the same; empty for another library's own calls.
        waits: operations in which the host waits for the GPU.
        about: how the adapter is called.
    """

    format: str
    tokens: int
    rows: int
    calls: Calls
    native: Calls
    waits: frozenset[str] = frozenset()
    about: str = ""


class Rank:
    """This process, the problem, and communicators that are not the adapters'."""

    def __init__(self, shape: Shape, tokens: list[int], device: torch.device) -> None:
        self.shape, self.tokens, self.device = shape, sorted(tokens, reverse=True), device
        self.group = dist.group.WORLD
        assert self.group is not None
        self.rank, self.world = self.group.rank(), self.group.size()
        self._pools: dict[int | None, GroupPool] = {}

    def inputs(self, tokens: int) -> Inputs:
        """Uniform routing, another one on each rank."""
        generator = torch.Generator(self.device).manual_seed(self.rank)
        with self.device:
            x = torch.randn(tokens, self.shape.hidden, generator=generator).bfloat16()
            ids = torch.rand(tokens, self.shape.num_experts, generator=generator).topk(self.shape.top_k).indices.int()
            weights = torch.rand(ids.shape, generator=generator).softmax(dim=1)
        return Inputs(x, ids, weights)

    def connect(self, cfg: EPConfig, sms: int | None = None) -> Any:
        """The communicator of a configuration with a number of SMs."""
        assert self.group is not None
        return self._pools.setdefault(sms, GroupPool(self.group)).get(cfg, sms)

    def close(self) -> None:
        """Close all communicators."""
        for one in self._pools.values():
            one.close()


class Native:
    """Calls of a communicator into memory that stays the same; rows come home as they came.

    late: whether combine is given the router weights, in place of dispatch. compute: the experts of a layer.
    """

    def __init__(
        self,
        me: Rank,
        given: Inputs,
        mode: CombineMode,
        *,
        rows: Any = None,
        late: bool = False,
        sms: int | None = None,
        compute: Callable[[Any], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        fmt = options.pop("dispatch_format", "bf16")
        self.ep = me.connect(replace(me.shape.config(fmt, me.world, len(given.x)), **options), sms)
        self.mode, self.late, self.compute = mode, late, compute
        x, extra = (given.x, {}) if rows is None else (rows.payload, {"scales": rows.scales})
        self.sent = {"x": x, "topk_ids": given.ids, "router_weights": None if late else given.weights} | extra
        self.weights = given.weights if late else None
        self.buffers, self.out = self.ep.allocate(), torch.empty_like(given.x)
        self.rows = self.buffers.tokens
        if self.rows.dtype != torch.bfloat16:
            self.rows = torch.randn(len(self.rows), me.shape.hidden, device=me.device).bfloat16()
        self.dispatch()
        self.count = int(self.batch.counts_to_host().wait().row_counts.sum())

    def dispatch(self) -> None:
        self.batch = self.ep.dispatch(**self.sent, out=self.buffers)

    def combine(self) -> None:
        self.ep.combine(self.rows, self.batch, self.weights, mode=self.mode, out=self.out)

    def pair(self) -> None:
        """Dispatch, experts if there are any, combine."""
        self.dispatch()
        rows = self.rows if self.compute is None else self.compute(self.batch)
        self.ep.combine(rows, self.batch, self.weights, mode=self.mode, out=self.out)

    @property
    def calls(self) -> Calls:
        return {"dispatch": self.dispatch, "combine": self.combine}


def swiglu_experts(up: torch.Tensor, down: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """A layer's experts, of weights [experts, 2 * INNER, hidden] and [experts, hidden, INNER]."""

    def compute(batch: Any) -> torch.Tensor:
        ends = batch.row_offsets[1:]
        inner = cute_ep.fused_silu(grouped_mm(batch.tokens, up.mT, offs=ends), batch.row_offsets)
        return grouped_mm(inner, down.mT, offs=ends)

    return compute
