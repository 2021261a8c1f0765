"""DeepEP's interface on several ranks of one GPU, in threads, against the same calls on the CPU. `test_adapters.py`
runs it in a process that loads all of CUDA's kernels at once: the load of a kernel may wait until the GPU is idle, and
it never is while another rank waits for the thread that loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.integrations.groups import on_buffers

DEVICE = torch.device("cuda:0")


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from tensors(one, f"{name}[{number}]")


def assert_same(got: Any, want: Any) -> None:
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs
    for (name, one), (_, other) in pairs:
        assert_bits(one.cpu().contiguous(), other.contiguous(), name)


HIDDEN, EXPERTS, SLOTS, MOST = 512, 8, 3, 20
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x, ids and weights of a rank, on its device before any rank begins."""


def on_device(inputs: list[RankInputs], device: torch.device) -> list[Given]:
    """What each rank is given."""
    return [(one.x.to(device), one.topk_ids.to(device).long(), one.router_weights.to(device)) for one in inputs]


def normal(buffer: Buffer, given: Given) -> tuple:
    """Rows, entries, sums, and the same with a handle and with room for any routing."""
    x, ids, weights = given
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = dict(num_tokens_per_rank=by_rank, num_tokens_per_expert=by_expert, is_token_in_rank=goes)
    entry = dict(topk_idx=ids, topk_weights=weights)
    rows, got_ids, got_weights, _, handle, _ = buffer.dispatch(x, **layout, **entry)
    again = buffer.dispatch(x, handle)[0]
    worst = buffer.dispatch(x, **layout, **entry, num_worst_tokens=MOST * buffer.group_size)
    out, back, _ = buffer.combine(rows, handle, topk_weights=got_weights)
    return by_rank, by_expert, goes, rows, got_ids, got_weights, again, worst[0][: len(rows)], worst[1], out, back


def low_latency(buffer: Buffer, given: Given, *, fp8: bool, hook: bool) -> tuple:
    """Counts, the first expert's rows and scale factors, and sums of rows that are numbers."""
    x, ids, weights = given
    rows, counts, handle, _, receive = buffer.low_latency_dispatch(
        x, ids, MOST, EXPERTS, use_fp8=fp8, return_recv_hook=hook
    )
    if hook:
        receive()
    payload, scales = rows if fp8 else (rows, None)
    own = torch.ones(payload.shape, device=x.device).bfloat16() if fp8 else payload
    out, _, receive = buffer.low_latency_combine(own, ids, weights, handle, return_recv_hook=hook)
    if hook:
        receive()
    count = int(counts[0])
    _, layout_range, *_ = handle
    return counts, layout_range, payload[0, :count].view(torch.uint8), () if scales is None else scales[0, :count], out


def elastic(
    buffer: ElasticBuffer, given: Given, *, expand: bool, begin: Callable[[str], None] = lambda stage: None
) -> tuple:
    """Rows, entries, what the handle says, and sums with and without a bias. `begin` is told of each of STAGES."""
    x, ids, weights = given
    found: tuple = ()
    for wait in (True, False):
        begin("dispatch" if wait else "dispatch, no wait")
        rows, local, got_weights, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST, do_cpu_sync=wait, do_expand=expand
        )
        begin("handle")
        names = ("dst_buffer_slot_idx", "psum_num_recv_tokens_per_expert", "psum_num_recv_tokens_per_scaleup_rank")
        found += tuple(getattr(handle, name) for name in names)
        begin("numbers")
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        found += (handle.recv_src_metadata[:count],)
        begin("combine")
        sums: tuple = (buffer.combine(rows, handle)[0],)
        begin("combine with weights")
        sums += buffer.combine(rows, handle, got_weights, (x, x))[:2]
        if wait:
            found += (rows, () if local is None else local, got_weights)
        found += sums
    return found


STAGES = "dispatch", "handle", "numbers", "combine", "combine with weights", "dispatch, no wait"
LATE_S, WAITS_S = 0.1, 3.0
"""How late a rank is, and after what a rank that waits gives up."""


@pytest.mark.parametrize(
    "program",
    [
        normal,
        *(lambda *given, expand=expand: elastic(*given, expand=expand) for expand in (False, True)),
        *(
            lambda *given, fp8=fp8, hook=hook: low_latency(*given, fp8=fp8, hook=hook)
            for fp8 in (False, True)
            for hook in (False, True)
        ),
    ],
    ids=["normal", "elastic", "expanded", "low latency", "hook", "fp8", "fp8 hook"],
)
@pytest.mark.parametrize("routing", ["uniform", "masked", "one_expert"])
def test_ranks_of_one_gpu_with_a_buffer_of_deep_ep(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, program: Callable, routing: str
) -> None:
    """Ranks in threads of one process, each on a stream of its own."""
    is_elastic = request.node.callspec.id.split("-")[-1] in ("elastic", "expanded")
    make = partial(ElasticBuffer, num_gpu_timeout_secs=10) if is_elastic else Buffer
    for tokens in ([MOST], [MOST, 7], [MOST, 0, 5, 11]):
        ranks = len(tokens)
        given = make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, ranks), tokens, routing, 5)
        got, want = (
            on_buffers(
                monkeypatch,
                ranks,
                lambda buffer, given=there: program(buffer, given[buffer._pool.rank]),
                make,
                device,
            )
            for device in (DEVICE, torch.device("cpu"))
            for there in [on_device(given, device)]
        )
        assert_same(got, want)


def test_a_late_rank_makes_others_wait_and_nobody_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is late, at whatever stage, also where the others then connect: no call of theirs may hold up its
    launches."""
    make = partial(ElasticBuffer, num_gpu_timeout_secs=WAITS_S)

    def run(device: torch.device, tokens: list[int], late: tuple[int, str] | None = None) -> list:
        cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, len(tokens))
        given = on_device(make_inputs(cfg, tokens, "one_expert", 5), device)

        def program(buffer: ElasticBuffer) -> tuple:
            rank = buffer._pool.rank

            def begin(stage: str) -> None:
                if (rank, stage) == late:
                    time.sleep(LATE_S)

            return elastic(buffer, given[rank], expand=False, begin=begin)

        return on_buffers(monkeypatch, len(tokens), program, make, device)

    tokens = [MOST, 7]
    want = run(torch.device("cpu"), tokens)
    run(DEVICE, [MOST])  # the first use of torch's kernels, while nobody waits
    for late in [None, *((rank, stage) for stage in STAGES for rank in (0, 1))]:
        assert_same(run(DEVICE, tokens, late), want)
