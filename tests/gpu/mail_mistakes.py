"""Mistakes of kernels around the mail between nodes. `tests/runtime/mail_mistakes.py` has those of the host."""

from __future__ import annotations

from tests.edits import Edit

from .mutant import Mutant

_AWAIT, _PACK, _PLACE = (f"kernels/mail/{name}.py" for name in ("await_mail", "pack_frame", "place"))
_WAIT = "        alive = place.wait_free(epoch - 1, Phase.FRAME_READ)\n"
_WRITE = "            self._copy_rows(args, place)\n            self._write_entries(args, place)\n"


def _one(schedule: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(schedule, (Edit(file, old, new),))


MAIL_MUTANTS = {
    # only the last piece is awaited
    "MAIL_LAST_SIGNAL": _one(
        "storm",
        _AWAIT,
        "(((args.pieces >> piece) & 1) != 0)",
        "(piece == int(Piece.ROUTES))",
    ),
    # round n-1 is awaited, whose header is compared with n
    "MAIL_WAIT_PREVIOUS": _one("storm", _AWAIT, "word, epoch, Awaited(", "word, epoch - 1, Awaited("),
    # rounds of mail are not compared
    "MAIL_NO_HEADER": _one("given up", _AWAIT, "if seen != Int32(epoch):", "if (seen != Int32(epoch)) & (seen < 0):"),
    # pack waits for nobody who reads
    "MAIL_NO_FREE_WAIT": _one("storm", _PLACE, "word, epoch, Awaited(", "word, Int64(0), Awaited("),
    # a frame's header is written before the rest, and before anything is known to be well
    "MAIL_HEADER_FIRST": _one(
        "given up",
        _PACK,
        _WAIT,
        "        gRound = array(args.routes, Int32, 1)\n        gRound[0] = Int32(epoch)\n" + _WAIT,
    ),
    # pack writes after ABORT
    "MAIL_PACK_ANYWAY": _one(
        "given up", _PACK, "        if alive:\n" + _WRITE, _WRITE.replace("            ", "        ")
    ),
    # ids behind a rank's tokens stay as they are
    "MAIL_UNMASKED": _one(
        "storm",
        _PACK,
        "            expert, weight = Int32(MASKED_ENTRY), Float32(1.0)\n",
        "            expert, weight = gId[index], Float32(1.0)\n",
    ),
    # nodes are added from the last to the first
    "MAIL_OTHER_ORDER": Mutant(
        "storm",
        (
            Edit("kernels/mail/sum_nodes.py", "node = first + turn\n", "node = nodes - 1 - first - turn\n"),
            Edit("kernels/mail/sum_nodes.py", "there=node < nodes", "there=node >= 0"),
        ),
    ),
    # sums are read from the landing of the round that was sent last
    "MAIL_TURN_OF_SENT": _one(
        "storm",
        "kernels/mail/sum_nodes.py",
        "place.rounds(RoundWord.RECEIVED) & 1",
        "place.rounds(RoundWord.SENT) & 1",
    ),
}
"""Name, MAIL_ and as in `tests/protocol/mail.pml` where the model has it -> mistake."""
