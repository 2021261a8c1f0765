"""Reference dispatch against a scalar model of its row order, plus the workloads."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import DispatchBuffers, Dispatched, QuantizedRows
from cute_ep.api.errors import EPInputError
from cute_ep.api.validate import check_tokens
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import ROW_ALIGNMENTS
from cute_ep.layouts.maps.scales import scale_shape
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, make_inputs, make_rank_inputs
from tests.cases import CASES, Case
from tests.strategies import deployments

from .oracle import assert_rows

Entry = tuple[int, int, int]
"""(index of the source among the rank's sources, token, slot)."""


def groups_in_order(cfg: EPConfig, topk_ids: list[torch.Tensor], rank: int) -> list[list[Entry]]:
    """The rows of every group of `rank`, by the definition of the row order."""
    local = cfg.num_experts // cfg.world_size
    ids = [tensor.tolist() for tensor in topk_ids]
    sources = [rank] if cfg.skip_a2a else list(range(cfg.world_size))
    groups: list[list[Entry]] = []
    if cfg.fused_shared_expert:
        own = range(len(ids[rank]))
        if cfg.skip_a2a:
            own = np.array_split(own, cfg.world_size)[rank].tolist()
        groups.append([(sources.index(rank), token, cfg.top_k) for token in own])
    for expert in range(rank * local, rank * local + local):
        groups.append([
            (index, token, slot)
            for index, source in enumerate(sources)
            for token in range(len(ids[source]))
            for slot in range(cfg.top_k)
            if ids[source][token][slot] == expert
        ])  # fmt: skip
    return groups


def up_to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def check_scales(cfg: EPConfig, batch: Dispatched, want: torch.Tensor, padded: list[int], name: str) -> None:
    """Compare with the row-major scale factors [rows, columns] of the rows of all groups, padding included."""
    rows, columns = want.shape
    if cfg.scales_as == "atom128x4":
        first_block = [sum(-(-count // 128) for count in padded[:group]) for group in range(len(padded) + 1)]
        assert batch.scales.shape[0] == first_block[-1] <= scale_shape("atom128x4", columns, 1, rows, len(padded))[0]
        offsets, blocks = batch.row_offsets.tolist(), batch.scales_offsets
        assert blocks.dtype == torch.int32
        assert [offsets[g] // 128 + block for g, block in enumerate(blocks.tolist())] == first_block[:-1]
        atoms, row = batch.scales.clone(), 0
        for group, count in enumerate(padded):
            for at in range(count):
                block = atoms[first_block[group] + at // 128, :, at % 32, at % 128 // 32]
                assert_bits(block.flatten()[:columns], want[row], name + f"scales of row {row}")
                block.view(-1, 4)[...] = 0
                row += 1
        assert not atoms.any(), "padding must be zero"
        return
    assert batch.scales_offsets is None
    if cfg.scales_as == "transposed":
        assert_bits(batch.scales, want.T.contiguous(), name + "scales")
        return
    assert_bits(batch.scales[:, :columns], want, name + "scales")
    assert not batch.scales[:, columns:].any()
    assert batch.scales.shape == (rows, columns if want.dtype == torch.float32 else up_to_multiple(columns, 4))


def check_dispatch(
    cfg: EPConfig,
    xs: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    input_scales: list | None = None,
    router_weights: list | None = None,
) -> list[Dispatched]:
    """Compare `reference.dispatch` with a model that places one row at a time."""
    results = reference.dispatch(cfg, xs, topk_ids, input_scales, router_weights)
    assert len(results) == cfg.world_size
    factors = [1.0 if scale is None else scale for scale in input_scales or [1.0] * cfg.world_size]
    encoded = [reference.quantize(x, cfg.format, factor) for x, factor in zip(xs, factors, strict=True)]
    given_weights = router_weights or [None] * cfg.world_size
    for rank, batch in enumerate(results):
        name = f"rank {rank} "
        sources = [rank] if cfg.skip_a2a else list(range(cfg.world_size))
        groups = groups_in_order(cfg, topk_ids, rank)
        counts = [len(group) for group in groups]
        padded = [up_to_multiple(count, cfg.alignment) for count in counts]
        rows = [entry for group in groups for entry in group + [None] * (-len(group) % cfg.alignment)]
        assert len(groups) == cfg.groups
        assert batch.num_rows.tolist() == [len(rows)] and len(rows) <= cfg.max_rows
        starts = [sum(padded[:group]) for group in range(cfg.groups + 1)]
        assert_bits(batch.row_offsets, torch.tensor(starts).int(), name + "row_offsets")
        assert_bits(batch.row_counts, torch.tensor(counts, dtype=torch.int32), name + "row_counts")
        assert_bits(batch.expert_ids, torch.arange(cfg.groups).int(), name + "expert_ids")
        info = [(-1, -1) if entry is None else entry[1:] for entry in rows]
        assert_bits(batch.src_info, torch.tensor(info, dtype=torch.int32).reshape(-1, 2), name + "src_info")
        row_map = torch.full((cfg.peers, cfg.max_tokens_per_rank, cfg.top_k), -1, dtype=torch.int32)
        for row, entry in enumerate(rows):
            if entry is not None and entry[2] < cfg.top_k:
                row_map[entry] = row
        assert_bits(batch.row_map, row_map, name + "row_map")

        def gathered(field: str, rows=rows, sources=sources) -> torch.Tensor | None:
            values = [getattr(one, field) for one in encoded]
            if values[0] is None:
                return None
            zero = torch.zeros_like(torch.empty(1, *values[0].shape[1:], dtype=values[0].dtype))
            taken = [zero if entry is None else values[sources[entry[0]]][entry[1] : entry[1] + 1] for entry in rows]
            return torch.cat([values[0][:0], *taken])

        assert_bits(batch.tokens, gathered("payload"), name + "tokens")
        assert (batch.row_scales is None) == (not cfg.format.row_scale)
        if cfg.format.row_scale:
            assert_bits(batch.row_scales, gathered("row_scales"), name + "row_scales")
        if cfg.format.scale is None:
            assert batch.scales is None and batch.scales_offsets is None
        else:
            check_scales(cfg, batch, gathered("scales"), padded, name)
        header = [[xs[source].shape[0], 0, given_weights[source] is not None, 0] for source in sources]
        assert_bits(batch.headers, torch.tensor(header, dtype=torch.int32), name + "headers")
        assert batch.return_pieces == 0 and (batch.headers[:, HeaderWord.RETURN_PIECES] == 0).all(), "rows in one piece"
        if all(given_weights[source] is None for source in sources):
            assert batch.weights is None
        else:
            weights = torch.zeros(row_map.shape)
            for entry in rows:
                if entry is not None and entry[2] < cfg.top_k and given_weights[sources[entry[0]]] is not None:
                    weights[entry] = given_weights[sources[entry[0]]][entry[1:]]
            assert_bits(batch.weights, weights, name + "weights")
        assert batch.topk_ids is topk_ids[rank] and batch.router_weights is given_weights[rank]
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: Case):
    inputs = case.inputs()
    xs, ids = [one.x for one in inputs], [one.topk_ids for one in inputs]
    scales = [2.0**rank * 1.3 for rank in range(len(xs))] if case.fmt == "nvfp4" else None
    batches = check_dispatch(case.cfg, xs, ids, scales, [one.router_weights for one in inputs])
    routed = sum(int((one >= 0).sum()) for one in ids)
    shared = sum(case.tokens) if case.shared else 0
    if case.skip:  # every rank has the same tokens, and each entry and each shared token is served once
        routed, shared = routed // len(xs), shared // len(xs)
    assert sum(int(batch.row_counts.sum()) for batch in batches) == routed + shared


def test_cases_are_adversarial():
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


@settings(max_examples=200, deadline=None)
@given(routed_batches())
def test_any_routing_with_duplicates_masks_and_options(batch):
    cfg, ids, weights_on, seed = batch
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(one.shape[0], cfg.hidden, generator=generator).bfloat16() for one in ids]
    weights = [torch.randn(one.shape, generator=generator) for one in ids]
    if weights_on == 1:  # only some ranks send weights
        weights = [None if rank % 2 else one for rank, one in enumerate(weights)]
    check_dispatch(cfg, xs, ids, None, weights if weights_on else None)


def small(**changes) -> EPConfig:
    values = dict(hidden=32, num_experts=4, top_k=2, max_tokens_per_rank=3, world_size=2, dispatch_format="nvfp4")
    return EPConfig(**(values | changes))


def arguments(cfg: EPConfig, tokens: int = 2) -> tuple[list, list, list]:
    inputs = make_inputs(cfg, [tokens] * cfg.world_size, "uniform", 0)
    return [i.x for i in inputs], [i.topk_ids for i in inputs], [i.router_weights for i in inputs]


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


@pytest.mark.parametrize("fmt, layout", [
    (fmt.name, layout) for fmt in FORMATS.values() for layout in fmt.scale_layouts or (None,)
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"fused_shared_expert": True, "row_alignment": 8}, {"skip_a2a": True}])
def test_types_and_shapes_match_allocated_buffers(fmt, layout, options):
    cfg = small(dispatch_format=fmt, scale_layout=layout, hidden=128, **options)
    xs, ids, weights = arguments(cfg)
    for batch in reference.dispatch(cfg, xs, ids, None, weights):
        buffers = DispatchBuffers.allocate(cfg, "cpu", batch.num_rows.item())
        for field in fields(buffers):
            got, want = getattr(batch, field.name), getattr(buffers, field.name)
            assert (got is None) == (want is None), field.name
            if want is not None:
                assert got.dtype == want.dtype and got.device == want.device and got.is_contiguous(), field.name
                some_blocks = field.name == "scales" and cfg.scales_as == "atom128x4"
                assert some_blocks or got.shape == want.shape, field.name
                assert got.shape[1:] == want.shape[1:], field.name


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
def test_any_prequantized_bytes(fmt):
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


def test_bad_prequantized_rows():
    cfg = small()
    xs, ids, _ = arguments(cfg)
    good = [reference.quantize(x, "nvfp4") for x in xs]
    for match, bad in (
        ("x.dtype", good[0]._replace(payload=good[0].payload.float())),
        ("x.shape", good[0]._replace(payload=good[0].payload[:, :8].contiguous())),
        ("scales.shape", good[0]._replace(scales=good[0].scales[:1])),
        ("row_scales = tensor", good[0]._replace(row_scales=torch.ones(2).bfloat16())),
        ("topk_ids.shape", QuantizedRows(good[0].payload[:1], good[0].scales[:1])),
    ):
        with pytest.raises(EPInputError, match=match):
            reference.dispatch(cfg, xs, ids, prequantized=[bad, good[1]])
    with pytest.raises(EPInputError, match=r"input_scale = 2\.0: must be None"):
        reference.dispatch(cfg, xs, ids, [2.0, 1.0], prequantized=[good[0], None])
    with pytest.raises(EPInputError, match=r"len\(prequantized\) = 1"):
        reference.dispatch(cfg, xs, ids, prequantized=good[:1])


# ---- errors


@pytest.mark.parametrize("value", [-2, 4, 2**31 - 1, -(2**31)])
def test_expert_id_out_of_range(value):
    cfg = small()
    xs, ids, _ = arguments(cfg)
    ids[1][1, 0] = value
    with pytest.raises(EPInputError, match=rf"topk_ids\[1, 0\] = {value}: must be -1 or in \[0, 4\)"):
        reference.dispatch(cfg, xs, ids)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_ids_of_64_bits(case: Case):
    """The same bytes, in dispatch and in combine."""
    cfg, inputs = case.cfg, case.inputs()
    xs, weights = [one.x for one in inputs], [one.router_weights for one in inputs]
    narrow, wide = [one.topk_ids for one in inputs], [one.topk_ids.long() for one in inputs]
    batches = [reference.dispatch(cfg, xs, ids, None, weights) for ids in (narrow, wide)]
    for got, want in zip(batches[1], batches[0], strict=True):
        for name in (field.name for field in fields(DispatchBuffers)):
            if getattr(want, name) is not None:
                assert_bits(getattr(got, name), getattr(want, name), name)
    rows = [torch.randn(int(batch.num_rows), cfg.hidden).bfloat16() for batch in batches[0]]
    for mode in ("exact", "partial") if cfg.fused_shared_expert else COMBINE_MODES:
        for got, want in zip(*(reference.combine(cfg, rows, batch, None, mode) for batch in batches), strict=True):
            assert_bits(got, want, mode)


@pytest.mark.parametrize("change, match", [
    (lambda x, ids, w: (x.float(), ids, w), r"x\.dtype = torch\.float32: must be torch\.bfloat16"),
    (lambda x, ids, w: (x[:, :16].contiguous(), ids, w), r"x\.shape = \(2, 16\): must be \(any, 32\)"),
    (lambda x, ids, w: (x[0], ids, w), r"x\.shape"),
    (lambda x, ids, w: (x.repeat(2, 1), ids, w), r"x\.shape\[0\] = 4: must not exceed"),
    (lambda x, ids, w: (strided(x), ids, w), r"x\.stride\(\)"),
    (lambda x, ids, w: (torch.zeros(65).bfloat16()[1:].view(2, 32), ids, w), r"x\.data_ptr\(\).*16 bytes"),
    (lambda x, ids, w: (x.tolist(), ids, w), r"x = list: must be a torch\.Tensor"),
    (lambda x, ids, w: (x, ids.short(), w), r"topk_ids\.dtype = torch\.int16: must be torch\.int32 or torch\.int64"),
    (lambda x, ids, w: (x, ids[:1], w), r"topk_ids\.shape = \(1, 2\): must be \(2, 2\)"),
    (lambda x, ids, w: (x, ids[:, :1].contiguous(), w), r"topk_ids\.shape"),
    (lambda x, ids, w: (x, strided(ids), w), r"topk_ids\.stride"),
    (lambda x, ids, w: (x, ids.to("meta"), w), r"topk_ids\.device = meta: must be cpu"),
    (lambda x, ids, w: (x, ids, w.double()), r"router_weights\.dtype"),
    (lambda x, ids, w: (x, ids, w[:1]), r"router_weights\.shape"),
])  # fmt: skip
def test_bad_tensors(change, match):
    cfg = small()
    xs, ids, weights = arguments(cfg)
    xs[1], ids[1], weights[1] = change(xs[1], ids[1], weights[1])
    with pytest.raises(EPInputError, match=match):
        reference.dispatch(cfg, xs, ids, None, weights)


def test_bad_lists_and_scales():
    cfg = small()
    xs, ids, _ = arguments(cfg)
    for broken in (
        (xs[:1], ids, None, None),
        (xs, ids[:1], None, None),
        (xs, ids, [1.0], None),
        (xs, ids, None, []),
    ):
        with pytest.raises(EPInputError, match="must be world_size = 2"):
            reference.dispatch(cfg, *broken)
    for bad in (0.0, torch.nan, torch.ones(2), torch.ones(1).double(), torch.zeros(1)):
        with pytest.raises(EPInputError, match="scale"):
            reference.dispatch(cfg, xs, ids, [1.0, bad])
    with pytest.raises(EPInputError, match="no global scale"):
        reference.dispatch(replace(cfg, dispatch_format="bf16"), xs, ids, [1.0, 1.0])


# ---- workloads


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_ranks_inputs_do_not_depend_on_the_others(routing):
    cfg = small(num_experts=16, world_size=4, top_k=3, max_tokens_per_rank=64)
    every = make_inputs(cfg, [64, 0, 7, 33], routing, seed=9)
    alone = make_rank_inputs(cfg, 3, 33, routing, seed=9)
    for field in fields(alone):
        assert_bits(getattr(alone, field.name), getattr(every[3], field.name), field.name)
    assert not torch.equal(every[3].x, make_rank_inputs(cfg, 3, 33, routing, seed=10).x)
    assert not torch.equal(every[3].x, make_rank_inputs(cfg, 2, 33, routing, seed=9).x)
    for tokens, one in zip([64, 0, 7, 33], every, strict=True):
        check_tokens(cfg, one.x, one.topk_ids, one.router_weights)
        reference.check_expert_ids(cfg, one.topk_ids)
        assert one.x.shape[0] == tokens
        for token in one.topk_ids.tolist():
            chosen = [expert for expert in token if expert >= 0]
            assert routing == "repeated" or len(set(chosen)) == len(chosen)
            assert routing == "masked" or len(chosen) == 3


def test_routings_keep_their_promise():
    cfg = small(num_experts=32, world_size=4, top_k=4, max_tokens_per_rank=2000)
    ids = {routing: make_rank_inputs(cfg, 1, 2000, routing, 0).topk_ids for routing in ROUTINGS}
    counts = {routing: one[one >= 0].long().bincount(minlength=32) for routing, one in ids.items()}
    assert counts["uniform"].min() > 150 and counts["uniform"].max() < 350
    assert counts["zipf"][0] > 5 * counts["zipf"][31] and counts["zipf"].argmax() == 0
    assert (ids["one_expert"][:, 0] == 0).all() and (ids["one_expert"][:, 1:] > 0).all()
    assert (ids["one_rank"] >= 24).all() and counts["one_rank"][24:].min() > 500
    masked = ids["masked"] == -1
    assert masked[1::5].all() and 0.4 < masked.float().mean() < 0.53
    assert not masked.all(dim=1)[0::5].all()
    repeated = ids["repeated"]
    assert (repeated[0::3, 0] == repeated[0::3, -1]).all() and (repeated[1::6] == repeated[1::6, :1]).all()
    assert all(len(set(token)) == 4 for token in repeated[2::3].tolist())
    wide = make_rank_inputs(small(num_experts=8, world_size=4, top_k=5), 0, 3, "one_rank", 0).topk_ids
    assert all({6, 7} < set(token) for token in wide.tolist())
    alone = make_rank_inputs(small(top_k=1), 0, 3, "one_expert", 0).topk_ids
    assert alone.tolist() == [[0], [0], [0]]
    assert make_rank_inputs(small(num_experts=1, world_size=1, top_k=1), 0, 3, "one_expert", 0).topk_ids.sum() == 0


def test_skip_a2a_gives_every_rank_the_same():
    cfg = small(skip_a2a=True)
    first, second = make_inputs(cfg, [3, 3], "uniform", 5)
    for field in fields(first):
        assert_bits(getattr(second, field.name), getattr(first, field.name), field.name)
    with pytest.raises(EPInputError, match="must be the same on all ranks"):
        make_inputs(cfg, [3, 2], "uniform", 5)


def test_workload_arguments():
    cfg = small()
    with pytest.raises(EPInputError, match="routing"):
        make_inputs(cfg, [1, 1], "round_robin", 0)
    with pytest.raises(EPInputError, match="world_size"):
        make_inputs(cfg, [1], "uniform", 0)
    with pytest.raises(EPInputError, match="max_tokens_per_rank"):
        make_inputs(cfg, [1, 4], "uniform", 0)
