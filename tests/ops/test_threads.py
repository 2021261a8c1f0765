"""What a process has once, several threads that ask for it at a time get once.

Ranks of a process have a thread each in adapters that drive several GPUs, and so have models that are compiled or
attached side by side. Here the threads meet where one of them would make a second one, or change what another reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_ep.ops
from cute_ep import EPConfig, connect_local
from cute_ep.nn import MoELayer, connect, connections, side_stream
from cute_ep.ops import registry
from cute_ep.runtime import group_pool
from cute_ep.runtime.local_pool import LocalPool

Patch = pytest.MonkeyPatch
ALONE = EPConfig(hidden=32, num_experts=4, top_k=2, max_tokens_per_rank=8, world_size=1)


class Crossing:
    """Where two threads wait for each other, a moment: if a lock keeps one of them away, the other goes on."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def meet(self) -> None:
        try:
            self._barrier.wait(0.3)
        except threading.BrokenBarrierError:
            pass

    def after(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, which begins once both threads have come."""

        def made(*given: Any, **named: Any) -> Any:
            self.meet()
            return make(*given, **named)

        return made


@pytest.fixture
def crossing() -> Crossing:
    return Crossing()


def by_two_threads(call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, range(2)))


def alone() -> Any:
    return connect_local(ALONE, ["cpu"])[0]


class Gone(SimpleNamespace):
    """An entry of the registry whose communicator nobody has any more; threads that look at it meet."""

    crossing: Crossing

    @property
    def communicator(self) -> None:
        self.crossing.meet()


@pytest.fixture
def gone(crossing: Crossing, monkeypatch: Patch) -> Gone:
    found = Gone(crossing=crossing)
    monkeypatch.setattr(registry, "_BY_NAME", {**registry._BY_NAME, "gone": found})
    return found


def test_a_communicator_has_one_name(gone: Gone) -> None:
    ep = alone()

    def name() -> str:
        made = cute_ep.ops.register(ep)
        assert registry.communicator_of(made) is ep
        return made

    assert len(set(by_two_threads(lambda _: name()))) == 1


def test_two_communicators_have_two_names(gone: Gone) -> None:
    """Each thread drops the names of those that are gone."""
    both = [alone(), alone()]
    names = by_two_threads(lambda number: cute_ep.ops.register(both[number]))
    assert [registry.communicator_of(name) for name in names] == both
    assert gone not in registry._BY_NAME.values()


def test_communicators_of_a_device_have_one_order(crossing: Crossing, monkeypatch: Patch) -> None:
    make = crossing.after(lambda device: torch.zeros(1, dtype=torch.int32, device=device))
    monkeypatch.setattr(registry, "order_of", cache(make))
    both = [alone(), alone()]
    names = by_two_threads(lambda number: cute_ep.ops.register(both[number]))
    first, second = (registry.registered(name).order for name in names)
    assert first is second


def test_a_compiler_may_read_the_names_while_another_thread_registers() -> None:
    kept = [alone(), alone()]
    cute_ep.ops.register(kept[0])
    reading, there = iter(registry._BY_NAME.items()), len(registry._BY_NAME)
    seen = [next(reading)]
    by_two_threads(lambda number: cute_ep.ops.register(kept[number]))
    assert len([*seen, *reading]) == there


def test_a_communicator_has_one_side_stream(crossing: Crossing, monkeypatch: Patch) -> None:
    monkeypatch.setattr(side_stream, "SideStream", crossing.after(lambda device: object()))
    ep = alone()
    first, second = by_two_threads(lambda _: side_stream.side_stream_of(ep))
    assert first is second is side_stream.side_stream_of(ep)


def test_a_group_has_one_pool(crossing: Crossing, monkeypatch: Patch) -> None:
    monkeypatch.setattr(group_pool, "GroupPool", crossing.after(lambda group: object()))
    pools, group = group_pool.Pools(), object()
    first, second = by_two_threads(lambda user: pools.of(group, user))  # type: ignore[arg-type]
    assert first is second and list(pools) == [first]


def test_layers_that_are_a_group_by_themselves_share_what_is_open(crossing: Crossing, monkeypatch: Patch) -> None:
    monkeypatch.setattr(connections, "_ALONE", {})
    monkeypatch.setattr(connections, "LocalPool", crossing.after(LocalPool))
    monkeypatch.setattr(LocalPool, "find", crossing.after(LocalPool.find))
    layers = [MoELayer(ALONE, 32) for _ in range(2)]
    made = by_two_threads(lambda number: connect(layers[number]))
    (pool,) = connections._ALONE.values()
    assert [one.communicator for one in layers] == [*pool.communicators] * 2
    assert sorted(len(one.communicators) for one in made) == [0, 1], "the one that has opened it closes it"
    pool.close()


def test_models_are_attached_side_by_side(monkeypatch: Patch) -> None:
    """One looks at the layers that are attached while the other adds some."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    from cute_ep.integrations.transformers import attach, attachment
    from tests.integrations.models import build

    ready, added, looked = threading.Event(), threading.Event(), []

    class Layer(SimpleNamespace):
        """The first that looks at it waits a moment for the other."""

        @property
        def attachment(self) -> Any:
            if not looked:
                looked.append(self)
                ready.set()
                added.wait(0.3)
            return SimpleNamespace(_before=[])

    keys = [torch.nn.Identity(), torch.nn.Identity()]
    monkeypatch.setattr(attachment, "_LAYERS", weakref.WeakKeyDictionary({key: Layer() for key in keys}))
    models = [build("mixtral"), build("mixtral")]

    def attached(number: int) -> Any:
        if number == 1:
            ready.wait(5)
        made = attach(models[number], devices=["cpu"], max_tokens=4)
        added.set()
        return made

    first, second = by_two_threads(attached)
    for one in (first, second):
        one.detach()
    assert set(attachment._LAYERS) == set(keys)
