"""Bytes and times of dispatch and combine over several nodes, by route (`perf.node_routes`). Nothing here was measured
on a network by this project.

    exchange = latency + bytes / bandwidth of a GPU's network card

Routes rank and pair are one launch, which sends to all ranks at once: put latency + the longer of network and NVLink.
On the routes frame and rail a stage within the node follows the exchange in dispatch and precedes it in combine: node
latency + bytes / bandwidth of NVLink. Frames are encoded by a kernel and exchanged by a communication library between
two launches; rail puts rows from a kernel. On both, combine ends with a sum of a token's rows over the nodes.

*Serial* is the sum of both stages. *Overlapped* is what a batch takes where two micro batches alternate, so that one is
on the network while the other one is in the node: the longer of both stages. It neglects what the two cost each other.

What is left out: growth of latency with the number of nodes, unequal loads of ranks, adaptive routing, congestion, and
a rate of messages: published times of up to 1020 messages a call (`perf.node_published`) need none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cute_ep.api.config import EPConfig, is_number
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, message_bytes
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS_PER_RANK
from perf.cases import MAIN
from perf.node_routes import Choice, Rows, expected_rows, require, require_integer

OPERATIONS = ("dispatch", "combine")
HEADER_BYTES = 16
"""Of a frame: its round and its number of tokens, in a vector."""
ENTRY_BYTES = 4 + 4
"""Of a (token, slot) in a frame: the expert's number, int32, and its weight, float32."""


@dataclass(frozen=True)
class Network:
    """Constants of machines; rates in GB/s (1e9 bytes) of one GPU in one direction, latencies in microseconds.

    Attributes:
        bandwidth: of a GPU's network card. Fitted by `perf.node_published`: 0.90 of a 400 Gb/s card.
        put_us: all of a call that puts rows from a kernel that bytes do not explain. Fitted likewise.
        exchange_us: latency of a grouped send and receive of a communication library between nodes. Assumed: NCCL
            2.28.9 took 11 us over NVLink and 41 us over TCP in a graph on one machine (2 x H100, 2026-11-25).
        nvlink: of a stage within the node. Given: 0.87 to 0.90 of 391 GB/s, `python -m perf.model` on h200x4; NVFP4
            reaches 0.74.
        node_us: of such a stage. Given: overhead, flag and launch of the same model, 5.1 to 7.5.
        memory: bytes read and written by a kernel. Given: ceiling of h200x4.
        launch_us: an empty launch. Given: likewise.

    Raises:
        EPInputError: a field breaks its rule.
    """

    bandwidth: float = 45.0
    put_us: float = 30.0
    exchange_us: float = 30.0
    nvlink: float = 340.0
    node_us: float = 6.0
    memory: float = 3900.0
    launch_us: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_latency = field.name.endswith("_us")
            good = is_number(value) and (0 <= value if is_latency else 0 < value) and value < float("inf")
            require(field.name, value, good, f"a finite number {'>= 0' if is_latency else '> 0'}")


def experts_over(ranks: int) -> int:
    """Experts of the problem that is predicted: the fewest from 256 on that so many ranks share equally."""
    return -(-MAIN.num_experts // ranks) * ranks


@dataclass(frozen=True)
class Problem:
    """One call over `nodes` nodes of `gpus` GPUs, `tokens` tokens a rank, which a frame has room for exactly.

    Raises:
        EPInputError: a field breaks its rule.
    """

    nodes: int
    gpus: int
    tokens: int
    format: str
    choice: Choice
    hidden: int = MAIN.hidden

    def __post_init__(self) -> None:
        require_integer("nodes", self.nodes, 1, MAX_EXPERTS)
        require_integer("gpus", self.gpus, 1, MAX_RANKS)
        require_integer("tokens", self.tokens, 1, MAX_TOKENS_PER_RANK)
        require("format", self.format, self.format in FORMATS, f"one of {', '.join(FORMATS)}")

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame: header, and for each token payload, scale factors, row scale, and `top_k` entries."""
        fmt = FORMATS[self.format]
        row = fmt.payload_bytes(self.hidden) + fmt.scale_bytes(self.hidden) + fmt.row_scale_bytes
        return HEADER_BYTES + self.tokens * (row + self.choice.top_k * ENTRY_BYTES)

    def row_bytes(self, route: str, operation: str) -> float:
        """Bytes of one row: a frame's share of a token (rail too, whose rows need the same entries), a message without
        routing tables, or in combine a bfloat16 row."""
        if operation == "combine":
            return self.hidden * COMBINE_ITEMSIZE
        if route in ("frame", "rail"):
            return self.frame_bytes / self.tokens
        return message_bytes(FORMATS[self.format], self.hidden)

    def rows(self, route: str) -> Rows:
        """Rows of a token."""
        return expected_rows(route, self.choice, self.nodes, self.gpus)

    def network_bytes(self, route: str, operation: str) -> float:
        """Bytes that a rank sends to other nodes, on average."""
        return self.tokens * self.rows(route).network * self.row_bytes(route, operation)

    def nvlink_bytes(self, route: str, operation: str) -> float:
        """Bytes that a rank sends to other GPUs of its node, on average."""
        return self.tokens * self.rows(route).nvlink * self.row_bytes("rank", operation)

    def memory(self) -> int | None:
        """Bytes of a rank, `cute_ep.memory_bytes`; None beyond the package's limits."""
        ranks, experts = self.nodes * self.gpus, self.choice.experts
        shape = self.hidden, experts, self.choice.top_k, self.tokens, ranks, self.format
        try:
            return memory_bytes(EPConfig(*shape, ranks_per_node=self.gpus))
        except EPConfigError:
            return None


def transfer_us(nbytes: float, rate: float) -> float:
    """Microseconds of so many bytes at a rate in GB/s."""
    return nbytes / rate / 1e3


def one_call_us(problem: Problem, route: str, operation: str, network: Network) -> float:
    """Microseconds of a call that sends over both kinds of links at once, and on the route rail passes rows on while
    others still arrive, as DeepEP and Hybrid-EP do."""
    between = transfer_us(problem.network_bytes(route, operation), network.bandwidth)
    return network.put_us + max(between, transfer_us(problem.nvlink_bytes(route, operation), network.nvlink))


@dataclass(frozen=True)
class Times:
    """Microseconds of an operation: with two micro batches in turn, and alone."""

    overlapped: float
    serial: float


def predict_times(problem: Problem, route: str, operation: str, network: Network) -> Times:
    """The times of an operation, out of OPERATIONS, by a route, out of `perf.node_routes.ROUTES`."""
    require("operation", operation, operation in OPERATIONS, f"one of {', '.join(OPERATIONS)}")
    if route in ("rank", "pair"):
        both = one_call_us(problem, route, operation, network)
        return Times(both, both)
    between = transfer_us(problem.network_bytes(route, operation), network.bandwidth)
    between += network.exchange_us if route == "frame" else network.put_us
    within = network.node_us + transfer_us(problem.nvlink_bytes(route, operation), network.nvlink)
    plain = problem.tokens * problem.hidden * COMBINE_ITEMSIZE
    if operation == "combine":  # a last kernel reads a row for each node and writes their sum
        within += network.launch_us + transfer_us((problem.rows(route).network + 2) * plain, network.memory)
    elif route == "frame":  # a first kernel makes the frame
        between += network.launch_us + transfer_us(plain + problem.frame_bytes, network.memory)
    return Times(max(between, within), between + within)
