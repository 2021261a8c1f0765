"""What tests of bad arguments share. An adapter checks at its own border: the error has the words of the interface that
was called, and none of the core's, and nothing was sent, so a good call of all ranks works afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import pytest

from cute_ep.api.errors import EPConfigError, EPError, EPInputError

CORE = (
    "hidden", "top_k", "max_tokens_per_rank", "world_size", "dispatch_format", "timeout_s", "scale_layout", "pending",
    "row_alignment", "block_rows", "row_order", "router_weights", "topk_ids", "rows", "scales", "dispatched",
    "dispatch_async", "dispatch_wait", "combine_async", "combine_wait", "EPConfig", "communicator", "DispatchBuffers",
)  # fmt: skip
"""Names of the core's arguments, fields and calls."""
NAME = re.compile(
    r"(?<![\w\[.\]'-])(?:" + "|".join(CORE) + r")(?=(?:\.\w+|\[\d\])* = |\(|: )|EPConfig|(?:dispatch|combine)_wait\b"
)
"""One of them where a message gives its value, or tells to call it."""


def refused(
    call: Callable[[], object],
    words: str,
    kinds: type[EPError] | tuple[type[EPError], ...] = (EPInputError, EPConfigError),
    own: Collection[str] = (),
) -> None:
    """The call raises an error of one of these types with these words in it, and with no name of the core but those
    that the interface has too."""
    with pytest.raises(kinds) as found:
        call()
    text = str(found.value)
    assert words in text, f"{words!r} is not in: {text}"
    foreign = {one.group(0) for one in NAME.finditer(text)} - set(own)
    assert not foreign, f"words of the core {foreign}: {text}"


def changed(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments, of which those that are functions are applied to the good one."""
    made = {name: change(given[name]) if callable(change) else change for name, change in changes.items()}
    return given | made
