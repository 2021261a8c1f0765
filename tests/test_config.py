"""EPConfig's rules, and the arena's byte map against a computation that shares no code with it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from cute_ep.config import EPConfig, memory_bytes
from cute_ep.errors import EPConfigError, EPError
from cute_ep.layouts.arena import ARENA_ALIGNMENT, Arena, HeaderWord, StateWord, message_bytes

from .strategies import configs

GOOD = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=128, world_size=4)


@pytest.mark.parametrize(
    ("change", "value", "rule"),
    [
        ({"world_size": 0}, "0", "[1, 32]"),
        ({"world_size": 33, "num_experts": 33}, "33", "[1, 32]"),
        ({"world_size": 2.0}, "2.0", "integer"),
        ({"num_experts": 0}, "0", "[1, 1024]"),
        ({"num_experts": 1028}, "1028", "[1, 1024]"),
        ({"num_experts": 254}, "254", "multiple of world_size = 4"),
        ({"top_k": 0}, "0", "[1, 32]"),
        ({"top_k": 33}, "33", "[1, 32]"),
        ({"top_k": 8, "num_experts": 4}, "8", "must not exceed num_experts = 4"),
        ({"max_tokens_per_rank": 0}, "0", "[1, 32768]"),
        ({"max_tokens_per_rank": 32769}, "32769", "[1, 32768]"),
        ({"max_tokens_per_rank": "128"}, "'128'", "integer"),
        ({"timeout_s": 0}, "0", "(0, 3600]"),
        ({"timeout_s": 3601.0}, "3601.0", "(0, 3600]"),
        ({"timeout_s": float("nan")}, "nan", "(0, 3600]"),
        ({"hidden": 0}, "0", "[1, 65536]"),
        ({"hidden": -8}, "-8", "[1, 65536]"),
        ({"hidden": 2048.0}, "2048.0", "integer"),
        ({"hidden": 65552}, "65552", "[1, 65536]"),
        ({"hidden": 7172}, "7172", "multiple of 16"),
        ({"hidden": 40, "dispatch_format": "nvfp4"}, "40", "multiple of the nvfp4 block 16"),
        ({"hidden": 48, "dispatch_format": "nvfp4"}, "48", "multiple of 16"),
        ({"dispatch_format": "fp3"}, "'fp3'", "must be one of bf16, nvfp4"),
    ],
    ids=str,
)
def test_rule_is_named(change: dict, value: str, rule: str) -> None:
    """The message says which field, its value and the rule."""
    with pytest.raises(EPConfigError) as caught:
        replace(GOOD, **change)
    message = str(caught.value)
    name = "format" if "dispatch_format" in change and "hidden" not in change else next(iter(change))
    assert name in message.split("=")[0]
    assert f"= {value}:" in message
    assert rule in message
    assert isinstance(caught.value, EPError) and isinstance(caught.value, ValueError)


def test_frozen_and_comparable() -> None:
    with pytest.raises(FrozenInstanceError):
        GOOD.hidden = 1  # type: ignore[misc]
    assert GOOD == replace(GOOD) and hash(GOOD) == hash(replace(GOOD)) and GOOD != replace(GOOD, top_k=4)


def padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bytes_by_hand(cfg: EPConfig) -> int:
    """Symmetric memory of one rank, written out from the table in `layouts/arena.py`."""
    ranks, tokens, k, experts = cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k, cfg.num_experts // cfg.world_size
    if cfg.dispatch_format == "bf16":
        message = 2 * cfg.hidden
    else:
        message = padded(cfg.hidden // 2, 16) + padded(cfg.hidden // 16, 16)
    sizes = [
        8 * 10,  # state
        8 * ranks,  # dispatch_consumed
        8 * ranks,  # combine_consumed
        8 * ranks,  # route_ready
        8 * ranks * tokens,  # message_ready
        8 * ranks * tokens,  # return_ready
        2 * 4 * ranks * 4,  # header
        2 * 4 * ranks * experts,  # counts
        2 * 4 * ranks * tokens * k,  # entries
        2 * 4 * ranks * tokens * k,  # weights
        2 * tokens * max(ranks, k) * 2 * cfg.hidden,  # returns
        2 * ranks * tokens * message,  # messages
    ]
    return sum(padded(size, 256) for size in sizes)


@given(configs)
def test_memory_bytes_by_hand(cfg: EPConfig) -> None:
    assert memory_bytes(cfg) == bytes_by_hand(cfg)


def test_memory_of_the_usual_deployments() -> None:
    """The figures that the README quotes (mebibytes, rounded)."""
    prefill = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=4096, world_size=4)
    assert [round(memory_bytes(replace(prefill, dispatch_format=f)) / 2**20) for f in ("bf16", "nvfp4")] == [1346, 1024]
    decode = replace(prefill, max_tokens_per_rank=128)
    assert [round(memory_bytes(replace(decode, dispatch_format=f)) / 2**20) for f in ("bf16", "nvfp4")] == [42, 32]


@given(configs)
def test_regions_are_aligned_disjoint_and_inside(cfg: EPConfig) -> None:
    arena = cfg.arena
    end = 0
    for region in sorted(arena.regions.values(), key=lambda one: one.offset):
        assert region.offset % ARENA_ALIGNMENT == 0
        assert region.offset >= end, region.name
        last = tuple(extent - 1 for extent in region.shape)
        assert region.at(*last) + region.itemsize == region.offset + region.nbytes
        end = region.offset + region.nbytes
    assert end <= arena.nbytes == padded(end, ARENA_ALIGNMENT)


@given(configs)
def test_combine_needs_no_format(cfg: EPConfig) -> None:
    """Kernels that never touch `messages` compute every other offset without knowing the format."""
    arena = cfg.arena
    sizes = {"ranks": cfg.world_size, "local_experts": cfg.local_experts, "top_k": cfg.top_k, "hidden": cfg.hidden}
    blind = Arena(**sizes, max_tokens=cfg.max_tokens_per_rank, slots=max(cfg.world_size, cfg.top_k), message=0)
    for name, region in arena.regions.items():
        assert blind.regions[name].offset == region.offset


@given(configs)
def test_messages_and_rows_keep_16_byte_alignment(cfg: EPConfig) -> None:
    """Every address that a 16-byte access forms is a multiple of 16."""
    arena = cfg.arena
    message = message_bytes(cfg.format, cfg.hidden)
    assert message % 16 == 0
    assert arena.messages.at(1, cfg.world_size - 1, cfg.max_tokens_per_rank - 1) % 16 == 0
    assert arena.returns.at(1, cfg.max_tokens_per_rank - 1, max(cfg.world_size, cfg.top_k) - 1) % 16 == 0


def test_words_have_distinct_places() -> None:
    assert sorted(StateWord) == list(range(len(StateWord)))
    assert sorted(HeaderWord) == list(range(4))
