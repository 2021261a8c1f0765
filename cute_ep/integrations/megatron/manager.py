"""The manager of Megatron-core's flex token dispatcher, and what puts it in the place of DeepEP's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from torch import Tensor

import cute_ep.ops
from cute_ep import EPCommunicator, EPConfigError, EPError
from cute_ep.api.types import CombineMode
from cute_ep.integrations.common import checks, pools
from cute_ep.integrations.common.early import Way, host_tensor, send_early
from cute_ep.integrations.common.kinds import Kinds, kind_of
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS
from cute_ep.ops.batches import PlainBatch
from cute_ep.ops.calls import dispatch_rows
from cute_ep.ops.row_weights import SCALAR_HIDDEN, WeightedRows, dispatch_weighted, weighted_rows

LOG = logging.getLogger(__name__)
FEWER = "lower --micro-batch-size, or raise --context-parallel-size"
"""What to do about too many tokens."""
NAMES: checks.Names = {
    "hidden": "hidden_states.shape[1]",
    "top_k": "router_topk",
    "max_tokens_per_rank": "hidden_states.shape[0], of the rank with the most tokens,",
    "world_size": "group.size()",
}
WORDS = pools.Words("token_indices", "hidden_states")


class CuteEPManager(token_dispatcher._DispatchManager):
    """How `MoEFlexTokenDispatcher` sends tokens to experts and back. Made by Megatron, one a layer, for a `group` of TP
    x EP ranks, on one machine or several (docs/nodes.md); `num_experts` and `router_topk` are of all of them.

    Rows come by expert, in one block each, so there is no permutation. Experts multiply by the probabilities, which
    travel as float32, and so do their gradients; combine adds up. Kernels run on the current stream, whatever
    `async_finish` and `allocate_on_comm_stream` say. EPConfigError: an option cannot be served. docs/training.md says
    what travels and waits, docs/adapters.md how wrong arguments and ids are told. `mode` is of combine; `install` sets
    it. `token_indices` and `token_probs` are [T, K] int64 expert ids, -1 where an entry was dropped, and probabilities;
    `dispatched_probs` [rows] float32, float64 with `moe_router_dtype` fp64; `tokens_per_expert` [num_local_experts]
    int64 on the CPU, padding included.
    """

    mode: CombineMode = "partial"
    token_indices: Tensor | None = None
    token_probs: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    _batch: tuple[cute_ep.ops.Batch | PlainBatch, tuple[int, ...]] | None = None  # and the shape of its rows

    def __init__(
        self, group: dist.ProcessGroup, num_local_experts: int, router_topk: int, num_experts: int, config: Any
    ) -> None:
        if config.overlap_moe_expert_parallel_comm:
            rule = "must be False with cute_ep, whose kernels of two streams may wait for each other's SMs"
            raise EPConfigError(f"overlap_moe_expert_parallel_comm = True: {rule}")
        checks.group("group", group, MAX_EXPERTS)
        ranks, nodes = group.size(), None
        if ranks > MAX_RANKS:  # which only nodes can have; fewer are counted when they connect
            nodes = pools.pool_of(group).ranks_per_node
        sizes = SCALAR_HIDDEN, num_experts, router_topk, 1, ranks
        checks.named_config(NAMES, sizes, error=EPConfigError, ranks_per_node=nodes)
        checks.sms("moe_deepep_num_sms", config.moe_deepep_num_sms)
        self.group, self.config = group, config
        self.num_local_experts, self.num_experts, self.router_topk = num_local_experts, num_experts, router_topk
        padded = config.moe_router_padding_for_quantization
        padding = get_align_size_for_quantization(config) if padded else 1
        self.row_alignment = checks.alignment_for(padding, "moe_router_padding_for_quantization")
        self._kinds = Kinds()  # of dispatches

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Take the routing of a batch: [T, ranks, num_local_experts] bool, and probabilities of that shape."""
        shape = None, self.group.size(), self.num_local_experts
        checks.given("routing_map", routing_map, shape=shape, dtype=torch.bool)
        checks.given("probs", probs, shape=tuple(routing_map.shape), dtype=checks.FLOATS, device=routing_map.device)
        chosen = torch.where(routing_map, probs, -torch.inf).flatten(1)
        values, ids = chosen.topk(self.router_topk, dim=-1)
        dropped = values == -torch.inf
        self.token_indices = ids.masked_fill(dropped, -1)
        self.token_probs = values.masked_fill(dropped, 0)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """[T, hidden] bfloat16 to this rank's rows, [rows, hidden], which come by expert, source rank, token. Sets
        `dispatched_probs` and `tokens_per_expert`. Collective over the group, as its backward pass is. The first call
        and one with more tokens connect, and raise what `cute_ep.connect` raises, too."""
        if self.token_indices is None or self.token_probs is None:
            raise EPError("dispatch: setup_metadata must be called first")
        ranks, sms = pools.pool_of(self.group), self.config.moe_deepep_num_sms
        WORDS.raise_found(ranks)
        kind = kind_of(hidden_states), kind_of(self.token_indices)
        self._kinds.once(kind, self._check, hidden_states, self.token_indices, ranks.device)
        tokens, hidden = hidden_states.shape
        made = {"row_alignment": self.row_alignment, "ranks_per_node": ranks.ranks_per_node}
        way = Way(ranks, NAMES, (hidden, self.num_experts, self.router_topk, tokens), sms, made)
        probs = checks.of_type(self.token_probs, torch.float32)
        received, every = self._received(way, hidden_states, self.token_indices, probs)
        self.tokens_per_expert = host_tensor(every, torch.int64)
        self._batch, probs = (received.batch, tuple(received.tokens.shape)), received.weights
        self.dispatched_probs = probs.double() if self.config.moe_router_dtype == "fp64" else probs
        return received.tokens

    def _check(self, hidden_states: Tensor, ids: Tensor, device: torch.device) -> None:
        """EPInputError unless dispatch takes them."""
        checks.given("hidden_states", hidden_states, shape=(None, None), device=device)
        rule = "hidden_states.dtype = {}: must be torch.bfloat16; train with bf16=True"
        checks.require(hidden_states.dtype == torch.bfloat16, rule, hidden_states.dtype)
        tokens, routed = hidden_states.shape[0], ids.shape[0]
        checks.most("hidden_states.shape[0]", tokens, FEWER)
        checks.require(tokens == routed, "hidden_states.shape[0] = {}: must be {}, as of routing_map", tokens, routed)
        checks.given("routing_map", ids, device=device)

    def _received(self, way: Way, x: Tensor, ids: Tensor, probs: Tensor) -> tuple[WeightedRows, list[int]]:
        """What comes of all ranks' tokens, and each local expert's rows."""
        ranks, _, own, sms, made = way
        exchange, _ = ranks.begin_counts(ids, pools.config_for(ranks, NAMES, own, **made), sms)

        def send(communicator: EPCommunicator, room: int, rows: Callable[[], int]) -> WeightedRows:
            return weighted_rows(dispatch_rows(x, ids, probs, communicator, room, rows))

        if torch.is_grad_enabled():  # what the backward pass needs must not keep memory for all that may come
            received, counts = None, exchange.wait()
        else:
            received, counts = send_early(way, ids, exchange, send)
        every = counts.padded(self.row_alignment)
        if received is None:
            hidden, experts, top_k, _ = own
            comm, scalars = (
                pools.communicator_for(ranks, NAMES, (columns, experts, top_k, counts.tokens), sms, **made)
                for columns in (hidden, SCALAR_HIDDEN)
            )
            names: tuple[str, str] = cute_ep.ops.register(comm), cute_ep.ops.register(scalars)
            come = sum(every)
            if ranks.ranks_per_node is None:
                received = dispatch_weighted(x, ids, probs, *names, capacity=pools.room_of(come), rows=come)
            else:
                received = dispatch_weighted(x, ids, probs, *names, capacity=come, frame=max(counts.tokens, 1))
        return received, every

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """The experts' rows, [rows, hidden] bfloat16, to sums over each token's experts, [T, hidden]."""
        ranks = pools.pool_of(self.group)
        WORDS.raise_found(ranks)
        if self._batch is None:
            raise EPError("combine: there was no dispatch")
        batch, shape = self._batch
        checks.given("hidden_states", hidden_states, shape=shape, dtype=torch.bfloat16, device=ranks.device)
        out = cute_ep.ops.combine(hidden_states, batch, mode=self.mode)
        self._batch = None
        return out

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        return self.tokens_per_expert


def install(mode: CombineMode = "partial") -> None:
    """From now on models with `moe_token_dispatcher_type="flex"` and `moe_flex_dispatcher_backend="deepep"` are built
    with cute_ep. Call it on all ranks, before the model is built. DeepEP need not be installed. `mode` is how rows of a
    token are added up (docs/numerics.md). EPConfigError: it is no mode."""
    checks.mode("mode", mode)
    CuteEPManager.mode = mode
    token_dispatcher._DeepepManager = CuteEPManager
    LOG.info("Megatron's flex dispatcher uses cute_ep where its backend is deepep")
