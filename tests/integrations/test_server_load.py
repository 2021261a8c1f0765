"""The load for servers, with a small server that answers as asked."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.server_compare import compare
from tests.integrations.server_load import (
    HOST,
    Answer,
    Request,
    Round,
    Said,
    draw_requests,
    play,
)
from tests.integrations.server_process import APART, ServerError, free_ports, healthy, serving, tail

VOCABULARY = 100


class Plain:
    """Asks the small server."""

    def call(self, request: Request) -> tuple[str, dict[str, Any]]:
        return "/say", {"prompt": request.prompt, "tokens": request.tokens, "stream": request.stream}

    def read(self, pieces: Sequence[dict[str, Any]]) -> Said:
        tokens = [token for piece in pieces for token in piece["tokens"]]
        return Said(tokens, [-0.5] * len(tokens), [{token: -0.5} for token in tokens])


def tokens_after(prompt: Sequence[int], count: int) -> list[int]:
    """What the small server says."""
    return [(sum(prompt) + place) % VOCABULARY for place in range(count)]


@contextmanager
def small_server(seen: list[str], *, fail: bool = False) -> Iterator[int]:
    """Yields a port. `seen` gets the end of each request: whole, or cut where the client has gone."""
    (port,) = free_ports(1)
    ready, stop = threading.Event(), threading.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        said = tokens_after(asked["prompt"], asked["tokens"])
        if fail:
            body = b'{"error": "no"}'
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        elif not asked["stream"]:
            body = json.dumps({"tokens": said}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                for token in said:
                    line = b"data: " + json.dumps({"tokens": [token]}).encode() + b"\n\n"
                    for part in (line[:9], line[9:]):  # chunks end anywhere
                        writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.005)
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                await writer.drain()
            except ConnectionError:
                seen.append("cut")
                return
        seen.append("whole")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=512)
        async with server:
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(10)
    try:
        yield port
    finally:
        stop.set()
        thread.join(10)


def test_requests_are_of_all_kinds_and_the_same_each_time() -> None:
    requests = draw_requests(VOCABULARY)
    assert requests == draw_requests(VOCABULARY) != draw_requests(VOCABULARY, seed=1)
    assert len(requests) == 200
    assert sum(one.abort_after is not None for one in requests) == 30
    assert sum(one.stream and one.abort_after is None for one in requests) == 100
    lengths = sorted(len(one.prompt) for one in requests)
    assert lengths[0] == 1 and lengths[len(lengths) // 2] < 30 and 200 < lengths[-1] <= 300
    whole = [one.tokens for one in requests if one.abort_after is None]
    assert min(whole) == 2 and 40 < max(whole) <= 48
    assert all(2 <= token < VOCABULARY for one in requests for token in one.prompt)
    assert all(1 <= one.abort_after <= 12 and one.tokens == 192 for one in requests if one.abort_after is not None)


def test_all_answers_come_and_aborted_ones_are_cut() -> None:
    requests, seen = draw_requests(VOCABULARY), list[str]()
    with small_server(seen) as port:
        first, second = (play(Plain(), port, requests) for _ in range(2))
    for round in (first, second):
        assert not round.errors
        for request, answer in zip(requests, round.answers, strict=True):
            count = request.tokens if request.abort_after is None else request.abort_after
            assert answer.aborted == (request.abort_after is not None)
            assert answer.said.tokens == tokens_after(request.prompt, count)
            assert 0 < answer.first <= answer.last <= round.seconds
        made = round.table()
        assert (made["answers"], made["aborted"]) == (170, 30)
        assert made["tokens_per_second"] == pytest.approx(made["tokens"] / made["seconds"], rel=0.01)
    assert compare(first, second).table()["equal"] == 200
    assert "cut" in seen


def test_what_goes_wrong_is_told_by_request() -> None:
    requests = draw_requests(VOCABULARY, count=4, aborted=0)
    with small_server([], fail=True) as port:
        failed = play(Plain(), port, requests)
    assert [one.split(": ", 2)[0] for one in failed.errors] == [f"request {number}" for number in range(4)]
    assert all('500 Oh: {"error": "no"}' in one for one in failed.errors)
    with small_server([]) as port:
        late = play(Plain(), port, [Request((1,), 40, True)], timeout=0.05)
    assert "TimeoutError" in late.errors[0] and 0 < len(late.answers[0].said.tokens) < 40
    assert "Connect" in play(Plain(), free_ports(1)[0], requests[:1]).errors[0]


def round_of(*answers: tuple[list[int], list[dict[int, float]]]) -> Round:
    said = [Said(tokens, [at[token] for token, at in zip(tokens, top, strict=True)], top) for tokens, top in answers]
    return Round([Answer(one, False, 0, 0, "") for one in said], 1)


def test_answers_are_compared_up_to_the_first_difference() -> None:
    ours = round_of(
        ([5, 6, 9], [{5: -0.1}, {6: -0.50, 7: -0.6}, {9: -3.0}]),
        ([1], [{1: -0.25}]),
        ([3], [{3: -0.5, 2: -0.75}]),
    )
    theirs = round_of(
        ([5, 7, 8], [{5: -0.2}, {7: -0.51, 6: -0.55}, {8: -4.0}]),
        ([1, 2], [{1: -0.5}, {2: -1.0}]),
        ([4], [{4: -0.5, 3: -0.75}]),
    )
    made = compare(ours, theirs)
    assert (made.equal, made.tokens) == (1, 4)
    assert made.offs == pytest.approx([0.1, 0.25])
    near, far = made.differences
    assert near[:2] == (0, 1) and near[2:] == pytest.approx((0.04, 0.09))
    assert far == (2, 0, math.inf, math.inf)  # ours does not list 4


def test_a_server_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'http.server', '{port}'])"
    with serving([sys.executable, "-c", code], port, tmp_path / "log", health="/", timeout=30) as seconds:
        assert 0 < seconds < 30 and healthy(port, "/")
    assert not healthy(port, "/")


def test_ports_are_free_and_far_from_each_other() -> None:
    found = free_ports(4)
    assert all(after - before >= APART for before, after in pairwise(found))
    with socket.socket() as taken:
        taken.bind((HOST, found[0]))
        assert found[0] not in free_ports(4)
    with pytest.raises(ServerError, match="must be at least 1000"):
        free_ports(1000)


def test_what_answers_no_http_is_not_healthy() -> None:
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as one:
                one.recv(1000)
                one.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert not healthy(listening.getsockname()[1], "/")
        answering.join()


def test_a_logs_end_is_told_with_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("\n".join(["b: an OSError: may come", "b", "SomeError: 1", *"cdef", "Error 2", "x" * 400]))
    assert tail(log, 2).split("\n") == ["SomeError: 1", "c", "Error 2", "x" * 300]
    assert tail(log, 3).split("\n") == ["SomeError: 1", "c", "d", "f", "Error 2", "x" * 300]
    assert tail(log, 8).split("\n") == ["b", "SomeError: 1", *"cdef", "Error 2", "x" * 300]


BROKEN = [("print('broken'); exit(3)", "ended with 3:\nbroken"), ("import time; time.sleep(60)", "not healthy")]


@pytest.mark.parametrize(("code", "said"), BROKEN, ids=["ended", "silent"])
def test_a_server_that_does_not_start_raises(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        with serving([sys.executable, "-c", code], free_ports(1)[0], tmp_path / "log", timeout=2):
            pass
