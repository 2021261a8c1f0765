"""DeepEP V2's buffer on CPU ranks, bit for bit against a model of its dispatch and of its order of addition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.integrations.deep_ep import ElasticBuffer, EventHandle
from cute_ep.testing.workloads import ROUTINGS, make_inputs

from .elastic_model import Case, check_by_rank, check_expanded
from .groups import on_buffers, wide_ids

HIDDEN, EXPERTS, SLOTS, MOST = 256, 8, 5, 9
TOKENS = {2: (9, 5), 4: (9, 0, 1, 7)}
Patch = pytest.MonkeyPatch


def case_of(ranks: int, routing: str, kind: str = "bf16", alignment: int = 1) -> Case:
    given = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, ranks), TOKENS[ranks], routing, 7)
    ids = wide_ids(given)
    x: list = [one.x for one in given]
    if kind != "bf16":
        words = [one.x[:, : 2 * (HIDDEN // 128)].contiguous().view(torch.int32) for one in given]
        payload = [one.x.view(torch.float8_e4m3fn)[:, :HIDDEN].contiguous() for one in given]
        scales = [one.view(torch.float32).t().contiguous().t() if kind == "fp8" else one[:, :1] for one in words]
        x = list(zip(payload, scales, strict=True))
    weights = [one.router_weights.masked_fill(one.topk_ids < 0, 0) for one in given]
    return Case(x, ids, weights, EXPERTS, MOST, alignment)


def elastic(group: Any, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True, **options)


def biases_of(case: Case, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(len(case.ids[rank]), HIDDEN, generator=generator).bfloat16() for _ in range(2)]


SYNC = pytest.mark.parametrize("sync", [True, False], ids=["sync", "static"])


@SYNC
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rounds_are_those_of_the_model(monkeypatch: Patch, ranks: int, routing: str, sync: bool) -> None:
    """Both forms, one after the other, twice."""
    case = case_of(ranks, routing)

    def program(buffer: ElasticBuffer) -> None:
        biases = biases_of(case, buffer.rank_idx)
        for _ in range(2):
            check_by_rank(buffer, case, sync, biases)
            check_expanded(buffer, case, sync, biases)

    on_buffers(monkeypatch, ranks, program, elastic)


@SYNC
@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "packed"])
def test_rows_of_8_bits_and_padded_experts(monkeypatch: Patch, kind: str, alignment: int, sync: bool) -> None:
    case = case_of(2, "masked", kind, alignment)

    def program(buffer: ElasticBuffer) -> None:
        biases = biases_of(case, buffer.rank_idx)
        check_by_rank(buffer, case, sync, biases, use_tma_aligned_col_major_sf=True)
        check_expanded(buffer, case, sync, biases, use_tma_aligned_col_major_sf=True)

    on_buffers(monkeypatch, 2, program, elastic)


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_multiple_reduction_all_rows_are_added_at_home(monkeypatch: Patch, ranks: int) -> None:
    case = case_of(ranks, "repeated")

    def program(buffer: ElasticBuffer) -> None:
        check_expanded(buffer, case, True, biases_of(case, buffer.rank_idx))

    on_buffers(monkeypatch, ranks, program, lambda group: elastic(group, allow_multiple_reduction=False))


def test_weights_are_optional_and_ids_need_no_copy(monkeypatch: Patch) -> None:
    case = case_of(2, "masked")

    def program(buffer: ElasticBuffer) -> None:
        rank = buffer.rank_idx
        for expand in (False, True):
            ids, options = case.ids[rank], {"num_experts": EXPERTS, "do_expand": expand}
            _, _, weights, handle, event = buffer.dispatch(case.x[rank], ids, do_handle_copy=False, **options)
            assert weights is None and handle.topk_idx is ids and event.event is None
            _, _, weights, _, event = buffer.dispatch(
                case.x[rank], handle=handle, do_expand=expand, topk_weights=case.weights[rank],
                previous_event=buffer.capture(), previous_event_before_epilogue=buffer.capture(),
                allocate_on_comm_stream=True, async_with_compute_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            again, _, wanted, copied, _ = buffer.dispatch(case.x[rank], ids, case.weights[rank], **options)
            assert torch.equal(weights, wanted) and copied.topk_idx is not ids
            x = case.x[rank].clone().requires_grad_()
            rows, *_ = buffer.dispatch(x, handle=handle, do_expand=expand)
            out, _, _ = buffer.combine(rows.requires_grad_(), handle)
            assert torch.equal(rows, again) and not out.requires_grad

    on_buffers(monkeypatch, 2, program, elastic)


def test_facts_about_the_group(monkeypatch: Patch) -> None:
    def program(buffer: ElasticBuffer) -> None:
        rank = buffer.rank_idx
        assert buffer.num_ranks == 4 and buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 4)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
        assert buffer.num_bytes == buffer.get_buffer_size_hint(buffer.group, MOST, HIDDEN) > 0
        assert buffer.num_bytes % (2 << 20) == 0 and isinstance(buffer.capture(), EventHandle)
        assert buffer.get_theoretical_num_sms(EXPERTS, SLOTS) == 24 and buffer.get_theoretical_num_qps(24) == 0
        with pytest.raises(EPError, match="no streams without a GPU"):
            buffer.get_comm_stream()

    on_buffers(monkeypatch, 4, program, elastic)


# ---- errors


def test_what_there_is_not_is_named() -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(EPConfigError, match="group: must be a torch"):
        ElasticBuffer(None)  # type: ignore[arg-type]
    with pytest.raises(EPConfigError, match="num_cpu_bytes = 8: must be 0"):
        ElasticBuffer(group, 16, 8)
    buffer = ElasticBuffer(group)
    for name in ("engram_write", "pp_send", "all_gather", "agrs_new_session", "get_agrs_buffer_size_hint"):
        with pytest.raises(EPError, match=f"{name}: this adapter does not have it"):
            getattr(buffer, name)(1)
