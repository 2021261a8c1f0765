"""Which kernels exist: one frozen key that names a kernel everywhere (compile, manifest, tests, measurements)."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.layouts.formats import FORMATS

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")

DISPATCH_KERNELS = ("dispatch", "dispatch_async", "dispatch_wait")
COMBINE_MODES = ("exact", "partial")
COMBINE_KERNELS = tuple(
    f"{name}_{mode}" for mode in COMBINE_MODES for name in ("combine", "combine_async", "combine_wait")
)
QUANTIZE_KERNEL = "quantize"
COPY_KERNEL = "copy"


@dataclass(frozen=True, order=True)
class Variant:
    """One cubin.

    Attributes:
        kernel: name out of DISPATCH_KERNELS, COMBINE_KERNELS, QUANTIZE_KERNEL or COPY_KERNEL.
        arch: compilation target, out of ARCHITECTURES.
        format: token format, None for kernels that do not depend on it.
        hidden, top_k: fixed at compile time; None: a run-time argument.
    """

    kernel: str
    arch: str
    format: str | None = None
    hidden: int | None = None
    top_k: int | None = None

    @property
    def symbol(self) -> str:
        """Kernel and file name: unique within one architecture."""
        parts = [f"cute_ep_{self.kernel}"]
        if self.format:
            parts.append(self.format)
        if self.hidden:
            parts.append(f"h{self.hidden}")
        if self.top_k:
            parts.append(f"k{self.top_k}")
        return "_".join(parts)


def variants(
    archs: tuple[str, ...] = ARCHITECTURES,
    formats: tuple[str, ...] = tuple(FORMATS),
    hidden: int | None = None,
    top_k: int | None = None,
) -> list[Variant]:
    """Every kernel for the given targets; `hidden` and `top_k` specialise all of them."""
    made = []
    for arch in archs:
        for kernel in DISPATCH_KERNELS:
            made += [Variant(kernel, arch, fmt, hidden, top_k) for fmt in formats]
        made += [Variant(kernel, arch, None, hidden, top_k) for kernel in COMBINE_KERNELS]
        made += [Variant(QUANTIZE_KERNEL, arch, fmt, hidden) for fmt in formats if FORMATS[fmt].scale]
        made.append(Variant(COPY_KERNEL, arch))
    return made
