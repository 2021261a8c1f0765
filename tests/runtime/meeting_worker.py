"""One rank of a group in which not all ranks do the same: `python -m tests.runtime.meeting_worker STORE RANK WORLD
PROGRAM`, without GPUs. The last rank is the one that something happens to."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cute_ep import nn
from cute_ep.api import waits
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError, EPTimeout
from cute_ep.integrations.common.pools import communicator_for
from cute_ep.integrations.deep_ep import Buffer, ElasticBuffer
from cute_ep.reference import processes
from cute_ep.runtime.group_pool import SAME, GroupPool
from cute_ep.runtime.process_connection import connect
from cute_ep.torch_internals import default_store
from tests.processes import join_group

CFG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=16, world_size=3, timeout_s=60)
GROUP_S = 3
"""Timeout of the group that ranks meet in."""
SOON_S = 2.5
"""What takes less was told, and not waited for; shorter than GROUP_S."""
FIRST_WORD_S = 0.5


class Heard(logging.Handler):
    """What cute_ep has logged since `clear`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("cute_ep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# ---- first collectives: each returns what ends it


def connects(group: dist.ProcessGroup) -> Callable[[], None]:
    return connect(CFG, group).close


def layer(group: dist.ProcessGroup) -> Callable[[], None]:
    return nn.connect(nn.MoELayer(CFG, 16), group).close


def adapter(group: dist.ProcessGroup) -> Callable[[], None]:
    pool = GroupPool(group)
    communicator_for(pool, SAME, (128, 6, 2, 16))
    return pool.close


def normal(group: dist.ProcessGroup) -> Callable[[], None]:
    buffer, ids = Buffer(group, 1 << 20, explicitly_destroy=True), torch.arange(8).view(4, 2) % 6
    x = torch.ones(4, 128, dtype=torch.bfloat16)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 6)
    sizes = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in_rank, "num_tokens_per_expert": per_expert}
    buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(4, 2), **sizes)
    return buffer.destroy


def low_latency(group: dist.ProcessGroup, most: int = 16) -> Callable[[], None]:
    buffer, ids = Buffer(group, 1 << 20, low_latency_mode=True, explicitly_destroy=True), torch.zeros(4, 2).long()
    buffer.low_latency_dispatch(torch.ones(4, 128, dtype=torch.bfloat16), ids, most, 6, use_fp8=False)
    return buffer.destroy


def barrier(group: dist.ProcessGroup) -> Callable[[], None]:
    buffer = ElasticBuffer(group, explicitly_destroy=True)
    buffer.barrier()
    return buffer.barrier


FIRST = (connects, layer, adapter, normal, low_latency, barrier)


# ---- programs


