"""When a call must go through torch's dispatcher, and when it can call the library directly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_ep.api.errors import EPInputError
from cute_ep.torch_internals import count_dispatch_modes, forward_ad_level, in_functorch

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that the library's own calls take."""


def refuse_transforms(**tensors: Tensor | None) -> None:
    """EPInputError in transforms of torch.func and for tensors with a tangent. The ops have no rules for them: torch
    would leave tangents out without a word."""
    inside = in_functorch()
    if not inside and forward_ad_level() < 0:
        return
    for name, tensor in tensors.items():
        if inside or (isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None):
            kind = "a transform of torch.func" if inside else "forward-mode differentiation"
            raise EPInputError(
                f"{name} = tensor in {kind}: must be outside, cute_ep.ops have gradients by backward() and "
                "torch.autograd.grad only"
            )


def needs_op(**tensors: Tensor | None) -> bool:
    """Whether something but the kernel must see a call: a compiler, a mode such as that of `make_fx`, a subclass.
    EPInputError: something must for which there is no rule."""
    if torch.compiler.is_compiling():
        return True
    refuse_transforms(**tensors)
    if count_dispatch_modes():
        return True
    for tensor in tensors.values():
        if tensor is not None and type(tensor) not in PLAIN:
            return True
    return False
