"""Bit-exact model of combine: every byte of every rank's sums, in plain torch, slow and obvious on purpose.

Every multiplication and every addition is its own torch call, so products are rounded before they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from cute_ep.api.calls import SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes
from cute_ep.api.validate import check_router_weights
from cute_ep.api.validate_combine import check_mode, check_output, check_rows, combine_weights
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.reference.dispatch import lower_halves, per_rank
from cute_ep.reference.formats import round_to, row_chunks

Epilogue = Callable[[int, torch.Tensor], torch.Tensor]
"""(rank, [T, hidden] float32 sums of its tokens) -> what is rounded instead."""
Rows = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
"""Per rank [>= num_rows, hidden] bfloat16."""
Batches = Sequence[Dispatched] | Mapping[int, Dispatched]
"""Per rank what its dispatch received."""


@dataclass(frozen=True, eq=False)
class ExpertOutputs:
    """What the experts of all ranks have made of a round's tokens: `rows[rank]` are in the order of `batches[rank]`."""

    cfg: EPConfig
    rows: Rows
    batches: Batches

    def routed(self, source: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks that return the slots' rows, the rows) of the tokens `part` of rank `source`: [n, top_k] int64, at
        least world_size where no row returns (masked, or not in `row_map`), and [n, top_k, hidden] bfloat16, zeros
        there."""
        cfg = self.cfg
        batch = self.batches[source]
        every, (index, first) = lower_halves(batch.topk_ids), cfg.place(source, batch.frame)
        ids, last = every[part], first + every.shape[0]
        server = torch.where(ids >= 0, ids.long() // cfg.local_experts, cfg.world_size)
        row, ranks = torch.full_like(ids, -1), [source] if cfg.skip_a2a else range(cfg.world_size)
        for rank in ranks:
            row = torch.where(server == rank, self.batches[rank].row_map[index, first:last][part], row)
        server = torch.where(row < 0, cfg.world_size, server)
        returned = torch.zeros(*ids.shape, cfg.hidden, dtype=torch.bfloat16, device=ids.device)
        order, counts = server.flatten().argsort(stable=True), server.flatten().bincount(minlength=cfg.world_size + 1)
        slots = order.split(counts.tolist())  # of each rank, and of none
        for rank in ranks:
            returned.view(-1, cfg.hidden)[slots[rank]] = self.rows[rank][row.flatten()[slots[rank]].long()]
        return server, returned

    def shared(self, source: int) -> tuple[slice, torch.Tensor]:
        """(tokens that the shared expert served, their rows) of one rank; both empty without a shared expert."""
        first, count = self.cfg.shared_slice(self.batches[source].topk_ids.shape[0], source)
        return slice(first, first + count), self.rows[source][:count]


def chosen_weights(
    cfg: EPConfig,
    dispatched: Sequence[Dispatched],
    router_weights: Sequence[torch.Tensor | None] | None,
    mode: str,
) -> list[torch.Tensor | None]:
    """Per rank the weights that apply: the argument's, else those of dispatch; ones for rank-major rows; None in
    unweighted mode. EPInputError: a rank has none."""
    given = per_rank("router_weights", router_weights, cfg.world_size)
    if mode == "unweighted":
        return [combine_weights(cfg, mode, None, batch) for batch in dispatched]
    chosen: list[torch.Tensor | None] = []
    for rank, (batch, argument) in enumerate(zip(dispatched, given, strict=True)):
        weights = batch.router_weights if argument is None else argument
        if mode == "partial" and cfg.is_rank_major:
            weights = torch.ones(batch.topk_ids.shape, dtype=torch.float32, device=batch.topk_ids.device)
        if weights is None:
            raise EPInputError(
                f"router_weights[{rank}] = None: must be given to dispatch or to combine, ones for a plain sum"
            )
        check_router_weights(cfg, weights, batch.topk_ids.shape[0])
        chosen.append(weights)
    return chosen


def check_combine(
    cfg: EPConfig, rows: Sequence[torch.Tensor], dispatched: Sequence[Dispatched], mode: str, dtype: torch.dtype
) -> None:
    """EPInputError unless mode and type are known, both lists have an entry a rank, `rows` covers `num_rows`, and the
    batches are of one dispatch round, as far as they know theirs."""
    per_rank("rows", rows, cfg.world_size)
    per_rank("dispatched", dispatched, cfg.world_size)
    for rank, (outputs, batch) in enumerate(zip(rows, dispatched, strict=True)):
        check_mode(cfg, mode, batch)
        check_rows(cfg, outputs, batch.row_map.device)
        check_output(cfg, mode, batch.topk_ids.shape[0], SumOptions(dtype=dtype), batch.topk_ids.device)
        if outputs.shape[0] < (need := batch.num_rows.item()):
            raise EPInputError(f"rows[{rank}].shape[0] = {outputs.shape[0]}: must be at least num_rows = {need}")
    rounds = {} if cfg.skip_a2a else {rank: dispatch_round(cfg, batch) for rank, batch in enumerate(dispatched)}
    known = {rank: number for rank, number in rounds.items() if number}
    if len(set(known.values())) > 1:
        raise EPInputError(f"dispatched = batches of dispatch rounds {known}, by rank: must be of the same round")


def dispatch_round(cfg: EPConfig, dispatched: Dispatched) -> int:
    """Number of the dispatch round of a batch, as its own header has it; 0: unknown. Reads the tensor."""
    return int(dispatched.headers[cfg.place(dispatched.rank)[0], HeaderWord.ROUND])


@no_modes()
def combine(
    cfg: EPConfig,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    router_weights: Sequence[torch.Tensor | None] | None = None,
    mode: str = "partial",
    dtype: torch.dtype = torch.bfloat16,
    epilogue: Epilogue | None = None,
) -> list[torch.Tensor]:
    """Expert outputs of every token, back in token order: their weighted sums, or the rows themselves.

    All sums are float32, start at +0 and round after each multiplication and each addition:
    exact: over the unmasked slots k ascending, acc += w[t, k] * f32(row).
    partial: every rank sums the slots that it owns as above and casts to bfloat16; the source rank adds these
    over the ranks that own any of the token's experts, ascending. Over nodes that is the sum of one node: each node
    casts its own to bfloat16, and the source rank adds these, nodes ascending.
    Then acc += f32(row) of the shared expert, for the tokens that it has (`EPConfig.shared_slice`); then the
    epilogue; then one cast to `dtype`. A token without unmasked slots gives +0. A NaN result is the type's
    `CANONICAL_NAN`.
    unweighted: slot k's row, cast to `dtype`; +0 where the slot is masked. Only the cast to float16 makes NaNs
    canonical: bfloat16 keeps a row's bits, float32 widens them with zeros.

    With `skip_a2a` a rank adds its own rows only, and slots of other ranks' experts count as masked.

    Args:
        rows: per rank [>= num_rows, hidden] bfloat16, in the row order of `dispatched`.
        dispatched: what `dispatch` returned (or a communicator's outputs of the same round).
        router_weights: per rank [T_r, top_k] float32; None (list or entry): those that dispatch was given. Here partial
            mode takes them, too, as what its ranks multiply by. Not read in unweighted mode, and for rank-major rows,
            whose weights are ones.
        mode: one of COMBINE_MODES; "unweighted" not with a fused shared expert.
        dtype: bfloat16, float16 or float32.
        epilogue: not in unweighted mode, nor over nodes.

    Returns:
        Per rank [T_r, hidden], unweighted [T_r, top_k, hidden], of `dtype`.

    Raises:
        EPInputError: unknown mode or type, a rank without weights in exact or partial mode, or a wrong shape, type or
            list length.
    """
    check_combine(cfg, rows, dispatched, mode, dtype)
    chosen = chosen_weights(cfg, dispatched, router_weights, mode)
    outputs = ExpertOutputs(cfg, rows, dispatched)
    if epilogue is not None and cfg.nodes > 1:
        raise EPInputError(f"epilogue = function: must be None over {cfg.nodes} nodes")
    if mode == "unweighted":
        if epilogue is not None:
            raise EPInputError("epilogue = function: must be None in unweighted mode, which has no sum")
        return [unweighted_source(outputs, source, dtype) for source in range(cfg.world_size)]
    results = []
    for source, weights in enumerate(chosen):
        total = sum_source(outputs, source, weights, mode)
        results.append(round_to(total if epilogue is None else epilogue(source, total), dtype))
    return results


def exact_sums(served: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """[n, hidden] sums of [n, top_k, hidden] products where [n, top_k] bool `served`, slots ascending."""
    total = torch.zeros_like(products[:, 0])
    for slot in range(served.shape[1]):
        total = torch.where(served[:, slot, None], total + products[:, slot], total)
    return total


def partial_sums(server: torch.Tensor, products: torch.Tensor, world_size: int) -> torch.Tensor:
    """[n, hidden] sums over ranks, ascending, of their `exact_sums` as bfloat16; `server` as `routed` returns it."""
    order = server.argsort(dim=1, stable=True)  # rank by rank, slots ascending; those without a row last
    server, products = server.gather(1, order), products.gather(1, order[:, :, None].expand_as(products))
    total, partial = torch.zeros_like(products[:, 0]), torch.zeros_like(products[:, 0])
    for step in range(order.shape[1]):
        next_rank = (server[:, step] != server[:, max(step - 1, 0)])[:, None]
        total = torch.where(next_rank, total + round_to(partial, torch.bfloat16).float(), total)
        partial = torch.where(next_rank, 0, partial)
        partial = torch.where(server[:, step, None] < world_size, partial + products[:, step], partial)
    return total + round_to(partial, torch.bfloat16).float()


@no_modes()
def sum_source(outputs: ExpertOutputs, source: int, weights: torch.Tensor, mode: str) -> torch.Tensor:
    """The sums of `combine` for the tokens of rank `source` alone, with its [T, top_k] weights, before the epilogue and
    the last cast: [T, hidden] float32; checks nothing."""
    cfg, tokens = outputs.cfg, weights.shape[0]
    result = torch.zeros(tokens, cfg.hidden, dtype=torch.float32, device=weights.device)
    for part in row_chunks(tokens, cfg.top_k * cfg.hidden):
        server, returned = outputs.routed(source, part)
        products = weights[part][:, :, None] * returned.float()
        if mode == "exact":
            result[part] = exact_sums(server < cfg.world_size, products)
        elif cfg.nodes == 1:
            result[part] = partial_sums(server, products, cfg.world_size)
        else:
            for node in range(cfg.nodes):
                of_node = torch.where(server // cfg.peers == node, server, cfg.world_size)
                sums = partial_sums(of_node, products, cfg.world_size)
                result[part] = result[part] + round_to(sums, torch.bfloat16).float()
    served, rows = outputs.shared(source)
    result[served] = result[served] + rows.float()
    return result


@no_modes()
def unweighted_source(outputs: ExpertOutputs, source: int, dtype: torch.dtype) -> torch.Tensor:
    """Unweighted `combine` for the tokens of rank `source` alone: [T, top_k, hidden]; checks nothing."""
    _, result = outputs.routed(source, slice(None))
    if dtype == torch.bfloat16:
        return result
    widened = (result.view(torch.int16).int() << 16).view(torch.float32)
    return widened if dtype == torch.float32 else round_to(widened, dtype)
