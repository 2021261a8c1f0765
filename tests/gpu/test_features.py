"""Every format and every option of dispatch and combine against the reference, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.distributed import (
    DistributedEPCombine,
    DistributedEPDispatch,
    DistributedEPDispatchFP8,
    DistributedEPDispatchMXFP4,
    DistributedEPDispatchNVFP4,
)
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, HeaderWord
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import ROW_ALIGNMENTS
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_dispatched, check_round, expert_rows, poisoned_buffers
from cute_ep.testing.workloads import make_inputs
from tests.weights_cases import of_tensors

from .conftest import connected

HIDDEN = (2048, 2880, 4096, 7168)
MANY = LAMPORT_TOKENS + 1
TOKENS = ((0, "uniform"), (1, "zipf"), (7, "masked"), (128, "repeated"), (300, "one_expert"), (MANY, "zipf"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def counts_of(tokens: int, ranks: int, turn: int) -> list[int]:
    """Token counts a rank: different ones, some of them 0."""
    return [max(0, tokens - (tokens + 2) * ((rank + turn) % 3) // 2) for rank in range(ranks)]


def holds(fmt: str, hidden: int) -> bool:
    return hidden % FORMATS[fmt].multiple == 0


@pytest.mark.parametrize(("fmt", "hidden"), [pair for pair in product(FORMATS, HIDDEN) if holds(*pair)])
def test_every_format(devices: list[str], fmt: str, hidden: int) -> None:
    """Fused and split, plain and pre-quantised rows, all output types and combine modes, in every scale layout."""
    ranks, record = len(devices), FORMATS[fmt]
    for first, layout in enumerate(record.scale_layouts or (None,)):
        cfg = EPConfig(hidden, 16 * ranks, 4, MANY, ranks, fmt, 20, layout)
        with connected(cfg, devices) as communicators:
            for index, (tokens, routing) in enumerate(TOKENS):
                for split in (False, True):
                    turn = hidden + 2 * (first + index) + split
                    scaled = record.global_scale and index % 3
                    options = RoundOptions(
                        split,
                        dtype=DTYPES[turn % 3],
                        input_scales=[0.5 * (rank + 1) for rank in range(ranks)] if scaled else None,
                        prequantized=bool(record.scale) and (first + index + split) % 2 == 1,
                        seed=turn,
                    )
                    inputs = make_inputs(cfg, counts_of(tokens, ranks, turn), routing, turn)
                    try:
                        check_round(communicators, inputs, options)
                    except AssertionError as error:
                        raise AssertionError(f"{layout}, {tokens} tokens, {routing}, {options}: {error}") from error


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_padded_to_an_alignment(devices: list[str], fmt: str) -> None:
    record = FORMATS[fmt]
    for turn, (alignment, layout) in enumerate(product(ROW_ALIGNMENTS, record.scale_layouts or (None,))):
        if alignment % record.row_alignment:
            with pytest.raises(EPConfigError, match="row_alignment"):
                EPConfig(2048, 32, 4, 130, len(devices), fmt, row_alignment=alignment)
            continue
        cfg = EPConfig(
            2048, 8 * len(devices), 3, 130, len(devices), fmt, 20, layout, alignment, fused_shared_expert=turn % 2 == 1,
            zero_padding=turn % 3 != 1,
        )  # fmt: skip
        with connected(cfg, devices) as communicators:
            for tokens, routing in ((0, "uniform"), (1, "zipf"), (130, "masked"), (129, "one_rank")):
                inputs = make_inputs(cfg, counts_of(tokens, len(devices), turn), routing, turn)
                check_round(communicators, inputs, RoundOptions(split=(tokens + turn // 2) % 2 == 0, seed=turn))


@pytest.mark.parametrize("fmt", FORMATS)
def test_fused_shared_expert(devices: list[str], fmt: str) -> None:
    """Group 0 holds the own tokens; their rows are added in the float32 accumulator."""
    cfg = EPConfig(4096, 16 * len(devices), 8, MANY, len(devices), fmt, 20, fused_shared_expert=True)
    with connected(cfg, devices) as communicators:
        for turn, (tokens, routing) in enumerate(TOKENS):
            inputs = make_inputs(cfg, counts_of(tokens, len(devices), turn), routing, turn)
            for split in (False, True):
                check_round(communicators, inputs, RoundOptions(split, dtype=DTYPES[turn % 3], seed=turn))


@pytest.mark.parametrize("shared", [False, True])
def test_router_weights_given_to_combine(devices: list[str], shared: bool) -> None:
    """Instead of dispatch, whose messages then bring none, for exact sums."""
    cfg = EPConfig(2048, 16 * len(devices), 4, MANY, len(devices), "bf16", 20, fused_shared_expert=shared)
    with connected(cfg, devices) as communicators:
        for turn, (tokens, routing) in enumerate(TOKENS):
            inputs = make_inputs(cfg, counts_of(tokens, len(devices), turn), routing, turn)
            for split in (False, True):
                check_round(communicators, inputs, RoundOptions(split, weights_at="combine", seed=turn))


def test_some_ranks_give_weights_and_the_host_learns_the_counts(devices: list[str]) -> None:
    """The weights of a source that gave none are 1, whatever was in their memory, and partial sums of a batch that was
    put together by hand multiply by them; one row less room than is needed sets the flag of lost rows."""
    cfg = EPConfig(2048, 16 * len(devices), 4, MANY, len(devices), "bf16", 20)
    with connected(cfg, devices) as ranks:
        for turn, (tokens, routing) in enumerate(TOKENS):
            inputs = make_inputs(cfg, counts_of(tokens, len(devices), turn), routing, turn)
            weights = [None if (rank + turn) % 2 else one.router_weights for rank, one in enumerate(inputs)]
            xs, ids = [one.x for one in inputs], [one.topk_ids for one in inputs]
            expected = reference.dispatch(cfg, xs, ids, None, weights)
            rows = expert_rows(expected, cfg.hidden, turn)
            sent = [
                [None if part is None else part.to(ep.device) for part in parts]
                for ep, *parts in zip(ranks, xs, ids, weights, strict=True)
            ]
            for less in (0, 1):
                outs = [
                    ep.allocate(max(int(want.num_rows) - less, 0)) for ep, want in zip(ranks, expected, strict=True)
                ]
                for out in outs:
                    assert out.weights is not None
                    out.weights.fill_(torch.nan)
                torch.cuda.synchronize()
                batches = [ep.dispatch(*given, out=out) for ep, given, out in zip(ranks, sent, outs, strict=True)]
                streams = [ep.stream if ep.shares_device else None for ep in ranks]
                counts = [batch.counts_to_host(stream) for batch, stream in zip(batches, streams, strict=True)]
                for ep, batch, count, want in zip(ranks, batches, counts, expected, strict=True):
                    lost = less and int(want.num_rows) > 0
                    assert count.wait().num_rows == (0 if lost else int(want.num_rows))
                    assert count.row_counts.tolist() == [0 if lost else own for own in want.row_counts.tolist()]
                    with pytest.raises(EPInputError) if lost else nullcontext():
                        ep.synchronize()
                    assert batch.any_lost().tolist() == [bool(lost)]
                if less:
                    continue
                outputs = [row.to(ep.device) for row, ep in zip(rows, ranks, strict=True)]
                made = [of_tensors(batch) for batch in batches]
                sums = [ep.combine(*pair, mode="partial") for ep, *pair in zip(ranks, outputs, made, strict=True)]
                for ep in ranks:
                    ep.synchronize()
                factors = [torch.ones(i.shape) if w is None else w for i, w in zip(ids, weights, strict=True)]
                for rank, want in enumerate(reference.combine(cfg, rows, expected, factors, "partial")):
                    assert_bits(sums[rank], want, f"{tokens} tokens, rank {rank}")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_skip_a2a(devices: list[str], fmt: str, shared: bool) -> None:
    """Replicated tokens: every rank serves its own experts and returns its part of the sums."""
    ranks = len(devices)
    cfg = EPConfig(2048, 48 * ranks, 8, MANY, ranks, fmt, 20, fused_shared_expert=shared, skip_a2a=True)
    with connected(cfg, devices) as communicators:
        for turn, tokens in enumerate((0, 1, 32, MANY)):
            one = make_inputs(cfg, [tokens] * ranks, ("uniform", "masked")[turn % 2], turn)[0]
            for split in (False, True):
                check_round(communicators, [one] * ranks, RoundOptions(split, dtype=DTYPES[turn % 3], seed=turn))


def test_partial_sums_of_skip_a2a_add_up_to_the_layer() -> None:
    """The ranks' float32 results add up to what one rank with all experts returns, to rounding."""
    sums = []
    for alone in (True, False):
        ranks = 4 if alone else 1
        cfg = EPConfig(2048, 64, 4, 64, ranks, "bf16", 20, fused_shared_expert=True, skip_a2a=alone)
        inputs = make_inputs(cfg, [64] * ranks, "uniform", 3)[0]
        x, ids, weights = inputs.x.cuda(), inputs.topk_ids.cuda(), inputs.router_weights.cuda()
        total = torch.zeros(64, 2048, device="cuda")
        with connected(cfg, ["cuda:0"] * ranks) as communicators:
            for communicator in communicators:
                batch = communicator.dispatch(x, ids, weights)
                part = communicator.combine(batch.tokens, batch, mode="exact", dtype=torch.float32)
                communicator.synchronize()  # ranks that share a GPU work on streams of their own
                total += part
        sums.append(total)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [40, MANY])
