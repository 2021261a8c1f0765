"""`tests/soak` on the reference backend: it goes on where it was, finds every wrong byte, and its faults come out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.reference import backend as reference_backend
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime import connection
from cute_ep.testing.verify import POISON

from . import __main__ as soak_command
from . import faults, record
from .__main__ import main
from .batches import Segment
from .deployments import Deployment, device_sets, draw_deployment
from .faults import FAULTS, Fault, run_fault
from .group import group_of, small_config, small_input
from .programs import HALVES, draw_program
from .rounds import Outcome, run_deployment

CPUS = ("cpu", "cpu")
OF_A_PROCESS = ("fork-after-connect", "interrupts")
"""Faults that would harm the process of these tests."""
WITHOUT_GPU = [fault for fault in FAULTS if not fault.gpus and fault.name not in OF_A_PROCESS]


def soak(fmt: str = "nvfp4_row", connect: Callable = connection.connected, **changes: Any) -> Outcome:
    """Some rounds of a small deployment that has all tensors; two of the three modes are sums. changes: of its
    configuration."""
    given = small_input(2, tokens=9)
    given = replace(given, modes=given.modes | {"unweighted": torch.float32})
    cfg = replace(small_config(2, fmt), **changes)
    deployment = Deployment(0, cfg, CPUS, None, False, False, (given, replace(given, tokens=(9, 3))))
    return run_deployment(deployment, Random(1), 12, connect=connect)


def test_soak_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls, the second for more rounds, and the reproduction of a deployment."""
    out = tmp_path / "state" / "rounds.json"
    arguments = ["rounds", "--devices", "cpu:2", "--out", str(out), "--seed", "11"]
    assert main([*arguments, "--rounds", "20"]) == 0
    first = json.loads(out.read_text())
    assert (first["next"], first["wrong_bytes"], first["failures"]) == (1, 0, [])
    assert 20 <= first["rounds"] == first["kinds"]["2 ranks on 1 devices"] < 25
    assert main([*arguments, "--rounds", "40"]) == 0
    second = json.loads(out.read_text())
    assert second["next"] == 2 and 40 <= second["rounds"] < 45
    assert sum(number for kind, number in second["kinds"].items() if kind.startswith("format")) == second["rounds"]
    capsys.readouterr()
    assert main([*arguments, "--rounds", "40"]) == 0
    assert capsys.readouterr().out.startswith(f"soak: {second['rounds']} rounds of 2 deployments on the CPU in ")
    assert json.loads(out.read_text()) == second
    assert main(["rounds", "--devices", "cpu:2", "--seed", "11", "--deployment", "1", "--rounds", "5"]) == 0
    assert "0 wrong bytes" in capsys.readouterr().out


def test_state_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rounds.json"
    arguments = ["rounds", "--devices", "cpu:1", "--out", str(out), "--rounds", "3"]
    assert main([*arguments, "--seed", "1"]) == 0
    assert main([*arguments, "--seed", "2"]) == 2
    assert "'seed': 1" in capsys.readouterr().err
    out.write_text("[]")
    assert main([*arguments, "--seed", "1"]) == 2
    assert "remove it" in capsys.readouterr().err


