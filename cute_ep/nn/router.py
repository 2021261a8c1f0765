"""Routers: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_ep.api.config import is_integer, is_number
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.torch_internals import Movable

Score = Literal["softmax", "sigmoid"]
SCORES = ("softmax", "sigmoid")
BEST_OF_GROUP = 2
"""With a correction a group's score is the sum of this many of its best experts' (DeepSeek-V3)."""
TINY = 1e-20
"""Added to the sum that weights are divided by, which may be zero."""


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        topk_ids: [T, top_k] int64; of an own router -1 masks an entry.
        router_weights: [T, top_k] float32.
    """

    topk_ids: Tensor
    router_weights: Tensor


class Router(Movable):
    """Top-k of softmax or sigmoid scores, computed in float32 whatever the types of tokens and parameters are.

    s = softmax or sigmoid of (x @ weight.T + bias). With c = s + correction, the experts are the top_k of c, with
    groups among the `topk_group` best of `n_group` groups of neighbouring experts. A group's score is the sum of its
    two largest c with a correction, else its largest (as in DeepSeek-V3 and V2). Weights are s of these experts, with
    `renormalize` divided by their sum, then times `scale`.

    Some models: Qwen3 and Mixtral `renormalize=True`; gpt-oss that and `bias=True`; DeepSeek-V3 `score="sigmoid",
    correction=True, renormalize=True, n_group=8, topk_group=4, scale=2.5`.

    Attributes:
        weight: [num_experts, hidden] parameter, the same on all ranks.
        bias: [num_experts] parameter, or None.
        correction: [num_experts] float32 buffer, or None. It stays float32 when the module's type changes, takes part
            in choosing only and gets no gradient: change it between steps, on all ranks alike.

    Args:
        hidden, num_experts, top_k: as in `EPConfig`.
        score: what makes scores of logits.
        renormalize: whether a token's weights add up to `scale`.
        bias: whether logits have a bias.
        correction: whether there is one; begins as zeros.
        n_group, topk_group: groups of experts, and those that a token may use.
        scale: factor of all weights.
        device, dtype: of the parameters.

    Raises:
        EPConfigError: an argument breaks its rule.
    """

    bias: Tensor | None
    correction: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        renormalize: bool = False,
        bias: bool = False,
        correction: bool = False,
        n_group: int = 1,
        topk_group: int = 1,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        for name, value in (("hidden", hidden), ("num_experts", num_experts), ("n_group", n_group)):
            if not (is_integer(value) and value >= 1):
                raise EPConfigError(f"{name} = {value!r}: must be a positive integer")
        if score not in SCORES:
            raise EPConfigError(f"score = {score!r}: must be one of {', '.join(SCORES)}")
        least = BEST_OF_GROUP if correction and n_group > 1 else 1
        if num_experts % n_group or num_experts // n_group < least:
            rule = f"must divide num_experts = {num_experts} into groups of at least {least}"
            raise EPConfigError(f"n_group = {n_group}: {rule}")
        if not (is_integer(topk_group) and 1 <= topk_group <= n_group):
            raise EPConfigError(f"topk_group = {topk_group!r}: must be an integer in [1, n_group = {n_group}]")
        most = num_experts // n_group * topk_group
        if not (is_integer(top_k) and 1 <= top_k <= most):
            raise EPConfigError(f"top_k = {top_k!r}: must be an integer in [1, {most}], the experts that may be chosen")
        if not is_number(scale) or not 0 < scale < float("inf"):
            raise EPConfigError(f"scale = {scale!r}: must be a positive number")
        self.hidden, self.num_experts, self.top_k = int(hidden), int(num_experts), int(top_k)
        self.score, self.renormalize, self.scale = score, renormalize, float(scale)
        self.n_group, self.topk_group = int(n_group), int(topk_group)
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        parameter = torch.nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", parameter)
        buffer = torch.empty(num_experts, device=device, dtype=torch.float32) if correction else None
        self.register_buffer("correction", buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from torch's default generator, of standard deviation hidden ** -0.5; zero the others."""
        with torch.no_grad():
            self.weight.normal_(std=self.hidden**-0.5)
            for vector in (self.bias, self.correction):
                if vector is not None:
                    vector.zero_()

    def forward(self, x: Tensor) -> Routing:
        """The experts of each token; differentiable in `x`, `weight` and `bias` through the weights.

        Args:
            x: [T, hidden], of any floating type.

        Raises:
            EPInputError: `x` has another shape.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise EPInputError(f"x.shape = {tuple(x.shape)}: must be [tokens, hidden = {self.hidden}]")
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            logits = F.linear(x.float(), self.weight.float(), bias)
            scores = logits.softmax(dim=1) if self.score == "softmax" else logits.sigmoid()
            ids = self._choose(scores.detach())
            weights = scores.gather(1, ids)
            if self.renormalize:
                weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
            return Routing(ids, weights * self.scale)

    def _choose(self, scores: Tensor) -> Tensor:
        """[T, top_k] int64 of [T, num_experts] scores."""
        choice = scores if self.correction is None else scores + self.correction
        if self.topk_group < self.n_group:
            grouped = choice.unflatten(1, (self.n_group, -1))
            best = grouped.amax(2) if self.correction is None else grouped.topk(BEST_OF_GROUP, dim=2).values.sum(2)
            chosen = best.topk(self.topk_group, dim=1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
            choice = grouped.masked_fill(closed[:, :, None], -torch.inf).flatten(1)
        return choice.topk(self.top_k, dim=1).indices

    @contextmanager
    def moving(self) -> Iterator[None]:
        kept = self.correction
        yield
        moved = self.correction
        if kept is not None and moved is not None and moved.dtype != kept.dtype:
            self.correction = kept.to(moved.device)

    def extra_repr(self) -> str:
        groups = f", {self.topk_group} of {self.n_group} groups" if self.n_group > 1 else ""
        how = f"{self.score}{', renormalized' if self.renormalize else ''}, scale {self.scale:g}"
        return f"top {self.top_k} of {self.num_experts}{groups}, {how}"
