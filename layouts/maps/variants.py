"""Which kernels exist: one frozen key that names a kernel everywhere (compile, manifest, tests, measurements)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Literal, get_args

from cute_ep.layouts.maps.formats import BF16, FORMATS

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")

DISPATCH_OPERATIONS = ("dispatch", "dispatch_async", "dispatch_wait")
RANK_MAJOR_SUFFIX = "_rank_major"
DISPATCH_KERNELS = (*DISPATCH_OPERATIONS, *(f"{name}{RANK_MAJOR_SUFFIX}" for name in DISPATCH_OPERATIONS))
"""By the order of rows, which is compiled in: chosen at run time it made 9.5 us 10.1 (one token, bfloat16, four ranks
on one H200, 2026-11-23)."""
SEND_KERNELS = tuple(name for name in DISPATCH_KERNELS if "_wait" not in name)
"""Kernels that encode: one a format. Rows that need no encoding go through the BF16 ones, which copy bytes."""
CombineMode = Literal["exact", "partial", "unweighted"]
"""What combine brings home."""
COMBINE_MODES: tuple[CombineMode, ...] = get_args(CombineMode)
COMBINE_KERNELS = (
    "combine_async_exact",
    "combine_async_partial",
    *(f"{name}_{mode}" for mode in COMBINE_MODES for name in ("combine", "combine_wait")),
)
"""An unweighted combine sends what an exact one sends."""
PIPED_SUFFIX = "_piped"
PIPED_KERNELS = tuple(f"{name}{PIPED_SUFFIX}" for name in COMBINE_KERNELS if "_wait" not in name)
"""The same for CTAs that take an SM each, and many tokens: rows come through shared memory."""


def combine_mode(kernel: str) -> str:
    """The mode of a kernel of combine, by name."""
    return kernel.removesuffix(PIPED_SUFFIX).rpartition("_")[2]


QUANTIZE_KERNEL = "quantize"
SWIGLU_KERNELS = ("swiglu", "swiglu_interleaved")
"""silu(gate) * up, and its clamped form with up + 1, without a bias."""
GATED_KERNEL = "gated"
"""Every gate, with or without a bias, interleaved or not."""
GATE_KERNELS = (*SWIGLU_KERNELS, GATED_KERNEL)
COUNT_KERNEL = "count_routes"
"""How many tokens go to each rank, and entries to each expert."""
TELL_KERNEL = "tell_counts"
"""What a rank receives, by the counts of all ranks, for the host too."""
LABEL_KERNEL = "label_rows"
"""The expert of each row."""
MARK_KERNEL = "mark_entries"
"""The experts of rank-major rows, by their numbers in the whole model."""
SUM_KERNEL = "sum_rows"
"""Adds a token's rows on a rank."""
COPY_KERNEL = "copy"
LOCAL_KERNELS = (
    QUANTIZE_KERNEL,
    *GATE_KERNELS,
    COUNT_KERNEL,
    TELL_KERNEL,
    LABEL_KERNEL,
    MARK_KERNEL,
    SUM_KERNEL,
    COPY_KERNEL,
)
"""Kernels of one GPU, which know of no rank."""
MAIL_KERNELS = (
    "pack_frame",
    "await_frames",
    "unpack_frames",
    "pack_sums",
    "await_sums",
    "sum_nodes",
    "put_mail",
    "signal_mail",
)
"""Kernels around the exchange between nodes."""
HOOKED_KERNELS = (
    "combine_exact",
    "combine_exact_piped",
    "combine_wait_exact",
    "combine_partial",
    "combine_partial_piped",
    "combine_wait_partial",
)
"""Kernels that sum, and so call the epilogue."""
WEIGHING_KERNELS = ("combine_exact", "combine_exact_piped", "combine_wait_exact")
"""Those that multiply by the router weights of the caller: partial sums use the ones that travelled."""


@dataclass(frozen=True, order=True)
class Hooks:
    """Functions compiled into the kernels, each "module:function" or None (`cute_ep.kernels.hooks` has examples).

    Attributes:
        epilogue: changes each output vector of combine before it is rounded and stored.
        router_weights: reads one router weight, for weights that are not float32.
        input_scale: reads the global scale of the tokens.

    Raises:
        ValueError: a hook has another form than "module:function".
    """

    epilogue: str | None = None
    router_weights: str | None = None
    input_scale: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            hook = getattr(self, field.name)
            if hook is not None and not _names_function(hook):
                raise ValueError(f'{field.name} = {hook!r}: must be "module:function" or None')

    def of_kernel(self, kernel: str) -> Hooks:
        """Those of the hooks that `kernel` calls."""
        if kernel in SEND_KERNELS:
            return Hooks(None, self.router_weights, self.input_scale)
        weights = self.router_weights if kernel in WEIGHING_KERNELS else None
        return Hooks(self.epilogue, weights) if kernel in HOOKED_KERNELS else NO_HOOKS

    @property
    def symbol(self) -> str:
        """A name for this choice, empty without hooks: the functions' names and a digest that tells modules apart."""
        chosen = [getattr(self, field.name) for field in fields(self)]
        if not any(chosen):
            return ""
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
        return "_".join([*(name.rpartition(":")[2] for name in chosen if name), digest])


def _names_function(hook: object) -> bool:
    """Whether it has the form "module:function"; neither needs to exist."""
    if not isinstance(hook, str):
        return False
    module, _, function = hook.partition(":")
    return all(name.isidentifier() for name in (*module.split("."), function))


NO_HOOKS = Hooks()


@dataclass(frozen=True, order=True)
class Variant:
    """One cubin. Shapes are run-time arguments of all of them.

    Attributes:
        kernel: name out of the kernel lists above.
        arch: compilation target, out of ARCHITECTURES.
        format: token format, None for kernels that do not depend on it.
        hooks: functions compiled in.
    """

    kernel: str
    arch: str
    format: str | None = None
    hooks: Hooks = NO_HOOKS

    @property
    def symbol(self) -> str:
        """Kernel and file name: unique within one architecture."""
        return "_".join(filter(None, (f"cute_ep_{self.kernel}", self.format, self.hooks.symbol)))


def kernel_formats(kernel: str, formats: tuple[str, ...] = tuple(FORMATS)) -> list[str | None]:
    """The formats of which `kernel` has a variant each; [None] for a kernel without formats."""
    if kernel in SEND_KERNELS:
        return list(formats)
    if kernel == QUANTIZE_KERNEL:
        return [fmt for fmt in formats if fmt != BF16.name]
    if kernel in GATE_KERNELS:
        return [fmt for fmt in formats if not FORMATS[fmt].row_scale]
    return [None]


def variants(
    archs: tuple[str, ...] = ARCHITECTURES, formats: tuple[str, ...] = tuple(FORMATS), hooks: Hooks = NO_HOOKS
) -> list[Variant]:
    """Every kernel for the given targets; with hooks, those that call them."""
    kernels: tuple[str, ...] = (
        *DISPATCH_KERNELS,
        *COMBINE_KERNELS,
        *PIPED_KERNELS,
        *LOCAL_KERNELS,
        *MAIL_KERNELS,
    )
    if hooks != NO_HOOKS:
        kernels = tuple(kernel for kernel in kernels if hooks.of_kernel(kernel) != NO_HOOKS)
    return [
        Variant(kernel, arch, fmt, hooks.of_kernel(kernel))
        for arch in archs
        for kernel in kernels
        for fmt in kernel_formats(kernel, formats)
    ]
