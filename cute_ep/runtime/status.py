"""What a rank's kernels report to the host: peers that did not arrive in time, and what was wrong with the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cute_ep.api.errors import EPError, EPTimeout, raise_input_error
from cute_ep.api.flags import NOT_CALLED, Flags
from cute_ep.layouts.maps.arena import MAX_SLICES, StateWord
from cute_ep.layouts.maps.mail import Piece
from cute_ep.layouts.maps.routing import INPUT_ERRORS, Phase, StatusWord, pack_phase, unpack_phase
from cute_ep.runtime.driver import HostMemory

ORDER_OPERATIONS = {StateWord.DISPATCH_SEND_EPOCH: "dispatch", StateWord.COMBINE_SEND_EPOCH: "combine"}

MISSING = {
    Phase.DISPATCH_CONSUMED: "it has launched no dispatch since it received round {round} (the last: {seen}), so round "
    "{next} cannot be sent; has it stopped, or is it behind with its calls?",
    Phase.ROUTE_TABLE: f"it has sent nothing of dispatch round {{round}}: {NOT_CALLED}",
    Phase.ROUTE_ENTRY: "it has sent the counts of dispatch round {round}, but not the routing of its "
    "topk_ids.flatten()[{index}]; did its launch end, or its device fail?",
    Phase.MESSAGE: "it has sent the routing of dispatch round {round}, but not slice {slice} of its token {token} "
    "(there it last sent round {seen}); did its launch end, or its device fail?",
    Phase.MESSAGE_WORDS: "it has sent the routing of dispatch round {round}, but not all words of slice {slice} of "
    "its token {token}; did its launch end, or its device fail?",
    Phase.COMBINE_CONSUMED: "it has launched no combine since it received round {round} (the last: {seen}), so round "
    "{next} cannot be sent; has it stopped, or is it behind with its calls?",
    Phase.RETURN_ROUND: f"it has not begun combine round {{round}}: {NOT_CALLED}",
    Phase.RETURN: "it has not returned all rows in combine round {round}: slice {slice} of this rank's token {token} "
    f"is missing (there it last returned round {{seen}}): {NOT_CALLED}",
    Phase.RETURN_WORDS: "it has not returned all rows in combine round {round}: words of slice {slice} of this rank's "
    f"token {{token}} are missing: {NOT_CALLED}",
    Phase.FRAME_READ: "it has not read this rank's frame of dispatch round {round}, so no other can be sent: its "
    "dispatch is behind other work of its stream or waits for ranks of its node, or its device failed",
    Phase.FRAME: "its frame of dispatch round {round} has not come whole ({last} is of round {seen}): "
    f"{NOT_CALLED}, or the network",
    Phase.SUMS_READ: "it has not read this rank's sums of {sums}, so no others can be sent: its "
    "combine is behind other work of its stream or waits for ranks of its node, or its device failed",
    Phase.SUMS: "its sums of {sums} have not come whole ({last} is of round {seen}): "
    f"{NOT_CALLED}, or the network",
    Phase.FRAME_SIZE: "its frame of dispatch round {index} has {seen} rows, and here {round}: give dispatch the same "
    "`frame` on all ranks",
}
"""What a peer has not done, by the wait that it ended. Rounds of an operation are counted from 1."""


@dataclass(frozen=True)
class Record:
    """A status record: what a wait of a kernel has missed, or what is wrong with the input."""

    phase: Phase
    token: int
    index: int
    expected: int
    seen: int


class Status:
    """One rank's status records, in host memory that its kernels store to: one for each of `peers`, the ranks that it
    exchanges messages with, itself among them, and one for each of INPUT_ERRORS."""

    def __init__(self, rank: int, peers: tuple[int, ...], *, landings_apart: bool = False) -> None:
        """landings_apart: whether kernels count the rounds of each landing of sums by themselves
        (`RankMail.count_landings_apart`)."""
        self.rank, self.peers, self._apart = rank, peers, landings_apart
        self.memory = HostMemory(len(StatusWord) * (len(peers) + len(INPUT_ERRORS)))
        self._phases = slice(StatusWord.PHASE, len(StatusWord) * len(peers), len(StatusWord))
        self._kinds = slice(len(StatusWord) * len(peers), None, len(StatusWord))
        self.address, self.free = self.memory.address, self.memory.free

    @property
    def reports(self) -> tuple[int, int, int]:
        """(address, words, step): every step-th of so many words is 0 until a wait has timed out, or a launch came out
        of order."""
        return self.address, len(StatusWord) * len(self.peers), len(StatusWord)

    @property
    def failed(self) -> bool:
        """Whether a wait of this rank has timed out, or a launch came out of order."""
        return any(self.memory.words[self._phases])

    def report(self, peer: int, phase: Phase, index: int, expected: int, seen: int) -> None:
        """A record of a wait for rank `peer` that was in vain, as a kernel makes it; nothing where there is one."""
        at = len(StatusWord) * self.peers.index(peer)
        if not self.memory.words[at + StatusWord.PHASE]:
            words = {StatusWord.INDEX: index, StatusWord.EXPECTED: expected, StatusWord.SEEN: seen}
            for word, value in words.items():
                self.memory.words[at + word] = value
            self.memory.words[at + StatusWord.PHASE] = pack_phase(phase, 0)

    def raise_failure(self, flags: Callable[[], Flags] | None = None) -> None:
        """EPTimeout when a wait has timed out: names the peers, the phase, the epochs expected and seen, and has the
        rank's `flags` if they can be read. EPError when a fused launch has found a round that was sent and not
        received, or ranks have combined other batches."""
        if not self.failed:
            return
        records = dict(zip(self.peers, self._records(), strict=False))
        missing = {peer: record for peer, record in records.items() if record.phase}
        for record in missing.values():
            if record.phase == Phase.ORDER:
                operation = ORDER_OPERATIONS[StateWord(record.index)]
                sent, received = record.seen, record.expected
                raise EPError(
                    f"rank {self.rank}: a fused {operation} ran when {sent} rounds had been sent and {received} "
                    "received (were graphs replayed in another order than captured?); it did nothing, and the "
                    "communicator is unusable: close all ranks and connect again"
                )
        if others := {peer: record for peer, record in missing.items() if record.phase == Phase.PAIR}:
            one = next(iter(others.values()))
            told = ", ".join(f"rank {peer} rows of dispatch round {other.seen}" for peer, other in others.items())
            raise EPError(
                f"rank {self.rank}: {self._sums(one.index)} has the batch of dispatch round {one.expected} here, but "
                f"{told}: all "
                "ranks must combine the batches of the same dispatch rounds in the same order (were graphs replayed "
                "in another order on some rank?); the sums are wrong, and the communicator is unusable: close all "
                "ranks and connect again"
            )
        details = [self._missing(peer, record) for peer, record in missing.items()]
        phases = sorted({record.phase.name for record in missing.values()})
        behind = None
        with suppress(EPError, RuntimeError):  # of a device that has failed
            behind = None if flags is None else flags()
        raise EPTimeout(" / ".join(phases), self.rank, tuple(missing), tuple(details), behind)

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        """What kernels have found wrong with this rank's input, and then forgotten: (index, expected, seen) of the
        latest of each kind."""
        found: dict[Phase, tuple[int, int, int]] = {}
        if not any(self.memory.words[self._kinds]):
            return found
        for number, one in list(enumerate(self._records()))[len(self.peers) :]:
            if one.phase:
                self.memory.words[len(StatusWord) * number] = Phase.NONE
                found[one.phase] = one.index, one.expected, one.seen - (1 << 32) if one.seen >> 31 else one.seen
        return found

    def raise_input_error(self, others: Sequence[str] = ()) -> None:
        """EPInputError of what `take_input_errors` finds. `others`: what else is wrong, in words."""
        raise_input_error(self.rank, self.take_input_errors(), others)

    def _sums(self, number: int) -> str:
        """A round of sums, in words."""
        return f"round {number} of one of the two landings of sums" if self._apart else f"combine round {number}"

    def _missing(self, peer: int, record: Record) -> str:
        """What has not come from a peer, in words."""
        if record.phase == Phase.GRID:
            return (
                f"GRID: {record.seen} of {record.expected} receiving CTAs came together; were they resident together? "
                "(does other work hold the SMs?)"
            )
        return f"{record.phase.name} of rank {peer}: " + MISSING[record.phase].format(
            round=record.expected,
            next=record.expected + 2,
            seen=record.seen,
            token=record.token,
            slice=_slice_of_token(record.index, record.token),
            index=record.index,
            # of a landing that is counted apart pack waits for one round less
            sums=self._sums(record.expected + (self._apart and record.phase == Phase.SUMS_READ)),
            last="its last mail" if record.index == len(Piece) else f"what came last as piece {record.index}",
        )

    def _records(self) -> list[Record]:
        """Those of every peer, then of every kind of input error."""
        width, words = len(StatusWord), self.memory.words
        return [_record(words[at : at + width]) for at in range(0, len(words), width)]


def _record(words: Sequence[int]) -> Record:
    phase, token = unpack_phase(words[StatusWord.PHASE])
    return Record(Phase(phase), token, words[StatusWord.INDEX], words[StatusWord.EXPECTED], words[StatusWord.SEEN])


def _slice_of_token(index: int, token: int) -> int:
    """Which of its token's slices a slice is: all tokens have 2^k of them, and `index` counts those of all tokens."""
    if not token:
        return index
    slices_log2 = next((k for k in range(MAX_SLICES.bit_length()) if index >> k == token), 0)
    return index - (token << slices_log2)
