"""Rules for arguments that adapters have in common, told in the words of the interface that was called, before anything
is sent: no rank waits for one that has refused its arguments. Nothing here reads a tensor's elements. Where no other
type is named, a broken rule is an EPInputError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import UnionType
from typing import Any, TypeVar

import torch

from cute_ep import EPConfig, EPConfigError, EPError, EPInputError
from cute_ep.api.config import LONGEST_S, is_integer, is_number
from cute_ep.api.config_rules import in_words
from cute_ep.api.row_tensors import ID_TYPES as ID_TYPES
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.api.tensors import check_apart, check_tensor, check_written
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.routing import MAX_RANKS, MAX_TOKENS_PER_RANK, ROW_ALIGNMENTS
from cute_ep.runtime.gpus import sm_budget
from cute_ep.runtime.group_pool import own_device

Names = Mapping[str, str]
"""What an interface calls the fields of EPConfig that it names otherwise."""
Sizes = tuple[int, int, int, int, int]
"""hidden, experts of all ranks, top-k, tokens of a rank, ranks."""
FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
"""Types of router weights that adapters widen."""
Made = TypeVar("Made")

config_of = lru_cache(maxsize=1024, typed=True)(EPConfig)
"""An EPConfig, made once for the same arguments: its checks take as long as a dispatch (50 us of the host)."""
given = partial(check_tensor, strict=False)
"""`check_tensor` of a tensor with any strides, that may require a gradient."""
LEAST_TOKENS = 64
"""Tokens per rank that communicators are made for at least; then powers of two, so that few are made."""


def room_for(tokens: int) -> int:
    """`max_tokens_per_rank` of a communicator for calls with so many tokens, if there is one."""
    return max(LEAST_TOKENS, tokens, min(1 << (tokens - 1).bit_length(), MAX_TOKENS_PER_RANK))


def named_config(names: Names, sizes: Sizes, *, error: type[EPError] = EPInputError, **options: Any) -> EPConfig:
    """`config_of`, whose errors have an interface's names, and the type `error`."""
    try:
        return config_of(*sizes, **options)
    except EPConfigError as failure:
        raise error(in_words(str(failure), names)) from None


def roomy_config(names: Names, sizes: Sizes, make: Callable[..., EPConfig] = named_config, **options: Any) -> EPConfig:
    """What `make` makes, with `room_for` the tokens; for no more where so much room would break a rule."""
    found = _roomy(make, *sizes, **options)
    return make(names, sizes, **options) if found is None else found


@lru_cache(maxsize=1024, typed=True)
def _roomy(
    make: Callable[..., EPConfig], hidden: int, experts: int, top_k: int, tokens: int, ranks: int, **options: Any
) -> EPConfig | None:
    """`roomy_config`; None: there is none with more room."""
    try:
        return make({}, (hidden, experts, top_k, room_for(tokens), ranks), error=EPConfigError, **options)
    except EPConfigError:
        return None


def require(ok: object, rule: str, *values: object, error: type[EPError] = EPInputError) -> None:
    """An error with the rule unless it holds; `values` fill its braces, and are not printed before."""
    if not ok:
        raise error(rule.format(*values))


demand = partial(require, error=EPConfigError)
"""`require` of what constructors are given."""


def kind(name: str, value: object, wanted: type[Made] | UnionType, rule: str) -> Made:
    """The value, which must be of this type, or of one of these."""
    if isinstance(value, wanted):
        return value
    raise EPInputError(f"{name} = {type(value).__name__}: must be {rule}")


def absent(why: str = "", **given: object) -> None:
    """An error, which ends with `why`, unless all these arguments are None."""
    for name, tensor in given.items():
        require(tensor is None, "{} = tensor: must be None{}", name, why)


def output(
    name: str,
    out: torch.Tensor,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype | tuple[torch.dtype, ...] = tuple(OUTPUT_TYPES),
    **read: torch.Tensor,
) -> None:
    """An error unless combine can write to it, and not over what it reads."""
    check_written(name, out)
    check_tensor(name, out, shape=shape, dtype=dtype, device=device, alignment=VECTOR_BYTES)
    check_apart(name, out, **read)


def integer(
    name: str, value: object, low: int = 1, high: int | None = None, *, error: type[EPError] = EPInputError
) -> None:
    """An error unless it is an integer that lies in [low, high]."""
    whole = type(value) is int or is_integer(value)  # the first is soon found
    if not (whole and low <= value and (high is None or value <= high)):  # type: ignore[operator]
        rule = f"in [{low}, {high}]" if high is not None else "that is positive" if low == 1 else f"of at least {low}"
        raise error(f"{name} = {value!r}: must be an integer {rule}")


def most(name: str, tokens: int, remedy: str = "") -> None:
    """An error, with what to do about it, for more tokens of a rank than any communicator takes."""
    rule, limit = "{} = {}: must not exceed {} tokens of a rank{}", MAX_TOKENS_PER_RANK
    require(tokens <= limit, rule, name, tokens, limit, remedy and f"; {remedy}")


def seconds(name: str, value: object) -> None:
    """EPConfigError unless a rank can wait that long for others."""
    good = is_number(value) and 1e-9 <= value <= LONGEST_S
    demand(good, "{} = {!r}: must be a number of seconds up to {}", name, value, LONGEST_S)


def sms(name: str, sms: object, *, error: type[EPError] = EPConfigError) -> None:
    """An error unless it is a number of SMs that the current GPU has, or None."""
    if sms is not None:
        device = own_device()
        integer(name, sms, 1, None if device.type == "cpu" else sm_budget(device, None), error=error)


def mode(name: str, mode: object) -> None:
    """EPConfigError unless it is a mode in which combine weights and sums."""
    good = isinstance(mode, str) and mode in ("exact", "partial")
    demand(good, "{} = {!r}: must be 'partial' or 'exact'", name, mode)


def group(name: str, group: object, most: int = MAX_RANKS) -> None:
    """EPConfigError unless it is a process group of at most so many ranks."""
    if not (callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))):
        raise EPConfigError(f"{name} = {type(group).__name__}: must be a torch.distributed process group")
    ranks = group.size()  # type: ignore[attr-defined]
    demand(ranks <= most, "{}.size() = {}: must not exceed {} ranks", name, ranks, most)


def of_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to`, in less of the host's time where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows where kernels can read them: row after row, from a multiple of 16 bytes on."""
    tensor = with_plain_strides(tensor.contiguous())
    return tensor if tensor.data_ptr() % VECTOR_BYTES == 0 else tensor.clone()


def alignment_for(multiple: int, name: str = "padding") -> int:
    """The least `row_alignment` that pads to a multiple of this. EPConfigError, which calls it `name`: none does."""
    integer(name, multiple, error=EPConfigError)
    for alignment in ROW_ALIGNMENTS:
        if alignment % multiple == 0:
            return alignment
    raise EPConfigError(f"{name} = {multiple}: must be a divisor of {ROW_ALIGNMENTS[-1]}")
