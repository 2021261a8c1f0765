"""Experts of rows and entries by kernels, those of the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.runtime import labels
from cute_ep.runtime.labels import label_rows, mark_entries
from cute_ep.testing.compare import assert_bits
from tests.runtime.test_labels import COUNTS, EACH, ELSEWHERE, batch_of, rank_major

from .conftest import LIBRARY


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels write to holds something else."""

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(*shape, -7, **options)

    monkeypatch.setattr(labels, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))


@EACH
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_kernel_labels_as_the_cpu(counts: list[int], alignment: int, dtype: torch.dtype) -> None:
    """Of as many rows as there is room for, of fewer and of none, where rows are lost, and of more than all threads of
    a GPU take at once; in memory that held something else."""
    for room, lost in ((0, False), (5, False), (5, True), (1 << 18, False)):
        groups = range(8, 8 + len(counts))
        own, other = (batch_of(counts, alignment, room, device, lost=lost) for device in ("cuda", "cpu"))
        most = len(other.tokens)
        for rows in {0, min(1, most), most // 2, most}:
            got = label_rows(own, rows, groups, ELSEWHERE, dtype=dtype, ones=True, library=str(LIBRARY))
            want = label_rows(other, rows, groups, ELSEWHERE, dtype=dtype, ones=True)
            assert got.ones is not None and want.ones is not None
            assert_bits(got.experts.cpu(), want.experts, f"{rows} rows")
            assert_bits(got.ones.cpu(), want.ones, f"{rows} ones")


def test_labels_in_a_graph_are_of_the_batch_of_each_replay() -> None:
    batch = batch_of(COUNTS["many"], 1, 9, "cuda")
    label_rows(batch, 9, range(257), ELSEWHERE, library=str(LIBRARY))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = label_rows(batch, 9, range(257), ELSEWHERE, library=str(LIBRARY))
    for count in (2, 9):
        batch.row_offsets.fill_(count)
        batch.row_offsets[:1] = 0
        batch.row_counts.fill_(0)
        batch.row_counts[:1] = count
        got.experts.fill_(-7)
        graph.replay()
        assert got.experts.flatten().tolist() == [0] * count + [ELSEWHERE] * (9 - count)


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
def test_the_kernel_marks_as_the_cpu(weights: bool) -> None:
    for elsewhere in (-1, 0, 5000):
        got, want = (
            mark_entries(rank_major(place), 30, elsewhere, weights=weights, library=str(LIBRARY))
            for place in ("cuda", "cpu")
        )
        assert_bits(got[0].cpu(), want[0], "experts")
        assert (got[1] is None) == (want[1] is None)
        if got[1] is not None and want[1] is not None:
            assert_bits(got[1].cpu(), want[1], "weights")