def test_ids_of_64_bits(devices: list[str], tokens: int) -> None:
    """The same bytes as with 32, in dispatch and in combine; an id beyond 32 bits counts as its lower half, and is
    reported."""
    ranks = len(devices)
    cfg = EPConfig(2048, 8 * ranks, 4, tokens, ranks, "nvfp4_row", 20)
    last = ranks - 1
    inputs = make_inputs(cfg, counts_of(tokens, ranks, -last % 3), "masked", 4)
    with connected(cfg, devices) as communicators:
        found: list[list[dict[str, torch.Tensor]]] = []
        for wide in (False, True):
            outs = [poisoned_buffers(communicator, cfg.max_rows) for communicator in communicators]
            ids = [one.topk_ids.long() if wide else one.topk_ids for one in inputs]
            if wide:
                ids[last][0, 1] += 3 << 32
            batches = [
                c.dispatch(one.x.to(c.device), own.to(c.device), one.router_weights.to(c.device), out=out)
                for c, one, own, out in zip(communicators, inputs, ids, outs, strict=True)
            ]
            for communicator in communicators[: last if wide else ranks]:
                communicator.synchronize()
            if wide:
                with pytest.raises(EPInputError, match=r"topk_ids\.flatten\(\)\[1\] = -2147483648 or beyond 32 bits"):
                    communicators[last].synchronize()
            kept = [{name: t.clone() for name, t in tensors_of(out).items() if t is not None} for out in outs]
            for one in kept:
                one["headers"][:, HeaderWord.ROUND] = 0  # another one in each call
            rows = [torch.ones(out.tokens.shape[0], 2048, device=out.tokens.device).bfloat16() for out in outs]
            torch.cuda.synchronize()
            for mode in ("exact", "partial"):
                sums = [c.combine(row, b, mode=mode) for c, row, b in zip(communicators, rows, batches, strict=True)]
                for communicator in communicators:
                    communicator.synchronize()
                kept = [one | {f"{mode} sums": total} for one, total in zip(kept, sums, strict=True)]
            found.append(kept)
        for narrow, wide in zip(*found, strict=True):
            for name, tensor in narrow.items():
                assert torch.equal(tensor.view(torch.uint8), wide[name].view(torch.uint8)), name


