"""`torchtitan.models.common.token_dispatcher`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class BaseEPTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        pass


class HybridEPTokenDispatcher(BaseEPTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        non_blocking_capacity_factor: float | None = None
        pad_multiple: int | None = None
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
