"""torch's modes of the calling thread, as the reference must not feel them: the kernels do not either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def no_modes() -> Iterator[None]:
    """Compute without gradients and without autocast, new tensors on the CPU unless they name a device.

    Also a decorator: `@no_modes()`. Check arguments before, outside: whether gradients are enabled is the caller's.
    """
    off = (torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda"))
    # a default device is a function mode, which costs each operation inside several us: none where none is to be hidden
    device = torch.device("cpu") if torch._C._len_torch_function_stack() else nullcontext()
    with torch.no_grad(), next(off), next(off), device:
        yield


@contextmanager
def writing_modes() -> Iterator[None]:
    """As `no_modes`, to write results into tensors that some call, in a mode of its own, gave or was given: also into
    inference tensors from outside of inference mode. What is made inside must not get out."""
    with no_modes(), torch.inference_mode():
        yield
