"""`deep_ep.utils.testing` for DeepEP's own tests of V1 over the adapter (`make test-upstream`), as far as they need it:
timing by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""More than any L2 cache holds."""


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """(mean, least, most) seconds of a call on the current stream; the first of `num_tests` is left out. After each
    call `post_fn` is called, and before each one the L2 cache is overwritten, if `flush_l2`."""
    for _ in range(num_warmups):
        fn()
    cache = torch.empty(FLUSH_BYTES if flush_l2 else 0, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
    for begin, end in events:
        cache.zero_()
        begin.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events[1:]]
    return mean(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any], kernel_names: str | tuple[str, ...], num_kernels_per_period: int = 1, **options: Any
) -> Any:
    """NaN for each kernel name, in lists of `num_kernels_per_period` if that is more than 1: kernels have other names
    and other numbers here. Calls `fn` once, so that rounds are made."""
    fn()
    torch.cuda.synchronize()
    one = float("nan") if num_kernels_per_period == 1 else [float("nan")] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else [one for _ in kernel_names]
