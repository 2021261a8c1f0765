"""Arguments that ranks over nodes take from where they are, and those that they refuse before anything is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_dispatched, poisoned_buffers
from cute_ep.testing.workloads import make_inputs
from tests.reference.ranks import rows_for
from tests.strided_rows import TAKEN

from .emulated_nodes import TOKENS, batch_of, config, connected, fused_round, on_all


def arguments_of(cfg: EPConfig, views: list[str], quantised: bool) -> list[dict]:
    """Of each rank's dispatch: a view of its rows, with ids of 64 bits."""
    made = []
    for rank, one in enumerate(make_inputs(cfg, [TOKENS] * cfg.world_size, "masked", 7)):
        view, given = TAKEN[views[rank]], {"topk_ids": one.topk_ids.long(), "router_weights": one.router_weights}
        if quantised:
            payload, scales, row_scales = reference.quantize(one.x, cfg.format)
            given |= {"x": view(payload.view(torch.uint8)).view(payload.dtype), "scales": scales}
            given |= {} if row_scales is None else {"row_scales": row_scales}
        else:
            given["x"] = view(one.x)
        made.append({name: part[: len(given["x"])] for name, part in given.items()})
    return made


def check_arguments(cfg: EPConfig, made: list[NodesCommunicator], given: list[dict], number: int) -> None:
    """A round of these arguments has what contiguous rows bring."""
    xs = [one["x"].contiguous() for one in given]
    ids, weights = ([one[name] for one in given] for name in ("topk_ids", "router_weights"))
    ready = None
    if "scales" in given[0]:
        ready = [QuantizedRows(x, one["scales"], one.get("row_scales")) for x, one in zip(xs, given, strict=True)]
    want = reference.dispatch(cfg, xs, ids, None, weights, ready)
    rows = rows_for(want, cfg, number)

    def work(rank: int) -> torch.Tensor:
        out = poisoned_buffers(made[rank], int(want[rank].num_rows))  # type: ignore[arg-type]
        batch = made[rank].dispatch(**given[rank], out=out)
        check_dispatched(batch, want[rank], cfg, rank)
        return made[rank].combine(rows[rank], batch)

    sums = reference.combine(cfg, rows, want)
    for rank, one in enumerate(on_all(made, work)):
        assert_bits(one, sums[rank], f"round {number}, sums of rank {rank}")


@pytest.mark.parametrize(
    ("fmt", "quantised"),
    [("bf16", False), ("fp8", False), ("fp8", True), ("nvfp4_row", True)],
    ids=["bf16", "fp8", "fp8 rows", "nvfp4_row rows"],
)
def test_rows_that_lie_apart_and_ids_of_64_bits(fmt: str, quantised: bool) -> None:
    """A rank has another view than the next one."""
    cfg, names = config(2, 1, dispatch_format=fmt), list(TAKEN)
    with connected(cfg) as made:
        for turn, name in enumerate(names):
            check_arguments(cfg, made, arguments_of(cfg, [name, names[turn - 1]], quantised), turn)


def test_an_id_beyond_32_bits_is_told() -> None:
    cfg = config(2, 1)
    with connected(cfg) as made:
        ids = [torch.zeros(2, cfg.top_k, dtype=torch.int64) for _ in range(2)]
        ids[1][1, 1] = 2**40 + 1
        on_all(made, lambda rank: made[rank].dispatch(torch.ones(2, cfg.hidden).bfloat16(), ids[rank]))
        made[0].synchronize()
        with pytest.raises(EPInputError, match=r"rank 1: topk_ids.flatten\(\)\[4\] = .* or beyond 32 bits: must be"):
            made[1].synchronize()


def state_of(ep: NodesCommunicator) -> tuple:
    """What a rank has sent and received."""
    return ep.mail.words(), ep.flags().completed


def test_a_wrong_out_is_refused_before_anything_is_sent() -> None:
    """By one rank while nobody else calls, who would be waited for; then all ranks go on."""
    cfg = config(2, 2)
    with connected(cfg) as made:
        fused_round(cfg, made, 0)
        ep, (given, want) = made[1], batch_of(cfg, 1, None)
        rows = rows_for(want, cfg, 1)
        before = state_of(ep)
        wrong = [
            replace(ep.allocate(), num_rows=torch.zeros(1)),
            replace(ep.allocate(), tokens=torch.zeros(8, cfg.hidden + 8).bfloat16()),
        ]
        for out, named in zip(wrong, ("num_rows", "tokens"), strict=True):
            for call in (ep.dispatch, ep.plan_dispatch):
                with pytest.raises(EPInputError, match=rf"^out\.{named}"):
                    call(**vars(given[1]), out=out)
        assert state_of(ep) == before and not ep.failed
        sent = on_all(made, lambda rank: made[rank].dispatch_async(**vars(given[rank])))
        before = state_of(ep)
        with pytest.raises(EPInputError, match=r"^out\.num_rows"):
            ep.dispatch_wait(sent[1], wrong[0])
        assert state_of(ep) == before
        batches = on_all(made, lambda rank: made[rank].dispatch_wait(sent[rank]))
        before, sums = state_of(ep), torch.zeros(len(given[1].x) + 1, cfg.hidden).bfloat16()
        for call in (ep.combine, ep.plan_combine):
            with pytest.raises(EPInputError, match=r"^out"):
                call(rows[1], batches[1], out=sums)
        assert state_of(ep) == before
        pending = on_all(made, lambda rank: made[rank].combine_async(rows[rank], batches[rank]))
        before = state_of(ep)
        with pytest.raises(EPInputError, match=r"^out"):
            ep.combine_wait(pending[1], out=sums.half())
        assert state_of(ep) == before
        done = on_all(made, lambda rank: made[rank].combine_wait(pending[rank]))
        for rank, one in enumerate(reference.combine(cfg, rows, want)):
            assert_bits(done[rank], one, f"sums of rank {rank}")
        fused_round(cfg, made, 2)
