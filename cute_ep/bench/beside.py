"""A pair beside a matmul: how much longer each takes than alone, and what a layer of both takes.

The pair, a dispatch and a combine, is on a stream of higher priority than the matmul, which cuBLAS may be told to leave
some SMs (`set_matmul_sms`). Times are us of CUDA-graph replay, of the slowest rank, medians of SAMPLES. Nothing waits
for a row of the other, so a layer whose matmuls wait for rows takes at least what `layer` says.

Each rank has a host thread or a process of its own, which all call the same functions in the same order; `Highest` is
how they meet.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from cute_ep.api.errors import EPError
from cute_ep.torch_internals import sleep_on_gpu

Highest = Callable[[Sequence[float]], list[float]]
"""Waits until all ranks have called it, and returns the highest of their values, one by one."""
Result = TypeVar("Result")
SAMPLES = 20
IN_STEP = 3
"""Samples at the start that are dropped."""
WARM_UP = 4
"""Calls before a graph is captured."""
PAIRS, MOST_PAIRS = 8, 64
"""Pairs of a graph: as few as have a number of matmuls that is right to RIGHT."""
RIGHT = 0.01
IN_LAYER = 1, 64
"""How many of the matmul a layer may have, least and most: graphs of as many as PAIRS layers have are short enough, and
their matmuls outlast what begins with them."""
SLEEP_CYCLES = 1_000_000
"""Until a rank has queued what begins at once."""


class Matmul(NamedTuple):
    """[rows, inner] times [inner, columns], in bfloat16."""

    rows: int
    inner: int
    columns: int

    def in_layer(self, tokens: int, top_k: int, hidden: int, width: int) -> float:
        """How many of it the matmuls of a rank's layer are: of tokens a rank and of experts with intermediate rows of
        `width` elements, so that an entry of a token takes 6 hidden width operations."""
        return 6 * tokens * top_k * hidden * width / (2 * self.rows * self.inner * self.columns)


class Repeated:
    """A graph of calls on a stream.

    Attributes:
        us: of one call, alone.
    """

    def __init__(self, highest: Highest, stream: torch.cuda.Stream, calls: int, call: Callable[[int], object]) -> None:
        self.stream, self.calls = stream, calls
        self.graph = torch.cuda.CUDAGraph()
        sleep_on_gpu(1)  # loaded now: a kernel that a peer waits in would hold up a load
        torch.cuda.synchronize()
        highest([0.0])  # all ranks have what they need to run rounds
        with torch.cuda.stream(stream):
            for number in range(WARM_UP):
                call(number)
            torch.cuda.synchronize()
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(calls):
                    call(number)
            finally:
                self.graph.capture_end()
        self.us = times(highest, (self, 1))[0] / calls

    def replays(self, us: float) -> int:
        """How many last so long."""
        return max(1, math.ceil(us / (self.us * self.calls)))


def times(highest: Highest, *work: tuple[Repeated, int]) -> list[float]:
    """us of so many replays of each, begun at once: of the slowest rank, the median."""
    samples: list[list[float]] = []
    for _ in range(IN_STEP + SAMPLES):
        torch.cuda.synchronize()
        highest([0.0])
        spans = []
        for one, replays in work:
            with torch.cuda.stream(one.stream):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                sleep_on_gpu(SLEEP_CYCLES)
                start.record()
                for _ in range(replays):
                    one.graph.replay()
                end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        samples.append(highest([start.elapsed_time(end) * 1e3 for start, end in spans]))
    return [median(column) for column in zip(*samples[IN_STEP:], strict=True)]


def beside(highest: Highest, one: Repeated, other: Repeated) -> float:
    """us of a call of `one` while `other` is at work, for at least four times as long as it takes alone."""
    return times(highest, (one, 1), (other, other.replays(4 * one.us * one.calls)))[0] / one.calls


def layer(highest: Highest, pairs: Repeated, matmuls: Repeated) -> float:
    """us of a layer, of which the two graphs have as many, begun at once."""
    return max(times(highest, (pairs, 1), (matmuls, 1))) / pairs.calls


def apart(highest: Highest, pairs: Repeated, matmuls: Repeated) -> float:
    """us of the same, one graph after the other."""
    return sum(times(highest, (pairs, 1)) + times(highest, (matmuls, 1))) / pairs.calls


def calls_of(in_layer: float) -> tuple[int, int]:
    """How many pairs and matmuls graphs have, in_layer matmuls of a layer: right to RIGHT where it is at least 1."""
    for pairs in range(PAIRS, MOST_PAIRS):
        if abs(round(in_layer * pairs) / (in_layer * pairs) - 1) <= RIGHT:
            return pairs, round(in_layer * pairs)
    return MOST_PAIRS, round(in_layer * MOST_PAIRS)


class Beside:
    """A rank's two streams, and the matmul's memory on its GPU, the current one.

    Args:
        highest: where the ranks meet.
        matmul: what runs beside.
        in_layer: how many of it a layer has, within IN_LAYER.
    """

    def __init__(self, highest: Highest, matmul: Matmul, in_layer: float) -> None:
        self.highest = highest
        self.pairs, self.matmuls = calls_of(in_layer)
        self.below, self.above = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
        device = torch.cuda.current_device()
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.a = torch.randn(matmul.rows, matmul.inner, dtype=torch.bfloat16, device=device)
        self.b = torch.randn(matmul.inner, matmul.columns, dtype=torch.bfloat16, device=device)
        self.c = torch.empty(matmul.rows, matmul.columns, dtype=torch.bfloat16, device=device)

    def pair(self, call: Callable[[int], object]) -> Repeated:
        """Pairs, of which `call(number)` queues one on the current stream."""
        return Repeated(self.highest, self.above, self.pairs, call)

    def measure(self, pair: Repeated, left: int, *, in_turn: bool) -> dict[str, float]:
        """Times where the matmul leaves so many SMs free, 0: none, by the names of what is measured: "pair_us" and
        "matmul_us", alone; "pair_beside_us" and "matmul_beside_us"; "layer_us", and if `in_turn` "apart_us"."""
        with torch.cuda.stream(self.below):
            set_matmul_sms(self.sms - left if left else 0)
            try:
                matmul = Repeated(self.highest, self.below, self.matmuls, self._multiply)
            finally:
                set_matmul_sms(0)
        made = {"pair_us": pair.us, "matmul_us": matmul.us}
        made["pair_beside_us"] = beside(self.highest, pair, matmul)
        made["matmul_beside_us"] = beside(self.highest, matmul, pair)
        made["layer_us"] = layer(self.highest, pair, matmul)
        if in_turn:
            made["apart_us"] = apart(self.highest, pair, matmul)
        return made

    def _multiply(self, number: int) -> None:
        torch.mm(self.a, self.b, out=self.c)


def set_matmul_sms(sms: int) -> None:
    """How many SMs cuBLAS takes on this thread and GPU from now on, also in what is captured; 0: all. EPError where
    this torch's cuBLAS cannot be told."""
    name = f"libcublas.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        status = ctypes.CDLL(name).cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), sms)
    except (OSError, AttributeError) as error:
        raise EPError(f"{name}: no cublasSetSmCountTarget, so a matmul leaves no SMs free: {error}") from None
    if status:
        raise EPError(f"cublasSetSmCountTarget({sms}): cuBLAS refused with status {status}; 0 means all SMs")


