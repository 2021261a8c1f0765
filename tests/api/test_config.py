"""EPConfig's rules, and the arena's byte map against a computation that shares no code with it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cute_ep import EPConfig, memory_bytes
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.layouts.maps.arena import (
    ARENA_ALIGNMENT,
    LAMPORT_TOKENS,
    LL_BYTES,
    MANY_SLICES,
    MAX_SLICES,
    SEGMENT_BYTES,
    HeaderWord,
    StateWord,
    has_whole_segments,
    message_bytes,
    message_map,
    regions_of,
    segment_words,
)
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.parameters import numbers, parameters_of
from cute_ep.layouts.maps.scales import WORD_BYTES, scale_words
from tests.strategies import configs

GOOD = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=128, world_size=4)


@pytest.mark.parametrize(
    ("change", "value", "rule"),
    [
        ({"world_size": 0}, "0", "[1, 32]"),
        ({"world_size": 33, "num_experts": 33}, "33", "[1, 32]"),
        ({"world_size": 2.0}, "2.0", "integer"),
        ({"world_size": True}, "True", "integer"),
        ({"num_experts": 0}, "0", "a multiple of 4 in [4, 1024] (world_size = 4)"),
        ({"num_experts": 1028}, "1028", "[4, 1024]"),
        ({"num_experts": 254}, "254", "a multiple of 4 in [4, 1024] (world_size = 4)"),
        ({"top_k": 0}, "0", "[1, 32]"),
        ({"top_k": 33}, "33", "[1, 32]"),
        ({"top_k": 8, "num_experts": 4}, "8", "an integer in [1, 4] (num_experts = 4)"),
        ({"max_tokens_per_rank": 0}, "0", "[1, 32768]"),
        ({"max_tokens_per_rank": 32769}, "32769", "[1, 32768]"),
        ({"max_tokens_per_rank": "128"}, "'128'", "integer"),
        (
            {"max_tokens_per_rank": 32768, "dispatch_format": "nvfp4", "hidden": 16384, "top_k": 32, "world_size": 2},
            "32768",
            "within 64 GiB",
        ),
        ({"timeout_s": "5"}, "'5'", "number in [1e-9, 3600] seconds"),
        ({"timeout_s": True}, "True", "number in [1e-9, 3600] seconds"),
        ({"fused_shared_expert": 2}, "2", "True or False"),
        (
            {"max_tokens_per_rank": 32768, "hidden": 32768},
            "32768",
            "[1, 32767]: the messages of a rank, 65536 bytes each, must stay below 2 GiB",
        ),
        ({"timeout_s": 0}, "0", "[1e-9, 3600]"),
        ({"timeout_s": 1e-12}, "1e-12", "[1e-9, 3600]"),
        ({"timeout_s": 3601.0}, "3601.0", "[1e-9, 3600]"),
        ({"timeout_s": float("nan")}, "nan", "[1e-9, 3600]"),
        ({"hidden": 0}, "0", "a multiple of 8 in [8, 65536] for bf16"),
        ({"hidden": -8}, "-8", "[8, 65536]"),
        ({"hidden": 2048.0}, "2048.0", "an integer multiple of 8"),
        ({"hidden": 65552}, "65552", "[8, 65536]"),
        ({"hidden": 7172}, "7172", "a multiple of 8 in"),
        ({"hidden": 40, "dispatch_format": "nvfp4"}, "40", "a multiple of 32 in [32, 65536] for nvfp4"),
        ({"hidden": 48, "dispatch_format": "nvfp4"}, "48", "a multiple of 32 in"),
        ({"hidden": 7232, "dispatch_format": "fp8"}, "7232", "a multiple of 128 in [128, 65536] for fp8"),
        ({"hidden": 7184, "dispatch_format": "mxfp8"}, "7184", "a multiple of 32 in [32, 65536] for mxfp8"),
        (
            {"dispatch_format": "fp3"},
            "'fp3'",
            "must be one of bf16, fp8, fp8_pow2, mxfp8, mxfp6_e2m3, mxfp6_e3m2, mxfp4, nvfp4, nvfp4_row",
        ),
        ({"dispatch_format": ["fp8"]}, "['fp8']", "must be one of bf16, fp8"),
        ({"scale_layout": "linear"}, "'linear'", "must be None, bf16 has no scale factors"),
        (
            {"scale_layout": "transposed", "dispatch_format": "nvfp4"},
            "'transposed'",
            "one of atom128x4, linear for nvfp4",
        ),
        ({"scale_layout": "atom128x4", "dispatch_format": "fp8"}, "'atom128x4'", "one of transposed, linear for fp8"),
        ({"row_ids": "int64"}, "'int64'", "must be one of int32 for expert_major rows"),
        ({"row_alignment": 0}, "0", "must be None or one of 1, 4, 8, 16, 64, 128 for bf16"),
        ({"row_alignment": True}, "True", "must be None or one of 1, 4, 8, 16, 64, 128 for bf16"),
        ({"row_alignment": 4.0}, "4.0", "must be None or one of 1, 4, 8, 16, 64, 128 for bf16"),
        ({"row_alignment": 32}, "32", "must be None or one of 1, 4, 8, 16, 64, 128 for bf16"),
        ({"row_alignment": 1, "dispatch_format": "fp8"}, "1", "must be None or one of 4, 8, 16, 64, 128 for fp8"),
    ],
    ids=str,
)
def test_a_refused_field_is_named_with_its_value_and_the_rule(change: dict, value: str, rule: str) -> None:
    """The message says which field, its value and the rule."""
    with pytest.raises(EPConfigError) as caught:
        replace(GOOD, **change)
    message = str(caught.value)
    name = "format" if set(change) == {"dispatch_format"} else next(iter(change))
    assert name in message.split("=")[0]
    assert f"= {value}:" in message
    assert rule in message
    assert isinstance(caught.value, EPError) and isinstance(caught.value, ValueError)


def test_a_configuration_is_frozen_hashable_and_equal_by_value() -> None:
    with pytest.raises(FrozenInstanceError):
        GOOD.hidden = 1  # type: ignore[misc]
    assert GOOD == replace(GOOD) and hash(GOOD) == hash(replace(GOOD)) and GOOD != replace(GOOD, top_k=4)


def padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def message_by_hand(cfg: EPConfig) -> int:
    """Bytes of one token on the wire: payload, scale factors, row scale, each padded to 16."""
    h = cfg.hidden
    fields = {
        "bf16": (2 * h,),
        "fp8": (h, h // 128 * 4),
        "fp8_pow2": (h, h // 128 * 4),
        "mxfp8": (h, h // 32),
        "mxfp6_e2m3": (3 * h // 4, h // 32),
        "mxfp6_e3m2": (3 * h // 4, h // 32),
        "mxfp4": (h // 2, h // 32),
        "nvfp4": (h // 2, h // 16),
        "nvfp4_row": (h // 2, h // 16, 2),
    }
    return sum(padded(field, 16) for field in fields[cfg.dispatch_format])


def scales_by_hand(cfg: EPConfig) -> int:
    """Bytes of the scale factors in a message."""
    h = cfg.hidden
    sizes = {"bf16": 0, "fp8": h // 128 * 4, "fp8_pow2": h // 128 * 4, "nvfp4": h // 16, "nvfp4_row": h // 16}
    return padded(sizes.get(cfg.dispatch_format, h // 32), 16)


def bytes_by_hand(cfg: EPConfig) -> int:
    """Symmetric memory of one rank, written out from the table in `layouts/maps/arena.py`."""
    ranks = 1 if cfg.skip_a2a else cfg.world_size
    tokens, k, experts = cfg.max_tokens_per_rank, cfg.top_k, cfg.num_experts // cfg.world_size
    message, row = padded(message_by_hand(cfg), 128), 2 * cfg.hidden
    flags = max(32 * min(tokens, 1024), -(-8 * tokens // 16))
    few, many = (tokens, 0) if tokens <= 1024 else (1024, tokens)
    sizes = [
        8 * 12,  # state
        8 * ranks,  # peers
        2 * 8 * ranks * 4 * 32,  # combine_tickets
        8 * ranks,  # dispatch_consumed
        8 * ranks,  # combine_consumed
        8 * ranks * flags,  # message_ready
        8 * ranks * flags,  # return_ready
        2 * 8 * ranks,  # return_rounds
        2 * 8 * ranks * (4 + experts),  # table
        2 * 8 * ranks * tokens * k,  # entries
        2 * 8 * ranks * tokens * k,  # weights
        2 * many * max(ranks, k) * row,  # returns
        2 * ranks * many * message,  # messages
        2 * few * max(ranks, k) * row,  # lamport_returns
        2 * ranks * few * message,  # lamport_messages
        ranks * few * scales_by_hand(cfg),  # staged_scales
    ]
    arena = sum(padded(size, 256) for size in sizes)
    apart = 65536
    while 2 * apart <= arena / 256:
        apart *= 2
    return padded(arena + (ranks - 1) * apart, 2 << 20)


WIDTHS = [width for name, width in parameters_of("dispatch") if name.startswith("arena.")]
"""Of the kernels' parameters that tell the arena's map."""


@given(configs)
def test_arenas_of_different_ranks_begin_apart(cfg: EPConfig) -> None:
    begins = [cfg.arena.begin(rank) for rank in range(cfg.peers)]
    assert begins[0] == 0 and all(begin % 65536 == 0 for begin in begins)
    assert all(after - before >= 65536 for before, after in pairwise(begins))
    assert 0 <= cfg.arena.allocation - (begins[-1] + cfg.arena.nbytes) < 2 << 20


@given(configs)
@example(EPConfig(62464, 961, 31, 425, 31, "fp8"))  # where a region more or less makes a page
def test_memory_bytes_by_hand(cfg: EPConfig) -> None:
    assert message_bytes(cfg.format, cfg.hidden) == message_by_hand(cfg)
    assert memory_bytes(cfg) == bytes_by_hand(cfg)


@given(configs)
def test_shape_of_the_output_costs_no_symmetric_memory(cfg: EPConfig) -> None:
    """Alignment, scale layout and shared expert change output buffers only."""
    for layout in cfg.format.scale_layouts:
        shaped = replace(cfg, scale_layout=layout, row_alignment=128, fused_shared_expert=not cfg.fused_shared_expert)
        assert memory_bytes(shaped) == memory_bytes(cfg)


@given(configs)
def test_with_skip_a2a_memory_is_that_of_a_group_of_one(cfg: EPConfig) -> None:
    """With skip_a2a the arena is that of a group of one, whatever the number of ranks."""
    alone = replace(cfg, skip_a2a=True)
    assert alone.peers == 1 and replace(cfg, skip_a2a=False).peers == cfg.world_size
    assert alone.arena.table.shape == (2, 1, len(HeaderWord) + cfg.num_experts // cfg.world_size)
    assert memory_bytes(alone) <= memory_bytes(replace(cfg, skip_a2a=False))


def test_memory_of_the_usual_deployments_in_mebibytes() -> None:
    """The figures that the README quotes (mebibytes, rounded)."""
    prefill = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=4096, world_size=4)
    decode, formats = replace(prefill, max_tokens_per_rank=128), ("bf16", "fp8", "nvfp4")
    assert [round(memory_bytes(replace(prefill, dispatch_format=f)) / 2**20) for f in formats] == [1700, 1430, 1300]
    assert [round(memory_bytes(replace(decode, dispatch_format=f)) / 2**20) for f in formats] == [44, 38, 34]


def test_alignment_and_scale_layout_are_those_of_the_format_unless_chosen() -> None:
    assert [(cfg.alignment, cfg.scales_as) for cfg in (replace(GOOD, dispatch_format=f) for f in FORMATS)] == [
        (1, None),
        (4, "transposed"),
        (4, "transposed"),
        *[(1, "atom128x4")] * 6,
    ]
    chosen = replace(GOOD, dispatch_format="mxfp8", row_alignment=16, scale_layout="linear")
    assert (chosen.alignment, chosen.scales_as) == (16, "linear")


@given(configs, st.integers(0, 32768))
def test_every_token_has_one_shared_expert(cfg: EPConfig, tokens: int) -> None:
    """All of a rank's own tokens; with replicated ones every token has exactly one rank, in even shares."""
    none, shared = replace(cfg, fused_shared_expert=False), replace(cfg, fused_shared_expert=True)
    assert (none.groups, shared.groups) == (cfg.local_experts, cfg.local_experts + 1)
    assert none.shared_slice(tokens, 0) == (0, 0)
    slices = [shared.shared_slice(tokens, rank) for rank in range(cfg.world_size)]
    if not cfg.skip_a2a:
        assert slices == [(0, tokens)] * cfg.world_size
        return
    end = 0
    for first, count in slices:
        assert first == end
        end += count
    counts = [count for _, count in slices]
    assert end == tokens and max(counts) - min(counts) <= 1


