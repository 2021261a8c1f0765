"""Predicts dispatch and combine over several nodes, without a GPU: published times of other libraries beside the
model's, rows and bytes by route, times and memory of this project's frames, and from how many nodes frames lose.

`perf.node_model` says what the model is, `perf.node_routes` what routes are, `perf.node_published` what its constants
were fitted to. Constants that are given here hold for predictions only. The exit status is 1 where a published value is
off by more than 25% and not known to be.

python -m perf.nodes [--nodes 2 4 8] [--tokens 128] [--formats fp8] [--bandwidth 45] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from cute_ep.api.errors import EPInputError
from perf.cases import MAIN
from perf.cells import markdown
from perf.node_model import OPERATIONS, Network, Problem, experts_over, predict_times
from perf.node_published import NOMINAL, failures, fit_network, published_table
from perf.node_routes import ROUTES, Choice, counted_rows, draw_experts, expected_rows, require, require_integer
from perf.plots import have_matplotlib, panels, pyplot_for_svg, write_svg

MOST_NODES = 64
LOSES = 1.05
"""Frames lose where they take more than this many times what another route takes."""
DRAWN_TOKENS = 4096
ROUTE_COLORS = dict(zip(ROUTES, ("#1f4e79", "#2e8b57", "#c0792a", "#777777"), strict=True))
ORIGINS = {
    "bandwidth": "GB/s of a network card, fitted: 0.90 of 50 GB/s",
    "put_us": "latency of a call that puts from a kernel, fitted",
    "exchange_us": "latency of a library's exchange, assumed: NCCL took 11 over NVLink, 41 over TCP on one machine",
    "nvlink": "GB/s within the node, given: perf.model on h200x4, NVFP4 reaches 290",
    "node_us": "latency of a stage in the node, given: perf.model on h200x4, 5.1 to 7.5",
    "memory": "GB/s of a kernel's reads and writes, given: ceiling of h200x4",
    "launch_us": "an empty launch, given: ceiling of h200x4",
}
"""Fields of Network: what they are and where they come from."""


@dataclass(frozen=True)
class Case:
    """What is predicted: nodes of `gpus` GPUs, and a limit to groups of experts (1, 1: none)."""

    gpus: int = 8
    groups: int = 1
    top_groups: int = 1

    def choice(self, nodes: int) -> Choice:
        """How tokens choose, top-8 of at least 256 experts."""
        return Choice(experts_over(nodes * self.gpus), MAIN.top_k, self.groups, self.top_groups)

    def problem(self, nodes: int, tokens: int, fmt: str) -> Problem:
        """A call over so many nodes."""
        require_integer("nodes", nodes, 2, MOST_NODES)
        return Problem(nodes, self.gpus, tokens, fmt, self.choice(nodes))

    def fits(self, nodes: int) -> bool:
        """Whether the experts divide into groups, and nodes and ranks lie within groups or consist of whole ones."""
        try:
            choice = self.choice(nodes)
        except EPInputError:
            return False
        return all(choice.nests(choice.experts // parts) for parts in (nodes, nodes * self.gpus))


def constants_table(network: Network) -> str:
    """The constants, what they are, and where they come from."""
    rows = [(field.name, f"{getattr(network, field.name):g}", ORIGINS[field.name]) for field in fields(network)]
    return markdown(("constant", "value", "what and from where"), rows)


def rows_table(case: Case, nodes: Sequence[int]) -> str:
    """Remote rows of a token by route: in closed form, and in drawn routes in brackets."""
    rows = []
    for count in nodes:
        choice = case.choice(count)
        ids = draw_experts(choice, DRAWN_TOKENS, count, "best")
        cells = [
            f"{expected_rows(route, choice, count, case.gpus).network:.2f} "
            f"({counted_rows(route, ids, choice.experts, count, case.gpus).network:.2f})"
            for route in ROUTES
        ]
        rows.append((str(count), str(choice.experts), *cells))
    return markdown(("nodes", "experts", *ROUTES), rows)


def time_cell(problem: Problem, route: str, operation: str, network: Network) -> str:
    """Serial / overlapped microseconds; one number where there is one stage."""
    times = predict_times(problem, route, operation, network)
    return f"{times.serial:.0f} / {times.overlapped:.0f}" if route in ("frame", "rail") else f"{times.serial:.0f}"


def memory_cell(problem: Problem) -> str:
    """GiB of a rank; "" where the package does not take the call."""
    memory = problem.memory()
    return "" if memory is None else f"{memory / 2**30:.2f}"


def summary_table(case: Case, nodes: Sequence[int], network: Network) -> str:
    """Microseconds of dispatch in fp8 and of combine of 128 tokens, as docs/nodes.md has them."""
    shown = [(operation, route) for operation in OPERATIONS for route in ("frame", "rank")]
    rows = []
    for count in nodes:
        problem = case.problem(count, 128, "fp8")
        cells = [time_cell(problem, route, operation, network) for operation, route in shown]
        rows.append((str(count), *cells, memory_cell(problem)))
    names = [f"{operation} {'fp8' if operation == 'dispatch' else 'bf16'}, {route}" for operation, route in shown]
    return markdown(("nodes", *names, "GiB"), rows)


def times_table(
    case: Case, operation: str, fmt: str, nodes: Sequence[int], tokens: Sequence[int], network: Network
) -> str:
    """MB that leave a rank for other nodes and microseconds, by route; GiB of a rank's memory."""
    rows = []
    for count in nodes:
        for size in tokens:
            problem = case.problem(count, size, fmt)
            sent = [f"{problem.network_bytes(route, operation) / 1e6:.4g}" for route in ROUTES]
            times = [time_cell(problem, route, operation, network) for route in ROUTES]
            rows.append((str(count), str(size), *sent, *times, memory_cell(problem)))
    head = ("nodes", "tokens", *(f"{name}, MB" for name in ROUTES), *(f"{name}, us" for name in ROUTES), "GiB")
    return markdown(head, rows)


