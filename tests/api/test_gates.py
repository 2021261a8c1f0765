"""Which gates exist, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cute_ep import EPConfigError, Gate


def test_columns() -> None:
    assert [Gate(kind).columns for kind in ("silu", "gelu_tanh", "relu2")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "swish"}, "kind = 'swish': must be one of silu, gelu_tanh, relu2"),
        ({"alpha": math.inf}, "alpha = inf: must be None or a finite float32 number"),
        ({"alpha": 1e60}, r"alpha = 1e\+60: must be None or a finite float32"),
        ({"alpha": math.nan}, "alpha = nan: must be None or a finite float32"),
        ({"limit": "7"}, "limit = '7': must be None or a positive finite float32 number"),
        ({"limit": 0}, "limit = 0: must be None or a positive"),
        ({"limit": -1.0}, r"limit = -1\.0: must be None or a positive"),
        ({"limit": 1e-60}, "limit = 1e-60: must be None or a positive"),
        ({"offset": 2}, "offset = 2: must be 0 or 1"),
        ({"kind": "gelu_tanh", "alpha": 1.0}, r"alpha = 1\.0: must be None, gelu_tanh has no factor"),
        ({"kind": "relu2", "limit": 7.0}, r"limit = 7\.0, offset = 0: must be None and 0, relu2 has no up"),
        ({"kind": "relu2", "offset": 1}, "limit = None, offset = 1: must be None and 0, relu2 has no up"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_gates_that_no_kernel_computes_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EPConfigError, match=f"^{said}"):
        Gate(**fields)