@given(configs, st.randoms(use_true_random=False))
def test_max_rows_hold_every_routing(cfg: EPConfig, random: Random) -> None:
    """Random counts of entries, each group padded, never exceed it, and it is not far above the worst of them."""
    entries = (1 if cfg.skip_a2a else cfg.world_size) * cfg.max_tokens_per_rank * cfg.top_k
    tokens = cfg.shared_slice(cfg.max_tokens_per_rank, 0)[1]
    cuts = sorted(random.randint(0, entries) for _ in range(cfg.local_experts - 1))
    counts = [after - before for before, after in zip([0, *cuts], [*cuts, entries], strict=True)]
    alignment = cfg.alignment
    assert padded(tokens, alignment) + sum(padded(count, alignment) for count in counts) <= cfg.max_rows
    assert cfg.max_rows % alignment == 0
    assert cfg.max_rows < entries + tokens + (cfg.local_experts + 2) * alignment


@given(configs)
def test_regions_of_the_arena_are_aligned_disjoint_and_inside(cfg: EPConfig) -> None:
    arena = cfg.arena
    end = 0
    for region in sorted(arena.regions.values(), key=lambda one: one.offset):
        assert region.offset % ARENA_ALIGNMENT == 0
        assert region.offset >= end, region.name
        last = tuple(extent - 1 for extent in region.shape)
        assert region.at(*last) + region.itemsize == region.offset + region.nbytes
        end = region.offset + region.nbytes
    assert end <= arena.nbytes == padded(end, ARENA_ALIGNMENT)