def loses_from(case: Case, other: str, cost: Callable[[int, str], float]) -> int | None:
    """The fewest nodes from which on, up to MOST_NODES, frames cost more than LOSES times another route; None: there
    are none. `cost` is asked for nodes and route."""
    found = None
    for nodes in range(MOST_NODES, 1, -1):
        if case.fits(nodes):
            if cost(nodes, "frame") <= LOSES * cost(nodes, other):
                break
            found = nodes
    return found


def costs(
    case: Case, operation: str, fmt: str, tokens: Sequence[int], network: Network
) -> dict[str, Callable[[int, str], float]]:
    """What an operation costs over so many nodes by a route, by the name of the measure."""

    def sent(nodes: int, route: str) -> float:
        """Bytes on the network, of so many tokens that a frame's header does not matter."""
        return case.problem(nodes, DRAWN_TOKENS, fmt).network_bytes(route, operation)

    def time(size: int, overlapped: bool, nodes: int, route: str) -> float:
        """Microseconds."""
        times = predict_times(case.problem(nodes, size, fmt), route, operation, network)
        return times.overlapped if overlapped else times.serial

    found: dict[str, Callable[[int, str], float]] = {"bytes": sent}
    for size in tokens:
        for overlapped, name in ((False, "serial"), (True, "overlapped")):
            found[f"time, tokens {size}, {name}"] = partial(time, size, overlapped)
    return found


def losses_table(case: Case, formats: Sequence[str], tokens: Sequence[int], network: Network) -> str:
    """From how many nodes frames lose against each other route."""
    rows = []
    for operation, fmt in operations_of(formats):
        for name, cost in costs(case, operation, fmt, tokens, network).items():
            cells = [loses_from(case, other, cost) for other in ROUTES[1:]]
            rows.append((operation, fmt, name, *("never" if cell is None else str(cell) for cell in cells)))
    return markdown(("operation", "format", "measure", *(f"against {other}" for other in ROUTES[1:])), rows)


def operations_of(formats: Sequence[str]) -> list[tuple[str, str]]:
    """(operation, format) of every table: dispatch in each format, and combine, whose rows are bfloat16."""
    return [("dispatch", fmt) for fmt in formats] + [("combine", "bf16")]


