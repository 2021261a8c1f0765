"""What NCCL EP and FlashInfer are asked to do: fakes of one rank that do what their interfaces say, and check how they
are used."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from perf import flashinfer_works, nccl_ep_works
from perf.deepep_works import LOW_LATENCY_TOKENS
from tests.perf.one_rank import SHAPE, STREAM, TOKENS, Here, check


def modules(monkeypatch: pytest.MonkeyPatch, **contents: dict[str, Any]) -> None:
    """Stand-ins for modules, by their names with __ for each point."""
    for name, content in contents.items():
        made = ModuleType(name.replace("__", "."))
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, made.__name__, made)


def bundle(**given: Any) -> SimpleNamespace:
    """Any of NCCL EP's configurations and bundles of descriptors."""
    return SimpleNamespace(**given)


class FakeEp:
    """NCCL EP's group, of which there may be one handle, and that handle."""

    def __init__(self, communicator: Any, config: SimpleNamespace) -> None:
        assert config.max_dispatch_tokens_per_rank >= max(TOKENS) and config.max_token_bytes == 2 * SHAPE.hidden
        assert config.max_recv_tokens_per_rank == config.max_dispatch_tokens_per_rank
        self.config, self.layout, self.dispatched = config, "", False

    def create_handle(self, layout: str, ids: Any, *, layout_info: Any, stream: int) -> FakeEp:
        assert not self.layout, "one handle for a group"
        assert (layout, self.config.zero_copy) in (("blocks", "auto"), ("flat", "on"))
        self.layout = layout
        self.update(ids, layout_info=layout_info, stream=stream)
        return self

    def update(self, ids: Any, *, layout_info: Any, stream: int) -> None:
        assert not self.dispatched and stream == STREAM and ids.tensor.dtype == torch.int64
        assert (layout_info is None) == (self.layout == "blocks"), "low latency takes none"
        self.ids = ids.tensor

    def dispatch(self, sent: Any, there: Any, *, config: Any, stream: int, layout_info: Any = None) -> None:
        assert not self.dispatched and stream == STREAM
        x, rows, self.dispatched = sent.tokens.tensor, there.tokens.tensor.fill_(float("nan")), True
        if self.layout == "flat":
            assert there.tokens.window.is_valid and sent.topk_weights.tensor.shape == self.ids.shape
            rows[: len(x)] = x
            return
        counts = layout_info.expert_counters.tensor.zero_()
        self.slots = torch.zeros_like(self.ids)
        for token, chosen in enumerate(self.ids.tolist()):
            for place, expert in enumerate(chosen):
                self.slots[token, place] = counts[expert]
                rows[expert, counts[expert]] = x[token]
                counts[expert] += 1

    def combine(self, made: Any, home: Any, *, config: Any, stream: int) -> None:
        assert self.dispatched and stream == STREAM
        self.dispatched, rows = False, made.tokens.tensor
        if self.layout == "flat":
            home.tokens.tensor.copy_(rows[: len(self.ids)])
        else:
            rows = rows[self.ids, self.slots].float() * home.topk_weights.tensor.unsqueeze(-1)
            home.tokens.tensor.copy_(rows.sum(dim=1))


