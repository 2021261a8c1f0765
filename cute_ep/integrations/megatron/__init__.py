"""Megatron-core's flex token dispatcher over cute_ep (docs/training.md). `install()` makes cute_ep what the backend
"deepep" means."""

from cute_ep.integrations.common.versions import require

require("megatron.core", (0, 16), below=(0, 17), package="megatron-core")

from cute_ep.integrations.common.pools import close  # noqa: E402
from cute_ep.integrations.megatron.manager import CuteEPManager, install  # noqa: E402

__all__ = ["CuteEPManager", "close", "install"]