def draw_times(plt, case: Case, formats: Sequence[str], nodes: Sequence[int], tokens: Sequence[int], network: Network):
    """Times over nodes by route; solid: serial, dashed: overlapped."""
    shown = [(size, *one) for size in tokens for one in operations_of(formats[:1])]
    figure, axes = panels(plt, len(shown), 3.6)
    for axis, (size, operation, fmt) in zip(axes, shown, strict=True):
        for route, color in ROUTE_COLORS.items():
            times = [predict_times(case.problem(count, size, fmt), route, operation, network) for count in nodes]
            axis.plot(nodes, [one.serial for one in times], "o-", color=color, markersize=3, linewidth=1, label=route)
            axis.plot(nodes, [one.overlapped for one in times], "--", color=color, linewidth=0.8)
        axis.set_xscale("log", base=2)
        low, high = axis.dataLim.intervaly
        if high < 10 * low:  # a logarithmic axis may have no label then
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
        axis.set_xticks(nodes, [str(count) for count in nodes])
        axis.minorticks_off()
        axis.set_xlabel(f"nodes of {case.gpus} GPUs")
        axis.set_title(f"{operation} {fmt}, tokens {size}", fontsize=9)
    axes[0].set_ylabel("us, predicted")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def page(case: Case, nodes: Sequence[int], tokens: Sequence[int], formats: Sequence[str], network: Network) -> str:
    """All tables."""
    fit = fit_network()
    at = f"nodes of {case.gpus} GPUs, hidden {MAIN.hidden}, top-{MAIN.top_k}"
    text = "us: serial / overlapped, one number for one stage; GiB of memory where the package takes the call"
    parts = [
        "Nothing below was measured on a network by this project.\n",
        f"## Published\n\nFitted: {fit.link:.2f} of {NOMINAL:g} GB/s and {fit.overhead_us:.1f} us. GB/s are logical.\n",
        published_table(Network()),
        "## Constants of the predictions\n",
        constants_table(network),
        f"## Rows\n\nRows of a token that leave its node, {at}; in brackets those of {DRAWN_TOKENS} drawn "
        "tokens, whose groups, if there are any, are those of their best experts.\n",
        rows_table(case, nodes),
        f"## Summary\n\nOf a rank, {at}. {text}.\n",
        summary_table(case, nodes, network),
    ]
    for operation, fmt in operations_of(formats):
        parts += [f"## {operation.capitalize()} {fmt}\n\nOf a rank, {at}. {text}.\n"]
        parts += [times_table(case, operation, fmt, nodes, tokens, network)]
    parts += [
        f"## Where frames lose\n\nThe number of nodes, 2 to {MOST_NODES}, from which on frames take more than {LOSES} "
        "times what another route takes.\n",
        losses_table(case, formats, tokens, network),
    ]
    return "\n".join(parts)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m perf.nodes", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="2 to 64 each")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node (default: 8)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 4096], help="of a rank in a call")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "nvfp4"], help="of dispatched rows")
    parser.add_argument("--groups", type=int, default=1, help="groups of experts (DeepSeek-V3: 8)")
    parser.add_argument("--top-groups", type=int, default=1, help="of them, how many a token may use (DeepSeek-V3: 4)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw times over nodes, with matplotlib")
    for field in fields(Network):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=float, default=field.default, help=f"{ORIGINS[field.name]} (%(default)s)")
    return parser, parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser, given = parse(arguments)
    try:
        network = Network(**{field.name: getattr(given, field.name) for field in fields(Network)})
        require_integer("gpus", given.gpus, 1, 16)
        case = Case(given.gpus, given.groups, given.top_groups)
        for count in given.nodes:
            for size in given.tokens:
                for fmt in given.formats:
                    case.problem(count, size, fmt)
            rule = f"a number of nodes that hold whole groups of experts (of {case.groups}), or equal parts of one"
            require("nodes", count, case.fits(count), rule)
        is_svg = given.plot is None or (given.plot.suffix == ".svg" and given.plot.parent.is_dir())
        require("plot", str(given.plot), is_svg, "a file name that ends in .svg, in a folder that exists")
    except EPInputError as error:
        parser.error(str(error))
    print(page(case, given.nodes, given.tokens, given.formats, network))  # noqa: T201
    if given.plot is not None:
        if not have_matplotlib():
            parser.error("plot: matplotlib is missing (pip install -e .[perf])")
        pyplot = pyplot_for_svg()
        figure = draw_times(pyplot, case, given.formats, given.nodes, given.tokens, network)
        write_svg(pyplot, figure, given.plot)
        print(given.plot)  # noqa: T201
    failed = failures(Network())
    for line in failed:
        print(f"FAILED: {line}")  # noqa: T201
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
