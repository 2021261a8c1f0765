"""Rows that lie apart, overlap or are one and the same, dispatched from where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.verify import check_dispatched, poisoned_buffers
from cute_ep.testing.workloads import make_inputs
from tests.strided_rows import REFUSED, TAKEN

from .conftest import connected

MOST = LAMPORT_TOKENS + 1
SIZES = (2880, 2048, 7168, 4096, 2880, 7168, 7168, 2880, 2048)
HIDDEN = {fmt: hidden for fmt, hidden in zip(FORMATS, SIZES, strict=True)}
"""By format; 2880 is no multiple of a segment."""


def check_views(
    communicators: list[Communicator], tokens: int, views: list[Callable], *, quantised: bool, split: bool
) -> None:
    """One dispatch of a view of each rank's rows, against the reference of their contiguous copies."""
    cfg = communicators[0].cfg
    inputs = make_inputs(cfg, [tokens] * cfg.world_size, "uniform", tokens)
    arguments: list[dict] = []
    plain: list[tuple] = []
    for one, communicator, view in zip(inputs, communicators, views, strict=True):
        x, ids, weights = (part.to(communicator.device) for part in vars(one).values())
        given: dict = {"x": view(x)}
        if quantised:
            payload, *factors = reference.quantize(x, cfg.format)
            given["x"] = view(payload.view(torch.uint8)).view(payload.dtype)
            names = ("scales", "row_scales")
            given |= {name: f if f is None else f[: len(given["x"])] for name, f in zip(names, factors, strict=True)}
        count = len(given["x"])
        given |= {"topk_ids": ids[:count], "router_weights": weights[:count]}
        arguments.append(given)
        rows = given["x"].clone(memory_format=torch.contiguous_format)
        ready = QuantizedRows(rows, given["scales"], given["row_scales"]) if quantised else None
        plain.append((rows, ids[:count], weights[:count], ready))
    oracle = communicators[0].device

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(oracle)

    xs, ids, weights = ([there(row[place]) for row in plain] for place in range(3))
    ready = [QuantizedRows(*map(there, row[3])) for row in plain] if quantised else None
    expected = reference.dispatch(cfg, xs, ids, None, weights, ready)
    buffers = [poisoned_buffers(c, int(w.num_rows)) for c, w in zip(communicators, expected, strict=True)]
    for communicator in communicators:
        torch.cuda.synchronize(communicator.device)
    if split:
        pending = [c.dispatch_async(**given) for c, given in zip(communicators, arguments, strict=True)]
        got = [c.dispatch_wait(p, out) for c, p, out in zip(communicators, pending, buffers, strict=True)]
    else:
        got = [c.dispatch(**given, out=out) for c, given, out in zip(communicators, arguments, buffers, strict=True)]
    for communicator in communicators:
        communicator.synchronize()
    for rank, want in enumerate(expected):
        check_dispatched(got[rank], want, cfg, rank)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_view_in_every_format(devices: list[str], fmt: str) -> None:
    """Few tokens and many, fused and split, rows to encode and rows that are quantised; a rank has another view than
    the next one."""
    cfg = EPConfig(HIDDEN[fmt], 8 * len(devices), 2, MOST, len(devices), fmt, 20)
    names = list(TAKEN)
    with connected(cfg, devices) as communicators:
        for turn, name in enumerate(names):
            views = [TAKEN[names[(turn + rank) % len(names)]] for rank in range(len(devices))]
            for tokens in (33, MOST):
                quantised, split = bool(FORMATS[fmt].scale) and (turn + tokens) % 2 == 1, turn % 3 == 0
                try:
                    check_views(communicators, tokens, views, quantised=quantised, split=split)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {tokens} tokens, {quantised = }, {split = }: {error}") from error


@pytest.mark.parametrize("skip", [False, True])
def test_rows_of_a_shared_expert_and_of_ranks_alone(devices: list[str], skip: bool) -> None:
    cfg = EPConfig(2048, 8 * len(devices), 2, 64, len(devices), "bf16", 20, skip_a2a=skip, fused_shared_expert=True)
    with connected(cfg, devices) as communicators:
        for view in (TAKEN["left half of wider rows"], TAKEN["one row for all"]):
            check_views(communicators, 64, [view] * len(devices), quantised=False, split=False)


@pytest.mark.parametrize(("view", "rule"), REFUSED.values(), ids=REFUSED)
def test_other_strides_are_refused(view: Callable, rule: str) -> None:
    cfg = EPConfig(2048, 8, 2, 16, 1, "bf16", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        x, ids, _ = (part.cuda() for part in vars(make_inputs(cfg, [16], "uniform", 1)[0]).values())
        x = view(x)
        for call in (communicator.dispatch, communicator.plan_dispatch, communicator.dispatch_async):
            with pytest.raises(EPInputError, match=rule):
                call(x, ids[: len(x)])
        communicator.dispatch(x.clone(memory_format=torch.contiguous_format), ids[: len(x)])
        communicator.synchronize()
