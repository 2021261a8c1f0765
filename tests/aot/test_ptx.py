"""The PTX of kernels has the words of the protocol."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytest.importorskip("cutlass")

from cute_ep.layouts.maps.variants import Variant


def _ptx(variant: Variant) -> str:
    from cute_ep.kernels.build import compile_variant

    return compile_variant(variant).ptx


def ptx_of(variant: Variant) -> str:
    """PTX of a variant, compiled in a process of its own: the DSL keeps state."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_ptx, variant).result()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ptx_says_what_the_protocol_says(arch: str) -> None:
    """The vocabulary of `kernels/device/sync.py`."""
    ptx = ptx_of(Variant("dispatch", arch, "bf16"))
    for instruction in (
        r"st\.release\.sys\S*\.b64",
        r"ld\.acquire\.sys\S*\.b64",
        r"st\.relaxed\.sys\S*\.b64",
        r"ld\.relaxed\.sys\S*\.b64",
        r"st\.relaxed\.sys\.global\.v4\.b32",
        r"ld\.relaxed\.sys\.global\.v4\.b32",
        r"fence\.acq_rel\.gpu",
        r"atom\.global\.add\.u32",
        r"bar(rier)?\.(cta\.)?red\.and",
        r"vote\.sync\.all",
        r"bar\.warp\.sync",
    ):
        assert re.search(instruction, ptx), instruction
    assert not re.search(r"ld\.global\.nc", ptx)


@pytest.mark.parametrize(
    ("kernel", "fmt", "cache", "nbytes"), [("dispatch", "fp8", "cg", 16), ("combine_partial", None, "ca", 4)]
)
def test_what_is_fetched_beyond_a_row_is_zeros(kernel: str, fmt: str | None, cache: str, nbytes: int) -> None:
    """The predicate of a copy atom becomes the number of bytes that are read, which zeros follow, and no branch."""
    ptx = ptx_of(Variant(kernel, "sm_90a", fmt))
    copies = re.findall(r"@?\S*\s*cp\.async\.\w+\.shared\.global[^;]*;", ptx)
    assert copies and not any(copy.startswith("@") for copy in copies)
    found = re.search(rf"cp\.async\.{cache}\.shared\.global \[[^]]+\], \[[^]]+\], {nbytes}, (%\w+);", ptx)
    assert found and re.search(rf"selp\.\w+\s+{found[1]}, {nbytes}, 0,", ptx)
