"""What the two formats of a layer in vLLM have in common: all but how rows are prepared. And vLLM's quantisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled, dbo_maybe_run_recv_hook

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPConfig, EPConfigError, EPError, EPInputError
from cute_ep.api.tensors import overlap
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import FLOATS, as_rows, demand, of_type, require
from cute_ep.integrations.common.halves import Hook
from cute_ep.integrations.common.kinds import Kinds, kind_of
from cute_ep.integrations.common.pools import OwnSizes
from cute_ep.integrations.vllm.manager import DEFAULTS, NAMES, WORDS, CuteEPAll2AllManager, Options
from cute_ep.layouts.maps.formats import BF16, FP8
from cute_ep.layouts.maps.routing import MAX_RANKS

MOST = "a1.shape[0] = {}: must not exceed {}, {}"
"""Rule for the tokens of a call, the most, and what those come from."""
Sending = tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, DispatchBuffers, Callable[[Dispatched], Any]]
"""What a dispatch is given: rows, ids, weights; scale factors of quantised rows; memory. And what makes of its batch
what vLLM gets: called once, behind it and in the thread of the batch."""
PREPARE, FINALIZE = "prepare", "finalize"
QUANTIZED_BY = (
    *("quant_dtype", "per_act_token_quant", "block_shape", "is_scale_swizzled", "is_scale_transposed", "mx_alignment"),
)


class PrepareInput(NamedTuple):
    """The arguments of `CuteEPLayer.prepare` that are read."""

    a1: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    num_experts: int
    weighted: bool
    quant_config: FusedMoEQuantConfig
    defer_input_quant: bool

    @property
    def of_layer(self) -> tuple[int, bool, bool]:
        """What calls of one layer have in common, and is no tensor."""
        return self.num_experts, self.weighted, self.defer_input_quant


class CuteEPLayer(mk.FusedMoEPrepareAndFinalizeModular):
    """Prepares the inputs of one layer's experts and finalizes their outputs. Prepare and finalize alternate.

    All ranks of the manager, an expert parallel group of R ranks, make the same calls; rank r has experts [r * E/R, (r
    + 1) * E/R). Everything runs on the current stream. With `--enable-dbo` two batches, each in a thread, take turns:
    prepare and finalize alternate in each, and between two turns each phase has at most one round that was sent and not
    received. docs/adapters.md says how wrong arguments and ids are told. Of `sizes` redundant experts count, and tokens
    of a rank are `--max-num-batched-tokens`.
    """

    _made: Callable[..., EPConfig]  # makes the configuration of rows in bfloat16
    _reducer: type | None = None  # of `weight_and_reduce_impl`, where finalize asks for one

    def __init__(
        self, manager: CuteEPAll2AllManager, sizes: OwnSizes, options: Options = DEFAULTS, *, sp_size: int = 1
    ) -> None:
        """`sp_size`: ranks that share a data parallel rank's tokens."""
        super().__init__()
        self._manager, self._options, self._sp_size = manager, options, sp_size
        ranks, nodes = manager.world_size, None
        if ranks > MAX_RANKS:  # which only nodes can have; fewer are counted when they connect
            nodes = manager.pool.ranks_per_node
        made = {"timeout_s": options.timeout_s, "ranks_per_node": nodes}
        self._cfg = self._made(NAMES, (*sizes, ranks), error=EPConfigError, **made)
        self._kinds = Kinds()  # of prepares
        self._communicator: EPCommunicator | None = None
        self._batches: dict[int, tuple[Dispatched, int]] = {}  # and rows returned, by vLLM's number of the micro-batch

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None  # int32 and int64

    def num_dispatchers(self) -> int:
        return self._cfg.world_size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True  # shared experts run while rows travel home

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Connect for rows as the experts take them, which the layer's class says; collective. EPConfigError: experts
        return other rows than they take, or take rows that cannot travel."""
        hidden, own = self._cfg.hidden, fused_experts.output_hidden_dim(self._cfg.hidden)
        rule = "must be {}, rows are not padded here; choose other experts, such as --moe-backend marlin"
        given = f"{type(fused_experts).__name__}.output_hidden_dim({hidden}) = {own}"
        demand(own == hidden, f"{given}: {rule}", hidden)
        blocks, quant = fused_experts.quant_config.block_shape, fused_experts.quant_config
        square = blocks is not None and list(blocks) == [FP8.block, FP8.block]
        fp8 = square and quant.quant_dtype == torch.float8_e4m3fn and not quant.is_scale_transposed
        cfg = self._config_for(fused_experts, fp8 and not fused_experts.expects_unquantized_inputs)
        self._cfg = replace(cfg, ranks_per_node=self._manager.pool.ranks_per_node)
        self._kinds.clear()
        self._communicator = self._manager.get_handle({"cfg": self._cfg, "options": self._options})

    @abstractmethod
    def _config_for(self, fused_experts: mk.FusedMoEExperts, fp8: bool) -> EPConfig:
        """How rows for these experts travel. `fp8`: whether they take rows in cute_ep's format fp8, row-major."""

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
    ) -> mk.PrepareResultType:
        """Send tokens to their experts' ranks, and receive those for this rank's. Returns what the layer's class says.

        Args:
            a1: [T, hidden] bfloat16.
            topk_weights: [T, K] of any floating type, applied in finalize; K must be 1 to have them applied here.
            topk_ids: [T, K] int32 or int64 expert ids of the whole model, -1 masks an entry; unchanged until finalize.
                One out of range masks too, and a later call tells it.
            expert_map: not read; placement is linear.
            defer_input_quant: leave rows in bfloat16.
        """
        weighted, quant, deferred = apply_router_weight_on_input, quant_config, defer_input_quant
        given = PrepareInput(a1, topk_weights, topk_ids, num_experts, weighted, quant, deferred)
        return self._prepare(given, hooked=False)[1]()

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
    ) -> mk.ReceiverType | tuple[Callable[[], None], mk.ReceiverType]:
        """The sending half of `prepare` where micro-batches take turns: a hook that receives, which may run in another
        micro-batch's thread, and what then returns the result. Otherwise all of `prepare`."""
        weighted, quant, deferred = apply_router_weight_on_input, quant_config, defer_input_quant
        given = PrepareInput(a1, topk_weights, topk_ids, num_experts, weighted, quant, deferred)
        hook, receiver = self._prepare(given, hooked=dbo_enabled())
        if hook is not None:
            return hook, receiver
        made = receiver()
        return lambda: made

    def _prepare(self, given: PrepareInput, *, hooked: bool) -> tuple[Hook | None, mk.ReceiverType]:
        """Send, and receive, unless it is `hooked`: then a hook receives. What returns the result, once received. Rows
        that are multiplied by their weights here, combine multiplies by 1."""
        WORDS.raise_found(self._manager.pool)
        kind = kind_of(given.a1), kind_of(given.topk_ids), kind_of(given.topk_weights), *given.of_layer
        self._kinds.once(kind, self._check, given)
        tokens, most = given.a1.shape[0], self._cfg.max_tokens_per_rank
        communicator, halves, number = self._connected(), self._manager.halves, dbo_current_ubatch_id()
        halves.make_way(communicator, PREPARE, whole=not hooked)
        rows, weights = given.a1, of_type(given.topk_weights, torch.float32).contiguous()
        if given.weighted:
            rows, weights = rows * given.topk_weights.to(rows.dtype), torch.ones_like(weights)
        tokens = self._most_tokens(tokens)
        sent, scales, out, result = self._sending(given, as_rows(rows), weights, tokens)
        options, received = {"scales": scales, "frame": min(max(tokens, 1), most)}, list[Dispatched]()
        hook = halves.dispatch(communicator, PREPARE, sent, out, received.append, hooked=hooked, **options)

        def receiver() -> mk.PrepareResultType:
            made = result(received[0])
            self._batches[number] = received[0], made[0].numel() // max(1, made[0].shape[-1])
            return made

        return hook, receiver

    def _check(self, given: PrepareInput) -> None:
        """EPInputError unless prepare takes it."""
        cfg, device, a1, num_experts = self._cfg, self._manager.pool.device, given.a1, given.num_experts
        checks.given("a1", a1, shape=(None, cfg.hidden), device=device)
        rule = "a1.dtype = {}: must be torch.bfloat16, start vLLM with --dtype bfloat16"
        require(a1.dtype == torch.bfloat16, rule, a1.dtype)
        same = num_experts == cfg.num_experts
        require(same, "num_experts = {}: must be {}, as the layer's", num_experts, cfg.num_experts)
        shape, most = (a1.shape[0], cfg.top_k), cfg.max_tokens_per_rank
        require(shape[0] <= most, MOST, shape[0], most, "--max-num-batched-tokens of the server")
        checks.given("topk_ids", given.topk_ids, shape=shape, dtype=checks.ID_TYPES, device=device)
        checks.given("topk_weights", given.topk_weights, shape=shape, dtype=FLOATS, device=device)
        require(not given.weighted or cfg.top_k == 1, "topk_ids.shape[1] = {}: must be 1 to weight inputs", cfg.top_k)
        rule = "defer_input_quant = True: must be as it was when the layer was made"
        require(cfg.format is BF16 or not given.defer_input_quant, rule)

    @abstractmethod
    def _sending(self, given: PrepareInput, rows: Tensor, weights: Tensor, tokens: int) -> Sending:
        """The dispatch of [T, hidden] bfloat16 rows with [T, K] float32 weights; arguments were checked. `tokens`: what
        no rank has more of."""

    def _most_tokens(self, own: int) -> int:
        """What no rank has more than, the same on all ranks; `own`: tokens of this one."""
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.dp_metadata is None:
            return self._cfg.max_tokens_per_rank
        tokens = -(-int(context.dp_metadata.num_tokens_across_dp_cpu.max()) // self._sp_size)
        require(own <= tokens, MOST, own, tokens, "the most that vLLM says a rank has")
        return tokens

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Bring rows home, and sum them with the router's weights of prepare into `output`, [T, hidden] bfloat16,
        float16 or float32. `fused_expert_output` is bfloat16, in the order of prepare's rows, not weighted: [N,
        hidden], [N, 1, hidden], or in blocks [L, S, hidden], where `weight_and_reduce_impl` must leave weights and sums
        to this call. Other arguments are not read; prepare was given them."""
        self._finalize(output, fused_expert_output, weight_and_reduce_impl, hooked=False)

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The sending half of `finalize`: a hook that receives, in whatever thread, after another micro-batch has."""
        dbo_maybe_run_recv_hook()
        hook = self._finalize(output, fused_expert_output, weight_and_reduce_impl, hooked=True)
        assert hook is not None
        return hook, lambda: None

    def _finalize(self, output: Tensor, rows: Tensor, reducer: mk.TopKWeightAndReduce, *, hooked: bool) -> Hook | None:
        communicator, halves, pool = self._connected(), self._manager.halves, self._manager.pool
        if self._reducer is not None:
            checks.kind("weight_and_reduce_impl", reducer, self._reducer, f"{self._reducer.__name__}, combine sums")
        WORDS.raise_found(pool)
        batch, count = self._batches.get(dbo_current_ubatch_id(), (None, 0))
        if batch is None:
            raise EPInputError("finalize must follow a prepare of the same layer")
        hidden = self._cfg.hidden
        checks.given("fused_expert_output", rows, dtype=torch.bfloat16, device=pool.device)
        if rows.dim() < 2 or rows.shape[-1] != hidden or rows.numel() < count * hidden:
            rule = f"must be {count} rows of {hidden} elements, as prepare returned"
            raise EPInputError(f"fused_expert_output.shape = {tuple(rows.shape)}: {rule}")
        checks.output("output", output, (batch.topk_ids.shape[0], hidden), pool.device)
        rows = as_rows(rows.reshape(-1, hidden))
        rows = rows.clone() if overlap(rows, output) else rows  # vLLM may have experts write to the output
        halves.make_way(communicator, FINALIZE, whole=not hooked)
        hook = halves.combine(communicator, FINALIZE, rows, batch, output, hooked=hooked, mode=self._options.mode)
        del self._batches[dbo_current_ubatch_id()]
        return hook

    def _connected(self) -> EPCommunicator:
        if self._communicator is None:
            raise EPConfigError("the layer is not connected: vLLM calls post_init_setup before it prepares")
        if self._communicator.closed:
            raise EPError("the layer's all2all manager was destroyed: make the layer again")
        return self._communicator


def quantize(rows: Tensor, quant: FusedMoEQuantConfig, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows and scale factors as the experts take them, by vLLM's own kernels."""
    return moe_kernel_quantize_input(rows, scale, **{name: getattr(quant, name) for name in QUANTIZED_BY})
