"""How many rows of a token travel between nodes and between the GPUs of a node, by route: in closed form, and counted
in drawn routes.

The routes of dispatch (combine sends as many rows back):

- frame: every rank sends all its rows to the rank of the same place on every other node; there an ordinary dispatch
  within the node takes them on.
- rail: as frame, but only those rows go to a node that has an expert of the token.
- rank: one row straight to each rank that has an expert of the token.
- pair: one row for each (token, expert), straight to the expert's rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch

from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.errors import EPInputError
from cute_ep.testing.workloads import ROUTINGS

ROUTES = ("frame", "rail", "rank", "pair")
GROUP_CHOICES = ("blind", "best")
"""How drawn tokens choose their groups: by chance alone, which is what the closed form assumes, or those with the
highest score of an expert, as DeepEP's tests/legacy/test_internode.py does."""


def require(name: str, value: object, ok: bool, rule: str) -> None:
    """EPInputError that says name, value and rule unless `ok`."""
    if not ok:
        raise EPInputError(f"{name} = {value!r}: must be {rule}")


def require_integer(name: str, value: object, least: int, most: int) -> None:
    """EPInputError unless `value` is an integer in [least, most]."""
    require(name, value, is_integer(value) and least <= value <= most, f"an integer in [{least}, {most}]")


@dataclass(frozen=True)
class Choice:
    """How a token chooses: `top_groups` of `groups` equal groups of experts, then `top_k` distinct experts among
    those groups' experts, all with equal probability. One group is no limit; DeepSeek-V3 has 4 of 8.

    Raises:
        EPInputError: a field breaks its rule.
    """

    experts: int
    top_k: int = 8
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        require_integer("experts", self.experts, 1, 1 << 20)
        require_integer("groups", self.groups, 1, self.experts)
        require("groups", self.groups, self.experts % self.groups == 0, f"a divisor of experts = {self.experts}")
        require_integer("top_groups", self.top_groups, 1, self.groups)
        require_integer("top_k", self.top_k, 1, self.open_experts)

    @property
    def group_experts(self) -> int:
        """Experts of a group."""
        return self.experts // self.groups

    @property
    def open_experts(self) -> int:
        """Experts of the groups that a token has chosen."""
        return self.top_groups * self.group_experts

    def nests(self, part: int) -> bool:
        """Whether parts of `part` experts divide the experts, and lie within groups or consist of whole ones."""
        return part >= 1 and self.experts % part == 0 and 0 in (self.group_experts % part, part % self.group_experts)

    def hit(self, part: int) -> float:
        """Probability that a token has at least one of `part` neighbouring experts (those of a rank, or of a node).

        Among n open experts, top_k without replacement miss m of them with the hypergeometric probability
        C(n - m, top_k) / C(n, top_k); how many groups of the part a token has chosen is hypergeometric, too.

        Raises:
            EPInputError: such parts neither lie within groups nor consist of whole ones.
        """
        rule = f"experts of a part that divides groups of {self.group_experts}, or consists of whole ones"
        require("part", part, self.nests(part), rule)
        own = max(1, part // self.group_experts)
        within = min(part, self.group_experts)
        ways = comb(self.groups, self.top_groups)
        return sum(
            comb(own, chosen) * comb(self.groups - own, self.top_groups - chosen) / ways * self._hit(chosen * within)
            for chosen in range(1, min(own, self.top_groups) + 1)
        )

    def _hit(self, part: int) -> float:
        """Probability of at least one of so many open experts."""
        return 1 - comb(self.open_experts - part, self.top_k) / comb(self.open_experts, self.top_k)


@dataclass(frozen=True)
class Rows:
    """Rows of one token, on average.

    Attributes:
        network: rows that its rank sends to other nodes.
        nvlink: rows that its rank sends to other GPUs of its node; on the routes frame and rail also what it passes on,
            which is as much as others pass on for it.
        nodes: nodes that have an expert of the token, the own one included: what DeepEP's logical bandwidth counts.
        ranks: ranks that have one, likewise.
    """

    network: float
    nvlink: float
    nodes: float
    ranks: float


def expected_rows(route: str, choice: Choice, nodes: int, gpus: int) -> Rows:
    """The rows in closed form, for `nodes` nodes of `gpus` GPUs.

    Raises:
        EPInputError: an argument breaks its rule.
    """
    require("route", route, route in ROUTES, f"one of {', '.join(ROUTES)}")
    ranks = nodes * gpus
    require("experts", choice.experts, choice.experts % ranks == 0, f"a multiple of the {ranks} ranks")
    at_node, at_rank = choice.hit(choice.experts // nodes), choice.hit(choice.experts // ranks)
    passed_on = ranks * at_rank * (gpus - 1) / gpus
    network, nvlink = {
        "frame": (nodes - 1.0, passed_on),
        "rail": ((nodes - 1) * at_node, passed_on),
        "rank": ((ranks - gpus) * at_rank, (gpus - 1) * at_rank),
        "pair": (choice.top_k * (nodes - 1) / nodes, choice.top_k * (gpus - 1) / ranks),
    }[route]
    return Rows(network, nvlink, nodes * at_node, ranks * at_rank)


def draw_experts(choice: Choice, tokens: int, seed: int, chosen_by: str = GROUP_CHOICES[0]) -> torch.Tensor:
    """[tokens, top_k] int64 experts: by the uniform workload of tests and benchmarks, or within chosen groups."""
    require("chosen_by", chosen_by, chosen_by in GROUP_CHOICES, f"one of {', '.join(GROUP_CHOICES)}")
    generator = torch.Generator().manual_seed(seed)
    if choice.groups == 1:
        cfg = EPConfig(128, choice.experts, choice.top_k, 1, 1)
        return ROUTINGS["uniform"](cfg, tokens, generator)
    scores = torch.rand(tokens, choice.groups, choice.group_experts, generator=generator)
    by_group = scores.amax(2) if chosen_by == "best" else torch.rand(tokens, choice.groups, generator=generator)
    best = by_group.topk(choice.top_groups, dim=1).indices
    is_open = torch.zeros(tokens, choice.groups, dtype=torch.bool).scatter_(1, best, True)
    return scores.masked_fill_(~is_open[:, :, None], -1).flatten(1).topk(choice.top_k, dim=1).indices


def counted_rows(route: str, ids: torch.Tensor, experts: int, nodes: int, gpus: int) -> Rows:
    """The rows of drawn tokens of rank 0, whose experts `ids` [tokens, top_k] has."""
    tokens, ranks = ids.shape[0], nodes * gpus
    owner = ids // (experts // ranks)
    entries = torch.zeros(tokens, ranks).scatter_add_(1, owner, torch.ones(ids.shape))
    by_rank = (entries > 0).view(tokens, nodes, gpus)
    by_node = by_rank.any(2)
    sent = entries.view(tokens, nodes, gpus) if route == "pair" else by_rank
    network = sent[:, 1:].sum() if route in ("rank", "pair") else by_node[:, 1:].sum()
    nvlink = sent[:, 0, 1:].sum() if route in ("rank", "pair") else by_rank[:, :, 1:].sum()
    remote = nodes - 1.0 if route == "frame" else float(network) / tokens
    return Rows(remote, float(nvlink) / tokens, float(by_node.sum()) / tokens, float(by_rank.sum()) / tokens)
