"""The model of several nodes: rows, bytes, published times, and where frames lose."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest

from cute_ep import EPConfig, memory_bytes
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from perf import node_model, node_published, nodes, plots
from perf.node_model import Network, Problem, experts_over, predict_times
from perf.node_published import LIMIT, NOT_EXPLAINED, OPERATIONS, PUBLISHED
from perf.node_routes import GROUP_CHOICES, ROUTES, Choice, counted_rows, draw_experts, expected_rows

PAGE = Path(__file__).parents[2] / "docs" / "nodes.md"
DEEPSEEK = Choice(256, 8, 8, 4)

# Rows


def brute_rows(route: str, tokens: list[list[int]], experts: int, count: int, gpus: int) -> tuple[float, float]:
    """(rows to other nodes, rows to other GPUs of a node) of a token of rank 0, a mean over tokens, with sets."""
    network, nvlink = [], []
    for own in tokens:
        owners = [expert * count * gpus // experts for expert in own]
        ranks = set(owners)
        places = {rank // gpus for rank in ranks}
        if route == "pair":
            network.append(sum(rank >= gpus for rank in owners))
            nvlink.append(sum(0 < rank < gpus for rank in owners))
        elif route == "rank":
            network.append(sum(rank >= gpus for rank in ranks))
            nvlink.append(sum(0 < rank < gpus for rank in ranks))
        else:
            network.append(count - 1 if route == "frame" else len(places - {0}))
            nvlink.append(sum(rank % gpus > 0 for rank in ranks))
    return mean(network), mean(nvlink)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("count", "gpus"), [(2, 3), (3, 2), (6, 1), (6, 2), (1, 4)])
def test_expected_rows_are_the_mean_over_all_choices(route: str, count: int, gpus: int) -> None:
    every = [list(one) for one in combinations(range(12), 3)]
    rows = expected_rows(route, Choice(12, 3), count, gpus)
    assert (rows.network, rows.nvlink) == pytest.approx(brute_rows(route, every, 12, count, gpus))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("count", "gpus"), [(2, 3), (2, 6), (6, 2), (12, 1)])
def test_expected_rows_of_groups_are_the_mean_over_all_choices(route: str, count: int, gpus: int) -> None:
    """Groups of 2 of 12 experts, of which a token may use 3: nodes hold 3 groups, one, or half of one."""
    chosen = [[2 * group + half for group in own for half in (0, 1)] for own in combinations(range(6), 3)]
    every = [list(one) for own in chosen for one in combinations(own, 4)]
    choice = Choice(12, 4, 6, 3)
    if not all(choice.nests(12 // parts) for parts in (count, count * gpus)):
        with pytest.raises(EPInputError, match="part = "):
            expected_rows(route, choice, count, gpus)
        return
    rows = expected_rows(route, choice, count, gpus)
    assert (rows.network, rows.nvlink) == pytest.approx(brute_rows(route, every, 12, count, gpus))


@pytest.mark.parametrize("choice", [Choice(256), DEEPSEEK], ids=["uniform", "groups"])
@pytest.mark.parametrize("count", [2, 8, 16])
def test_expected_rows_are_those_of_drawn_routes(choice: Choice, count: int) -> None:
    ids = draw_experts(choice, 2000, seed=count)
    assert all(len(set(own)) == 8 for own in ids.tolist())
    for route in ROUTES:
        counted, expected = counted_rows(route, ids, 256, count, 8), expected_rows(route, choice, count, 8)
        assert (counted.network, counted.nvlink) == pytest.approx(brute_rows(route, ids.tolist(), 256, count, 8))
        assert counted.network == pytest.approx(expected.network, rel=0.03)
        assert (counted.nodes, counted.ranks) == pytest.approx((expected.nodes, expected.ranks), rel=0.03)


def test_groups_of_the_best_experts_reach_more_nodes() -> None:
    """What the closed form does not know: a group with a good expert is likelier to be chosen and to be used."""
    blind, best = (counted_rows("rail", draw_experts(DEEPSEEK, 4000, 1, how), 256, 8, 8) for how in GROUP_CHOICES)
    assert 1.05 < best.nodes / blind.nodes < 1.12 and best.nodes < DEEPSEEK.top_groups


def test_rows_of_the_main_shape() -> None:
    found = {
        count: [expected_rows(route, Choice(256), count, 8).network for route in ROUTES] for count in (2, 4, 8, 16)
    }
    assert found[2] == pytest.approx([1, 1.00, 3.26, 4], abs=0.005)
    assert found[4] == pytest.approx([3, 2.71, 5.45, 6], abs=0.005)
    assert found[8] == pytest.approx([7, 4.63, 6.72, 7], abs=0.005)
    assert found[16] == pytest.approx([15, 6.12, 7.40, 7.5], abs=0.005)
    assert [experts_over(ranks) for ranks in (16, 24, 256, 512)] == [256, 264, 256, 512]


# Bytes and times


@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_of_frames_are_those_of_the_format_records(fmt: str) -> None:
    record = FORMATS[fmt]
    elements = 7168 * record.element.bits // 8
    scales = 0 if record.scale is None else 7168 // record.block * (record.scale.bits // 8)
    token = elements + scales + (2 if record.row_scale else 0) + 8 * (4 + 4)
    problem = Problem(4, 8, 128, fmt, Choice(256))
    assert problem.frame_bytes == 16 + 128 * token
    assert problem.network_bytes("frame", "dispatch") == pytest.approx(3 * problem.frame_bytes)
    assert problem.network_bytes("frame", "combine") == 3 * 128 * 7168 * 2


def test_times_are_sums_and_maxima_of_their_stages() -> None:
    network = Network(bandwidth=10, put_us=5, exchange_us=7, nvlink=100, node_us=3, memory=1000, launch_us=1)
    problem = Problem(2, 8, 4096, "bf16", Choice(256))
    row = 4096 * 14336
    within = 3 + row * problem.rows("frame").nvlink / 100e3
    between = 7 + problem.frame_bytes / 10e3 + 1 + (row + problem.frame_bytes) / 1000e3
    times = predict_times(problem, "frame", "dispatch", network)
    assert (times.overlapped, times.serial) == pytest.approx((max(between, within), between + within))
    times = predict_times(problem, "frame", "combine", network)
    within += 1 + 3 * row / 1000e3
    assert (times.overlapped, times.serial) == pytest.approx((7 + row / 10e3, 7 + row / 10e3 + within))
    for route in ("rank", "pair"):
        times = predict_times(problem, route, "combine", network)
        assert times.serial == times.overlapped == pytest.approx(5 + row * problem.rows(route).network / 10e3)
    slow = predict_times(problem, "pair", "combine", replace(network, nvlink=1))
    assert slow.serial == pytest.approx(5 + row * 3.5 / 1e3)


def test_memory_is_that_of_the_package() -> None:
    problem = Problem(2, 8, 4096, "fp8", Choice(256))
    assert problem.memory() == memory_bytes(EPConfig(7168, 256, 8, 4096, 16, "fp8", ranks_per_node=8))
    assert Problem(8, 8, 4096, "fp8", Choice(256)).memory() is not None
    assert Problem(16, 8, 4096, "fp8", Choice(256)).memory() is None, "nodes * tokens beyond 32768"


# Published


@pytest.mark.parametrize("index", [0, 1], ids=OPERATIONS)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.library}-{row.ranks}".replace(" ", "_"))
def test_the_model_explains_what_is_published(row: node_published.Published, index: int) -> None:
    is_explained = abs(row.error(index, Network())) <= LIMIT
    assert is_explained == ((row.library, row.ranks, OPERATIONS[index]) not in NOT_EXPLAINED)
    assert abs(row.error(index, Network())) < 0.05 or not row.is_fitted


def test_one_published_value_is_not_explained() -> None:
    assert list(NOT_EXPLAINED) == [("Hybrid-EP", 16, "combine")] and len(PUBLISHED) == 18
    table = node_published.published_table(Network())
    assert table.count("| **NOT EXPLAINED** |") == 1 and table.count("| fitted |") == 10
    assert "| V1 low latency | 16 | dispatch | fp8 | 118 us | 114 | -3% | fitted |" in table


def test_constants_are_those_that_fit() -> None:
    fit = node_published.fit_network()
    network = Network()
    assert fit.link * node_published.NOMINAL == pytest.approx(network.bandwidth)
    assert round(fit.overhead_us) == network.put_us


def test_logical_rates_count_the_own_node() -> None:
    """A network that nothing else slows down shows N / (N - 1) times its rate."""
    fast = Network(bandwidth=45, put_us=0, nvlink=1e6)
    (row,) = (one for one in PUBLISHED if (one.library, one.ranks) == ("V2", 32))
    assert row.model(1, fast) == pytest.approx(45 * 4 / 3)


# Where frames lose


def test_crossing_points() -> None:
    case, network = nodes.Case(), Network()
    dispatch = nodes.costs(case, "dispatch", "fp8", [128], network)
    assert [nodes.loses_from(case, other, dispatch["bytes"]) for other in ROUTES[1:]] == [4, 8, 9]
    combine = nodes.costs(case, "combine", "bf16", [128], network)
    assert [nodes.loses_from(case, other, combine["bytes"]) for other in ROUTES[1:]] == [4, 9, 9]
    assert nodes.loses_from(case, "rank", dispatch["time, tokens 128, serial"]) == 7
    for cost in (dispatch["bytes"], dispatch["time, tokens 128, overlapped"]):
        first = nodes.loses_from(case, "rank", cost)
        assert first is not None
        assert cost(first, "frame") > nodes.LOSES * cost(first, "rank")
        assert cost(first - 1, "frame") <= nodes.LOSES * cost(first - 1, "rank")
    assert nodes.loses_from(case, "rank", lambda count, route: 1.0) is None
    assert nodes.loses_from(case, "rank", lambda count, route: 2.0 if route == "frame" else 1.0) == 2


# The command


def test_the_command_prints_all_tables(capsys: pytest.CaptureFixture) -> None:
    assert nodes.main(["--nodes", "2", "16", "--tokens", "128", "4096", "--formats", "fp8", "nvfp4"]) == 0
    text = capsys.readouterr().out
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## Published",
        "## Constants of the predictions",
        "## Rows",
        "## Summary",
        "## Dispatch fp8",
        "## Dispatch nvfp4",
        "## Combine bf16",
        "## Where frames lose",
    ]
    assert text.startswith("Nothing below was measured on a network") and "FAILED" not in text
    assert "| 16 | 4096 | 458" in text and "| put_us | 30 |" in text


def test_the_page_has_the_numbers_of_the_command() -> None:
    page = PAGE.read_text()
    assert nodes.summary_table(nodes.Case(), [2, 4, 8, 64], Network()) in page
    assert "python -m perf.nodes" in page and "2026-11-26" in page


def test_constants_of_the_command_leave_the_published_table_alone(capsys: pytest.CaptureFixture) -> None:
    slow = ["--nodes", "2", "--tokens", "128", "--formats", "fp8", "--bandwidth", "11"]
    assert nodes.main(slow) == 0
    text = capsys.readouterr().out
    assert node_published.published_table(Network()) in text and "| bandwidth | 11 |" in text


def test_a_value_that_is_off_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(node_published, "NOT_EXPLAINED", {})
    assert nodes.main(["--nodes", "2", "--tokens", "1", "--formats", "bf16"]) == 1
    text = capsys.readouterr().out
    assert "| **FAILED** |" in text and "FAILED: Hybrid-EP, 16 ranks, combine: off by +40%" in text


@pytest.mark.skipif(not plots.have_matplotlib(), reason="needs matplotlib")
def test_a_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "nodes.svg"
    assert nodes.main(["--nodes", "2", "4", "--tokens", "128", "--formats", "fp8", "--plot", str(path)]) == 0
    assert str(path) in capsys.readouterr().out and "nodes of 8 GPUs" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--nodes 65", "nodes = 65: must be an integer in [2, 64]"),
        ("--nodes 1", "nodes = 1: must be an integer in [2, 64]"),
        ("--gpus 0", "gpus = 0: must be an integer in [1, 16]"),
        ("--tokens 32769", "tokens = 32769: must be an integer in [1, 32768]"),
        ("--formats fp9", "format = 'fp9': must be one of bf16, fp8,"),
        ("--bandwidth 0", "bandwidth = 0.0: must be a finite number > 0"),
        ("--nvlink nan", "nvlink = nan: must be a finite number > 0"),
        ("--put-us -1", "put_us = -1.0: must be a finite number >= 0"),
        ("--groups 3", "groups = 3: must be a divisor of experts = 256"),
        ("--groups 8 --top-groups 9", "top_groups = 9: must be an integer in [1, 8]"),
        ("--nodes 3 --groups 8 --top-groups 4", "nodes = 3: must be a number of nodes that hold whole groups"),
        ("--plot x.png", "plot = 'x.png': must be a file name that ends in .svg"),
    ],
)
def test_wrong_arguments_say_name_value_and_rule(arguments: str, text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        nodes.main(arguments.split())
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_wrong_names_are_refused() -> None:
    problem = Problem(2, 8, 1, "bf16", Choice(256))
    with pytest.raises(EPInputError, match="operation = 'gather': must be one of dispatch, combine"):
        predict_times(problem, "frame", "gather", Network())
    with pytest.raises(EPInputError, match="route = 'ring': must be one of frame, rail, rank, pair"):
        problem.rows("ring")
    with pytest.raises(EPInputError, match="experts = 100: must be a multiple of the 16 ranks"):
        node_model.Problem(2, 8, 1, "bf16", Choice(100)).rows("rail")
