"""The private and moving parts of torch that cute_ep uses. No other file of cute_ep or perf touches any.

`from cute_ep.torch_internals import default_store` looks for a name of PARTS when it is asked for, so what only some
builds or releases of torch have is missed by those alone who need it. tests/test_torch_internals.py names what a
release lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch.autograd import forward_ad


class Part(NamedTuple):
    """Where torch has something, and what cute_ep does with it."""

    module: str
    name: str
    use: str


COLLECTIVES = "torch.distributed._functional_collectives"
PARTS = {
    # 50 ns; a range takes 20 us
    "profiler_enabled": Part("torch.autograd", "_profiler_enabled", "launches are ranges of a profiler that is on"),
    # 0.2 us there and back; `torch.no_grad` takes 1.2 us (a CPU, 2026-11-29)
    "set_gradients": Part("torch._C", "_set_grad_enabled", "calls of DeepEP's interface compute none"),
    "count_function_modes": Part("torch._C", "_len_torch_function_stack", "default devices are hidden where there are"),
    "count_dispatch_modes": Part("torch._C", "_len_torch_dispatch_stack", "a mode sees the calls of cute_ep.ops"),
    "in_functorch": Part("torch._C", "_are_functorch_transforms_active", "cute_ep.ops refuses transforms"),
    "default_store": Part("torch.distributed.distributed_c10d", "_get_default_store", "processes meet in connect"),
    "BelowAutograd": Part("torch._C", "_AutoDispatchBelowAutograd", "cute_ep.ops register their own gradients"),
    "BelowViews": Part("torch._C", "_AutoDispatchBelowADInplaceOrView", "tensors in one memory are no views"),
    "BELOW_AUTOGRAD": Part("torch._C", "_after_autograd_keyset", "cute_ep.ops register their own gradients"),
    "get_proxy_mode": Part("torch.fx.experimental.proxy_tensor", "get_proxy_mode", "rounds are not recomputed"),
    "AsyncCollectiveTensor": Part(COLLECTIVES, "AsyncCollectiveTensor", "torchtitan's experts hear numbers of tokens"),
    "all_to_all_single": Part(COLLECTIVES, "all_to_all_single", "torchtitan's experts hear numbers of tokens"),
    "sleep_on_gpu": Part("torch.cuda", "_sleep", "benchmarks queue work behind it"),
}
"""By our name."""


def find(name: str) -> Any:
    """What torch has for a name of PARTS. ImportError: this torch has it not."""
    module, inside, use = PARTS[name]
    try:
        return getattr(import_module(module), inside)
    except (ImportError, AttributeError):
        raise ImportError(f"torch {torch.__version__} has no {module}.{inside}: {use}") from None


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = find(name)
    return found


def current_stream(device: int) -> int:
    """Raw handle of the caller's stream on a device, an ordinal: without the object that
    `torch.cuda.current_stream` makes, which takes 2 us of a host's time. Only builds with CUDA have it."""
    return torch._C._cuda_getCurrentRawStream(device)


def exchange_api() -> Any:
    """The capsule of DLPack's exchange API, by which C reads tensors. None before torch 2.11."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def forward_ad_level() -> int:
    """How deep the caller is in forward-mode differentiation; below 0: not at all."""
    return forward_ad._current_level


def versions_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """How often tensors were written; 0 of those of inference mode, of which torch does not know."""
    return tuple([0 if one.is_inference() else one._version for one in tensors])


def keep_address(tensor: torch.Tensor) -> None:
    """Tell compilers that a tensor stays where it is, so CUDA graphs may write it: what
    `torch._dynamo.mark_static_address` does, whose import takes seconds."""
    tensor._dynamo_static_input_type = "unguarded"


def activation_memory_budget() -> float:
    """Part of the memory for activations that compilers may use; for less than 1 they compute some again."""
    from torch._functorch import config

    return config.activation_memory_budget


def backend_of_group(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """A group's backend for a kind of device. NCCL's has `mem_allocator` and `register_mem_pool`."""
    return group._get_backend(device)


def timeout_of_group(group: torch.distributed.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a group's collectives on a kind of device wait for late ranks; None: torch does not say."""
    try:
        return backend_of_group(group, device).options._timeout
    except (AttributeError, RuntimeError):
        return None


class Movable(torch.nn.Module):
    """A module that is told when its tensors are moved or cast."""

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Entered before, left afterwards."""
        yield

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        with self.moving():
            return super()._apply(fn, recurse)
