"""How FlashInfer's one-sided all-to-all does a round. Functions and memory are as in `perf.nccl_works`. The kernels are
compiled when they are first called. The library allows no dispatch before the combine of the last one, so only pairs
are timed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import torch

from perf.cases import Shape
from perf.peer_timing import Rank, Work, relative_error


@cache
def all_to_all(rank: int, world: int, shape: Shape, most: int):
    """FlashInfer's object for up to `most` BF16 tokens a rank of one machine. Collective."""
    from flashinfer.comm.comm_backend import TorchDistBackend
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import MnnvlConfig
    from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

    class Ranks(TorchDistBackend):
        def Split(self, color: int, key: int) -> Ranks:
            return self  # the default group is the one that exchanges handles

    warnings.simplefilter("ignore", DeprecationWarning)
    return MoeAlltoAll(
        Mapping(world, rank, world, tp_size=world, moe_ep_size=world),
        most,
        shape.top_k,
        shape.num_experts,
        hidden_size=shape.hidden,
        mnnvl_config=MnnvlConfig(comm_backend=Ranks()),
    )


def flashinfer_one_sided(me: Rank) -> Iterator[Work]:
    """Rows, ids and weights to [rank, token, *] of every rank with one of the token's experts, and the sum over ranks
    of rows that experts have left in the workspace."""
    shape, most = me.shape, max(me.tokens)
    one_sided = all_to_all(me.rank, me.world, shape, most)
    for tokens in me.tokens:
        inputs = me.inputs(tokens)
        ids = [one.ids.int().contiguous() for one in inputs]
        sums = [torch.full_like(one.x, float("nan")) for one in inputs]

        def dispatch(index: int, inputs=inputs, ids=ids, tokens=tokens) -> list[torch.Tensor]:
            payloads = [inputs[index].x, ids[index], inputs[index].weights]
            # ids of slots in which nothing arrives become -1, as experts need it
            return one_sided.dispatch(
                ids[index], payloads, tokens, invalid_token_expert_id=-1, expert_id_payload_index=1
            )

        def combine(index: int, sums=sums, tokens=tokens) -> None:
            made = one_sided.get_combine_payload_tensor_in_workspace(tokens, shape.hidden, torch.bfloat16)
            one_sided.combine(made, tokens, payload_in_workspace=True, output=sums[index])

        arrived = dispatch(0)[0]
        one_sided.get_combine_payload_tensor_in_workspace(tokens, shape.hidden, torch.bfloat16).copy_(arrived)
        combine(0)
        hit = torch.zeros(tokens, me.world, device="cuda").scatter_(1, inputs[0].ids // me.local_experts, 1.0)
        error = relative_error(sums[0], inputs[0].x.float() * hit.sum(dim=1, keepdim=True))
        yield Work("bf16", tokens, dispatch, combine, error, alone=False)
