"""FlashInfer for tests of its adapter: the installed one, or stubs with its signatures and what the adapter uses of its
base class."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.integrations import upstream

ADAPTER = "cute_ep.integrations.flashinfer"
FORMATS = ("BF16", "FP16", "FP8PerTensor", "DeepSeekFp8", "MXFP8", "NVFP4", "MXFP4")
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