def test_a_run_goes_on_only_with_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code, kernels, GPUs and torch are part of what a run is of; each call that added to it says where it was."""
    out = tmp_path / "rounds.json"

    def run(rounds: int) -> int:
        return main(["rounds", "--devices", "cpu:1", "--out", str(out), "--rounds", str(rounds)])

    assert run(3) == 0 and run(30) == 0
    first, second = json.loads(out.read_text())["environments"]
    assert "--rounds 3" in first["command"] and "--rounds 30" in second["command"]
    whole = record.environment
    for patched, value in (
        ("source_hash", lambda: "0"),
        ("host_hash", lambda: "0"),
        ("environment", lambda *arguments: whole(*arguments) | {"torch": "0"}),
        ("environment", lambda *arguments: whole(*arguments) | {"gpus": {"cuda:0": "another"}}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(record, patched, value)
            assert run(60) == 2
    (tmp_path / "one.py").write_text("1")
    monkeypatch.setattr(record.cute_ep, "__file__", str(tmp_path / "__init__.py"))
    assert run(60) == 2


def test_without_time_there_are_no_rounds_and_that_is_a_failure(tmp_path: Path) -> None:
    """Which is nothing good."""
    out = tmp_path / "rounds.json"
    assert main(["rounds", "--devices", "cpu:1", "--seconds", "1e-9", "--out", str(out)]) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("rounds --rounds -5", "rounds = -5: must be positive"),
        ("rounds --seconds nan", "seconds = nan: must be positive"),
        ("rounds --seconds 0", "seconds = 0: must be positive"),
        ("rounds --devices tpu:1", "devices = 'tpu:1'"),
        ("rounds --devices cpu:1 --out /dev/null/rounds.json", "out = /dev/null/rounds.json: must be a file"),
        ("rounds --devices cpu:1 --out .", "out = .: must be a file"),
        ("faults --jobs 0", "jobs = 0: must be positive"),
        ("faults --out /dev/null/faults.json", "out = /dev/null/faults.json: must be a file"),
        ("fault bad-ids", "devices = None: fault bad-ids needs --devices"),
        ("fault bad-ids --devices tpu:1", "devices = 'tpu:1'"),
        ("fault rank-late --ranks 2 --meeting x", "rank = None: fault rank-late needs --rank"),
        ("fault rank-late --rank 0 --meeting x", "ranks = None: fault rank-late needs --ranks"),
        ("fault rank-late --rank 0 --ranks 2", "meeting = None: fault rank-late needs --meeting"),
    ],
)
def test_arguments_are_refused_at_the_start(
    arguments: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*arguments: object, **options: object) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(soak_command, "run_deployment", too_late)
    monkeypatch.setattr(faults, "run_fault", too_late)
    assert main(arguments.split()) == 2
    assert told in capsys.readouterr().err


def test_faults_that_were_all_skipped_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "new" / "faults.json"
    assert main(["faults", "--only", "late", "--out", str(out)]) == 1
    assert [one["verdict"] for one in json.loads(out.read_text())["faults"]] == ["skipped"]


def test_failures_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a traceback or a path are no markup."""
    told = Outcome(rounds=1, failures=["arguments[peer] = [/no/tag]"])
    monkeypatch.setattr(soak_command, "run_deployment", lambda *arguments, **options: told)
    assert main(["rounds", "--devices", "cpu:1", "--deployment", "0"]) == 1
    assert "\narguments[peer] = [/no/tag]\n" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{}, {"row_alignment": 16, "zero_padding": False}], ids=str)
def test_right_rounds_have_no_failures(changes: dict[str, Any]) -> None:
    outcome = soak(**changes)
    assert (outcome.wrong_bytes, outcome.failures) == (0, [])
    assert outcome.rounds >= 12


@pytest.mark.parametrize(
    "name",
    ["tokens", "scales", "row_scales", "row_offsets", "row_counts", "scales_offsets", "expert_ids"]
    + ["src_info", "num_rows", "row_map", "headers", "weights"],
)
def test_a_wrong_expectation_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One bit of one expected tensor of rank 1."""
    right = Segment.view

    def compare(self: Segment, scratch: torch.Tensor, counter: torch.Tensor) -> None:
        if name in self.shapes and compare.left:
            compare.left = False
            defined = right(self, self.mask, name).view(torch.uint8).flatten().nonzero()[0, 0]
            right(self, self.expected, name).view(torch.uint8).flatten()[defined] ^= 1
        whole(self, scratch, counter)

    whole, compare.left = Segment.compare, True
    monkeypatch.setattr(Segment, "compare", compare)
    outcome = soak()
    assert outcome.wrong_bytes >= 1
    assert any(f"{name}[0" in line and "first of 1 of" in line for line in outcome.failures), outcome.failures


def test_a_wrong_byte_of_a_dispatch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that is wrong once, in one bit of the last row."""
    fill, calls = reference_backend.fill, iter(range(1000))

    def wrong(cfg: EPConfig, rank: int, sources: object, out: DispatchBuffers) -> object:
        full = fill(cfg, rank, sources, out)
        if rank == 1 and next(calls) == 5:
            out.tokens[int(out.num_rows) - 1, -1] ^= 1
        return full

    monkeypatch.setattr(reference_backend, "fill", wrong)
    outcome = soak()
    assert outcome.wrong_bytes == 1
    assert outcome.failures[0].startswith("rank 1, burst ")
    assert "tokens[" in outcome.failures[1]


