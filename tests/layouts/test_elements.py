"""The records of number formats and of token formats: what they say of numbers, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import pytest
import torch

from cute_ep.layouts.maps.formats import (
    BFLOAT16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E8M0,
    FLOAT32,
    FORMATS,
    MXFP8,
    NVFP4,
    Element,
    Format,
)

NAMED = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    E4M3: "float8_e4m3fn",
    E2M1: "float4_e2m1fn",
    E2M3: "float6_e2m3fn",
    E3M2: "float6_e3m2fn",
    E8M0: "float8_e8m0fnu",
}
FINITE = [E4M3, E2M1, E2M3, E3M2]


@pytest.mark.parametrize("element", NAMED, ids=lambda one: one.name)
def test_numbers_of_a_record_are_those_of_its_type(element: Element) -> None:
    facts = ml_dtypes.finfo(NAMED[element])
    assert (element.bits, element.mantissa) == (facts.bits, facts.nmant)
    if element.signed:
        assert (element.smallest_normal, element.roundoff) == (float(facts.smallest_normal), float(facts.eps) / 2)
    if element in FINITE:
        assert element.largest == float(facts.max)


@pytest.mark.parametrize("element", NAMED, ids=lambda one: one.name)
def test_containers_and_names_are_types_of_torch(element: Element) -> None:
    """Whole elements fill a container, or several bytes do; not every torch has the type of a name."""
    container = getattr(torch, element.container)
    assert container.itemsize * 8 == max(8, element.bits)
    named = getattr(torch, element.torch_name or "", container)
    assert named.itemsize == container.itemsize and (element.bits < 8 or element.nan is None or named != torch.uint8)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_units_are_whole(fmt: Format) -> None:
    """A unit is the source of whole vectors, and has whole words of payload; a row has whole units and vectors."""
    assert fmt.multiple % fmt.unit == 0 and fmt.unit * 16 % 128 == 0 and fmt.unit_words * 32 == fmt.unit * fmt.bits
    assert fmt.unit_words >= 4 and fmt.unit // 2 * fmt.bits < 128, "a vector, and no smaller unit fills one"
    for hidden in (fmt.multiple, 3 * fmt.multiple):
        assert fmt.payload_bytes(hidden) * 8 == hidden * fmt.bits
        assert fmt.payload_bytes(hidden) % 16 == 0
        assert fmt.scale is None or fmt.scale_bytes(hidden) * fmt.block == hidden * fmt.scale_itemsize


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (lambda: replace(MXFP8, block=24), "must be a unit of 16 by a power of two"),
        (lambda: replace(MXFP8, block=48), "must be a unit of 16 by a power of two"),
        (lambda: replace(NVFP4, block=4), "more scale factors than a word"),
        (lambda: replace(MXFP8, element=Element("e3m1", 3, 1, "uint8")), "units of 32 elements in 5 words"),
    ],
    ids=["no multiple", "no power of two", "eight factors a unit", "five bits"],
)
def test_a_record_of_parts_of_units_is_refused(wrong, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        wrong()
