"""FlashInfer over cute_ep (docs/flashinfer.md): a communication backend of `flashinfer.moe_ep`, which `register` makes
known, and `MoeAlltoAll` in place of the deprecated class of `flashinfer.comm`."""

from cute_ep.integrations.common.versions import require

require("flashinfer", (0, 7, 2), (0, 7, 3), package="flashinfer-python")

from cute_ep.integrations.flashinfer.alltoall import MoeAlltoAll  # noqa: E402
from cute_ep.integrations.flashinfer.communication import CuteEPCommunication, CuteEPConfig, register  # noqa: E402

__all__ = ["CuteEPCommunication", "CuteEPConfig", "MoeAlltoAll", "register"]
