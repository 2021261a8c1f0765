"""Whole layers: without a word from the host the same bytes as step by step, and close to a dense layer."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import connected
from .layers import Network, fp8_experts, plain_experts

ROOT = Path(__file__).parents[2]
MANY = LAMPORT_TOKENS + 1
DEPTH = 4


def layouts() -> dict[str, list[str]]:
    """Test id -> devices of the ranks."""
    sets = {f"virtual{ranks}": ["cuda:0"] * ranks for ranks in (2, 4, 8)}
    if torch.cuda.device_count() > 1:
        sets |= {f"gpus{n}": [f"cuda:{index}" for index in range(n)] for n in {2, torch.cuda.device_count()}}
    return sets


@pytest.mark.parametrize("most", [90, MANY])
@pytest.mark.parametrize("ranks", layouts().values(), ids=layouts())
def test_layers(ranks: list[str], most: int) -> None:
    """Several layers deep; some rank has no tokens while they are few."""
    hidden, inner, count = 1024, 512, len(ranks)
    tokens = [(most, most // 3, 0 if most < MANY else most, 7)[rank % 4] for rank in range(count)]
    cfg = EPConfig(hidden, 4 * count, 4, most, count, "bf16", 30)
    with connected(cfg, ranks) as communicators:
        experts = [plain_experts(cfg.groups, hidden, inner, c.device, c.rank) for c in communicators]
        network = Network(communicators, tokens, experts, DEPTH)
        wanted = network.run()
        check_dense(network, wanted, 4e-2)
        for seed in range(2):
            for n, (outs, wants) in enumerate(zip(network.run(seed), wanted, strict=True)):
                for rank, (got, want) in enumerate(zip(outs, wants, strict=True)):
                    assert_bits(got, want, f"layer {n}, rank {rank}")


def check_dense(network: Network, outs: list[list[torch.Tensor]], tolerance: float) -> None:
    """Each layer of its own input, so that errors do not add up; `tolerance` is relative, and to the size of the
    sums."""
    for n in range(network.depth):
        inputs = [network.input(n, rank, outs) for rank in range(len(network.x))]
        for got, want in zip(outs[n], network.dense(n, inputs), strict=True):
            if want.numel():
                torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.std()))


def test_fp8_layer() -> None:
    """A layer of the size of a large model's: 8-bit tokens and weights, and a shared expert. Tolerance 8e-2."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0"] * 2
    hidden, inner = 7168, 2048
    tokens = torch.randint(1, 128, (2,), generator=torch.Generator().manual_seed(1)).tolist()
    cfg = EPConfig(hidden, 64, 8, 128, 2, "fp8", 30, fused_shared_expert=True)
    with connected(cfg, devices) as communicators:
        experts = [fp8_experts(cfg.groups, hidden, inner, c.device, c.rank) for c in communicators]
        network = Network(communicators, tokens, experts, 1)
        (outs,) = network.run()
        for got, want in zip(outs, network.dense(0, network.x), strict=True):
            assert 0.15 < float(want.std()) < 0.35, "sums of a size that the tolerance can tell from zeros"
            torch.testing.assert_close(got.float(), want, rtol=8e-2, atol=8e-2)
        (again,) = network.run(0)
        for rank, (got, want) in enumerate(zip(again, outs, strict=True)):
            assert_bits(got, want, f"rank {rank}")


def test_first_use_of_a_kernel_while_a_rank_waits() -> None:
    """CUDA may load a kernel at its first launch and wait for an idle device meanwhile, which a rank that waits for
    others is not: all kernels have been loaded before a rank can wait."""
    command = [sys.executable, "-m", "tests.gpu.first_use"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_a_thread_without_a_context() -> None:
    """A thread's first CUDA calls connect, run a round and give everything back."""
    cfg = EPConfig(1024, 8, 2, 32, 2, "bf16", 20)

    def run() -> None:
        with connected(cfg, ["cuda:0"] * 2) as communicators:
            check_round(communicators, make_inputs(cfg, [32, 5], "uniform", 1), RoundOptions())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