class Threads:
    """Ranks of this process, a host thread each, of which the GPU is the current one.

    Args:
        devices: "cuda:0" and so on, one a rank.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._barrier = threading.Barrier(len(devices))
        self._given: list[Sequence[float]] = [()] * len(devices)
        self._errors: list[BaseException] = []

    def on_all(self, work: Callable[[int, Highest], Result]) -> list[Result]:
        """What `work(rank, highest)` of each rank returns. Where one raises, the others give up when they meet, and
        what was raised first is raised here."""
        with ThreadPoolExecutor(len(self._devices)) as pool:
            futures = [pool.submit(self._run, rank, work) for rank in range(len(self._devices))]
        if self._errors:
            raise self._errors[0]
        return [future.result() for future in futures]

    def _run(self, rank: int, work: Callable[[int, Highest], Result]) -> Result:
        try:
            torch.cuda.set_device(self._devices[rank])
            return work(rank, lambda values: self._highest(rank, values))
        except BaseException as error:
            self._errors.append(error)
            self._barrier.abort()
            raise

    def _highest(self, rank: int, values: Sequence[float]) -> list[float]:
        self._given[rank] = values
        self._barrier.wait()
        found = [max(column) for column in zip(*self._given, strict=True)]
        self._barrier.wait()  # all have read before one writes again
        return found
