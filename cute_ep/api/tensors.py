"""Rules for one tensor argument, whatever call it is of.

Nothing here reads a tensor's elements, so no check waits for a device. Calls compute no gradients: a tensor that
requires one is refused where that would drop it without a word, and so is one that may not be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne

import torch
from torch import Tensor

from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import MAX_STRIDE
from cute_ep.layouts.maps.formats import VECTOR_BYTES


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | str | None = None,
    alignment: int = 1,
    strict: bool = True,
    strided: bool = False,
) -> None:
    """Check one argument: a row-major contiguous tensor of the given extents, type and place, which does not require a
    gradient while gradients are enabled.

    Args:
        name: how the caller calls it; begins the message.
        shape: expected extents, None for any extent; None accepts any number of them.
        dtype, device: what is expected; None accepts any, a tuple of types each of them.
        alignment: bytes that the address of the first element must be a multiple of.
        strict: False takes any strides and addresses, and tensors that require a gradient.
        strided: whether rows may lie apart, or be the same memory: `has_even_rows`.

    Raises:
        EPInputError: the first rule that `tensor` breaks, with its name, value and the rule.
    """
    if not isinstance(tensor, Tensor):
        raise EPInputError(f"{name} = {type(tensor).__name__}: must be a torch.Tensor")
    if shape is not None and (got := tensor.shape) != shape and not _has_shape(got, shape):
        raise EPInputError(f"{name}.shape = {tuple(got)}: must be {_shape_rule(name, got, shape)}")
    if dtype is not None and (kind := tensor.dtype) != dtype and not (isinstance(dtype, tuple) and kind in dtype):
        wanted = dtype if isinstance(dtype, tuple) else (dtype,)
        cast = "" if name.startswith("out") else _cast(kind, wanted)
        more = f"; use {name}.{cast}" if cast else ""
        raise EPInputError(f"{name}.dtype = {kind}: must be {' or '.join(map(str, wanted))}{more}")
    if device is not None and tensor.device != device and tensor.device != (device := torch.device(device)):
        raise EPInputError(f"{name}.device = {tensor.device}: must be {device}")
    if not strict:
        return
    if not tensor.is_contiguous() and not (strided and has_even_rows(tensor)):
        rule = EVEN_ROWS if strided else "must be row-major contiguous"
        more = "" if name.startswith("out") else f"; use {name}.contiguous()"
        raise EPInputError(f"{name}.stride() = {tensor.stride()}: {rule}{more}")
    if alignment != 1 and tensor.data_ptr() % alignment:
        more = "" if name.startswith("out") else f"; use {name}.clone()"
        raise EPInputError(f"{name}.data_ptr() = {tensor.data_ptr():#x}: must be a multiple of {alignment} bytes{more}")
    if tensor.requires_grad:
        check_detached(name, tensor)


CASTS = (
    {torch.float32: "float()", torch.bfloat16: "bfloat16()", torch.float16: "", torch.float64: ""},
    {torch.int64: "long()", torch.int32: "int()", torch.int16: "", torch.int8: ""},
)
"""Types whose numbers mean the same, and what makes one of it."""


def _cast(kind: torch.dtype, wanted: Sequence[torch.dtype]) -> str:
    """What makes a tensor one of a wanted type, "" where nothing does."""
    alike = next((casts for casts in CASTS if kind in casts), {})
    return next((alike[one] for one in reversed(wanted) if alike.get(one)), "")


EVEN_ROWS = f"must have stride 1 in the last dimension, and rows a multiple of {VECTOR_BYTES} bytes below 32 GiB apart"


def has_even_rows(tensor: Tensor) -> bool:
    """Whether a matrix has contiguous rows, a multiple of VECTOR_BYTES apart that kernels can be given (MAX_STRIDE is
    32 GiB of vectors): 0 where all are the same memory, as `expand` makes them, and anything with fewer than two."""
    if tensor.dim() != 2 or tensor.stride(1) != 1:
        return False
    vectors, rest = divmod(tensor.stride(0) * tensor.element_size(), VECTOR_BYTES)
    return tensor.size(0) < 2 or (not rest and vectors < MAX_STRIDE)


def takes_strides(x: Tensor) -> bool:
    """Whether dispatch reads the rows of `x` where they are. Otherwise a caller may give it a contiguous copy."""
    return (x.is_contiguous() or has_even_rows(x)) and not x.data_ptr() % VECTOR_BYTES


def row_vectors(x: Tensor) -> int:
    """What kernels are told of the rows of `x`, which `check_tensor` let pass: vectors from one to the next, 0 with
    fewer than two rows, whose strides torch leaves open."""
    return x.stride(0) * x.element_size() // VECTOR_BYTES if x.size(0) > 1 else 0


def check_detached(name: str, tensor: torch.Tensor) -> None:
    """EPInputError for an input that requires a gradient while gradients are enabled."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise EPInputError(
            f"{name}.requires_grad = True: must be False while gradients are enabled, this call computes none; "
            f"make the call under torch.no_grad(), or give {name}.detach()"
        )


