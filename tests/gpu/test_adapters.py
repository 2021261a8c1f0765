"""Adapters on GPUs, against the same calls on the CPU, which `tests/integrations` checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.integrations.rows import rank_major
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import LINEAR
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.integrations.groups import on_buffers

from .conftest import connected

DEVICE = torch.device("cuda:0")


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from tensors(one, f"{name}[{number}]")


def assert_same(got: Any, want: Any) -> None:
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs
    for (name, one), (_, other) in pairs:
        assert_bits(one.cpu().contiguous(), other.contiguous(), name)


# ---- rows in other shapes

TOKENS = (70, 0, 9, 33, 64, 1, 70, 17)


@pytest.mark.parametrize("stride", [None, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row_per_token_and_rank(fmt: str, stride: int | None) -> None:
    """Rows and what combine makes of them."""
    layout = None if FORMATS[fmt].scale is None else LINEAR
    cfg = EPConfig(128, 24, 3, 70, 8, fmt, 20, scale_layout=layout)
    given = make_inputs(cfg, list(TOKENS), "masked", 3)

    def run(communicators: list, device: torch.device) -> list:
        def there(one: RankInputs) -> list[torch.Tensor]:
            return [tensor.to(device) for tensor in (one.x, one.topk_ids, one.router_weights)]

        batches = [ep.dispatch(*there(one)) for ep, one in zip(communicators, given, strict=True)]
        for ep in communicators:
            ep.synchronize()
        views = [rank_major(cfg, batch, stride=stride) for batch in batches]
        outs, parts = [], []
        for ep, one in zip(communicators, views, strict=True):
            filled = (one.expert_ids >= 0).any(1)
            rows = one.tokens if fmt == "bf16" else torch.ones(len(filled), cfg.hidden, device=device).bfloat16()
            outs.append(ep.combine(rows, one.batch, mode="partial"))
            held = [part for part in (*one[:3], one.weights) if part is not None]
            parts.append([one.expert_ids, one.source_ends, *(part.view(torch.uint8)[filled] for part in held)])
        for ep in communicators:
            ep.synchronize()
        return [outs, parts]

    want = run(list(connect_reference(cfg)), torch.device("cpu"))
    with connected(cfg, [str(DEVICE)] * 8) as communicators:
        got = run(communicators, DEVICE)
    assert_same(got, want)


# ---- DeepEP's interface

HIDDEN, EXPERTS, SLOTS, MOST = 512, 8, 3, 20


def normal(buffer: Buffer, one: RankInputs, device: torch.device) -> tuple:
    """Rows, entries, sums, and the same with a handle and with room for any routing."""
    x, ids, weights = one.x.to(device), one.topk_ids.to(device).long(), one.router_weights.to(device)
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = dict(num_tokens_per_rank=by_rank, num_tokens_per_expert=by_expert, is_token_in_rank=goes)
    entry = dict(topk_idx=ids, topk_weights=weights)
    rows, got_ids, got_weights, _, handle, _ = buffer.dispatch(x, **layout, **entry)
    again = buffer.dispatch(x, handle)[0]
    worst = buffer.dispatch(x, **layout, **entry, num_worst_tokens=MOST)
    out, back, _ = buffer.combine(rows, handle, topk_weights=got_weights)
    return by_rank, by_expert, goes, rows, got_ids, got_weights, again, worst[0][: len(rows)], worst[1], out, back


def low_latency(buffer: Buffer, one: RankInputs, device: torch.device, *, fp8: bool, hook: bool) -> tuple:
    """Counts, the first expert's rows and scale factors, and sums of rows that are numbers."""
    x, ids, weights = one.x.to(device), one.topk_ids.to(device).long(), one.router_weights.to(device)
    rows, counts, handle, _, receive = buffer.low_latency_dispatch(
        x, ids, MOST, EXPERTS, use_fp8=fp8, return_recv_hook=hook
    )
    if hook:
        receive()
    payload, scales = rows if fp8 else (rows, None)
    own = torch.ones(EXPERTS, MOST, HIDDEN, device=device).bfloat16() if fp8 else payload
    out, _, receive = buffer.low_latency_combine(own, ids, weights, handle, return_recv_hook=hook)
    if hook:
        receive()
    count = int(counts[0])
    return counts, payload[0, :count].view(torch.uint8), () if scales is None else scales[0, :count], out


@pytest.mark.parametrize(
    "program",
    [
        normal,
        *(
            lambda *given, fp8=fp8, hook=hook: low_latency(*given, fp8=fp8, hook=hook)
            for fp8 in (False, True)
            for hook in (False, True)
        ),
    ],
    ids=["normal", "low latency", "hook", "fp8", "fp8 hook"],
)
@pytest.mark.parametrize("routing", ["uniform", "masked", "one_expert"])
def test_one_rank_with_a_buffer_of_deep_ep(monkeypatch: pytest.MonkeyPatch, program: Callable, routing: str) -> None:
    (one,) = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, 1), [MOST], routing, 5)
    got, want = (
        on_buffers(monkeypatch, 1, lambda buffer, device=device: program(buffer, one, device), device=device)[0]
        for device in (DEVICE, torch.device("cpu"))
    )
    assert_same(got, want)


# ---- transformers


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_model_of_transformers(kind: str) -> None:
    """Logits and gradients, and tokens that it generates, are those of its experts with the same roundings."""
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__}: must be 5.23 or newer")
    from cute_ep.integrations.transformers import attach
    from tests.integrations.models import build, text, trained
    from tests.integrations.test_models import check

    model, ids = build(kind).to(DEVICE), text().to(DEVICE)
    model.set_experts_implementation("rounded")
    want = trained(model, ids)
    said = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.set_experts_implementation("eager")
    for ranks in (1, 2, 4):
        with attach(model, devices=[str(DEVICE)] * ranks, max_tokens=ids.numel()):
            check(trained(model, ids), want, 1e-4)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), said)
