"""What the suite measures: shapes, formats, batch sizes and routings, grouped by what one set of communicators
serves."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.formats import formats_of

TIMEOUT_S = 30.0
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_TOKENS = (1, 16, 128, 512, 4096)
QUICK_FORMATS = ("bf16", "fp8", "nvfp4")
MEASURED_FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")
SHAPE_TOKENS = (128, 4096)
"""Tokens a rank at which the other shapes are measured."""
ZIPF_TOKENS = (16, 128, 1024, 4096)
QUICK_ZIPF_TOKENS = (128,)
BASIC = ("dispatch", "combine_exact", "combine_partial", "pair")
"""Operations of every point; the main shape's in QUICK_FORMATS have more."""
SWEEP_SMS = (8, 16, 24, 32, 48, 64, 96, 124, None)
"""SM budgets; None is all."""
SWEEP_TOKENS = (128, 1024, 4096)
SWEEP_OPERATIONS = {"bf16": ("dispatch", "combine_partial"), "fp8": ("dispatch",), "nvfp4": ("dispatch",)}
"""By format; the format makes no difference to a combine."""
CEILING_TOKENS = (1024, 4096)
"""Of SWEEP_TOKENS those at which the ceiling of so many SMs is measured: rows of fewer stay in the L2 cache."""
PEER_TOKENS = (1, 16, 128, 512, 1024, 4096, 8192)
"""Tokens a rank at which other libraries are measured, and pairs of rows in their order, by source rank."""
ORDER_TOKENS = (1, 128, 4096)
BLOCK_TOKENS = 128
"""Most tokens a rank where each local expert has a block, which has room for all tokens of all ranks."""
ORDER_OPERATIONS = {
    "expert_major": ("dispatch", "combine_exact", "combine_partial"),
    "blocks": ("dispatch", "combine_exact", "combine_partial"),
    "rank_major": ("dispatch", "combine_partial", "pair"),
}
MIRROR_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Shape:
    """A model's routed layer."""

    hidden: int
    num_experts: int
    top_k: int

    @property
    def text(self) -> str:
        """7168/256/8."""
        return f"{self.hidden}/{self.num_experts}/{self.top_k}"

    def config(self, fmt: str, ranks: int, tokens: int) -> EPConfig:
        """The deployment; EPConfigError names the rule that it breaks."""
        return EPConfig(self.hidden, self.num_experts, self.top_k, tokens, ranks, fmt, TIMEOUT_S)


MAIN = Shape(7168, 256, 8)
OTHERS = (Shape(4096, 128, 8), Shape(2880, 128, 4), Shape(7168, 384, 8))


@dataclass(frozen=True)
class Group:
    """Points of one shape and format: (tokens of a rank, routing) each."""

    shape: Shape
    format: str
    points: tuple[tuple[int, str], ...]

    @property
    def max_tokens(self) -> int:
        """Most tokens of a rank among the points."""
        return max(tokens for tokens, _ in self.points)

    def operations(self, tokens: int, routing: str) -> tuple[str, ...]:
        """What is measured at a point, out of `cute_ep.bench.measure.PARTS`."""
        if self.shape != MAIN or self.format not in QUICK_FORMATS:
            return BASIC
        if routing != "uniform":
            return (*BASIC, "pair_exact")
        conditions = ("pair_apart", "pair_roomy") if tokens in QUICK_TOKENS else ()
        return (*BASIC, "pair_exact", "pair_chained", *conditions)


def case_groups(quick: bool) -> list[Group]:
    """Every group of the suite; quick: the main shape with fewer formats and batch sizes."""
    sizes, zipf = (QUICK_TOKENS, QUICK_ZIPF_TOKENS) if quick else (TOKENS, ZIPF_TOKENS)
    points = tuple((tokens, "uniform") for tokens in sizes) + tuple((tokens, "zipf") for tokens in zipf)
    groups = [Group(MAIN, fmt, points) for fmt in (QUICK_FORMATS if quick else MEASURED_FORMATS)]
    if not quick:
        few = tuple((tokens, "uniform") for tokens in SHAPE_TOKENS)
        groups += [Group(shape, fmt, few) for shape in OTHERS for fmt in formats_of(shape.hidden, MEASURED_FORMATS)]
    return groups
