"""FlashInfer's communication backend on CPU ranks: rows, ids, weights and sums against loops over tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.integrations.common import pools
from cute_ep.runtime import process_connection
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs

from .flashinfer_library import (
    EXPERTS,
    HIDDEN,
    MOST,
    SLOTS,
    bits,
    inputs,
    library_of,
    random_rows,
    rows_of,
    stubs,
    sums,
)
from .groups import connect, entries, on_groups
from .upstream import differences

Patch = pytest.MonkeyPatch


@pytest.fixture(params=["stubs", "real"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    with library_of(request.param) as found:
        yield found


def on_ranks(
    patch: Patch, library: Any, ranks: int, program: Callable[[Any], Any], backend: Any = "cute_ep", **changes: Any
) -> list:
    """What program(communication) returns on each rank."""

    def run(group: Any) -> Any:
        bootstrap = library.BootstrapConfig(world_size=ranks, rank=group.rank(), process_group=group)
        params = library.MoEEpCommParams(**{
            "num_experts": EXPERTS, "top_k": SLOTS, "max_tokens_per_rank": MOST, "hidden_size": HIDDEN, **changes
        })  # fmt: skip
        made = library.create_communication(bootstrap, params, backend)
        try:
            return program(made)
        finally:
            made.destroy()

    return on_groups(patch, ranks, run)


def check_routing(
    got: Any, found: list, rank: int, ranks: int, given: list[RankInputs], stride: int, invalid: int
) -> None:
    ids = torch.full((ranks * stride, SLOTS), invalid, dtype=torch.int32)
    weights = torch.zeros(ranks * stride, SLOTS)
    for row, (source, token, own) in zip(rows_of(found, stride), found, strict=True):
        for slot, expert in own.items():
            ids[row, slot] = expert + rank * (EXPERTS // ranks)
            weights[row, slot] = given[source].router_weights[token, slot]
    assert_bits(got.topk_ids, ids, f"rank {rank} ids")
    if got.topk_weights is not None:
        assert_bits(got.topk_weights, weights, f"rank {rank} weights")
    assert got.tokens_per_rank == stride and got.eplb_gathered_stats is None


# ---- dispatch and combine


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("stride", "invalid"), [(None, -1), (9, 12), (9, -7)], ids=["static", "step", "negative"])
def test_a_round_is_that_of_loops_over_tokens(
    monkeypatch: Patch, library: Any, ranks: int, routing: str, stride: int | None, invalid: int
) -> None:
    given = inputs(ranks, routing)
    ids = [one.topk_ids.masked_fill(one.topk_ids < 0, invalid) if invalid == 12 else one.topk_ids for one in given]
    outputs = [random_rows(ranks * MOST, rank) for rank in range(ranks)]

    def program(comm: Any) -> list:
        own = given[comm.ep_rank]
        got = comm.dispatch(own.x, ids[comm.ep_rank], own.router_weights, max_tokens_per_rank=stride)
        made = [got, comm.combine(outputs[comm.ep_rank])]
        comm.synchronize()
        return made

    known = [one.topk_ids for one in given]
    want = sums(ranks, known, outputs, MOST)
    made = on_ranks(monkeypatch, library, ranks, program, invalid_expert_id=invalid)
    for rank, (got, total) in enumerate(made):
        found = entries(EXPERTS, ranks, rank, known)
        check_routing(got, found, rank, ranks, given, MOST, invalid)
        for row, (source, token, _) in zip(rows_of(found, MOST), found, strict=True):
            assert_bits(got.hidden_states[row], given[source].x[token], f"rank {rank} row {row}")
        assert_bits(total, want[rank].bfloat16(), f"rank {rank} sums")


ODD = 96
PAYLOADS: dict[str, tuple[str | None, int, torch.dtype, int, torch.dtype]] = {
    "bf16": ("BF16", HIDDEN, torch.bfloat16, 0, torch.uint8),
    "fp16": (None, HIDDEN, torch.float16, 0, torch.uint8),
    "packed": (None, 72, torch.bfloat16, 0, torch.uint8),
    "per tensor": ("FP8PerTensor", HIDDEN, torch.float8_e4m3fn, 0, torch.uint8),
    "deepseek": ("DeepSeekFp8", HIDDEN, torch.float8_e4m3fn, HIDDEN // 128, torch.float32),
    "mxfp8": ("MXFP8", HIDDEN, torch.float8_e4m3fn, HIDDEN // 32, torch.uint8),
    "mxfp8 bytes": ("MXFP8", HIDDEN, torch.uint8, HIDDEN // 32, torch.float8_e8m0fnu),
    "odd mxfp8": ("MXFP8", ODD, torch.float8_e4m3fn, ODD // 32, torch.uint8),
    "mxfp4": ("MXFP4", HIDDEN // 2, torch.uint8, HIDDEN // 32, torch.uint8),
    "nvfp4": ("NVFP4", HIDDEN // 2, torch.uint8, HIDDEN // 16, torch.float8_e4m3fn),
    "unannounced": (None, HIDDEN // 2, torch.uint8, HIDDEN // 16, torch.uint8),
}  # fmt: skip
"""Columns and types of rows and of scale factors by name, and the format they are announced as. Scale
factors of a row of ODD elements are no whole word."""


@pytest.mark.parametrize("routing", ["masked", "repeated"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_rows_and_scale_factors_travel_unchanged(monkeypatch: Patch, library: Any, name: str, routing: str) -> None:
    announced, columns, dtype, factors, kind = PAYLOADS[name]
    given, ranks, hidden = inputs(3, routing), 3, ODD if "odd" in name else HIDDEN
    rows = [bits(len(one.x), columns, dtype, 5 + rank) for rank, one in enumerate(given)]
    scales = [bits(len(one.x), factors, kind, 50 + rank) if factors else None for rank, one in enumerate(given)]
    outputs = [random_rows(ranks * MOST, rank, hidden) for rank in range(ranks)]

    def program(comm: Any) -> list:
        rank = comm.ep_rank
        got = comm.dispatch(rows[rank], given[rank].topk_ids, hidden_states_scale=scales[rank])
        return [got, comm.combine(outputs[rank].view(ranks, MOST, hidden))]

    known = [one.topk_ids for one in given]
    want = sums(ranks, known, outputs, MOST)
    params = {"hidden_size": hidden, "dispatch_format": None if announced is None else library.QuantFormat[announced]}
    for rank, (got, total) in enumerate(on_ranks(monkeypatch, library, ranks, program, **params)):
        found = entries(EXPERTS, ranks, rank, known)
        assert got.topk_weights is None and got.hidden_states.is_contiguous()
        assert got.hidden_states.dtype == dtype and got.hidden_states.shape == (ranks * MOST, columns)
        assert (got.hidden_states_scale is None) == (not factors)
        check_routing(got, found, rank, ranks, given, MOST, -1)
        for row, (source, token, _) in zip(rows_of(found, MOST), found, strict=True):
            assert_bits(got.hidden_states[row], rows[source][token], f"rank {rank} row {row}")
            if factors:
                assert got.hidden_states_scale.dtype == kind and got.hidden_states_scale.is_contiguous()
                assert_bits(got.hidden_states_scale[row], scales[source][token], f"rank {rank} scale {row}")
        assert_bits(total, want[rank].bfloat16(), f"rank {rank} sums")


def test_rounds_may_have_other_tokens_and_fewer_rows(monkeypatch: Patch, library: Any) -> None:
    """Outputs go where they should, in the type of `output`; results of the round before stay; ids may be reused."""
    rounds = [inputs(2, "uniform", tokens) for tokens in ((3, 5), (0, 0), (9, 1), (0, 2))]
    strides = [5, 1, 9, 4]

    def program(comm: Any) -> list:
        made = []
        for given, stride in zip(rounds, strides, strict=True):
            own = given[comm.ep_rank]
            ids = own.topk_ids.clone() if stride == 9 else own.topk_ids.long()
            got = comm.dispatch(own.x, ids, own.router_weights.double(), max_tokens_per_rank=stride)
            ids.fill_(0)
            out = torch.full((len(own.x), HIDDEN), torch.nan)
            assert comm.combine(got.hidden_states, output=out) is out
            made.append((got, out))
        return made

    for rank, made in enumerate(on_ranks(monkeypatch, library, 2, program)):
        for (got, out), given, stride in zip(made, rounds, strides, strict=True):
            check_routing(got, entries(EXPERTS, 2, rank, [one.topk_ids for one in given]), rank, 2, given, stride, -1)
            own = given[rank]
            times = torch.stack([(own.topk_ids // (EXPERTS // 2) == r).any(1) for r in range(2)], 1).sum(1)
            assert torch.equal(out, own.x.float() * times[:, None])


def test_arguments_may_require_gradients(monkeypatch: Patch, library: Any) -> None:
    given = inputs(2, "uniform")

    def program(comm: Any) -> torch.Tensor:
        own = given[comm.ep_rank]
        got = comm.dispatch(own.x.clone().requires_grad_(), own.topk_ids, own.router_weights.clone().requires_grad_())
        return comm.combine(got.hidden_states.requires_grad_())

    assert not any(one.requires_grad for one in on_ranks(monkeypatch, library, 2, program))


# ---- connections


def test_objects_of_a_group_share_communicators(monkeypatch: Patch, library: Any) -> None:
    """Also while both have a round in flight; the last one closes them."""
    given, made = inputs(2, "uniform"), []
    config = library.adapter.CuteEPConfig(sms=16, timeout_s=5.0)

    def program(first: Any) -> list:
        def counted(check: Any, cfg: EPConfig, group: Any, *, sms: int | None) -> Any:
            made.append((cfg.timeout_s, sms, connect(check, cfg, group)))
            return made[-1][2]

        monkeypatch.setattr(process_connection, "connect_checked", counted)
        second = library.create_communication(first.bootstrap, first.params, config)
        third = library.create_communication(first.bootstrap, first.params, config)
        own = given[first.ep_rank]
        a, b = second.dispatch(own.x, own.topk_ids), third.dispatch(own.x, own.topk_ids)
        totals = [third.combine(b.hidden_states), second.combine(a.hidden_states)]
        second.destroy()
        second.destroy()
        totals.append(third.combine(third.dispatch(own.x, own.topk_ids).hidden_states))
        with pytest.raises(EPError, match="was destroyed"):
            second.dispatch(own.x, own.topk_ids)
        third.destroy()
        return totals

    for one, *others in on_ranks(monkeypatch, library, 2, program):
        for other in others:
            assert_bits(one, other, "sums")
    assert [one[:2] for one in made] == [(5.0, 16)] * 2 and all(one[2].closed for one in made)
    assert not pools.SHARED


def test_the_adapter_takes_calls_as_its_base_class_does(library: Any) -> None:
    assert not differences(library.adapter.CuteEPCommunication, library.MoEEpCommunication)
    assert library.adapter.CuteEPCommunication.is_platform_supported()


# ---- errors


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype": torch.float16}, r"params\.dtype = torch.float16: must be torch.bfloat16"),
        ({"dispatch_format": "FP16"}, r"params\.dispatch_format = FP16: must be None or one of"),
        ({"hidden_size": 20}, "hidden"),
    ],
    ids=["type", "format", "size"],
)
def test_sizes_that_cannot_be_served_are_refused(monkeypatch: Patch, library: Any, changes: dict, rule: str) -> None:
    if "dispatch_format" in changes:
        changes = {"dispatch_format": library.QuantFormat[changes["dispatch_format"]]}
    with pytest.raises(EPConfigError, match=rule):
        on_ranks(monkeypatch, library, 2, lambda comm: None, **changes)
    assert not pools.SHARED


def test_the_group_must_be_that_of_the_bootstrap(library: Any) -> None:
    params = library.MoEEpCommParams(EXPERTS, SLOTS, MOST, HIDDEN)
    other = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    with pytest.raises(EPConfigError, match="world_size = 0, 2: must be those of the process group, 1, 4"):
        library.create_communication(library.BootstrapConfig(2, 0, process_group=other), params, "cute_ep")
    with pytest.raises(EPConfigError, match="needs a default group"):
        library.create_communication(library.BootstrapConfig(2, 0, process_group=None), params, "cute_ep")


def test_a_library_of_another_version_is_refused() -> None:
    with stubs():
        name = "cute_ep.integrations.flashinfer"
        module = importlib.import_module("flashinfer")
        for version in ("0.7.1", "0.7.3", "0.8.0rc1"):
            module.__version__ = version  # type: ignore[attr-defined]
            with pytest.raises(ImportError, match=f"{version}: must be at least 0.7.2 and below 0.7.3: pip install"):
                importlib.reload(importlib.import_module(name))
