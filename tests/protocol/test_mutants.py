"""Every mistake that the GPU tests must find still is one change of the sources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import mutant_worker, mutants
from tests.gpu.mail_schedules import NODES
from tests.gpu.mistakes import MUTANTS, UNCHANGED
from tests.gpu.schedules import CASES

FILES = {"": "ep_protocol.pml", "MAIL_": "mail.pml", "PIPED_": "pipelines.pml"}
MODELS = {prefix: Path(__file__).with_name(name) for prefix, name in FILES.items()}
NOT_MODELED = {"MAIL_UNMASKED", "MAIL_OTHER_ORDER", "MAIL_TURN_OF_SENT", "ONE_STAGE", "FLAGS_BY_TOKENS"}
NOT_MODELED |= {"PARTS_NOT_DRAWN", "SPANS_NOT_ADDED", "EARLY_READ", "EARLY_LOOK", "RECEIVE_BARRIER"}
NOT_MODELED |= {"PIPED_EARLY_FLAG", "PIPED_RUNS_GO_ON", "PIPED_OWN_FIRST", "PIPED_NO_FENCE"}
NOT_MODELED |= {name for name in MUTANTS if name.startswith("TWINS_")}
"""What kernels make of the bytes of mails, how a rank's rows come home, and what happens inside a message, a CTA, the
ring of a pipeline or its twins, and launches that start early."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_differs_from_the_sources_where_it_says_and_compiles(name: str, tmp_path: Path) -> None:
    for one in (name, UNCHANGED):
        (tmp_path / one).mkdir()
        mutants.make_tree(one, tmp_path / one)
    edited = {edit.file for edit in MUTANTS[name].edits}
    changed = {
        path.relative_to(tmp_path / name / "cute_ep").as_posix()
        for path in (tmp_path / name).rglob("*.py")
        if path.read_bytes() != (tmp_path / UNCHANGED / path.relative_to(tmp_path / name)).read_bytes()
    }
    assert changed == edited
    for file in edited:
        source = (tmp_path / name / "cute_ep" / file).read_text()
        compile(source, file, "exec")


def test_mutants_have_names_of_the_models_and_schedules_that_exist() -> None:
    found = {prefix: re.findall(r"#define (\w+) \d+ +/\*", model.read_text()) for prefix, model in MODELS.items()}
    names = {prefix + name for prefix, listed in found.items() for name in listed}
    assert MUTANTS.keys() - NOT_MODELED <= names and not NOT_MODELED & names
    assert {mutant.schedule for mutant in MUTANTS.values()} <= CASES.keys() | NODES.keys()


def test_outcomes_are_said_when_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when all have ended: a run that is stopped has said what it found."""
    verdicts = {"EQUAL": "hung", UNCHANGED: "survived"}
    said: list[str] = []
    second = threading.Event()

    def start(folder: Path, words: Sequence[str], **environment: str) -> subprocess.Popen:
        assert folder.name == UNCHANGED or second.wait(60), "the other one has ended, and was not said"
        answer = f"print({json.dumps(json.dumps([verdicts[folder.name], 'so']))})"
        return subprocess.Popen([sys.executable, "-c", answer], stdout=-1, stderr=-1, text=True)

    def write(text: str) -> None:
        said.append(text)
        second.set()

    monkeypatch.setattr(mutant_worker, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(mutants, "make_tree", lambda name, folder: None)
    monkeypatch.setattr(mutants, "start", start)
    with monkeypatch.context() as patched:
        patched.setattr(mutants.sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
        code = mutants.main(["run", *verdicts])
    assert said == [f"{UNCHANGED:18} survived  so\n", f"{'EQUAL':18} hung      so\n"]
    assert code == 1, "it had to be found"
