"""Deployments and batches that the tests of the reference and of the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.config import EPConfig
from cute_ep.workloads import RankInputs, make_inputs


@dataclass(frozen=True)
class Case:
    """One deployment and one batch. `tokens` has one entry a rank."""

    hidden: int
    num_experts: int
    top_k: int
    max_tokens: int
    tokens: tuple[int, ...]
    fmt: str
    routing: str
    seed: int = 0

    @property
    def id(self) -> str:
        return (
            f"{self.fmt}-h{self.hidden}-e{self.num_experts}-k{self.top_k}-r{len(self.tokens)}"
            f"-t{'.'.join(map(str, self.tokens))}of{self.max_tokens}-{self.routing}"
        )

    @property
    def cfg(self) -> EPConfig:
        return EPConfig(
            hidden=self.hidden,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.max_tokens,
            world_size=len(self.tokens),
            dispatch_format=self.fmt,
        )

    def inputs(self) -> list[RankInputs]:
        return make_inputs(self.cfg, self.tokens, self.routing, self.seed)


CASES = (
    # one rank, one expert, one token: every extent is 1
    Case(8, 1, 1, 1, (1,), "bf16", "uniform"),
    Case(32, 1, 1, 1, (1,), "nvfp4", "uniform"),
    # no tokens at all, and none on the first, a middle and the last rank
    Case(96, 8, 3, 4, (0, 0), "nvfp4", "uniform"),
    Case(64, 8, 2, 16, (0, 16), "bf16", "uniform"),
    Case(32, 12, 3, 9, (9, 0, 5), "nvfp4", "zipf"),
    Case(96, 16, 4, 40, (40, 17, 3, 0), "nvfp4", "masked"),
    # scale columns that are no whole atom, hidden that is no multiple of 128
    Case(96, 6, 2, 130, (130, 129), "nvfp4", "uniform"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "nvfp4", "uniform"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "bf16", "masked"),
    # expert row counts around the 128-row block
    Case(64, 4, 1, 128, (128, 128), "nvfp4", "one_expert"),
    Case(64, 4, 1, 128, (0, 128), "nvfp4", "one_expert"),
    Case(64, 4, 2, 129, (129, 0), "nvfp4", "one_expert"),
    # the worst case of one receiver, every rank full
    Case(256, 16, 4, 64, (64, 64, 64, 64), "nvfp4", "one_rank"),
    Case(256, 16, 8, 64, (64, 64, 64, 64), "bf16", "one_rank"),
    # top_k above the experts of a rank, top_k equal to all experts
    Case(128, 8, 8, 11, (11, 10, 9, 8, 7, 6, 5, 4), "bf16", "one_rank"),
    Case(128, 8, 8, 20, (20, 1), "nvfp4", "zipf"),
    Case(7168, 64, 8, 48, (48, 1, 31, 16), "nvfp4", "uniform"),
    Case(7168, 64, 8, 48, (48, 1, 31, 16), "bf16", "zipf"),
    Case(1024, 256, 32, 24, (24, 23), "nvfp4", "masked"),
)
