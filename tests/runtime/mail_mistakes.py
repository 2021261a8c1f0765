"""Mistakes of mail between nodes: in the host's code, and in the emulated kernels as kernels could make them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.edits import Edit

MAIL, NODES = "cute_ep.runtime.mail", "cute_ep.runtime.nodes"
KERNELS, STORM = "tests.runtime.emulated_mail", "tests.storm_rail"


@dataclass(frozen=True)
class Mistake:
    """Attributes:
    schedule: out of `test_mail_mistakes.SCHEDULES`, which must find it.
    edits: changes of modules, whose names stand for files.
    """

    schedule: str
    edits: tuple[Edit, ...]


def _one(schedule: str, module: str, old: str, new: str) -> Mistake:
    return Mistake(schedule, (Edit(module, old, new),))


HASTY = Edit(
    STORM, "        if not self.copies:\n            lanes.join(", "        if False:\n            lanes.join("
)
"""A put returns before it has read its sources."""
_AWAIT = '        self._launch("await_frames", awaited, 1)\n'
_FREED = "        self.engine.free(self, channel, landing)\n"
_SUM = '        self._launch(\n            "sum_nodes",\n'
_TURNS = "(0 if self.engine.queued else region.stride[0] for region in (source, to))"
_UNPACK = "        self.mail.unpack(into, frame)\n"
_IDS = "            ids = pending.of_node.topk_ids\n"
_ENTRIES = "        ids.fill_(-1)\n        out.fill_(1)\n"
_NODE = '        for node in range(self.group("nodes")):\n            rows = own if'
_SENT_FRAME = "        self.wait_free(epoch - 1, Phase.FRAME_READ)\n        if not self.healthy:\n            return\n"
_FINISH = "        self.finish(epoch, [routes], frame)\n"

_SENDS_AHEAD = (
    Edit(MAIL, _AWAIT, "        self.awaited = awaited\n"),
    Edit(NODES, _UNPACK, '        self.mail._launch("await_frames", self.mail.awaited, 1)\n' + _UNPACK),
    Edit(
        NODES,
        "                self._exchange(given, rows, frame)\n"
        "                sent = self.node.dispatch_async(**_arguments(frame))\n"
        "                self.mail.free(Channel.FRAMES)\n",
        "                of = self.cfg.frame_rows(given.frame)\n"
        "                self.mail.send_frame(rows, given.topk_ids, given.router_weights, of)\n",
    ),
    Edit(NODES, "slices = sent.return_slices_log2", "slices = 0"),
    Edit(NODES, "pending.of_node = sent", "pending.of_node = frame"),
    Edit(
        NODES,
        _IDS,
        "            frame = pending.of_node\n"
        '            self.mail._launch("await_frames", self.mail.awaited, 1)\n'
        "            self.mail.unpack(frame, self.cfg.frame_rows(pending.frame))\n"
        "            pending.of_node = self.node.dispatch_async(**_arguments(frame))\n"
        "            self.mail.free(Channel.FRAMES)\n" + _IDS,
    ),
)

MISTAKES = {
    # ---- the host's code
    # only the last piece is awaited
    "LAST_SIGNAL": _one("storm", MAIL, "words_of(puts), headers", "1 << Piece.ROUTES, headers"),
    # a rank without tokens puts only the last piece
    "FEW_PIECES": _one(
        "storm",
        MAIL,
        "self.engine.put(self, Channel.FRAMES, puts)",
        "self.engine.put(self, Channel.FRAMES, puts if tokens else puts[-1:])",
    ),
    # sums of outstanding rounds have one landing
    "ONE_LANDING": _one("storm", MAIL, _TURNS, "(source.stride[0], 0)"),
    "ONE_LANDING_QUEUED": Mistake(
        "queues",
        (
            Edit(MAIL, "min(self._landings) if self.engine.queued else 0", "0"),
            Edit(MAIL, "self._landings.remove(landing)", "self._landings.discard(landing)"),
        ),
    ),
    # sums of outstanding rounds have one sending buffer, which puts read when they like
    "ONE_SOURCE": Mistake("late reads", (Edit(MAIL, _TURNS, "(0, to.stride[0])"), HASTY)),
    # landings are free before they are read
    "FREE_EARLY": _one("storm", NODES, _UNPACK, "        self.mail.free(Channel.FRAMES)\n" + _UNPACK),
    "FREE_EARLY_SUMS": _one("storm", MAIL, _SUM, "        self.free(Channel.SUMS)\n" + _SUM),
    # the node's dispatch is not behind the await
    "READ_FIRST": Mistake(
        "storm",
        (
            Edit(MAIL, _AWAIT, "        self._awaited = awaited\n"),
            Edit(
                MAIL,
                _FREED,
                "        if channel == Channel.FRAMES:\n"
                '            self._launch("await_frames", self._awaited, 1)\n' + _FREED,
            ),
        ),
    ),
    # the next round is put before this one is awaited: `dispatch_wait` awaits
    "SENDS_AHEAD": Mistake("storm", _SENDS_AHEAD),
    "SENDS_AHEAD_QUEUED": Mistake("queues", _SENDS_AHEAD),
    # ids are copied when the other half comes
    "IDS_LATE": _one(
        "storm",
        NODES,
        _IDS,
        _IDS + "            weights = pending.keep_alive[1]\n"
        "            into = Frame(QuantizedRows(ids, None, None), ids, weights, ())\n"
        "            self.mail.unpack(into, self.cfg.frame_rows(pending.frame))\n",
    ),
    # the own node's sums are read from where those of the last round are
    "OWN_SUMS_LATE": Mistake(
        "storm",
        (
            Edit(
                NODES,
                "        pending.landing = send(",
                "        self._last = pending.sums\n        pending.landing = send(",
            ),
            Edit(NODES, "        own = pending.sums[", "        own = self._last["),
        ),
    ),
    # ---- kernels
    # headers are not compared
    "NO_HEADER": _one("given up", KERNELS, "if header[MailHeader.ROUND] != epoch:", "if False:"),
    # the header is written before the rest
    "HEADER_FIRST": _one(
        "given up", KERNELS, _SENT_FRAME, "        at(routes, torch.int32, 1).fill_(epoch)\n" + _SENT_FRAME
    ),
    # pack writes after ABORT
    "PACK_ANYWAY": Mistake(
        "given up",
        (
            Edit(KERNELS, _SENT_FRAME, "        self.wait_free(epoch - 1, Phase.FRAME_READ)\n"),
            Edit(KERNELS, _FINISH, "        if self.healthy:\n    " + _FINISH),
        ),
    ),
    # round n-1 is awaited
    "WAIT_PREVIOUS": _one("storm", KERNELS, "+ piece), epoch, node, phase", "+ piece), epoch - 1, node, phase"),
    # pack waits for nobody who reads, or for readers of the round before
    "NO_FREE_WAIT": _one("storm", KERNELS, "8 * node, epoch, node", "8 * node, 0, node"),
    "FREE_BEFORE": _one("storm", KERNELS, "self.wait_free(epoch - 1,", "self.wait_free(epoch - 2,"),
    "FREE_BEFORE_SUMS": _one("storm", KERNELS, "self.wait_free(epoch - 2,", "self.wait_free(epoch - 3,"),
    # ids behind a rank's tokens stay as they are
    "UNMASKED": _one("storm", KERNELS, _ENTRIES, "        out.fill_(1)\n"),
    # nodes are added in another order
    "OTHER_ORDER": _one(
        "storm", KERNELS, _NODE, _NODE.replace('range(self.group("nodes"))', 'reversed(range(self.group("nodes")))')
    ),
    # sums are read from the landing of the round that was sent last
    "TURN_OF_SENT": _one(
        "storm",
        KERNELS,
        "landed += (int(self.rounds(RoundWord.RECEIVED)) & 1) * turn",
        "landed += (int(self.rounds(RoundWord.SENT)) & 1) * turn",
    ),
}
"""Name, as in `tests/protocol/mail.pml` where the model has it -> mistake."""

FOUND = {
    # mistake: its name in the model (mail.pml), above, and in tests/gpu/mail_mistakes.py; "": it has none there
    "a signal on the last piece only": ("LAST_SIGNAL", "LAST_SIGNAL", "MAIL_LAST_SIGNAL"),
    "a word that counts the signals of all pieces": ("ONE_WORD", "", ""),  # the map has a word for each
    "fewer pieces without tokens": ("FEW_PIECES", "FEW_PIECES", ""),
    "one landing for outstanding sums": ("ONE_LANDING", "ONE_LANDING", ""),
    "the same, where the host says where they land": ("ONE_LANDING", "ONE_LANDING_QUEUED", ""),
    "a landing that is written before it is free": ("NO_FREE_WAIT", "NO_FREE_WAIT", "MAIL_NO_FREE_WAIT"),
    "one that is written a round too early": ("FREE_BEFORE", "FREE_BEFORE", ""),
    "the same, of sums": ("FREE_BEFORE", "FREE_BEFORE_SUMS", ""),
    "one that depends on the length of the frame, of an engine that does not look at ABORT": ("MOVED", "", ""),
    "a landing that is free before it is read": ("FREE_EARLY", "FREE_EARLY", ""),
    "the same, of a landing of sums": ("FREE_EARLY", "FREE_EARLY_SUMS", ""),
    "a header that is not compared": ("NO_HEADER", "NO_HEADER", "MAIL_NO_HEADER"),
    "a header that is written before the rest": ("HEADER_FIRST", "HEADER_FIRST", "MAIL_HEADER_FIRST"),
    "a pack that writes after ABORT": ("PACK_ANYWAY", "PACK_ANYWAY", "MAIL_PACK_ANYWAY"),
    "sources that are written while a put may read them": ("ONE_SOURCE", "ONE_SOURCE", ""),
    "own sums that are read late": ("", "OWN_SUMS_LATE", ""),
    "ids that are copied in dispatch_wait": ("FREE_EARLY", "IDS_LATE", ""),
    "a put before the await of the round before": ("SENDS_AHEAD", "SENDS_AHEAD", ""),
    "the same, where kernels wait for nobody": ("ONE_LANDING", "SENDS_AHEAD_QUEUED", ""),
    "an await of round n-1": ("WAIT_PREVIOUS", "WAIT_PREVIOUS", "MAIL_WAIT_PREVIOUS"),
    "a node's dispatch that is not behind the await": ("READ_FIRST", "READ_FIRST", ""),
    "ids behind a rank's tokens that are not masked": ("", "UNMASKED", "MAIL_UNMASKED"),
    "nodes that are added in another order": ("", "OTHER_ORDER", "MAIL_OTHER_ORDER"),
    "sums that are read from another round's landing": ("", "TURN_OF_SENT", "MAIL_TURN_OF_SENT"),
}
"""Where each mistake is found. Three landings for two outstanding rounds, which a design without "free" would need, are
not needed: pack n waits until round n-2 is read."""
