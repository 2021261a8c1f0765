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
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integrations.server_load import HOST, Request, Said, draw_requests
from tests.integrations.server_models import LONGEST, VOCABULARY, save_model
from tests.integrations.server_process import ServerError
from tests.integrations.server_runs import Case, play_cases, say, summary
from tests.integrations.vllm_server import BOUND, TOP, install_plugin

ROOT = Path(__file__).parents[2]
OURS, DEFAULT = "cute_ep", "default"
EXCHANGES = {OURS: "deepep_v2", DEFAULT: "none"}
"""SGLang's names; the plugin takes the place of the first."""
MODES = "eager", "graphs"
RANKS = 2
BATCH = 512
"""Tokens of a rank's step, at most."""
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
    """More environment of a server. Kernels that SGLang compiles stay in its usual folders for the next server.

    Args:
        plugins: a folder of `install_plugin`.
        library: of compiled kernels.
    """
    cache = plugins / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "cute_ep").exists():
        (cache / "cute_ep").symlink_to(library.resolve(), target_is_directory=True)
    path = [str(plugins), str(ROOT), os.environ.get("PYTHONPATH", "")]
    ours = OURS if gpus else f"{OURS},{EXPERTS}"
    cpu = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": os.devnull,  # even if a torch for GPUs has brought NCCL
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[: RANKS if backend == OURS else 1]),
    }
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "SGLANG_PLUGINS": ours if backend == OURS else "none",  # with an empty one SGLang loads all
        "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(BATCH),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # other servers start at the same time
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",  # of all numbers of rows: minutes
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the last one for torch 2.11 is older
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "NO_COLOR": "1",
        **({} if gpus else cpu),
    }


def install_experts(folder: Path) -> None:
    """Make the plugin of `sglang_experts.py` count as installed, in a folder for PYTHONPATH, and a `sgl_kernel` whose
    operations exist but do not run: SGLang imports some that the CPU never calls."""
    info = folder / f"{EXPERTS}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {EXPERTS}\nVersion: 0\n")
    point = f"{EXPERTS} = tests.integrations.sglang_experts:plugin"
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{point}\n")
    (folder / "sgl_kernel.py").write_text(KERNELS)


def settled(port: int) -> None:
    """ServerError: ten seconds after a round requests run or wait."""
    end = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/loads?include=core", timeout=5) as answer:
            loads = json.load(answer)["loads"]
        left = {f"rank {one['dp_rank']}": one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads}
        if not any(left.values()):
            return
        if time.monotonic() > end:
            raise ServerError(f"requests are left after a round: {left}")
        time.sleep(0.2)


def misplaced(name: str, log: Path) -> list[str]:
    """What is wrong with the dispatchers of a server, by its log: SGLang goes on where a plugin fails."""
    replaced = log.read_text(errors="replace").count(REPLACED)
    if name.startswith(OURS):
        return [] if replaced >= RANKS else [f"{name}: {replaced} processes use the plugin"]
    return [f"{name}: {replaced} processes use the plugin"] if replaced else []


def run(
    kind: str,
    folder: Path,
    library: Path,
    *,
    backends: Sequence[str] = tuple(EXCHANGES),
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
    model, plugins, gpus = folder / kind, folder / "plugins", torch.cuda.is_available()
    if not gpus and kind != "qwen3_moe":
        raise ServerError("without a GPU SGLang has no attention for this model")
    install_plugin(plugins)
    if not gpus:
        install_experts(plugins)
        modes = ["eager"]
    save_model(kind, model)

    def case(backend: str, mode: str) -> Case:
        name, environment = f"{backend} {mode}", environment_of(backend, plugins, library, gpus=gpus)

        def words(port: int) -> list[str]:
            return [*words_of(model, backend, mode, port, gpus=gpus), *options]

        return Case(name, words, environment, settled=settled)

    cases = [case(backend, mode) for backend in backends for mode in modes]
    say(f"{kind}: {len(cases)} servers start")
    requests = draw_requests(VOCABULARY, count=count)
    patience = {"start_timeout": start_timeout, "timeout": 120 if gpus else 300}
    outcome = play_cases(cases, Generate(), requests, folder, idle=idle, **patience)
    made = summary(outcome, OURS, DEFAULT, BOUND)
    for name in outcome.played:
        made["wrong"] += misplaced(name, folder / f"{name.replace(' ', '_')}.log")
    return made
