"""Two micro-batches (`--enable-dbo`) of a layer on CPU ranks, on stubs: each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.integrations.upstream import installed
from tests.integrations.vllm_parts import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    RANKS,
    SLOTS,
    TMAX,
    Layer,
    MicroBatch,
    apply_blocks,
    apply_experts,
    arguments_of,
    expected_sum,
    import_adapter,
    run,
    run_hook,
    take_turns,
)

TOKENS = (9, 0, 7), (3, 5, 0)
"""By micro-batch, of each rank."""
STEPS = 2


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed("vllm", "cute_ep.integrations.vllm") as made:
        import_adapter(made, monkeypatch)
        yield


def micro_batch(one: Layer, steps: list[RankInputs], outputs: list[torch.Tensor]) -> MicroBatch:
    """Layers one after the other, with the calls of vLLM's modular kernel."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    mine = torch.arange(EXPERTS) // LOCAL == one.rank
    for mine_now in steps:
        run_hook()
        hook, receive = one.layer.prepare_async(**arguments_of(mine_now))
        yield hook
        rows, _, meta, ids, _ = receive()
        in_blocks = ids is None
        counts = meta.expert_num_tokens
        made = apply_blocks(rows, counts, one.rank * LOCAL) if in_blocks else apply_experts(rows, ids, mine)
        output = torch.full((len(mine_now.x), HIDDEN), torch.nan, dtype=torch.bfloat16)
        outputs.append(output)
        hook, receive = one.layer.finalize_async(output, made, None, None, False, TopKWeightAndReduceDelegate())
        yield hook
        receive()


@pytest.mark.parametrize(
    "options",
    [{"batched": True}, {"mode": "exact"}, {"mode": "partial", "static_rows": 0}],
    ids=["blocks", "rows", "counted rows"],
)
@pytest.mark.parametrize("routing", ["masked", "one_rank"])
def test_micro_batches_get_their_own_sums(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], routing: str
) -> None:
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, TMAX, RANKS)
    given = [
        [make_inputs(cfg, tokens, routing, STEPS * number + step) for step in range(STEPS)]
        for number, tokens in enumerate(TOKENS)
    ]

    def program(one: Layer) -> list[list[torch.Tensor]]:
        outputs: list[list[torch.Tensor]] = [[] for _ in TOKENS]
        own = ([step[one.rank] for step in steps] for steps in given)
        take_turns(*(micro_batch(one, *both) for both in zip(own, outputs, strict=True)))
        return outputs

    for rank, outputs in enumerate(run(monkeypatch, program, **options)):
        for number, (steps, made) in enumerate(zip(given, outputs, strict=True)):
            assert len(made) == STEPS
            for step, output in zip(steps, made, strict=True):
                assert_bits(
                    output,
                    expected_sum(step[rank], options.get("mode", "partial")),
                    f"rank {rank}, micro-batch {number}",
                )
