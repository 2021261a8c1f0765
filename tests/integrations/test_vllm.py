"""vLLM's prepare and finalize on CPU ranks, on stubs of its classes: rows, ids and sums against loops over tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs
from tests.integrations.upstream import installed
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
    quantised,
    row_of,
    run,
    say_tokens,
)

Patch = pytest.MonkeyPatch


@pytest.fixture
def stubs(monkeypatch: Patch) -> Iterator[dict[str, ModuleType]]:
    with installed("vllm", "cute_ep.integrations.vllm") as made:
        import_adapter(made, monkeypatch)
        yield made


def padded_places(experts: list[int], multiple: int) -> list[int]:
    """Places of rows of these experts, ascending, where each expert begins at a multiple."""
    places: list[int] = []
    for number, expert in enumerate(experts):
        new = number and expert != experts[number - 1]
        after = places[-1] + 1 if places else 0
        places.append(-(-after // multiple) * multiple if new else after)
    return places


def apply_experts(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, hidden] outputs; NaN where a row is of another rank's expert, as combine must not read it."""
    out = torch.full((len(rows), HIDDEN), float("nan"), dtype=torch.bfloat16)
    for place, expert in enumerate(ids[:, 0].tolist()):
        out[place] = row_of(rows[place], expert)
    return out


def whole(one: Layer, given: list[RankInputs], how: str) -> tuple:
    """A whole round: (what prepare returned, the output)."""
    mine = given[one.rank]
    made = prepare(one, mine)
    output = torch.full((len(mine.x), HIDDEN), float("nan"), dtype=torch.bfloat16)
    finalize(one, output, apply_experts(made[0], made[3]), how)
    return made, output


# ---- a layer


