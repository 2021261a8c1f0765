"""A small case for compute-sanitizer (`make sanitize`): one rank, eight CTAs, all kernels, every format.

One rank, because the sanitizer may run kernels one after the other, and ranks that wait for each other would time out.
"""

from __future__ import annotations

import sys

import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime.labels import label_rows, mark_entries
from cute_ep.runtime.routes import count_routes
from cute_ep.runtime.sums import sum_rows
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs
from tests.runtime.test_labels import batch_of, rank_major
from tests.runtime.test_sums import CFG, batches, check, random_rows

from .conftest import LIBRARY, connected
from .test_sums import on_gpu


def check_sums_and_counts() -> None:
    batch = batches("uniform")[0]
    rows = random_rows(len(batch.tokens), CFG.hidden, 0)
    check(*sum_rows(rows.cuda(), on_gpu(batch), sms=4, library=str(LIBRARY)), rows, batch)
    count_routes(batch.topk_ids.cuda(), CFG.num_experts, CFG.world_size, library=str(LIBRARY))
    label_rows(batch_of([3, 0, 5], 4, 2, "cuda"), 14, range(3), 9, ones=True, library=str(LIBRARY))
    mark_entries(rank_major("cuda"), 3, -1, weights=True, library=str(LIBRARY))
    torch.cuda.synchronize()


def main() -> None:
    for fmt in FORMATS:
        most = LAMPORT_TOKENS + 1
        cfg = EPConfig(2048, 16, 2, most, 1, fmt, timeout_s=100, row_alignment=16, fused_shared_expert=True)
        with connected(cfg, ["cuda:0"], sms=4) as communicators:
            for tokens, split in ((20, False), (20, True), (most, False)):
                check_round(communicators, make_inputs(cfg, [tokens], "uniform", 1), RoundOptions(split))
    check_sums_and_counts()
    sys.stdout.write("rounds ok\n")


if __name__ == "__main__":
    main()
