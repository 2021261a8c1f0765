"""Deployments and batches that the tests of the reference and of the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.api.config import EPConfig
from cute_ep.testing.workloads import RankInputs, make_inputs


@dataclass(frozen=True)
class Case:
    """One deployment and one batch. `tokens` has one entry a rank, all the same with `skip`.

    `layout` and `alignment` are the configuration's `scale_layout` and `row_alignment`; `shared` and `skip` turn on a
    fused shared expert and `skip_a2a`.
    """

    hidden: int
    num_experts: int
    top_k: int
    max_tokens: int
    tokens: tuple[int, ...]
    fmt: str
    routing: str
    seed: int = 0
    layout: str | None = None
    alignment: int | None = None
    shared: bool = False
    skip: bool = False

    @property
    def id(self) -> str:
        options = [self.layout, self.alignment and f"a{self.alignment}", self.shared and "shared", self.skip and "skip"]
        return "-".join([
            f"{self.fmt}-h{self.hidden}-e{self.num_experts}-k{self.top_k}-r{len(self.tokens)}",
            f"t{'.'.join(map(str, self.tokens))}of{self.max_tokens}-{self.routing}",
            *(option for option in options if option),
        ])  # fmt: skip

    @property
    def cfg(self) -> EPConfig:
        return EPConfig(
            hidden=self.hidden,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.max_tokens,
            world_size=len(self.tokens),
            dispatch_format=self.fmt,
            scale_layout=self.layout,
            row_alignment=self.alignment,
            fused_shared_expert=self.shared,
            skip_a2a=self.skip,
        )

    def inputs(self) -> list[RankInputs]:
        return make_inputs(self.cfg, self.tokens, self.routing, self.seed)


CASES = (
    # one rank, one expert, one token: every extent is 1
    Case(8, 1, 1, 1, (1,), "bf16", "uniform"),
    Case(32, 1, 1, 1, (1,), "nvfp4", "uniform"),
    Case(128, 1, 1, 1, (1,), "fp8", "uniform", alignment=128, shared=True),
    Case(32, 1, 1, 1, (1,), "mxfp8", "uniform", shared=True, skip=True),
    # no tokens at all, and none on the first, a middle and the last rank
    Case(96, 8, 3, 4, (0, 0), "nvfp4", "uniform"),
    Case(128, 8, 3, 4, (0, 0), "fp8_pow2", "uniform", alignment=16, shared=True),
    Case(64, 8, 2, 16, (0, 16), "bf16", "uniform"),
    Case(32, 12, 3, 9, (9, 0, 5), "nvfp4", "zipf"),
    Case(96, 12, 3, 9, (9, 0, 5), "mxfp4", "zipf", alignment=8, shared=True),
    Case(96, 16, 4, 40, (40, 17, 3, 0), "nvfp4", "masked"),
    Case(96, 16, 4, 40, (40, 17, 3, 0), "nvfp4_row", "masked", alignment=8, shared=True),
    # scale columns that are no whole atom or word, hidden that is no multiple of 128
    Case(96, 6, 2, 130, (130, 129), "nvfp4", "uniform"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "nvfp4", "uniform"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "bf16", "masked"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "mxfp8", "uniform", layout="linear", alignment=64),
    Case(96, 6, 2, 20, (20, 19), "mxfp4", "uniform", layout="linear"),
    Case(32, 6, 2, 20, (20, 19), "nvfp4_row", "uniform", layout="linear", alignment=4),
    Case(384, 6, 2, 20, (20, 19), "fp8", "uniform", layout="linear"),
    Case(384, 6, 2, 20, (20, 19), "fp8_pow2", "uniform", alignment=8),
    Case(192, 6, 2, 130, (130, 129), "mxfp6_e2m3", "uniform"),
    Case(2880, 32, 4, 33, (33, 7, 0, 20), "mxfp6_e3m2", "masked", alignment=8, shared=True),
    Case(192, 6, 2, 20, (20, 19), "mxfp6_e3m2", "uniform", layout="linear"),
    # expert row counts around the 128-row block
    Case(64, 4, 1, 128, (128, 128), "nvfp4", "one_expert"),
    Case(64, 4, 1, 128, (0, 128), "nvfp4", "one_expert"),
    Case(64, 4, 2, 129, (129, 0), "nvfp4", "one_expert"),
    Case(64, 4, 2, 129, (129, 0), "mxfp4", "one_expert", alignment=128),
    Case(64, 4, 2, 129, (129, 129), "mxfp8", "one_expert", alignment=16, shared=True, skip=True),
    # the worst case of one receiver, every rank full
    Case(256, 16, 4, 64, (64, 64, 64, 64), "nvfp4", "one_rank"),
    Case(256, 16, 8, 64, (64, 64, 64, 64), "bf16", "one_rank"),
    Case(256, 16, 4, 64, (64, 64, 64, 64), "fp8", "one_rank", shared=True),
    # top_k above the experts of a rank, top_k equal to all experts
    Case(128, 8, 8, 11, (11, 10, 9, 8, 7, 6, 5, 4), "bf16", "one_rank"),
    Case(128, 8, 8, 20, (20, 1), "nvfp4", "zipf"),
    # an expert more than once in a token
    Case(128, 8, 4, 20, (20, 7), "bf16", "repeated"),
    Case(256, 12, 3, 30, (30, 0, 11), "nvfp4_row", "repeated", shared=True),
    # every rank alone: tokens that do not divide among the ranks, none at all, fewer than ranks
    Case(128, 8, 3, 20, (17,) * 4, "bf16", "masked", shared=True, skip=True),
    Case(64, 8, 3, 20, (0,) * 4, "nvfp4", "uniform", shared=True, skip=True),
    Case(128, 8, 3, 20, (3,) * 4, "fp8", "uniform", shared=True, skip=True),
    Case(128, 8, 8, 20, (20,) * 2, "nvfp4_row", "zipf", alignment=8, skip=True),
    Case(7168, 64, 8, 48, (48, 1, 31, 16), "nvfp4", "uniform"),
    Case(7168, 64, 8, 48, (48, 1, 31, 16), "bf16", "zipf"),
    Case(7168, 64, 8, 48, (48, 1, 31, 16), "fp8", "zipf", shared=True),
    Case(7168, 64, 8, 24, (24, 1, 13, 16), "nvfp4_row", "uniform"),
    Case(1024, 256, 32, 24, (24, 23), "nvfp4", "masked"),
)
