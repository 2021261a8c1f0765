"""Reference dispatch against a scalar model of its row order, plus the workloads."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ep import reference
from cute_ep.compare import assert_bits
from cute_ep.config import EPConfig
from cute_ep.dispatched import DispatchBuffers, Dispatched
from cute_ep.errors import EPInputError
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.scales import scale_blocks
from cute_ep.workloads import ROUTINGS, make_inputs, make_rank_inputs
from tests.cases import CASES, Case


def entries_in_order(cfg: EPConfig, topk_ids: list[torch.Tensor], rank: int) -> list[tuple[int, int, int, int]]:
    """(local expert, source, token, slot) of every row of `rank`, by the definition of the row order."""
    local = cfg.num_experts // cfg.world_size
    ids = [tensor.tolist() for tensor in topk_ids]
    return [
        (expert, source, token, slot)
        for expert in range(local)
        for source in range(cfg.world_size)
        for token in range(len(ids[source]))
        for slot in range(cfg.top_k)
        if ids[source][token][slot] == rank * local + expert
    ]


def check_dispatch(
    cfg: EPConfig,
    xs: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    input_scales: list | None = None,
    router_weights: list | None = None,
) -> list[Dispatched]:
    results = reference.dispatch(cfg, xs, topk_ids, input_scales, router_weights)
    assert len(results) == cfg.world_size
    factors = [1.0 if scale is None else scale for scale in input_scales or [1.0] * cfg.world_size]
    encoded = [reference.quantize(x, cfg.format, factor) for x, factor in zip(xs, factors, strict=True)]
    given_weights = router_weights or [None] * cfg.world_size
    for rank, batch in enumerate(results):
        entries = entries_in_order(cfg, topk_ids, rank)
        name = f"rank {rank} "
        assert batch.num_rows.tolist() == [len(entries)]
        counts = [sum(entry[0] == expert for entry in entries) for expert in range(cfg.local_experts)]
        starts = [sum(counts[:expert]) for expert in range(cfg.local_experts + 1)]
        assert_bits(batch.row_offsets, torch.tensor(starts).to(torch.uint32), name + "row_offsets")
        assert_bits(batch.expert_ids, torch.arange(cfg.local_experts).int(), name + "expert_ids")
        info = torch.tensor([entry[2:] for entry in entries], dtype=torch.int32).reshape(-1, 2)
        assert_bits(batch.src_info, info, name + "src_info")
        row_map = torch.full((cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k), -1, dtype=torch.int32)
        for row, (_, *entry) in enumerate(entries):
            row_map[tuple(entry)] = row
        assert_bits(batch.row_map, row_map, name + "row_map")
        tokens = [encoded[source][0][token] for _, source, token, _ in entries]
        tokens = torch.stack(tokens) if tokens else encoded[0][0][:0]
        assert_bits(batch.tokens, tokens, name + "tokens")
        if cfg.format.scale is None:
            assert batch.scales is None and batch.scales_offsets is None
        else:
            first_block = [sum(-(-count // 128) for count in counts[:e]) for e in range(cfg.local_experts + 1)]
            assert batch.scales.shape[0] == first_block[-1] <= scale_blocks(len(entries), cfg.local_experts)
            offsets, blocks = batch.row_offsets.tolist(), batch.scales_offsets
            assert blocks.dtype == torch.uint32
            found = [offsets[e] // 128 + block for e, block in enumerate(blocks.tolist())]
            assert found == first_block[:-1]
            atoms = batch.scales.clone()
            for row, (expert, source, token, _) in enumerate(entries):
                at, want = row - offsets[expert], encoded[source][1][token]
                block = atoms[first_block[expert] + at // 128, :, at % 32, at % 128 // 32]
                assert_bits(block.flatten()[: want.numel()], want, name + f"scales of row {row}")
                block.view(-1, 4)[...] = 0
            assert not atoms.any(), "padding must be zero"
        header = [
            [x.shape[0], 1, weights is not None, x.shape[0]] for x, weights in zip(xs, given_weights, strict=True)
        ]
        assert_bits(batch.headers, torch.tensor(header, dtype=torch.int32), name + "headers")
        assert batch.headers[rank, HeaderWord.CHUNK] == batch.tokens_per_chunk == 1
        if all(weights is None for weights in given_weights):
            assert batch.weights is None
        else:
            weights = torch.zeros(row_map.shape)
            for _, source, token, slot in entries:
                if given_weights[source] is not None:
                    weights[source, token, slot] = given_weights[source][token, slot]
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
    assert sum(batch.num_rows.item() for batch in batches) == routed
    assert all(batch.num_rows.item() <= case.cfg.max_rows for batch in batches)


def test_cases_are_adversarial():
    """What the list was made for is in it: empty and full ranks, masked tokens, part blocks, worst case."""
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.routing for case in CASES} == set(ROUTINGS)
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
    ranks, local, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts, tokens = ranks * local, [draw(st.integers(0, 6)) for _ in range(ranks)]
    fmt = draw(st.sampled_from(["bf16", "nvfp4"]))
    cfg = EPConfig(
        hidden=draw(st.sampled_from([32, 96])),
        num_experts=experts,
        top_k=min(top_k, experts),
        max_tokens_per_rank=6,
        world_size=ranks,
        dispatch_format=fmt,
    )
    expert = st.integers(-1, experts - 1)
    ids = [
        torch.tensor(draw(st.lists(expert, min_size=t * cfg.top_k, max_size=t * cfg.top_k)), dtype=torch.int32)
        for t in tokens
    ]
    return cfg, [one.reshape(-1, cfg.top_k) for one in ids], draw(st.integers(0, 2)), draw(st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(routed_batches())
def test_any_routing_with_duplicates_and_masks(batch):
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
        payload, scales = reference.quantize(x, "nvfp4", scale)
        assert_bits(one.tokens[row : row + 1], payload, "tokens")
        assert_bits(reference.unswizzle_scales(one.scales, [2, 0], 2)[row : row + 1], scales, "scales")
    assert not torch.equal(*reference.unswizzle_scales(one.scales, [2, 0], 2))


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_types_and_shapes_match_allocated_buffers(fmt):
    cfg = small(dispatch_format=fmt)
    xs, ids, weights = arguments(cfg)
    for batch in reference.dispatch(cfg, xs, ids, None, weights):
        buffers = DispatchBuffers.allocate(cfg, "cpu", batch.num_rows.item())
        for field in fields(buffers):
            got, want = getattr(batch, field.name), getattr(buffers, field.name)
            assert (got is None) == (want is None), field.name
            if want is not None:
                assert got.dtype == want.dtype and got.device == want.device, field.name
                assert field.name == "scales" or got.shape == want.shape, field.name
                assert got.shape[1:] == want.shape[1:], field.name


@pytest.mark.parametrize("value", [-2, 4, 2**31 - 1, -(2**31)])
def test_expert_id_out_of_range(value):
    cfg = small()
    xs, ids, _ = arguments(cfg)
    ids[1][1, 0] = value
    with pytest.raises(EPInputError, match=rf"topk_ids\[1, 0\] = {value}: must be -1 or in \[0, 4\)"):
        reference.dispatch(cfg, xs, ids)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("change, match", [
    (lambda x, ids, w: (x.float(), ids, w), r"x\.dtype = torch\.float32: must be torch\.bfloat16"),
    (lambda x, ids, w: (x[:, :16].contiguous(), ids, w), r"x\.shape = \(2, 16\): must be \(any, 32\)"),
    (lambda x, ids, w: (x[0], ids, w), r"x\.shape"),
    (lambda x, ids, w: (x.repeat(2, 1), ids, w), r"x\.shape\[0\] = 4: must not exceed"),
    (lambda x, ids, w: (strided(x), ids, w), r"x\.stride\(\)"),
    (lambda x, ids, w: (torch.zeros(65).bfloat16()[1:].view(2, 32), ids, w), r"x\.data_ptr\(\).*16 bytes"),
    (lambda x, ids, w: (x.tolist(), ids, w), r"x = list: must be a torch\.Tensor"),
    (lambda x, ids, w: (x, ids.long(), w), r"topk_ids\.dtype = torch\.int64: must be torch\.int32"),
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
        reference.check_tokens(cfg, one.x, one.topk_ids, one.router_weights)
        reference.check_expert_ids(cfg, one.topk_ids)
        assert one.x.shape[0] == tokens
        for token in one.topk_ids.tolist():
            chosen = [expert for expert in token if expert >= 0]
            assert len(set(chosen)) == len(chosen) and (routing == "masked" or len(chosen) == 3)


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
    wide = make_rank_inputs(small(num_experts=8, world_size=4, top_k=5), 0, 3, "one_rank", 0).topk_ids
    assert all({6, 7} < set(token) for token in wide.tolist())
    alone = make_rank_inputs(small(top_k=1), 0, 3, "one_expert", 0).topk_ids
    assert alone.tolist() == [[0], [0], [0]]
    assert make_rank_inputs(small(num_experts=1, world_size=1, top_k=1), 0, 3, "one_expert", 0).topk_ids.sum() == 0


def test_workload_arguments():
    cfg = small()
    with pytest.raises(EPInputError, match="routing"):
        make_inputs(cfg, [1, 1], "round_robin", 0)
    with pytest.raises(EPInputError, match="world_size"):
        make_inputs(cfg, [1], "uniform", 0)
    with pytest.raises(EPInputError, match="max_tokens_per_rank"):
        make_inputs(cfg, [1, 4], "uniform", 0)
