"""The model of what roles of kernels write in arenas (`tests.gpu.role_model`), against the reference; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import CHUNK, COMBINE_ITEMSIZE, LAMPORT_TOKENS, SEGMENT_BYTES, StateWord, message_of
from cute_ep.layouts.maps.routing import EXPERT_BITS
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import POISON
from cute_ep.testing.workloads import ROUTINGS, make_inputs
from tests.gpu import arena_images, role_model
from tests.gpu.arena_images import Image
from tests.gpu.role_model import (
    Home,
    Rows,
    Sent,
    as_bfloat16,
    message_parts,
    send_combine,
    send_dispatch,
    weighted_sums,
)

TOKENS = (9, 0, 17)


def small(fmt: str, **changes: object) -> EPConfig:
    return EPConfig(1472 if fmt != "fp8" else 1408, 12, 4, 17, 3, fmt, **changes)  # type: ignore[arg-type]


def test_facts_are_those_of_the_layouts() -> None:
    """What the model says once more."""
    assert (role_model.CHUNK, role_model.SEGMENT, arena_images.FEW_TOKENS) == (CHUNK, SEGMENT_BYTES, LAMPORT_TOKENS)
    assert (role_model.ENTRY_BITS, role_model.STATE_WORDS) == (EXPERT_BITS, len(StateWord))
    for phase, words in role_model.STATE.items():
        assert words == (StateWord[f"{phase.upper()}_SEND_EPOCH"], StateWord[f"{phase.upper()}_RECV_EPOCH"])


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp6_e2m3", "nvfp4_row"])
def test_fields_of_a_message_are_where_the_layout_has_them(fmt: str) -> None:
    cfg = small(fmt)
    rows = Rows.of(reference.quantize(torch.ones(2, cfg.hidden).bfloat16(), cfg.format))
    message = message_of(cfg.format, cfg.hidden)
    for name, (begin, _) in message_parts(rows).items():
        assert begin == getattr(message, name.replace("row_scales", "row_scale")).offset, name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("row_order", ["expert_major", "rank_major"])
def test_what_is_sent_leads_to_the_rows_of_the_reference(routing: str, row_order: str) -> None:
    """Of each receiver: positions and counts, as its arena has them, give the rows of `row_map`, and messages too."""
    cfg, number, local = small("nvfp4", row_order=row_order), 5, 4
    inputs = make_inputs(cfg, TOKENS, routing, 3)
    expected = reference.dispatch(cfg, [one.x for one in inputs], [one.topk_ids for one in inputs])
    encoded = [Rows.of(reference.quantize(one.x, cfg.format)) for one in inputs]
    sent = [Sent(one.topk_ids.long(), None, rows, 1, 0) for one, rows in zip(inputs, encoded, strict=True)]
    for rank, batch in enumerate(expected):
        image = Image(cfg, rank, [0, 0, 0])
        for source, one in enumerate(sent):
            send_dispatch(image, source, one, number)
        ranks, keys = range(cfg.world_size), 1 if cfg.is_rank_major else local
        tables = [image.words(cfg.arena.table.at(1, source), 4 + keys) for source in ranks]
        assert all(((table >> 32) == number).all() for table in tables)
        counts = torch.stack([table[4:] & 0xFFFFFFFF for table in tables], dim=1)  # [keys, sources]
        base = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
        for source, one in enumerate(sent):
            words = image.words(cfg.arena.entries.at(1, source), one.tokens * cfg.top_k).view(-1, cfg.top_k)
            values = words & 0xFFFFFFFF
            message, _ = image.messages(number, source, one.tokens)
            for token, slot in (batch.row_map[source] >= 0).nonzero().tolist():
                expert, position = int(values[token, slot]) % 1024, int(values[token, slot]) >> 10
                row = int(batch.row_map[source, token, slot])
                assert row == base[0 if cfg.is_rank_major else expert - rank * local, source] + position
                payload = batch.tokens[row].view(torch.uint8)
                assert_bits(message[token, : len(payload)], payload, f"message {source}, {token}")
            assert not one.tokens or ((words >> 32) & 0xFFFFFFFF == number).all()
            unsent = (batch.row_map[source, : one.tokens] < 0).all(dim=1)
            assert (message[unsent] == POISON).all()


def test_sums_are_those_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(1 << 16, (40, 5, 64), generator=generator).to(torch.int16)
    weights, where = torch.randn(40, 5, generator=generator), torch.rand(40, 5, generator=generator) < 0.7
    sums = weighted_sums(bits, weights, where)
    total = torch.zeros(40, 64)
    for slot in range(5):
        product = weights[:, slot, None] * bits.view(torch.bfloat16)[:, slot].float()
        total = torch.where(where[:, slot, None], total + product, total)
    assert_bits(as_bfloat16(sums).view(torch.bfloat16), reference.round_to(total, torch.bfloat16), "sums")


@pytest.mark.parametrize("partial", [False, True])
def test_slots_are_where_kernels_are_told_that_they_are(partial: bool) -> None:
    """Their strides are arguments of kernels, others for partial sums."""
    cfg = small("bf16")
    image, home, rows = Image(cfg, 1, [0, 0, 0]), Home(17, 0, False), cfg.world_size if partial else cfg.top_k
    where = torch.zeros(17, rows, dtype=torch.bool)
    where[16, 2] = True
    content = torch.full((17, rows, cfg.hidden), 0x1234, dtype=torch.int16)
    send_combine(image, 0, home, 6, dispatch_round=1, slots=(where, content), partial=partial, spans=False)
    at, _, token, slot = cfg.arena.arguments(partial=partial).lamport_returns
    begin = image.begin + at + 16 * token + 2 * slot
    row = cfg.hidden * COMBINE_ITEMSIZE
    assert_bits(image.content[begin : begin + row].view(torch.int16), content[0, 0], "slot")
    assert not (image.content[begin + row :] == 0x12).any() and not (image.content[:begin] == 0x12).any()


def test_a_difference_is_named() -> None:
    """By the region and its coordinates; bytes that may hold anything are left out."""
    cfg = small("nvfp4")
    image, arena = Image(cfg, 2, [0, 0, 0]), cfg.arena
    found = image.content.clone()
    image.check(found, "same")
    found[0] = 1
    found[image.begin + arena.entries.at(1, 2, 3) + 8] = 2
    found[image.begin + arena.lamport_messages.at(0, 1, 4) + 7] = 3
    found[-1] = 4
    with pytest.raises(AssertionError, match="4 bytes differ") as caught:
        image.check(found, "after it")
    words = str(caught.value)
    for part in ("after it, arena of rank 2", "before the arena: is [1, ", "entries[1, 2, 3, 1] byte 0: is [2, "):
        assert part in words, words
    for part in ("lamport_messages[0, 1, 4, 7]: is [3, ", f"behind the arena: is [4], expected [{POISON}]"):
        assert part in words, words
    image.undefined[:] = True
    image.check(found, "undefined")
