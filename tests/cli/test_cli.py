"""The `cute-ep` program itself: its commands, exit codes, what it prints and logs."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from cute_ep.api.errors import EPConfigError
from cute_ep.cli import layout
from cute_ep.cli.common import bytes_text, print_table, seconds_text, step, write_json
from cute_ep.cli.main import COMMANDS, main

from .marks import ROOT, needs_no_gpu

# ---- starting


def test_help_is_fast_to_import() -> None:
    """Help, build's arguments and layouts must not wait for torch or the DSL."""
    code = (
        "import sys; from cute_ep.cli.main import make_parser, main; make_parser(); main(['layout', '(2,2):(2,1)']);"
        "assert 'torch' not in sys.modules and 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"cute-ep {command}" in capsys.readouterr().out


def test_unknown_command_is_an_argument_error() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


def test_python_m_cute_ep_is_the_same_program() -> None:
    words = [sys.executable, "-m", "cute_ep"]
    done = subprocess.run([*words, "layout", "(2,2):(2,1)"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("(2,2):(2,1)\n")
    wrong = subprocess.run([*words, "layout", "(2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.startswith("cute-ep: ")


@needs_no_gpu
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_commands_that_need_a_gpu_say_so_where_there_is_none(command: str, capsys: pytest.CaptureFixture) -> None:
    """The message names what was asked for, and nothing that was not."""
    for words in ([], ["--devices", "virtual:2"], ["--devices", "cuda:0"]):
        assert main([command, *words]) == 2
        captured = capsys.readouterr()
        assert "CUDA GPU" in captured.err and "Traceback" not in captured.err + captured.out
        assert ("devices = " in captured.err) == bool(words) and "auto" not in captured.err
        assert words[1:] == ["cuda:0"] or "verify and cute-ep demo also run on the CPU" in captured.err


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_bench_and_tune_measure_no_cpu(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([command, "--devices", "cpu"]) == 2
    assert f"{command} measures GPUs" in capsys.readouterr().err


@needs_no_gpu
def test_make_test_gpu_fails_without_a_gpu_before_it_builds_anything(tmp_path) -> None:
    """Every test would be left out there."""
    (tmp_path / "package.stamp").touch()
    words = ["make", "--no-print-directory", f"VENV={tmp_path}", f"PY={sys.executable}", "test-gpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and "test-gpu: torch finds no CUDA GPU here" in done.stderr and not done.stdout


# ---- output


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    """`| head`: neither a traceback nor the exit code of a failed comparison."""
    words = [sys.executable, "-m", "cute_ep", "layout", "(256,64):(64,1)"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "(256,64):(64,1)\n"
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 141


def test_what_is_logged_is_shown_on_standard_error_while_a_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The library alone says nothing."""
    logger = logging.getLogger("cute_ep.test")
    monkeypatch.setattr(layout, "run", lambda args, console: logger.info("%d things", 3) or logger.debug("no") or 0)
    logger.info("before")
    assert main(["layout", "2:1"]) == 0
    logger.info("after")
    assert capsys.readouterr() == ("", "cute-ep: 3 things\n")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("cute_ep").handlers)


def test_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture) -> None:
    with step(Console(width=80), "measuring") as nothing:
        assert nothing is None and capsys.readouterr().out == "measuring ...\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [20, 80])
def test_tables_wrap_between_words_and_cut_nothing(width: int, capsys: pytest.CaptureFixture) -> None:
    table = Table(title="times")
    for header in ("dispatch", "combine partial", "a slot per (expert, source, token)", "format"):
        table.add_column(header)
    table.add_row("4.73 ms", "111 us", "1.25 MiB", "nvfp4_row")
    print_table(Console(width=width), table)
    words = capsys.readouterr().out.split()
    for (
        word
    ) in "dispatch combine partial slot (expert, source, token) format 4.73 ms 111 us 1.25 MiB nvfp4_row".split():
        assert word in words, word


def test_numbers_have_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 7 << 25, 14 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "224 MiB",
        "14 GiB",
    ]
    assert [seconds_text(t) for t in (12.34e-6, 0.25, 3.0)] == ["12.3 us", "250 ms", "3 s"]


def test_files_that_cannot_be_written_are_named(tmp_path, capsys: pytest.CaptureFixture) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for path in (tmp_path, taken / "below.svg"):
        assert main(["layout", "4:1", "--svg", str(path)]) == 2
        assert f"svg='{path}':cannotbewritten(" in "".join(capsys.readouterr().err.split()), "wrapped anywhere"
        with pytest.raises(EPConfigError, match=r"json = '.*': cannot be written"):
            write_json(path, {})
    assert taken.read_text() == ""