def test_distributed_operations(devices: list[str]) -> None:
    """The list forms launch on all ranks and give what the reference gives."""
    from cute_ep import reference

    for fmt, operation in (
        ("bf16", DistributedEPDispatch),
        ("fp8", DistributedEPDispatchFP8),
        ("mxfp4", DistributedEPDispatchMXFP4),
        ("nvfp4", DistributedEPDispatchNVFP4),
    ):
        cfg = EPConfig(2048, 64, 4, 64, len(devices), fmt, 20)
        inputs = make_inputs(cfg, [64] * len(devices), "uniform", 1)
        with connected(cfg, devices) as communicators:
            xs, ids, weights = (
                [getattr(one, name).to(c.device) for one, c in zip(inputs, communicators, strict=True)]
                for name in ("x", "topk_ids", "router_weights")
            )
            with pytest.raises(EPInputError, match="topk_ids"):
                operation(communicators)(xs, ids[:-1], weights)
            outs = [communicator.allocate() for communicator in communicators]
            for out in outs:
                for tensor in tensors_of(out).values():
                    if tensor is not None:
                        tensor.view(torch.uint8).fill_(0xA5)
            batches = operation(communicators)(xs, ids, weights, outs=outs)
            for communicator in communicators:
                communicator.synchronize()
            on_one = [[tensor.to(xs[0].device) for tensor in column] for column in (xs, ids, weights)]
            expected = reference.dispatch(cfg, on_one[0], on_one[1], None, on_one[2])
            for rank, (got, want) in enumerate(zip(batches, expected, strict=True)):
                check_dispatched(got, want, cfg, rank)
            rows = [torch.ones(int(b.num_rows), 2048, device=b.tokens.device).bfloat16() for b in batches]
            sums = DistributedEPCombine(communicators)(rows, batches, mode="exact", dtype=torch.float32)
            for communicator, got, weight in zip(communicators, sums, weights, strict=True):
                communicator.synchronize()
                torch.testing.assert_close(got, weight.sum(dim=1, keepdim=True).expand_as(got), rtol=1e-6, atol=0)
    with pytest.raises(EPConfigError, match="serves bf16"):
        DistributedEPDispatch(communicators)
