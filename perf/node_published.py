"""Published times of other libraries over several nodes, and what the model says of them.

Two constants are fitted, to ten times: those of DeepEP's low-latency kernels over 16 to 256 GPUs, which DeepEP prints
in the newest version of its page. They are the network card's share of its 50 GB/s and the latency of a call; least
squares of relative errors (`perf.model.fit_constants`). All other rows test the model. A cost of each message is not
needed: the ten errors stay within 5% without one.

What the rows count (sources, all of https://github.com/deepseek-ai/DeepEP):

- V1 low latency: docs/legacy.md, dd758ca. One row for each (token, expert); 128 tokens. Times are of whole calls. In
  commit de8cfca (2025-06-05) the rows for 8 to 64 ranks changed, those for 128 and 256 stayed those of the first
  commit, ebfe47e (2025-02-24): the newer kernels write to GPUs of the node over NVLink
  (csrc/kernels/legacy/internode_ll.cu), the older ones send all rows over the network. The model has both. 288 experts
  are the default of tests/legacy/test_low_latency.py, but 16 to 256 ranks do not all divide them; on this route their
  number makes no difference.
- V1 normal: same page. One row for each (token, node), passed on over NVLink; 4096 tokens, top-4 groups. GB/s are
  logical: tests/legacy/test_internode.py counts the own node. Its groups are the nodes. The NVLink of these H800 is
  given by the page's row for 8 ranks, which counts the own rank, hence 7/8 of it. With 16 ranks it is the limit in the
  model, but a user of H200, whose NVLink is faster, has 38 to 44 GB/s as well (issue 493).
- V2: README.md, dd758ca. Same route, 8192 tokens, no groups, FP8 and BF16, "SM90". Logical, as its notes say.
- Hybrid-EP: docs/README_Hybrid-EP.md of branch hybrid-ep, 17cfb81, H100, 16 SMs, kernels only, BF16. Same route, 4096
  tokens, 8 experts a rank. Logical: tests/utils.py counts the own node "to align with" DeepEP.

Of N nodes' logical bytes, (N - 1) / N leave their node. NVLink of V2 and Hybrid-EP is not published for 8 ranks; it is
`Network.nvlink`, which H200 reach here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from perf.cells import markdown
from perf.model import Fit, fit_constants
from perf.node_model import OPERATIONS, Network, Problem, one_call_us, transfer_us
from perf.node_routes import Choice

LIMIT = 0.25
"""An error up to which a row counts as explained."""
NOMINAL = 50.0
"""GB/s of a 400 Gb/s network card, which all rows have for each GPU."""
H800 = 160.0
"""GB/s that NVLink of an H800 reaches at most, by docs/legacy.md."""
NORMAL = (153 * 7 / 8, 158 * 7 / 8)
"""GB/s that the normal kernels reach over it in dispatch and in combine."""
NOT_EXPLAINED = {
    ("Hybrid-EP", 16, "combine"): (
        "the model gives 88 GB/s, the page 63. No link explains it: with 8 SMs the page has 68, and with 32 ranks the "
        "same combine reaches the network's rate. Where stages of network and NVLink followed each other without any "
        "overlap, the model would give 50."
    ),
}
"""(library, ranks, operation) whose error exceeds LIMIT, with what is known."""


@dataclass(frozen=True)
class Published:
    """Two published values, of dispatch and of combine.

    Attributes:
        library: a short name.
        ranks: GPUs, 8 on a node.
        route: out of `perf.node_routes.ROUTES`.
        tokens: of each rank.
        formats: of both operations' rows.
        values: microseconds, or GB/s where `is_rate`.
        is_rate: whether values are logical bandwidths: bytes of a row for each (token, node), over the time.
        choice: how tokens choose experts.
        nvlink: GB/s within a node, in both operations; None: as `Network` has it.
        by_network: whether rows for the own node, too, leave over the network.
        is_fitted: whether constants come from this row.
    """

    library: str
    ranks: int
    route: str
    tokens: int
    formats: tuple[str, str]
    values: tuple[float, float]
    is_rate: bool
    choice: Choice
    nvlink: tuple[float, float] | None = None
    by_network: bool = False
    is_fitted: bool = False

    def problem(self, index: int) -> Problem:
        """What an operation, by its place in OPERATIONS, was measured with."""
        nodes, gpus = self.ranks // 8, 8
        if self.by_network:  # as if each GPU were a node
            nodes, gpus = self.ranks, 1
        return Problem(nodes, gpus, self.tokens, self.formats[index], self.choice)

    def network(self, index: int, constants: Network) -> Network:
        """The constants with this row's NVLink."""
        return constants if self.nvlink is None else replace(constants, nvlink=self.nvlink[index])

    def model(self, index: int, constants: Network) -> float:
        """What the model says, in the unit of `values`."""
        problem, operation = self.problem(index), OPERATIONS[index]
        time = one_call_us(problem, self.route, operation, self.network(index, constants))
        if not self.is_rate:
            return time
        row = problem.row_bytes("rank", operation)
        return problem.tokens * problem.rows(self.route).nodes * row / time / 1e3

    def error(self, index: int, constants: Network) -> float:
        """How far off the model is, relative to what is published."""
        return self.model(index, constants) / self.values[index] - 1


