"""The all2all backend `cute_ep` of vLLM (docs/vllm.md). vLLM finds `register` by its entry point."""

from cute_ep.integrations.common.versions import require

require("vllm", (0, 33, 0), (0, 33, 1))  # wraps what each release moves

from cute_ep.integrations.vllm.registration import BACKEND, register  # noqa: E402

__all__ = ["BACKEND", "register"]
