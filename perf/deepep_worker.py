"""One rank of DeepEP itself where its host waits: `python -m perf.deepep_worker`, started by `perf.adapters`.

`perf.peer_timing` times what graphs can replay. The host's times here are taken as `perf.adapter_worker` takes those of
our adapter, in processes of their own: DeepEP needs its libraries in a process before torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from perf.nvshmem import preload
from perf.peer_worker import run

if TYPE_CHECKING:
    from perf.adapter_problem import Rank, Work


def deepep_normal(me: Rank) -> Iterator[Work]:
    """Dispatch with DeepEP's default arguments: the host waits for the number of rows. ImportError: no DeepEP."""
    import deep_ep

    from perf.adapter_problem import Work
    from perf.adapter_works import normal_dispatch
    from perf.deepep_works import normal_buffer, to_fp8

    buffer = normal_buffer()
    for tokens in me.tokens:
        given = me.inputs(tokens)
        routing = given.ids.to(deep_ep.topk_idx_t), given.weights
        for fmt, x in (("bf16", given.x), ("fp8", to_fp8(given.x))):
            dispatch = partial(normal_dispatch, buffer, me.shape.num_experts, x, *routing)
            rows = sum(dispatch()[3])
            yield Work(fmt, tokens, rows, {"dispatch": dispatch}, {}, frozenset(["dispatch"]))


def main() -> int:
    """Run one rank."""
    preload()
    from perf import adapter_worker

    return adapter_worker.main({"deepep_normal": deepep_normal})


if __name__ == "__main__":
    run(main)
