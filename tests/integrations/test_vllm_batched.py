"""vLLM's batched format on CPU ranks, on stubs of its classes: blocks and sums against loops over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs
from tests.integrations.upstream import differences, installed
from tests.integrations.vllm_parts import (
    EXPERTS,
    FP8,
    HIDDEN,
    LOCAL,
    RANKS,
    SLOTS,
    TMAX,
    Layer,
    expected_rows,
    expected_sum,
    experts_of,
    finalize,
    import_adapter,
    inputs,
    prepare,
    row_of,
    run,
    say_tokens,
)

S = RANKS * TMAX
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({}, "bf16"),
    "fp8": (FP8, "fp8"),
    "exponents": ({**FP8, "packed": True}, "fp8_pow2"),
}
"""By name experts, and the format that rows come in."""

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def stubs(monkeypatch: Patch) -> Iterator[dict[str, ModuleType]]:
    with installed("vllm", "cute_ep.integrations.vllm") as made:
        import_adapter(made, monkeypatch)
        yield made


def apply_experts(rows: torch.Tensor, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """[L, S, hidden] outputs; NaN behind the last row of a block, which combine must not read."""
    out = torch.full(rows.shape, torch.nan, dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = row_of(rows[expert, :count], rank * LOCAL + expert)
    return out


def output_of(given: RankInputs) -> torch.Tensor:
    return torch.full((len(given.x), HIDDEN), torch.nan, dtype=torch.bfloat16)


def one_round(one: Layer, given: list[RankInputs], how: str) -> torch.Tensor:
    mine = given[one.rank]
    rows, _, meta, *_ = prepare(one, mine)
    output = output_of(mine)
    finalize(one, output, apply_experts(rows, meta.expert_num_tokens, one.rank), how)
    return output


def in_blocks(rank: int, given: list[RankInputs]) -> list[list[torch.Tensor]]:
    """The tokens' rows of each local expert of a rank, by source rank, token."""
    found = expected_rows(rank, given)
    return [[row for expert, row in found if expert == rank * LOCAL + local] for local in range(LOCAL)]


