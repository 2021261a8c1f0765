"""FlashInfer for tests of its adapter: the installed one, or stubs with its signatures and what the adapter uses of its
base class. And tokens, rows and sums that tests of it have in common."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.integrations import upstream
from tests.integrations.groups import entries

ADAPTER = "cute_ep.integrations.flashinfer"
FORMATS = ("BF16", "FP16", "FP8PerTensor", "DeepSeekFp8", "MXFP8", "NVFP4", "MXFP4")
HIDDEN, EXPERTS, SLOTS, MOST = 128, 12, 3, 9
TOKENS = {2: (9, 0), 3: (9, 0, 7)}
INSTALLED = importlib.util.find_spec("flashinfer") is not None


@contextmanager
def stubs() -> Iterator[tuple[Any, ModuleType]]:
    """(flashinfer.moe_ep, the adapter), both of stubs. `moe_ep.QuantFormat["NVFP4"]` has no more than a name."""
    with upstream.installed("flashinfer", ADAPTER) as made:
        moe_ep: Any = made["flashinfer.moe_ep"]
        core: Any = made["flashinfer.moe_ep.core.comm.communication"]
        moe_ep.BootstrapConfig = made["flashinfer.moe_ep.config"].BootstrapConfig  # type: ignore[attr-defined]
        for name in upstream.WANTED["flashinfer"]["flashinfer.moe_ep.core.comm.communication"]:
            setattr(moe_ep, name, getattr(core, name))
        registry: dict[str, Any] = {}

        def init(self: Any, bootstrap: Any, params: Any) -> None:
            self.bootstrap, self.params = bootstrap, params
            self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
            self.num_local_experts = params.num_experts // self.ep_size

        def register(name: str) -> Any:
            return lambda cls: registry.__setitem__(name, cls) or cls

        def create(bootstrap: Any, params: Any, backend: Any, **options: Any) -> Any:
            if not isinstance(backend, str):
                options["config"] = backend
            return registry[getattr(backend, "backend_name", backend)](bootstrap, params, **options)

        core.MoEEpCommunication.__init__ = init
        moe_ep.register_communication, moe_ep.create_communication = register, create
        moe_ep.QuantFormat = {name: SimpleNamespace(name=name) for name in FORMATS}
        yield moe_ep, importlib.import_module(ADAPTER)


@contextmanager
def real() -> Iterator[tuple[Any, ModuleType]]:
    """(flashinfer.moe_ep, the adapter) as installed."""
    moe_ep = importlib.import_module("flashinfer.moe_ep")
    moe_ep.QuantFormat = importlib.import_module("flashinfer.fused_moe.api").QuantFormat  # type: ignore[attr-defined]
    yield moe_ep, importlib.import_module(ADAPTER)


@contextmanager
def library_of(kind: str) -> Iterator[Any]:
    """FlashInfer's names, and the adapter as `.adapter`, registered. Skips a test of the "real" library where there is
    none."""
    if kind == "real" and not INSTALLED:
        pytest.skip("needs FlashInfer: pip install 'flashinfer-python>=0.7.2,<0.7.3'")
    with real() if kind == "real" else stubs() as (moe_ep, adapter):
        adapter.register()
        names = ("BootstrapConfig", "MoEEpCommParams", "MoEEpCommunication", "QuantFormat", "create_communication")
        yield SimpleNamespace(adapter=adapter, **{name: getattr(moe_ep, name) for name in names})


# ---- tokens, rows and sums


def inputs(ranks: int, routing: str, tokens: tuple[int, ...] | None = None) -> list[RankInputs]:
    return make_inputs(
        EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, ranks), TOKENS[ranks] if tokens is None else tokens, routing, 7
    )


def rows_of(found: list[tuple[int, int, dict[int, int]]], stride: int) -> list[int]:
    """The row of each of a rank's `entries`: its position among those of its source, behind source * stride."""
    return [
        source * stride + sum(source == other for other, _, _ in found[:number])
        for number, (source, _, _) in enumerate(found)
    ]


def sums(ranks: int, ids: list[torch.Tensor], rows: list[torch.Tensor], stride: int) -> list[torch.Tensor]:
    """Of each token's rows by ascending rank, in float32."""
    total = [torch.zeros(len(one), rows[0].shape[1]) for one in ids]
    for rank in range(ranks):
        found = entries(EXPERTS, ranks, rank, ids)
        for row, (source, token, _) in zip(rows_of(found, stride), found, strict=True):
            total[source][token] += rows[rank][row].float()
    return total


def random_rows(count: int, seed: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(tokens: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of any bits."""
    size = columns * torch.empty(0, dtype=dtype).itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (tokens, size), generator=generator).to(torch.uint8).view(dtype)