@given(configs, st.randoms(use_true_random=False))
def test_kernels_form_the_addresses_of_the_hosts_map(cfg: EPConfig, random: Random) -> None:
    """Every address that a kernel forms from its arguments is the one of the host's map."""
    arena = cfg.arena
    given = arena.arguments()
    for number, width in zip(numbers(given), WIDTHS, strict=True):
        assert type(number) is int and 0 <= number < (2**63 if width == "i64" else 2**31)
    regions = regions_of(given)._asdict()
    assert list(regions) == list(arena.regions)
    for name, region in arena.regions.items():
        for _ in range(4):
            coord = [
                random.choice((0, random.randrange(extent), extent - 1)) if extent else 0 for extent in region.shape
            ]
            for modes in range(len(coord) + 1):
                assert regions[name].at(*coord[:modes]) == region.at(*coord[:modes]), name


@given(configs)
def test_slots_of_partial_sums_lie_side_by_side_inside_those_of_exact_combine(cfg: EPConfig) -> None:
    """Partial combine finds slot after slot, token after token, inside the regions of exact combine."""
    arena = cfg.arena
    exact, given_partial = arena.arguments(), arena.arguments(partial=True)
    regions = regions_of(given_partial)._asdict()
    for region in (arena.returns, arena.lamport_returns):
        exact = exact._replace(**{region.name: getattr(exact, region.name)._replace(stride1=0)})
        given_partial = given_partial._replace(**{region.name: getattr(given_partial, region.name)._replace(stride1=0)})
        row = cfg.hidden * 2
        for parity in (0, 1):
            begin, end = region.at(parity), region.at(parity + 1)
            slots = [
                regions[region.name].at(parity, token, slot)
                for token in range(min(region.shape[1], 3))
                for slot in range(cfg.peers)
            ]
            assert slots == [begin + place * row for place in range(len(slots))]
            if region.shape[1]:
                assert regions[region.name].at(parity, region.shape[1] - 1, cfg.peers - 1) + row <= end
    assert given_partial == exact