# ---- prepare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", ["masked", "one_rank"])
def test_each_expert_gets_its_block(monkeypatch: Patch, kind: str, routing: str) -> None:
    given, (quant, fmt) = inputs(routing), KINDS[kind]

    def program(one: Layer) -> tuple:
        receive = one.layer.prepare_async(
            given[one.rank].x, given[one.rank].router_weights, given[one.rank].topk_ids.long(), EXPERTS, None, False,
            experts_of(**quant).quant_config, False,
        )  # fmt: skip
        return receive()

    for rank, (rows, scales, meta, ids, weights) in enumerate(run(monkeypatch, program, quant, batched=True)):
        want = in_blocks(rank, given)
        assert rows.shape == (LOCAL, S, HIDDEN) and ids is None and weights is None
        assert meta.expert_num_tokens_cpu is None and meta.expert_num_tokens.dtype == torch.int32
        assert meta.expert_num_tokens.tolist() == [len(one) for one in want]
        if scales is not None:
            assert scales.shape == (LOCAL, S, HIDDEN // (512 if kind == "exponents" else 128)) and scales.stride(1) == 1
        for expert, block in enumerate(want):
            x = torch.stack(block) if block else given[0].x[:0]
            payload, factors, _ = reference.quantize(x, fmt)
            assert_bits(rows[expert, : len(block)], payload, f"rank {rank}, expert {expert}")
            if factors is None:
                assert scales is None
                continue
            got = scales[expert, : len(block)].clone(memory_format=torch.contiguous_format)
            if kind == "exponents":
                got = (got.view(torch.uint8).int() << 23).view(torch.float32)
            assert_bits(got, factors, f"rank {rank}, scales of expert {expert}")


@pytest.mark.parametrize("kind", ["deferred", "nvfp4"])
def test_experts_that_quantise_get_bfloat16(monkeypatch: Patch, kind: str) -> None:
    given = inputs("uniform")
    quant = {**FP8, "expects_unquantized_inputs": True} if kind == "deferred" else {"quant_dtype": "nvfp4"}

    def program(one: Layer) -> tuple:
        return prepare(one, given[one.rank], quant, defer_input_quant=kind == "deferred")

    for rank, (rows, scales, *_) in enumerate(run(monkeypatch, program, quant, batched=True)):
        assert scales is None
        for block, want in zip(rows, in_blocks(rank, given), strict=True):
            for row, token in zip(block, want, strict=False):
                assert_bits(row, token, "row")


@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
def test_other_rows_are_quantised_in_their_blocks(monkeypatch: Patch, per_row: bool) -> None:
    """With one scale factor for all rows, memory behind the last row of a block must not count."""
    from cute_ep.integrations.vllm import layer as layers

    quant = {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": per_row}
    given = inputs("one_rank")

    def kernel(rows: torch.Tensor, scale: object, **options: Any) -> tuple:
        size = rows.float().abs()
        return rows.to(torch.float8_e4m3fn), size.amax(1, keepdim=True) if per_row else size.amax().view(1)

    monkeypatch.setattr(layers, "moe_kernel_quantize_input", kernel)
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocate(*a, **k).fill_(100))
    made = run(monkeypatch, lambda one: prepare(one, given[one.rank], quant), quant, batched=True)
    for rank, (rows, scales, *_) in enumerate(made):
        want = in_blocks(rank, given)
        assert rows.shape == (LOCAL, S, HIDDEN) and scales.shape == (LOCAL, S if per_row else 1, 1)
        largest = max((float(row.abs().max()) for block in want for row in block), default=0.0)
        for expert, block in enumerate(want):
            assert per_row or scales[expert].item() == largest
            for place, row in enumerate(block):
                assert_bits(rows[expert, place], row.to(torch.float8_e4m3fn), "row")
                assert not per_row or scales[expert, place].item() == float(row.abs().max())


# ---- finalize


@pytest.mark.parametrize("how", ["finalize", "finalize_async"])
@pytest.mark.parametrize("mode", ["partial", "exact"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "one_rank"])
@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["one node", "nodes"])
def test_outputs_are_weighted_sums(
    monkeypatch: Patch, ranks_per_node: int | None, routing: str, mode: str, how: str
) -> None:
    """Nodes of one rank change no bit."""
    options = {"mode": mode, "ranks_per_node": ranks_per_node}
    rounds = [inputs(routing, seed) for seed in (1, 2)]

    def program(one: Layer) -> list[torch.Tensor]:
        return [one_round(one, given, how) for given in rounds]

    for rank, outputs in enumerate(run(monkeypatch, program, batched=True, **options)):
        for output, given in zip(outputs, rounds, strict=True):
            assert_bits(output, expected_sum(given[rank], mode), f"rank {rank}")


def test_inputs_are_weighted_once(monkeypatch: Patch) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> torch.Tensor:
        mine = given[one.rank]
        first = RankInputs(mine.x, mine.topk_ids[:, :1], mine.router_weights[:, :1])
        rows, _, meta, *_ = prepare(one, first, apply_router_weight_on_input=True)
        output = output_of(mine)
        finalize(one, output, apply_experts(rows, meta.expert_num_tokens, one.rank))
        return output

    for rank, output in enumerate(run(monkeypatch, program, top_k=1, batched=True)):
        for token, row in enumerate(output):
            weight, expert = given[rank].router_weights[token, 0].bfloat16(), int(given[rank].topk_ids[token, 0])
            assert_bits(row, row_of(given[rank].x[token] * weight, expert) + 0, f"rank {rank}, token {token}")


