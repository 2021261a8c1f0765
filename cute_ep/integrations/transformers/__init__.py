"""Experts of Hugging Face transformers' models over cute_ep (docs/transformers.md).

Importing this module registers two implementations by the name "cute_ep": of experts, for ranks in one process, and of
the expert parallel plan, for a process per rank.
"""

from __future__ import annotations

from cute_ep.integrations.versions import require

require("transformers", (5, 23))

from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from cute_ep.integrations.connections import close  # noqa: E402
from cute_ep.integrations.transformers.attachment import NAME, Attachment, attach, experts_forward  # noqa: E402
from cute_ep.integrations.transformers.expert_parallel import CuteEP  # noqa: E402

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
EPImplementationInterface.register(NAME, CuteEP)

__all__ = ["Attachment", "CuteEP", "attach", "close"]
