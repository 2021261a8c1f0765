"""How a row's expert is found and stored: device code, run on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int32, Int64

from cute_ep.kernels.local.label_rows import LabelRows
from cute_ep.layouts.maps.local_arguments import LabelArgs
from tests.runtime.test_labels import EACH, ELSEWHERE, batch_of, wanted

from .host import run_map


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
            typed = {name: (Int64 if place < 4 else Int32)(given[place]) for place, name in enumerate(given._fields)}
            LabelRows()._label(SimpleNamespace(**typed), row)
            return (row,)

        run_map(label, np.arange(rows, dtype=np.int32), outputs=1)
        assert experts.tolist() == [*wanted(batch, rows, groups), -7]
        assert weights.tolist() == [1.0 if ones else -7.0] * rows + [-7.0]
