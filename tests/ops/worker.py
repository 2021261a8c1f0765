"""One rank in a process of its own: `python -m tests.ops.worker STORE RANK WORLD CHECK`; on GPUs if there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist

import cute_ep.ops
from cute_ep.ops.registry import communicator_of
from cute_ep.runtime.process_connection import connect
from cute_ep.testing.compare import assert_bits
from tests.ops.layer import check, given, gradients, layer
from tests.ops.patterns import PATTERNS, run
from tests.ops.training import CFG, STEPS, TOKENS, train_dense, train_over_ops
from tests.processes import join_group

NOISE = 0.002
"""By how much losses of the two models may differ, as a part of the loss. The largest of 30 was 0.0003 on CPUs."""


def has_the_gradients_of_a_dense_layer(rank: int, comm: str) -> None:
    for routing in ("uniform", "masked", "repeated", "one_rank"):
        one = given(CFG, TOKENS, routing)
        check(one, rank, gradients(one, rank, comm))
        check(one, rank, gradients(one, rank, comm, "partial"))


def trains_as_a_dense_model(rank: int, comm: str) -> None:
    device = communicator_of(comm).device
    wanted, ids = train_dense(device)
    losses, _ = train_over_ops(rank, comm, dist.all_reduce, ids[rank :: len(TOKENS)])
    worst = max(abs(one - other) / other for one, other in zip(losses, wanted, strict=True))
    said = f"rank {rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, dense {wanted[-1]:.4f}, off by {worst}"
    sys.stderr.write(f"{said}\n")
    assert losses[-1] < losses[0] / 2 and len(losses) == STEPS and worst < NOISE, said


def compiles_to_the_same_bits(rank: int, comm: str) -> None:
    one = given(CFG, TOKENS, "masked")
    want = gradients(one, rank, comm)
    torch._inductor.config.force_disable_caches = True
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        got = gradients(one, rank, comm, call=torch.compile(layer, backend=backend, fullgraph=True))
        for number, (part, wanted) in enumerate(zip(got, want, strict=True)):
            assert_bits(part, wanted, f"rank {rank}, {backend}, part {number}")


def compiled_ranks_agree(rank: int, comm: str) -> None:
    """With other numbers of tokens on each rank, none and one among them: no rank waits for another's call, and all
    results have the bits of eager code."""
    torch._inductor.config.force_disable_caches = True
    with connect(replace(CFG, row_alignment=16)) as other:
        communicators = [communicator_of(comm), other]
        for name, pattern in PATTERNS.items():
            torch._dynamo.reset()
            compiled = {"eager": pattern, "aot_eager": torch.compile(pattern, backend="aot_eager", fullgraph=True)}
            compiled["inductor"] = torch.compile(pattern, fullgraph=True)
            for counts in ((24, 0), (1, 7), (2, 1), (0, 0)):
                want_calls, want = run(pattern, counts[rank], communicators)
                for backend, call in compiled.items():
                    calls, made = run(call, counts[rank], communicators)
                    assert calls == want_calls, (name, backend, counts)
                    for part, wanted in zip(made, want, strict=True) if backend != "inductor" else ():
                        assert_bits(part, wanted, f"rank {rank}, {name}, {backend}, {counts}")
            for ep in communicators:
                ep.synchronize()
        dist.barrier()


ON_GPUS: dict[str, Callable[[int, str], Any]] = {compiled_ranks_agree.__name__: compiled_ranks_agree}
"""Checks that take minutes on two cores."""
CHECKS: dict[str, Callable[[int, str], Any]] = {
    one.__name__: one
    for one in (has_the_gradients_of_a_dense_layer, trains_as_a_dense_model, compiles_to_the_same_bits)
}


def main(store: Path, rank: int, world: int, name: str) -> None:
    join_group(store, rank, world)
    with connect(CFG) as ep:
        (CHECKS | ON_GPUS)[name](rank, cute_ep.ops.register(ep))
        ep.synchronize()
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
