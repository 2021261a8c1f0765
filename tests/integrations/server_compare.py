"""Greedy answers of two servers to the same requests, up to the first different token of each."""

from __future__ import annotations

from typing import NamedTuple

from tests.integrations.server_load import Round


class Difference(NamedTuple):
    """The first place where two greedy answers differ.

    Attributes:
        request: its number.
        place: of the token in the answer.
        margin: how much likelier (in log probability) each server takes its own token to be than the other's; the
            smaller of both. infinity if a server does not list the other's token.
        off: how far the servers' log probabilities of these two tokens are apart, at most; infinity likewise.
    """

    request: int
    place: int
    margin: float
    off: float


class Comparison(NamedTuple):
    """Two rounds of the same requests, compared up to the first different token of each answer.

    Attributes:
        equal: answers without a difference, aborted ones up to the shorter length.
        tokens: compared, differing ones included.
        differences: of the other answers.
        offs: how far log probabilities of equal tokens are apart, ascending.
    """

    equal: int
    tokens: int
    differences: list[Difference]
    offs: list[float]

    def table(self) -> dict[str, float]:
        """In numbers: how many are equal, and how far log probabilities are apart."""
        offs = self.offs or [0.0]
        at = {f"off_{word}": offs[int(share * (len(offs) - 1))] for word, share in (("p50", 0.5), ("p99", 0.99))}
        return {
            "equal": self.equal,
            "different": len(self.differences),
            "tokens": self.tokens,
            **{name: round(value, 5) for name, value in at.items()},
            "off_most": round(offs[-1], 5),
            "first_off_most": round(max((one.off for one in self.differences), default=0.0), 5),
            "first_margin_most": round(max((one.margin for one in self.differences), default=0.0), 5),
        }


def compare(ours: Round, theirs: Round) -> Comparison:
    """Answers of two servers, or of one server twice, to the same requests."""
    result = Comparison(0, 0, [], [])
    equal = tokens = 0
    for number, (one, other) in enumerate(zip(ours.answers, theirs.answers, strict=True)):
        a, b = one.said, other.said
        length = min(len(a.tokens), len(b.tokens))
        place = next((at for at in range(length) if a.tokens[at] != b.tokens[at]), length)
        result.offs.extend(abs(x - y) for x, y in zip(a.logprobs[:place], b.logprobs[:place], strict=True))
        tokens += min(place + 1, length)
        if place == length:
            equal += 1
            continue
        mine, its = a.tokens[place], b.tokens[place]
        left, right = a.top[place], b.top[place]
        margin = off = float("inf")
        if its in left and mine in right:
            margin = min(a.logprobs[place] - left[its], b.logprobs[place] - right[mine])
            off = max(abs(a.logprobs[place] - right[mine]), abs(b.logprobs[place] - left[its]))
        result.differences.append(Difference(number, place, margin, off))
    result.offs.sort()
    return result._replace(equal=equal, tokens=tokens)
