"""Types and shapes of arguments: what is taken alike on both backends, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_ep
from cute_ep import EPCommunicator, EPConfig, connect_local, quantize
from cute_ep.api.buffers import tensors_of
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.types import FormatName
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, ROW_ORDERS, RowOrder
from cute_ep.testing.verify import POISON

from .one_rank import ONE_RANK, inputs_of

# ---- tensors


@pytest.mark.parametrize(
    ("fmt", "named"),
    [("mxfp8", torch.float8_e8m0fnu), ("mxfp4", torch.float8_e8m0fnu), ("nvfp4", torch.float8_e4m3fn)],
    ids=["mxfp8", "mxfp4", "nvfp4"],
)
def test_ids_of_64_bits_and_scales_in_torchs_types_give_the_same_bytes(fmt: FormatName, named: torch.dtype) -> None:
    cfg = replace(ONE_RANK, dispatch_format=fmt)
    x, ids, weights = inputs_of(cfg)
    ids[0, 0] = -1
    rows = quantize(x, fmt)
    payload = rows.payload
    if payload.dtype == torch.uint8 and hasattr(torch, "float4_e2m1fn_x2"):
        payload = payload.view(torch.float4_e2m1fn_x2)
    outputs = []
    for given in ((rows.payload, ids, rows.scales), (payload, ids.long(), rows.scales.view(named))):
        (ep,) = connect_local(cfg, ["cpu"])
        out = ep.allocate()
        for tensor in tensors_of(out).values():
            assert tensor is None or tensor.view(torch.uint8).fill_(POISON) is not None
        batch = ep.dispatch(*given[:2], weights, out=out, scales=given[2])
        back = cute_ep.dequantize(batch, fmt).bfloat16()
        outputs.append([*vars(batch).values(), ep.combine(back, batch), ep.combine(back, batch, mode="partial")])
        ep.synchronize()
    for one, other in zip(*outputs, strict=True):
        if isinstance(one, torch.Tensor) and one is not ids:
            assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("order", ROW_ORDERS)
def test_float16_rows_travel_as_bits(order: RowOrder) -> None:
    """All 65,536 of them, there and, where no sum is made, back."""
    cfg = replace(ONE_RANK, row_order=order, max_tokens_per_rank=512)
    _, ids, weights = inputs_of(cfg, tokens=512)
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(512, 128)
    (ep,) = connect_local(cfg, ["cpu"])
    batch = ep.dispatch(x.view(torch.bfloat16), ids, weights)
    rows = batch.tokens[: int(batch.num_rows)].view(torch.float16)
    assert torch.equal(rows.view(torch.int16), x[batch.src_info[: len(rows), 0].long()].view(torch.int16))
    if order == EXPERT_MAJOR:
        back = ep.combine(batch.tokens, batch, mode="unweighted").view(torch.float16)
        assert torch.equal(back.view(torch.int16), x[:, None].expand(back.shape).view(torch.int16))


def test_an_id_beyond_32_bits_is_reported_and_counts_as_its_lower_half() -> None:
    x, ids, weights = inputs_of()
    wide = ids.long()
    wide[2, 1] += 1 << 32
    sums = []
    for given in (ids, wide):
        (ep,) = connect_local(ONE_RANK, ["cpu"])
        batch = ep.dispatch(x, given, weights)
        sums.append(ep.combine(batch.tokens, batch))
    assert torch.equal(*sums)
    with pytest.raises(EPInputError, match=rf"topk_ids\.flatten\(\)\[{2 * ONE_RANK.top_k + 1}\] = "):
        ep.synchronize()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda x, ids: (x.view(2, 3, 128), ids),
            r"x\.shape = \(2, 3, 128\): .*flatten .*: x\.flatten\(0, 1\)",
            id="x of sequences",
        ),
        pytest.param(
            lambda x, ids: (x, ids.view(2, 3, 2)),
            r"topk_ids\.shape = .*topk_ids\.flatten\(0, 1\)",
            id="topk_ids of sequences",
        ),
        pytest.param(
            lambda x, ids: (x[:, :3].contiguous(), ids), r"x\.shape = \(6, 3\): must be \(n, 128\)$", id="narrow x"
        ),
    ],
)
def test_a_refused_shape_says_how_to_flatten_sequences(
    lone_rank: EPCommunicator, change: Callable, message: str
) -> None:
    x, ids, weights = inputs_of(tokens=6)
    with pytest.raises(EPInputError, match=message):
        lone_rank.dispatch(*change(x, ids), weights)


# ---- numbers, devices, options


def test_numpy_integers_are_integers() -> None:
    cfg = EPConfig(np.int64(128), 8, np.int32(2), 4, 1, timeout_s=np.float32(2), row_alignment=np.int64(8))
    assert cfg == EPConfig(128, 8, 2, 4, 1, timeout_s=2.0, row_alignment=8)
    assert all(type(value) in (int, float, str, bool, type(None)) for value in vars(cfg).values())
    assert connect_local(cfg, ["cpu"])[0].allocate(np.int64(9)).tokens.shape[0] == 16
    with pytest.raises(EPConfigError, match=r"top_k = np\.True_"):
        replace(cfg, top_k=np.True_)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param("cpu", r"devices = 'cpu': must be a list, one per rank, such as \[.cpu.\] \* 2", id="a name"),
        pytest.param("auto", r"devices = 'auto': must be a list, one per rank, such as \[.cpu.\] \* 2", id="no device"),
        pytest.param(torch.device("cuda"), r"devices = 'cuda': .*\[.cuda.\] \* 2", id="a device"),
        pytest.param([0, 1], r"devices = \[0, 1\]: must be a list of names.*\[.cpu.\] \* 2$", id="numbers"),
        pytest.param(["gpu", "gpu"], r"devices = \['gpu', 'gpu'\]: must be a list of names", id="no devices of torch"),
        pytest.param(None, r"devices = NoneType: must be a list of names", id="None"),
        pytest.param(["cpu"], r"devices = 1 entries: must be world_size = 2", id="too few"),
    ],
)
def test_devices_are_a_list_of_names_one_per_rank(devices: Any, message: str) -> None:
    with pytest.raises(EPConfigError, match=message):
        connect_local(replace(ONE_RANK, world_size=2), devices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"library": 5}, r"library = '5': must be a folder", id="library"),
        pytest.param({"hooks": None}, r"hooks = NoneType: must be Hooks, without arguments for none", id="no hooks"),
        pytest.param(
            {"hooks": cute_ep.Hooks(epilogue="a:b")},
            r"hooks = .*: must be Hooks\(\), there are none on the reference backend",
            id="hooks on the CPU",
        ),
    ],
)
def test_options_of_connect_local_are_a_folder_and_hooks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EPConfigError, match=message):
        connect_local(ONE_RANK, ["cpu"], **options)


@pytest.mark.parametrize(
    "call",
    [cute_ep.memory_bytes, lambda cfg: connect_local(cfg, ["cpu"])],
    ids=["memory_bytes", "connect_local"],
)
@pytest.mark.parametrize(("cfg", "name"), [(None, "NoneType"), ({"hidden": 128}, "dict")], ids=["None", "dict"])
def test_a_configuration_is_an_epconfig(call: Callable[[Any], Any], cfg: Any, name: str) -> None:
    with pytest.raises(EPConfigError, match=rf"cfg = {name}: must be an EPConfig"):
        call(cfg)
