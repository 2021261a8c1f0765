"""vLLM's server with our all2all backend and with its default one: two data parallel ranks, experts on both.

All is vLLM's, which finds cute_ep as an installed plugin. What it is told is for a machine with few of vLLM's
requirements (`offline.py`): attention in Triton, without MLA, sampling in torch.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.integrations import server_plan
from tests.integrations.server_load import HOST, Request, Said
from tests.integrations.server_models import LONGEST, TOP_K
from tests.integrations.server_plan import BATCH, BOUND, OURS, RANKS, TOP, Plan, await_settled
from tests.integrations.server_runs import summary

DEFAULT = "allgather_reducescatter"
STATIC_ROWS = RANKS * 128 * TOP_K
"""So steps of up to 128 tokens a rank, as decoding has, are not counted, and longer ones are."""


class Completions:
    """vLLM's `/v1/completions`, without a tokenizer: tokens are named `token_id:N`."""

    def __init__(self, model: str) -> None:
        self._model = model

    def call(self, request: Request) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "stream": request.stream,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(self, pieces: Sequence[dict[str, Any]]) -> Said:
        said = Said([], [], [])
        for choice in (piece["choices"][0] for piece in pieces):
            said.tokens.extend(choice["token_ids"])
            if choice["token_ids"]:
                said.logprobs.extend(choice["logprobs"]["token_logprobs"])
                tops = choice["logprobs"]["top_logprobs"]
                said.top.extend({int(name.rpartition(":")[2]): value for name, value in top.items()} for top in tops)
        return said


def words_of(model: Path, backend: str, mode: str, port: int) -> list[str]:
    """The command of a server."""
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]}
    options: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "served-model-name": "tiny",
        "data-parallel-size": RANKS,
        "all2all-backend": backend,
        "api-server-count": 1,
        "dtype": "bfloat16",
        "seed": 0,
        "max-model-len": LONGEST,
        "max-num-seqs": 128,
        "max-num-batched-tokens": BATCH,
        "kv-cache-memory-bytes": 2**28,
        "gpu-memory-utilization": 0.05,
        "attention-config": {"backend": "TRITON_ATTN"},
        "kernel-config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False, "moe_backend": "triton"},
        "compilation-config": {"mode": 0, **(graphs if mode == "graphs" else {})},
    }
    if backend == OURS:
        options["additional-config"] = {"cute_ep": {"static_rows": STATIC_ROWS}}
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    for name, value in options.items():
        words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    words += ["--skip-tokenizer-init", "--enable-expert-parallel", "--no-enable-prefix-caching"]
    words += ["--disable-uvicorn-access-log"]
    return [*words, "--enforce-eager"] if mode == "eager" else words


def environment_of(plugins: Path, library: Path) -> dict[str, str]:
    """More environment of a server; arguments as of `server_plan.environment_of`."""
    common = server_plan.environment_of(plugins, library)
    return common | {
        "VLLM_CACHE_ROOT": str(Path(common["XDG_CACHE_HOME"]) / "vllm"),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_MLA_DISABLE": "1",  # its prefill needs FlashAttention or FlashInfer
        "TORCHDYNAMO_DISABLE": "1",  # small functions that would compile at start
    }


def metrics(port: int) -> dict[str, float]:
    """Sums of a server's `vllm:` metrics over all labels but the reason why requests finished."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=5) as answer:
        said = answer.read().decode()
    sums: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", said, re.MULTILINE):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        key = f"{name} {reason[1]}" if reason else name
        sums[key] = sums.get(key, 0) + float(value)
    return sums


def unfinished(port: int) -> dict[str, float]:
    """Requests that run or wait."""
    now = metrics(port)
    return {name: now[name] for name in ("num_requests_running", "num_requests_waiting")}


def run(plan: Plan) -> dict[str, Any]:
    """The plan with both backends: `summary`."""
    played = plan.play(
        Completions("tiny"),
        (OURS, DEFAULT),
        partial(words_of, plan.model),
        lambda _: environment_of(plan.plugins, plan.library),
        lambda port: await_settled(partial(unfinished, port)),
    )
    return summary(played, OURS, DEFAULT, BOUND)
