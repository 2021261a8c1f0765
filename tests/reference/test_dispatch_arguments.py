"""What reference dispatch refuses: each with the name, the value and the rule."""

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows

from .dispatch_model import arguments, small


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param(
            lambda x, ids, w: (x.float(), ids, w),
            r"x\.dtype = torch\.float32: must be torch\.bfloat16; use x\.bfloat16\(\)$",
            id="x in float32",
        ),
        pytest.param(
            lambda x, ids, w: (x[:, :16].contiguous(), ids, w),
            r"x\.shape = \(2, 16\): must be \(n, 32\)",
            id="narrow x",
        ),
        pytest.param(lambda x, ids, w: (x[0], ids, w), r"x\.shape", id="x of one token"),
        pytest.param(
            lambda x, ids, w: (x.repeat(2, 1), ids, w), r"x\.shape\[0\] = 4: must not exceed", id="too many tokens"
        ),
        pytest.param(lambda x, ids, w: (strided(x), ids, w), r"x\.stride\(\)", id="strided x"),
        pytest.param(
            lambda x, ids, w: (torch.zeros(65).bfloat16()[1:].view(2, 32), ids, w),
            r"x\.data_ptr\(\).*16 bytes",
            id="x that is not aligned",
        ),
        pytest.param(lambda x, ids, w: (x.tolist(), ids, w), r"x = list: must be a torch\.Tensor", id="x is a list"),
        pytest.param(
            lambda x, ids, w: (x, ids.short(), w),
            r"topk_ids\.dtype = torch\.int16: must be torch\.int32 or torch\.int64; use topk_ids\.long\(\)$",
            id="ids of 16 bits",
        ),
        pytest.param(
            lambda x, ids, w: (x, ids.float(), w),
            r"topk_ids\.dtype = torch\.float32: must be torch\.int32 or torch\.int64$",
            id="ids that are no integers",
        ),
        pytest.param(
            lambda x, ids, w: (x, ids[:1], w), r"topk_ids\.shape = \(1, 2\): must be \(2, 2\)", id="too few ids"
        ),
        pytest.param(lambda x, ids, w: (x, ids[:, :1].contiguous(), w), r"topk_ids\.shape", id="too few slots"),
        pytest.param(lambda x, ids, w: (x, strided(ids), w), r"topk_ids\.stride", id="strided ids"),
        pytest.param(
            lambda x, ids, w: (x, ids.to("meta"), w), r"topk_ids\.device = meta: must be cpu", id="ids elsewhere"
        ),
        pytest.param(
            lambda x, ids, w: (x, ids, w.double()),
            r"router_weights\.dtype.*router_weights\.float\(\)$",
            id="weights in float64",
        ),
        pytest.param(lambda x, ids, w: (x, ids, w[:1]), r"router_weights\.shape", id="too few weights"),
    ],
)
def test_tensors_that_break_a_rule_are_refused(change, match):
    cfg = small()
    xs, ids, weights = arguments(cfg)
    xs[1], ids[1], weights[1] = change(xs[1], ids[1], weights[1])
    with pytest.raises(EPInputError, match=match):
        reference.dispatch(cfg, xs, ids, None, weights)


@pytest.mark.parametrize("value", [-2, 4, 2**31 - 1, -(2**31)])
def test_an_expert_id_out_of_range_is_refused(value):
    cfg = small()
    xs, ids, _ = arguments(cfg)
    ids[1][1, 0] = value
    with pytest.raises(EPInputError, match=rf"topk_ids\[1, 0\] = {value}: must be -1 or in \[0, 4\)"):
        reference.dispatch(cfg, xs, ids)


def test_lists_of_another_length_and_scales_that_are_none_are_refused():
    cfg = small()
    xs, ids, _ = arguments(cfg)
    for broken in (
        (xs[:1], ids, None, None),
        (xs, ids[:1], None, None),
        (xs, ids, [1.0], None),
        (xs, ids, None, []),
    ):
        with pytest.raises(EPInputError, match="must be world_size = 2"):
            reference.dispatch(cfg, *broken)
    for bad in (0.0, torch.nan, torch.ones(2), torch.ones(1).double(), torch.zeros(1)):
        with pytest.raises(EPInputError, match="scale"):
            reference.dispatch(cfg, xs, ids, [1.0, bad])
    with pytest.raises(EPInputError, match="no global scale"):
        reference.dispatch(replace(cfg, dispatch_format="bf16"), xs, ids, [1.0, 1.0])


def test_quantised_rows_that_break_a_rule_are_refused():
    cfg = small()
    xs, ids, _ = arguments(cfg)
    good = [reference.quantize(x, "nvfp4") for x in xs]
    for match, bad in (
        ("x.dtype", good[0]._replace(payload=good[0].payload.float())),
        ("x.shape", good[0]._replace(payload=good[0].payload[:, :8].contiguous())),
        ("scales.shape", good[0]._replace(scales=good[0].scales[:1])),
        ("row_scales = tensor", good[0]._replace(row_scales=torch.ones(2).bfloat16())),
        ("topk_ids.shape", QuantizedRows(good[0].payload[:1], good[0].scales[:1])),
    ):
        with pytest.raises(EPInputError, match=match):
            reference.dispatch(cfg, xs, ids, prequantized=[bad, good[1]])
    with pytest.raises(EPInputError, match=r"input_scale = 2\.0: must be None"):
        reference.dispatch(cfg, xs, ids, [2.0, 1.0], prequantized=[good[0], None])
    with pytest.raises(EPInputError, match=r"len\(prequantized\) = 1"):
        reference.dispatch(cfg, xs, ids, prequantized=good[:1])
