"""One rank's dispatch and combine through every adapter that takes expert ids, in the same two calls: for tests of what
all of them promise. Experts return what they get; frameworks are stubs. See `groups` for the ranks."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cute_ep.integrations.common.pools import release
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from tests.integrations import flashinfer_library, vllm_parts
from tests.integrations.groups import ThreadGroup
from tests.integrations.upstream import installed
from tests.processes import ROOT

RANKS, EXPERTS, SLOTS, HIDDEN, MOST = 2, 8, 3, 128, 6
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x [T, hidden] bfloat16, ids [T, SLOTS] int64, weights [T, SLOTS] float32."""


class Rig(ABC):
    """A rank's end of an adapter.

    Attributes:
        ids: what the interface calls expert ids.
        sums: what combine adds up for a token: "weighted" rows of its experts, "entries", rows of these without weight,
            or "ranks", one row of each rank that has one of them.
        lower_half: whether an id beyond 32 bits counts as its lower half, or as masked; "positive": or so, if it is.
    """

    ids: ClassVar[str] = "topk_ids"
    sums: str = "weighted"
    lower_half: bool | str = True

    @abstractmethod
    def dispatch(self, given: Given) -> Any:
        """Send tokens; what `combine` takes."""

    @abstractmethod
    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        """[T, hidden] sums of what dispatch has brought."""

    @abstractmethod
    def close(self) -> None:
        """Close the communicators."""


# ---- DeepEP


class DeepEP(Rig):
    ids = "topk_idx"

    def __init__(self, group: Any, **options: Any) -> None:
        self.buffer, self.options = self.make(group), options

    def make(self, group: Any) -> Any:
        return Buffer(group)

    def close(self) -> None:
        self.buffer.destroy()


class Normal(DeepEP):
    """`entries`: whether dispatch is given ids; `own`: whether the layout is one of the caller's own."""

    sums, lower_half = "ranks", False

    def __init__(self, group: Any, *, entries: bool = True, own: bool = False, **options: Any) -> None:
        super().__init__(group, **options)
        self.entries, self.own = entries, own

    def dispatch(self, given: Given) -> Any:
        x, ids, weights = given
        by_rank, _, by_expert, goes, _ = self.buffer.get_dispatch_layout(ids, EXPERTS)
        if self.own:
            by_rank, by_expert, goes = by_rank.clone(), by_expert.clone(), goes.clone()
        entry = {"topk_idx": ids, "topk_weights": weights} if self.entries else {}
        rows, *_, handle, _ = self.buffer.dispatch(x, None, by_rank, None, goes, by_expert, **entry, **self.options)
        return rows, handle

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        return self.buffer.combine(*sent)[0]


class LowLatency(DeepEP):
    """`return_recv_hook`: in halves."""

    lower_half = "positive"

    def dispatch(self, given: Given) -> Any:
        x, ids, _ = given
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, use_fp8=False, **self.options
        )
        if hook is not None:
            hook()
        return rows, handle

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        _, ids, weights = given
        out, _, hook = self.buffer.low_latency_combine(sent[0], ids, weights, sent[1], **self.options)
        if hook is not None:
            hook()
        return out


class Elastic(DeepEP):
    sums, lower_half = "ranks", False

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(group, **options)
        self.sums = "entries" if options.get("do_expand") else "ranks"

    def make(self, group: Any) -> Any:
        return ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN)

    def dispatch(self, given: Given) -> Any:
        x, ids, _ = given
        rows, _, _, handle, _ = self.buffer.dispatch(x, ids, num_experts=EXPERTS, **self.options)
        return rows, handle

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        return self.buffer.combine(*sent)[0]


# ---- FlashInfer


@contextmanager
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flashinfer_library.stubs():
        yield


class FlashInfer(Rig):
    sums = "ranks"

    def __init__(self, group: ThreadGroup) -> None:
        adapter: Any = importlib.import_module("cute_ep.integrations.flashinfer.communication")
        params = adapter.moe_ep.MoEEpCommParams(
            num_experts=EXPERTS, top_k=SLOTS, max_tokens_per_rank=MOST, hidden_size=HIDDEN, dtype=torch.bfloat16
        )
        bootstrap = adapter.moe_ep.BootstrapConfig(world_size=group.size(), rank=group.rank(), process_group=group)
        self.one = adapter.CuteEPCommunication(bootstrap, params)

    def dispatch(self, given: Given) -> Any:
        return self.one.dispatch(*given).hidden_states

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        return self.one.combine(sent)

    def close(self) -> None:
        self.one.destroy()


class AlltoAll(FlashInfer):
    ids = "token_selected_experts"

    def __init__(self, group: ThreadGroup) -> None:
        adapter: Any = importlib.import_module("cute_ep.integrations.flashinfer.alltoall")
        mapping = SimpleNamespace(moe_ep_rank=group.rank(), moe_ep_size=group.size())
        backend = SimpleNamespace(comm_backend=SimpleNamespace(_group=group))
        self.one = adapter.MoeAlltoAll(mapping, MOST, SLOTS, EXPERTS, hidden_size=HIDDEN, mnnvl_config=backend)

    def dispatch(self, given: Given) -> Any:
        x, ids, weights = given
        return self.one.dispatch(ids, [x, ids, weights], MOST)[0]

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        return self.one.combine(sent, MOST)


# ---- vLLM


@contextmanager
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed("vllm", "cute_ep.integrations.vllm") as made:
        vllm_parts.import_adapter(made, monkeypatch)
        yield


