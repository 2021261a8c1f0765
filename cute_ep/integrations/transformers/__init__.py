"""Experts of Hugging Face transformers' models over cute_ep (docs/transformers.md). Importing this module registers
"cute_ep" as an implementation of experts, for ranks in one process, and of the expert parallel plan, for a process per
rank. The plan needs a newer transformers; with an older one importing `CuteEP` raises ImportError."""

from __future__ import annotations

from typing import Any

from cute_ep.integrations.common.versions import has, require

require("transformers", (5, 17))

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from cute_ep.integrations.common.pools import close  # noqa: E402
from cute_ep.integrations.transformers.attachment import NAME, Attachment, attach, experts_forward  # noqa: E402

__all__ = ["Attachment", "attach", "close"]

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

PLAN = (5, 23)
"""The first transformers whose expert parallel plan takes implementations."""

if has("transformers", PLAN):
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from cute_ep.integrations.transformers.expert_parallel import CuteEP

    EPImplementationInterface.register(NAME, CuteEP)
    __all__ += ["CuteEP"]


def __getattr__(name: str) -> Any:
    """ImportError for `CuteEP`, which is missing because transformers is too old for it."""
    if name == "CuteEP":
        require("transformers", PLAN)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
