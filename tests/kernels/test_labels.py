"""How experts of rows and entries are found and stored: device code, run on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int32, Int64

from cute_ep.kernels.local.label_rows import LabelRows
from cute_ep.kernels.local.mark_entries import MarkEntries
from cute_ep.layouts.maps.local_arguments import LabelArgs, MarkArgs
from tests.runtime.test_labels import EACH, ELSEWHERE, batch_of, wanted

from .host import run_map


def typed(given: LabelArgs | MarkArgs) -> SimpleNamespace:
    """As kernels have them: four addresses, and then sizes."""
    return SimpleNamespace(**{name: (Int64 if at < 4 else Int32)(given[at]) for at, name in enumerate(given._fields)})


@EACH
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ones", [False, True], ids=["", "ones"])
def test_rows_have_the_experts_of_their_groups(
    counts: list[int], alignment: int, dtype: torch.dtype, ones: bool
) -> None:
    """Of all rows but the last, whose elements stay as they are."""
    for lost in (False, True):
        batch, groups = batch_of(counts, alignment, 5, lost=lost), range(8, 8 + len(counts))
        rows = len(batch.tokens) - 1
        experts, weights = torch.full((rows + 1,), -7, dtype=dtype), torch.full((rows + 1,), -7.0)
        given = LabelArgs(
            batch.row_offsets.data_ptr(),
            batch.row_counts.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr() if ones else 0,
            *(rows, len(groups), groups.start, ELSEWHERE, int(dtype == torch.int64)),
        )

        def label(row, given=given):
            LabelRows()._label(typed(given), row)
            return (row,)

        run_map(label, np.arange(rows, dtype=np.int32), outputs=1)
        assert experts.tolist() == [*wanted(batch, rows, groups), -7]
        assert weights.tolist() == [1.0 if ones else -7.0] * rows + [-7.0]


@pytest.mark.parametrize("elsewhere", [-1, 0, 5000])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_entries_of_a_rank_have_numbers_of_the_model(elsewhere: int, weighted: bool) -> None:
    """Of all entries but the last, whose elements stay as they are. Where no token is weights may be anything."""
    local = torch.tensor([[3, -1], [-1, 0], [-1, -1], [7, 7]], dtype=torch.int32)
    given = torch.where(local >= 0, local + 0.5, torch.nan)
    experts, weights = torch.full((4, 2), -7, dtype=torch.int32), torch.full((4, 2), -7.0)
    tensors = local, given, experts
    args = MarkArgs(*(one.data_ptr() for one in tensors), weights.data_ptr() if weighted else 0, 7, 16, elsewhere)

    def mark(entry):
        MarkEntries()._mark(typed(args), entry)
        return (entry,)

    run_map(mark, np.arange(7, dtype=np.int32), outputs=1)
    assert experts.flatten().tolist() == [19, elsewhere, elsewhere, 16, elsewhere, elsewhere, 23, -7]
    assert weights.flatten().tolist() == ([3.5, 0, 0, 0.5, 0, 0, 7.5, -7] if weighted else [-7.0] * 8)