@given(configs)
def test_few_tokens_have_rows_as_many_tokens_do(cfg: EPConfig) -> None:
    """Whether a row is a Lamport row decides only where it starts: what follows, slots and bytes, is laid out alike.
    There is a place for each token of every call, in the one or in the other region."""
    arena, most = cfg.arena, cfg.max_tokens_per_rank
    assert set(arena.cleared) == {arena.lamport_returns, arena.lamport_messages}
    for few, many, tokens in (
        (arena.lamport_returns, arena.returns, 1),
        (arena.lamport_messages, arena.messages, 2),
    ):
        assert few.stride[tokens:] == many.stride[tokens:]
        assert few.shape == (*many.shape[:tokens], min(most, LAMPORT_TOKENS), *many.shape[tokens + 1 :])
        assert many.shape[tokens] == (most if most > LAMPORT_TOKENS else 0)


@given(configs)
def test_messages_and_rows_keep_16_byte_alignment(cfg: EPConfig) -> None:
    """Every address that a 16-byte access forms is a multiple of 16."""
    arena, fmt = cfg.arena, cfg.format
    message = message_map(fmt.payload_bytes(cfg.hidden), fmt.scale_bytes(cfg.hidden), fmt.row_scale_bytes)
    assert [one % 16 for one in (message.scales.offset, message.row_scale.offset, message.nbytes)] == [0] * 3
    for region in (arena.messages, arena.lamport_messages, arena.returns, arena.lamport_returns):
        assert region.at(*(extent - 1 for extent in region.shape[:-1])) % 16 == 0, region.name
    for region in (arena.messages, arena.lamport_messages):
        assert [stride % 128 for stride in region.stride[:-1]] == [0] * 3, "a message begins with a packet of the link"


