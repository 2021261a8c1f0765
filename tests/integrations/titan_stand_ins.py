"""Imported before torchtitan: it takes the device for CUDA where it finds none, and imports Triton for a dispatcher
that no test uses, and TensorBoard and datasets for its trainer. Installed ones are left as they are."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from unittest import mock

import torch

USERS = {
    "triton": ["torchtitan.distributed.minimal_async_ep.kernels"],
    "tensorboard": ["torch.utils.tensorboard"],
    "datasets": ["datasets", "datasets.distributed"],
}
"""Of each package the modules that stand for it, or that import it."""

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
for package, modules in USERS.items():
    if find_spec(package) is None:
        sys.modules.update({module: mock.MagicMock() for module in modules})
