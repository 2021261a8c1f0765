"""A rank of Megatron-core's MoE layers in a process of its own: `python -m tests.integrations.megatron_worker STORE
RANK WORLD`, on a GPU if there is one, with the shims on PYTHONPATH and without dynamo.

What cute_ep is compared with is Megatron's own all-to-all dispatcher. Megatron names CUDA devices and streams and looks
for TransformerEngine; without a GPU `without_cuda` puts the CPU there. Random numbers are drawn on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.processes import join_group


def without_cuda() -> None:
    """Answer Megatron's calls of torch.cuda for the CPU: they name a device, or order streams."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    answers: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    without_cuda()
torch._dynamo.config.disable = True

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from cute_ep.api.errors import EPConfigError, EPInputError  # noqa: E402
from cute_ep.integrations import megatron  # noqa: E402
from cute_ep.integrations.common import pools  # noqa: E402
from cute_ep.integrations.common.checks import LEAST_TOKENS  # noqa: E402
from cute_ep.runtime import group_pool  # noqa: E402

moe_utils.te_general_gemm = None  # a name that 0.16.1 leaves undefined without TransformerEngine
if DEVICE == "cpu":
    token_dispatcher.maybe_move_tensor_to_cpu = lambda one, as_numpy=False, **_: one.numpy() if as_numpy else one

EXPERTS, HIDDEN = 8, 64
KINDS = ("shim", "exact", "partial")
"""DeepEP's manager over the folder `shims`, and cute_ep's in both modes."""
DEEPEP = token_dispatcher._DeepepManager


def config_of(kind: str, **options: Any) -> TransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "ffn_hidden_size": 96,
        "moe_ffn_hidden_size": 96,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall" if kind == "alltoall" else "flex",
    }
    return TransformerConfig(**given | options)


def groups_of(ep: bool) -> ProcessGroupCollection:
    """All ranks are one group, which shares out the experts, or each expert; other groups have one rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "expt_dp", "tp_cp", "tp_dp_cp"):
        setattr(groups, name, alone)
    groups.tp_ep = dist.group.WORLD
    groups.ep, groups.expt_tp = (dist.group.WORLD, alone) if ep else (alone, dist.group.WORLD)
    return groups


def choose(kind: str) -> None:
    """What the flex dispatcher is built with."""
    token_dispatcher._DeepepManager = DEEPEP
    if kind in ("exact", "partial"):
        megatron.install(kind)  # type: ignore[arg-type]


def dispatcher_of(kind: str, groups: ProcessGroupCollection, **options: Any) -> Any:
    choose(kind)
    config = config_of(kind, moe_router_topk=3)
    for name, value in options.items():  # what a whole configuration would refuse without TransformerEngine
        setattr(config, name, value)
    local = EXPERTS // groups.ep.size()
    own = [groups.ep.rank() * local + number for number in range(local)]
    made = {"alltoall": token_dispatcher.MoEAlltoAllTokenDispatcher}.get(kind, token_dispatcher.MoEFlexTokenDispatcher)
    return made(local, own, config, groups)


class Results(NamedTuple):
    rows: Tensor
    counts: Tensor
    row_probs: Tensor
    out: Tensor
    grad: Tensor | None
    grad_probs: Tensor | None


def through(dispatcher: Any, routing: Tensor, *, signs: bool = False, back: bool = True) -> Results:
    """A pass forward, and `back`, through experts that multiply by their number and the probability. `routing` is on
    the CPU.

    Values are small integers, probabilities powers of two, with `signs` also negative ones, so that every sum in any
    order is exact in bfloat16.
    """
    tokens = len(routing)
    x = torch.randint(-3, 4, (tokens, 1, HIDDEN)).bfloat16().to(DEVICE).requires_grad_()
    probs = 2.0 ** torch.randint(-1, 2, routing.shape) * routing
    probs = (probs * (1 - 2 * torch.randint(2, probs.shape)) if signs else probs).to(DEVICE).requires_grad_()
    with torch.set_grad_enabled(back):
        hidden, own = dispatcher.dispatch_preprocess(x, routing.to(DEVICE), probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(hidden, own))
        counts = counts.cpu()
        factors = (1 + torch.arange(len(counts)) % 3).repeat_interleave(counts).to(DEVICE)
        outputs = (rows * (row_probs * factors)[:, None]).bfloat16()
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outputs)))
    if back:
        out.backward(torch.randint(-1, 2, out.shape).bfloat16().to(DEVICE))
        assert x.grad is not None and probs.grad is not None
    return Results(rows.detach(), counts, row_probs.detach(), out.detach(), x.grad, probs.grad)


def routings(rank: int, *, even: bool = False) -> Iterator[tuple[str, Tensor]]:
    """[T, EXPERTS] bool, with at most 3 experts a token; `even`: as many entries on all ranks."""

    def random(tokens: int) -> Tensor:
        ids = torch.rand(tokens, EXPERTS).topk(3).indices
        return torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)

    yield "random", random(20)
    one = torch.zeros(16, EXPERTS, dtype=torch.bool)
    one[:, EXPERTS - 1] = True
    yield "all to one expert", one
    yield "nothing left", random(8) & False
    if not even:
        yield "uneven", random(5 + 30 * rank)
        yield "a rank without tokens", random(17 * rank)
        yield "dropped entries", random(24) & (torch.rand(24, EXPERTS) < 0.6)
    yield "as many tokens as there is room for", random(LEAST_TOKENS)
    yield "more tokens than before", random(LEAST_TOKENS + 1)


def check_dispatchers(ep: bool) -> None:
    """Rows, counts, probabilities, sums and gradients are those of Megatron's all-to-all, to the bit; without gradients
    the others, also where rows are sent before it is known how many come. Its gathers over ranks that share experts
    (`ep` False) need as many entries on all ranks, over gloo."""
    groups, rank = groups_of(ep), dist.get_rank()
    options = {"moe_expert_capacity_factor": float(EXPERTS)}  # entries may be dropped
    reference = dispatcher_of("alltoall", groups, **options)
    for kind in KINDS:
        own = dispatcher_of(kind, groups, **options)
        torch.manual_seed(rank)
        for name, routing in routings(rank, even=not ep):
            state = torch.get_rng_state()
            signs = kind != "shim"  # Megatron's manager takes an entry for dropped if its probability is not positive
            wanted = through(reference, routing, signs=signs)
            torch.set_rng_state(state)
            got = through(own, routing, signs=signs)
            torch.set_rng_state(state)
            plain = through(own, routing, signs=signs, back=False)
            for field, one, other, third in zip(Results._fields, got, wanted, plain, strict=True):
                assert torch.equal(one, other), f"{kind}, {name}: {field}\n{one}\n{other}"
                assert third is None or torch.equal(third, other), f"{kind}, {name}: {field}\n{third}\n{other}"


def check_padding() -> None:
    """Each expert's rows become a multiple of 16, with rows of zeros and probability 0; nothing else changes. The same
    without gradients."""
    groups, rank = groups_of(True), dist.get_rank()
    plain, padded = (
        dispatcher_of("exact", groups, moe_router_padding_for_quantization=padding) for padding in (False, True)
    )
    torch.manual_seed(rank)
    for name, routing in routings(rank):
        state = torch.get_rng_state()
        wanted = through(plain, routing)
        torch.set_rng_state(state)
        got = through(padded, routing)
        assert torch.equal(got.counts, (wanted.counts + 15) // 16 * 16), name
        ends = got.counts.cumsum(0).tolist()
        for end, room, count, rows in zip(
            ends, got.counts.tolist(), wanted.counts.tolist(), wanted.rows.split(wanted.counts.tolist()), strict=True
        ):
            start = end - room
            assert torch.equal(got.rows[start : start + count], rows), name
            assert not got.rows[start + count : end].any() and not got.row_probs[start + count : end].any(), name
        for field in ("out", "grad", "grad_probs"):
            assert torch.equal(getattr(got, field), getattr(wanted, field)), f"{name}: {field}"
        torch.set_rng_state(state)
        early = through(padded, routing, back=False)
        for field in ("rows", "counts", "row_probs", "out"):
            assert torch.equal(getattr(early, field), getattr(got, field)), f"{name}: {field}"


def trained(kind: str, groups: ProcessGroupCollection, recompute: bool) -> list[Tensor]:
    """Outputs and gradients of Megatron's MoE layer, router and experts included, in batches of several sizes."""
    choose(kind)
    torch.manual_seed(dist.get_rank())
    layer = MoELayer(config_of(kind), get_moe_module_spec(False, EXPERTS).submodules, 1, groups).to(DEVICE)
    results = []
    for tokens in (12, 1, 40):
        x = torch.randn(tokens, 2, HIDDEN).bfloat16().to(DEVICE).requires_grad_()
        out = checkpoint(lambda one: layer(one)[0], x, use_reentrant=False) if recompute else layer(x)[0]
        out.float().square().sum().backward()
        results += [out.detach(), x.grad]
    return [*results, *(parameter.grad for parameter in layer.parameters())]