@given(configs)
def test_ll_words_are_stored_whole(cfg: EPConfig) -> None:
    """A word of the routing table, as a flag, is 8 bytes at a multiple of 8: one store writes value and epoch."""
    arena = cfg.arena
    assert LL_BYTES == 8
    for name in ("table", "entries", "weights"):
        region = arena.regions[name]
        assert region.itemsize == LL_BYTES and region.offset % LL_BYTES == 0, name
        assert region.shape[:2] == (2, cfg.peers), "two parities of every source"
    for name in ("state", "dispatch_consumed", "combine_consumed", "message_ready", "return_ready"):
        assert arena.regions[name].itemsize == 8 and arena.regions[name].offset % 8 == 0, name
    last = cfg.num_experts // cfg.world_size - 1
    assert arena.table.at(1, cfg.peers - 1, len(HeaderWord) + last) + LL_BYTES == arena.table.offset + (
        arena.table.nbytes
    ), "counts follow the header"


@given(configs)
def test_every_piece_has_a_flag(cfg: EPConfig) -> None:
    """In a call of any number of tokens: its own while the rows are Lamport rows, else that of its chunk."""
    most = cfg.max_tokens_per_rank
    flags = 32 * min(most, 1024)
    for region in (cfg.arena.message_ready, cfg.arena.return_ready):
        assert region.shape == (cfg.peers, flags)
    for tokens in {1, 2, LAMPORT_TOKENS, LAMPORT_TOKENS + 1, most - 1, most}:
        if 0 < tokens <= most:
            last = tokens * (MAX_SLICES if tokens <= LAMPORT_TOKENS else MANY_SLICES) - 1
            assert (last if tokens <= LAMPORT_TOKENS else last // 16) < flags
    assert MAX_SLICES & (MAX_SLICES - 1) == 0, "slices are counted by their logarithm"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_scale_words_of_a_segment(fmt) -> None:
    """The scale factors of exactly the elements in a segment's payload, so that slices share no word. Where segments
    are not whole, so many that the segments of any row have all its words."""
    elements = SEGMENT_BYTES * 8 // fmt.bits
    assert SEGMENT_BYTES == 32 * 16, "one 16-byte vector a lane"
    assert has_whole_segments(fmt) == (elements * fmt.bits == SEGMENT_BYTES * 8 and elements % fmt.unit == 0)
    if not has_whole_segments(fmt):
        for hidden in range(fmt.multiple, 1 << 15, fmt.multiple):
            segments = -(-fmt.payload_bytes(hidden) // SEGMENT_BYTES)
            assert segment_words(fmt) * segments >= scale_words(fmt.scale_bytes(hidden))
        return
    assert segment_words(fmt) * WORD_BYTES == fmt.scale_bytes(elements)
    assert (segment_words(fmt) == 0) == (fmt.scale is None)
    for segments in range(1, 9):
        for hidden in (elements * segments, elements * segments - elements // 2):
            words = scale_words(fmt.scale_bytes(hidden))
            assert segment_words(fmt) * (segments - 1) < max(words, 1) <= max(segment_words(fmt) * segments, 1)


def test_words_of_state_and_header_have_places_of_their_own() -> None:
    assert sorted(StateWord) == list(range(len(StateWord)))
    assert sorted(HeaderWord) == list(range(4))
