"""What a layer of vLLM launches on a GPU, and that nothing waits on the host unless numbers of rows are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.integrations.common import pools
from cute_ep.runtime import group_pool, process_connection
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.counts import CountExchange, ReadExchange, ReceiveCounts
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.routes import RouteCounts, count_routes
from tests.fake_gpu import Launches, MakeRank
from tests.integrations.upstream import installed
from tests.integrations.vllm_parts import HIDDEN, MicroBatch, experts_of, import_adapter, run_hook, take_turns

TOKENS, SLOTS, EXPERTS, RANKS = 16, 4, 8, 2
X = torch.randn(TOKENS, HIDDEN).bfloat16()
IDS = torch.rand(TOKENS, EXPERTS).topk(SLOTS).indices
WEIGHTS = torch.rand(TOKENS, SLOTS)
FP8 = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}

Connected = list[tuple[EPConfig, int | None]]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, make_rank: MakeRank) -> Iterator[Connected]:
    """What was connected, and for how many SMs. Kernels write nothing, so outputs are zeros."""
    made: Connected = []

    def connect(check: object, cfg: EPConfig, group: object, sms: int | None) -> Communicator:
        made.append((cfg, sms))
        return make_rank(cfg)

    with installed("vllm", "cute_ep.integrations.vllm") as stubs:
        import_adapter(stubs, monkeypatch)
        monkeypatch.setattr(process_connection, "connect_checked", connect)
        monkeypatch.setattr(group_pool, "count_ranks", lambda group, call: group.size())
        monkeypatch.setattr(torch, "empty", torch.zeros)
        yield made


def layers(number: int, quant: dict[str, Any], batched: bool = False, **options: Any) -> list:
    """Layers of rank 0 of two."""
    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager, Options
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: RANKS)
    manager = CuteEPAll2AllManager(group)
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": SLOTS, "max_tokens": TOKENS}
    make: Any = CuteEPBatched if batched else CuteEPStandard
    made = [make(manager, tuple(sizes.values()), options=Options(**options)) for _ in range(number)]
    for one in made:
        one.post_init_setup(experts_of(**quant))
    return made


@pytest.mark.parametrize("how", ["finalize", "finalize_async"])
@pytest.mark.parametrize("quant", [{}, FP8], ids=["bf16", "fp8"])
def test_a_layer_with_static_room_never_waits(
    connected: Connected, launches: Launches, no_wait: None, quant: dict, how: str
) -> None:
    for layer in layers(2, quant, sms=16, timeout_s=5):
        own = experts_of(**quant).quant_config
        rows, scales, _, ids, ones = layer.prepare(X, WEIGHTS, IDS, EXPERTS, None, False, own, False)
        moved, out = launches.last("dispatch"), torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        hooks = getattr(layer, how)(out, rows.bfloat16()[:, None], ones, ids, False, None)
        for hook in hooks or ():
            hook()
        room = RANKS * TOKENS * SLOTS + (12 if quant else 0)
        assert len(rows) == room and moved.values("out.tokens", "out.capacity") == (rows.data_ptr(), room)
        assert scales is None or moved.values("scales.data") == (scales.data_ptr(),)
        if not quant:
            assert moved.values("input.x") == (X.data_ptr(),)
        home = launches.last("combine_partial" if how == "finalize" else "combine_wait_partial")
        assert home.values("sums.out") == (out.data_ptr(),)
    halves = ["combine_async_partial", "combine_wait_partial"]
    assert launches.kernels == ["dispatch", *(["combine_partial"] if how == "finalize" else halves)] * 2
    ((cfg, sms),) = connected  # both layers share it
    assert cfg.dispatch_format == ("fp8" if quant else "bf16") and (sms, cfg.timeout_s) == (16, 5)


@pytest.mark.parametrize("how", ["early", "counted", "captured"])
def test_the_host_asks_for_rows_outside_of_capture_only(
    connected: Connected, launches: Launches, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And behind the dispatch, where memory for all that may come is not too much."""
    (layer,) = layers(1, {}, static_rows=RANKS * TOKENS * SLOTS - 1)
    asked: list = []
    most, captured = RANKS * TOKENS * SLOTS, how == "captured"

    def begin(self: object, ids: torch.Tensor, cfg: EPConfig, sms: int | None) -> tuple[CountExchange, RouteCounts]:
        routes = count_routes(ids, cfg.num_experts, cfg.world_size)
        asked.append((routes.by_expert.tolist(), cfg.num_experts))

        def receive() -> ReceiveCounts:
            assert launches.kernels == (["dispatch"] if how == "early" else [])
            return ReceiveCounts([3, 2, 1, 0], TOKENS, 4)

        return ReadExchange(receive), routes

    monkeypatch.setattr(GroupPool, "begin_counts", begin)
    monkeypatch.setattr(pools, "EARLY_BYTES", most * HIDDEN * X.itemsize - (how == "counted"))
    monkeypatch.setattr(GroupPool, "capturing", lambda self: captured)
    monkeypatch.setattr(Communicator, "synchronize", lambda self: asked.append(self))
    rows, _, meta, ids, _ = layer.prepare(X, WEIGHTS, IDS, EXPERTS, None, False, experts_of().quant_config, False)
    if captured:
        assert not asked and len(rows) == most and meta.expert_num_tokens_cpu is None
        return
    assert asked == [(torch.bincount(IDS.flatten(), minlength=EXPERTS).tolist(), EXPERTS)]
    assert len(rows) == len(ids) == 6 and meta.expert_num_tokens_cpu.tolist() == [3, 2, 1, 0]
    assert launches.only("dispatch").values("out.capacity") == (most if how == "early" else 6,)


