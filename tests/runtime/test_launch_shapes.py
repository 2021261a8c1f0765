"""The shape of each launch of a communicator: its CTAs and their roles, slices of rows, and whether it starts early."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, are_flagged, has_whole_segments, return_slices_log2
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.launch import LEAST_STAGES, PIPED_THREADS, PIPELINES, RING_BYTES
from cute_ep.layouts.maps.parameters import numbers
from cute_ep.layouts.maps.variants import COMBINE_MODES, DISPATCH_OPERATIONS, NO_HOOKS, PIPED_KERNELS, CombineMode
from cute_ep.runtime import parts
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.gpus import KEPT_BYTES, ring_bytes
from cute_ep.runtime.launch_cache import LaunchCache
from cute_ep.runtime.parts import load_kernels
from cute_ep.tuning.builtin import built_in
from cute_ep.tuning.launch_shape import MANY, PIPED_TOKENS, TWIN_CTAS, Entry, Tuning
from tests.fake_gpu import CFG, MAX_CTAS, EveryVariant, Launch, Launches, MakeRank, expert_rows, inputs

ONE_TUNING = Tuning(
    dispatch=(Entry(8, 40, 0.25, 8, packed=True), Entry(MANY, 10, 0, 1)),
    combine=(Entry(8, 40, 0, 16), Entry(MANY, 9, 0, 1)),
)
ANOTHER_TUNING = Tuning(
    dispatch=(Entry(8, 20, 0.5, 4), Entry(MANY, 10, 0, 1)),
    combine=(Entry(8, 30, 0.8, 2), Entry(MANY, 9, 0, 1)),
)


class Shape(NamedTuple):
    """What a launch was given of its shape; slices are logarithms, None where the kernel has no such argument, and 0
    where it does not read it."""

    grid: int
    send_ctas: int
    receive_from: int
    packed: int
    message_slices_log2: int | None
    return_slices_log2: int | None

    @classmethod
    def of(cls, launch: Launch) -> Shape:
        returned = "input.returns" if launch.kernel.startswith("dispatch") else "sums.return_slices_log2"
        names = ("grid.send_ctas", "grid.receive_from", "grid.packed", "input.message_slices_log2", returned)
        return cls(launch.grid, *(launch.arguments.get(name) for name in names))


def grid_of(ctas: int, senders: float = 0) -> Tuning:
    """Every call takes these CTAs; of a combine this share sends."""
    return Tuning((Entry(MANY, ctas, 0, 1),), (Entry(MANY, ctas, senders, 1),))


def test_every_call_has_the_shape_of_the_tuning_that_is_set_then(rank: Communicator, launches: Launches) -> None:
    rank.tuning = ONE_TUNING
    batch = rank.dispatch(*inputs(5))
    assert Shape.of(launches.last()) == Shape(40, 10, 10, packed=1, message_slices_log2=3, return_slices_log2=4)

    rank.tuning = ANOTHER_TUNING
    rank.combine(expert_rows(batch), batch, mode="partial")
    wanted = Shape(30, 24, 24, packed=0, message_slices_log2=None, return_slices_log2=4)
    assert Shape.of(launches.last()) == wanted, "rows come home in the slices that their dispatch published"

    batch = rank.dispatch(*inputs(5))
    assert Shape.of(launches.last()) == Shape(20, 10, 10, packed=0, message_slices_log2=2, return_slices_log2=1)
    rank.combine(expert_rows(batch), batch, mode="exact")
    wanted = Shape(30, 7, 7, packed=0, message_slices_log2=None, return_slices_log2=1)
    assert Shape.of(launches.last()) == wanted, "where whole rows come home, at most a quarter of the CTAs send"

    rank.dispatch_wait(rank.dispatch_async(*inputs(9)))
    wanted = Shape(10, 10, 10, packed=0, message_slices_log2=0, return_slices_log2=0)
    assert Shape.of(launches.only("dispatch_async")) == wanted
    assert Shape.of(launches.only("dispatch_wait")) == Shape(10, 0, 0, 0, 0, 0)

    rank.dispatch(*inputs(0))
    wanted = Shape(10, 10, 0, packed=0, message_slices_log2=0, return_slices_log2=0)
    assert Shape.of(launches.last()) == wanted, "no tokens: as many as there may be"

    pdl = launches.values("grid.pdl")
    assert pdl == [int(2 * launch.grid <= MAX_CTAS) for launch in launches]
    early = [launch.early for launch in launches]
    assert early == [False, *(first and then for first, then in pairwise(pdl))]


def test_a_launch_starts_early_when_it_and_the_one_before_fit_side_by_side(
    rank: Communicator, launches: Launches
) -> None:
    """Each takes at most half of the 64 CTAs that are resident together."""
    for grid in (40, 32, 32, 33, 32):
        rank.tuning = grid_of(grid)
        rank.dispatch(*inputs())
    assert [(launch.grid, launch.arguments["grid.pdl"], launch.early) for launch in launches] == [
        (40, 0, False),
        (32, 1, False),
        (32, 1, True),
        (33, 0, False),
        (32, 1, False),
    ]


@pytest.mark.parametrize("pairs", [False, True])
def test_launches_that_leave_sms_free_are_of_pairs_of_ctas(
    make_rank: MakeRank, launches: Launches, pairs: bool
) -> None:
    """Whatever the number of tokens and the operation; a grid of one CTA is none, and one CTA of an odd number stays
    out. Roles and early starts go by the CTAs that there are."""
    rank = make_rank(pairs=pairs)
    for grid, pair_grid, senders in ((1, 1, 1), (2, 2, 1), (3, 2, 1), (33, 32, 16), (40, 40, 20), (64, 64, 32)):
        rank.tuning = Tuning((Entry(MANY, grid, 0.5, 1, split_from=2),), (Entry(MANY, grid, 0.5, 1, split_from=2),))
        before = len(launches)
        for tokens in (0, 5):
            batch = rank.dispatch(*inputs(tokens))
            rank.combine(expert_rows(batch), batch, mode="partial")
            batch = rank.dispatch_wait(rank.dispatch_async(*inputs(tokens)))
            rank.combine_wait(rank.combine_async(expert_rows(batch), batch, "partial"))
        made = list(launches)[before:]
        assert len(made) == 12
        wanted = pair_grid if pairs else grid
        assert {(one.grid, one.pairs) for one in made} == {(wanted, pairs and grid > 1)}
        assert {one.arguments["grid.pdl"] for one in made} == {int(2 * wanted <= MAX_CTAS)}
        fused = [one.arguments["grid.send_ctas"] for one in made if one.kernel in ("dispatch", "combine_partial")]
        assert fused == [senders if pairs else max(1, round(grid / 2))] * 4
    assert any(launch.early for launch in launches)


@pytest.mark.parametrize(("mode", "senders"), [("exact", 10), ("unweighted", 10), ("partial", 30)])
def test_at_most_a_quarter_of_the_ctas_send_whole_rows(
    rank: Communicator, launches: Launches, mode: str, senders: int
) -> None:
    """Partial sums are sent by as many as the table says: 0.75 of 40."""
    rank.tuning = grid_of(40, 0.75)
    batch = rank.dispatch(*inputs())
    rank.combine(expert_rows(batch), batch, mode=mode)
    assert launches.last("combine").values("grid.send_ctas", "grid.receive_from") == (senders, senders)


@pytest.mark.parametrize("fmt", FORMATS)
def test_messages_are_cut_only_where_segments_are_whole(make_rank: MakeRank, launches: Launches, fmt: str) -> None:
    """Fused and split. Rows come home in bfloat16, whatever the format."""
    rank = make_rank(replace(CFG, dispatch_format=fmt))
    rank.tuning, (x, ids, weights) = ONE_TUNING, inputs(5)
    wanted = (3 if has_whole_segments(FORMATS[fmt]) else 0, 4)
    for send in (rank.dispatch, rank.dispatch_async):
        send(x, ids, weights)
        assert launches.last().values("input.message_slices_log2", "input.returns") == wanted


def test_slots_of_partial_sums_lie_side_by_side(make_rank: MakeRank, launches: Launches) -> None:
    """Slots of exact mode would, too, if there were as many of a token as there are ranks."""
    cfg = replace(CFG, top_k=3)
    rank, wide, narrow = make_rank(cfg), cfg.arena.arguments(), cfg.arena.arguments(partial=True)
    assert wide != narrow
    x, _, _ = inputs()
    batch = rank.dispatch(x, torch.zeros(5, 3, dtype=torch.int32), torch.ones(5, 3))
    rows = expert_rows(batch)
    for mode in ("exact", "unweighted", "partial"):
        rank.combine(rows, batch, mode=mode)
        rank.combine_wait(rank.combine_async(rows, batch, mode))
    for launch in launches:
        given = narrow if launch.kernel.endswith("partial") else wide
        assert launch.record("arena") == tuple(numbers(given)), launch.kernel
    assert sum(kernel.endswith("partial") for kernel in launches.kernels) == 3


RING, LEAST_RING = RING_BYTES, (LEAST_STAGES + 1) * PIPELINES * 14336


@pytest.mark.parametrize(
    ("operation", "tokens", "hidden", "whole_sms", "ring_bytes", "piped"),
    [
        pytest.param("combine", 24 * PIPED_TOKENS + 1, 7168, True, RING, True, id="many tokens, an SM for each CTA"),
        pytest.param("combine_async", 4096, 512, True, RING, True, id="its first half"),
        pytest.param("combine_wait", 4096, 512, True, RING, False, id="its second half sends nothing"),
        pytest.param("dispatch", 4096, 512, True, RING, False, id="dispatch"),
        pytest.param("combine", 24 * PIPED_TOKENS, 7168, True, RING, False, id="Lamport rows"),
        pytest.param("combine", 0, 7168, True, RING, True, id="no tokens: others may have many"),
        pytest.param("combine", 4096, 7168, False, RING, False, id="two CTAs on an SM"),
        pytest.param("combine", 4096, 7184, True, RING, False, id="longer rows than consumers take"),
        pytest.param("combine", 4096, 7168, True, LEAST_RING, True, id="the least stages, and a row aside"),
        pytest.param("combine", 4096, 7168, True, LEAST_RING - 1, False, id="no room for them"),
        pytest.param("combine", 4096, 7168, True, 0, False, id="no stages"),
    ],
)
def test_combine_has_pipelines_for_many_tokens_of_ctas_with_an_sm_each(
    operation: str, tokens: int, hidden: int, whole_sms: bool, ring_bytes: int, piped: bool
) -> None:
    cfg = EPConfig(hidden, 8, 2, 4096, 2)
    cache = LaunchCache(cfg, 0, 24, {}, pairs=False, whole_sms=whole_sms, ring_bytes=ring_bytes)
    shape = cache.shape(built_in(cfg, 24), operation, tokens)
    assert shape.suffix == "_piped" * piped and shape.grid.ring_bytes == piped * ring_bytes
    assert shape.grid.warps * 32 == shape.threads and (shape.threads == PIPED_THREADS or not piped)


@pytest.mark.parametrize(
    ("tokens", "most", "hidden", "ring_bytes", "flagged"),
    [
        pytest.param(24 * PIPED_TOKENS + 1, 4096, 7168, RING, True, id="more tokens than without pipelines"),
        pytest.param(24 * PIPED_TOKENS, 4096, 7168, RING, False, id="fewer"),
        pytest.param(24 * PIPED_TOKENS + 1, LAMPORT_TOKENS, 7168, RING, False, id="room for Lamport rows only"),
        pytest.param(24 * PIPED_TOKENS + 1, 4096, 7184, RING, False, id="longer rows than pipelines carry"),
        pytest.param(LAMPORT_TOKENS, 4096, 7168, 0, False, id="no pipelines"),
        pytest.param(LAMPORT_TOKENS + 1, 4096, 7168, 0, True, id="many tokens"),
        pytest.param(0, 4096, 7168, RING, False, id="none"),
    ],
)
def test_a_source_says_whether_its_rows_come_home_with_flags(
    tokens: int, most: int, hidden: int, ring_bytes: int, flagged: bool
) -> None:
    """In the header of its dispatch, and to its own combine, fused and split, whatever has the slices: with flags there
    are at most MANY_SLICES."""
    cfg = EPConfig(hidden, 8, 2, most, 2)
    cache = LaunchCache(cfg, 0, 24, {}, pairs=False, whole_sms=True, ring_bytes=ring_bytes)
    shapes = [
        cache.shape(grid_of(24), one, tokens) for one in ("dispatch", "dispatch_async", "combine", "combine_wait")
    ]
    tables = Tuning((Entry(MANY, MANY, 0, 1),), (Entry(LAMPORT_TOKENS, MANY, 0, 32), Entry(MANY, MANY, 0, 8)))
    shapes += [cache.shape(tables, "dispatch", tokens)]
    assert [are_flagged(one.returns) for one in shapes] == [flagged] * 5 == [one.flagged for one in shapes]
    few = not flagged and 0 < tokens
    assert [1 << return_slices_log2(one.returns) for one in shapes] == [1] * 4 + [32 if few else 8]


@pytest.mark.parametrize("operation", ["dispatch", "dispatch_async", "dispatch_wait"])
@pytest.mark.parametrize(
    ("ctas", "tokens", "ring_bytes", "pairs", "twins"),
    [
        pytest.param(24, 48, RING, False, True, id="two tokens a CTA"),
        pytest.param(24, 47, RING, False, False, id="fewer"),
        pytest.param(24, 0, RING, False, True, id="none: others may have many"),
        pytest.param(24, 4096, 0, False, False, id="no SM of its own"),
        pytest.param(9, 4096, RING, True, True, id="pairs of wide CTAs"),
        pytest.param(TWIN_CTAS, 4096, RING, False, True, id="as many as may have them"),
        pytest.param(TWIN_CTAS + 2, 4096, RING, False, False, id="more"),
    ],
)
def test_ctas_of_dispatch_have_twins(
    operation: str, ctas: int, tokens: int, ring_bytes: int, pairs: bool, twins: bool
) -> None:
    """Each counts as a CTA, but for what is launched and what fits side by side."""
    cfg = EPConfig(7168, 8, 2, 4096, 2)
    cache = LaunchCache(cfg, 0, ctas, {}, pairs=pairs, whole_sms=True, ring_bytes=ring_bytes)
    tuning = Tuning((Entry(MANY, MANY, 1 / 4, 1, packed=True),), (Entry(MANY, MANY, 0, 1),))
    shape, wanted = cache.shape(tuning, operation, tokens), ctas - ctas % 2 if pairs else ctas
    parts = wanted * (1 + twins)
    assert (shape.ctas, shape.threads, shape.grid.warps) == (wanted, 512 * (1 + twins), 16 * (1 + twins))
    senders = {"dispatch": parts // 4, "dispatch_async": parts, "dispatch_wait": 0}[operation]
    assert (shape.grid.send_ctas, shape.grid.receive_from) == (senders, senders)
    assert shape.grid.packed == (operation == "dispatch" and not twins), "twins are on one SM whatever their numbers"
    assert (shape.grid.pdl, shape.pairs) == (0, pairs)
    narrow = cache.shape(grid_of(wanted // 2), operation, tokens)
    assert narrow.ctas == wanted // 2 and narrow.grid.pdl == 1, "CTAs, not twins, fit side by side"


@pytest.mark.parametrize(
    ("ctas", "sms", "stages"),
    [
        pytest.param(124, 132, True, id="all SMs but 8"),
        pytest.param(125, 132, False, id="one more"),
        pytest.param(264, 132, False, id="two an SM"),
        pytest.param(125, 148, True, id="of a larger GPU"),
    ],
)
def test_pipelines_have_an_sm_for_each_cta_and_leave_some_free(
    monkeypatch: pytest.MonkeyPatch, ctas: int, sms: int, stages: bool
) -> None:
    have = SimpleNamespace(multi_processor_count=sms, shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: have)
    assert ring_bytes(torch.device("cuda"), ctas) == ((99 << 10) - KEPT_BYTES if stages else 0)


@pytest.mark.parametrize("mode", COMBINE_MODES)
@pytest.mark.parametrize("split", [False, True])
def test_pipelines_are_told_what_other_kernels_of_their_mode_are(
    make_rank: MakeRank, launches: Launches, mode: CombineMode, split: bool
) -> None:
    """In particular where rows are in the arena: those of few tokens, and of second halves, come by other kernels.
    Calls are alike, so that the second of each is a repeat."""
    cfg = EPConfig(128, 8, 4, LAMPORT_TOKENS + 1, 2)
    rank = make_rank(cfg, few=True)
    most = PIPED_TOKENS * rank.max_ctas
    for tokens in (most + 1, most):
        given = torch.zeros(tokens, 128).bfloat16(), torch.zeros(tokens, 4, dtype=torch.int32), torch.ones(tokens, 4)
        batch = rank.dispatch(*given)
        for _ in range(2):
            if split:
                rank.combine_wait(rank.combine_async(expert_rows(batch), batch, mode=mode))
            else:
                rank.combine(expert_rows(batch), batch, mode=mode)
    sent = [one for one in launches if one.kernel.startswith("combine") and "_wait" not in one.kernel]
    name = f"combine{'_async' * split}_{mode if mode == 'partial' or not split else 'exact'}"
    assert [one.kernel for one in sent] == [f"{name}_piped"] * 2 + [name] * 2
    arenas = {
        tuple(sorted((key, value) for key, value in one.arguments.items() if key.startswith("arena.")))
        for one in launches
        if one.kernel.startswith("combine")
    }
    assert len(arenas) == 1
    assert [one.arguments["grid.ring_bytes"] > 0 for one in sent] == [True, True, False, False]


@pytest.mark.usefixtures("make_rank")
@pytest.mark.parametrize("ring_bytes", [0, 200 << 10])
def test_kernels_have_shared_memory_for_twins_and_pipelines(monkeypatch: pytest.MonkeyPatch, ring_bytes: int) -> None:
    """Beyond what they were compiled for, where CTAs may take all of an SM's."""
    made = []

    def kernel(entry: SimpleNamespace, call: tuple, ring: int, *, twins: bool) -> SimpleNamespace:
        made.append((entry.variant.kernel, ring, twins))
        return SimpleNamespace(unload=None)

    monkeypatch.setattr(parts, "Kernel", kernel)
    load_kernels(CFG, torch.device("cpu"), EveryVariant(), NO_HOOKS, ring_bytes)
    piped, few = set(PIPED_KERNELS), ring_bytes > 0
    assert {name for name, ring, _ in made if ring} == (piped if few else set())
    assert {ring for _, ring, _ in made} == {0, ring_bytes}
    assert {name for name, _, twins in made if twins} == (set(DISPATCH_OPERATIONS) if few else set())
