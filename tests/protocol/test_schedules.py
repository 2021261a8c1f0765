"""The GPU tests' schedules on the reference backend: their expectations hold, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.verify import GUARD_BYTES
from tests.gpu.layers import Experts, Network, fp8_experts, plain_experts
from tests.gpu.replays import Replays
from tests.gpu.runs import DISTINCT, Run, run_schedules, sms_of
from tests.gpu.schedules import CASES, ORDERS, TOKENS, calls_of, steps_of
from tests.gpu.test_layers import check_dense


def small(name: str) -> Run:
    """A case with few tokens, for ranks that are called by turns."""
    case = replace(CASES[name], streams=False, by_rank=False, rounds=6)
    return Run(connect_reference(EPConfig(128, 16, 4, 24, 2, case.fmt)), case)


def test_orders_are_those_of_the_protocol() -> None:
    assert ORDERS["split"](3) == calls_of("A1 A2 W1 a1 A3 W2 a2 w1 W3 a3 w2 w3")
    assert ORDERS["ahead"](3) == calls_of("D1 D2 c1 D3 c2 c3")
    assert ORDERS["two ahead"](3) == calls_of("D1 D2 D3 c1 c2 c3")
    assert ORDERS["combines"](2) == calls_of("D1 c1 c1 c1 c1 D2 c2 c2 c2 c2")


@pytest.mark.parametrize("order", ORDERS)
def test_every_call_has_an_output_and_every_half_its_other_one(order: str) -> None:
    steps = steps_of(ORDERS[order](7))
    ended = [step for step in steps if step.kind in "cw"]
    assert sorted(step.output for step in ended) == list(range(len(ended)))
    assert [step.number for step in steps if step.kind in "DW"] == list(range(1, 8))
    assert {(s.number, s.output, s.turn) for s in steps if s.kind == "a"} <= {
        (s.number, s.output, s.turn) for s in ended
    }
    assert {step.mode for step in ended} == {"exact", "partial"}


def test_rounds_of_one_parity_differ() -> None:
    """What stays from the round before last cannot pass for new."""
    for counts in TOKENS.values():
        assert len(set(counts)) == len(counts) == 7 and DISTINCT % 2


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.crossed])
def test_a_schedule_passes_on_the_reference_backend(name: str) -> None:
    run_schedules(small(name))


@pytest.mark.parametrize(
    "wrong", ["tokens", "row_scales", "row_map", "weights", "headers", "row_counts", "sums", "behind"]
)
def test_a_wrong_tensor_is_found(wrong: str) -> None:
    run = small("ahead")
    run_schedules(run)
    tensor = run.outs[1][2] if wrong in ("sums", "behind") else getattr(run.received[1][3], wrong)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory[slice(-1, None) if wrong == "behind" else slice(-GUARD_BYTES)] ^= 1
    with pytest.raises(AssertionError, match=r"[cD]3: rank 1 "):
        run.check()


def test_two_groups_of_ranks_run_side_by_side() -> None:
    run_schedules(small("ahead"), small("split"))


@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "two groups by turns"])
@pytest.mark.parametrize(("layers", "tokens"), [(2, [24, 5]), (3, [24, 5]), (3, [0, 1])])
def test_a_wrong_byte_of_replayed_layers_is_found(layers: int, tokens: list[int], groups: int) -> None:
    ranks, *others = (connect_reference(EPConfig(128, 16, 4, 24, 2, "nvfp4_row")) for _ in range(groups))
    replays = Replays(ranks, tokens, layers, count=3, others=others)
    for number in range(3):
        replays.run_eagerly(number)
    replays.check()
    batches, sums = replays.memory[1].results(2)
    for tensor in (batches[-1].headers, sums[0]):
        tensor.view(torch.uint8).view(-1)[0] ^= 1
        with pytest.raises(AssertionError, match="rank 1"):
            replays.check()
        tensor.view(torch.uint8).view(-1)[0] ^= 1


@pytest.mark.parametrize(("fmt", "make"), [("bf16", plain_experts), ("fp8", fp8_experts)])
def test_layers_through_dispatch_and_combine_are_close_to_dense_ones(fmt: str, make: Callable[..., Experts]) -> None:
    """Close to a dense layer, and the check can fail."""
    torch.manual_seed(0)
    cfg = EPConfig(256, 8, 4, 24, 2, fmt, fused_shared_expert=fmt == "fp8")
    ranks = connect_reference(cfg)
    network = Network(ranks, [24, 7], [make(cfg.groups, 256, 128, one.device, one.rank) for one in ranks], 2)
    outs = network.run()
    check_dense(network, outs, 4e-2 if fmt == "bf16" else 0.3)
    outs[1][1][3] += 1.5 * outs[1][1].std()
    with pytest.raises(AssertionError, match="not close"):
        check_dense(network, outs, 0.3)


def test_launches_side_by_side_leave_some_of_a_gpu() -> None:
    assert sms_of(["cuda:0"] * 8, 1) is None
    assert [sms_of(["cuda:0"] * ranks, 2) for ranks in (1, 4, 8)] == [56, 14, 7]
    assert sms_of(["cuda:0", "cuda:1"], 2) == 56
