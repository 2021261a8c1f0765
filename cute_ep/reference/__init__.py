"""Bit-exact model in plain torch: every output byte that a communicator must produce, and how far from exact it may be.

`formats` has the token formats, `dispatch` and `combine` the collectives, `swiglu` the activation, and `bounds` bounds
on all their errors. docs/numerics.md is what they implement.

Sources: the formulas of NVFP4 quantisation and of the scale-factor addresses are those of the public MAX
`ep_comm` kernels, with true divisions in place of approximate reciprocals.
"""

from cute_ep.reference.bounds import combine_error_bound, identity_error_bound, quantization_bound, within
from cute_ep.reference.combine import ExpertOutputs, combine, sum_source, unweighted_source
from cute_ep.reference.decode import dequantize
from cute_ep.reference.dispatch import (
    arrange_scales,
    check_expert_ids,
    dispatch,
    encode_source,
    find_wrong_id,
    receive,
    swizzle_scales,
    unswizzle_scales,
)
from cute_ep.reference.formats import (
    decode_e2m1,
    decode_e2m3,
    decode_e3m2,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e2m3,
    encode_e3m2,
    encode_e4m3,
    encode_e8m0,
    quantize,
    round_to,
)
from cute_ep.reference.labels import label_rows, mark_entries
from cute_ep.reference.routes import count_routes
from cute_ep.reference.sums import sum_rows
from cute_ep.reference.swiglu import swiglu, swiglu_bound

__all__ = [
    "ExpertOutputs",
    "arrange_scales",
    "check_expert_ids",
    "combine",
    "combine_error_bound",
    "count_routes",
    "decode_e2m1",
    "decode_e2m3",
    "decode_e3m2",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize",
    "dispatch",
    "encode_e2m1",
    "encode_e2m3",
    "encode_e3m2",
    "encode_e4m3",
    "encode_e8m0",
    "encode_source",
    "find_wrong_id",
    "identity_error_bound",
    "label_rows",
    "mark_entries",
    "quantization_bound",
    "quantize",
    "receive",
    "round_to",
    "sum_rows",
    "sum_source",
    "swiglu",
    "swiglu_bound",
    "swizzle_scales",
    "unswizzle_scales",
    "unweighted_source",
    "within",
]
