from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.types import RowOrder
from cute_ep.layouts.maps.arena import HeaderWord, has_weights
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR
from cute_ep.layouts.maps.scales import ATOM, LINEAR, TRANSPOSED
from cute_ep.reference.backend import connect_reference
from cute_ep.testing import verify
from cute_ep.testing.compare import assert_bits, assert_prefix_and_poison, assert_untouched_behind
from cute_ep.testing.verify import (
    GUARD_BYTES,
    POISON,
    SPARE_ROWS,
    RoundOptions,
    check_dispatched,
    check_headers,
    check_round,
    guarded,
    poisoned_buffers,
)
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import changed


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.uint32], ids=str)
def test_assert_bits_reports_the_first_difference_and_their_number(dtype):
    expected = torch.arange(24).reshape(2, 3, 4).to(dtype)
    actual = expected.clone()
    assert_bits(actual, expected, "t")
    actual[1, 0, 2] = 3
    actual[1, 2, 3] = 3
    with pytest.raises(AssertionError, match=r"t\[1, 0, 2\].*2 of 24 elements differ"):
        assert_bits(actual, expected, "t")


def test_assert_bits_sees_signs_of_zeros_and_payloads_of_nans():
    assert_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]), "t")
    with pytest.raises(AssertionError, match=r"0x8000 .*0x0000"):
        assert_bits(torch.tensor(-0.0, dtype=torch.bfloat16), torch.tensor(0.0, dtype=torch.bfloat16), "t")
    nans = torch.tensor([0x7FFF, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"0x7fff .*0x7fc0"):
        assert_bits(nans[0], nans[1], "t")


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(3)],
    ids=["a column", "float64", "longer"],
)
def test_assert_bits_compares_shape_and_type(other):
    with pytest.raises(AssertionError, match=r"t: is .*expected"):
        assert_bits(torch.zeros(2), other, "t")


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_rows_behind_a_prefix_must_be_poison(shape, rows):
    actual = torch.full(shape, 0xA5A5A5A5 - (1 << 32), dtype=torch.int32)
    expected = torch.ones(rows, *shape[1:], dtype=torch.int32)
    actual[:rows] = 1
    assert_prefix_and_poison(actual, expected, 0xA5, "t")
    with pytest.raises(AssertionError):
        assert_prefix_and_poison(actual, torch.ones(5, *shape[1:], dtype=torch.int32), 0xA5, "t")
    if rows:
        actual[rows - 1] = 2
        with pytest.raises(AssertionError, match=f"t.{rows - 1}"):
            assert_prefix_and_poison(actual, expected, 0xA5, "t")
        actual[rows - 1] = 1
    if rows < 4:
        actual.view(torch.uint8).view(-1)[-1] = 0xA4
        with pytest.raises(AssertionError, match=r"t\[3\] byte .*0xa4.*1 of the"):
            assert_prefix_and_poison(actual, expected, 0xA5, "t")


@pytest.mark.parametrize("shape", [(0, 7), (3, 5), ()])
@pytest.mark.parametrize("byte", [0, GUARD_BYTES - 1])
def test_memory_behind_a_tensor_must_be_untouched(shape: tuple[int, ...], byte: int) -> None:
    tensor = guarded(shape, torch.bfloat16, torch.device("cpu"))
    tensor.zero_()
    tensors = {"u": torch.zeros(3), "t": tensor}
    assert_untouched_behind(tensors, POISON)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert memory.numel() == 2 * tensor.numel() + GUARD_BYTES
    memory[2 * tensor.numel() + byte] ^= 1
    with pytest.raises(AssertionError, match=f"t: byte {byte} behind it is 0xa4.*; 1 bytes"):
        assert_untouched_behind(tensors, POISON)


RANK, TOKENS = 1, (9, 0, 5)
FORMATS_AND_LAYOUTS = [("nvfp4_row", ATOM), ("nvfp4_row", LINEAR), ("fp8", TRANSPOSED), ("bf16", None)]


def dispatched(
    fmt: str,
    layout: str | None,
    tokens: tuple[int, ...] = TOKENS,
    *,
    alone: bool = False,
    order: RowOrder = EXPERT_MAJOR,
    ranks_per_node: int | None = None,
) -> tuple[EPConfig, Dispatched, Dispatched]:
    """A configuration, what RANK dispatched into poisoned buffers and what it should have."""
    cfg = EPConfig(
        128, 6, 2, 12, len(tokens), fmt, scale_layout=layout, row_alignment=4, skip_a2a=alone, row_order=order
    )
    cfg = replace(cfg, ranks_per_node=ranks_per_node)
    inputs = make_inputs(cfg, tokens, "masked", 3)
    xs, ids, weights = ([getattr(one, name) for one in inputs] for name in ("x", "topk_ids", "router_weights"))
    expected = reference.dispatch(cfg, xs, ids, None, weights)
    ranks = connect_reference(cfg)
    batches = [
        one.dispatch(x, i, w, out=poisoned_buffers(one, int(want.num_rows)))
        for one, x, i, w, want in zip(ranks, xs, ids, weights, expected, strict=True)
    ]
    return cfg, batches[RANK], expected[RANK]


