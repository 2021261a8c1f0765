"""What a message says must be, is the whole rule: a value that follows it is not refused for the same reason again.

Values of all kinds are drawn for a field; when it is refused, one that the message allows takes its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.api.gates import KINDS, Gate
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows, payload_columns, payload_dtype, scale_dtype
from cute_ep.api.tensors import check_tensor
from cute_ep.api.types import ROW_IDS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK, ROW_ORDERS
from cute_ep.layouts.maps.scales import scale_shape
from cute_ep.reference.backend import connect_reference
from cute_ep.reference.decode import dequantize
from cute_ep.runtime.local_ops import fused_silu, quantize
from cute_ep.tuning.launch_shape import Entry

MOST = 300
SCALED = [name for name, fmt in FORMATS.items() if fmt.scale]
PLAIN_ROWS = [name for name, fmt in FORMATS.items() if not fmt.row_scale]


# ---- the multiple that a row's elements must be


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def decode(fmt: str, columns: int) -> None:
    record = FORMATS[fmt]
    hidden = columns * record.multiple // payload_columns(record, record.multiple)
    scales = torch.zeros(1, hidden // record.block, dtype=scale_dtype(record)) if record.scale else None
    row_scales = bf16(1) if record.row_scale else None
    payload = (
        torch.zeros(1, columns, dtype=torch.uint8).view(payload_dtype(record)) if record.bits < 16 else bf16(1, columns)
    )
    dequantize(QuantizedRows(payload, scales, row_scales), fmt)


ROWS: dict[str, tuple[list[str], Callable[[str, int], Any]]] = {
    "EPConfig": (list(FORMATS), lambda fmt, size: EPConfig(size, 8, 2, 16, 2, fmt)),
    "quantize": (SCALED, lambda fmt, size: quantize(bf16(1, size), fmt)),
    "reference.quantize": (list(FORMATS), lambda fmt, size: reference.quantize(bf16(1, size), fmt)),
    "fused_silu": (PLAIN_ROWS, lambda fmt, size: fused_silu(bf16(1, size), fmt=fmt)),
    "fused_silu of one column": (PLAIN_ROWS, lambda fmt, size: fused_silu(bf16(1, size), fmt=fmt, gate=Gate("relu2"))),
    "dequantize": (list(FORMATS), decode),
}


@pytest.mark.parametrize(("name", "fmt"), [(name, fmt) for name, (formats, _) in ROWS.items() for fmt in formats])
def test_sizes_that_pass_are_the_multiples_that_the_message_says(name: str, fmt: str) -> None:
    """Of every size up to 300; all refusals say the same multiple."""
    call, passed, multiples = ROWS[name][1], set(), set()
    for size in range(1, MOST + 1):
        try:
            call(fmt, size)
        except EPError as error:
            found = re.fullmatch(rf".*(?:hidden|shape\[1\]) = {size}: must be an? .*?multiple of (\d+)\b.*", str(error))
            assert found, error
            multiples.add(int(found[1]))
        else:
            passed.add(size)
    (multiple,) = multiples
    assert passed == set(range(multiple, MOST + 1, multiple))


# ---- fields


def following(rule: str, draw: st.DataObject, why: str) -> Any:
    """A value that a rule allows."""
    if found := re.match(r"(?:None or )?an? (integer|(?:integer )?multiple of (\d+)) in \[(\d+), (\d+)\]", rule):
        step, low, high = int(found[2] or 1), int(found[3]), int(found[4])
        return step * draw.draw(st.sampled_from([low // step, high // step]) | st.integers(low // step, high // step))
    if rule.startswith("a positive integer"):
        return draw.draw(st.integers(1, 1 << 20))
    if found := re.match(r"a number in \[(\S+), (\S+?)([\])])", rule):
        return draw.draw(st.floats(float(found[1]), float(found[2]), exclude_max=found[3] == ")"))
    if found := re.match(r"(?:None or )?one of (.*?)(?: for .*)?$", rule):
        words = found[1].split(", ")
        return draw.draw(st.sampled_from([int(word) if word.isdigit() else word for word in words]))
    if rule.startswith("True or False"):
        return draw.draw(st.booleans())
    if rule.startswith("0 or 1"):
        return draw.draw(st.sampled_from([0, 1]))
    if "finite float32 number" in rule:
        return draw.draw(st.floats(2.0**-100 if "positive" in rule else -(2.0**100), 2.0**100, width=32))
    for word, value in {"None": None, "False": False, "0": 0}.items():
        if re.match(rf"{word}\b", rule):
            return value
    raise AssertionError(f"no value follows: {why}")


def mend(make: Callable[..., Any], fields: dict[str, Any], draw: st.DataObject) -> None:
    """Follow messages until nothing is refused. A field that followed its rule is not refused again."""
    mended: set[str] = set()
    while True:
        try:
            made = make(**fields)
        except EPConfigError as error:
            names, rule = str(error).split(": must be ", 1)
            changed = dict(zip(re.findall(r"(\w+) = ", names), rule.split(" and "), strict=False))
            assert changed and not mended & set(changed), f"refused twice: {error}, {fields}"
            fields |= {name: following(text, draw, str(error)) for name, text in changed.items()}
            mended |= set(changed)
        else:
            assert {name: getattr(made, name) for name in mended} == {name: fields[name] for name in mended}
            return


ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(-5, 200), st.text(max_size=3), st.floats(allow_nan=True), st.just([1])),
    *(st.sampled_from(values) for values in ([1024, 4096, 32768, 65536, 1 << 31], list(FORMATS), ROW_ORDERS)),
)
LIKELY: Mapping[str, st.SearchStrategy] = {
    "hidden": st.sampled_from([8, 128, 7168, 65536]),
    "num_experts": st.sampled_from([1, 8, 96, 1024]),
    "top_k": st.integers(1, 32),
    "max_tokens_per_rank": st.sampled_from([1, 128, 32768]),
    "world_size": st.integers(1, 32),
    "dispatch_format": st.sampled_from(list(FORMATS)),
    "timeout_s": st.just(60.0),
    "scale_layout": st.none() | st.sampled_from(["linear", "transposed", "atom128x4"]),
    "row_alignment": st.none() | st.sampled_from([1, 4, 128]),
    "fused_shared_expert": st.booleans(),
    "skip_a2a": st.booleans(),
    "block_rows": st.none() | st.integers(1, 512),
    "row_order": st.sampled_from(ROW_ORDERS),
    "row_ids": st.sampled_from(ROW_IDS),
    "zero_padding": st.booleans(),
}


@settings(max_examples=400)
@given(st.data())
def test_a_configuration_is_mended_by_following_its_messages(data: st.DataObject) -> None:
    mend(EPConfig, {name: data.draw(likely | ANYTHING, label=name) for name, likely in LIKELY.items()}, data)


@settings(max_examples=200)
@given(st.data())
def test_a_gate_is_mended_by_following_its_messages(data: st.DataObject) -> None:
    likely = {"kind": st.sampled_from(KINDS), "alpha": st.none(), "limit": st.none(), "offset": st.just(0)}
    mend(Gate, {name: data.draw(one | ANYTHING, label=name) for name, one in likely.items()}, data)


@settings(max_examples=200)
@given(st.data())
def test_a_launch_shape_is_mended_by_following_its_messages(data: st.DataObject) -> None:
    positive = st.integers(1, 100)
    likely = {"tokens": positive, "grid": positive, "senders": st.just(0.25), "slices": positive}
    mend(Entry, {name: data.draw(one | ANYTHING, label=name) for name, one in likely.items()}, data)


@pytest.mark.parametrize("skip_a2a", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("hidden", [128, 16384, 32768, 65536])
def test_the_most_tokens_that_a_message_allows_are_the_most(fmt: str, hidden: int, skip_a2a: bool) -> None:
    sizes = dict(hidden=hidden, num_experts=1024, top_k=32, world_size=32, dispatch_format=fmt, skip_a2a=skip_a2a)
    with pytest.raises(
        EPConfigError, match=r"^max_tokens_per_rank = 40000: must be an integer in \[1, \d+\]"
    ) as caught:
        EPConfig(max_tokens_per_rank=40000, **sizes)
    most = int(re.findall(r", (\d+)\]", str(caught.value))[0])
    assert EPConfig(max_tokens_per_rank=most, **sizes).max_tokens_per_rank == most <= MAX_TOKENS_PER_RANK
    with pytest.raises(EPConfigError, match=rf"in \[1, {most}\]"):
        EPConfig(max_tokens_per_rank=most + 1, **sizes)


# ---- arguments of calls

BLOCKS = EPConfig(128, 4, 2, 16, 2, "nvfp4", block_rows=256)


@pytest.mark.parametrize("capacity", [-1, "64", 2.0, True, 0, 100, 1000])
def test_capacities_that_make_no_blocks_are_told_which_do(capacity: Any) -> None:
    rule = rf"capacity = {capacity!r}: must be a multiple of 256 in \[256, 512\], 2 blocks"
    with pytest.raises(EPInputError, match=rule):
        DispatchBuffers.allocate(BLOCKS, "cpu", capacity)
    for rows in (256, 512):
        assert DispatchBuffers.allocate(BLOCKS, "cpu", rows).tokens.shape[0] == rows


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({}, ["exact", "partial", "unweighted"]),
        ({"fused_shared_expert": True}, ["exact", "partial"]),
        ({"row_order": "rank_major"}, ["partial"]),
    ],
    ids=["expert-major", "shared expert", "rank-major"],
)
def test_modes_that_a_message_names_can_be_used(changes: dict[str, Any], modes: list[str]) -> None:
    (ep,) = connect_reference(EPConfig(32, 4, 2, 16, 1, **changes))
    batch = ep.dispatch(bf16(3, 32), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    rows = bf16(len(batch.tokens), 32)
    with pytest.raises(EPInputError, match=r"^mode = 'sum': must be ") as caught:
        ep.combine(rows, batch, mode="sum")  # type: ignore[arg-type]
    assert [mode for mode in ("exact", "partial", "unweighted") if mode in str(caught.value)] == modes
    for mode in modes:
        ep.combine(rows, batch, mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("given_layout", [None, "default"])
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_scales_in_another_layout_are_refused_by_its_name(fmt: str, given_layout: str | None) -> None:
    record, rows, hidden = FORMATS[fmt], 6, 256
    default, other = record.scale_layouts
    columns = payload_columns(record, hidden)
    payload = torch.zeros(rows, columns, dtype=torch.uint8).view(payload_dtype(record))
    shape = scale_shape(other, record.scale_bytes(hidden), record.scale_itemsize, rows, 1)
    held = SwigluRows(payload, torch.zeros(shape, dtype=scale_dtype(record)))
    dequantize(held, fmt, scale_layout=other)
    with pytest.raises(EPInputError) as caught:
        dequantize(held, fmt, scale_layout=default if given_layout else None)
    said = (
        f"scale_layout = {default!r}{'' if given_layout else ', the default'}: must be {other!r} for rows.scales.shape"
    )
    assert str(caught.value) == f"{said} = {shape}"


@pytest.mark.parametrize("fmt", SCALED)
def test_a_batch_is_decoded_in_the_layout_of_its_configuration(fmt: str) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.zeros(4, 2, dtype=torch.int32)
    ids[:, 1] = 3
    decoded = []
    for layout in FORMATS[fmt].scale_layouts:
        (ep,) = connect_reference(EPConfig(128, 4, 2, 16, 1, fmt, scale_layout=layout))
        batch = ep.dispatch(x, ids)
        ep.synchronize()
        decoded.append(dequantize(batch, fmt)[: int(batch.num_rows)])
    assert torch.equal(decoded[0], decoded[1]) and decoded[0].any()


INPUT_SCALES = [torch.ones(2, 2), torch.ones(0), torch.ones(4), torch.ones(())]


@pytest.mark.parametrize("scales", INPUT_SCALES, ids=lambda scales: str(tuple(scales.shape)))
def test_input_scales_of_another_shape_are_told_the_shapes_that_pass(scales: torch.Tensor) -> None:
    offsets = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    with pytest.raises(EPInputError, match=r"input_scales\.shape = .*: must be \(1,\) or \(3,\)$"):
        fused_silu(bf16(3, 64), offsets, fmt="nvfp4", input_scales=scales, scale_layout="linear")
    for count in (1, 3):
        fused_silu(bf16(3, 64), offsets, fmt="nvfp4", input_scales=torch.ones(count), scale_layout="linear")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_tensor_of_one_element_is_an_input_scale_whatever_its_shape(shape: tuple[int, ...]) -> None:
    """As the message says, "one float32 element"."""
    x = torch.ones(2, 32).bfloat16()
    want = quantize(x, "nvfp4", torch.tensor([2.0]))
    assert all(map(torch.equal, quantize(x, "nvfp4", torch.full(shape, 2.0))[:2], want[:2]))
    for wrong in (torch.ones(2), torch.ones(1).double()):
        with pytest.raises(EPInputError, match=r"^input_scale"):
            quantize(x, "nvfp4", wrong)


TENSORS: dict[str, torch.Tensor] = {
    "columns first": bf16(32, 4).float().t(),
    "another type": bf16(4, 32),
    "a batch of sequences": bf16(2, 2, 32).float(),
    "with a gradient": bf16(4, 32).float().requires_grad_(),
    "all of it": bf16(32, 2, 2).permute(1, 2, 0).detach().requires_grad_(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=list(TENSORS))
def test_what_a_message_says_to_use_mends_the_tensor(tensor: torch.Tensor) -> None:
    used = []
    while True:
        try:
            check_tensor("w", tensor, shape=(4, 32), dtype=torch.float32)
        except EPInputError as error:
            found = re.search(r"(?:use|give|dimensions:) (w\.\w+\(.*\))$", str(error))
            assert found and found[1] not in used, error
            used.append(found[1])
            tensor = eval(found[1], {"w": tensor})
        else:
            assert used
            return
