"""From units to vectors: the payload of a warp's 32 units, as vectors that its lanes store side by side.

A unit of four words is a vector. One of more, such as the six words of 32 elements of 6 bits, ends within a vector, and
lanes exchange words through shared memory:

    word w of the unit of lane l         (w, l) : (1, unit words)
    word w of vector 32 * turn + lane    (w, lane, turn) : (1, 4, 128)
"""

from __future__ import annotations

from math import gcd

import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.memory import LANES, WORDS, Share
from cute_ep.layouts.maps.formats import Format
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap


class Payload:
    """What a warp encodes at a time: 32 units.

    Attributes:
        vectors: 16-byte vectors of 32 units.
        turns: vectors that a lane stores at most.
        whole: whether a unit is a vector.
    """

    def __init__(self, fmt: Format, shared: RegionMap) -> None:
        self.words = fmt.unit_words
        self.vectors = LANES * self.words // WORDS
        self.turns = -(-self.vectors // LANES)
        self.whole = self.words == WORDS
        if not self.whole:
            self.tile = shared.add("payload", 4, WARPS, LANES * self.words)

    @cute.jit
    def exchange(self, warp: Int32, lane: Int32, rUnit: cute.Tensor, rQ: cute.Tensor) -> None:
        """By all 32 lanes, unless units are `whole`: rUnit (words) is the lane's unit, rQ (4, turns) becomes vectors
        lane, 32 + lane, ... of the 32 units, zeros behind the last one."""
        sWords = shared_array(self.tile, Uint32)[warp, None]
        cute.arch.sync_warp()  # all have read what they exchanged before
        part = gcd(self.words, WORDS)
        sUnit = cute.logical_divide(cute.local_tile(sWords, (self.words,), (lane,)), part)
        move(plain, cute.logical_divide(rUnit, part), sUnit)
        cute.arch.sync_warp()
        corner = cute.local_tile(sWords, (WORDS,), (lane,)).iterator
        sVectors = cute.make_tensor(corner, cute.make_layout((WORDS, self.turns), stride=(1, WORDS * LANES)))
        move(plain, Share(sVectors, self.vectors - lane, LANES), rQ, outside=0)
