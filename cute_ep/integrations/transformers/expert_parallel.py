"""The expert parallel plan of transformers, a process per rank: `DistributedConfig(ep_implementation="cute_ep")`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

import cute_ep.ops
from cute_ep.api.errors import EPInputError
from cute_ep.integrations.connections import config_of, connections_of, room_for
from cute_ep.integrations.counts import exchange_counts, expert_rows
from cute_ep.integrations.exchange import RETURNED
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.runtime.routes import count_routes


class CuteEP(EPImplementation):
    """How the experts of a module get their tokens: by a dispatch and a combine over the EP group.

    The ranks of a TP group, which hold the same batch, take disjoint parts of it. Before each dispatch the ranks tell
    each other how many rows and tokens come, one small all-to-all that the host waits for, and connect again when more
    tokens come than there is room for. Differentiable in hidden states, weights and experts. Tokens,
    the experts' outputs and the gradients of both travel as bfloat16; sums are float32.

    Args:
        experts: the experts module.
        ep_mesh, tp_mesh: of the ranks that share out the experts, and of those that hold one batch.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.num_experts = self.num_local_experts * ep_mesh.size()

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted outputs of the experts for this rank's tokens.

        Args:
            hidden_states: [T, hidden], of any floating type.
            top_k_index: [T, K] int32 or int64 ids of all ranks' experts; one of no expert masks the entry.
            top_k_weights: [T, K] router weights, of any floating type.

        Returns:
            [T, hidden] of the type of `hidden_states`.

        Raises:
            EPInputError, EPTimeout: as the calls of a communicator; EPConfigError, VariantMissing: as `connect`.
        """
        own = (self._own_part(one) for one in (hidden_states, top_k_index, top_k_weights))
        out = self._exchange(*own)
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
        ids = torch.where((ids < 0) | (ids >= self.num_experts), -1, ids)
        group = self.ep_mesh.get_group()
        heard = exchange_counts(count_routes(ids, self.num_experts, group.size()).by_expert, len(ids), group)
        rows, tokens = torch.stack([expert_rows(heard).sum(), heard[:, -1].max()]).tolist()
        if tokens > MAX_TOKENS_PER_RANK:
            raise EPInputError(
                f"hidden_states.shape[0] = {tokens}, of the rank with the most tokens: must not exceed "
                f"{MAX_TOKENS_PER_RANK}; use shorter or fewer sequences a pass"
            )
        cfg = config_of(x.shape[1], self.num_experts, ids.shape[1], room_for(tokens), group.size())
        comm = cute_ep.ops.register(connections_of(group).get(cfg))
        batch = cute_ep.ops.dispatch(x.to(torch.bfloat16), ids, weights.float(), comm, capacity=rows)
        own = torch.arange(self.num_local_experts, device=x.device)
        experts = own.repeat_interleave(batch.row_counts, output_size=rows)
        out = self._run(batch.tokens[:rows].to(x.dtype), experts)
        returned = x.dtype if x.dtype in RETURNED else torch.float32
        return cute_ep.ops.combine(out.to(torch.bfloat16), batch, dtype=returned).to(x.dtype)

    def _run(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """The module's own forward pass on rows of its own experts. Without rows it runs on one of zeros, so that what
        hangs on its parameters (gradients, FSDP) takes part in the backward pass."""
        if not len(tokens):
            return self._run(tokens.sum(dim=0, keepdim=True), experts.new_zeros(1))[:0]
        return self.experts_forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))
