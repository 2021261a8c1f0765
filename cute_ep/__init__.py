"""cute_ep: Mixture-of-Experts dispatch and combine between GPUs.

The public names load on first use, so that `import cute_ep` and `import cute_ep.layouts` need neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_ep import distributed
    from cute_ep.api.buffers import DispatchBuffers
    from cute_ep.api.config import EPConfig
    from cute_ep.api.config_rules import memory_bytes, tokens_per_rank
    from cute_ep.api.dispatched import Dispatched
    from cute_ep.api.errors import EPConfigError, EPError, EPInputError, EPTimeout, VariantMissing
    from cute_ep.api.gates import Gate
    from cute_ep.api.interface import EPCommunicator
    from cute_ep.api.rounds import PendingCombine, PendingDispatch
    from cute_ep.api.row_tensors import QuantizedRows, SwigluRows
    from cute_ep.layouts.maps.variants import Hooks
    from cute_ep.reference.backend import ReferenceCommunicator
    from cute_ep.reference.decode import dequantize
    from cute_ep.runtime.communicator import Communicator
    from cute_ep.runtime.connection import connect_local
    from cute_ep.runtime.local_ops import fused_silu, quantize
    from cute_ep.runtime.places import ranks_per_node
    from cute_ep.runtime.process_connection import connect
    from cute_ep.tuning.launch_shape import Tuning

__version__ = "0.2.0"

_MODULE_OF = {
    "Communicator": "runtime.communicator",
    "DispatchBuffers": "api.buffers",
    "Dispatched": "api.dispatched",
    "EPCommunicator": "api.interface",
    "EPConfig": "api.config",
    "EPConfigError": "api.errors",
    "EPError": "api.errors",
    "EPInputError": "api.errors",
    "EPTimeout": "api.errors",
    "Gate": "api.gates",
    "Hooks": "layouts.maps.variants",
    "PendingCombine": "api.rounds",
    "PendingDispatch": "api.rounds",
    "QuantizedRows": "api.row_tensors",
    "ReferenceCommunicator": "reference.backend",
    "SwigluRows": "api.row_tensors",
    "Tuning": "tuning.launch_shape",
    "VariantMissing": "api.errors",
    "connect": "runtime.process_connection",
    "connect_local": "runtime.connection",
    "dequantize": "reference.decode",
    "fused_silu": "runtime.local_ops",
    "memory_bytes": "api.config_rules",
    "quantize": "runtime.local_ops",
    "ranks_per_node": "runtime.places",
    "tokens_per_rank": "api.config_rules",
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
    "Gate",
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
    "ranks_per_node",
    "tokens_per_rank",
]

logging.getLogger("cute_ep").addHandler(logging.NullHandler())  # the application decides what is shown

if not TYPE_CHECKING:  # for a type checker the module has the names above and no others

    def __getattr__(name: str) -> Any:
        if name == "distributed":
            return importlib.import_module("cute_ep.distributed")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'cute_ep' has no attribute {name!r}")
        return getattr(importlib.import_module(f"cute_ep.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
