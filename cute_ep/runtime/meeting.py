"""How the processes of one `connect` agree with each other: through the process group's store, so that nothing of it is
a collective that could mix with the caller's, or that fails or waits without a word.

The ranks of a group meet any number of times. All keys of a meeting begin with the global ranks of the group and the
number of the meeting, so the question is how ranks agree on the number. A rank's number is how often it has begun to
meet these ranks, which an atomic counter in the store counts for each rank:

- A number is never used twice by a rank, whatever becomes of its process group or its process, since the count is in
  the store and not in the process. So each key is written once, and nobody reads a value of an earlier meeting.
- A rank leaves a meeting early only after the others can know it: it gives its failure as its part of the step, or it
  writes a reason into the meeting's state. Who comes to that meeting later finds the reason, raises at once, and has by
  that counted one attempt. So ranks that try again after an error come to have equal numbers, however late one was.
- A rank that leaves out an attempt, or is killed, writes nothing. The others wait for it until their time is over, or
  until they see that its process has ended. What they say has the numbers of the ranks that are behind.
- Who waits for ranks that are ahead, which have left without a word (killed, and started again with the same store),
  ends the meeting: they will not come back to it.

A meeting has steps. In each a rank writes its part, waits for the parts of all, and reads them. One key, the state, is
"<steps completed> <why the meeting has ended, if it has>". It changes by compare-and-set only, so all ranks see the
same order of changes: a step that one rank takes for complete is complete for all, and a meeting that a rank has ended
before completes no step any more. So ranks never part with one half connected.

| wait | ends by |
| --- | --- |
| for the parts of a step | the last rank's part; a reason in the state; the time; the end of a missing rank's process |
| for the first step too | a missing rank's higher number |

Groups of the same ranks share their numbers: torch may give one group other names on other ranks, and the same name
twice. So they connect in the same order on all ranks; a rank that connects another group than its peers is told, where
torch has counted their names.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from cute_ep.api.errors import EPError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.waits import Wait
from cute_ep.runtime.process import Process
from cute_ep.torch_internals import default_store, timeout_of_group

Made = TypeVar("Made")
LOG = logging.getLogger(__name__)

PATIENCE_S = 1800.0
"""How long ranks that have met wait for each other; the slowest compiles kernels meanwhile, perhaps. Also until they
meet, where torch does not know the group's timeout."""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.001, 0.05
"""Times between looks at the store: Python serves signals in between. A wait of the store itself would log each time
that is over."""
SURELY_S = 1.0
"""Longer than a rank, on another thread of which the next meeting begins, takes between its number and its part."""
STATE = "state"
"""Key of "<steps completed> <why the meeting has ended>"."""


class _Hello(NamedTuple):
    """What a rank says first: which call it makes, for which process group, and who it is."""

    call: str
    group: str
    process: Process


class _State(NamedTuple):
    """How far a meeting is: steps that are complete, and why it has ended; "" while it has not."""

    done: int
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.done} {self.reason}"