class VLLM(Rig):
    """`batched`: in blocks. `counted`: the host asks for numbers of rows."""

    def __init__(self, group: ThreadGroup, *, batched: bool = False, counted: bool = False) -> None:
        name = "batched" if batched else "standard"
        module: Any = importlib.import_module(f"cute_ep.integrations.vllm.{name}")
        manager: Any = importlib.import_module("cute_ep.integrations.vllm.manager")
        self.group, self.manager = group, manager.CuteEPAll2AllManager(group)
        sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": SLOTS, "max_tokens": MOST}
        make = module.CuteEPBatched if batched else module.CuteEPStandard
        self.layer = make(
            self.manager, tuple(sizes.values()), options=manager.Options(static_rows=0 if counted else 32768)
        )
        self.experts = vllm_parts.experts_of()
        self.layer.post_init_setup(self.experts)
        self.lower_half = not counted

    def dispatch(self, given: Given) -> Any:
        x, ids, weights = given
        return self.layer.prepare(x, weights, ids, EXPERTS, None, False, self.experts.quant_config, False)[0]

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        out = torch.full((len(given[0]), HIDDEN), torch.nan).bfloat16()
        name = "vllm.model_executor.layers.fused_moe.topk_weight_and_reduce"
        self.layer.finalize(out, sent, None, None, False, sys.modules[name].TopKWeightAndReduceDelegate())
        return out

    def close(self) -> None:
        self.manager.destroy()


# ---- SGLang


@contextmanager
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed("sglang", "cute_ep.integrations.sglang"):
        module = importlib.import_module("cute_ep.integrations.sglang.dispatcher")
        setting = lambda value: SimpleNamespace(get=lambda: value)  # noqa: E731
        names = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_DEEPEP_V2_NUM_SMS"
        settings = dict(zip(names, (setting(MOST), setting(0)), strict=True))
        monkeypatch.setattr(module, "envs", SimpleNamespace(**settings))
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(attn_dp_size=2, attn_cp_size=1))
        yield


class SGLang(Rig):
    ids = "topk_output.topk_ids"

    def __init__(self, group: ThreadGroup, *, extend: bool) -> None:
        self.module: Any = importlib.import_module("cute_ep.integrations.sglang.dispatcher")
        self.module.get_is_extend_in_batch = lambda: extend
        sizes = SLOTS, EXPERTS, EXPERTS // group.size(), HIDDEN
        self.one = self.module.CuteEPDispatcher(group, *sizes, torch.bfloat16, False)
        self.lower_half, self.group = not extend, group

    def dispatch(self, given: Given) -> Any:
        x, ids, weights = given
        return self.one.dispatch(x, self.module.StandardTopKOutput(weights, ids, weights)).hidden_states

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        return self.one.combine(self.module.DeepEPv2CombineInput(sent, None))

    def close(self) -> None:
        release(self.group, None)


# ---- torchtitan


@contextmanager
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def loaded() -> list[str]:
        return [one for one in sys.modules if f"{one}.".startswith(("torchtitan.", "cute_ep.integrations.torchtitan."))]

    monkeypatch.syspath_prepend(ROOT / "tests" / "integrations" / "stubs")
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    try:
        yield
    finally:
        for name in loaded():
            del sys.modules[name]


class Titan(Rig):
    ids = "topk_expert_ids_TK"

    def __init__(self, group: ThreadGroup, factor: float | None = 1.0) -> None:
        self.module: Any = importlib.import_module("cute_ep.integrations.torchtitan")
        kind, self.group, self.lower_half = self.module.CuteEPTokenDispatcher, group, factor is not None
        self.one = kind(kind.Config(num_experts=EXPERTS, top_k=SLOTS, non_blocking_capacity_factor=factor))
        self.one.wire_meshes(ep_mesh=SimpleNamespace(size=group.size, get_group=lambda: group))

    def dispatch(self, given: Given) -> Any:
        x, ids, weights = given
        with torch.no_grad():
            return self.one.dispatch(x, weights, ids, torch.zeros(EXPERTS, dtype=torch.int64))

    def combine(self, given: Given, sent: Any) -> torch.Tensor:
        rows, _, metadata = sent
        with torch.no_grad():
            return self.one.combine(rows, metadata, given[0])

    def close(self) -> None:
        release(self.group, None)


@contextmanager
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield


Make = Callable[[ThreadGroup], Rig]
RIGS: dict[str, tuple[Any, Make]] = {
    "DeepEP normal": (nothing, Normal),
    "DeepEP normal, worst": (nothing, lambda group: Normal(group, num_worst_tokens=RANKS * MOST)),
    "DeepEP normal, own layout": (nothing, lambda group: Normal(group, own=True)),
    "DeepEP normal, no entries": (nothing, lambda group: Normal(group, entries=False)),
    "DeepEP low latency": (nothing, LowLatency),
    "DeepEP low latency, hooks": (nothing, lambda group: LowLatency(group, return_recv_hook=True)),
    "DeepEP elastic": (nothing, Elastic),
    "DeepEP elastic, static": (nothing, lambda group: Elastic(group, do_cpu_sync=False)),
    "DeepEP elastic, expanded": (nothing, lambda group: Elastic(group, do_expand=True)),
    "FlashInfer": (flashinfer, FlashInfer),
    "FlashInfer, MoeAlltoAll": (flashinfer, AlltoAll),
    "vLLM": (vllm, VLLM),
    "vLLM, counted": (vllm, lambda group: VLLM(group, counted=True)),
    "vLLM, batched": (vllm, lambda group: VLLM(group, batched=True)),
    "SGLang, extend": (sglang, lambda group: SGLang(group, extend=True)),
    "SGLang, decode": (sglang, lambda group: SGLang(group, extend=False)),
    "torchtitan": (torchtitan, Titan),
    "torchtitan, counted": (torchtitan, lambda group: Titan(group, None)),
}
"""By name a context in which its framework can be imported, and what makes a rank's."""
