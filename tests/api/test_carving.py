"""Buffers whose small tensors share an allocation."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from cute_ep.api import carving
from cute_ep.api.buffers import APART, BUFFERS, DispatchBuffers, tensors_of
from cute_ep.api.carving import Carving, Pieces
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import payload_dtype
from cute_ep.layouts.maps.formats import FORMATS, VECTOR_BYTES
from cute_ep.runtime.arguments import WRITTEN, address, output_record
from cute_ep.runtime.connection import connect_local
from tests.reference.ranks import at_once

CONFIGS = {
    "expert-major": EPConfig(128, 6, 3, 5, 2, "nvfp4"),
    "rank-major": EPConfig(128, 6, 3, 5, 2, row_order="rank_major", row_alignment=1),
    "rank-major, wide ids": EPConfig(128, 6, 3, 5, 2, row_order="rank_major", row_alignment=1, row_ids="int64"),
    "blocks": EPConfig(128, 6, 3, 5, 2, "fp8", scale_layout="transposed", block_rows=10),
    "row scales": EPConfig(128, 6, 3, 5, 2, "nvfp4_row"),
}
EACH = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
MAKES = pytest.mark.parametrize("make", [DispatchBuffers.allocate, DispatchBuffers.carve], ids=["apart", "carved"])
CFG = CONFIGS["rank-major"]


@EACH
def test_carved_tensors_are_those_that_allocate_makes(cfg: EPConfig) -> None:
    carved, apart = (make(cfg, "cpu") for make in (DispatchBuffers.carve, DispatchBuffers.allocate))
    for name, want in tensors_of(apart).items():
        got = getattr(carved, name)
        assert got is getattr(carved, name)
        assert (got is None) == (want is None), name
        if want is not None:
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
            assert got.data_ptr() % VECTOR_BYTES == 0, name


@MAKES
@EACH
def test_the_first_rows_are_a_tensor_of_their_own(make: Callable[..., DispatchBuffers], cfg: EPConfig) -> None:
    """Whether the whole tensor was asked for before or is asked for behind; all rows are the tensor itself."""
    for before in (True, False):
        buffers = make(cfg, "cpu")
        rows = len(buffers.tokens)
        for name in ("tokens", "src_info", "row_weights", *(["row_expert_ids"] if cfg.is_rank_major else [])):
            whole = getattr(buffers, name) if before else None
            some = buffers.first(name, 2)
            whole = getattr(buffers, name) if whole is None else whole
            some.view(torch.uint8).fill_(7)
            assert (some.shape, some.dtype, some.stride()) == ((2, *whole.shape[1:]), whole.dtype, whole.stride())
            assert some.data_ptr() == whole.data_ptr() and not some._is_view() and whole._version == 0
            assert buffers.first(name, rows).data_ptr() == whole.data_ptr()
            assert buffers.first(name, rows) is getattr(buffers, name)


@EACH
def test_carved_tensors_do_not_overlap(cfg: EPConfig) -> None:
    """And torch does not count a change of one as a change of the others."""
    tensors = {name: one for name, one in tensors_of(DispatchBuffers.carve(cfg, "cpu")).items() if one is not None}
    for number, one in enumerate(tensors.values()):
        one.view(torch.uint8).fill_(number)
    for number, (name, one) in enumerate(tensors.items()):
        assert (one.view(torch.uint8) == number).all(), name
        assert one._version == 1 and not one._is_view(), name
    assert len({one.untyped_storage().data_ptr() for name, one in tensors.items() if name not in APART}) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_addresses_of_a_copy_are_those_of_its_tensors(copied: Callable[[DispatchBuffers], DispatchBuffers]) -> None:
    other = copied(DispatchBuffers.carve(CFG, "cpu", 4))
    assert other.addresses(WRITTEN) == {name: address(getattr(other, name)) for name in WRITTEN}


@pytest.mark.parametrize("made", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("read", [False, True], ids=["outside", "inside"])
def test_tensors_are_of_the_mode_that_the_memory_was_made_in(made: bool, read: bool) -> None:
    """Wherever they are asked for first: what was made outside of inference mode can be written outside."""
    with torch.inference_mode(made):
        buffers = DispatchBuffers.carve(CFG, "cpu", 4)
    with torch.inference_mode(read):
        tensors = tensors_of(buffers)
    assert {one.is_inference() for one in tensors.values() if one is not None} == {made}
    with torch.inference_mode(made):
        buffers.row_weights.fill_(1)


def test_threads_get_the_same_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    carved, both = Carving(Pieces.of({"one": ((3,), torch.int32)}), "cpu"), threading.Barrier(2, timeout=30)

    def met() -> bool:
        both.wait()
        return False

    monkeypatch.setattr(carving, "torch", SimpleNamespace(**{**vars(torch), "is_inference_mode_enabled": met}))
    one, other = at_once(range(2), lambda rank: carved.tensor("one"))
    assert one is other


@EACH
def test_addresses_need_no_tensors(cfg: EPConfig) -> None:
    buffers = DispatchBuffers.carve(cfg, "cpu")
    record = output_record(cfg, buffers)
    assert vars(buffers).keys() & (set(BUFFERS) - set(APART)) == {
        name for name in set(BUFFERS) - set(APART) if vars(buffers).get(name, ...) is None
    }
    for name in WRITTEN:
        tensor = getattr(buffers, name)
        assert getattr(record, name) == (0 if tensor is None else tensor.data_ptr()), name
    assert output_record(cfg, buffers) == record


@MAKES
def test_a_capacity_is_a_whole_number_of_rows(make: Callable[..., DispatchBuffers]) -> None:
    for capacity in (6.0, -1, True, (1 << 30) // 3 + 1):
        with pytest.raises(
            EPInputError, match=rf"capacity = {capacity}: must be an integer in \[0, {(1 << 30) // 3}\]"
        ):
            make(CFG, "cpu", capacity)
    with pytest.raises(EPInputError, match=rf"capacity = {1 << 28}: must be an integer in \[0, {(1 << 30) // 6}\]"):
        make(CONFIGS["rank-major, wide ids"], "cpu", 1 << 28)
    for rows in (numpy.int64(6), 6):
        buffers = make(CFG, "cpu", rows)
        assert buffers.src_info.shape == (6, 2) and {type(one) for one in output_record(CFG, buffers)} == {int}


def test_copies_have_tensors_of_their_own_or_the_same() -> None:
    buffers = DispatchBuffers.carve(CFG, "cpu", 4)
    buffers.src_info.fill_(7)
    buffers.memory.generation.number += 1
    assert copy.copy(buffers).src_info is buffers.src_info
    assert replace(buffers).memory.generation is buffers.memory.generation
    for other in (copy.deepcopy(buffers), pickle.loads(pickle.dumps(buffers))):
        assert (other.src_info == 7).all() and other.row_weights.shape == (4, 3)
        assert other.src_info.data_ptr() != buffers.src_info.data_ptr() and other.memory.generation.number == 0
    with pytest.raises(AttributeError, match="no attribute 'elsewhere'"):
        _ = buffers.elsewhere


@MAKES
def test_only_buffers_as_they_were_made_pass_unchecked(make: Callable[..., DispatchBuffers]) -> None:
    ranks = connect_local(CFG, ["cpu"] * 2)
    given = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
    good = make(CFG, "cpu", 4)
    batch = ranks[0].dispatch(*given, out=good)
    for wrong in (
        replace(good, src_info=torch.zeros(4, 3, dtype=torch.int32)),
        batch.derived(row_map=batch.row_map.clone()),
        batch.without_rows(),
        make(replace(CFG, top_k=2), "cpu", 4),
    ):
        with pytest.raises(EPInputError, match=r"out\."):
            ranks[0].dispatch(*given, out=wrong)
    good.tokens.requires_grad_()
    with pytest.raises(EPInputError, match=r"out\.tokens\.requires_grad"):
        ranks[0].dispatch(*given, out=good)


def test_what_tells_how_many_rows_there_are_is_of_no_mode_and_no_payload() -> None:
    """Whoever asks first."""
    carving._only_rows.cache_clear()
    with torch.inference_mode():
        first = DispatchBuffers.carve(CFG, "cpu", 7).without_rows().tokens
    assert first.shape == (7,) and not first.is_inference() and first.untyped_storage().nbytes() == 1
    assert DispatchBuffers.carve(CFG, "cpu", 7).without_rows().tokens is first
    assert first.dtype not in {payload_dtype(fmt) for fmt in FORMATS.values()}