class Ranks:
    """This rank, with the group that it meets the others in."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup) -> None:
        self.rank, self.last, self.group, self.heard = rank, world - 1, group, Heard()
        self.is_last, self._turns = rank == self.last, 0

    @contextmanager
    def others_first(self) -> Any:
        """What all but the last rank do in the block before the last one does it."""
        self._turns += 1
        keys = [f"turn {self._turns} of {rank}" for rank in range(self.last)]
        store = default_store()
        if self.is_last:
            store.wait(keys, timedelta(seconds=60))
        yield
        if not self.is_last:
            store.set(keys[self.rank], "done")

    def refused(self, kind: type[EPError], words: str, call: Callable[[], object], within: float = 60) -> str:
        """What the error says that a call raises, after how long at most."""
        self.heard.lines.clear()
        began = time.monotonic()
        try:
            call()
        except kind as error:
            took = time.monotonic() - began
            assert words in str(error) and took < within, (took, str(error))
            return str(error)
        raise AssertionError(f"rank {self.rank}: no {kind.__name__} with {words!r}")

    def warned(self, words: str) -> None:
        assert any(words in line for line in self.heard.lines), self.heard.lines


def absent(ranks: Ranks) -> None:
    """The last rank does not come; when it does at last it is told at once, and all meet at the next attempt."""
    for number, first in enumerate(FIRST):
        doing = "call barrier" if first is barrier else "connect"
        words = f"waited {GROUP_S} s for rank(s) [{ranks.last}] to {doing}"
        with ranks.others_first():
            ranks.refused(EPError, words, lambda one=first: one(ranks.group), SOON_S if ranks.is_last else 60)
            if not ranks.is_last:
                ranks.warned(f"rank {ranks.rank} has waited ")
                ranks.warned(f" s for rank(s) [{ranks.last}] to {doing}; it gives up after {GROUP_S} s")
                if number == 0:
                    said = ranks.refused(EPError, "waited", lambda one=first: one(ranks.group))
                    assert "makes attempt 2, rank 2 has made 0)" in said, said
        if number == 0 and ranks.is_last:  # it is one attempt behind still
            ranks.refused(EPError, "makes attempt 2, rank 2 has made 0)", lambda one=first: one(ranks.group), SOON_S)
        first(ranks.group)()


def differing(ranks: Ranks) -> None:
    """The last rank asks for something else: all ranks are told what, at once, and meet again."""

    def sized(tokens: int) -> Callable[[], object]:
        return lambda: low_latency(ranks.group, tokens)

    cfg = replace(CFG, top_k=3, dispatch_format="mxfp8")
    alike = "must be the same on all ranks"
    cases: list[tuple[Callable, Callable, type[EPError], str]] = [
        (
            lambda: connect(CFG, ranks.group),
            lambda: connect(cfg, ranks.group),
            EPConfigError,
            f"top_k = 2 on rank(s) [0, 1], 3 on rank(s) [2]; dispatch_format = 'bf16' on rank(s) [0, 1], 'mxfp8' on "
            f"rank(s) [2]: {alike}",
        ),
        (sized(100), sized(200), EPConfigError, "num_max_dispatch_tokens_per_rank = 128 on rank(s) [0, 1], 256 on"),
        (
            lambda: connect(CFG, ranks.group),
            lambda: barrier(ranks.group),
            EPError,
            "rank 0 wants to connect, rank 1 wants to connect, rank 2 wants to call barrier: must be",
        ),
        (
            lambda: connect(CFG, ranks.group),
            lambda: connect(CFG),
            EPError,
            "rank 0 is in process group 1, rank 1 is in process group 1, rank 2 is in process group 0: must be",
        ),
    ]
    for usual, other, kind, words in cases:
        dist.barrier()
        ranks.refused(kind, words, other if ranks.is_last else usual, SOON_S)
    dist.barrier()
    wrong: Any = {"cfg": "large"}
    words = "could not connect: EPConfigError: cfg = str: must be an EPConfig"
    if ranks.is_last:
        ranks.refused(EPConfigError, "cfg = str", lambda: connect(wrong["cfg"], ranks.group), SOON_S)
    else:
        ranks.refused(EPError, words, lambda: connect(CFG, ranks.group), SOON_S)
    connect(CFG, ranks.group).close()


def cannot_open(ranks: Ranks) -> None:
    """The last rank refuses to open: all are told at once, nobody keeps anything, and all may try again."""
    pool = GroupPool(ranks.group)
    before = pool.open(CFG).first
    larger = replace(CFG, max_tokens_per_rank=32)

    def refuse() -> None:
        if ranks.is_last:
            raise EPConfigError("device = here: must be there")

    kind: type[EPError] = EPConfigError if ranks.is_last else EPError
    words = "device = here: must be there"
    words = words if ranks.is_last else f"rank 2 could not connect: EPConfigError: {words}"
    for _ in range(2):
        dist.barrier()
        ranks.refused(kind, words, lambda: pool.open(larger, check=refuse), SOON_S)
        assert pool.communicators == [before] and pool.find(larger) is None
    assert pool.open(larger).first in pool.communicators
    pool.close()
    layer = nn.MoELayer(CFG, 16).to("meta" if ranks.is_last else "cpu")
    words = "device = meta: must be cpu" if ranks.is_last else "rank 2 could not connect: EPConfigError: device = meta"
    ranks.refused(kind, words, lambda: nn.connect(layer, ranks.group), SOON_S)
    nn.connect(nn.MoELayer(CFG, 16), ranks.group).close()


def one_connects_anew(ranks: Ranks) -> None:
    """The last rank connects for more tokens while the others use what they have: each names whom it misses."""
    ep = connect(replace(CFG, timeout_s=2), ranks.group)
    if ranks.is_last:
        larger = replace(CFG, max_tokens_per_rank=32)
        words = f"waited {GROUP_S} s for rank(s) [0, 1] to connect"
        ranks.refused(EPError, words, lambda: connect(larger, ranks.group))
        return ranks.warned("for rank(s) [0, 1] to connect; it gives up")
    x, ids = torch.ones(4, CFG.hidden).bfloat16(), torch.zeros(4, 2, dtype=torch.int32)
    ranks.refused(EPTimeout, "rank(s) [2]", lambda: ep.dispatch(x, ids))
    return ranks.warned("for rank(s) [2] to send in round 1 of phase ROUTE_TABLE; it gives up after 2 s")


def killed_before(ranks: Ranks) -> None:
    """The last rank is killed before it comes."""
    with ranks.others_first():
        pass  # new_group has ended on the others: a death before that ends it with an error of gloo
    if ranks.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.refused(EPError, f"waited {GROUP_S} s for rank(s) [2] to connect", lambda: connect(CFG, ranks.group))
    ranks.warned("for rank(s) [2] to connect")


def killed_within(ranks: Ranks) -> None:
    """The last rank is killed when it has met the others: they need not wait for its time to be over."""
    if ranks.is_last:
        processes.secrets.token_bytes = lambda size: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    words = "rank(s) [2] ended before they could open a socket"
    ranks.refused(EPError, words, lambda: connect(CFG, ranks.group), 30)


def interrupted(ranks: Ranks) -> None:
    """Ctrl-C on the last rank while it waits: the others are told at once. Rank 1 comes only then."""
    over = Path(f"{sys.argv[1]}.interrupted")
    if ranks.is_last:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            connect(CFG, ranks.group)
        except KeyboardInterrupt:
            over.touch()
    else:
        while ranks.rank == 1 and not over.exists():
            time.sleep(0.05)
        # who had waited in vain would say so, after GROUP_S
        ranks.refused(EPError, "rank 2 left: KeyboardInterrupt", lambda: connect(CFG, ranks.group))
    connect(CFG, ranks.group).close()


def part_of_all(ranks: Ranks) -> None:
    """In a group of ranks 1 and 2 both numbers of a missing rank are said: in the group, and in the default one."""
    if ranks.rank == 0:
        return dist.barrier()
    cfg = replace(CFG, world_size=2)
    if not ranks.is_last:
        words = f"waited {GROUP_S} s for rank(s) [1] (global [2]) to connect"
        ranks.refused(EPError, words, lambda: connect(cfg, ranks.group))
    return dist.barrier()


PROGRAMS = (absent, differing, cannot_open, one_connects_anew, killed_before, killed_within, interrupted, part_of_all)


def main(store: str, rank: int, world: int, program: str) -> None:
    join_group(Path(store), rank, world)
    waits.FIRST_WORD_S = FIRST_WORD_S
    members = [1, 2] if program == part_of_all.__name__ else list(range(world))
    group = dist.new_group(members, timeout=timedelta(seconds=GROUP_S))
    (chosen,) = (one for one in PROGRAMS if one.__name__ == program)
    chosen(Ranks(rank, world, group))
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