@pytest.mark.parametrize("how", ["finalize", "finalize_async"])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_pow2"])
def test_batched_experts_get_what_the_kernel_wrote(
    connected: Connected, launches: Launches, no_wait: None, kind: str, how: str
) -> None:
    quant = {} if kind == "bf16" else {**FP8, "packed": kind == "fp8_pow2"}
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    for layer in layers(2, quant, batched=True):
        own = experts_of(**quant).quant_config
        rows, scales, meta, *_ = layer.prepare(X, WEIGHTS, IDS, EXPERTS, None, False, own, False)
        moved, out = launches.last("dispatch"), torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        assert moved.values("input.x", "out.tokens") == (X.data_ptr(), rows.data_ptr())
        assert moved.values("out.row_counts") == (meta.expert_num_tokens.data_ptr(),)
        assert kind != "fp8" or moved.values("scales.data") == (scales.data_ptr(),)
        back = rows.bfloat16()
        sums = topk_weight_and_reduce.TopKWeightAndReduceDelegate()
        hooks = getattr(layer, how)(out, back, WEIGHTS, IDS, False, sums)
        for hook in hooks or ():
            hook()
        home = launches.last("combine_partial" if how == "finalize" else "combine_async_partial")
        assert home.values("rows.data") == (back.data_ptr(),)
    halves = ["combine_async_partial", "combine_wait_partial"]
    assert launches.kernels == ["dispatch", *(["combine_partial"] if how == "finalize" else halves)] * 2
    ((cfg, _),) = connected  # both layers share it
    assert (cfg.dispatch_format, cfg.block_rows) == (kind, RANKS * TOKENS)


@pytest.mark.parametrize("batched", [True, False], ids=["blocks", "rows"])
def test_micro_batches_overlap_on_the_stream_of_the_experts(
    connected: Connected, launches: Launches, no_wait: None, batched: bool
) -> None:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    (layer,) = layers(1, {}, batched=batched)
    own, sums = experts_of().quant_config, topk_weight_and_reduce.TopKWeightAndReduceDelegate()
    outputs = [torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(2)]

    def micro_batch(out: torch.Tensor) -> MicroBatch:
        run_hook()
        hook, receive = layer.prepare_async(X, WEIGHTS, IDS, EXPERTS, None, False, own, False)
        yield hook
        rows, *_ = receive()
        hook, receive = layer.finalize_async(out, rows, WEIGHTS, IDS, False, sums)
        yield hook
        receive()

    take_turns(*map(micro_batch, outputs))
    back = "combine_async_partial", "combine_wait_partial"
    first = ["dispatch_async", "dispatch_wait", "dispatch_async", "dispatch_wait"]
    assert launches.kernels == [*first, back[0], back[1], back[0], back[1]]
    one, other = (launch.values("out.tokens") for launch in launches.of("dispatch_wait"))
    assert one != other and [launch.values("rows.data") for launch in launches.of(back[0])] == [one, other]
    assert launches.values("sums.out")[-3::2] == [out.data_ptr() for out in outputs]
    assert len(set(launch.stream for launch in launches)) == 1
