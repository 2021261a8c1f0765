"""Layers whose tokens travel quantised compute, bit for bit, what a layer in bfloat16 does with tokens that the
reference has quantised and decoded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep import connect_local, dequantize
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows
from cute_ep.layouts.maps.formats import BF16, E4M3, E8M0, FLOAT32, FORMATS, Format
from cute_ep.nn import GatedMLP, MoELayer, Router
from cute_ep.reference.formats import quantize
from cute_ep.runtime.decode import decode_rows
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.ops.ranks import counted, on_all_ranks

from .layers import INNER, config, layer_of, random_experts

TOKENS = (9, 0, 7)
QUANTISED = [name for name, fmt in FORMATS.items() if fmt is not BF16]
SCALE = 3.0
"""G of formats that have one: a division by it rounds."""


def formatted(world: int, fmt: str, **changes: Any) -> EPConfig:
    return config(world, hidden=128, dispatch_format=fmt, **changes)


def scale_of(fmt: str) -> dict[str, float]:
    """The option of a layer."""
    return {"input_scale": SCALE} if FORMATS[fmt].global_scale else {}


def arrived(x: Tensor, fmt: str) -> Tensor:
    """What is left of tokens, bfloat16."""
    scale = scale_of(fmt).get("input_scale", 1.0)
    return dequantize(quantize(x.cpu(), fmt, scale), fmt, scale).bfloat16().to(x.device)


def in_bf16(cfg: EPConfig) -> EPConfig:
    """With as many rows of padding."""
    return replace(cfg, dispatch_format="bf16", scale_layout=None, row_alignment=cfg.alignment)


def random_rows(fmt: Format, rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(payload, scales, row_scales) of any bits that are no NaN, also of scale factors."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, top: int = 256) -> Tensor:
        return torch.randint(0, top, shape, dtype=torch.uint8, generator=generator)

    def numbers(*shape: int) -> Tensor:  # e4m3 of both signs, without the two NaNs
        bits = draw(*shape)
        return torch.where(bits & 127 == 127, 1, bits)

    e4m3 = fmt.element is E4M3
    payload = numbers(rows, hidden).view(torch.float8_e4m3fn) if e4m3 else draw(rows, hidden * fmt.bits // 8)
    if fmt.scale is FLOAT32:
        scales = torch.randn(rows, hidden // fmt.block, generator=generator).exp()
    else:
        scales = draw(rows, hidden // fmt.block, top=255) if fmt.scale is E8M0 else numbers(rows, hidden // fmt.block)
    return payload, scales, torch.randn(rows, generator=generator).exp().bfloat16() if fmt.row_scale else None


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_of_any_bits_are_decoded_as_dequantize_does(name: str) -> None:
    fmt = FORMATS[name]
    payload, scales, row_scales = random_rows(fmt, 64, 256)
    scale = torch.tensor([SCALE]) if fmt.global_scale else None
    padded = torch.cat([scales, scales[:, :3]], dim=1)  # as one-byte factors are to whole words
    want = dequantize(QuantizedRows(payload, scales, row_scales), fmt, 1.0 if scale is None else scale)
    assert want.bfloat16().unique().numel() > 100
    assert_bits(decode_rows(fmt, payload, padded, row_scales, scale), want.bfloat16(), "rows")
    none = None if row_scales is None else row_scales[:0]
    assert decode_rows(fmt, payload[:0], padded[:0], none, scale).shape == (0, 256)


def test_every_byte_of_a_number_is_decoded_as_dequantize_does() -> None:
    """Of scale factors with exponents only, of e4m3, of pairs of e2m1 and of pairs of 6 bits; NaN stays NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    pairs = torch.arange(0, 1 << 24, (1 << 12) + 1, dtype=torch.int32)  # each of 12 bits, twice in 24
    six = torch.stack([pairs & 255, pairs >> 8 & 255, pairs >> 16], dim=1).to(torch.uint8).view(256, 48)
    ones = torch.full((256, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for name, payload, scales in (
        ("mxfp8", ones, every[:, None]),
        ("mxfp8", every.repeat(32, 1).t().contiguous().view(torch.float8_e4m3fn), torch.full_like(every, 127)[:, None]),
        ("mxfp6_e2m3", six, torch.full((256, 2), 127, dtype=torch.uint8)),
        ("mxfp6_e3m2", six, torch.full((256, 2), 127, dtype=torch.uint8)),
        ("mxfp4", every.repeat(16, 1).t().contiguous(), torch.full_like(every, 127)[:, None]),
    ):
        want = dequantize(
            SwigluRows(payload, torch.cat([scales] * (4 // scales.shape[1]), 1)), name, scale_layout="linear"
        ).bfloat16()
        got = decode_rows(FORMATS[name], payload, scales, None, None)
        assert torch.equal(got.isnan(), want.isnan())
        assert_bits(got.nan_to_num(0), want.nan_to_num(0), name)


@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated", "one_expert"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_outputs_are_those_of_what_the_reference_quantises(fmt: str, routing: str) -> None:
    """Of three ranks, one without tokens."""
    cfg = formatted(3, fmt)
    given, experts = make_inputs(cfg, TOKENS, routing, 3), random_experts(cfg, "swiglu", bias=True)

    def program(cfg: EPConfig) -> list[Tensor]:
        def on_rank(rank: int, comm: str) -> Tensor:
            own, plain = given[rank], cfg.dispatch_format == "bf16"
            layer = layer_of(cfg, rank, comm, experts, **({} if plain else scale_of(fmt)))
            x = arrived(own.x, fmt) if plain else own.x
            assert plain or not len(x) or not torch.equal(arrived(x, fmt), x)
            with torch.no_grad():
                return layer.experts(x, own.topk_ids, own.router_weights)

        return on_all_ranks(cfg, on_rank)[0]

    linear = replace(cfg, scale_layout="linear")
    for rank, (got, want) in enumerate(zip(program(linear), program(in_bf16(cfg)), strict=True)):
        assert_bits(got, want, f"rank {rank}")


def connected(cfg: EPConfig, **options: Any) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(cfg, INNER, **options)
    (ep,) = connect_local(layer.cfg, ["cpu"])
    layer.attach(ep)
    layer.kept, layer.calls = ep, counted(ep)
    return layer


def tokens(count: int = 7) -> Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("options", [{}, {"row_alignment": 8}], ids=["plain", "padded rows"])
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_routers_and_shared_experts_see_tokens_as_they_are(fmt: str, options: dict[str, Any]) -> None:
    """In float32 too, which is rounded before it is quantised; with a state dict of a layer in bfloat16."""
    cfg, more = formatted(1, fmt, **options), {"router": Router(128, 6, 3), "shared": GatedMLP(128, INNER)}
    layer, plain = connected(cfg, **scale_of(fmt), **more), connected(in_bf16(cfg), **more)
    layer.load_state_dict(plain.state_dict())
    x = tokens().float() * 1.01
    with torch.no_grad():
        want = plain.experts(arrived(x.bfloat16(), fmt).float(), *layer.router(x)) + layer.shared(x)
        assert_bits(layer(x), want, "output")


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4"])
def test_compiled_layers_compute_the_bits_of_eager_ones(fmt: str) -> None:
    """Without gradients by no_grad, and by parameters that want none."""
    torch._dynamo.reset()
    layer = connected(formatted(1, fmt), **scale_of(fmt))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        want = layer(tokens())
        assert_bits(compiled(tokens()), want, "no_grad")
    layer.requires_grad_(False)
    assert_bits(layer(tokens()), want, "parameters without gradients")
    torch._dynamo.reset()


def test_rows_can_be_decoded_between_calls_by_hand() -> None:
    layer = connected(formatted(1, "nvfp4"), input_scale=SCALE)
    with torch.no_grad():
        ids, weights = layer.router(tokens())
        batch = layer.communicator.dispatch(tokens(), ids, weights, SCALE)
        out = layer.communicator.combine(layer.compute(layer.decode(batch), batch.row_offsets), batch)
        assert_bits(out, layer(tokens()), "output")


@pytest.mark.parametrize("wanted", ["x", "router_weights", "gate_up", "down_bias"])
def test_gradients_are_refused_before_anything_is_sent(wanted: str) -> None:
    layer = connected(formatted(1, "fp8"), bias=True)
    ids, weights = (part.detach() for part in layer.router(tokens()))
    layer.requires_grad_(False)
    given = {"x": tokens(), "topk_ids": ids, "router_weights": weights}
    (given.get(wanted) if wanted in given else getattr(layer, wanted)).requires_grad_()
    said = f"{wanted}.requires_grad = True: must be False in a layer with dispatch_format fp8, which is for inference"
    with pytest.raises(EPInputError, match=re.escape(said)):
        layer.experts(**given)
    assert layer.calls == []
    with torch.no_grad():
        assert layer.experts(**given).any()
