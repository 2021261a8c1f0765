"""What the functions over the ops add to a communicator's own calls: `python -m tests.ops.overhead`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from timeit import repeat
from typing import Any

import torch

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.buffers import BUFFERS, DispatchBuffers
from cute_ep.testing.workloads import make_inputs

from .ranks import ALONE

CALLS, TIMES = 2000, 7


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call, the least of several measurements."""
    call()
    return min(repeat(call, number=CALLS, repeat=TIMES)) / CALLS * 1e6


def main() -> None:
    """Print a table; the communicator's own calls do nothing but allocate."""
    torch.set_num_threads(1)
    (ep,), (one,) = connect_local(ALONE, ["cpu"]), make_inputs(ALONE, (8,), "uniform", 1)
    x, ids, weights = one.x, one.topk_ids, one.router_weights
    comm, buffers, out = cute_ep.ops.register(ep), ep.allocate(), torch.empty_like(x)
    batch, own = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers), ep.dispatch(x, ids, weights, out=buffers)

    def dispatch(x: Any, ids: Any, weights: Any = None, scale: Any = None, out: Any = None) -> Any:
        if out is None:
            DispatchBuffers.allocate(ALONE, "cpu")
        return own

    def combine(rows: Any, batch: Any, mode: Any = None, out: Any = None, dtype: Any = None) -> Any:
        return torch.empty(x.shape, dtype=dtype) if out is None else out

    ep.dispatch, ep.combine = dispatch, combine  # type: ignore[method-assign]
    ops, library = cute_ep.ops, torch.ops.cute_ep
    rows, order = torch.zeros_like(batch.tokens), torch.zeros(1, dtype=torch.int32)
    kept = ids, weights, batch.row_offsets, batch.row_map, batch.headers, batch.weights, batch.frame_ids
    tensors = [getattr(buffers, name) for name in BUFFERS]
    wanted, given = x.clone().requires_grad_(), rows.clone().requires_grad_()
    table: dict[str, tuple[Callable, ...]] = {
        "dispatch": (
            lambda: ep.dispatch(x, ids, weights),
            lambda: ops.dispatch(x, ids, weights, comm),
            lambda: library.dispatch(x, ids, weights, None, comm, None, False, None, order),
            lambda: ops.dispatch(wanted, ids, weights, comm),
        ),
        "combine": (
            lambda: ep.combine(rows, own, dtype=torch.bfloat16),
            lambda: ops.combine(rows, batch),
            lambda: library.combine(rows, *kept, comm, "partial", torch.bfloat16, order),
            lambda: ops.combine(given, batch),
        ),
        "dispatch_into": (
            lambda: ep.dispatch(x, ids, weights, out=buffers),
            lambda: ops.dispatch_into(x, ids, weights, comm, buffers),
            lambda: library.dispatch_out(x, ids, weights, None, comm, None, order, *tensors),
        ),
        "combine_into": (
            lambda: ep.combine(rows, own, out=out),
            lambda: ops.combine_into(rows, batch, out),
            lambda: library.combine_out(rows, *kept, comm, "partial", order, out),
        ),
    }
    sys.stdout.write("| us | direct | through the dispatcher | with gradient |\n| --- | --- | --- | --- |\n")
    for name, (plain, *calls) in table.items():
        base = microseconds(plain)
        cells = [f"{microseconds(call) - base:.0f}" for call in calls]
        sys.stdout.write(f"| `{name}` | {' | '.join(cells + [''] * (3 - len(cells)))} |\n")


if __name__ == "__main__":
    main()
