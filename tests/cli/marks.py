"""What tests of commands need of a machine."""

from pathlib import Path

import pytest
import torch

from cute_ep.aot.build import dsl_version

ROOT = Path(__file__).parents[2]

needs_dsl = pytest.mark.skipif(dsl_version() is None, reason="the CuTe DSL is not installed")
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
