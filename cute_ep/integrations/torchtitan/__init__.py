"""torchtitan's MoE token dispatch over cute_ep (docs/training.md), by its overrides.

| `--override.imports` | in place of |
| --- | --- |
| `cute_ep.integrations.torchtitan.cute_ep_dispatcher` | the model's expert parallel token dispatcher |
| `cute_ep.integrations.torchtitan.cute_ep_selective_ac` | selective activation checkpointing, which then saves rounds |
"""

from __future__ import annotations

from cute_ep.integrations.common.versions import require

require("torchtitan", (0, 3), below=(0, 4))

from cute_ep.integrations.common.pools import close  # noqa: E402
from cute_ep.integrations.torchtitan.dispatcher import (  # noqa: E402
    CuteEPSelectiveAC,
    CuteEPTokenDispatcher,
    cute_ep_dispatcher,
    cute_ep_selective_ac,
)

__all__ = ["CuteEPSelectiveAC", "CuteEPTokenDispatcher", "close", "cute_ep_dispatcher", "cute_ep_selective_ac"]
