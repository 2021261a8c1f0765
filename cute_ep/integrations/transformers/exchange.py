"""Dispatch and combine by all ranks of one process, with gradients.

`cute_ep.ops` serves one rank of a process; its ops cannot wait for ranks that the same thread has yet to call. Here one
autograd function makes a call for all ranks, forward and backward, so every rank takes part in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Most entries (tokens times top-k) of a pass that may have room for all of them on each rank. Of hidden 7168 that many
rows take 28 MiB."""


class Exchange:
    """The communicators of all ranks, which are in this process. Its calls may come from any thread.

    Args:
        pool: what they are opened in; it closes them, or when nobody has it any more the next call of another one.
        cfg: the group's configuration, of bfloat16 rows. Raises what `connect_local` raises.
        closed: what EPError says where a call comes afterwards.

    Attributes:
        communicators, devices: one a rank.
        waits: whether calls wait for their results, as where ranks share a device.
    """

    def __init__(self, pool: LocalPool, cfg: EPConfig, closed: str = "the exchange was closed") -> None:
        self.cfg, self._pool, self._closed = cfg, pool, closed
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
        `capacities` rows: batches in memory of their own, whose `row_map` is -1 for tokens that do not exist. Where
        ranks share a device it waits for the results."""
        with CALLING:
            self._check_open()
            pairs = zip(self.communicators, capacities, strict=True)
            buffers = [communicator.allocate(capacity) for communicator, capacity in pairs]
            for one in buffers:
                one.row_map.fill_(-1)
            batches = self._dispatch(xs, ids, weights, outs=buffers)
            self._wait()
        return batches

    def combine(
        self,
        rows: Sequence[Tensor],
        batches: Sequence[Dispatched],
        weights: Sequence[Tensor] | None,
        mode: CombineMode,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """A combine by all ranks, one list entry a rank, as of `EPCommunicator.combine`; waits as `dispatch`."""
        with CALLING:
            self._check_open()
            sums = self._combine(rows, batches, weights, mode=mode, dtype=dtype)
            self._wait()
        return sums

    def note_capture(self) -> None:
        """To be called by a pass that may go into a CUDA graph."""
        self._pool.note_capture(self.communicators[0])

    def _check_open(self) -> None:
        self._pool.sweep()
        if self.communicators[0].closed:
            raise EPError(self._closed)

    def _wait(self) -> None:
        if self.waits:
            for communicator in self.communicators:
                communicator.synchronize()


class Round:
    """One pass of T tokens, at most what an exchange has room for, through its experts: they are shared out over the
    ranks, in their order. `routes` have router weights, and -1 where an entry is masked; `gradients`: whether
    `backward` may come; `mode`: of combine and of what the backward pass adds up.

    Attributes:
        rows: that there is room for on each rank: exactly those that come. The host waits for the ids to count them.
            Without gradients, with a device for each rank and with at most `UNCOUNTED_ENTRIES` entries it does not
            wait, and there is room for all entries on each rank.
        batches: one a rank, without the rows and their memory.
    """

    def __init__(self, exchange: Exchange, routes: RouteCounts, *, gradients: bool, mode: CombineMode) -> None:
        ids, weights = routes.ids, routes.weights
        assert weights is not None
        self.exchange, self.tokens, self.mode = exchange, len(ids), mode
        ranks = exchange.cfg.world_size
        shares = [shared_slice(self.tokens, rank, ranks) for rank in range(ranks)]
        self.slices = [slice(first, first + count) for first, count in shares]
        self.ids = self.share(ids)
        self.weights = self.share(weights)
        counted = gradients or exchange.waits or ids.numel() > UNCOUNTED_ENTRIES
        if not counted:
            exchange.note_capture()
        self.rows = self._count(routes.by_expert) if counted else [ids.numel()] * ranks
        self.batches: list[Dispatched] = []

    def _count(self, by_expert: Tensor) -> list[int]:
        """Rows that come to each rank; the last ranks may have fewer experts than the others."""
        cfg = self.exchange.cfg
        entries = by_expert.new_zeros(cfg.num_experts)
        entries[: len(by_expert)] = by_expert
        return host_list(entries.view(cfg.world_size, cfg.local_experts).sum(1))

    def share(self, whole: Tensor) -> list[Tensor]:
        """Each rank's part of the [T, ...] tensor of all tokens, on its device, contiguous."""
        devices = self.exchange.devices
        return [whole[part].to(device).contiguous() for part, device in zip(self.slices, devices, strict=True)]

    def whole(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """The [T, ...] tensor of all ranks' parts, in memory of its own."""
        return torch.cat([part.to(device) for part in parts])

    def dispatch(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[T, hidden] to each rank's rows, [N, hidden] bfloat16."""
        parts = self.share(hidden.to(torch.bfloat16))
        batches = self.exchange.dispatch(parts, self.ids, self.weights, self.rows)
        self.batches = [batch.without_rows() for batch in batches]
        return tuple(batch.tokens for batch in batches)

    def combine(self, rows: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Each rank's rows, [N, hidden] bfloat16, to the weighted sums of the tokens, [T, hidden] of a type."""
        return self._sums(rows, self.batches, self.weights, dtype, device)

    def gradient_of_tokens(self, grads: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Each token gets the sum of its rows' gradients: a combine with weights of 1, which each rank has itself."""
        batches = self.batches
        if self.mode == "exact":
            return self._sums(grads, batches, [torch.ones_like(own) for own in self.weights], dtype, device)
        ones = [ones_for(batch.topk_ids, batch.weights) for batch in batches]
        batches = [batch.derived(weights=own) for batch, (_, own) in zip(batches, ones, strict=True)]
        return self._sums(grads, batches, [own for own, _ in ones], dtype, device)

    def _sums(
        self,
        rows: Sequence[Tensor],
        batches: Sequence[Dispatched],
        weights: Sequence[Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """[T, hidden] of a type: each rank's rows, added up with the weights, which batches in partial mode have."""
        given, returned = weights if self.mode == "exact" else None, dtype if dtype in OUTPUT_TYPES else torch.float32
        rows = [one.contiguous() for one in rows]
        sums = self.exchange.combine(rows, batches, given, mode=self.mode, dtype=returned)
        return self.whole(sums, device).to(dtype)

    def gradient_of_rows(self, grad: Tensor) -> list[Tensor]:
        """weight * gradient of each row's token, in bfloat16: a dispatch of the output's gradient, which travels as
        bfloat16."""
        parts = self.share(grad.to(torch.bfloat16))
        back = self.exchange.dispatch(parts, self.ids, None, self.rows)
        pairs = zip(back, self.batches, strict=True)
        return [weighted(batch.tokens, own.row_weights) for batch, own in pairs]

    def gradient_of_weights(self, grad: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """[T, K] float32, the inner product of a token's gradient and each of its rows; 0 where masked."""
        returned = self.exchange.combine(rows, self.batches, None, mode="unweighted", dtype=torch.bfloat16)
        pairs = zip(returned, self.share(grad), strict=True)
        return self.whole([inner_products(one, part) for one, part in pairs], grad.device)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Round, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.round, ctx.dtype, ctx.device = one, hidden.dtype, hidden.device
        return one.dispatch(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.round.gradient_of_tokens(grads, ctx.dtype, ctx.device)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Round, like: Tensor, weights: Tensor, *rows: Tensor) -> Tensor:
        ctx.round, ctx.kind = one, weights.dtype
        rows = tuple(row.contiguous() for row in rows)
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(*rows)
        return one.combine(rows, like.dtype, like.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, for_weights, *for_rows = ctx.needs_input_grad
        of_rows = ctx.round.gradient_of_rows(grad) if any(for_rows) else [None] * len(for_rows)
        of_weights = ctx.round.gradient_of_weights(grad, ctx.saved_tensors).to(ctx.kind) if for_weights else None
        return None, None, of_weights, *of_rows


def dispatch(one: Round, hidden: Tensor) -> tuple[Tensor, ...]:
    """Tokens, [T, hidden] of any floating type, rounded to bfloat16, to the ranks of their experts, differentiable. One
    tensor a rank, [N, hidden] bfloat16 on its device, rows in the order of experts as `Dispatched` says. N is
    `Round.rows`, rows behind the last one hold anything, and `Round.batches`, which this adds, has the offsets."""
    return _Dispatch.apply(one, hidden)


def combine(one: Round, rows: Sequence[Tensor], weights: Tensor, like: Tensor) -> Tensor:
    """The experts' outputs for a round's rows, [N, hidden] bfloat16 a rank, to [T, hidden] weighted sums on the device
    and of the type of `like`, as of `EPCommunicator.combine` in the round's mode. Differentiable in rows and weights:
    [T, K] of any floating type, whose float32 values the round was made with."""
    return _Combine.apply(one, like, weights, *rows)
