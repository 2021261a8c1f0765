"""The mail map against a computation that shares no code with it: sizes, places, and what no two regions share."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.mail import Mail, Piece, Routes

PAGE = 2 << 20


@st.composite
def deployments(draw: st.DrawFn) -> EPConfig:
    fmt = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    nodes, ranks, local = draw(st.integers(2, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    top_k = draw(st.integers(1, min(32, local * ranks)))
    hidden = fmt.multiple * draw(st.integers(1, 16))
    tokens = draw(st.integers(1, 4096 // nodes))
    experts = local * ranks * nodes
    return EPConfig(hidden, experts, top_k, tokens, nodes * ranks, fmt.name, ranks_per_node=ranks)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@given(deployments())
def test_sizes_by_hand(cfg: EPConfig) -> None:
    """Words of two channels, then rows, scale factors and routes of every node, and sums of two parities both ways."""
    nodes, tokens, fmt = cfg.nodes, cfg.max_tokens_per_rank, cfg.format
    words = [2 * 3, nodes, 2 * nodes * 3, 2 * nodes]
    routes = 16 + tokens * (8 * cfg.top_k + fmt.row_scale_bytes)
    sums = 2 * nodes * up(16 + tokens * 2 * cfg.hidden, 16)
    rows = [nodes * tokens * fmt.payload_bytes(cfg.hidden), nodes * tokens * fmt.scale_bytes(cfg.hidden)]
    parts = [*(8 * count for count in words), *rows, nodes * up(routes, 16), sums, sums]
    assert cfg.mail.nbytes == sum(up(part, 256) for part in parts)
    assert memory_bytes(cfg) == cfg.arena.allocation + up(cfg.mail.nbytes, PAGE)


@given(deployments(), st.data())
def test_pieces_of_any_frame_lie_in_their_regions_side_by_side(cfg: EPConfig, data: st.DataObject) -> None:
    """Rows of all nodes are one tensor; nobody's piece reaches into another's."""
    frame, mail = data.draw(st.integers(1, cfg.max_tokens_per_rank)), cfg.mail
    routes = Routes.of(frame, cfg.top_k, cfg.format.row_scale_bytes)
    taken = []
    for piece, begin, step, nbytes in mail.pieces(frame, routes):
        assert begin % 16 == 0 and step % (16 if piece in (Piece.PAYLOAD, Piece.ROUTES) else 1) == 0
        assert step == nbytes or piece == Piece.ROUTES
        taken += [(begin + node * step, begin + node * step + nbytes) for node in range(cfg.nodes)]
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert {piece for piece, *_ in mail.pieces(frame, routes)} == {
        Piece.PAYLOAD,
        Piece.ROUTES,
        *([Piece.SCALES] if cfg.format.scale else []),
    }
    first, last = mail.payload.at(), mail.sums.at()
    assert first <= taken[0][0] and taken[-1][1] <= last


def test_a_usual_deployment_takes_little() -> None:
    """Two nodes of eight GPUs, 128 BF16 tokens: 0.13 GiB a rank; one node has no mail."""
    cfg = EPConfig(7168, 256, 8, 128, 16, ranks_per_node=8)
    assert memory_bytes(cfg) / 2**30 == pytest.approx(0.131, abs=0.001)
    one = EPConfig(7168, 256, 8, 128, 8)
    assert memory_bytes(one) == one.arena.allocation


def test_the_map_is_for_any_number_of_rows_up_to_its_most() -> None:
    mail = Mail(nodes=2, max_tokens=4, top_k=2, fmt=FORMATS["nvfp4_row"], hidden=64)
    assert Routes.of(4, 2, 2).nbytes <= mail.routes.stride[0]
    with pytest.raises(EPConfigError):
        EPConfig(64, 4, 2, 0, 2, ranks_per_node=1)
