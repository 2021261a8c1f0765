"""Faults of calls within one process: each function runs in a process of its own.

It takes the devices of the ranks, ["cpu", "cpu"] for the reference backend, returns what it saw, and raises an error
where that is not what must be seen.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.runtime.connection import connect_local, connected

from .group import TIMEOUT_S, Group, expect, group_of, small_config, small_input, sms_for
from .programs import draw_program, enqueue

SENTINELS = (-1, 0x7FC0, 0x7F80)
"""As bfloat16: all bits set, as in a word that has not arrived; a quiet NaN; infinity."""
ROOM = 3 << 30
"""Bytes that are left free on a GPU on which too much is allocated then."""


def bad_ids(devices: Sequence[str], library: Path | None) -> str:
    """Rank 0 gives ids out of range: it hears of the last of its calls, nobody else does, and the rounds go on."""
    with group_of(devices, library, small_input(len(devices))) as group:
        random, said = Random(1), ""
        for value in (group.batches[0].cfg.num_experts, -2, 2**31 - 1, 1 - 2**31):
            communicators = [lane.communicator for lane in group.lanes]
            arguments = [dict(group.batches[0].arguments[rank]) for rank in group.devices]
            arguments[0]["topk_ids"] = arguments[0]["topk_ids"].clone()
            arguments[0]["topk_ids"][3, 1] = value
            group.wait()
            for communicator, given in zip(communicators, arguments, strict=True):
                communicator.dispatch(**given)
            for communicator in communicators[1:]:
                communicator.synchronize()
            said = expect(EPInputError, f"topk_ids.flatten()[13] = {value}", communicators[0].synchronize)
            group.round(random)
    return said


def nan_everywhere(devices: Sequence[str], library: Path | None) -> str:
    """Every element of tokens, weights and rows is no number: the reference's bytes, and the next round is right."""
    random = Random(2)
    for fmt in ("bf16", "fp8", "mxfp8", "nvfp4", "nvfp4_row"):
        given = [small_input(len(devices), bits=bits) for bits in SENTINELS]
        with connected(
            small_config(len(devices), fmt), devices, sms=sms_for(devices), library=library
        ) as communicators:
            group = Group(communicators, [*given, small_input(len(devices))])
            for index in (0, 3, 1, 0, 2, 3):
                group.round(random, index)
    return "the bytes of the reference"


def two_communicators(devices: Sequence[str], library: Path | None) -> str:
    """Two groups on the same devices, called by turns and not synchronised in between."""
    random, ranks = Random(3), len(devices)
    with ExitStack() as stack:
        groups = []
        for fmt in ("nvfp4", "bf16"):
            entered = connected(small_config(ranks, fmt), devices, sms=sms_for(devices, 2), library=library)
            groups.append(Group(stack.enter_context(entered), [small_input(ranks)], seed=len(fmt)))
        for _ in range(50):
            runs, made = [], []
            for group in groups:
                program = draw_program(random, group.batches, ranks, delays=False)
                made.append((program, [{} for _ in range(ranks)]))
                runs += [lane.run(program, group.batches, made[-1][1][lane.rank]) for lane in group.lanes]
            enqueue(random, runs, by_steps=True)
            for group, (program, slices) in zip(groups, made, strict=True):
                group.compare(dict(enumerate(slices)), program.modes(0))
        for group in groups:
            group.check_right()
    return "right bytes"


def never_calls(devices: Sequence[str], library: Path | None) -> str:
    """The last rank does not call: the others name it within the timeout, and a fresh group is right."""
    absent = len(devices) - 1
    with group_of(devices, library, small_input(len(devices))) as group:
        others = [lane.communicator for lane in group.lanes[:absent]]
        started = time.monotonic()
        for rank, communicator in enumerate(others):
            communicator.dispatch(**group.batches[0].arguments[rank], out=group.batches[0].buffers[rank])
        for communicator in others:
            said = expect(EPTimeout, f"[{absent}]", communicator.synchronize)
            expect(EPTimeout, f"[{absent}]", communicator.allocate)
        assert time.monotonic() - started < 3 * TIMEOUT_S
    with group_of(devices, library, small_input(len(devices))) as group:
        group.round(Random(4))
    return said


