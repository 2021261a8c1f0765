"""What a communicator keeps so that a launch takes little of the host's time.

Without the compiled launcher a pair of calls takes about 31 us of one host thread (H200's host, 2026-11-22), nearly all
of it Python, and while tokens are few the GPU waits for it. So what does not change from call to call is found once:

- the launch shape of an operation and a number of tokens, as the record that kernels are given;
- the kernel with the addresses of a caller's buffers bound to it: then a launch neither reads fifteen addresses nor
  checks the buffers again. `DispatchBuffers` cannot change but in whether gradients or inference mode forbid to write
  them, which is looked at in each call;
- where a caller's buffers lie: what a call reads is seldom there, though often between them;
- that a batch was made here (`Dispatched.is_whole`), so that combine need not check it again.

Nothing here changes what is launched. What is kept goes with the buffers, or after SHAPES_KEPT shapes, or when another
`Tuning` is set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.tensors import check_apart, end_of
from cute_ep.api.validate import check_buffers
from cute_ep.layouts.maps.arena import MANY_SLICES, MAX_SLICES, has_whole_segments, pack_returns
from cute_ep.layouts.maps.arguments import Grid, Scales, SharedExpert
from cute_ep.layouts.maps.launch import PIPED_THREADS, WIDE_THREADS
from cute_ep.layouts.maps.scales import scale_block
from cute_ep.layouts.maps.variants import PIPED_SUFFIX
from cute_ep.runtime.arguments import output_record, scales_record, shared_record
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.parts import RankParts
from cute_ep.tuning.launch_shape import Tuning, has_pipelines, log2_of, most_lamport_tokens

SHAPES_KEPT = 1024
"""Launch shapes that a communicator keeps, one for each operation and number of tokens."""


Spans = tuple[list[int], list[int]]
"""Addresses of first bytes, and behind last ones, in ascending order."""


class LaunchShape(NamedTuple):
    """A launch shape as launches need it.

    Attributes:
        slices_log2: of a message or of a returned row.
        return_slices_log2, flagged: of the rows that are to come back (dispatch decides that): slices, and whether
            flags tell that they have come, instead of Lamport words.
        grid: `pdl` where two such launches fit side by side, so that the next may start early (`docs/protocol.md`,
            Resident CTAs).
        shared: the shared expert's part in so many tokens.
        pairs: the CTAs come in clusters of 2.
        threads: of a CTA.
    """

    ctas: int
    slices_log2: int
    return_slices_log2: int
    flagged: bool
    grid: Grid
    shared: SharedExpert
    pairs: bool
    threads: int

    @property
    def returns(self) -> int:
        """`Input.returns`."""
        return pack_returns(self.return_slices_log2, int(self.flagged))

    @property
    def suffix(self) -> str:
        """Behind the name of a kernel of combine: PIPED_SUFFIX where rows are sent by pipelines."""
        return PIPED_SUFFIX if self.grid.ring_bytes else ""


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """Spans of memory in order, as one where they follow one another or overlap."""
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted(spans):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return begins, ends


class LaunchCache:
    """Launch shapes and bound kernels of one rank.

    Args:
        max_ctas: CTAs of one launch at most, resident together.
        pairs, whole_sms, ring_bytes: as of `RankParts`.
        kernels: by name, bound to all but what changes from launch to launch.
    """

    def __init__(
        self,
        cfg: EPConfig,
        rank: int,
        max_ctas: int,
        kernels: Mapping[str, Kernel],
        *,
        pairs: bool,
        whole_sms: bool,
        ring_bytes: int = 0,
    ) -> None:
        self.cfg, self.rank, self.max_ctas, self.kernels = cfg, rank, max_ctas, kernels
        self.pairs, self.whole_sms, self.ring_bytes = pairs, whole_sms, ring_bytes
        self._pipelines = has_pipelines(cfg, ring_bytes)
        self._shapes: dict[tuple[str, int, bool], LaunchShape] = {}
        self._shapes_of: Tuning | None = None  # what they were found with
        self._receivers: WeakKeyDictionary[DispatchBuffers, dict[str, Kernel]] = WeakKeyDictionary()
        self._spans: WeakKeyDictionary[DispatchBuffers, Spans] = WeakKeyDictionary()

    @classmethod
    def of(cls, parts: RankParts) -> LaunchCache:
        """That of a rank with these parts."""
        options = {"pairs": parts.pairs, "whole_sms": parts.whole_sms}
        return cls(parts.cfg, parts.rank, parts.max_ctas, parts.kernels, **options, ring_bytes=parts.ring_bytes)

    def shape(self, tuning: Tuning, operation: str, tokens: int, *, whole_rows: bool = False) -> LaunchShape:
        """`Tuning.shape`. A rank with no tokens cannot know the others' counts, so it assumes the most."""
        if self._shapes_of is not tuning:
            self._shapes, self._shapes_of = {}, tuning
        key = operation, tokens, whole_rows
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            expected = tokens or self.cfg.max_tokens_per_rank
            shape = tuning.shape(
                operation,
                expected,
                self.max_ctas,
                whole_rows=whole_rows,
                pairs=self.pairs,
                whole_sms=self.whole_sms,
                ring_bytes=self.ring_bytes,
            )
            wide = operation.startswith("combine") and shape.threads == WIDE_THREADS
            flagged = self._are_flagged(tokens)
            may_pipe = wide and not operation.endswith("_wait") and self._are_flagged(expected)
            ring_bytes = self.ring_bytes if may_pipe and self._pipelines else 0
            threads = PIPED_THREADS if ring_bytes else shape.threads
            grid = Grid(
                pdl=int(2 * shape.ctas <= self.max_ctas),
                send_ctas=shape.send_ctas,
                packed=int(shape.packed),
                receive_from=shape.receive_from,
                warps=threads // 32,
                ring_bytes=ring_bytes,
            )
            shared = shared_record(self.cfg, self.rank, tokens)
            slices = shape.slices_log2
            if operation.startswith("dispatch") and not has_whole_segments(self.cfg.format):
                slices = 0
            back = min(tuning.shape("combine", expected, self.max_ctas).slices, self.most_slices(tokens))
            pairs = self.pairs and shape.ctas > 1
            found = LaunchShape(shape.ctas, slices, log2_of(back), flagged, grid, shared, pairs, threads)
            self._shapes[key] = found
        return found

    def most_slices(self, tokens: int) -> int:
        """Slices that a row of so many tokens may have on its way home."""
        return MANY_SLICES if self._are_flagged(tokens) else MAX_SLICES

    def _are_flagged(self, tokens: int) -> bool:
        """Whether rows of so many tokens come home with flags: the arena has room for such rows of any number of
        tokens, or for none."""
        return tokens > most_lamport_tokens(self.max_ctas, self._pipelines)

    def receiver(self, name: str, out: DispatchBuffers) -> Kernel | None:
        """The kernel of a name, bound to buffers that a call before was given; None when there was none, and then they
        must be checked."""
        bound = self._receivers.get(out) if isinstance(out, DispatchBuffers) else None
        if bound is None:
            return None
        if out.tokens.requires_grad or out.tokens.is_inference():  # not when they were checked, perhaps
            check_buffers(self.cfg, out, out.tokens.device)
        kernel = bound.get(name)
        if kernel is None:
            kernel = self.kernels[name].copy()
            kernel.bind("out", output_record(self.cfg, out))
            kernel.bind("scales", self.scales_of(out))
            bound[name] = kernel  # whole by now, also where an interrupt comes in between
        return kernel

    def remember(self, out: DispatchBuffers) -> None:
        """That these buffers were checked: the next call with them binds its kernel to them."""
        self._receivers[out] = {}
        self._spans[out] = joined(out.spans())

    def spans(self, out: DispatchBuffers) -> Spans:
        """`joined` spans of buffers that were checked."""
        return self._spans[out]

    def check_apart(self, out: DispatchBuffers, **read: object) -> None:
        """EPInputError where buffers that were checked share memory with a tensor among what a call reads."""
        begins, ends = self._spans[out]
        for name, tensor in read.items():
            if isinstance(tensor, torch.Tensor):
                place = bisect_right(ends, tensor.data_ptr())
                if place < len(begins) and begins[place] < end_of(tensor):
                    for part, buffer in tensors_of(out).items():
                        check_apart(f"out.{part}", buffer, **{name: tensor})

    def scales_of(self, out: DispatchBuffers) -> Scales:
        """The record of the scales in buffers."""
        cfg, scale_bytes = self.cfg, self.cfg.format.scale_bytes(self.cfg.hidden)
        rows, alignment = out.tokens.shape[0], cfg.scale_alignment
        if cfg.block_rows is not None:
            rows //= cfg.groups
            alignment = scale_block(cfg.scales_as, scale_bytes, rows)
        return scales_record(cfg.scales_as, scale_bytes, out.scales, rows, alignment)
