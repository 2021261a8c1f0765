"""The expert parallel plan of transformers, a process per rank: `DistributedConfig(ep_implementation="cute_ep")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

import cute_ep.ops
from cute_ep import EPCommunicator, EPConfigError
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.integrations.common import checks, pools
from cute_ep.integrations.common.early import Way, send_early
from cute_ep.integrations.transformers import experts
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.ops.batches import PlainBatch
from cute_ep.ops.calls import dispatch_rows

NAMES: checks.Names = {
    "hidden": "hidden_states.shape[1]",
    "num_experts": "experts of all ranks",
    "top_k": "top_k_index.shape[1]",
    "max_tokens_per_rank": "hidden_states.shape[0], of the rank with the most tokens,",
    "world_size": "ep_size",
}
FEWER = "use shorter or fewer sequences a pass"
"""What to do about too many tokens."""


class CuteEP(EPImplementation):
    """How the experts of a module get their tokens: by a dispatch and a combine over the EP group. The ranks of a TP
    group, which hold the same batch, take disjoint parts of it. Before each dispatch the ranks tell each other how many
    rows and tokens come, and connect again when more tokens come than there is room for. Differentiable in hidden
    states, weights and experts (docs/transformers.md)."""

    _known: bool | None = None  # whether `experts.run` computes what they do; None before the first call
    _gate: experts.FoundGate | None = None

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.num_experts = self.num_local_experts * ep_mesh.size()
        checks.named_config(NAMES, (VECTOR_BYTES // 2, self.num_experts, 1, 1, ep_mesh.size()), error=EPConfigError)
        self._experts: Any = experts

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted outputs of the experts for this rank's tokens: arguments and result as of `experts_forward`, ids
        of all ranks' experts. EPInputError: an argument breaks its rule; nothing was sent. EPConfigError,
        VariantMissing: as `connect`. EPTimeout: a rank does not come."""
        experts.check_routed(hidden_states, top_k_index, top_k_weights)
        checks.most("hidden_states.shape[0]", -(-hidden_states.shape[0] // self.tp_mesh.size()), FEWER)
        out = self._exchange(*(self._own_part(one) for one in (hidden_states, top_k_index, top_k_weights)))
        if self.tp_mesh.size() == 1:
            return out
        shape = hidden_states.shape
        return DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    def _own_part(self, whole: Tensor) -> Tensor:
        """This rank's rows of what the TP group shares; their gradients are gathered."""
        if self.tp_mesh.size() == 1:
            return whole
        shared = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _exchange(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ranks = pools.pool_of(self.ep_mesh.get_group())
        tokens, sizes = x.shape[0], (x.shape[1], self.num_experts, ids.shape[1])
        checks.given("hidden_states", x, device=ranks.device)
        cfg = pools.config_for(ranks, NAMES, (*sizes, tokens))
        given = weights
        if weights.requires_grad:
            given = None if torch.is_grad_enabled() else weights.detach()
        exchange, routes = ranks.begin_counts(ids, cfg, weights=given, mask=True)
        wide = checks.of_type(weights, torch.float32) if routes.weights is None else routes.weights
        sent = checks.of_type(x, torch.bfloat16), routes.ids, wide

        def send(communicator: EPCommunicator, room: int, rows: Callable[[], int]) -> cute_ep.ops.Batch | PlainBatch:
            return dispatch_rows(*sent, communicator, room, rows)

        batch: cute_ep.ops.Batch | PlainBatch | None = None
        if torch.is_grad_enabled():
            counts = exchange.wait()
        else:
            batch, counts = send_early(Way(ranks, NAMES, (*sizes, tokens), None, {}), routes.ids, exchange, send)
        come = counts.rows(1)
        if batch is None:
            comm = pools.communicator_for(ranks, NAMES, (*sizes, counts.tokens))
            batch = send(comm, pools.room_of(come), lambda: come)
        out = checks.of_type(self._run(batch.tokens, batch, x.dtype), torch.bfloat16)
        returned = x.dtype if x.dtype in OUTPUT_TYPES else torch.float32
        return checks.of_type(cute_ep.ops.combine(out, batch, mode="partial", dtype=returned), x.dtype)

    def _run(self, tokens: Tensor, batch: cute_ep.ops.Batch | PlainBatch, dtype: torch.dtype) -> Tensor:
        """The outputs of this rank's experts for all rows. `dtype`: of the model's hidden states. Without rows they run
        on one of zeros, so that what hangs on their parameters (gradients, FSDP) takes part in the backward pass."""
        module = self._experts
        if self._known is None:
            try:
                experts.check_experts("experts", module)
            except EPConfigError:
                self._known = False
            else:
                self._known, self._gate = True, experts.find_gate(module)
        rows, offsets = tokens, batch.row_offsets
        if not tokens.shape[0]:
            rows, offsets = tokens.sum(dim=0, keepdim=True), torch.ones_like(offsets)
            offsets[0] = 0
        if self._known:
            weights = {name: getattr(module, name) for name in experts.weight_names(module)}
            out = experts.run(module, self._gate, weights, rows, offsets)
            return out if rows is tokens else out[:0]
        own = torch.arange(self.num_local_experts, device=tokens.device)
        ids = own.repeat_interleave(offsets.diff(), output_size=len(rows))
        ones = tokens.new_ones((len(rows), 1), dtype=dtype)
        return self.experts_forward(rows.to(dtype), ids[:, None], ones)[: tokens.shape[0]]
