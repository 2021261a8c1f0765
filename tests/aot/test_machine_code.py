"""What the compiler made of the kernels, for every variant and architecture. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from cute_ep.layouts.formats import FORMATS
from cute_ep.layouts.variants import COMBINE_KERNELS, COPY_KERNEL, DISPATCH_KERNELS, QUANTIZE_KERNEL, Variant, variants
from cute_ep.library import LibraryEntry
from cute_ep.tuning import CTAS_PER_SM

THREADS = 512
REGISTER_FILE = 65536
SHARED_BYTES = 100 * 1024
"""Shared memory of the smallest SM (sm_120)."""
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the system takes from every CTA."""

Sass = Callable[[Variant], list[str]]

ALL = pytest.mark.parametrize("variant", variants(), ids=lambda v: f"{v.arch}-{v.symbol}")
GROUP = pytest.mark.parametrize(
    "variant",
    [v for v in variants() if v.kernel in (*DISPATCH_KERNELS, *COMBINE_KERNELS)],
    ids=lambda v: f"{v.arch}-{v.symbol}",
)


@ALL
def test_two_ctas_fit_on_an_sm(library: dict[Variant, LibraryEntry], variant: Variant) -> None:
    """`CTAS_PER_SM` is a promise of residency: kernels spin on each other."""
    entry = library[variant]
    assert 0 < entry.registers <= REGISTER_FILE // (THREADS * CTAS_PER_SM)
    assert CTAS_PER_SM * (entry.smem_bytes + RESERVED_SHARED_BYTES) <= SHARED_BYTES


@ALL
def test_no_spills(library: dict[Variant, LibraryEntry], sass: Sass, variant: Variant) -> None:
    assert library[variant].spill_bytes == 0
    assert not [line for line in sass(variant) if re.search(r"\b(STL|LDL)\b", line)]


@ALL
def test_payload_moves_16_bytes_at_a_time(sass: Sass, variant: Variant) -> None:
    loads = [line for line in sass(variant) if re.search(r"\bLDG\.E\.128\b", line)]
    stores = [line for line in sass(variant) if re.search(r"\bSTG\.E\.128\b", line)]
    assert len(loads) >= 2, "at least two loads in flight"
    assert stores


@ALL
def test_peer_written_memory_is_read_coherently(sass: Sass, variant: Variant) -> None:
    """No load through the non-coherent path: peers write while the kernel runs."""
    assert not [line for line in sass(variant) if re.search(r"\bLDG\S*\.(CONSTANT|NC)\b", line)]


def encodes(variant: Variant) -> bool:
    """Whether a variant quantises to 4 bits."""
    sends = variant.kernel in ("dispatch", "dispatch_async", QUANTIZE_KERNEL)
    return sends and variant.format is not None and FORMATS[variant.format].bits == 4


@ALL
def test_e2m1_instruction(sass: Sass, variant: Variant) -> None:
    """The hardware conversion where it exists (sm_100 and later), integer code on Hopper."""
    hardware = any("E2M1" in line for line in sass(variant))
    assert hardware == (encodes(variant) and variant.arch != "sm_90a")


@ALL
def test_e4m3_instruction(sass: Sass, variant: Variant) -> None:
    assert any(re.search(r"F2FP\S*\.E4M3\.F32", line) for line in sass(variant)) == encodes(variant)


def fenced_posts(code: list[str]) -> tuple[int, list[str]]:
    """(posts, those without a system-scope fence directly before). A post is a strong system store."""
    found, bad = 0, []
    for index, line in enumerate(code):
        if re.search(r"\bST(G)?\.\S*STRONG\.SYS\b", line):
            found += 1
            for before in reversed(code[:index]):
                if re.search(r"\bMEMBAR\.\S*SYS\b", before):
                    break
                if re.search(r"\b(STG|ST|RED|ATOMG)\b", before):
                    bad.append(line)
                    break
    return found, bad


def fenced_waits(code: list[str]) -> tuple[int, list[str]]:
    """(polls, those after which another global load comes before an acquire drops what the L1 holds)."""
    found, bad = 0, []
    for index, line in enumerate(code):
        if re.search(r"\bLD(G)?\.\S*STRONG\.SYS\b", line):
            found += 1
            for after in code[index + 1 :]:
                if re.search(r"\bCCTL\.IVALL\b|\bLDG\.\S*STRONG\.SYS\b", after):
                    break
                if re.search(r"\bLDG\b", after):
                    bad.append(line)
                    break
    return found, bad


@GROUP
def test_posts_release_and_waits_acquire(sass: Sass, variant: Variant) -> None:
    code = sass(variant)
    for found, bad in (fenced_posts(code), fenced_waits(code)):
        assert found >= 1
        assert not bad


def test_the_checks_see_a_missing_fence() -> None:
    post, store, fence = "STG.E.64.STRONG.SYS [R2], R4", "STG.E.128 [R8], R12", "MEMBAR.ALL.SYS"
    assert fenced_posts([store, fence, post]) == (1, [])
    assert fenced_posts([fence, store, post]) == (1, [post])
    poll, load, acquire = "LDG.E.64.STRONG.SYS R4, [R2]", "LDG.E.128 R8, [R10]", "CCTL.IVALL"
    assert fenced_waits([poll, poll, acquire, load]) == (2, [])
    assert fenced_waits([poll, load, acquire]) == (1, [poll])


def _ptx(variant: Variant) -> str:
    from cute_ep.kernels.build import compile_variant

    return compile_variant(variant).ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ptx_says_what_the_protocol_says(library: dict[Variant, LibraryEntry], arch: str) -> None:
    """The vocabulary of `kernels/sync.py`, and launch bounds that make the driver refuse anything larger."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        ptx = pool.submit(_ptx, Variant("dispatch", arch, "bf16")).result()
    for instruction in (
        r"st\.release\.sys\S*\.b64",
        r"ld\.acquire\.sys\S*\.b64",
        r"fence\.acq_rel\.sys",
        r"atom\.global\.add\.u32",
        r"bar(rier)?\.(cta\.)?red\.and",
        rf"\.reqntid {THREADS}\b",
        rf"\.minnctapersm {CTAS_PER_SM}\b",
    ):
        assert re.search(instruction, ptx), instruction
    assert not re.search(r"ld\.global\.nc", ptx)


def test_kernel_names_are_covered() -> None:
    assert {v.kernel for v in variants()} == {*DISPATCH_KERNELS, *COMBINE_KERNELS, QUANTIZE_KERNEL, COPY_KERNEL}