def late(devices: Sequence[str], library: Path | None) -> str:
    """The last rank calls half a timeout late: right bytes. Twice the timeout: the others name it, what it gets itself
    is right or an EPTimeout too, and a fresh group is right."""
    last = len(devices) - 1

    def dispatch_late(group: Group, seconds: float) -> None:
        for rank, lane in enumerate(group.lanes):
            if rank == last:
                time.sleep(seconds)
            batch = group.batches[0]
            with lane.on("dispatch"):
                made = lane.communicator.dispatch(**batch.arguments[rank], out=batch.buffers[rank])
            slices[rank] = {0: made.return_slices_log2}

    with group_of(devices, library, small_input(len(devices))) as group:
        slices: dict[int, dict[int, int]] = {}
        dispatch_late(group, TIMEOUT_S / 2)
        group.compare(slices, [])
        group.check_right()
        group.round(Random(5))
        dispatch_late(group, TIMEOUT_S * 2)
        for lane in group.lanes[:last]:
            said = expect(EPTimeout, f"[{last}]", lane.communicator.synchronize)
        try:
            group.lanes[last].communicator.synchronize()
        except EPTimeout:
            pass
        else:
            group.wait()
            group.compare(slices, [])
            torch.cuda.synchronize(devices[last])
            assert not int(group.counters[last]), f"the late rank has {int(group.counters[last])} wrong bytes"
    with group_of(devices, library, small_input(len(devices))) as group:
        group.round(Random(6))
    return said


def out_of_memory(devices: Sequence[str], library: Path | None) -> str:
    """Arenas that the last GPU has no room for: an EPError, nothing stays allocated, and smaller ones are right."""
    last, ranks = torch.device(devices[-1]), len(devices)
    torch.empty(1, device=last)
    ballast = [torch.empty(torch.cuda.mem_get_info(last)[0] - ROOM, dtype=torch.uint8, device=last)]
    cfg = next(
        cfg
        for cfg in (EPConfig(7168, 8 * ranks, 8, tokens, ranks) for tokens in range(256, 16384, 256))
        if memory_bytes(cfg) * devices.count(devices[-1]) > 1.2 * ROOM
    )
    before = torch.cuda.mem_get_info(last)[0]
    said = expect(EPError, "memory", lambda: connect_local(cfg, devices, sms=sms_for(devices), library=library))
    lost = before - torch.cuda.mem_get_info(last)[0]
    assert lost < ROOM // 8, f"{lost} bytes stay allocated"  # a context keeps something of its modules
    ballast.clear()
    torch.cuda.empty_cache()
    with group_of(devices, library, small_input(ranks)) as group:
        group.round(Random(7))
    return said


def fork_after_connect(devices: Sequence[str], library: Path | None) -> str:
    """A forked child's call is an error on a GPU, right on the reference backend; the parent's rounds stay right."""
    torch.set_num_threads(1)  # a child has none of its parent's threads
    random = Random(8)
    with group_of(devices, library, small_input(len(devices))) as group:
        group.round(random)
        child = os.fork()
        if not child:
            try:
                for rank, lane in enumerate(group.lanes):
                    lane.communicator.dispatch(**group.batches[0].arguments[rank])
                group.round(random)
                os._exit(3)
            except AssertionError:
                os._exit(1)
            except Exception as error:
                sys.stdout.write(f"child: {type(error).__name__}: {error}\n")
                sys.stdout.flush()
                os._exit(4)
        deadline = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        status = os.waitstatus_to_exitcode(ended[1])
        wanted = 3 if devices[0] == "cpu" else 4
        assert status == wanted, f"the child ended with {status}, not {wanted}"
        group.round(random)
    return "the child is told" if wanted == 4 else "both are right"