class Meeting:
    """The ranks of a process group, one process each; every method is collective, and so is the constructor. It waits
    for all ranks as long as the group's own collectives do. As a context manager it tells the others when this rank
    leaves with an error.

    Args:
        group: None: the default group.
        call: what all ranks do here, a verb and more.

    Attributes:
        rank, size: this process's rank in the group, and how many there are.
        patience_s: how long the group's own collectives wait for late ranks.

    Raises:
        EPError: some rank does not come, or calls something else.
    """

    def __init__(self, group: dist.ProcessGroup | None, call: str = "connect") -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        known = group or dist.group.WORLD
        self._ranks = dist.get_process_group_ranks(known)
        self._process = Process.own()
        self._everyone: tuple[Process, ...] = ()
        self._step, self._told = 0, False
        with self._store_works():
            name = ",".join(map(str, self._ranks))
            self._counts = dist.PrefixStore(f"cute_ep/{name}", default_store())
            self._number = self._counts.add(f"began/{self.rank}", 1)
            self._store = dist.PrefixStore(str(self._number), self._counts)
            self._store.compare_set(STATE, "", str(_State(0)))
        own = _Hello(call, _counted_name(known), self._process)
        patience = group_timeout(known)
        self.patience_s = PATIENCE_S if patience is None else patience
        said: list[_Hello] = self.gather(own, self.patience_s, call)
        self._everyone = tuple(hello.process for hello in said)
        self._compare("wants to", [hello.call for hello in said])
        self._compare("is in process group", [hello.group for hello in said])

    def gather(self, one: Any, seconds: float = PATIENCE_S, doing: str = "connect") -> list:
        """What every rank gives, in the order of ranks. Waits for them, and says who is missing meanwhile.

        Args:
            one: this rank's part, which can be pickled.
            seconds: how long to wait.
            doing: what ranks do before they give theirs, a verb and more.

        Raises:
            EPError: some give nothing in time, or a rank has left before; says which and why. After that no step works,
                on any rank, so that none takes what belongs to another one.
        """
        with self._store_works():
            try:
                keys = self._give(one)
                self._wait(keys, seconds, doing)
                parts = self._store.multi_get(keys)
                if self._step > 1:  # all ranks have read what came before
                    self._store.delete_key(f"{self._step - 1}/{self.rank}")
            except (EPError, RuntimeError):
                raise
            except BaseException as error:
                self._leave(error)
                raise
        return [pickle.loads(part) for part in parts]

    def post(self, name: str, text: str) -> None:
        """Leave a word for the others, at any time and from any thread. No method waits for it."""
        with self._store_works():
            self._store.set(f"posted/{name}/{self.rank}", text)

    def posted(self, name: str, rank: int) -> str:
        """What a rank has posted last under a name; "": nothing."""
        key = f"posted/{name}/{rank}"
        with self._store_works():
            return self._store.get(key).decode() if self._store.check([key]) else ""

    def wait(self, seconds: float, doing: str = "connect") -> None:
        """Until every rank is here. EPError as of `gather`."""
        self.gather(None, seconds, doing)

    def on_all_ranks(
        self,
        make: Callable[[], Made],
        share: Callable[[Made], Any] = lambda made: None,
        undo: Callable[[Made], None] = lambda made: None,
        doing: str = "connect",
    ) -> tuple[Made, list]:
        """This rank's make(), and share() of what every rank made. Where it fails on one rank it fails on all: there
        with the error, elsewhere with EPError that names the rank; what was made is undone by undo(). It stays where
        the ranks lose each other (`gather`), since another one may have it in use."""
        try:
            made = make()
            try:
                shared = share(made)
            except BaseException:
                undo(made)
                raise
        except BaseException as error:  # the others are told first, also of an interrupt
            self._told = True
            with suppress(EPError), self._store_works():
                self._give((None, f"{type(error).__name__}: {error}"))
            raise
        gathered = self.gather((shared, None), doing=doing)
        for peer, (_, failure) in enumerate(gathered):
            if failure is not None:
                undo(made)
                raise EPError(f"{self._one(peer)} could not connect: {failure}")
        return made, [one for one, _ in gathered]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._told:
            self._leave(error)

    def _give(self, one: Any) -> list[str]:
        """Write this rank's part of the next step; returns the keys of all."""
        self._step += 1
        keys = [f"{self._step}/{rank}" for rank in range(self.size)]
        self._is_complete(self._state())
        self._store.set(keys[self.rank], pickle.dumps(one))
        return keys

    def _wait(self, keys: Sequence[str], seconds: float, doing: str) -> None:
        """Until the step is complete. EPError: the meeting ends before."""
        wait, look = Wait(seconds, LOG), SHORTEST_LOOK_S
        while not self._store.check(list(keys)):
            self._is_complete(self._state())
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            gone = [rank for rank in missing if self._everyone and self._process.sees_end_of(self._everyone[rank])]
            gone = [rank for rank in gone if not self._store.check([keys[rank]])]  # perhaps its last act
            if gone:
                self._settle(f"{self._named(gone)} ended before they could {doing}")
            elif ahead := self._ahead(missing) if self._step == 1 and wait.elapsed > SURELY_S else []:
                self._settle(f"{self._named(ahead)} left attempt {self._number} to {doing} for a later one")
            elif wait.left <= 0 and missing:
                waited = f"rank {self.rank} waited {seconds:g} s for"
                self._settle(f"{waited} {self._named(missing)} to {doing}{self._behind(missing)}")
            wait.say(self.rank, self._named(missing), doing + self._behind(missing))
            time.sleep(max(0.0, min(look, wait.until_word)))
            look = min(2 * look, LONGEST_LOOK_S)
        self._settle()

    def _settle(self, reason: str = "") -> None:
        """Make the step complete, or with a reason end the meeting unless the step is complete. EPError: the meeting
        has ended before it."""
        while not self._is_complete(state := self._state()):
            self._store.compare_set(
                STATE, str(state), str(_State(state.done, reason) if reason else _State(self._step))
            )

    def _is_complete(self, state: _State) -> bool:
        """Whether the step is. EPError: the meeting has ended before it."""
        if state.done < self._step and state.reason:
            told = "" if state.reason.startswith(f"rank {self.rank} ") else f"rank {self.rank}: "
            raise EPError(f"{told}{state.reason}; the ranks have parted, all of them must connect again")
        return state.done >= self._step

    def _leave(self, error: BaseException) -> None:
        """Tell those who wait for this rank in a later step that it does not come."""
        reason = f"rank {self.rank} left: {type(error).__name__}: {error}"
        with suppress(RuntimeError):
            while not (state := self._state()).reason:
                self._store.compare_set(STATE, str(state), str(_State(state.done, reason)))

    def _state(self) -> _State:
        done, _, reason = self._store.get(STATE).decode().partition(" ")
        return _State(int(done), reason)

    def _ahead(self, ranks: Sequence[int]) -> list[int]:
        """Those that have begun a later meeting."""
        return [rank for rank in ranks if self._counts.add(f"began/{rank}", 0) > self._number]

    def _behind(self, ranks: Sequence[int]) -> str:
        """How often ranks have begun to meet, of those that have more than this attempt to make up for."""
        counts = {rank: self._counts.add(f"began/{rank}", 0) for rank in ranks}
        behind = [f"{self._one(rank)} has made {count}" for rank, count in counts.items() if count < self._number - 1]
        return f" (rank {self.rank} makes attempt {self._number}, {', '.join(behind)})" if behind else ""

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks of the group, with those of the default group where they are others."""
        there = [self._ranks[rank] for rank in ranks]
        return f"rank(s) {list(ranks)}" + ("" if there == list(ranks) else f" (global {there})")

    def _one(self, rank: int) -> str:
        there = self._ranks[rank]
        return f"rank {rank}" + ("" if there == rank else f" (global {there})")

    def _compare(self, verb: str, given: Sequence[str]) -> None:
        """EPError, on all ranks, where ranks that can say it do not say the same."""
        said = {rank: value for rank, value in enumerate(given) if value}
        if len(set(said.values())) > 1:
            lines = ", ".join(f"{self._one(rank)} {verb} {value}" for rank, value in said.items())
            raise EPError(f"{lines}: must be the same on all ranks, in the same order of calls")

    @contextmanager
    def _store_works(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EPError(f"rank {self.rank} lost the other ranks: {error}") from None


def _counted_name(group: dist.ProcessGroup) -> str:
    """The name that torch gave to a group by counting groups, which is the same on all ranks; "" for another one."""
    return name if (name := group.group_name).isdecimal() else ""


def group_timeout(group: dist.ProcessGroup) -> float | None:
    """Seconds that the group's own collectives wait for late ranks; None where torch does not say."""
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        found = timeout_of_group(group, torch.device(device))
        if found is not None:
            return found.total_seconds()
    return None


def close_after(communicator: EPCommunicator, error: BaseException | None) -> None:
    """`close` at the end of a block, which must not hide an error that ended it: with one process per rank it waits for
    the other ranks, so the error is written to stderr first, and what goes wrong with closing behind it."""
    if error is None or not isinstance(communicator.group, Meeting):
        communicator.close()
        return
    who = f"cute_ep rank {communicator.rank}"
    sys.stderr.write(f"{who}: {type(error).__name__}: {error}; waiting for the other ranks to close\n")
    try:
        communicator.close()
    except (EPError, RuntimeError) as failure:
        sys.stderr.write(f"{who}: not closed, its memory stays allocated: {failure}\n")
