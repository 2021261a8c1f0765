"""Which CTA ranks and counts which of a rank's entries: device code, run on the CPU."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Int32

from cute_ep.kernels.dispatch.route import spans_of

from .host import run_map

SPANS = (0, 1, 2, 3, 46, 47, 48, 49, 128, 129, 4096)


@pytest.mark.parametrize("ctas", [1, 2, 3, 4, 16, 48, 88, 263, 264])
def test_every_span_is_ranked_by_one_cta_and_one_counts_all(ctas: int) -> None:
    """With any number of senders: the highest CTA counts, behind the last span where there are others to rank it."""
    for senders in sorted({1, ctas // 4, ctas // 2, ctas // 2 + 1, ctas - 1, ctas} - {0}):
        cta, spans = (grid.ravel() for grid in np.meshgrid(np.arange(ctas), SPANS, indexing="ij"))
        cta, spans = cta.astype(np.int32), spans.astype(np.int32)

        def ends(cta, spans, senders=senders):
            return spans_of(cta, Int32(ctas), Int32(senders), spans)

        found = run_map(ends, cta, spans, outputs=2)
        first, end = (result.view(np.int32).reshape(ctas, len(SPANS)) for result in found)
        for column, count in enumerate(SPANS):
            own = [list(range(*two)) for two in zip(first[:, column], end[:, column], strict=True)]
            several = count > 1 and ctas > 1
            assert own[-1] == ([count] if several else list(range(max(count, 1))))
            ranked = sorted(chain(*(own[:-1] if several else own)))
            assert ranked == list(range(max(count, 1)))
            if several and count > ctas - 1 and 2 * senders <= ctas > 2:
                assert not any(own[:senders]), "senders do not rank"
            routers = ctas - 1 - (senders if 2 * senders <= ctas else 0)
            assert not several or max(map(len, own)) <= -(-count // max(1, routers)), "dealt out evenly"
            assert all(one or begin >= 0 for one, begin in zip(own, first[:, column], strict=True))
