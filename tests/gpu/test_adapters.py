"""Adapters on GPUs, against the same calls on the CPU, which `tests/integrations` checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPInputError
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.testing.compare import assert_bits
from tests.integrations.groups import on_buffers

DEVICE = torch.device("cuda:0")


def test_ranks_of_one_gpu_with_a_buffer_of_deep_ep() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/deep_ep_ranks.py"]
    # of the eight queues that a GPU has otherwise two ranks may get the same one, whose launches wait for each other
    env = os.environ | {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    where = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=300, check=False)
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


def one_rank(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small integers, ids of 8 experts, and weights that are powers of two: sums in any order are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, 512), generator=generator).bfloat16()
    ids = torch.rand(tokens, 8, generator=generator).topk(3).indices
    return x.to(DEVICE), ids.to(DEVICE), (2.0 ** torch.randint(-1, 2, ids.shape, generator=generator)).to(DEVICE)


@pytest.mark.parametrize("value", [8, -2, 2**31 - 1, 2**32 + 3, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("mode", ["normal", "low latency", "elastic"])
def test_wrong_ids_are_told_once_the_gpu_has_found_them(monkeypatch: pytest.MonkeyPatch, mode: str, value: int) -> None:
    """By the next call, which can be made again; nothing waits for the GPU before."""
    x, ids, weights = one_rank(0, 6)
    ids[2, 1] = value

    def program(buffer: Any) -> None:
        def dispatch(own: torch.Tensor) -> tuple:
            if mode == "low latency":
                rows, _, handle, *_ = buffer.low_latency_dispatch(x, own, 6, 8, use_fp8=False)
                return rows, own, weights, handle
            if mode == "elastic":
                rows, _, _, handle, _ = buffer.dispatch(
                    x, own, num_experts=8, num_max_tokens_per_rank=6, do_cpu_sync=False
                )
                return rows, handle
            by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(own, 8)
            entry = {"topk_idx": own, "topk_weights": weights, "num_worst_tokens": 6}
            rows, *_, handle, _ = buffer.dispatch(x, None, by_rank, None, goes, by_expert, **entry)
            return rows, handle

        combine = buffer.low_latency_combine if mode == "low latency" else buffer.combine
        for own in (ids, ids.clamp(0, 7)):
            sent = dispatch(own)
            torch.cuda.synchronize()
            if own is ids:
                with pytest.raises(EPInputError, match=r"rank 0: topk_idx\[2, 1\] = .*must be -1 or in \[0, 8\)"):
                    combine(*sent)
            out, *_ = combine(*sent)
            torch.cuda.synchronize()
            good = (own >= 0) & (own < 8)
            if mode != "low latency":
                assert_bits(out, x, "sums")
            elif own is not ids or -(2**31) <= value < 2**31:
                assert_bits(out, x * (weights * good).sum(1, keepdim=True).bfloat16() + 0.0, "sums")

    on_buffers(monkeypatch, 1, program, ElasticBuffer if mode == "elastic" else Buffer, DEVICE)


def test_a_graph_replays_after_a_larger_call_has_taken_the_place_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was captured with stays; what was not is given back."""
    x, ids, weights = one_rank(1, 16)
    want = x * weights.sum(1, keepdim=True).bfloat16()

    def program(buffer: Buffer) -> None:
        def layer(most: int) -> torch.Tensor:
            rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, most, 8, use_fp8=False)
            return buffer.low_latency_combine(rows, ids, weights, handle)[0]

        def room() -> list[int]:
            return [one.cfg.max_tokens_per_rank for one in buffer._pool.communicators]

        layer(16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(16)
        for most, kept in ((100, [64, 128]), (200, [64, 256]), (16, [64, 256])):
            assert_bits(layer(most), want, f"{most} tokens")
            assert room() == kept
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert_bits(out, want, f"replay after {most} tokens")

    on_buffers(monkeypatch, 1, program, Buffer, DEVICE)
