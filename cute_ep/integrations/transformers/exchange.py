"""Dispatch and combine by all ranks of one process, with gradients. Ops of `cute_ep.ops` cannot wait for ranks that the
same thread has yet to call; here one autograd function makes a call for all ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_ep import Dispatched, EPConfig, EPError
from cute_ep.adjoints import inner_products, ones_for, weighted
from cute_ep.api.host import host_list
from cute_ep.api.types import CombineMode
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.distributed import DistributedEPCombine, DistributedEPDispatch
from cute_ep.layouts.maps.routing import shared_slice
from cute_ep.runtime.local_pool import CALLING, LocalPool
from cute_ep.runtime.routes import RouteCounts

UNCOUNTED_ENTRIES = 2048
"""Most entries (tokens times top-k) of a pass with room for all on each rank: of hidden 7168 the rows take 28 MiB."""
Like = tuple[torch.dtype, torch.device]
CLOSED = (
    "the ranks of this forward pass are closed: make its backward pass before detach(), before the end of "
    "`with attach(...)`, and while there is the model"
)


class Exchange:
    """The communicators of all ranks, which are in this process: one a rank, opened in a pool, which closes them, for
    bfloat16 rows of configuration `cfg`. Raises what `connect_local` raises. Calls may come from any thread; where
    ranks share a device they wait for their results (`waits`)."""

    def __init__(self, pool: LocalPool, cfg: EPConfig) -> None:
        self.cfg, self.pool = cfg, pool
        self.communicators = pool.open(cfg).communicators
        self._hold = pool.hold(self.communicators[0])
        self.devices = [communicator.device for communicator in self.communicators]
        self.waits = any(communicator.shares_device for communicator in self.communicators)
        self._dispatch = DistributedEPDispatch(self.communicators)
        self._combine = DistributedEPCombine(self.communicators)

    def dispatch(
        self, xs: Sequence[Tensor], ids: Sequence[Tensor], weights: Sequence[Tensor] | None, capacities: Sequence[int]
    ) -> list[Dispatched]:
        """A dispatch by all ranks, of one of each argument a rank, as of `EPCommunicator.dispatch`, with room for
        `capacities` rows: batches in memory of their own, whose `row_map` is -1 for tokens that do not exist."""
        with self._together():
            pairs = zip(self.communicators, capacities, strict=True)
            buffers = [communicator.allocate(capacity) for communicator, capacity in pairs]
            for one in buffers:
                one.row_map.fill_(-1)
            return self._dispatch(xs, ids, weights, outs=buffers)

    def combine(
        self, rows: Sequence[Tensor], batches: Sequence[Dispatched], weights: Sequence[Tensor] | None, **options: Any
    ) -> list[Tensor]:
        """A combine by all ranks, one list entry a rank, as of `EPCommunicator.combine`."""
        with self._together():
            return self._combine(rows, batches, weights, **options)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around a call of all ranks: no other call comes between their launches."""
        with CALLING:
            self.pool.sweep()
            if self.communicators[0].closed:
                raise EPError(CLOSED)
            yield
            if self.waits:
                for communicator in self.communicators:
                    communicator.synchronize()


