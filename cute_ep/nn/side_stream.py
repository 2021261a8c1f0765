"""A side stream for each communicator, on which a layer computes its shared expert beside dispatch and combine.

The layer's own stream and the side stream meet twice in a call: the side stream waits for the tokens before it
computes, and the layer's stream waits for the shared expert's output before it adds. Nothing in between waits for the
side stream.

These waits cannot form a circle with those of dispatch and combine:

- A kernel on the side stream waits for SMs only, never for another rank. A dispatch that holds all SMs until other
  ranks have sent delays it, and does not wait for it. (A shared expert that makes collectives itself waits for ranks.
  It needs SMs beside a waiting dispatch, as the collectives of FSDP do: docs/ops.md.)
- A dispatch or combine waits for its own CTAs to become resident, so for kernels that end without it, and for the same
  call of other ranks. It comes behind the shared experts of earlier layers only.
- So everything waits for what its rank has enqueued before, or for the same call of other ranks, and all ranks make
  their calls in the same order. That is why each communicator has a side stream of its own: in one that two ranks of a
  process shared, work of one rank would stand behind later calls of the other. Layers have a rank per device and
  process. Torch may hand out a stream twice; what one rank enqueues on it stays in the order of its calls.

Memory that crosses: the allocator gives a freed block to the next allocation of the stream that it was made on, which
may write to it before a kernel of another stream has read it.

- Tokens are of the layer's stream. The caller keeps them until that stream has waited for the side stream. If a
  backward pass will read them on the side stream again, they are recorded there, so that the allocator waits for it.
- The output is of the side stream, and the layer's stream reads it. It is kept until the side stream has waited for
  the layer's stream in the next call. Recording it would do, but what is recorded in a CUDA graph capture is not used
  again in this capture, and a capture has many layers.
- Gradients that cross are recorded by autograd, which runs each node on the stream of its forward and makes consumers
  wait for producers.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from cute_ep.api.interface import EPCommunicator


class _Crossing(torch.autograd.Function):
    """Tokens on their way to the side stream. In the backward pass the layer's stream waits here for all that the side
    stream was given.

    Autograd alone would make it wait for the tokens' gradient. Gradients of the shared expert's parameters are
    accumulated on the side stream, and FSDP, for one, reads them on the layer's as soon as gradients of its inputs
    are there. The engine runs ready nodes in the opposite order of their creation, and accumulates at once; so when it
    comes here it has enqueued all nodes of the shared expert.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, side: torch.cuda.Stream) -> Tensor:
        ctx.side = side
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        here = torch.cuda.current_stream(grad.device)
        ctx.side.wait_stream(here)  # it takes part in a capture even if it was given no node
        here.wait_stream(ctx.side)
        return grad, None


class SideStream:
    """The side stream of one communicator.

    Attributes:
        stream: the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._kept: Tensor | None = None
        self._reader: torch.cuda.Stream | None = None  # of `_kept`

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Wait for all that `stream` was given so far, and give back the output of the call before."""
        self.stream.wait_stream(stream)
        if self._kept is not None and self._reader is not None and self._reader != stream:
            self._kept.record_stream(self._reader)
        self._kept = self._reader = None

    def keep(self, output: Tensor, reader: torch.cuda.Stream) -> None:
        """Keep the memory of an output that `reader` reads until the next call."""
        self._kept, self._reader = output.detach(), reader


class Beside:
    """One computation on a side stream: `with Beside(side, tokens) as beside: ...; out = beside.run(module)`.

    The block begins where tokens are there on the current stream. At its end, also when it raises, the current stream
    waits for the side stream. Outside of `run` the current stream stays the caller's.

    Args:
        side: the communicator's.
        tokens: [T, hidden] on its device. The caller keeps them until the block has ended.
    """

    def __init__(self, side: SideStream, tokens: Tensor) -> None:
        self._side, self._tokens = side, tokens
        self._stream = torch.cuda.current_stream(tokens.device)

    def __enter__(self) -> Self:
        self._side.follow(self._stream)
        if torch.is_grad_enabled() and self._tokens.requires_grad:
            self._tokens = _Crossing.apply(self._tokens, self._side.stream)
        return self

    def run(self, module: torch.nn.Module) -> Tensor:
        """What the module makes of the tokens, computed on the side stream; to be read behind the block."""
        with torch.cuda.stream(self._side.stream):
            out = module(self._tokens)
        if out.requires_grad:
            self._tokens.record_stream(self._side.stream)
        self._side.keep(out, self._stream)
        return out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.wait_stream(self._side.stream)


_SIDES: weakref.WeakKeyDictionary[EPCommunicator, SideStream] = weakref.WeakKeyDictionary()


def side_stream_of(communicator: EPCommunicator) -> SideStream:
    """The communicator's, on a GPU; made once."""
    side = _SIDES.get(communicator)
    return _SIDES.setdefault(communicator, SideStream(communicator.device)) if side is None else side
