"""torchtitan's expert parallel token dispatcher, and selective checkpointing that saves its rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

import cute_ep.ops
from cute_ep import EPConfigError, EPError
from cute_ep.api.config import is_integer, is_number
from cute_ep.api.types import CombineMode
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.integrations.common import checks, pools
from cute_ep.integrations.common.checks import FLOATS, Names, alignment_for, demand, named_config, of_type, room_for
from cute_ep.integrations.common.early import early_room
from cute_ep.integrations.common.kinds import Kinds, kind_of
from cute_ep.layouts.maps.record import align_up
from cute_ep.ops.batches import PlainBatch
from cute_ep.ops.calls import dispatch_rows
from cute_ep.ops.counting import OP, count_rows
from cute_ep.ops.library import FORWARD_OPS
from cute_ep.ops.registry import communicator_of, is_open
from cute_ep.runtime.counts import CountExchange
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.torch_internals import AsyncCollectiveTensor, all_to_all_single

FEWER = "lower training.local_batch_size, or raise parallelism.context_parallel_degree"
"""What to do about too many tokens."""
NAMES: Names = {"hidden": "x_TD.shape[1]", "max_tokens_per_rank": "x_TD.shape[0]", "world_size": "ep_mesh.size()"}
CONFIGURED: Names = {**NAMES, "hidden": "hidden_dim", "max_tokens_per_rank": "num_max_tokens_per_rank"}
"""What the configuration calls them."""
WORDS = pools.Words("topk_expert_ids_TK", "non_blocking_capacity_factor")
Sent = cute_ep.ops.Batch | PlainBatch
"""What combine takes."""


class CuteEPTokenDispatcher(BaseEPTokenDispatcher):
    """How `RoutedExperts` sends tokens to experts and back, over the ranks of the expert parallel mesh, which are all
    on one machine. Differentiable in tokens, scores and the experts' parameters.

    Ranks have equal numbers of tokens, as torchtitan promises. Scores are applied in combine, in float32.
    `communicator` is its name in `cute_ep.ops`, None until it is connected. docs/training.md says what travels and
    waits, docs/adapters.md how wrong arguments and ids are told.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """HybridEP's, so that torchtitan takes it where it takes HybridEP's. `non_blocking_capacity_factor` is in (0,
        1]; `pad_multiple`: each expert's rows are padded with zeros to a multiple of it.

        With `hidden_dim` and `num_max_tokens_per_rank` the ranks connect when the model is parallelised; otherwise in
        the first call, and again when more tokens come. `mode` is of combine (docs/numerics.md), `sms` SMs of a kernel.
        """

        mode: CombineMode = "partial"
        sms: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        factor = config.non_blocking_capacity_factor
        good = factor is None or (is_number(factor) and 0 < factor <= 1)
        demand(good, "non_blocking_capacity_factor = {!r}: must be in (0, 1], or None", factor)
        checks.mode("mode", config.mode)
        checks.sms("sms", config.sms)
        self.config, self.alignment = config, alignment_for(config.pad_multiple or 1, "pad_multiple")
        self.communicator: str | None = None
        self._room, self._kinds = 0, Kinds()  # of dispatches

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Take the mesh; collective over it where the configuration says enough to connect."""
        rule = "ep_mesh = None: must be a mesh; set parallelism.expert_parallel_degree to 2 or more"
        demand(ep_mesh is not None, rule)
        tokens, hidden = self.config.num_max_tokens_per_rank, self.config.hidden_dim
        if is_integer(tokens):
            checks.most("num_max_tokens_per_rank", tokens, FEWER)
        tokens = 1 if tokens is None else tokens
        sizes = 8 if hidden is None else hidden, self.num_experts, self.top_k, tokens, ep_mesh.size()
        named_config(CONFIGURED, sizes, error=EPConfigError)
        super().wire_meshes(ep_mesh=ep_mesh)

    def init_buffer(self) -> None:
        """Connect, if hidden size and number of tokens are known."""
        hidden, tokens = self.config.hidden_dim, self.config.num_max_tokens_per_rank
        if hidden is not None and tokens is not None:
            self._connect(hidden, tokens)

    def _ranks(self) -> GroupPool:
        if self.ep_mesh is None:
            raise EPError("the dispatcher has no mesh: wire_meshes must be called first")
        return pools.pool_of(self.ep_mesh.get_group())

    def _connect(self, hidden: int, tokens: int) -> None:
        if torch.compiler.is_compiling():
            raise EPError(
                "the dispatcher is not connected: make an eager forward pass first, or build the model with "
                "moe_comm_backend='hybridep', whose configuration says how many tokens there are"
            )
        sizes = hidden, self.num_experts, self.top_k, tokens
        made = pools.communicator_for(self._ranks(), NAMES, sizes, self.config.sms, row_alignment=self.alignment)
        self.communicator, self._room = cute_ep.ops.register(made), room_for(tokens)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Sent]:
        """Tokens and scores of any floating type to their experts' ranks. An id out of range brings its token to no
        expert, and a later call tells it. Raises what `cute_ep.connect` raises, too.

        Returns:
            [R, D] rows of the type of `x_TD` by expert; with a capacity factor zeros behind the last one. [e] int32
            rows of each local expert, padding included. What `combine` takes.
        """
        compiling, counts = torch.compiler.is_compiling(), num_local_tokens_per_expert_E
        if not compiling:
            pool = self._ranks()
            WORDS.raise_found(pool)
            kind = kind_of(x_TD), kind_of(topk_scores_TK), kind_of(topk_expert_ids_TK), kind_of(counts)
            self._kinds.once(kind, self._check, x_TD, topk_scores_TK, topk_expert_ids_TK, counts, pool.device)
            sizes = x_TD.shape[1], self.num_experts, self.top_k, x_TD.shape[0]
            cfg = pools.config_for(pool, NAMES, sizes, row_alignment=self.alignment)
        (tokens, hidden), name = x_TD.shape, self.communicator
        if name is None or tokens > self._room or not (compiling or is_open(name)):  # compiled code keeps its own
            self._connect(hidden, tokens)
        assert self.ep_mesh is not None and self.communicator is not None
        ranks, local = self.ep_mesh.size(), self.num_experts // self.ep_mesh.size()
        factor, unit, ids = self.config.non_blocking_capacity_factor, self.alignment, topk_expert_ids_TK
        x, scores = of_type(x_TD, torch.bfloat16), of_type(topk_scores_TK, torch.float32)
        batch: Sent
        if factor is not None:
            most = math.ceil(factor * ranks * tokens * min(self.top_k, local))
            rows = align_up(most + local * (unit - 1), unit)
            batch = cute_ep.ops.dispatch(x, ids, scores, self.communicator, capacity=rows, clear=True)
        elif compiling:
            rows = self._rows_by_collective(counts, ranks, local)
            batch = cute_ep.ops.dispatch(x, ids, scores, self.communicator, capacity=rows)
        elif torch.is_grad_enabled():

            def counted(ids: Tensor) -> tuple[Tensor, int]:
                exchange, routes = pool.begin_counts(ids, cfg, self.config.sms)
                return routes.ids, exchange.wait().rows(unit)

            ids, come = count_rows(ids, counted)
            room, sender = pools.room_of(come), communicator_of(self.communicator)
            batch = dispatch_rows(x, ids, scores, sender, room, lambda: come)
        else:
            exchange, routes = pool.begin_counts(ids, cfg, self.config.sms)
            batch = self._send(self.communicator, exchange, x, routes.ids, scores)  # ids as they were counted
        whole = unit == 1 and factor is None and not compiling  # rows are neither padding nor lost
        numbers = batch.row_counts if whole else batch.row_offsets.diff()
        return of_type(batch.tokens, x_TD.dtype), numbers, batch

    def _check(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor, device: torch.device) -> None:
        """EPInputError unless dispatch takes them."""
        checks.given("x_TD", x, shape=(None, None), dtype=FLOATS, device=device)
        checks.most("x_TD.shape[0]", x.shape[0], FEWER)
        shape = x.shape[0], self.top_k
        checks.given("topk_scores_TK", scores, shape=shape, dtype=FLOATS, device=device)
        checks.given("topk_expert_ids_TK", ids, shape=shape, dtype=checks.ID_TYPES, device=device)
        checks.given("num_local_tokens_per_expert_E", counts, shape=(self.num_experts,), device=device)

    def _rows_by_collective(self, counts: Tensor, ranks: int, local: int) -> int:
        """How many rows come, by ops that compilers trace."""
        assert self.ep_mesh is not None
        heard = all_to_all_single(counts, None, None, self.ep_mesh.get_group())
        if isinstance(heard, AsyncCollectiveTensor):  # whose ops take several times as long
            heard = heard.wait()
        return int(align_up(heard.view(ranks, local).sum(0), self.alignment).sum().to("cpu"))

    def _send(self, comm: str, exchange: CountExchange, x: Tensor, ids: Tensor, scores: Tensor) -> Sent:
        """A dispatch without gradients, before it is known how many rows come if that takes not too much memory."""
        communicator = communicator_of(comm)
        most = communicator.cfg.max_rows
        room, counts = early_room(exchange, self.alignment, most, x.shape[1] * x.itemsize)
        return dispatch_rows(x, ids, scores, communicator, room, lambda: counts().rows(self.alignment))

    def combine(self, routed_output_RD: Tensor, metadata: Sent, x_TD: Tensor) -> Tensor:
        """The experts' rows, [R, D], to [T, D] sums of each token's rows times its scores, of the type of `x_TD`."""
        if not torch.compiler.is_compiling():
            ranks = self._ranks()
            WORDS.raise_found(ranks)
            checks.kind("metadata", metadata, Sent, "what dispatch returned")
            checks.given("x_TD", x_TD, shape=(metadata.topk_ids.shape[0], None), dtype=FLOATS, device=ranks.device)
            shape = metadata.tokens.shape[0], x_TD.shape[1]
            checks.given("routed_output_RD", routed_output_RD, shape=shape, dtype=FLOATS, device=ranks.device)
        dtype = x_TD.dtype if x_TD.dtype in OUTPUT_TYPES else torch.float32
        rows = of_type(routed_output_RD, torch.bfloat16)
        return of_type(cute_ep.ops.combine(rows, metadata, mode=self.config.mode, dtype=dtype), x_TD.dtype)


class CuteEPSelectiveAC(SelectiveAC):
    """Selective activation checkpointing that saves what dispatch and combine return (docs/training.md)."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """SelectiveAC's."""

    def get_save_ops(self) -> set:
        """torchtitan's set and the ops of cute_ep."""
        names = *FORWARD_OPS, OP
        return super().get_save_ops() | {getattr(torch.ops.cute_ep, name).default for name in names}
