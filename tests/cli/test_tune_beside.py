"""`cute-ep tune --beside` where it needs no GPU: what it refuses, the table, the advice."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.bench import beside, measure
from cute_ep.cli import tune_beside
from cute_ep.cli.common import print_table
from cute_ep.cli.main import main
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime.communicator import Communicator

MATMUL = "8192x7168x4096"
REFUSED = [
    (["8192x7168"], "beside = '8192x7168': must be ROWSxINNERxCOLUMNS"),
    (["8192x0x4096"], "positive numbers such as 8192x7168x4096"),
    (["axbxc"], "beside = 'axbxc'"),
    ([MATMUL, "--sms", "24"], "sms = 24: --beside tries budgets itself"),
    ([MATMUL, "--sms", "0"], "sms = 0: --beside tries budgets itself"),
    ([MATMUL, "--quick"], "quick: --beside measures 4096 tokens; leave it out, or name others by --tokens"),
    ([MATMUL, "--tokens", "16"], "a layer of 16 tokens has as many operations as 0.0234 such matmuls, must be 1 to 64"),
    (["128x128x128"], "as many operations as 6.88e+05 such matmuls, must be 1 to 64; name the size of your layer's"),
    ([MATMUL, "--tokens", "0"], "tokens = '0': must be positive"),
    ([MATMUL, "--format", "fp5"], "fp5"),
    ([MATMUL, "--devices", "cpu"], "devices = 'cpu': tune measures GPUs"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_wrong_arguments_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", "--beside", *words]) == 2
    assert message in capsys.readouterr().err


def test_ranks_of_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["tune", "--beside", MATMUL]) == 2
    assert (
        "devices = 'auto': are 4 ranks on fewer GPUs, must be a GPU a rank, such as cuda:0" in capsys.readouterr().err
    )


def rows(in_turn: float, *layers: tuple[int | None, float]) -> list[dict]:
    """All SMs first."""
    made = [{"sms": sms, **dict.fromkeys(tune_beside.COLUMNS, 1.0), "layer_us": us} for sms, us in layers]
    made[0]["apart_us"] = in_turn
    for row in made[1:]:
        del row["apart_us"]
    return made


ADVICE = {
    "none gains": (
        4430,
        [(None, 4503), (16, 4432)],
        "sms=None, in turn: at once a layer takes 4432 us at best, in turn 4430",
    ),
    "less than GAIN": (4430, [(None, 4503), (16, 4400)], "sms=None, in turn"),
    "all SMs gain": (4430, [(None, 4000), (16, 4100)], "sms=None, at once: at once a layer takes 4000 us at best"),
    "a budget gains": (5500, [(None, 5400), (16, 5200), (24, 5100)], "sms=24, at once: at once a layer takes 5100 us"),
}


@pytest.mark.parametrize(("in_turn", "layers", "advice"), ADVICE.values(), ids=ADVICE)
def test_the_advice_is_the_fastest_budget_that_gains(
    in_turn: float, layers: list[tuple[int | None, float]], advice: str
) -> None:
    assert tune_beside.advice(rows(in_turn, *layers), EXPERT_MAJOR).startswith(advice)


def test_the_advice_names_the_order_of_rows() -> None:
    layers = rows(5500, (None, 5400), (24, 5100))
    assert "`cute-ep tune --sms 24` finds" in tune_beside.advice(layers, EXPERT_MAJOR)
    assert "`cute-ep tune --sms 24 --order rank_major` finds" in tune_beside.advice(layers, RANK_MAJOR)


def test_a_line_for_each_budget(capsys: pytest.CaptureFixture) -> None:
    cfg = EPConfig(7168, 256, 8, 4096, 2, "bf16")
    print_table(Console(width=160), tune_beside.table_of(cfg, rows(4430, (None, 4503), (16, 4432))))
    out = capsys.readouterr().out
    assert "bf16, 4096 tokens / rank" in out
    (every,) = [line.split() for line in out.splitlines() if " all " in line]
    (some,) = [line.split() for line in out.splitlines() if " 16 " in line]
    assert "4503" in every and "4430" in every and "4432" in some and "4430" not in some


class Rounds:
    """What `measure` needs of GPUs with so many SMs: no streams, and ranks that wait for no other.

    Attributes:
        made: matmuls of a layer, of each `Beside`.
        seen: (rank, rows of buffers, operation) of each round.
        reported: what a rank raises when it is asked what its kernels reported.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int) -> None:
        self.made: list[float] = []
        self.seen: set[tuple] = set()
        self.reported: list[Exception] = []
        rounds = self

        class Beside:
            def __init__(self, highest: beside.Highest, matmul: beside.Matmul, in_layer: float) -> None:
                rounds.made.append(in_layer)
                self.sms = sms

            def pair(self, call):
                for number in range(3):
                    call(number)
                return call

            def measure(self, pair, left: int, *, in_turn: bool) -> dict[str, float]:
                return {"left": left, "in_turn": in_turn}

        monkeypatch.setattr(beside, "Beside", Beside)
        monkeypatch.setattr(measure, "run_round", self.run_round)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(ReferenceCommunicator, "synchronize", lambda rank: self.report())

    def run_round(self, communicator: Communicator, batch: measure.Batch, operation: str) -> None:
        self.seen.add((communicator.rank, batch.buffers.tokens.shape[0], operation))

    def report(self) -> None:
        for error in self.reported:
            raise error


CFG, MODEL = EPConfig(64, 8, 2, 8, 2, "bf16"), tune_beside.Preset("tiny", 64, 32, 8, 2)


def measured() -> list[dict]:
    return tune_beside.measure(CFG, MODEL, ["cpu", "cpu"], None, beside.Matmul(8, 64, 4), Console(quiet=True))


@pytest.mark.parametrize(("sms", "budgets"), [(132, tune_beside.BUDGETS), (24, (8, 16))])
def test_each_budget_that_leaves_sms_is_measured_with_one_matmul_a_rank(
    sms: int, budgets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch, sms)
    found = measured()
    assert [row["sms"] for row in found] == [None, *budgets]
    assert [row["left"] for row in found] == [0, *budgets]
    assert [row["in_turn"] for row in found] == [True] + [False] * len(budgets)
    assert rounds.made == [6 * 8 * 2 * 64 * 32 / (2 * 8 * 64 * 4)] * 2
    assert rounds.seen == {(rank, CFG.max_rows, "pair") for rank in range(2)}


def test_what_kernels_report_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run no code that would raise it: a time of launches that gave up is no time."""
    Rounds(monkeypatch, 132).reported.append(EPError("rank 0 gave up"))
    with pytest.raises(EPError, match="rank 0 gave up"):
        measured()
