"""cute_ep: Mixture-of-Experts dispatch and combine between GPUs.

The public names load on first use, so that `import cute_ep` and `import cute_ep.layouts` need neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_ep import distributed
    from cute_ep.communicator import Communicator
    from cute_ep.config import EPConfig, memory_bytes
    from cute_ep.connection import connect, connect_local
    from cute_ep.decode import dequantize
    from cute_ep.dispatched import DispatchBuffers, Dispatched, QuantizedRows, SwigluRows
    from cute_ep.errors import EPConfigError, EPError, EPInputError, EPTimeout, VariantMissing
    from cute_ep.interface import EPCommunicator
    from cute_ep.launch_shape import Tuning
    from cute_ep.layouts.variants import Hooks
    from cute_ep.local_ops import fused_silu, quantize
    from cute_ep.reference_backend import ReferenceCommunicator
    from cute_ep.rounds import PendingCombine, PendingDispatch

__version__ = "0.2.0"

_MODULE_OF = {
    "Communicator": "communicator",
    "DispatchBuffers": "dispatched",
    "Dispatched": "dispatched",
    "EPCommunicator": "interface",
    "EPConfig": "config",
    "EPConfigError": "errors",
    "EPError": "errors",
    "EPInputError": "errors",
    "EPTimeout": "errors",
    "Hooks": "layouts.variants",
    "PendingCombine": "rounds",
    "PendingDispatch": "rounds",
    "QuantizedRows": "dispatched",
    "ReferenceCommunicator": "reference_backend",
    "SwigluRows": "dispatched",
    "Tuning": "launch_shape",
    "VariantMissing": "errors",
    "connect": "connection",
    "connect_local": "connection",
    "dequantize": "decode",
    "fused_silu": "local_ops",
    "memory_bytes": "config",
    "quantize": "local_ops",
}

__all__ = [
    "Communicator",
    "DispatchBuffers",
    "Dispatched",
    "EPCommunicator",
    "EPConfig",
    "EPConfigError",
    "EPError",
    "EPInputError",
    "EPTimeout",
    "Hooks",
    "PendingCombine",
    "PendingDispatch",
    "QuantizedRows",
    "ReferenceCommunicator",
    "SwigluRows",
    "Tuning",
    "VariantMissing",
    "connect",
    "connect_local",
    "dequantize",
    "distributed",
    "fused_silu",
    "memory_bytes",
    "quantize",
]


if not TYPE_CHECKING:  # for a type checker the module has the names above and no others

    def __getattr__(name: str) -> Any:
        if name == "distributed":
            return importlib.import_module("cute_ep.distributed")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'cute_ep' has no attribute {name!r}")
        return getattr(importlib.import_module(f"cute_ep.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
