"""Experts of Hugging Face transformers' models over cute_ep (docs/transformers.md).

Importing this module registers the experts implementation "cute_ep".
"""

from __future__ import annotations

from cute_ep.integrations.versions import require

require("transformers", (5, 23))

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from cute_ep.integrations.transformers.attachment import NAME, Attachment, attach, experts_forward  # noqa: E402

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

__all__ = ["Attachment", "attach"]
