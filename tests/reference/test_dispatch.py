"""Reference dispatch against a scalar model of its row order: deployments, routings, formats, quantised input."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS, DispatchBuffers
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import ROW_ALIGNMENTS
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS
from tests.cases import CASES, Case
from tests.strategies import deployments

from .dispatch_model import arguments, check_dispatch, small
from .oracle import assert_rows

# ---- deployments and routings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_deployment_places_the_rows_of_the_model(case: Case):
    inputs = case.inputs()
    xs, ids = [one.x for one in inputs], [one.topk_ids for one in inputs]
    scales = [2.0**rank * 1.3 for rank in range(len(xs))] if case.fmt == "nvfp4" else None
    batches = check_dispatch(case.cfg, xs, ids, scales, [one.router_weights for one in inputs])
    routed = sum(int((one >= 0).sum()) for one in ids)
    shared = sum(case.tokens) if case.shared else 0
    if case.skip:  # every rank has the same tokens, and each entry and each shared token is served once
        routed, shared = routed // len(xs), shared // len(xs)
    assert sum(int(batch.row_counts.sum()) for batch in batches) == routed + shared


def test_the_deployments_cover_the_hard_cases():
    """What the list was made for is in it: empty and full ranks, masked tokens, part blocks, worst case, options."""
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.routing for case in CASES} == set(ROUTINGS)
    assert {(case.fmt, case.cfg.scales_as) for case in CASES} >= {
        (fmt.name, layout) for fmt in FORMATS.values() for layout in fmt.scale_layouts[:1] or (None,)
    }
    assert {case.layout for case in CASES} == {None, "linear"}
    assert {case.cfg.alignment for case in CASES} == set(ROW_ALIGNMENTS)
    assert {(case.shared, case.skip) for case in CASES} == {(a, b) for a in (False, True) for b in (False, True)}
    assert any(case.shared and case.skip and 0 < case.tokens[0] % len(case.tokens) for case in CASES)
    assert any(0 in case.tokens for case in CASES) and any(not any(case.tokens) for case in CASES)
    counts = set()
    full = False
    for case in CASES:
        ids = [one.topk_ids for one in case.inputs()]
        cfg = case.cfg
        per_expert = torch.cat([one[one >= 0] for one in ids]).long().bincount(minlength=case.num_experts)
        counts |= set(per_expert.tolist())
        full |= per_expert.reshape(cfg.world_size, -1).sum(1).max() == cfg.max_rows and cfg.max_rows > 100
    assert full and {0, 128, 129, 256} <= counts


@st.composite
def routed_batches(draw):
    cfg = draw(deployments(hidden=256, per_rank=5, ranks=4, top_k=4, tokens=6))
    tokens = [draw(st.integers(0, cfg.max_tokens_per_rank)) for _ in range(cfg.world_size)]
    expert = st.integers(-1, cfg.num_experts - 1)
    ids = [
        torch.tensor(draw(st.lists(expert, min_size=t * cfg.top_k, max_size=t * cfg.top_k)), dtype=torch.int32)
        for t in tokens
    ]
    return cfg, [one.reshape(-1, cfg.top_k) for one in ids], draw(st.integers(0, 2)), draw(st.integers(0, 99))


@settings(max_examples=200)
@given(routed_batches())
def test_any_routing_places_the_rows_of_the_model(batch):
    cfg, ids, weights_on, seed = batch
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(one.shape[0], cfg.hidden, generator=generator).bfloat16() for one in ids]
    weights = [torch.randn(one.shape, generator=generator) for one in ids]
    if weights_on == 1:  # only some ranks send weights
        weights = [None if rank % 2 else one for rank, one in enumerate(weights)]
    check_dispatch(cfg, xs, ids, None, weights if weights_on else None)


# ---- by hand


def test_duplicate_experts_make_one_row_each_in_slot_order():
    cfg = small(dispatch_format="bf16", top_k=3)
    xs = [torch.ones(1, 32).bfloat16(), torch.full((2, 32), 2.0).bfloat16()]
    ids = [torch.tensor([[3, 3, 3]]), torch.tensor([[3, 2, 3], [-1, 3, 2]])]
    batch = check_dispatch(cfg, xs, [one.int() for one in ids])[1]
    assert batch.row_offsets.tolist() == [0, 2, 8]
    assert batch.src_info.tolist() == [[0, 1], [1, 2], [0, 0], [0, 1], [0, 2], [0, 0], [0, 2], [1, 1]]
    assert batch.tokens[:, 0].tolist() == [2, 2, 1, 1, 1, 2, 2, 2]


def test_scales_offsets_of_the_specified_example():
    """Row offsets [0, 100, 300, 400] give scale offsets [0, 1, 1]: blocks 0 | 1, 2 | 3."""
    cfg = small(num_experts=3, top_k=1, world_size=1, max_tokens_per_rank=400)
    ids = torch.tensor([0] * 100 + [1] * 200 + [2] * 100)[torch.randperm(400)].int()[:, None]
    batch = check_dispatch(cfg, [torch.randn(400, 32).bfloat16()], [ids])[0]
    assert batch.row_offsets.tolist() == [0, 100, 300, 400]
    assert batch.scales_offsets.tolist() == [0, 1, 1] and batch.scales.shape[0] == 4


def test_every_bf16_bit_pattern_travels():
    cfg = small(hidden=65536, dispatch_format="bf16")
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[None]
    batch = reference.dispatch(cfg, [x, x[:0]], [torch.tensor([[-1, 2]]).int(), torch.zeros(0, 2).int()])
    assert_bits(batch[1].tokens, x, "tokens")
    assert batch[0].tokens.shape == (0, 65536)


def test_each_rank_applies_its_own_global_scale():
    cfg = small(top_k=1)
    x = torch.linspace(-3, 3, 32).bfloat16()[None]
    ids = torch.zeros(1, 1).int()
    one, _ = reference.dispatch(cfg, [x, x], [ids, ids], [torch.tensor([7.0]), 0.11])
    for row, scale in enumerate((7.0, 0.11)):
        payload, scales, _ = reference.quantize(x, "nvfp4", scale)
        assert_bits(one.tokens[row : row + 1], payload, "tokens")
        assert_bits(reference.unswizzle_scales(one.scales, [2, 0], 2)[row : row + 1], scales, "scales")
    assert not torch.equal(*reference.unswizzle_scales(one.scales, [2, 0], 2))


# ---- types


@pytest.mark.parametrize("fmt, layout", [
    (fmt.name, layout) for fmt in FORMATS.values() for layout in fmt.scale_layouts or (None,)
])  # fmt: skip
@pytest.mark.parametrize(
    "options",
    [{}, {"fused_shared_expert": True, "row_alignment": 8}, {"skip_a2a": True}],
    ids=["plain", "shared expert and rows of 8", "skip_a2a"],
)
def test_types_and_shapes_match_allocated_buffers(fmt, layout, options):
    cfg = small(dispatch_format=fmt, scale_layout=layout, hidden=128, **options)
    xs, ids, weights = arguments(cfg)
    for batch in reference.dispatch(cfg, xs, ids, None, weights):
        buffers = DispatchBuffers.allocate(cfg, "cpu", batch.num_rows.item())
        for name in BUFFERS:
            got, want = getattr(batch, name), getattr(buffers, name)
            assert (got is None) == (want is None), name
            if want is not None:
                assert got.dtype == want.dtype and got.device == want.device and got.is_contiguous(), name
                some_blocks = name == "scales" and cfg.scales_as == "atom128x4"
                assert some_blocks or got.shape == want.shape, name
                assert got.shape[1:] == want.shape[1:], name


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_ids_of_64_bits_give_the_same_bytes(case: Case):
    """In dispatch and in combine."""
    cfg, inputs = case.cfg, case.inputs()
    xs, weights = [one.x for one in inputs], [one.router_weights for one in inputs]
    narrow, wide = [one.topk_ids for one in inputs], [one.topk_ids.long() for one in inputs]
    batches = [reference.dispatch(cfg, xs, ids, None, weights) for ids in (narrow, wide)]
    for got, want in zip(batches[1], batches[0], strict=True):
        for name in BUFFERS:
            if getattr(want, name) is not None:
                assert_bits(getattr(got, name), getattr(want, name), name)
    rows = [torch.randn(int(batch.num_rows), cfg.hidden).bfloat16() for batch in batches[0]]
    for mode in ("exact", "partial") if cfg.fused_shared_expert else COMBINE_MODES:
        for got, want in zip(*(reference.combine(cfg, rows, batch, None, mode) for batch in batches), strict=True):
            assert_bits(got, want, mode)


# ---- quantised input


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.hidden <= 384 and case.fmt != "bf16"], ids=lambda case: case.id
)
def test_prequantized_rows_travel_unchanged(case: Case):
    """The same output as from bfloat16, when every other rank quantises its own."""
    cfg, inputs = case.cfg, case.inputs()
    xs, ids, weights = ([getattr(one, n) for one in inputs] for n in ("x", "topk_ids", "router_weights"))
    scales = [1.7] * len(xs) if case.fmt == "nvfp4" else None
    want = reference.dispatch(cfg, xs, ids, scales, weights)
    ready = [reference.quantize(x, cfg.format, 1.7 if scales else 1.0) for x in xs]
    ready[1::2] = [None] * len(ready[1::2])
    mixed_scales = scales and [1.7 if one is None else None for one in ready]
    given = [x if one is None else None for x, one in zip(xs, ready, strict=True)]
    for got, expected in zip(reference.dispatch(cfg, given, ids, mixed_scales, weights, ready), want, strict=True):
        for field in fields(expected):
            if isinstance(getattr(expected, field.name), torch.Tensor):
                assert_bits(getattr(got, field.name), getattr(expected, field.name), field.name)


@pytest.mark.parametrize("fmt", [fmt.name for fmt in FORMATS.values() if fmt.scale])
def test_any_bytes_of_quantised_rows_travel(fmt):
    cfg = small(dispatch_format=fmt, scale_layout="linear", hidden=1024, top_k=1, world_size=1, row_alignment=4)
    generator = torch.Generator().manual_seed(0)
    shapes = reference.quantize(torch.zeros(3, 1024).bfloat16(), fmt)
    noise = QuantizedRows(*(
        None if one is None else torch.randint(256, (3, one[0].numel() * one.itemsize), generator=generator)
        .to(torch.uint8).view(one.dtype).view(one.shape) for one in shapes
    ))  # fmt: skip
    (batch,) = reference.dispatch(cfg, [None], [torch.tensor([[2], [2], [2]]).int()], prequantized=[noise])
    assert batch.row_counts.tolist() == [0, 0, 3, 0] and batch.row_offsets.tolist() == [0, 0, 0, 4, 4]
    row_scales = None if batch.row_scales is None else batch.row_scales[:3]
    columns = noise.scales.shape[1]
    assert_rows(QuantizedRows(batch.tokens[:3], batch.scales[:3, :columns].contiguous(), row_scales), noise, "bytes")
