"""What tests of the vLLM adapter share: what stubs of vLLM do not compute, and experts whose outputs are exact."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import reference

HIDDEN = 256
CONFIG = "vllm.model_executor.layers.fused_moe"


def import_adapter(stubs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter on stubs that do what it needs: a manager knows its group, there is no forward context, and blocks of
    FP8 are quantised."""
    base: Any = stubs["vllm.distributed.device_communicators.base_device_communicator"]

    def init(self: Any, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.cpu_group, self.internode = cpu_group, False
        self.rank, self.world_size = cpu_group.rank(), cpu_group.size()

    base.All2AllManagerBase.__init__ = init
    stubs["vllm.forward_context"].is_forward_context_available = lambda: False  # type: ignore[attr-defined]
    stubs[f"{CONFIG}.utils"].moe_kernel_quantize_input = lambda rows, *_, **__: quantised(rows)  # type: ignore[attr-defined]
    rebuilt = SimpleNamespace(rebuild_dataclass=lambda cls, force: True)
    monkeypatch.setitem(sys.modules, "pydantic.dataclasses", rebuilt)  # type: ignore[arg-type]
    adapter = importlib.import_module("cute_ep.integrations.vllm")
    importlib.import_module("cute_ep.integrations.vllm.standard")
    return adapter


def experts_of(*, expects_unquantized_inputs: bool = False, **quant: Any) -> Any:
    """Experts, as far as prepare asks them."""
    own = {"quant_dtype": None, "block_shape": None, "per_act_token_quant": False, "is_scale_swizzled": True}
    own |= {"is_scale_transposed": False, "mx_alignment": 0, "a1_scale": None, "a1_gscale": None}
    return SimpleNamespace(
        quant_config=SimpleNamespace(**(own | quant)), expects_unquantized_inputs=expects_unquantized_inputs
    )


def row_of(row: torch.Tensor, expert: int) -> torch.Tensor:
    """An expert's output for a row: another one for each expert."""
    return (row.float() * (1 + expert / 8)).bfloat16()


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in blocks of 128: [n, hidden] float8_e4m3fn, and [n, hidden / 128] float32."""
    payload, scales, _ = reference.quantize(rows, "fp8")
    return payload, scales