def test_a_wrong_sum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator whose sums are off once, by the lowest bit of a bfloat16."""
    right, sums = reference.sum_source, iter(range(1000))

    def wrong(*arguments: object) -> torch.Tensor:
        made = right(*arguments)
        if next(sums) == 3:
            made.view(torch.int32)[0, 7] ^= 1 << 16
        return made

    monkeypatch.setattr(reference, "sum_source", wrong)
    outcome = soak()
    assert outcome.wrong_bytes == 1
    assert any("[0, 7] = 0x" in line and "first of 1 of" in line for line in outcome.failures), outcome.failures


def test_a_group_of_the_faults_tells_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all faults compare with."""
    fill = reference_backend.fill

    def wrong(cfg: EPConfig, rank: int, sources: object, out: DispatchBuffers) -> int:
        rows = fill(cfg, rank, sources, out)
        if rank == 1:
            out.src_info[0, 0] ^= 1
        return rows

    monkeypatch.setattr(reference_backend, "fill", wrong)
    with group_of(CPUS, None, small_input(2)) as group:
        with pytest.raises(AssertionError, match=r"wrong bytes by rank: \{0: 0, 1: 1\}"):
            group.round(Random(1))
        monkeypatch.undo()
        group.round(Random(1))


def test_a_store_beside_an_output_is_told() -> None:
    """Communicators that write beside their outputs, and into those of an operation that does not run."""

    @contextmanager
    def astray(*arguments: object, **options: object) -> Iterator[list]:
        with connection.connected(*arguments, **options) as communicators:
            right = communicators[1].dispatch_wait

            def wrong(pending: object, out: object = None) -> object:
                made = right(pending, out)
                made.src_info[-1, 1] = 0
                return made

            communicators[1].dispatch_wait = wrong
            yield communicators

    outcome = soak(connect=astray)
    assert any("src_info[" in line for line in outcome.failures), outcome.failures
    segment = Segment({"one": ((3,), torch.int32), "two": ((2, 5), torch.float8_e4m3fn)}, torch.device("cpu"))
    assert segment.untouched()
    segment.actual[-1] = 0
    assert not segment.untouched()
    counter = torch.zeros(1, dtype=torch.int64)
    segment.view(segment.actual, "two").view(torch.uint8)[1, 3] = 1
    segment.compare(torch.empty(segment.nbytes, dtype=torch.uint8), counter[0])
    assert segment.untouched() and counter.item() == 2
    assert segment.describe_wrong() == [
        f"two[1, 3] = 0x01, must be {POISON:#x}, first of 1 of 10 bytes",
        "1 bytes beside the tensors",
    ]


