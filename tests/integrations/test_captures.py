"""What waits for the GPU in an adapter is refused while a CUDA graph is captured, before anything has changed: the
round that is under way goes on, and behind the capture the call works. Ranks are in threads, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from cute_ep.api import host
from cute_ep.api.errors import EPError
from cute_ep.integrations.transformers import attach
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.testing.compare import assert_bits

from .groups import ThreadGroup, on_groups
from .models import build
from .rigs import RANKS, RIGS, Rig
from .test_wrong_ids import expected, tokens

Capture = Callable[[], AbstractContextManager]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A context in which the calling thread captures a graph, as far as `refuse_capture` can tell."""
    own = threading.local()
    monkeypatch.setattr(host, "is_capturing", lambda device: getattr(own, "captures", False))

    @contextmanager
    def captures() -> Iterator[None]:
        own.captures = True
        try:
            yield
        finally:
            own.captures = False

    return captures


CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "DeepEP elastic": ("barrier", lambda rig: rig.buffer.barrier()),
    "FlashInfer": ("synchronize", lambda rig: rig.one.synchronize()),
    "FlashInfer, MoeAlltoAll": ("synchronize", lambda rig: rig.one.synchronize()),
}
"""By name in RIGS what the message calls a call, and the call."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_is_refused(monkeypatch: pytest.MonkeyPatch, capture: Capture, name: str) -> None:
    (framework, make), (what, call) = RIGS[name], CALLS[name]
    monkeypatch.setattr(GroupPool, "barrier", lambda self: self.group.meet())

    def program(group: ThreadGroup) -> tuple[Rig, torch.Tensor]:
        rig, given = make(group), tokens(group.rank())
        try:
            sent = rig.dispatch(given)
            with capture(), pytest.raises(EPError, match=f"^{what}: waits for the GPU, which no CUDA graph captures"):
                call(rig)
            out = rig.combine(given, sent)
            call(rig)
            return rig, out
        finally:
            rig.close()

    with framework(monkeypatch):
        for rank, (rig, out) in enumerate(on_groups(monkeypatch, RANKS, program)):
            assert_bits(out, expected(rig, tokens(rank)), f"{name}, rank {rank}")


def test_the_first_pass_of_a_model_is_refused(capture: Capture) -> None:
    """Later ones are not: they read nothing from the GPU."""
    model, ids = build("mixtral").eval(), torch.arange(6)[None]
    with torch.no_grad(), attach(model, devices=["cpu"] * RANKS, max_tokens=8):
        with capture(), pytest.raises(EPError, match=r"^the first pass of a layer: waits for the GPU"):
            model(ids)
        logits = model(ids).logits
        with capture():
            assert_bits(model(ids).logits, logits, "logits during a capture")