def check_layers() -> None:
    """With two experts a token both sums round once, so the layer gives the bits of Megatron's all-to-all."""
    groups = groups_of(True)
    wanted = trained("alltoall", groups, False)
    for kind, recompute in [*((kind, False) for kind in KINDS), ("exact", True)]:
        for number, (one, other) in enumerate(zip(trained(kind, groups, recompute), wanted, strict=True)):
            assert torch.equal(one, other) and other.any(), f"{kind}, result {number}, recompute {recompute}"


def check_nodes() -> None:
    """Where each rank is a node all bits are the same."""
    pools.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_pool, "count_ranks", lambda group, call: 1)
        check_layers()
        for pool in pools.SHARED:
            assert {one.cfg.nodes for one in pool.communicators if one.cfg.world_size > 1} <= {1, 2}
            assert any(one.cfg.nodes == 2 for one in pool.communicators)
        pools.close()


def check_options() -> None:
    groups = groups_of(True)
    with pytest.raises(EPConfigError, match="overlap_moe_expert_parallel_comm = True"):
        dispatcher_of("exact", groups, overlap_moe_expert_parallel_comm=True)
    _, routing = next(routings(0))
    dispatcher = dispatcher_of("exact", groups, moe_router_dtype="fp64")
    assert through(dispatcher, routing).row_probs.dtype == torch.float64
    rows, chosen = torch.zeros(20, 1, HIDDEN, device=DEVICE), routing.to(DEVICE)
    dispatcher.dispatch_preprocess(rows, chosen, chosen.float())
    with pytest.raises(EPInputError, match="bf16=True"):
        dispatcher.token_dispatch(rows[:, 0])


def check_patience() -> None:
    """Ranks wait for each other as long as the group's collectives do, which Megatron has an option for."""
    groups = groups_of(True)
    groups.tp_ep = dist.new_group(timeout=timedelta(seconds=77))
    through(dispatcher_of("exact", groups), next(routings(0))[1])
    assert {one.cfg.timeout_s for one in pools.pool_of(groups.tp_ep).communicators} == {77.0}


def main(store: Path, rank: int, world: int) -> None:
    join_group(store, rank, world)
    check_dispatchers(ep=True)
    check_dispatchers(ep=False)
    check_padding()
    check_layers()
    check_nodes()
    check_options()
    check_patience()
    megatron.close()
    assert not pools.SHARED
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