def _low_latency(name: str, ranks: int, times: tuple[float, float], by_network: bool, is_fitted: bool) -> Published:
    choice, formats = Choice(256), ("fp8", "bf16")
    return Published(name, ranks, "pair", 128, formats, times, False, choice, (H800, H800), by_network, is_fitted)


_OLDER = {8: (163, 318), 16: (173, 329), 32: (182, 350), 64: (186, 353)}
_NEWER = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
_NORMAL = {16: (43, 43), 32: (58, 57), 64: (51, 50)}
_V2 = {16: (90, 81), 32: (61, 61)}
_HYBRID = {16: (71.71, 62.95), 32: (57.69, 57.46), 64: (49.97, 49.77)}
PUBLISHED = (
    *(_low_latency("V1 low latency", ranks, own, ranks > 64, ranks > 8) for ranks, own in _NEWER.items()),
    *(_low_latency("V1 low latency, 2025-02", ranks, own, True, False) for ranks, own in _OLDER.items()),
    *(
        Published(
            "V1 normal", ranks, "rail", 4096, ("fp8", "bf16"), own, True,
            Choice(256, 8, ranks // 8, min(4, ranks // 8)), NORMAL,
        )
        for ranks, own in _NORMAL.items()
    ),
    *(Published("V2", ranks, "rail", 8192, ("fp8", "bf16"), own, True, Choice(256)) for ranks, own in _V2.items()),
    *(
        Published("Hybrid-EP", ranks, "rail", 4096, ("bf16", "bf16"), own, True, Choice(8 * ranks))
        for ranks, own in _HYBRID.items()
    ),
)  # fmt: skip


def fit_network() -> Fit:
    """The share of NOMINAL and the latency in microseconds that fit best to the rows that are fitted."""
    points = []
    for row in PUBLISHED:
        for index, operation in enumerate(OPERATIONS):
            if row.is_fitted:
                sent = row.problem(index).network_bytes(row.route, operation)
                points.append((transfer_us(sent, NOMINAL), 0.0, row.values[index], row.values[index]))
    return fit_constants(points)


def errors(constants: Network) -> Iterator[tuple[Published, int, float]]:
    """(row, place of the operation in OPERATIONS, relative error) of every published value."""
    for row in PUBLISHED:
        for index in range(len(OPERATIONS)):
            yield row, index, row.error(index, constants)


def verdict(row: Published, index: int, error: float) -> str:
    """What a table says of an error."""
    if abs(error) <= LIMIT:
        return "fitted" if row.is_fitted else "explained"
    is_known = (row.library, row.ranks, OPERATIONS[index]) in NOT_EXPLAINED
    return "**NOT EXPLAINED**" if is_known else "**FAILED**"


def failures(constants: Network) -> list[str]:
    """Values that are off by more than LIMIT and are not among NOT_EXPLAINED."""
    return [
        f"{row.library}, {row.ranks} ranks, {OPERATIONS[index]}: off by {error:+.0%}"
        for row, index, error in errors(constants)
        if verdict(row, index, error) == "**FAILED**"
    ]


def published_table(constants: Network) -> str:
    """Every published value beside the model's."""
    rows = [
        (
            row.library,
            str(row.ranks),
            OPERATIONS[index],
            row.formats[index],
            f"{row.values[index]:g} {'GB/s' if row.is_rate else 'us'}",
            f"{row.model(index, constants):.0f}",
            f"{error:+.0%}",
            verdict(row, index, error),
        )
        for row, index, error in errors(constants)
    ]
    notes = [
        f"Not explained, {name}, {ranks} ranks, {what}: {why}" for (name, ranks, what), why in NOT_EXPLAINED.items()
    ]
    head = ("library", "ranks", "operation", "format", "published", "model", "error", "verdict")
    return "\n".join([markdown(head, rows), *notes, ""])
