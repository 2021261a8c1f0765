"""Dispatch and combine around vLLM's experts of standard format: one row per (token, expert). vLLM sees top-1 routing
with weight 1, so nothing is left to weight or reduce; combine applies the router's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.v1.worker import workspace
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from cute_ep import DispatchBuffers, Dispatched, EPConfig, EPInputError
from cute_ep.integrations.common.checks import as_rows, named_config
from cute_ep.integrations.common.early import early_room, host_tensor
from cute_ep.integrations.common.pools import OwnSizes
from cute_ep.integrations.vllm.layer import CuteEPLayer, PrepareInput, Sending, quantize
from cute_ep.integrations.vllm.manager import DEFAULTS, CuteEPAll2AllManager, Options
from cute_ep.layouts.maps.formats import FP8
from cute_ep.layouts.maps.routing import max_rows
from cute_ep.runtime.counts import ReceiveCounts
from cute_ep.runtime.labels import label_rows


class CuteEPStandard(CuteEPLayer):
    """Rows one after the other, of one expert each. Blocks of 128 in FP8 travel as such. All other rows travel in
    bfloat16, and are quantised when they have come.

    `prepare` returns rows [N, hidden] by expert, source rank, token; their scale factors, or None; rows of each local
    expert; [N, 1] expert ids of the whole model, that of another rank where there is no token; [N, 1] ones. Each
    expert's rows in FP8 are padded with zeros to a multiple of 4.

    docs/vllm.md says when it waits on the host for the numbers of rows, and how many rows the first call of each
    micro-batch, in vLLM's profiling run, returns where vLLM captures CUDA graphs. Rows without a token are empty.
    """

    _made = staticmethod(named_config)

    def __init__(
        self,
        manager: CuteEPAll2AllManager,
        sizes: OwnSizes,
        options: Options = DEFAULTS,
        *,
        sp_size: int = 1,
        graphs: bool = False,
    ) -> None:
        """`graphs`: whether vLLM captures CUDA graphs."""
        super().__init__(manager, sizes, options, sp_size=sp_size)
        self._graphs = graphs
        self._called: set[int] = set()  # by which micro-batches

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None  # nothing depends on it in this format

    def _config_for(self, fused_experts: mk.FusedMoEExperts, fp8: bool) -> EPConfig:
        return replace(self._cfg, dispatch_format="fp8", scale_layout="linear") if fp8 else self._cfg

    def _sending(self, given: PrepareInput, rows: Tensor, weights: Tensor, tokens: int) -> Sending:
        quant, scales, quantized = given.quant_config, None, self._cfg.format is FP8
        as_it_is = quantized or given.defer_input_quant or quant.quant_dtype is None
        if quantized:
            rows, scales = quantize(rows, quant, quant.a1_scale)
            if scales is None or scales.dtype != torch.float32:
                kind = None if scales is None else scales.dtype
                raise EPInputError(f"vLLM's scale factors are {kind}: must be torch.float32, one for 128 elements")
            rows, scales = as_rows(rows), scales.contiguous()
        room, counts, ids = self._room(given.topk_ids, tokens, rows)
        communicator = self._connected()
        out = DispatchBuffers.carve(communicator.cfg, communicator.device, max(room, 1))

        def result(batch: Dispatched) -> mk.PrepareResultType:
            come, counted = room, None
            if counts is not None:
                found = counts()
                come, counted = found.rows(self._cfg.alignment), host_tensor(found.entries, torch.int32)
            rows = batch.buffers.first("tokens", come)
            factors = None if batch.scales is None else batch.buffers.first("scales", come)
            if come and not as_it_is:
                if counted is None:  # what is behind the last row must not take part in a scale factor of all rows
                    place = torch.arange(come, device=batch.num_rows.device)
                    rows.masked_fill_((place >= batch.num_rows)[:, None], 0)
                nvfp4 = quant.quant_dtype == "nvfp4"
                rows, factors = quantize(rows, quant, quant.a1_gscale if nvfp4 else quant.a1_scale)
            meta = mk.ExpertTokensMetadata(expert_num_tokens=batch.row_counts, expert_num_tokens_cpu=counted)
            own, kind = self._own_experts, given.topk_ids.dtype
            elsewhere = 0 if own.start else self._cfg.num_experts - 1  # vLLM's experts skip it, unlike -1
            numbers, ones = label_rows(batch, come, own, elsewhere, dtype=kind, ones=True)
            return rows, factors, meta, numbers, ones

        return (rows, ids, weights), scales, out, result

    def _room(
        self, topk_ids: Tensor, tokens: int, rows: Tensor
    ) -> tuple[int, Callable[[], ReceiveCounts] | None, Tensor]:
        """Room for rows like `rows` that come, or at most can come, with those that pad an expert's; what waits for
        their numbers, None if the host does not ask; [T, K] ids to send, as they were counted."""
        cfg = self._cfg
        most, first = self._most_rows(tokens, cfg.top_k), self._is_first()
        if most > self._options.static_rows and not self._manager.pool.capturing():
            exchange, routes = self._manager.pool.begin_counts(topk_ids, cfg, self._options.sms)
            if first:
                return self._reserved_rows(), None, routes.ids
            return *early_room(exchange, cfg.alignment, most, cfg.hidden * rows.itemsize), routes.ids
        return self._reserved_rows() if first else most, None, topk_ids.contiguous()

    def _reserved_rows(self) -> int:
        """What later calls can need: uncounted ones, and counted ones, whose tokens name an expert once."""
        cfg = self._cfg
        tokens = -(-cfg.max_tokens_per_rank // self._sp_size)
        uncounted = min(self._most_rows(tokens, cfg.top_k), self._options.static_rows)
        return max(uncounted, self._most_rows(tokens, min(cfg.top_k, cfg.local_experts)))

    def _most_rows(self, tokens: int, rows: int) -> int:
        """Of this rank, where each rank has `tokens` tokens, each with as many rows here."""
        cfg = self._cfg
        return max_rows(cfg.world_size * tokens * rows, cfg.groups, cfg.alignment)

    def _is_first(self) -> bool:
        """Whether this call is the first of its micro-batch, in which vLLM must make room for all that comes later."""
        number = dbo_current_ubatch_id()
        if not self._graphs or number in self._called:
            return False
        self._called.add(number)
        return workspace.is_workspace_manager_initialized() and not workspace.current_workspace_manager().is_locked()

    @property
    def _own_experts(self) -> range:
        """Those of this rank."""
        local = self._cfg.local_experts
        return range(self._manager.rank * local, (self._manager.rank + 1) * local)
