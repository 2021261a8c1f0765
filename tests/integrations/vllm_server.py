"""vLLM's server with our all2all backend and with its default one: two data parallel ranks, experts on both.

All is vLLM's, which finds cute_ep as an installed plugin. What it is told is for a machine with few of vLLM's
requirements (`offline.py`): attention in Triton, without MLA, sampling in torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integrations.server_load import HOST, Request, Said, draw_requests
from tests.integrations.server_models import LONGEST, TOP_K, VOCABULARY, save_model
from tests.integrations.server_process import ServerError
from tests.integrations.server_runs import Case, play_cases, say, summary

ROOT = Path(__file__).parents[2]
OURS, DEFAULT = "cute_ep", "allgather_reducescatter"
BACKENDS, MODES = (OURS, DEFAULT), ("eager", "graphs")
RANKS = 2
BATCH = 512
"""Tokens of a rank's step, at most."""
STATIC_ROWS = RANKS * 128 * TOP_K
"""So steps of up to 128 tokens a rank, as decoding has, are not counted, and longer ones are."""
BOUND = 0.2
"""How far rounding moves a log probability, between two servers: each in bfloat16 is half of it from float32
(`test_server_models.py`)."""
TOP = 8
"""Likeliest tokens to tell of at each place."""


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


def install_plugin(folder: Path) -> None:
    """Make a folder for PYTHONPATH in which cute_ep counts as installed: metadata with its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"cute_ep-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cute-ep\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [
        line for group, names in groups for line in (f"[{group}]", *(f"{one} = {what}" for one, what in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


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
    """More environment of a server.

    Args:
        plugins: a folder of `install_plugin`.
        library: of compiled kernels.
    """
    cache = plugins / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "cute_ep").exists():
        (cache / "cute_ep").symlink_to(library.resolve(), target_is_directory=True)
    path = [str(plugins), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_HOST_IP": HOST,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_MLA_DISABLE": "1",  # its prefill needs FlashAttention or FlashInfer
        "TORCHDYNAMO_DISABLE": "1",  # small functions that would compile at start
        "OMP_NUM_THREADS": "2",
        "NO_COLOR": "1",
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


def settled(port: int) -> None:
    """ServerError: ten seconds after a round requests run or wait."""
    end = time.monotonic() + 10
    while True:
        now = metrics(port)
        left = {name: now[name] for name in ("num_requests_running", "num_requests_waiting")}
        if not any(left.values()):
            return
        if time.monotonic() > end:
            raise ServerError(f"requests are left after a round: {left}")
        time.sleep(0.2)


def run(
    kind: str,
    folder: Path,
    library: Path,
    *,
    backends: Sequence[str] = BACKENDS,
    modes: Sequence[str] = MODES,
    count: int = 200,
    idle: float = 60,
    start_timeout: float = 300,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """A model of `server_models.MODELS` in servers with backends and modes, asked the same: `summary`.

    Args:
        folder: empty, for the model and logs.
        count: requests of a round.
        idle: seconds between the two rounds.
        start_timeout: seconds for servers to start, all at once.
        options: more words for each server.
    """
    model, plugins = folder / kind, folder / "plugins"
    install_plugin(plugins)
    save_model(kind, model)
    environment = environment_of(plugins, library)

    def case(backend: str, mode: str) -> Case:
        name = f"{backend} {mode}"
        return Case(name, lambda port: [*words_of(model, backend, mode, port), *options], environment, settled=settled)

    cases = [case(backend, mode) for backend in backends for mode in modes]
    say(f"{kind}: {len(cases)} servers start")
    requests = draw_requests(VOCABULARY, count=count)
    played = play_cases(cases, Completions("tiny"), requests, folder, idle=idle, start_timeout=start_timeout)
    return summary(played, OURS, DEFAULT, BOUND)
