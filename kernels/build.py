"""Variant -> cubin, without a GPU."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.base_dsl.compiler import DumpDir

from cute_ep.kernels.codec import codec_for
from cute_ep.kernels.combine.kernel import Combine
from cute_ep.kernels.dispatch.kernel import Dispatch
from cute_ep.kernels.hooks import HookFunctions
from cute_ep.kernels.local.copy import Copy
from cute_ep.kernels.local.count_routes import CountRoutes
from cute_ep.kernels.local.label_rows import LabelRows
from cute_ep.kernels.local.mark_entries import MarkEntries
from cute_ep.kernels.local.sum_rows import SumRows
from cute_ep.kernels.local.swiglu import Rows
from cute_ep.kernels.local.tell_counts import TellCounts
from cute_ep.kernels.mail.await_mail import AwaitMail
from cute_ep.kernels.mail.pack_frame import PackFrame
from cute_ep.kernels.mail.pack_sums import PackSums
from cute_ep.kernels.mail.put_mail import PutMail
from cute_ep.kernels.mail.signal_mail import SignalMail
from cute_ep.kernels.mail.sum_nodes import SumNodes
from cute_ep.kernels.mail.unpack_frames import UnpackFrames
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.parameters import arguments_of, parameters_of
from cute_ep.layouts.maps.routing import Phase
from cute_ep.layouts.maps.variants import (
    COMBINE_KERNELS,
    COPY_KERNEL,
    COUNT_KERNEL,
    DISPATCH_KERNELS,
    LABEL_KERNEL,
    MARK_KERNEL,
    PIPED_KERNELS,
    QUANTIZE_KERNEL,
    RANK_MAJOR_SUFFIX,
    SUM_KERNEL,
    TELL_KERNEL,
    Variant,
    combine_mode,
)

SEGMENTS = {"sm_90a": 2}
"""Segments that a warp of combine carries at a time, and a partial sum adds; two spill registers for the other
targets."""

SMALL_SHARED = ("sm_120a",)
"""Targets whose SMs have 100 KB of shared memory, too little for the tiles of `Prefetch`."""


@dataclass(frozen=True)
class Compiled:
    """One compiled variant: machine code, PTX, dynamic shared memory and the kernel's parameters in order."""

    variant: Variant
    cubin: bytes
    ptx: str
    shared_bytes: int
    params: tuple[tuple[str, str], ...]


def resolve(name: str | None) -> Callable | None:
    """The function that "module:function" names, None for None.

    Raises:
        ValueError: it does not have that form, or names nothing.
    """
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"hook = {name!r}: must be module:function ({error})") from None


MailKernel: TypeAlias = PackFrame | AwaitMail | UnpackFrames | PackSums | SumNodes | PutMail | SignalMail
LocalKernel: TypeAlias = Rows | Copy | CountRoutes | TellCounts | LabelRows | MarkEntries | SumRows
KernelObject: TypeAlias = Dispatch | Combine | LocalKernel | MailKernel

OTHERS: dict[str, Callable[[], KernelObject]] = {
    COPY_KERNEL: Copy,
    COUNT_KERNEL: CountRoutes,
    TELL_KERNEL: TellCounts,
    LABEL_KERNEL: LabelRows,
    MARK_KERNEL: MarkEntries,
    SUM_KERNEL: SumRows,
    "pack_frame": PackFrame,
    "await_frames": partial(AwaitMail, Phase.FRAME),
    "unpack_frames": UnpackFrames,
    "pack_sums": PackSums,
    "await_sums": partial(AwaitMail, Phase.SUMS),
    "sum_nodes": SumNodes,
    "put_mail": PutMail,
    "signal_mail": SignalMail,
}
"""Kernels of which there is one variant a target."""


def kernel_of(variant: Variant) -> KernelObject:
    """The kernel object that `variant` names."""
    name, hooks = variant.kernel, variant.hooks
    codec = codec_for(FORMATS[variant.format], variant.arch) if variant.format else None
    functions = HookFunctions(resolve(hooks.epilogue), resolve(hooks.router_weights), resolve(hooks.input_scale))
    if name in DISPATCH_KERNELS:
        return Dispatch(
            codec,
            receive="_async" not in name,
            rank_major=name.endswith(RANK_MAJOR_SUFFIX),
            ahead=variant.arch not in SMALL_SHARED,
            hooks=functions,
        )
    if name in (*COMBINE_KERNELS, *PIPED_KERNELS):
        return Combine(
            mode=combine_mode(name),
            piped=name in PIPED_KERNELS,
            send="_wait" not in name,
            receive="_async" not in name,
            segments=SEGMENTS.get(variant.arch, 1),
            hooks=functions,
        )
    if name in OTHERS:
        return OTHERS[name]()
    return Rows(codec, None if name == QUANTIZE_KERNEL else name)


def compile_variant(variant: Variant, *, line_info: bool = False) -> Compiled:
    """Compile one variant. Takes about a second of one core; keeps state in the process-wide DSL, so use processes.

    line_info: cubin and PTX name the source line of each instruction; the instructions are the same.
    """
    kernel = kernel_of(variant)
    type(kernel).kernel.set_name_prefix(variant.symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
    placeholder = arguments_of(variant.kernel, lambda _, kind: getattr(cutlass, kind)(1))
    with tempfile.TemporaryDirectory() as scratch:  # KeepCUBIN and KeepPTX also write files
        options = (cute.KeepCUBIN, cute.KeepPTX, cute.GPUArch(variant.arch), DumpDir(scratch))
        options += (cute.GenerateLineInfo,) if line_info else ()
        compiled = cute.compile[options](kernel, placeholder, Int32(1))
    params = parameters_of(variant.kernel)
    return Compiled(variant, compiled.__cubin__, compiled.__ptx__, kernel.shared_bytes, params)
