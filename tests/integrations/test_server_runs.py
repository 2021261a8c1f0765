"""Rounds of requests to several servers, and what is said of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import servers
from tests.integrations.server_load import Answer, Request, Round, Said, draw_requests
from tests.integrations.server_process import ServerError, healthy
from tests.integrations.server_runs import Case, Outcome, Played, play_cases, print_summary, summary

BOUND = 0.2
ECHO = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = b"" if "mute" in sys.argv else json.dumps({"tokens": [7] * asked["tokens"]}).encode()
        self.answer(b"data: " + said + b"\\n\\n" if asked["stream"] else said)

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

http.server.ThreadingHTTPServer.request_queue_size = 256
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that says 7 as often as it is asked for tokens, or nothing."""


class Plain:
    """Asks it."""

    def call(self, request: Request) -> tuple[str, dict[str, Any]]:
        return "/say", {"tokens": request.tokens, "stream": request.stream}

    def read(self, pieces: Sequence[dict[str, Any]]) -> Said:
        tokens = [token for piece in pieces for token in piece["tokens"]]
        return Said(tokens, [-0.5] * len(tokens), [{token: -0.5} for token in tokens])


def case_of(name: str, *words: str, code: str = ECHO, ports: list[int] | None = None, **options: Any) -> Case:
    """A case; its port goes to `ports`."""

    def command(port: int) -> list[str]:
        if ports is not None:
            ports.append(port)
        return [sys.executable, "-c", code, str(port), *words]

    return Case(name, command, **options)


def test_cases_that_fail_leave_the_others_to_play(tmp_path: Path) -> None:
    def left(port: int) -> None:
        raise ServerError("requests are left")

    ports: list[int] = []
    cases = [
        case_of("good", ports=ports),
        case_of("ended", code="raise SystemExit('no model')"),
        case_of("silent", code="import time; time.sleep(60)"),
        case_of("mute", "mute"),
        case_of("full", settled=left),
    ]
    requests = draw_requests(100, count=20)
    start = time.monotonic()
    made = play_cases(cases, Plain(), requests, tmp_path, idle=1.5, start_timeout=8, timeout=5)
    assert time.monotonic() - start > 9.5  # silent's time to start, and the pause
    assert {name: why.splitlines()[0] for name, why in made.failed.items() if name != "mute"} == {
        "ended": "the server ended with 1:",
        "silent": "the server was not healthy after 8 s:",
        "full": "requests are left",
    }
    assert "no model" in made.failed["ended"] and made.failed["mute"].startswith("10 errors; request 0: ")
    ((name, good),) = made.played.items()
    assert name == "good" and [len(one.answers) for one in good.rounds] == [20, 20]
    assert all(set(each.said.tokens) == {7} for one in good.rounds for each in one.answers)
    assert not healthy(ports[0], "/")


def played(*logprobs: float, aborted: bool = True) -> Played:
    """A case whose answers are the same token, with log probabilities; the first one was aborted."""
    answers = [
        Answer(Said([5], [value], [{5: value}]), aborted and not number, 0.1, 0.2, "")
        for number, value in enumerate(logprobs)
    ]
    return Played(10, (Round(answers, 1), Round(answers, 2)))


def summary_of(failed: dict[str, str] | None = None, **cases: Played) -> dict[str, Any]:
    """Of cases "ours eager" and "theirs eager"."""
    outcome = Outcome({f"{name} eager": one for name, one in cases.items()}, failed or {})
    return summary(outcome, "ours", "theirs", BOUND)


def test_a_summary_tells_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    near = summary_of(ours=played(-1, -2), theirs=played(-1, -2.1))
    assert near["wrong"] == [] and [one["beyond_bound"] for one in near["comparisons"]] == [0] * 4
    far = summary_of(ours=played(-1, -2), theirs=played(-1, -2.3))
    apart = f"1 log probabilities are more than {BOUND} apart"
    assert far["wrong"] == [f"ours eager {number} / theirs eager {number}: {apart}" for number in (1, 2)]
    failed = summary_of({"theirs eager": "ended\nlog"}, ours=played(-1, aborted=False))
    assert failed["wrong"] == ["theirs eager: ended\nlog", *["ours eager: no request was aborted"] * 2]
    print_summary(far)
    print_summary(failed)
    said = capsys.readouterr().out
    assert "ours eager 1 / theirs eager 1" in said and said.count("wrong: ") == 5 and "log\n" not in said


def test_rounds_without_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["servers", "vllm", "--requests", "0"])
    with pytest.raises(SystemExit):
        servers.main()
    assert "requests = 0: must be at least 1" in capsys.readouterr().err