def test_frames_have_as_many_rows_as_vllm_says_a_rank_has_tokens(monkeypatch: Patch) -> None:
    """Of which none may have more."""
    metadata, many = say_tokens(monkeypatch), inputs("uniform")
    metadata.num_tokens_across_dp_cpu = torch.tensor([8, 0, 7])
    given = [RankInputs(one.x[:8], one.topk_ids[:8], one.router_weights[:8]) for one in many]

    def program(one: Layer) -> torch.Tensor:
        rows, _, meta, *_ = prepare(one, given[one.rank])
        output = output_of(given[one.rank])
        assert one.layer._batches[0][0].frame == 8 < TMAX
        finalize(one, output, apply_experts(rows, meta.expert_num_tokens, one.rank))
        if one.rank == 0:
            with pytest.raises(EPInputError, match="must not exceed 8, the most that vLLM says a rank has"):
                prepare(one, many[0])
        return output

    for rank, output in enumerate(run(monkeypatch, program, batched=True, ranks_per_node=1)):
        assert_bits(output, expected_sum(given[rank], "partial"), f"rank {rank}")


# ---- what vLLM asks, and refusals


def test_vllm_is_told_the_sizes_of_blocks(monkeypatch: Patch, stubs: dict[str, ModuleType]) -> None:
    def program(one: Layer) -> None:
        layer, kernel = one.layer, stubs["vllm.model_executor.layers.fused_moe.modular_kernel"]
        assert layer.activation_format is kernel.FusedMoEActivationFormat.BatchedExperts  # type: ignore[attr-defined]
        assert layer.max_num_tokens_per_rank() * layer.num_dispatchers() == S
        assert layer.output_is_reduced() and layer.supports_async()
        assert layer.topk_indices_dtype() is None
        assert not differences(type(layer), kernel.FusedMoEPrepareAndFinalizeModular)  # type: ignore[attr-defined]

    run(monkeypatch, program, batched=True)


def test_experts_that_sum_are_refused(monkeypatch: Patch) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> None:
        rows, *_ = prepare(one, given[one.rank])
        with pytest.raises(EPInputError, match="weight_and_reduce_impl = object: must be TopKWeightAndReduceDelegate"):
            one.layer.finalize(output_of(given[one.rank]), rows, None, None, False, object())
        finalize(one, output_of(given[one.rank]), torch.zeros_like(rows))

    run(monkeypatch, program, batched=True)


def test_prepare_names_what_to_change(monkeypatch: Patch) -> None:
    given = inputs("uniform")
    many = {"a1": torch.zeros(13, HIDDEN).bfloat16(), "topk_ids": torch.zeros(13, SLOTS).int()}

    def program(one: Layer) -> None:
        for changes, rule in (
            (many, "a1.shape.0. = 13: must not exceed 12, --max-num-batched-tokens"),
            ({"a1": torch.zeros(2, HIDDEN).half()}, "start vLLM with --dtype bfloat16"),
            ({"defer_input_quant": True}, "must be as it was when the layer was made"),
        ):
            with pytest.raises(EPInputError, match=rule):
                prepare(one, given[one.rank], **changes)

    run(monkeypatch, program, FP8, batched=True)


@pytest.mark.parametrize(
    ("quant", "hidden", "rule"),
    [
        ({"quant_dtype": "mxfp8"}, 256, "quant_dtype = 'mxfp8': has no batched format"),
        ({**FP8, "packed": True}, 384, "hidden = 384: must be a multiple of 512 on this GPU"),
        (
            {**FP8, "packed": True},
            512,
            "2 ranks x 5 tokens = 10: must be a multiple of 4 on this GPU; change --max-num-b",
        ),
        ({"padding": 64}, 256, r"output_hidden_dim\(256\) = 192: must be 256, .*; choose other experts"),
    ],
    ids=["format", "hidden", "tokens", "padding"],
)
def test_experts_that_blocks_are_not_for_are_refused(quant: dict, hidden: int, rule: str) -> None:
    from cute_ep.integrations.vllm.batched import CuteEPBatched

    manager: Any = SimpleNamespace(world_size=2)
    layer = CuteEPBatched(manager, (hidden, 4, 2, 5))
    with pytest.raises(EPConfigError, match=rule):
        layer.post_init_setup(experts_of(**quant))
