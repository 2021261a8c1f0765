"""Imported before torchtitan: it takes the device for CUDA where it finds none, and imports Triton for a dispatcher
that no test uses, and TensorBoard and datasets for its trainer."""

from __future__ import annotations

import sys
from unittest import mock

import torch

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
for name in (KERNELS, "torch.utils.tensorboard", "datasets", "datasets.distributed"):
    sys.modules[name] = mock.MagicMock()
