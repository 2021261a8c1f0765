"""All ranks of one process at once, under the names of the `ep_comm` graph operations.

One call takes a list with one tensor a rank, checks and prepares all of them, then launches on all devices, so that
the first rank's kernel waits for the last one's launch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config_rules import check_alike
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.rounds import Plan, Result
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.formats import BF16, E8M0, FORMATS, FP8, FP8_POW2, MXFP4, MXFP8, NVFP4, NVFP4_ROW, Format

Communicators = Sequence[EPCommunicator]


class _Operation:
    def __init__(self, communicators: Communicators) -> None:
        if not isinstance(communicators, Sequence) or not communicators:
            given = "no ranks" if isinstance(communicators, Sequence) else type(communicators).__name__
            raise EPConfigError(f"communicators = {given}: must be a list of all ranks, as connect_local returns it")
        for number, communicator in enumerate(communicators):
            if not isinstance(communicator, EPCommunicator):
                raise EPConfigError(f"communicators[{number}] = {type(communicator).__name__}: must be a communicator")
        cfg = communicators[0].cfg
        if len(communicators) != cfg.world_size:
            raise EPConfigError(f"communicators = {len(communicators)}: must be world_size = {cfg.world_size}")
        ranks = [communicator.rank for communicator in communicators]
        if ranks != list(range(cfg.world_size)):
            raise EPConfigError(f"communicators of ranks {ranks}: must be all ranks of one group, in order")
        check_alike([communicator.cfg for communicator in communicators])
        for communicator in communicators:
            if communicator.group is not communicators[0].group:
                raise EPConfigError(
                    f"communicators: rank {communicator.rank} is not connected with rank 0: must be what one "
                    "connect_local returned"
                )
        self.communicators = communicators

    def _launch(self, plan: Callable[..., Plan[Result]], **lists: Sequence | None) -> list[Result]:
        """`plan` of every communicator, with its entry of each list; once all are made, their launches. EPInputError
        unless every list has one entry per rank."""
        ranks = len(self.communicators)
        for name, values in lists.items():
            if values is None:
                continue
            if not isinstance(values, Sequence):
                raise EPInputError(f"{name} = {type(values).__name__}: must be a list with one entry per rank")
            if len(values) != ranks:
                raise EPInputError(f"len({name}) = {len(values)}: must be the number of ranks, {ranks}")
        plans = [
            plan(communicator, *(None if values is None else values[rank] for values in lists.values()))
            for rank, communicator in enumerate(self.communicators)
        ]
        return [one.launch() for one in plans]


class DistributedEPDispatch(_Operation):
    """`mo.distributed.ep.dispatch`: fused dispatch of bfloat16 rows on all ranks.

    Args:
        communicators: all ranks, from `connect_local`.

    Raises:
        EPConfigError: they are not all ranks of one group, in order, or their format is not one of `formats`.
    """

    formats: tuple[Format, ...] = (BF16,)

    def __init__(self, communicators: Communicators) -> None:
        super().__init__(communicators)
        fmt = communicators[0].cfg.format
        if fmt not in self.formats:
            names = ", ".join(known.name for known in self.formats)
            raise EPConfigError(f"dispatch_format = {fmt.name!r}: {type(self).__name__} serves {names}")

    def __call__(
        self,
        input_tokens: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        router_weights: Sequence[torch.Tensor] | None = None,
        input_scales: Sequence[float | torch.Tensor] | None = None,
        outs: Sequence[DispatchBuffers] | None = None,
        *,
        scales: Sequence[torch.Tensor] | None = None,
        row_scales: Sequence[torch.Tensor] | None = None,
    ) -> list[Dispatched]:
        """Launch on all ranks; the lists have one entry a rank, each as an argument of `Communicator.dispatch`.

        Raises:
            EPInputError: a list has another length, or an argument breaks its rule. Nothing was launched.
        """
        return self._launch(
            lambda rank, x, ids, weights, scale, out, scales, row_scales: rank.plan_dispatch(
                x, ids, weights, scale, out, scales=scales, row_scales=row_scales
            ),
            input_tokens=input_tokens,
            topk_ids=topk_ids,
            router_weights=router_weights,
            input_scales=input_scales,
            outs=outs,
            scales=scales,
            row_scales=row_scales,
        )


class DistributedEPDispatchFP8(DistributedEPDispatch):
    """`mo.distributed.ep.dispatch.fp8`: e4m3 with float32 block scales."""

    formats = (FP8, FP8_POW2)


class DistributedEPDispatchMXFP4(DistributedEPDispatch):
    """`mo.distributed.ep.dispatch.mxfp4`: the MX formats."""

    formats = tuple(fmt for fmt in FORMATS.values() if fmt.scale is E8M0)


class DistributedEPDispatchNVFP4(DistributedEPDispatch):
    """`mo.distributed.ep.dispatch.nvfp4`, later `.block.scaled.nv`: what block-scaled matmuls read."""

    formats = (NVFP4, NVFP4_ROW, MXFP8, MXFP4)


class DistributedEPCombine(_Operation):
    """`mo.distributed.ep.combine`: fused combine on all ranks.

    Args and Raises: as `DistributedEPDispatch`.
    """

    def __call__(
        self,
        rows: Sequence[torch.Tensor],
        dispatched: Sequence[Dispatched],
        router_weights: Sequence[torch.Tensor] | None = None,
        mode: CombineMode = "partial",
        outs: Sequence[torch.Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Launch on all ranks; arguments as of `Communicator.combine`, in lists with one entry a rank.

        Raises:
            EPInputError: a list has another length, or an argument breaks its rule. Nothing was launched.
        """
        return self._launch(
            lambda rank, rows, batch, weights, out, data: rank.plan_combine(
                rows, batch, weights, mode=mode, out=out, dtype=dtype, epilogue_data=data
            ),
            rows=rows,
            dispatched=dispatched,
            router_weights=router_weights,
            outs=outs,
            epilogue_data=epilogue_data,
        )
