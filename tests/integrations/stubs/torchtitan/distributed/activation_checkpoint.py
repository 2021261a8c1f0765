"""`torchtitan.distributed.activation_checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.config import Configurable


class SelectiveAC(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def get_save_ops(self) -> set:
        return {"an op"}
