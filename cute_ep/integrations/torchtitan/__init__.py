"""torchtitan's MoE token dispatch over cute_ep, by its overrides (docs/training.md)."""

from __future__ import annotations

from typing import Any

from cute_ep.integrations.common.versions import require

require("torchtitan", (0, 3), below=(0, 4))

from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher  # noqa: E402

from cute_ep.integrations.common.pools import close  # noqa: E402
from cute_ep.integrations.torchtitan.dispatcher import CuteEPSelectiveAC, CuteEPTokenDispatcher  # noqa: E402

__all__ = ["CuteEPSelectiveAC", "CuteEPTokenDispatcher", "close", "cute_ep_dispatcher", "cute_ep_selective_ac"]


# torchtitan looks for an override by the module that defines it: these stay in this one
@override(target=BaseEPTokenDispatcher.Config, description="MoE token dispatch by cute_ep.")
def cute_ep_dispatcher(cfg: BaseEPTokenDispatcher.Config, **options: Any) -> CuteEPTokenDispatcher.Config:
    """Any expert parallel dispatcher's configuration as cute_ep's; `options` are fields of that to set."""
    return derive(cfg, CuteEPTokenDispatcher.Config, **options)


@override(target=SelectiveAC.Config, description="Selective activation checkpointing that saves cute_ep's rounds.")
def cute_ep_selective_ac(cfg: SelectiveAC.Config) -> CuteEPSelectiveAC.Config:
    """The same configuration, of `CuteEPSelectiveAC`."""
    return derive(cfg, CuteEPSelectiveAC.Config)