@pytest.fixture
def nccl_ep(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The rank, with a fake NCCL EP."""

    class Communicator:
        """That of the rank."""

        @classmethod
        def init(cls, nranks: int, rank: int, unique_id: str) -> Communicator:
            assert (nranks, rank, unique_id) == (1, 0, "the id")
            return cls()

        def register_window(self, memory: torch.Tensor, flags: int) -> SimpleNamespace:
            assert flags == 1 and memory.shape == (max(TOKENS), SHAPE.hidden)
            return SimpleNamespace(is_valid=True)

    core = {
        "get_unique_id": lambda: SimpleNamespace(as_bytes=b"the id"),
        "UniqueId": SimpleNamespace(from_bytes=lambda sent: sent.decode()),
        "Communicator": Communicator,
        "WindowFlag": SimpleNamespace(COLL_SYMMETRIC=1),
        "torch": torch,
    }
    ep: dict[str, Any] = {
        f"{kind}{end}": bundle for kind in ("Dispatch", "Combine") for end in ("Config", "Inputs", "Outputs")
    }
    ep |= {"GroupConfig": bundle, "LayoutInfo": bundle, "Group": SimpleNamespace(create=FakeEp)}
    ep |= {"Algorithm": SimpleNamespace(LOW_LATENCY=0, HIGH_THROUGHPUT=1)}
    ep |= {"Layout": SimpleNamespace(EXPERT_MAJOR="blocks", FLAT="flat")}
    ep |= {"ZeroCopyMode": SimpleNamespace(AUTO="auto", ON="on")}
    ep["Tensor"] = lambda tensor, window=None, window_offset=0: SimpleNamespace(tensor=tensor, window=window)
    monkeypatch.setattr(nccl_ep_works, "LOW_LATENCY_TOKENS", max(TOKENS))
    modules(monkeypatch, nccl={"ep": SimpleNamespace(**ep), "core": SimpleNamespace(**core)})
    return here


def test_nccl_ep_gets_one_handle_and_pairs(nccl_ep: Here) -> None:
    check(nccl_ep_works.nccl_ep_low_latency(nccl_ep), ("bf16",), alone=False)
    check(nccl_ep_works.nccl_ep_high_throughput(nccl_ep), ("bf16",), alone=False)
    check(nccl_ep_works.nccl_ep_high_throughput(nccl_ep), ("bf16",), alone=False)


def test_low_latency_of_nccl_ep_ends_where_its_blocks_do(nccl_ep: Here) -> None:
    nccl_ep.tokens.append(max(TOKENS) + 1)
    assert [work.tokens for work in nccl_ep_works.nccl_ep_low_latency(nccl_ep)] == list(TOKENS)
    assert LOW_LATENCY_TOKENS == 128


def test_nccl_ep_without_windows_is_an_error(nccl_ep: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    none = SimpleNamespace(register_window=lambda memory, flags: SimpleNamespace(is_valid=False))
    monkeypatch.setattr(nccl_ep_works, "communicator", lambda rank, world: none)
    with pytest.raises(RuntimeError, match="registered no window"):
        nccl_ep_works.window(0, 1, 4, 8)


class FakeOneSided:
    """FlashInfer's object, which wants a combine after each dispatch and in its workspace."""

    def __init__(
        self, mapping: Any, most: int, top_k: int, experts: int, *, hidden_size: int, mnnvl_config: Any
    ) -> None:
        assert (mapping, most, top_k, experts) == ((1, 0, 1, 1, 1), max(TOKENS), SHAPE.top_k, SHAPE.num_experts)
        ranks = mnnvl_config.comm_backend
        assert hidden_size == SHAPE.hidden and ranks.Split(0, 0) is ranks
        self.workspace = torch.full((1, most, hidden_size), float("nan"), dtype=torch.bfloat16)
        self.tokens = 0

    def dispatch(self, ids: torch.Tensor, payloads: list, most: int, **options: Any) -> list[torch.Tensor]:
        assert not self.tokens and ids.dtype == torch.int32 and payloads[options["expert_id_payload_index"]] is ids
        assert options["invalid_token_expert_id"] == -1 and len(payloads[0]) == most
        self.tokens = most
        return [payload.clone()[None] for payload in payloads]

    def get_combine_payload_tensor_in_workspace(self, most: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        assert (most, hidden, dtype) == (self.tokens, SHAPE.hidden, torch.bfloat16)
        return self.workspace[:, :most]

    def combine(self, made: torch.Tensor, most: int, *, payload_in_workspace: bool, output: torch.Tensor) -> None:
        assert payload_in_workspace and made.data_ptr() == self.workspace.data_ptr() and most == self.tokens
        self.tokens = 0
        output.copy_(made[0])


def test_flashinfer_gets_pairs_in_its_workspace(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = {"Mapping": lambda world, rank, gpus, tp_size, moe_ep_size: (world, rank, gpus, tp_size, moe_ep_size)}
    contents: dict[str, dict] = {
        "flashinfer": {},
        "flashinfer__comm": {},
        "flashinfer__comm__comm_backend": {"TorchDistBackend": type("TorchDistBackend", (), {})},
        "flashinfer__comm__mapping": mapping,
        "flashinfer__comm__mnnvl": {"MnnvlConfig": bundle},
        "flashinfer__comm__trtllm_moe_alltoall": {"MoeAlltoAll": FakeOneSided},
    }
    modules(monkeypatch, **contents)
    check(flashinfer_works.flashinfer_one_sided(here), ("bf16",), alone=False)
