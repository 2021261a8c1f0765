"""Which expert each row of a batch is of: on the CPU, as rows say that are looked at one by one."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.local_arguments import LabelArgs
from cute_ep.runtime import labels
from cute_ep.runtime.labels import label_rows

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
    cfg = EPConfig(128, len(counts), 1, max(1, int(ends[-1]) + room), 1, row_alignment=alignment)
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


def test_a_kernel_is_told_where_to_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each row, as far as CTAs go. Of no rows nothing is launched, and no tensor is made to be read."""
    launched: list[tuple[str, int, LabelArgs]] = []
    for name, fake in {
        "_has_kernel": lambda device: True,
        "local_kernel": lambda device, name, fmt, library: name,
        "resident_ctas": lambda device: 3,
        "launch_on": lambda device, kernel, grid, given: launched.append((kernel, grid, given)),
    }.items():
        monkeypatch.setattr(labels, name, fake)
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
