"""Arguments of the kernels between nodes, as `layouts.maps.arguments` has those of the others."""

from __future__ import annotations

from typing import NamedTuple

from cute_ep.layouts.maps.arguments import Address, Ids, Size


class MailGroup(NamedTuple):
    """What all kernels of a channel share (`layouts.maps.mail`).

    Attributes:
        status: host-visible records, one a node and one each of INPUT_ERRORS.
        abort: the abort word of the rank's arena.
        node, nodes: this rank's node, and how many there are.
        rounds: its words of `rounds`.
        arrived: its words of `arrived`, (node, piece).
        free: its words of `free`, (node).
        progress: host-visible words for the round that was packed last, and for the one that was exchanged last; 0:
            this launch tells nobody.
        batch: int32 dispatch round of the batch whose sums these are; 0: of frames, or unknown.
    """

    status: Address
    abort: Address
    timeout_ns: Address
    node: Size
    nodes: Size
    rounds: Address
    arrived: Address
    free: Address
    progress: Address
    batch: Address


class PackFrameArgs(NamedTuple):
    """Parameters of pack_frame, of T tokens in a frame of F.

    Attributes:
        x: [T, 16 * vectors] bytes, rows x_vectors vectors apart; scales: [T, scale_bytes] bytes, rows scales_pitch
            bytes apart; row_scales: [T] bfloat16; weights: [T, top_k] float32. 0 where there are none.
        ids: [T, top_k].
        payload, scales_out: [F, 16 * vectors] and [F, scale_bytes] of the own frame.
        routes: the last piece of the own frame, in which weights and row scales begin weights_at and row_scales_at.
        experts: of all ranks.
    """

    group: MailGroup
    ids: Ids
    x: Address
    x_vectors: Size
    scales: Address
    scales_pitch: Size
    row_scales: Address
    weights: Address
    payload: Address
    scales_out: Address
    routes: Address
    weights_at: Size
    row_scales_at: Size
    tokens: Size
    frame: Size
    top_k: Size
    experts: Size
    vectors: Size
    scale_bytes: Size


class PackSumsArgs(NamedTuple):
    """Parameters of pack_sums, of frames of F tokens.

    Attributes:
        sums: [nodes, F, 8 * vectors] bfloat16.
        out: a mail of sums for each node in rounds of parity 0, `pitch` bytes apart; `turn` bytes to those of parity 1.
    """

    group: MailGroup
    sums: Address
    out: Address
    pitch: Address
    turn: Address
    frame: Size
    vectors: Size


class AwaitMailArgs(NamedTuple):
    """Parameters of await_frames and await_sums.

    Attributes:
        pieces: a bit for each `Piece` that a mail of the channel has.
        headers: of node 0's mail, with `pitch` bytes to the next, and `turn` to those of rounds of parity 1.
        frame: rows of a frame.
    """

    group: MailGroup
    pieces: Size
    headers: Address
    pitch: Address
    turn: Address
    frame: Size


class PutArgs(NamedTuple):
    """A piece of put_mail.

    Attributes:
        source: address of what goes to node 0's rank in rounds of parity 0, with `step` bytes to the next node's.
        to: offset in the map of each.
        source_turn, to_turn: bytes to those of parity 1.
        num_bytes: 0 where there is no such piece.
    """

    source: Address
    step: Address
    source_turn: Address
    to: Address
    to_turn: Address
    num_bytes: Address


class PutMailArgs(NamedTuple):
    """Parameters of put_mail. `mails`: [nodes] addresses of the maps of each node's rank."""

    group: MailGroup
    mails: Address
    payload: PutArgs
    scales: PutArgs
    routes: PutArgs


class SignalMailArgs(NamedTuple):
    """Parameters of signal_mail, which stores a round in words of every other node's rank.

    Attributes:
        mails: [nodes] addresses of their maps.
        word: offset of the first word in a map.
        words: a bit for each word from there on, of at most 4.
        round_at: address of the round, one of `rounds`.
    """

    group: MailGroup
    mails: Address
    word: Address
    words: Size
    round_at: Address


class UnpackFramesArgs(NamedTuple):
    """Parameters of unpack_frames, of frames of F tokens.

    Attributes:
        routes: the last piece of node 0's frame, with `pitch` bytes to the next; parts as in PackFrameArgs.
        ids: [nodes * F, top_k] int32, the ids less first_expert where they are among `experts`, else -1.
        weights: [nodes * F, top_k] float32.
        row_scales: [nodes * F] bfloat16, 0 where rows have none.
    """

    group: MailGroup
    routes: Address
    pitch: Address
    weights_at: Size
    row_scales_at: Size
    ids: Address
    weights: Address
    row_scales: Address
    frame: Size
    top_k: Size
    first_expert: Size
    experts: Size


class SumNodesArgs(NamedTuple):
    """Parameters of sum_nodes, of T tokens.

    Attributes:
        own: [T, 8 * vectors] bfloat16, the own node's sums.
        landed: the same of node 0 in rounds of parity 0, with `pitch` bytes to the next node's, and `turn` to those of
            parity 1; the own node's are not read.
        out: [T, 8 * vectors] of out_type (`OutputType`).
        slices_log2: a row has 2^slices_log2 slices.
    """

    group: MailGroup
    own: Address
    landed: Address
    pitch: Address
    turn: Address
    out: Address
    out_type: Size
    tokens: Size
    vectors: Size
    slices_log2: Size
