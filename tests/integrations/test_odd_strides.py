"""Dimensions of one element may have any stride in tensors that adapters are given, against the plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.testing.compare import assert_bits
from tests.odd_strides import odd_ones, with_stride

from .flashinfer_library import library_of
from .groups import on_buffers, on_groups

HIDDEN, EXPERTS = 128, 2
"""One scale factor a row, and one slot: tokens, ids, weights and scale factors have a dimension of one element."""

Made = dict[str, torch.Tensor]
Program = Callable[[Any, Made], Any]


def tokens_of(count: int, fp8: bool = False) -> Made:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.arange(count)[:, None] % EXPERTS
    made = {"x": x, "ids": ids, "weights": torch.rand(count, 1, generator=generator)}
    if fp8:
        return {**made, "x": x.to(torch.float8_e4m3fn), "scales": torch.rand(count, 1, generator=generator)}
    return made


def normal(buffer: Any, given: Made) -> list[Any]:
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(given["ids"], EXPERTS)
    x = (given["x"], given["scales"]) if "scales" in given else given["x"]
    layout = {"num_tokens_per_rank": by_rank, "is_token_in_rank": goes, "num_tokens_per_expert": by_expert}
    got, ids, weights, counts, handle, _ = buffer.dispatch(
        x, topk_idx=given["ids"], topk_weights=given["weights"], **layout
    )
    payload = got[0] if isinstance(got, tuple) else got
    rows = payload.float().bfloat16()
    home, total, _ = buffer.combine(
        with_stride(rows, 0, 7) if len(rows) == 1 else rows, handle, topk_weights=weights, bias=given.get("bias")
    )
    return [*(got if isinstance(got, tuple) else [got]), ids, weights, home, total, torch.tensor(counts)]


def low_latency(buffer: Any, given: Made) -> list[Any]:
    got, counts, handle, _, _ = buffer.low_latency_dispatch(given["x"], given["ids"], 4, EXPERTS, use_fp8=False)
    home, _, _ = buffer.low_latency_combine(got, given["ids"], given["weights"], handle)
    held = torch.arange(got.shape[1])[None, :, None] < counts[:, None, None]
    return [torch.where(held, got, 0), counts, home]


def elastic(buffer: Any, given: Made) -> list[Any]:
    x = (given["x"], given["scales"]) if "scales" in given else given["x"]
    results: list[Any] = []
    for expand in (False, True):
        rows, ids, weights, handle, _ = buffer.dispatch(
            x, given["ids"], given["weights"], num_experts=EXPERTS, do_expand=expand
        )
        payload = rows[0] if isinstance(rows, tuple) else rows
        home, total, _ = buffer.combine(payload.float().bfloat16(), handle, topk_weights=weights)
        results += [*(rows if isinstance(rows, tuple) else [rows]), ids, weights, home, total]
    return results


def elastic_buffer(group: Any) -> ElasticBuffer:
    return ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=HIDDEN, explicitly_destroy=True)


DEEP_EP: dict[str, tuple[Callable[[Any], Any], Program, bool]] = {
    "normal-bf16": (Buffer, normal, False),
    "normal-fp8": (Buffer, normal, True),
    "low latency": (Buffer, low_latency, False),
    "elastic-bf16": (elastic_buffer, elastic, False),
    "elastic-fp8": (elastic_buffer, elastic, True),
}


def variants(given: Made) -> Iterator[tuple[str, Made]]:
    """The tensors as they are, and each with each odd stride."""
    yield "plain", given
    for name, dim, stride in odd_ones(given):
        yield f"{name}, {dim}, {stride}", {**given, name: with_stride(given[name], dim, stride)}


def check_alike(results: list[tuple[str, list[Any]]]) -> None:
    (_, want), *others = results
    assert others
    for text, got in others:
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            if other is not None:
                assert_bits(one, other, f"{text}: result {number}")


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", DEEP_EP)
def test_deep_ep_takes_odd_strides(monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int) -> None:
    make, program, fp8 = DEEP_EP[kind]
    given = tokens_of(tokens, fp8)

    def run(buffer: Any) -> list[tuple[str, list[Any]]]:
        return [(text, program(buffer, one)) for text, one in variants(given)]

    (results,) = on_buffers(monkeypatch, 1, run, make)
    check_alike(results)


FLASHINFER: dict[str, Callable[[int], Made]] = {
    "bf16": lambda count: tokens_of(count),
    "fp8 and a float32 scale": lambda count: tokens_of(count, fp8=True),
    "4 bits and scales in one word": lambda count: {
        **tokens_of(count),
        "x": tokens_of(count)["x"].view(torch.uint8)[:, : HIDDEN // 2].contiguous(),
        "scales": torch.rand(count, 1),
    },
}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", FLASHINFER)
def test_flashinfer_takes_odd_strides(monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int) -> None:
    given = FLASHINFER[kind](tokens)
    with library_of("stubs") as library:

        def run(group: Any) -> list[tuple[str, list[Any]]]:
            bootstrap = library.BootstrapConfig(world_size=1, rank=0, process_group=group)
            sizes = {"num_experts": EXPERTS, "top_k": 1, "max_tokens_per_rank": tokens, "hidden_size": HIDDEN}
            made = library.create_communication(bootstrap, library.MoEEpCommParams(**sizes), "cute_ep")
            results = []
            for text, one in variants(given):
                got = made.dispatch(one["x"], one["ids"], one["weights"], hidden_states_scale=one.get("scales"))
                rows = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
                home = made.combine(with_stride(rows, 0, 7) if tokens == 1 else rows)
                parts = [got.hidden_states, got.topk_ids, got.topk_weights, got.hidden_states_scale, home]
                results.append((text, parts))
            made.destroy()
            return results

        (results,) = on_groups(monkeypatch, 1, run)
    check_alike(results)
