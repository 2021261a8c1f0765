"""The communicators of vLLM's expert parallel group, and their part of the device communicator's life."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from cute_ep import EPCommunicator, EPConfig, EPConfigError
from cute_ep.integrations.common import checks, halves, reports
from cute_ep.integrations.common.checks import require
from cute_ep.integrations.vllm.options import Options
from cute_ep.runtime.group_pool import GroupPool

NAMES = {"max_tokens_per_rank": "--max-num-batched-tokens", "world_size": "expert parallel ranks"}
WORDS = reports.Words("topk_ids", "--max-num-batched-tokens")


class CuteEPAll2AllManager(All2AllManagerBase):
    """The communicators of vLLM's expert parallel group, which layers of equal sizes share, and `halves`, the rounds of
    all layers that wait for their hooks."""

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        """Collective over the group. EPConfigError: it is of several machines."""
        super().__init__(cpu_group)
        rule = "all expert parallel ranks must be on one machine; use another --all2all-backend, or fewer ranks"
        require(not self.internode, f"all2all_backend: {rule}", error=EPConfigError)
        checks.group("cpu_group", cpu_group)
        self.pool = GroupPool(cpu_group)
        self.halves = halves.Halves(self.pool, "let go of them, and the next call drops their rounds")

    def get_handle(self, kwargs: dict) -> EPCommunicator:
        """The communicator for `cfg`, an EPConfig, and `options`, an Options; connects where there is none, then
        collective."""
        cfg, options = kwargs["cfg"], kwargs["options"]
        assert isinstance(cfg, EPConfig) and isinstance(options, Options)
        checks.sms("additional_config['cute_ep']['sms']", options.sms)
        return self.pool.get(cfg, options.sms, names=NAMES)

    def max_sms_used(self) -> int | None:
        """None of those that vLLM would keep from experts: kernels and experts take turns on one stream."""
        return 0

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> NoReturn:
        """EPConfigError: vLLM would gather all tokens for a layer that has no modular kernel."""
        rule = "this layer's quantisation has no modular kernel; use another --all2all-backend"
        raise EPConfigError(f"all2all_backend: {rule}")

    def destroy(self) -> None:
        """Close the communicators; collective."""
        self.halves.forget()
        self.pool.close()
