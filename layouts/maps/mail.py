"""The mail map: what the ranks of a rail, one on each node, leave in each other's memory (`docs/protocol.md`).

One *mail* is what a rank gives to one other node in one round: of dispatch a frame, rows with their routes; of combine
the sums that the own node has made for that node's rank. A mail travels in pieces. A *channel* has rounds of its own.

Every rank has one map in memory that the rail's engine reaches. `parity` is the round modulo 2: two combines may be
sent before the first is received.

| region       | axes                    | written by | meaning                                                   |
| ------------ | ----------------------- | ---------- | --------------------------------------------------------- |
| rounds       | (channel, RoundWord)    | owner      | mails sent and received; CTAs of a launch that have ended |
| mails        | (node)                  | host       | address of the map of each node's rank, as mapped here    |
| arrived      | (channel, node, piece)  | peer       | last round of which that node's rank has brought a piece  |
| free         | (channel, node)         | peer       | last round of this rank's mail that that rank has read    |
| payload      | (node, token, byte)     | peer       | rows of a frame                                           |
| scales       | (node, token, byte)     | peer       | their scale factors                                       |
| routes       | (node, byte)            | peer       | `Routes` of a frame                                       |
| sums         | (parity, node, byte)    | peer       | bfloat16 sums for tokens of this rank, after a header     |
| sent_sums    | (parity, node, byte)    | owner      | the same for that node's rank                             |

A rank's own frame stands in its own node's place, from where the engine takes it. Frames of F tokens are F rows apart,
so rows of all nodes make one tensor; regions have room for `max_tokens` of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cute_ep.layouts.maps.arena import ARENA_ALIGNMENT, COMBINE_ITEMSIZE, LL_BYTES, PAGE_BYTES
from cute_ep.layouts.maps.formats import VECTOR_BYTES, Format
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.record import RegionMap, align_up

HEADER_BYTES = 16
"""Of a mail: four 32-bit `MailHeader` words."""
PARITIES = 2
"""Landings of sums."""
WORDS_OF_NODE = 4
"""Threads of one CTA for a node's words, one of which has none."""
MAX_NODES = THREADS // WORDS_OF_NODE
"""Most nodes on GPUs: one CTA waits for all of them."""


class Channel(IntEnum):
    """What has rounds of its own."""

    FRAMES = 0
    SUMS = 1


class RoundWord(IntEnum):
    """Indices of the 64-bit words of a channel's `rounds`."""

    SENT = 0
    RECEIVED = 1
    DONE = 2


class Piece(IntEnum):
    """What travels of a frame by itself; sums are one piece, the last. The header is in the last piece."""

    PAYLOAD = 0
    SCALES = 1
    ROUTES = 2


class MailHeader(IntEnum):
    """Indices of the 32-bit words of a mail's header.

    Attributes:
        ROUND: of the channel, its low 32 bits. Written after everything else.
        FRAME: rows of a frame.
        BATCH: of sums, the dispatch round of their batch; 0: it is unknown.
    """

    ROUND = 0
    FRAME = 1
    BATCH = 2


@dataclass(frozen=True)
class Routes:
    """Byte offsets in the last piece of a frame: after the header [F, top_k] int32 ids, then [F, top_k] float32 weights
    and [F] bfloat16 scales of rows.

    Attributes:
        nbytes: of the piece.
    """

    weights: int
    row_scales: int
    nbytes: int

    @classmethod
    def of(cls, frame: int, top_k: int, row_scale_bytes: int) -> Routes:
        """For frames of so many rows."""
        entries = 4 * frame * top_k
        row_scales = HEADER_BYTES + 2 * entries
        return cls(HEADER_BYTES + entries, row_scales, row_scales + frame * row_scale_bytes)


def sums_bytes(frame: int, hidden: int) -> int:
    """Bytes of a mail of sums, for frames of so many rows: header, and [F, hidden] bfloat16."""
    return HEADER_BYTES + frame * hidden * COMBINE_ITEMSIZE


class Mail:
    """Byte map of one rank's mail.

    Args:
        nodes: number of nodes.
        max_tokens: most rows of a frame.
        top_k: experts of a token.
        fmt: format of the rows.
        hidden: elements of a row.
    """

    def __init__(self, *, nodes: int, max_tokens: int, top_k: int, fmt: Format, hidden: int) -> None:
        self.payload_bytes, self.scale_bytes = fmt.payload_bytes(hidden), fmt.scale_bytes(hidden)
        routes = Routes.of(max_tokens, top_k, fmt.row_scale_bytes)
        sums = sums_bytes(max_tokens, hidden)
        regions = RegionMap(ARENA_ALIGNMENT)
        self.rounds = regions.add("rounds", LL_BYTES, len(Channel), len(RoundWord))
        self.mails = regions.add("mails", LL_BYTES, nodes)
        self.arrived = regions.add("arrived", LL_BYTES, len(Channel), nodes, len(Piece))
        self.free = regions.add("free", LL_BYTES, len(Channel), nodes)
        self.payload = regions.add("payload", 1, nodes, max_tokens, self.payload_bytes)
        self.scales = regions.add("scales", 1, nodes, max_tokens, self.scale_bytes)
        self.routes = regions.add("routes", 1, nodes, align_up(routes.nbytes, VECTOR_BYTES))
        self.sums = regions.add("sums", 1, PARITIES, nodes, sums)
        self.sent_sums = regions.add("sent_sums", 1, PARITIES, nodes, sums)
        self.regions = regions.regions
        self.nbytes = regions.nbytes
        self.allocation = align_up(self.nbytes, PAGE_BYTES)

    def pieces(self, frame: int, routes: Routes) -> list[tuple[Piece, int, int, int]]:
        """What travels of a frame: (piece, offset of node 0's, bytes to the next node's, bytes)."""
        rows = [(Piece.PAYLOAD, self.payload, self.payload_bytes), (Piece.SCALES, self.scales, self.scale_bytes)]
        found = [(piece, region.at(), frame * size, frame * size) for piece, region, size in rows if size]
        nbytes = align_up(routes.nbytes, VECTOR_BYTES)  # the region's pitch is a multiple, too
        return [*found, (Piece.ROUTES, self.routes.at(), self.routes.stride[0], nbytes)]