def check_written(name: str, tensor: object) -> None:
    """EPInputError for a tensor that a call may not overwrite: a Parameter, one that requires a gradient, or outside of
    inference mode one that was made in it. What is no tensor passes."""
    if not isinstance(tensor, Tensor):
        return
    if isinstance(tensor, torch.nn.Parameter):
        raise EPInputError(f"{name} = Parameter: must be a tensor of its own, such as torch.empty_like({name}.data)")
    if tensor.requires_grad:
        raise EPInputError(f"{name}.requires_grad = True: must be False, the call overwrites it; give {name}.detach()")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise EPInputError(
            f"{name}.is_inference() = True: must be False outside of torch.inference_mode(); allocate it outside, or "
            "make the call inside"
        )


def _has_shape(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Whether each extent is the wanted one, if any is wanted."""
    if len(got) != len(shape):
        return False
    if shape[:1] == (None,) and got[1:] == shape[1:]:  # as of most arguments, and soon found
        return True
    return sum(map(ne, got, shape)) == shape.count(None)  # None differs from any extent


def _shape_rule(name: str, got: Sequence[int], shape: Sequence[int | None]) -> str:
    """The wanted extents, letters for those that other rules are about, and how to come to them from a tensor with a
    batch and a sequence dimension."""
    free = iter("nmk")  # not "any", which would promise that there is no other rule
    wanted = ", ".join(next(free) if extent is None else str(extent) for extent in shape)
    more = len(got) - len(shape)
    if more <= 0 or len(shape) < 2 or shape[-1] not in (None, got[-1]):
        return f"({wanted})"
    return f"({wanted}); flatten the leading dimensions: {name}.flatten(0, {more})"


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory, `one` contiguous or with even rows and `other` contiguous; one without any
    bytes does not."""
    ahead = one.data_ptr() - other.data_ptr()
    if not one.nbytes > 0 < other.nbytes:
        return False
    if one.is_contiguous():
        return -one.nbytes < ahead < other.nbytes
    row, apart = one.size(1) * one.element_size(), one.stride(0) * one.element_size()
    before = max(-(ahead + row) // apart + 1, 0) if apart else 0  # rows that end before the other begins
    first = ahead + before * apart
    return before < one.size(0) and -row < first < other.nbytes


def end_of(tensor: torch.Tensor) -> int:
    """Address behind the last byte of a tensor."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_apart(name: str, written: torch.Tensor | None, **read: object) -> None:
    """EPInputError where a call would write `written`, which is contiguous, over a tensor that it reads, contiguous or
    with even rows, on the same device; what is no tensor passes."""
    for other, tensor in read.items():
        if written is not None and isinstance(tensor, Tensor) and overlap(tensor, written):
            raise EPInputError(f"{name}: shares memory with {other}, which the call reads; must be other memory")
