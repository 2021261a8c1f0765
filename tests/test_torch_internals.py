"""What `torch_internals` has of this torch: which parts are missing, and whether they still mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cute_ep import torch_internals
from cute_ep.torch_internals import PARTS, Part


@pytest.mark.parametrize("name", PARTS)
def test_torch_has(name: str) -> None:
    """Or the error says which part, and what becomes of cute_ep without it."""
    assert getattr(torch_internals, name) is torch_internals.find(name)


@pytest.mark.parametrize("part", [Part("torch._gone", "f", "it works"), Part("torch.autograd", "_gone", "it works")])
def test_what_is_missing_is_named(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Already by the import statement of its user."""
    monkeypatch.setitem(PARTS, "part", part)
    with pytest.raises(ImportError, match=rf"^torch \S+ has no {part.module}\.{part.name}: it works$"):
        from cute_ep.torch_internals import part as found  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_internals.nothing  # noqa: B018


def test_a_profiler_is_seen_while_it_is_on() -> None:
    assert not torch_internals.profiler_enabled()
    with torch.profiler.profile():
        assert torch_internals.profiler_enabled()


def test_modes_are_counted() -> None:
    assert (torch_internals.count_function_modes(), torch_internals.count_dispatch_modes()) == (0, 0)
    with torch.device("cpu"), TorchDispatchMode():
        assert (torch_internals.count_function_modes(), torch_internals.count_dispatch_modes()) == (1, 1)


def test_transforms_are_seen_and_no_gradient_is_one() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.in_functorch())
        return x.sum()

    x = torch.ones(3, requires_grad=True)
    f(x).backward()
    torch.func.grad(f)(x)
    torch.func.vmap(f)(x[:, None])
    assert seen == [False, True, True]


def test_levels_of_forward_mode_are_counted() -> None:
    assert torch_internals.forward_ad_level() < 0
    with forward_ad.dual_level():
        assert torch_internals.forward_ad_level() == 0


def test_a_tensor_that_is_written_has_another_version() -> None:
    x = torch.zeros(2)
    before = torch_internals.versions_of(x)
    x.add_(1)
    assert torch_internals.versions_of(x) != before == torch_internals.versions_of(torch.zeros(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
def test_the_raw_stream_is_the_current_one() -> None:
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert torch_internals.current_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_a_tensor_is_marked_as_dynamo_does() -> None:
    ours, theirs = torch.zeros(1), torch.zeros(1)
    torch_internals.keep_address(ours)
    torch._dynamo.mark_static_address(theirs, guard=False)
    assert vars(ours) == vars(theirs) != {}


def test_compilers_may_use_all_memory_for_activations() -> None:
    assert torch_internals.activation_memory_budget() == 1
    with functorch_config.patch(activation_memory_budget=0.5):
        assert torch_internals.activation_memory_budget() == 0.5


class Tracker(torch_internals.Movable):
    """Notes where its weight is, before and after each move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(1)), []

    @contextmanager
    def moving(self) -> Iterator[None]:
        self.seen.append(self.weight.dtype)
        yield
        self.seen.append(self.weight.dtype)


def test_a_module_is_told_of_moves_and_casts_also_inside_of_another_one() -> None:
    module = torch.nn.Sequential(Tracker())
    module.to(torch.bfloat16).double()
    assert module[0].seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def group(store: dist.Store) -> Iterator[dist.ProcessGroup]:
    """Of this process alone, which waits 7 s for others."""
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_store_is_that_of_the_group(group: dist.ProcessGroup, store: dist.Store) -> None:
    found, keys = torch_internals.default_store(), store.num_keys()
    found.set("ours", "1")
    assert isinstance(found, dist.Store) and found.get("ours") == b"1" and store.num_keys() == keys + 1


def test_the_timeout_is_that_of_the_group(group: dist.ProcessGroup) -> None:
    assert torch_internals.timeout_of_group(group, torch.device("cpu")) == timedelta(seconds=7)
    assert torch_internals.timeout_of_group(group, torch.device("meta")) is None


def test_collectives_exchange_and_tell_what_has_yet_to_arrive(group: dist.ProcessGroup) -> None:
    x = torch.arange(3)
    heard = torch_internals.all_to_all_single(x, None, None, group)
    if isinstance(heard, torch_internals.AsyncCollectiveTensor):
        heard = heard.wait()
    assert type(heard) is torch.Tensor and torch.equal(heard, x)
