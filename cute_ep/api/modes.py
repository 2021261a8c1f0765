"""torch's modes of the calling thread, as the reference must not feel them: the kernels do not either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from cute_ep.torch_internals import count_function_modes


@contextmanager
def no_modes() -> Iterator[None]:
    """Compute without gradients and without autocast, new tensors on the CPU unless they name a device.

    Also a decorator: `@no_modes()`. Check arguments before, outside: whether gradients are enabled is the caller's.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        # a default device is a function mode, which costs each operation inside several us: none where none is hidden
        if count_function_modes():
            modes.enter_context(torch.device("cpu"))
        yield


@contextmanager
def writing_modes() -> Iterator[None]:
    """As `no_modes`, to write results into tensors that some call, in a mode of its own, gave or was given: also into
    inference tensors from outside of inference mode. What is made inside must not get out."""
    with no_modes(), torch.inference_mode():
        yield