def options_with(name: str) -> dict[str, Any]:
    """With which there is a tensor of this name."""
    return {"row_expert_ids": {"order": RANK_MAJOR}, "frame_ids": {"ranks_per_node": 1}}.get(name, {})


def contract(name: str, actual: Dispatched, expected: Dispatched) -> torch.Tensor:
    """Which elements of a field the contract defines, the poison behind the rows among them."""
    defined = torch.ones(getattr(actual, name).shape, dtype=torch.bool)
    if name in ("row_map", "weights"):
        for source, tokens in enumerate(TOKENS):
            defined[source, tokens:] = False
        if name == "weights":
            defined &= expected.row_map >= 0
    if name == "headers":
        defined[:] = False
        defined[:, HeaderWord.TOKENS] = True
        defined[:, HeaderWord.MESSAGES] = torch.tensor(TOKENS) > 0
        defined[RANK, HeaderWord.RETURNS] = True
    return defined


@pytest.mark.parametrize(("fmt", "layout"), FORMATS_AND_LAYOUTS)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_check_of_dispatch_sees_every_bit_that_the_contract_defines(fmt: str, layout: str | None, name: str) -> None:
    """One element after the other, and of rows one of each: the others may be anything."""
    cfg, actual, expected = dispatched(fmt, layout, **options_with(name))
    check_dispatched(actual, expected, cfg, RANK)
    tensor = getattr(actual, name)
    if tensor is None:
        return
    assert 0 < int(expected.num_rows) <= actual.tokens.shape[0] - SPARE_ROWS, "rows, and a tail"
    defined = contract(name, actual, expected)
    columns = tensor.view(torch.uint8).reshape(*tensor.shape[:-1], -1, tensor.element_size())
    places = defined.nonzero().tolist()
    for place in places[:: max(1, len(places) // 64)] + places[-1:]:
        byte = columns[tuple(place)]
        changed = 0 if name == "headers" else -1  # of how messages come only the lowest bit is defined
        byte[changed] ^= 1
        with pytest.raises(AssertionError, match=rf"rank {RANK} {name}\b"):
            check_dispatched(actual, expected, cfg, RANK)
        byte[changed] ^= 1
    columns[~defined] ^= 255
    if name == "headers":
        tensor[:, HeaderWord.MESSAGES] ^= ~has_weights(-1)
    check_dispatched(actual, expected, cfg, RANK)


def test_a_check_of_dispatch_names_the_source_and_the_word() -> None:
    cfg, actual, expected = dispatched("nvfp4_row", ATOM)
    for place, name in (
        ((2, HeaderWord.TOKENS), r"headers\[2\]\.tokens"),
        ((2, HeaderWord.MESSAGES), r"headers\[2\]\.has_weights"),
        ((RANK, HeaderWord.RETURNS), r"headers\.return_slices_log2"),
    ):
        headers = actual.headers.clone()
        headers[place] += 1
        with pytest.raises(AssertionError, match=rf"rank {RANK} {name}"):
            check_dispatched(changed(actual, headers=headers), expected, cfg, RANK)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_check_of_dispatch_sees_what_is_written_behind_a_tensor(name: str) -> None:
    cfg, actual, expected = dispatched("nvfp4_row", ATOM, **options_with(name))
    torch.empty(0, dtype=torch.uint8).set_(getattr(actual, name).untyped_storage())[-GUARD_BYTES] = 0
    with pytest.raises(AssertionError, match=rf"rank {RANK} {name}: byte 0 behind it"):
        check_dispatched(actual, expected, cfg, RANK)


def test_headers_are_compared_with_their_sources_own() -> None:
    """Also the words that are the source's choice."""
    cfg, actual, _ = dispatched("bf16", None)
    batches = [changed(actual, headers=actual.headers.clone()) for _ in range(cfg.world_size)]
    check_headers(batches, cfg)
    for word in HeaderWord:
        batches[2].headers[0, word] += 1
        with pytest.raises(AssertionError, match=rf"rank 2 headers, .*\[0, {int(word)}\]"):
            check_headers(batches, cfg)
        batches[2].headers[0, word] -= 1


def test_a_check_of_dispatch_of_a_rank_alone() -> None:
    """Its own header is the only one."""
    cfg, actual, expected = dispatched("bf16", None, (5, 5), alone=True)
    check_dispatched(actual, expected, cfg, RANK)
    actual.headers[0, HeaderWord.RETURNS] = 3
    with pytest.raises(AssertionError, match=r"headers\.return_slices_log2"):
        check_dispatched(actual, expected, cfg, RANK)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("at", ["dispatch", "combine"])
def test_a_checked_round_gives_its_weights_where_it_says(at: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial combine has them from dispatch, or multiplies by 1."""
    given, ranks = [], connect_reference(EPConfig(128, 6, 2, 12, len(TOKENS)))
    inputs = make_inputs(ranks[0].cfg, TOKENS, "masked", 3)

    def check(actual: Dispatched, *others: object) -> None:
        given.append(actual.router_weights is not None)
        check_dispatched(actual, *others)

    monkeypatch.setattr(verify, "check_dispatched", check)
    check_round(ranks, inputs, RoundOptions(split, weights_at=at))
    assert given == [at == "dispatch"] * len(TOKENS)
