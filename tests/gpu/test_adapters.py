"""Adapters on GPUs, against the same calls on the CPU, which `tests/integrations` checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_ep.integrations.deep_ep import ElasticBuffer
from cute_ep.testing.compare import assert_bits
from tests.integrations.groups import on_buffers

DEVICE = torch.device("cuda:0")


def test_ranks_of_one_gpu_with_a_buffer_of_deep_ep() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/deep_ep_ranks.py"]
    options = {"cwd": Path(__file__).parents[2], "env": os.environ | {"CUDA_MODULE_LOADING": "EAGER"}}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.parametrize("expand", [False, True])
def test_a_handle_of_deep_ep_says_what_a_replay_brought(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    x, ids = torch.randn(20, 512, device=DEVICE).bfloat16(), torch.zeros(20, 3, dtype=torch.int64, device=DEVICE)
    weights = torch.rand(20, 3, device=DEVICE)
    names = "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "dst_buffer_slot_idx"

    def program(buffer: ElasticBuffer) -> None:
        def dispatch() -> tuple:
            rows, _, own, handle, _ = buffer.dispatch(
                x, ids, weights, num_experts=8, num_max_tokens_per_rank=20, do_cpu_sync=False, do_expand=expand
            )
            return rows, own, handle

        rows, _, handle = dispatch()
        buffer.combine(rows, handle)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, own, handle = dispatch()
        for seed in range(3):
            ids.copy_(torch.rand(20, 8, generator=torch.Generator().manual_seed(seed)).topk(3).indices)
            graph.replay()
            other_rows, other, wanted = dispatch()
            for name in names:
                assert_bits(getattr(handle, name).cpu(), getattr(wanted, name).cpu(), name)
            count = int(wanted.psum_num_recv_tokens_per_scaleup_rank[-1])
            assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == count
            assert_bits(handle.recv_src_metadata[:count].cpu(), wanted.recv_src_metadata[:count].cpu(), "metadata")
            got, want = buffer.combine(rows, handle, own), buffer.combine(other_rows, wanted, other)
            for one, another in zip(got[:2], want[:2], strict=True):
                assert_bits(one.cpu(), another.cpu(), f"sums, replay {seed}")

    on_buffers(monkeypatch, 1, program, ElasticBuffer, DEVICE)
