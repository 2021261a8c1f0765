"""What the two formats of a layer in vLLM have in common: all but how rows are prepared."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.tensors import overlap
from cute_ep.api.types import CombineMode
from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager
from cute_ep.integrations.vllm.options import Options

LIMIT = "--max-num-batched-tokens of the server"
"""What the most tokens of a call on a rank come from."""


class CuteEPLayer(mk.FusedMoEPrepareAndFinalizeModular):
    """Prepares the inputs of one layer's experts and finalizes their outputs. Prepare and finalize alternate.

    All ranks of the manager make the same calls. Everything runs on the current stream.

    Attributes:
        mode: of combine, where the options name none.
    """

    mode: ClassVar[CombineMode]

    def __init__(self, manager: CuteEPAll2AllManager, cfg: EPConfig, options: Options) -> None:
        """
        Args:
            manager: of the expert parallel group of R ranks; rank r has experts [r * E/R, (r + 1) * E/R).
            cfg: of rows in bfloat16; `max_tokens_per_rank` is `--max-num-batched-tokens`.
        """
        super().__init__()
        self._manager, self._options, self._cfg = manager, options, cfg
        self._mode = self.mode if options.mode is None else options.mode
        self._communicator: EPCommunicator | None = None
        self._batch: Dispatched | None = None

    # ---- what vLLM asks

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Any of int32 and int64."""
        return None

    def num_dispatchers(self) -> int:
        """R."""
        return self._cfg.world_size

    def output_is_reduced(self) -> bool:
        """Yes: outputs have the parts of all ranks."""
        return True

    def supports_async(self) -> bool:
        """Yes: shared experts run while rows travel home."""
        return True

    def supports_dbo(self) -> bool:
        """No: there is one batch in flight."""
        return False

    # ---- prepare

    @abstractmethod
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType: ...

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> mk.ReceiverType:
        """`prepare`, whose result the receiver returns: vLLM has nothing to compute in between."""
        made = self.prepare(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        return lambda: made

    # ---- finalize

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Bring rows home, and sum them with the router's weights of prepare into `output`.

        Args:
            output: [T, hidden] bfloat16, float16 or float32, overwritten.
            fused_expert_output: bfloat16, in the order of prepare's rows, not weighted: [N, hidden], [N, 1, hidden], or
                in blocks [L, S, hidden].
            topk_weights, topk_ids, apply_router_weight_on_input: not read; prepare was given them.
            weight_and_reduce_impl: checked in blocks only, where it must leave weights and sums to this call.

        Raises:
            EPInputError, EPTimeout: as of `EPCommunicator.combine`.
        """
        rows, batch = self._returned(output, fused_expert_output, weight_and_reduce_impl)
        self._connected().combine(rows, batch, mode=self._mode, out=output)

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Callable[[], None]:
        """The sending half of `finalize`; what it returns receives into `output`."""
        communicator = self._connected()
        rows, batch = self._returned(output, fused_expert_output, weight_and_reduce_impl)
        pending = communicator.combine_async(rows, batch, self._mode)

        def receive() -> None:
            communicator.combine_wait(pending, out=output)

        return receive

    # ---- parts

    def _connect(self) -> None:
        self._communicator = self._manager.get_handle({"cfg": self._cfg, "options": self._options})

    def _connected(self) -> EPCommunicator:
        if self._communicator is None:
            raise EPConfigError("the layer is not connected: vLLM calls post_init_setup before it prepares")
        return self._communicator

    def _inputs(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, weighted: bool
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden] rows and [T, K] float32 weights to dispatch, checked. `weighted`: multiply rows by their weights;
        combine then multiplies by 1."""
        cfg = self._cfg
        if a1.dtype != torch.bfloat16:
            raise EPInputError(f"a1.dtype = {a1.dtype}: must be torch.bfloat16, start vLLM with --dtype bfloat16")
        if num_experts != cfg.num_experts:
            raise EPInputError(f"num_experts = {num_experts}: must be {cfg.num_experts}, as the layer's")
        weights = topk_weights.float().contiguous()
        if weighted:
            if topk_ids.shape[1] != 1:
                raise EPInputError(f"topk_ids.shape[1] = {topk_ids.shape[1]}: must be 1 to weight inputs")
            a1, weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(weights)
        return a1.contiguous(), weights

    def _check_tokens(self, tokens: int, most: int, rule: str) -> None:
        if tokens > most:
            raise EPInputError(f"a1.shape[0] = {tokens}: must not exceed {most}, {rule}")

    def _returned(
        self, output: Tensor, fused_expert_output: Tensor, weight_and_reduce_impl: mk.TopKWeightAndReduce
    ) -> tuple[Tensor, Dispatched]:
        """The experts' rows, and the batch that they are of, which the layer then forgets."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise EPInputError("finalize must follow a prepare of the same layer")
        rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1]).contiguous()
        return rows.clone() if overlap(rows, output) else rows, batch  # vLLM may have experts write to the output
