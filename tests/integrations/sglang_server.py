"""SGLang's server with cute_ep and with its default exchange: requests' attention on one of two GPUs (DP attention),
experts on both.

All is SGLang's, which finds cute_ep as an installed plugin. What it is told is for a machine with few of SGLang's
requirements (`offline.py`): attention in Triton, sampling in torch. Both servers compute experts with DeepGEMM.

Without a GPU, cute_ep's two ranks and a default server of one process run on the CPU, eagerly, with experts in torch
(`sglang_experts.py`).
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.integrations import server_plan
from tests.integrations.server_load import HOST, Request, Said
from tests.integrations.server_models import LONGEST
from tests.integrations.server_plan import BATCH, BOUND, OURS, RANKS, TOP, Plan, await_settled, install
from tests.integrations.server_process import ServerError
from tests.integrations.server_runs import summary

DEFAULT = "default"
EXCHANGES = {OURS: "deepep_v2", DEFAULT: "none"}
"""SGLang's names; the plugin takes the place of the first."""
REPLACED = "CuteEPDispatcher replaces"
"""What each process of a server with the plugin logs."""
EXPERTS = "cute_ep_test_experts"
"""The plugin of `sglang_experts.py`."""
KERNELS = """def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def operation(*_, **__):
        raise NotImplementedError(name)

    return operation
"""


class Generate:
    """SGLang's `/generate`, without a tokenizer. Each piece of a stream has all that was said so far."""

    def call(self, request: Request) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": request.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": request.tokens, "ignore_eos": True},
            "stream": request.stream,
            "return_logprob": True,
            "top_logprobs_num": TOP,
        }

    def read(self, pieces: Sequence[dict[str, Any]]) -> Said:
        last = pieces[-1]
        told = last["meta_info"]
        logprobs = [float(logprob) for logprob, _, _ in told["output_token_logprobs"]]
        tops = [{token: float(logprob) for logprob, token, _ in top} for top in told["output_top_logprobs"]]
        return Said(list(last["output_ids"]), logprobs, tops)


def words_of(model: Path, backend: str, mode: str, port: int, *, gpus: bool = True) -> list[str]:
    """The command of a server."""
    options: dict[str, Any] = {
        "model-path": model,
        "host": HOST,
        "port": port,
        "moe-a2a-backend": EXCHANGES[backend],
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "dtype": "bfloat16",
        "random-seed": 0,
        "context-length": LONGEST,
        "chunked-prefill-size": RANKS * BATCH,
        "max-running-requests": RANKS * 128,
        "max-total-tokens": 2**16,
    }
    if gpus or backend == OURS:
        options |= {"tp-size": RANKS, "attn-dp-size": RANKS, "ep-size": RANKS, "moe-runner-backend": "deep_gemm"}
    if gpus:
        options |= {"attention-backend": "triton", "mem-fraction-static": 0.3, "cuda-graph-backend-prefill": "disabled"}
        sizes = {"cuda-graph-bs-decode": [1, 2, 4, 8, 16, 32, 64, 96, 128]}
        options |= sizes if mode == "graphs" else {"cuda-graph-backend-decode": "disabled"}
    else:
        options |= {"attention-backend": "torch_native", "device": "cpu"}
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    words += ["--skip-tokenizer-init", "--disable-radix-cache", "--disable-shared-experts-fusion"]
    return [*words, "--disable-custom-all-reduce"]  # it would use multicast where torch finds that


def environment_of(backend: str, plugins: Path, library: Path, *, gpus: bool = True) -> dict[str, str]:
    """More environment of a server; plugins and library as of `server_plan.environment_of`. Kernels that SGLang
    compiles stay in its usual folders for the next server."""
    ours = OURS if gpus else f"{OURS},{EXPERTS}"
    cpu = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": os.devnull,  # even if a torch for GPUs has brought NCCL
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[: RANKS if backend == OURS else 1]),
    }
    return {
        **server_plan.environment_of(plugins, library),
        "SGLANG_PLUGINS": ours if backend == OURS else "none",  # with an empty one SGLang loads all
        "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(BATCH),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # other servers start at the same time
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",  # of all numbers of rows: minutes
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the last one for torch 2.11 is older
        **({} if gpus else cpu),
    }


def install_experts(folder: Path) -> None:
    """`install` the plugin of `sglang_experts.py`, and make a `sgl_kernel` beside it whose operations exist but do not
    run: SGLang imports some that the CPU never calls."""
    install(folder, EXPERTS, "0", {"sglang.srt.plugins": {EXPERTS: "tests.integrations.sglang_experts:plugin"}})
    (folder / "sgl_kernel.py").write_text(KERNELS)


def unfinished(port: int) -> dict[str, int]:
    """Requests that run or wait, by rank."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/v1/loads?include=core", timeout=5) as answer:
        loads = json.load(answer)["loads"]
    return {f"rank {one['dp_rank']}": one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads}


def misplaced(name: str, log: Path) -> list[str]:
    """What is wrong with the dispatchers of a server, by its log: SGLang goes on where a plugin fails."""
    replaced = log.read_text(errors="replace").count(REPLACED)
    if name.startswith(OURS):
        return [] if replaced >= RANKS else [f"{name}: {replaced} processes use the plugin"]
    return [f"{name}: {replaced} processes use the plugin"] if replaced else []


def run(plan: Plan) -> dict[str, Any]:
    """The plan with both exchanges: `summary`. ServerError: not without a GPU."""
    gpus = torch.cuda.is_available()
    if not gpus:
        if plan.kind != "qwen3_moe":
            raise ServerError("without a GPU SGLang has no attention for this model")
        plan = replace(plan, modes=("eager",))
        install_experts(plan.plugins)
    outcome = plan.play(
        Generate(),
        tuple(EXCHANGES),
        partial(words_of, plan.model, gpus=gpus),
        lambda backend: environment_of(backend, plan.plugins, plan.library, gpus=gpus),
        lambda port: await_settled(partial(unfinished, port)),
        timeout=120 if gpus else 300,
    )
    made = summary(outcome, OURS, DEFAULT, BOUND)
    for name in outcome.played:
        made["wrong"] += misplaced(name, plan.folder / f"{name.replace(' ', '_')}.log")
    return made