class Round:
    """One pass of T tokens, at most what an exchange has room for, through its experts: they are shared out over the
    ranks, in their order. `routes` have router weights, and -1 where an entry is masked; `gradients`: whether a
    backward pass may come; `mode`: of combine and of what the backward pass adds up.

    Attributes:
        rows: that there is room for on each rank: exactly those that come, for which the host waits; or all entries,
            without gradients, with a device for each rank and with at most `UNCOUNTED_ENTRIES` entries.
        batches: one a rank, without the rows and their memory.
    """

    def __init__(self, exchange: Exchange, routes: RouteCounts, *, gradients: bool, mode: CombineMode) -> None:
        ids, weights, cfg = routes.ids, routes.weights, exchange.cfg
        assert weights is not None
        self.exchange, self.mode, ranks = exchange, mode, cfg.world_size
        shares = [shared_slice(len(ids), rank, ranks) for rank in range(ranks)]
        self._slices = [slice(first, first + count) for first, count in shares]
        self.ids, self.weights = self.share(ids), self.share(weights)
        if gradients or exchange.waits or ids.numel() > UNCOUNTED_ENTRIES:
            entries = routes.by_expert.new_zeros(cfg.num_experts)  # the last ranks may have fewer experts
            entries[: len(routes.by_expert)] = routes.by_expert
            self.rows = host_list(entries.view(ranks, cfg.local_experts).sum(1))
        else:
            exchange.pool.note_capture(exchange.communicators[0])
            self.rows = [ids.numel()] * ranks
        self.batches: list[Dispatched] = []

    def dispatch(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Tokens, [T, hidden] of any floating type, rounded to bfloat16, to the ranks of their experts, differentiable.
        One tensor a rank, [N, hidden] bfloat16 on its device, rows in the order of experts as `Dispatched` says. N is
        `rows`, rows behind the last one hold anything, and `batches`, which this sets, has the offsets."""
        return _Dispatch.apply(self, hidden)

    def combine(self, rows: Sequence[Tensor], weights: Tensor, like: Tensor) -> Tensor:
        """The experts' outputs for the rows, [N, hidden] bfloat16 a rank, to [T, hidden] weighted sums on the device
        and of the type of `like`, as of `EPCommunicator.combine`. Differentiable in rows and weights: [T, K] of any
        floating type, whose float32 values the round was made with."""
        return _Combine.apply(self, like, weights, *rows)

    def share(self, whole: Tensor) -> list[Tensor]:
        """Each rank's part of the [T, ...] tensor of all tokens, on its device, contiguous."""
        devices = self.exchange.devices
        return [whole[part].to(device).contiguous() for part, device in zip(self._slices, devices, strict=True)]

    def sums(
        self, rows: Sequence[Tensor], batches: Sequence[Dispatched], weights: Sequence[Tensor], like: Like
    ) -> Tensor:
        """[T, hidden]: each rank's rows, added up with the weights, which batches in partial mode have."""
        (dtype, device), given = like, weights if self.mode == "exact" else None
        returned = dtype if dtype in OUTPUT_TYPES else torch.float32
        rows = [one.contiguous() for one in rows]
        parts = self.exchange.combine(rows, batches, given, mode=self.mode, dtype=returned)
        return torch.cat([part.to(device) for part in parts]).to(dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Round, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.round, ctx.like = one, (hidden.dtype, hidden.device)
        batches = one.exchange.dispatch(one.share(hidden.to(torch.bfloat16)), one.ids, one.weights, one.rows)
        one.batches = [batch.without_rows() for batch in batches]
        return tuple(batch.tokens for batch in batches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Each token gets the sum of its rows' gradients: a combine with weights of 1, which each rank has itself."""
        one, batches = ctx.round, ctx.round.batches
        if one.mode == "exact":
            weights = [torch.ones_like(own) for own in one.weights]
        else:
            ones = [ones_for(batch.topk_ids, batch.weights) for batch in batches]
            weights = [own for own, _ in ones]
            batches = [batch.derived(weights=own) for batch, (_, own) in zip(batches, ones, strict=True)]
        return None, one.sums(grads, batches, weights, ctx.like)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Round, like: Tensor, weights: Tensor, *rows: Tensor) -> Tensor:
        ctx.round, ctx.kind = one, weights.dtype
        rows = tuple(row.contiguous() for row in rows)
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(*rows)
        return one.sums(rows, one.batches, one.weights, (like.dtype, like.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rows get weight * gradient of their token, by a dispatch of the output's gradient in bfloat16; weights the
        inner product of the token's gradient and the row, 0 where masked."""
        one, (_, _, for_weights, *for_rows) = ctx.round, ctx.needs_input_grad
        of_rows: list[Tensor | None] = [None] * len(for_rows)
        if any(for_rows):
            back = one.exchange.dispatch(one.share(grad.to(torch.bfloat16)), one.ids, None, one.rows)
            of_rows = [weighted(batch.tokens, own.row_weights) for batch, own in zip(back, one.batches, strict=True)]
        of_weights = None
        if for_weights:
            home = one.exchange.combine(ctx.saved_tensors, one.batches, None, mode="unweighted", dtype=torch.bfloat16)
            products = [inner_products(own, part) for own, part in zip(home, one.share(grad), strict=True)]
            of_weights = torch.cat([part.to(grad.device) for part in products]).to(ctx.kind)
        return None, None, of_weights, *of_rows
