"""Load for a server of language models, over HTTP: many concurrent requests of mixed lengths, some streamed, some
aborted in the middle. It needs nothing but Python.

Prompts and answers are token ids. What requests and answers look like is an `Api`'s business.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

HOST = "127.0.0.1"


class Request(NamedTuple):
    """What to ask for, greedily, without regard to a token that ends texts.

    Attributes:
        prompt: token ids.
        tokens: to generate.
        stream: get the answer in pieces.
        abort_after: pieces after which the client closes the connection; None: it reads all. Only with `stream`.
    """

    prompt: tuple[int, ...]
    tokens: int
    stream: bool
    abort_after: int | None = None


class Said(NamedTuple):
    """What a server has said in an answer.

    Attributes:
        tokens: ids, in order.
        logprobs: of these tokens, natural logarithms.
        top: for each of these tokens, log probabilities of the likeliest ids at its place.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]


class Api(Protocol):
    """How a server is asked and how its answers are read."""

    def call(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of the POST that asks for it, with log probabilities of the likeliest tokens."""

    def read(self, pieces: Sequence[dict[str, Any]]) -> Said:
        """What the JSON objects of one answer say: one object, or those of a stream in order, `[DONE]` left out. A
        stream may have been cut short after any of them, the first included."""


class Answer(NamedTuple):
    """What came of a request.

    Attributes:
        said: all that was read, of an aborted request the beginning.
        aborted: the client closed the connection.
        first: seconds from the start of the round to the first piece.
        last: seconds from the start of the round to the last piece.
        error: what went wrong; "" if nothing.
    """

    said: Said
    aborted: bool
    first: float
    last: float
    error: str


class Round(NamedTuple):
    """What came of requests that were sent at once.

    Attributes:
        answers: in the order of the requests.
        seconds: from the first request to the end of the last answer.
    """

    answers: list[Answer]
    seconds: float

    @property
    def errors(self) -> list[str]:
        """What went wrong, with the request's number."""
        return [f"request {number}: {one.error}" for number, one in enumerate(self.answers) if one.error]

    def table(self) -> dict[str, float]:
        """Numbers of answers and tokens, tokens per second, and seconds to the first piece and to the end: medians and
        the slowest of 20, over answers that were not aborted."""
        whole = [one for one in self.answers if not one.aborted and not one.error]
        tokens = sum(len(one.said.tokens) for one in self.answers)
        result = {
            "answers": len(whole),
            "aborted": sum(one.aborted for one in self.answers),
            "errors": len(self.errors),
            "tokens": tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1),
        }
        for name, times in (("first", [one.first for one in whole]), ("last", [one.last for one in whole])):
            times.sort()
            for word, share in (("p50", 0.5), ("p95", 0.95)):
                result[f"{name}_{word}_s"] = round(times[int(share * (len(times) - 1))], 4) if times else 0.0
        return result


def draw_requests(
    vocabulary: int,
    *,
    count: int = 200,
    longest_prompt: int = 300,
    most_tokens: int = 48,
    streamed: float = 0.5,
    aborted: float = 0.15,
    lowest_id: int = 2,
    seed: int = 0,
) -> list[Request]:
    """The same requests for the same arguments. Lengths of prompts (from 1) and of answers (from 2) are log-uniform.

    Args:
        vocabulary: ids are below it.
        streamed: share of requests that are streamed to the end.
        aborted: share of requests that are streamed and aborted within most_tokens / 4 pieces. They ask for 4 *
            most_tokens, so that they are aborted in the middle also where pieces have several tokens.
        lowest_id: ids are from it on; those below may have a meaning.
    """
    chance = random.Random(seed)

    def length(least: int, most: int) -> int:
        return min(most, int(least * ((most + 1) / least) ** chance.random()))

    requests = []
    for number in range(count):
        prompt = tuple(chance.randrange(lowest_id, vocabulary) for _ in range(length(1, longest_prompt)))
        kind = (number + 0.5) / count
        if kind < aborted:
            requests.append(Request(prompt, 4 * most_tokens, True, chance.randint(1, max(1, most_tokens // 4))))
        else:
            requests.append(Request(prompt, length(2, most_tokens), kind < aborted + streamed))
    chance.shuffle(requests)
    return requests


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Bytes of an HTTP answer's body as they come."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(2**16):
            yield data


async def _pieces(port: int, path: str, body: dict[str, Any], stream: bool) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of the answer to a POST. Closing the iterator closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**24)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        rest = b""
        async for data in _body(reader, headers):
            rest += data
            if stream and status.split()[1] == "200":
                *whole, rest = rest.split(b"\n")
                for line in whole:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        yield json.loads(line[5:])
        if status.split()[1] != "200":
            raise ConnectionError(f"{status}: {rest[:500].decode(errors='replace')}")
        if not stream:
            yield json.loads(rest)
    finally:
        writer.close()


async def _answer(api: Api, port: int, request: Request, start: float, timeout: float) -> Answer:
    """What comes of one request; it raises nothing but a cancellation."""
    pieces: list[dict[str, Any]] = []
    times = [0.0]
    error, aborted = "", False
    path, body = api.call(request)
    source = _pieces(port, path, body, request.stream)
    try:
        async with asyncio.timeout(timeout):
            async for piece in source:
                if "error" in piece:
                    raise ConnectionError(str(piece["error"])[:500])
                pieces.append(piece)
                times.append(time.monotonic() - start)
                if request.abort_after is not None and len(pieces) >= request.abort_after:
                    aborted = True
                    break
    except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    finally:
        await source.aclose()  # type: ignore[attr-defined]
    said = api.read(pieces) if pieces else Said([], [], [])
    if not error and not aborted and len(said.tokens) != request.tokens:
        error = f"{len(said.tokens)} tokens instead of {request.tokens}"
    return Answer(said, aborted, times[min(1, len(times) - 1)], times[-1], error)


def play(api: Api, port: int, requests: Sequence[Request], *, timeout: float = 120) -> Round:
    """Send all requests to a server at once, and read the answers.

    Args:
        timeout: seconds for each request; one that takes longer gets an error.
    """

    async def all_of_them() -> Round:
        start = time.monotonic()
        calls = [_answer(api, port, one, start, timeout) for one in requests]
        answers = await asyncio.gather(*calls)
        return Round(answers, time.monotonic() - start)

    return asyncio.run(all_of_them())