@pytest.mark.parametrize("static_rows", [10_000, 0], ids=["static", "counted"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_get_each_row_once_with_its_expert(
    stubs: dict, monkeypatch: Patch, routing: str, static_rows: int
) -> None:
    given = inputs(routing)
    got = run(monkeypatch, lambda one: whole(one, given, "finalize")[0], static_rows=static_rows)
    for rank, (rows, scales, meta, ids, weights) in enumerate(got):
        want = expected_rows(rank, given)
        assert len(rows) == (RANKS * TMAX * SLOTS if static_rows else len(want)) and scales is None
        assert [int(one) for one in ids[: len(want), 0]] == [expert for expert, _ in want]
        for row, (_, token) in zip(rows, want, strict=False):
            assert_bits(row, token, "row")
        assert not ((ids[len(want) :] >= rank * LOCAL) & (ids[len(want) :] < (rank + 1) * LOCAL)).any()
        assert (ids >= 0).all() and ids.dtype == torch.int64 and ids.shape == weights.shape == (len(rows), 1)
        assert weights.dtype == torch.float32 and (weights == 1).all()
        counts = [sum(expert == rank * LOCAL + local for expert, _ in want) for local in range(LOCAL)]
        assert meta.expert_num_tokens.tolist() == counts and meta.expert_num_tokens.dtype == torch.int32
        cpu = meta.expert_num_tokens_cpu
        assert cpu is None if static_rows else (cpu.tolist() == counts and cpu.dtype == torch.int32)


@pytest.mark.parametrize("how", ["finalize", "finalize_async"])
@pytest.mark.parametrize("mode", ["partial", "exact"])
@pytest.mark.parametrize("static_rows", [10_000, 0], ids=["static", "counted"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["one node", "nodes"])
def test_outputs_are_weighted_sums(
    stubs: dict, monkeypatch: Patch, ranks_per_node: int | None, routing: str, static_rows: int, mode: str, how: str
) -> None:
    """Nodes of one rank change no bit."""
    rounds = [inputs(routing, seed) for seed in (1, 2, 3)]
    options = {"mode": mode, "static_rows": static_rows, "ranks_per_node": ranks_per_node}
    got = run(monkeypatch, lambda one: [whole(one, given, how)[1] for given in rounds], **options)
    for rank, outputs in enumerate(got):
        for output, given in zip(outputs, rounds, strict=True):
            assert_bits(output, expected_sum(given[rank], mode), f"rank {rank}")


def test_prepare_async_returns_what_prepare_does(stubs: dict, monkeypatch: Patch) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> tuple:
        mine = given[one.rank]
        quant = experts_of().quant_config
        receive = one.layer.prepare_async(
            mine.x, mine.router_weights, mine.topk_ids, EXPERTS, None, False, quant, False
        )
        made = receive()
        finalize(one, torch.empty(len(mine.x), HIDDEN, dtype=torch.bfloat16), apply_experts(made[0], made[3]))
        return made

    for rank, (rows, _, _, ids, _) in enumerate(run(monkeypatch, program)):
        assert ids.dtype == torch.int32
        for row, (_, token) in zip(rows, expected_rows(rank, given), strict=False):
            assert_bits(row, token, "row")


def test_experts_may_write_to_the_output(stubs: dict, monkeypatch: Patch) -> None:
    """vLLM has them do so where both have the same shape: here each rank has three tokens and gets three rows."""
    x = torch.randn(RANKS, 3, HIDDEN).bfloat16()
    ids = torch.stack([torch.full((3, SLOTS), -1) for _ in range(RANKS)])
    ids[:, :, 1] = torch.arange(0, EXPERTS, LOCAL)

    def program(one: Layer) -> torch.Tensor:
        weights = torch.full((3, SLOTS), 2.0)
        rows, _, _, where, _ = prepare(one, RankInputs(x[one.rank], ids[one.rank], weights))
        output = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        assert rows.shape == output.shape
        output.copy_(apply_experts(rows, where))
        finalize(one, output, output, "finalize_async")
        return output

    for rank, output in enumerate(run(monkeypatch, program, static_rows=0)):
        want = torch.stack([row_of(x[rank, token], token * LOCAL).float() * 2 for token in range(3)])
        assert_bits(output, want.bfloat16(), f"rank {rank}")


@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["one node", "nodes"])
def test_room_is_for_the_most_tokens_that_vllm_says_a_rank_has(
    stubs: dict, monkeypatch: Patch, ranks_per_node: int | None
) -> None:
    """Over nodes it is also the frame."""
    metadata = say_tokens(monkeypatch)
    given = inputs("uniform")

    def program(one: Layer) -> int:
        one.layer._sp_size = 2
        metadata.num_tokens_across_dp_cpu = torch.tensor([24, 0, 13])
        made = prepare(one, given[one.rank])
        (batch, _) = one.layer._batches[0]
        assert batch.frame == 12
        finalize(one, torch.empty_like(given[one.rank].x), apply_experts(made[0], made[3]))
        one.group.on_all_ranks(lambda: None)
        if one.rank == 0:
            metadata.num_tokens_across_dp_cpu = torch.tensor([22, 0, 13])
            with pytest.raises(EPInputError, match="must not exceed 11"):
                prepare(one, given[0])
        return len(made[0])

    assert run(monkeypatch, program, ranks_per_node=ranks_per_node) == [TMAX * RANKS * SLOTS] * RANKS


@pytest.mark.parametrize("static_rows", [10_000, 0], ids=["static", "counted"])
@pytest.mark.parametrize("grows", [True, False, None], ids=["grows", "locked", "without manager"])
def test_the_first_call_makes_room_for_all_that_may_come_under_graphs(
    stubs: dict, monkeypatch: Patch, static_rows: int, grows: bool | None
) -> None:
    """Of each micro-batch, while vLLM's memory for experts can grow. All ranks count, or none."""
    from cute_ep.integrations.vllm import standard

    workspace: Any = stubs["vllm.v1.worker.workspace"]
    workspace.is_workspace_manager_initialized = lambda: grows is not None
    workspace.current_workspace_manager = lambda: SimpleNamespace(is_locked=lambda: not grows)
    number = threading.local()
    monkeypatch.setattr(standard, "dbo_current_ubatch_id", lambda: number.now)
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, TMAX, RANKS)
    few, many = (make_inputs(cfg, (tokens,) * RANKS, "masked", 1) for tokens in (1, TMAX))
    most = RANKS * TMAX * SLOTS

    def program(one: Layer) -> None:
        one.layer._graphs = True
        for micro_batch, given in ((0, few), (0, many), (1, few), (1, few)):
            first, number.now = micro_batch not in one.layer._called, micro_batch
            made, _ = whole(one, given, "finalize")
            all_of_them = static_rows or (first and grows)
            assert len(made[0]) == (most if all_of_them else len(expected_rows(one.rank, given)))

    run(monkeypatch, program, static_rows=static_rows)


@pytest.mark.parametrize(("experts", "top_k", "shared_by"), [(8, 2, 1), (128, 8, 4), (16, 4, 4)])
def test_the_first_call_makes_room_for_no_more_than_can_come(
    stubs: dict, monkeypatch: Patch, experts: int, top_k: int, shared_by: int
) -> None:
    """Fewer than top-k rows of a token where a rank has fewer experts; of tokens that tensor parallel ranks share. A
    call that does not count has room also for tokens that name an expert twice."""
    from cute_ep.integrations.vllm import standard

    workspace: Any = stubs["vllm.v1.worker.workspace"]
    workspace.is_workspace_manager_initialized = lambda: True
    workspace.current_workspace_manager = lambda: SimpleNamespace(is_locked=lambda: False)
    sizes = {"hidden": 512, "num_experts": experts, "top_k": top_k, "max_tokens": 1023}
    pool = SimpleNamespace(capturing=lambda: True)
    options, manager = standard.Options(static_rows=1), SimpleNamespace(world_size=8, pool=pool)
    layer = standard.CuteEPStandard(manager, tuple(sizes.values()), sp_size=shared_by, graphs=True, options=options)
    most, given = 8 * -(-1023 // shared_by), (torch.zeros(1, top_k, dtype=torch.int64), 1023, torch.zeros(1, 512))
    assert layer._room(*given)[0] == most * min(top_k, experts // 8)
    assert layer._room(*given)[0] == 8 * 1023 * top_k


def test_experts_that_return_other_rows_are_refused(stubs: dict) -> None:
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    manager: Any = SimpleNamespace(world_size=2)
    layer = CuteEPStandard(manager, (256, 4, 2, 4))
    with pytest.raises(EPConfigError, match=r"output_hidden_dim\(256\) = 192: must be 256, .*; choose other experts"):
        layer.post_init_setup(experts_of(padding=64))


# ---- quantised rows


@pytest.mark.parametrize("static_rows", [10_000, 0], ids=["static", "counted"])
def test_rows_in_blocks_of_fp8_travel_as_such(stubs: dict, monkeypatch: Patch, static_rows: int) -> None:
    given = inputs("masked")

    def program(one: Layer) -> tuple:
        made = prepare(one, given[one.rank], FP8)
        finalize(
            one, torch.empty(len(given[one.rank].x), HIDDEN).bfloat16(), torch.zeros(len(made[0]), HIDDEN).bfloat16()
        )
        return made

    for rank, (rows, scales, meta, ids, _) in enumerate(run(monkeypatch, program, FP8, static_rows=static_rows)):
        want = [quantised(token[None]) for _, token in expected_rows(rank, given)]
        assert rows.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert scales.shape == (len(rows), HIDDEN // 128)
        places = [place for place, one in enumerate(ids[:, 0].tolist()) if one // LOCAL == rank]
        assert places == padded_places([expert for expert, _ in expected_rows(rank, given)], 4)
        counts = meta.expert_num_tokens.tolist()
        assert sum(counts) == len(want) and len(rows) == (
            120 if static_rows else sum(-(-one // 4) * 4 for one in counts)
        )
        for place, (payload, factors) in zip(places, want, strict=True):
            assert_bits(rows[place], payload[0], "payload")
            assert_bits(scales[place], factors[0], "scales")


@pytest.mark.parametrize("static_rows", [10_000, 0], ids=["static", "counted"])
def test_other_rows_are_quantised_when_they_have_come(stubs: dict, monkeypatch: Patch, static_rows: int) -> None:
    """By one scale factor for all: memory behind the last row must not count."""
    quant = {"quant_dtype": torch.float8_e4m3fn}
    given = inputs("one_rank")
    seen = {}

    def kernel(rows: torch.Tensor, scale: object, **options: Any) -> tuple:
        assert options == {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": False, "block_shape": None,
                           "is_scale_swizzled": True, "is_scale_transposed": False, "mx_alignment": 0}  # fmt: skip
        return rows.to(torch.float8_e4m3fn), rows.float().abs().amax().view(1)

    from cute_ep.integrations.vllm import layer as layers

    monkeypatch.setattr(layers, "moe_kernel_quantize_input", kernel)
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocate(*a, **k).fill_(100))

    def program(one: Layer) -> tuple:
        made = seen[one.rank] = prepare(one, given[one.rank], quant)
        finalize(
            one, torch.empty(len(given[one.rank].x), HIDDEN).bfloat16(), torch.zeros(len(made[0]), HIDDEN).bfloat16()
        )
        return made

    for rank, (rows, scales, *_) in enumerate(run(monkeypatch, program, quant, static_rows=static_rows)):
        want = expected_rows(rank, given)
        if want:
            assert scales.item() == max(float(row.abs().max()) for _, row in want)
        elif static_rows:
            assert scales.item() == 0
        for place, (_, row) in enumerate(want):
            assert_bits(rows[place], row.to(torch.float8_e4m3fn), "payload")


@pytest.mark.parametrize("quant", [FP8, {"quant_dtype": "nvfp4"}], ids=["blocks", "nvfp4"])
def test_experts_that_quantise_get_bfloat16(stubs: dict, monkeypatch: Patch, quant: dict) -> None:
    given = inputs("uniform")
    own = {**quant, "expects_unquantized_inputs": True}

    def program(one: Layer) -> tuple:
        made = prepare(one, given[one.rank], own, defer_input_quant=True)
        finalize(one, torch.empty(len(given[one.rank].x), HIDDEN).bfloat16(), torch.zeros_like(made[0]))
        return made

    for rank, (rows, scales, *_) in enumerate(run(monkeypatch, program, own)):
        assert scales is None
        for row, (_, token) in zip(rows, expected_rows(rank, given), strict=False):
            assert_bits(row, token, "row")


# ---- refusals


def test_weights_on_inputs_are_for_one_expert_a_token(stubs: dict, monkeypatch: Patch) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> None:
        with pytest.raises(EPInputError, match="must be 1 to weight inputs"):
            prepare(one, given[one.rank], apply_router_weight_on_input=True)

    run(monkeypatch, program)


@pytest.mark.parametrize("mode", ["partial", "exact"])
def test_inputs_are_weighted_once(stubs: dict, monkeypatch: Patch, mode: str) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> torch.Tensor:
        mine = given[one.rank]
        first = RankInputs(mine.x, mine.topk_ids[:, :1], mine.router_weights[:, :1])
        rows, _, _, where, _ = prepare(one, first, apply_router_weight_on_input=True)
        output = torch.empty(len(mine.x), HIDDEN).bfloat16()
        one.layer.finalize(output, apply_experts(rows, where), None, None, True, None)
        return output

    for rank, output in enumerate(run(monkeypatch, program, top_k=1, mode=mode)):
        for token, row in enumerate(output):
            weight, expert = given[rank].router_weights[token, 0].bfloat16(), int(given[rank].topk_ids[token, 0])
            assert_bits(row, row_of(given[rank].x[token] * weight, expert) + 0, f"rank {rank}, token {token}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a1": torch.zeros(2, HIDDEN, dtype=torch.float16)}, "start vLLM with --dtype bfloat16"),
        ({"num_experts": 11}, "num_experts = 11: must be 12"),
        (
            {"a1": torch.zeros(13, HIDDEN).bfloat16(), "topk_ids": torch.zeros(13, SLOTS).int()},
            "--max-num-batched-tokens",
        ),
    ],
    ids=["dtype", "experts", "tokens"],
)
def test_prepare_names_what_to_change(stubs: dict, monkeypatch: Patch, changes: dict, message: str) -> None:
    given = inputs("uniform")

    def program(one: Layer) -> None:
        with pytest.raises(EPInputError, match=message):
            prepare(one, given[one.rank], **changes)
        with pytest.raises(EPInputError, match="must follow a prepare"):
            finalize(one, torch.empty(1, HIDDEN).bfloat16(), torch.empty(1, HIDDEN).bfloat16())

    run(monkeypatch, program)
