"""The byte maps and routings of `perf.mirror`: whatever rank r stores for rank p lands where the other GPU reads what
rank p stores."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cute_ep.layouts.maps.arena import regions_of
from perf.cases import MAIN
from perf.mirror import CONSUMED, GPUS, SOURCE_MODE, Blocks, as_rank, main, mirrored_ids

ARENAS = (1 << 40, 1 << 41)
CASES = [(ranks, tokens, fmt) for ranks in (4, 8) for tokens in (7, 1500) for fmt in ("bf16", "nvfp4")]


@pytest.mark.parametrize(("ranks", "tokens", "fmt"), CASES)
def test_stores_land_where_the_other_rank_looks(ranks: int, tokens: int, fmt: str) -> None:
    cfg = MAIN.config(fmt, ranks, tokens)
    blocks = Blocks.of(cfg)
    regions = regions_of(blocks.arguments)._asdict()
    assert SOURCE_MODE.keys() <= regions.keys() == cfg.arena.regions.keys()
    for rank in range(GPUS):
        addresses = blocks.addresses(rank, ARENAS, ranks)
        assert addresses[:GPUS] == list(ARENAS)
        for name, mode in SOURCE_MODE.items():
            shape = cfg.arena.regions[name].shape[:-1]
            corners = product(*({0, max(0, extent - 1)} if i != mode else {0} for i, extent in enumerate(shape)))
            for corner in corners:

                def at(source: int, corner: tuple[int, ...] = corner, name: str = name, mode: int = mode) -> int:
                    coord = list(corner)
                    coord[mode] = source
                    return regions[name].at(*coord)

                for peer in set(range(ranks)) - {rank}:
                    source = rank if peer < GPUS else peer
                    assert addresses[peer] + at(rank) == ARENAS[1 - rank] + at(source), (name, rank, peer)


@pytest.mark.parametrize(("ranks", "tokens", "fmt"), CASES)
def test_regions_of_the_mirrored_sources_do_not_overlap(ranks: int, tokens: int, fmt: str) -> None:
    """Within a block the regions follow each other, each as large as its part of the real arena."""
    cfg = MAIN.config(fmt, ranks, tokens)
    blocks = Blocks.of(cfg)
    end = 0
    for name, region in cfg.arena.regions.items():
        assert getattr(blocks.arguments, name).at >= end
        sources = region.shape[SOURCE_MODE[name]] if name in SOURCE_MODE else 1
        end = getattr(blocks.arguments, name).at + region.nbytes // sources
        own = (*CONSUMED, "state", "combine_tickets", "peers")
        assert name in SOURCE_MODE or name in own, "a region that the mirror does not know"
    assert end <= blocks.nbytes
    farthest = max(cfg.world_size, cfg.top_k) + ranks - 1
    assert farthest < blocks.count, "shifted slots are inside the allocation"


@pytest.mark.parametrize("count", [0, 1])
def test_a_machine_with_too_few_gpus_is_told_in_one_line(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As the suite says it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr("sys.argv", ["mirror.py", "--tune"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert f"cuda:1 is not here, the machine has {count} CUDA GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_mirrored_routing_sends_all_other_ranks_the_same(ranks: int) -> None:
    cfg, tokens = MAIN.config("bf16", ranks, 512), 512
    for rank in range(GPUS):
        ids = mirrored_ids(cfg, tokens, rank, torch.Generator().manual_seed(rank))
        assert ids.shape == (tokens, cfg.top_k) and all(len(set(row)) == cfg.top_k for row in ids.tolist())
        local = [(ids % cfg.local_experts).where(ids // cfg.local_experts == peer, -1) for peer in range(ranks)]
        sets = [[frozenset(row) - {-1} for row in one.tolist()] for one in local]
        others = [sets[peer] for peer in range(ranks) if peer != rank]
        assert all(one == others[0] for one in others)
        reached = sum(map(bool, others[0])) / tokens
        assert reached == pytest.approx(1 - (1 - 1 / ranks) ** cfg.top_k, abs=1 / tokens)
        for other in range(GPUS, ranks):
            swapped = as_rank(cfg, ids, rank, other)
            assert torch.equal(as_rank(cfg, swapped, rank, other), ids)
            assert torch.equal(swapped % cfg.local_experts, ids % cfg.local_experts)
            assert ((swapped // cfg.local_experts == other) == (ids // cfg.local_experts == rank)).all()