def test_a_store_after_the_last_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that writes, after its calls, into the output of one of them, which no comparison reads again."""
    segments, init = [], Segment.__init__

    def remember(self: Segment, *arguments: object) -> None:
        init(self, *arguments)
        segments.append(self)

    @contextmanager
    def astray(*arguments: object, **options: object) -> Iterator[list]:
        with connection.connected(*arguments, **options) as communicators:
            right = communicators[1].synchronize

            def wrong() -> None:
                right()
                segments[-1].view(segments[-1].actual, "unweighted")[0, 0, 0] = 1

            communicators[1].synchronize = wrong
            yield communicators

    monkeypatch.setattr(Segment, "__init__", remember)
    outcome = soak(connect=astray)
    assert outcome.failures == ["rank 1, unweighted of input set 1: written to by no call of it"]


def test_a_timeout_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: ReferenceCommunicator) -> None:
        raise EPTimeout("ROUTE_TABLE", self.rank, (1,))

    monkeypatch.setattr(ReferenceCommunicator, "synchronize", gone)
    outcome = soak()
    assert outcome.failures == ["EPTimeout: rank 0 gave up waiting in phase ROUTE_TABLE for rank(s) [1]"]
    assert not outcome.broken


def test_programs_keep_the_contract() -> None:
    """At most two halves of a phase are outstanding, received as they were sent; a batch is combined once it is there;
    a fused call has nothing outstanding. All kinds are drawn."""
    fused, halves, most = 0, 0, {"dispatch": 0, "combine": 0}
    batches = [SimpleNamespace(given=SimpleNamespace(modes=("exact", "partial", "unweighted")))] * 5
    for seed in range(300):
        program = draw_program(Random(seed), batches, 3, delays=True)
        sent: dict[str, list] = {"dispatch": [], "combine": []}
        there = set()
        for number, step in enumerate(program.steps):
            waiting = sent[step.phase]
            if step.operation in HALVES:
                joined = [number in one for one in program.fused]
                assert not any(joined) or (
                    not waiting and program.steps[number + 1].operation == HALVES[step.operation]
                )
                fused, halves = fused + sum(joined), halves + 3 - sum(joined)
                assert step.phase == "dispatch" or step.batch in there
                waiting.append(step[1:])
                most[step.phase] = max(most[step.phase], len(waiting))
            else:
                assert waiting.pop(0) == step[1:]
                there.add(step.batch)
        assert not any(sent.values()) and sorted(there) == sorted(set(program.batches))
        assert all(rank < 3 and number < len(program.steps) for rank, number in program.delays)
    assert fused and halves and most == {"dispatch": 2, "combine": 2}


def test_deployments_are_drawn_again_the_same() -> None:
    sets = [CPUS, ("cuda:0",) * 4, ("cuda:0", "cuda:1")]
    drawn = [draw_deployment(3, number, sets)[0] for number in range(200)]
    again = [draw_deployment(3, number, sets)[0] for number in range(200)]
    assert drawn == again and len(set(map(str, drawn))) == 200
    kinds = {kind for one in drawn for kind in one.kinds()}
    assert {"shared expert", "skip_a2a", "two streams", "few and many tokens", "format bf16"} <= kinds
    for one in drawn:
        waiting = one.devices.count("cuda:0") * (1 + one.streams)
        assert waiting < 2 or (one.sms is not None and one.sms * waiting <= 96)
    assert device_sets("cpu:3") == [("cpu",) * 3]


@pytest.mark.parametrize("fault", WITHOUT_GPU, ids=lambda fault: fault.name)
def test_a_fault_comes_out_as_it_must(fault: Fault) -> None:
    assert fault.act(list(CPUS), None)


@pytest.mark.parametrize("name", OF_A_PROCESS)
def test_a_fault_of_a_process_comes_out_as_it_must(name: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    verdict = run_fault(fault, None, "cpu:2")
    assert verdict.verdict == "good", verdict.seen


def test_a_process_that_ends_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "bad-ids"]
    verdict = run_fault(replace(fault, killed=True), None, "cpu:2")
    assert (verdict.verdict, verdict.seen.splitlines()[-1]) == ("wrong", "exit codes [0], must be [-9]")
    monkeypatch.setattr(faults, "LIMIT_S", 0.1)
    verdict = run_fault(fault, None, "cpu:2")
    assert verdict.verdict == "wrong" and "did not end within" in verdict.seen


def test_every_fault_says_what_must_be_seen() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(len(fault.told) > 30 for fault in FAULTS)
