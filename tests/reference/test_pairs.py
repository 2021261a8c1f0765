"""The ranks of one combine return rows of one dispatch round, whatever their batches were put together from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cute_ep.ops
from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import changed
from tests.ops.ranks import on_all_ranks
from tests.reference.ranks import at_once, dispatch_all, processes, rows_for, small

READ = ("tokens", "row_offsets", "row_map", "headers", "weights", "num_rows")


def of_tensors(batch: Dispatched) -> Dispatched:
    """The batch as `cute_ep.ops` and adapters put it together."""
    tensors = {name: getattr(batch, name) for name in READ}
    own = {
        "topk_ids": batch.topk_ids,
        "router_weights": batch.router_weights,
        "return_slices_log2": batch.return_slices_log2,
    }
    return Dispatched.of_tensors(tensors, rank=batch.rank, **own)


KINDS: dict[str, Callable[[Dispatched], Dispatched]] = {
    "as it was made": lambda batch: batch,
    "derived": lambda batch: batch.derived(row_map=batch.row_map.clone()),
    "without its rows": lambda batch: batch.without_rows(),
    "of tensors": of_tensors,
    "of copies": lambda batch: of_tensors(changed(batch, headers=batch.headers.clone())),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_a_batch_of_another_round_is_refused_by_both_rounds(kind: Callable) -> None:
    """Before anything is sent: the rank then combines the right one."""
    cfg = small()
    communicators, first, inputs = dispatch_all(cfg)
    second = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows = rows_for(first, cfg)
    got = [communicators[2].combine(rows[2], kind(first[2]), mode="partial")]
    for number in (1, 0):
        rule = "dispatched = batch of dispatch round 2: must be that of round 1, as in the combine of rank"
        with pytest.raises(EPInputError, match=f"{rule} {number + 1}; all ranks"):
            communicators[number].combine(rows[number], kind(second[number]), mode="partial")
        got.insert(0, communicators[number].combine(rows[number], kind(first[number]), mode="partial"))
    for rank, want in enumerate(reference.combine(cfg, rows, first, mode="partial")):
        communicators[rank].synchronize()
        assert_bits(got[rank], want, f"rank {rank}")


@every_kind
def test_processes_are_told_when_they_receive_and_go_on(kind: Callable) -> None:
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    with processes(cfg) as communicators:

        def dispatch(rank: int) -> list[Dispatched]:
            given = inputs[rank]
            return [communicators[rank].dispatch(given.x, given.topk_ids, given.router_weights) for _ in range(2)]

        batches = at_once(range(3), dispatch)
        rows = rows_for([batches[rank][0] for rank in range(3)], cfg)

        def combine(rank: int, number: int) -> torch.Tensor:
            return communicators[rank].combine(rows[rank], kind(batches[rank][number]), mode="partial")

        errors = at_once(range(3), lambda rank: combine(rank, int(rank == 1)))
        for rank, (own, theirs, peer) in enumerate([(1, 2, 1), (2, 1, 0), (1, 2, 1)]):
            assert isinstance(errors[rank], EPInputError)
            rule = f"dispatch round {own}: must be that of round {theirs}, as in the combine of rank {peer}"
            assert rule in str(errors[rank])
        sums = at_once(range(3), lambda rank: combine(rank, 0))
        for rank, want in enumerate(reference.combine(cfg, rows, [one[0] for one in batches], mode="partial")):
            assert_bits(sums[rank], want, f"rank {rank}")


@pytest.mark.parametrize("into", [False, True], ids=["new memory", "given memory"])
def test_batches_of_ops_are_compared(into: bool) -> None:
    cfg = small(dispatch_format="bf16")
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)

    def program(rank: int, comm: str) -> str:
        given, batches = inputs[rank], []
        for _ in range(2):
            arguments = given.x, given.topk_ids, given.router_weights, comm
            if into:
                batches.append(cute_ep.ops.dispatch_into(*arguments, cute_ep.DispatchBuffers.allocate(cfg, "cpu")))
            else:
                batches.append(cute_ep.ops.dispatch(*arguments))
        batch = batches[rank == 1]
        with pytest.raises(EPInputError, match="must be that of round") as caught:
            cute_ep.ops.combine(batch.tokens, batch, "partial")
        cute_ep.ops.combine(batches[0].tokens, batches[0], "partial")
        return str(caught.value)

    told = on_all_ranks(cfg, program)[0]
    for rank, (own, theirs) in enumerate([(1, 2), (2, 1), (1, 2)]):
        assert f"dispatch round {own}: must be that of round {theirs}" in told[rank]


def test_rounds_that_are_not_known_are_not_compared() -> None:
    """Those of batches that `reference.dispatch` made, or that have no number in their headers."""
    cfg = small()
    communicators, first, inputs = dispatch_all(cfg)
    second = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows = rows_for(first, cfg)
    headers = second[1].headers.clone()
    headers[:, HeaderWord.ROUND] = 0
    batches = [first[0], of_tensors(changed(second[1], headers=headers)), first[2]]
    got = [
        one.combine(row, batch, mode="partial") for one, row, batch in zip(communicators, rows, batches, strict=True)
    ]
    for rank, want in enumerate(reference.combine(cfg, rows, first, mode="partial")):
        assert_bits(got[rank], want, f"rank {rank}")


def test_the_reference_refuses_batches_of_different_rounds() -> None:
    cfg = small()
    communicators, first, inputs = dispatch_all(cfg)
    second = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows = rows_for(first, cfg)
    rule = r"dispatched = batches of dispatch rounds \{0: 1, 1: 2, 2: 1\}, by rank: must be of the same round"
    with pytest.raises(EPInputError, match=rule):
        reference.combine(cfg, rows, [first[0], second[1], first[2]], mode="partial")


@pytest.mark.parametrize("skip", [False, True])
def test_rounds_are_counted_from_one(skip: bool) -> None:
    """In the header of every source; ranks that exchange nothing count by themselves, and are not compared."""
    cfg = small(skip_a2a=skip, num_experts=6, dispatch_format="bf16")
    communicators = connect_reference(cfg)
    (given, *_) = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    for number in range(1, 4):
        batches = [one.dispatch(given.x, given.topk_ids, given.router_weights) for one in communicators]
        for batch in batches:
            assert batch.headers[:, HeaderWord.ROUND].tolist() == [number] * cfg.peers
    if skip:
        alone = communicators[0].dispatch(given.x, given.topk_ids, given.router_weights)
        assert alone.headers[0, HeaderWord.ROUND] == 4
        for one, batch in zip(communicators, [alone, *batches[1:]], strict=True):
            one.combine(batch.tokens, batch, mode="partial")
            one.synchronize()
