"""The parameters of each kernel: the numbers of its argument records, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from cute_ep.layouts.maps.arguments import CombineArgs, DispatchArgs
from cute_ep.layouts.maps.local_arguments import (
    CopyArgs,
    CountArgs,
    LabelArgs,
    MarkArgs,
    RowsArgs,
    SumArgs,
    TellArgs,
)
from cute_ep.layouts.maps.mail_arguments import (
    AwaitMailArgs,
    PackFrameArgs,
    PackSumsArgs,
    PutMailArgs,
    SignalMailArgs,
    SumNodesArgs,
    UnpackFramesArgs,
)
from cute_ep.layouts.maps.variants import (
    COMBINE_KERNELS,
    COPY_KERNEL,
    COUNT_KERNEL,
    DISPATCH_KERNELS,
    GATE_KERNELS,
    LABEL_KERNEL,
    MARK_KERNEL,
    PIPED_KERNELS,
    QUANTIZE_KERNEL,
    SUM_KERNEL,
    TELL_KERNEL,
)

MailArguments: TypeAlias = (
    PackFrameArgs | PackSumsArgs | AwaitMailArgs | PutMailArgs | SignalMailArgs | UnpackFramesArgs | SumNodesArgs
)
LocalArguments: TypeAlias = CountArgs | TellArgs | LabelArgs | MarkArgs | SumArgs | CopyArgs | RowsArgs
Arguments: TypeAlias = DispatchArgs | CombineArgs | LocalArguments | MailArguments
Fields: TypeAlias = "tuple[int | Fields, ...]"
"""A record of numbers and of records."""
Record = TypeVar("Record", bound=Fields)
RECORDS: dict[str, type[Arguments]] = {
    **dict.fromkeys(DISPATCH_KERNELS, DispatchArgs),
    **dict.fromkeys((*COMBINE_KERNELS, *PIPED_KERNELS), CombineArgs),
    COUNT_KERNEL: CountArgs,
    TELL_KERNEL: TellArgs,
    LABEL_KERNEL: LabelArgs,
    MARK_KERNEL: MarkArgs,
    SUM_KERNEL: SumArgs,
    COPY_KERNEL: CopyArgs,
    **dict.fromkeys((QUANTIZE_KERNEL, *GATE_KERNELS), RowsArgs),
    "pack_frame": PackFrameArgs,
    "unpack_frames": UnpackFramesArgs,
    "pack_sums": PackSumsArgs,
    **dict.fromkeys(("await_frames", "await_sums"), AwaitMailArgs),
    "sum_nodes": SumNodesArgs,
    "put_mail": PutMailArgs,
    "signal_mail": SignalMailArgs,
}
"""By kernel, the record that it takes."""


def arguments_of(kernel: str, make: Callable[[str, str], object]) -> Arguments:
    """The argument of a kernel, each number of which is make(its dotted name, the DSL's name of its type)."""
    return _filled(RECORDS[kernel], "", make)


def _filled(record: type[Record], prefix: str, make: Callable[[str, str], object]) -> Record:
    fields = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            fields.append(make(prefix + name, get_args(hint)[1]))
        else:
            fields.append(_filled(hint, f"{prefix}{name}.", make))
    return record(*fields)  # type: ignore[arg-type]  # `make` may return anything


@cache
def parameters_of(kernel: str) -> tuple[tuple[str, str], ...]:
    """The parameters of a kernel in order: dotted name, and "i32" or "i64" for its width."""
    found: list[tuple[str, str]] = []
    arguments_of(kernel, lambda name, kind: found.append((name, f"i{kind[-2:]}")))
    return tuple(found)


def numbers(record: Fields) -> list[int]:
    """The numbers of a record and of the records in it, in the order of a kernel's parameters."""
    found: list[int] = []
    for field in record:
        if isinstance(field, tuple):
            found += numbers(field)
        else:
            found.append(field)
    return found
