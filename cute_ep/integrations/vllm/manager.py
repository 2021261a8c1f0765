"""The communicators of vLLM's expert parallel group, and their part of the device communicator's life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from cute_ep import EPCommunicator, EPConfigError
from cute_ep.api.config import is_integer
from cute_ep.api.types import CombineMode
from cute_ep.integrations.common import checks, halves, pools
from cute_ep.layouts.maps.routing import MAX_EXPERTS
from cute_ep.runtime.group_pool import GroupPool

KEY = "cute_ep"
"""Of options in vLLM's `--additional-config`."""
NAMES = {
    "max_tokens_per_rank": "--max-num-batched-tokens",
    "world_size": "expert parallel ranks",
    "block_rows": "ranks x --max-num-batched-tokens",
}
WORDS = pools.Words("topk_ids", "--max-num-batched-tokens")


@dataclass(frozen=True)
class Options:
    """What a user can choose, the same on all ranks (docs/vllm.md). `static_rows`: a call for which no routing can
    bring more rows to a rank gets memory for all of them, and the host does not wait. Otherwise, except while a CUDA
    graph is captured, the host asks for the number of rows."""

    mode: CombineMode = "partial"
    static_rows: int = 32768
    timeout_s: float = 60.0
    sms: int | None = None

    def __post_init__(self) -> None:
        mode, rows, timeout, sms = (f"additional_config[{KEY!r}][{field.name!r}]" for field in fields(self))
        checks.mode(mode, self.mode)
        checks.integer(rows, self.static_rows, 0, error=EPConfigError)
        checks.seconds(timeout, self.timeout_s)
        good = self.sms is None or (is_integer(self.sms) and self.sms > 0)
        checks.demand(good, "{} = {!r}: must be a positive integer or None", sms, self.sms)

    @classmethod
    def of(cls, additional: Any) -> Self:
        """Those in vLLM's `additional_config`. EPConfigError: one is unknown, or breaks its rule."""
        given = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(given, Mapping):
            raise EPConfigError(f"additional_config[{KEY!r}] = {given!r}: must be a mapping of options")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise EPConfigError(f"additional_config[{KEY!r}][{name!r}]: must be one of {', '.join(known)}")
        return cls(**given)


DEFAULTS = Options()


class CuteEPAll2AllManager(All2AllManagerBase):
    """The communicators of vLLM's expert parallel group, and `halves`: the rounds that wait for their hooks."""

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        """Collective over the group."""
        super().__init__(cpu_group)
        checks.group("cpu_group", cpu_group, MAX_EXPERTS)
        self.pool = GroupPool(cpu_group)
        self.halves = halves.Halves(self.pool, "let go of them, and the next call drops their rounds")

    def get_handle(self, kwargs: dict) -> EPCommunicator:
        """The communicator for a `cfg` and `options`; connects where there is none, then collective."""
        sms = kwargs["options"].sms
        checks.sms("additional_config['cute_ep']['sms']", sms)
        return self.pool.get(kwargs["cfg"], sms, names=NAMES)

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
