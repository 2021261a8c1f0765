"""Which experts rows and entries of a batch are of: on the CPU, as is seen by looking at one after the other."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.local_arguments import LabelArgs, MarkArgs
from cute_ep.runtime import labels
from cute_ep.runtime.labels import label_rows, mark_entries

COUNTS = {
    "one": [3],
    "some without rows": [0, 4, 0, 0, 1, 7, 0],
    "none": [0, 0, 0],
    "many": [group * 7 % 5 for group in range(257)],
}
"""Tokens by group."""
EACH = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
ELSEWHERE = 1023


def batch_of(counts: list[int], alignment: int, room: int, device: str = "cpu", *, lost: bool = False) -> Dispatched:
    """With groups of so many rows, padded, and room for more; `lost`: as when there was no room for all."""
    padded = torch.tensor([-(-count // alignment) * alignment for count in counts])
    ends = padded.cumsum(0)
    cfg = EPConfig(128, len(counts), 1, max(1, int(ends[-1])), 1, row_alignment=alignment)
    buffers = DispatchBuffers.carve(cfg, device, int(ends[-1]) + room)
    buffers.row_offsets.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), ends]) * (not lost))
    buffers.row_counts.copy_(torch.tensor(counts) * (not lost))
    ids = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return Dispatched.of_tensors(tensors_of(buffers), rank=0, topk_ids=ids, router_weights=None, return_slices_log2=0)


def wanted(batch: Dispatched, rows: int, groups: range) -> list[int]:
    offsets, counts = batch.row_offsets.tolist(), batch.row_counts.tolist()
    found = [ELSEWHERE] * rows
    for number, begin, count in zip(groups, offsets, counts, strict=False):
        for row in range(begin, min(begin + count, rows)):
            found[row] = number
    return found


@EACH
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_have_the_experts_of_their_groups(counts: list[int], alignment: int, dtype: torch.dtype) -> None:
    """Padding, and rows behind the last, another number; of fewer rows the first ones."""
    for room in (0, 5):
        batch, groups = batch_of(counts, alignment, room), range(8, 8 + len(counts))
        for rows in {0, 1, len(batch.tokens)} & set(range(len(batch.tokens) + 1)):
            numbers, ones = label_rows(batch, rows, groups, ELSEWHERE, dtype=dtype, ones=room > 0)
            assert (numbers.shape, numbers.dtype) == ((rows, 1), dtype)
            assert numbers.flatten().tolist() == wanted(batch, rows, groups)
            assert (ones is None) == (room == 0)
            assert ones is None or torch.equal(ones, torch.ones(rows, 1))


def test_where_rows_are_lost_none_has_an_expert() -> None:
    batch = batch_of(COUNTS["some without rows"], 1, 2, lost=True)
    assert (label_rows(batch, 9, range(7), ELSEWHERE).experts == ELSEWHERE).all()


RANK_MAJOR = EPConfig(128, 6, 3, 4, 2, row_order="rank_major", row_alignment=1)


def rank_major(device: str = "cpu") -> Dispatched:
    """Rows of two sources, the last of no token, whose weights are NaN."""
    buffers = DispatchBuffers.carve(RANK_MAJOR, device)
    local = torch.randint(-2, 3, buffers.row_expert_ids.shape, generator=torch.Generator().manual_seed(1))
    local[-1] = -1
    buffers.row_expert_ids.copy_(local)
    buffers.row_weights.copy_(torch.where(local >= 0, local + 0.5, torch.nan))
    return Dispatched(buffers, 0, torch.zeros((4, 3), dtype=torch.int32, device=device), None, 0, weighted=True)


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
def test_entries_of_a_rank_have_numbers_of_the_model(weights: bool) -> None:
    batch = rank_major()
    experts, found = mark_entries(batch, 30, -5, weights=weights)
    local = batch.row_expert_ids.flatten().tolist()
    assert experts.dtype == torch.int32 and experts.shape == (8, 3)
    assert experts.flatten().tolist() == [30 + one if one >= 0 else -5 for one in local]
    assert (found is None) != weights
    assert found is None or found.flatten().tolist() == [one + 0.5 if one >= 0 else 0 for one in local]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Kernels, CTAs and arguments of what is launched on a GPU with room for three CTAs."""
    found: list[tuple] = []
    for name, fake in {
        "_has_kernel": lambda device: True,
        "local_kernel": lambda device, name, fmt, library: name,
        "resident_ctas": lambda device: 3,
        "launch_on": lambda device, kernel, grid, given: found.append((kernel, grid, given)),
    }.items():
        monkeypatch.setattr(labels, name, fake)
    return found


def test_a_kernel_is_told_where_to_read_and_write(launched: list[tuple]) -> None:
    """A thread for each row, as far as CTAs go. Of no rows nothing is launched, and no tensor is made to be read."""
    buffers = DispatchBuffers.carve(EPConfig(128, 4, 1, 4096, 1), "cpu", 4096)
    batch = Dispatched(buffers, 0, torch.zeros((1, 1), dtype=torch.int32), None, 0, weighted=False)
    label_rows(batch, 0, range(4, 8), 0)
    for rows, wide, grid in ((1, True, 1), (513, False, 2), (4096, True, 3)):
        kind = torch.int64 if wide else torch.int32
        made = label_rows(batch, rows, range(4, 8), 1, dtype=kind, ones=wide)
        ones = made.ones.data_ptr() if made.ones is not None else 0
        read = buffers.addresses(("row_offsets", "row_counts")).values()
        args = LabelArgs(*read, made.experts.data_ptr(), ones, rows, 4, 4, 1, int(wide))
        assert launched.pop() == ("label_rows", grid, args) and not launched
    assert not {"row_offsets", "row_counts"} & vars(buffers).keys()


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
def test_a_kernel_is_told_which_entries_to_mark(launched: list[tuple], weights: bool) -> None:
    batch = rank_major()
    experts, found = mark_entries(batch, 3, -1, weights=weights)
    read = batch.buffers.addresses(("row_expert_ids", "row_weights")).values()
    args = MarkArgs(*read, experts.data_ptr(), 0 if found is None else found.data_ptr(), 24, 3, -1)
    assert launched == [("mark_entries", 1, args)]
