"""An input set on the devices: arguments, places for all outputs, and every byte that must be there afterwards.

What is compared together lies in one slice of memory with guards in between, so that a comparison is a few launches
however many tensors there are. Every byte is POISON before it is written; bytes that no call may touch must stay so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers, buffer_shapes
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.arena import HeaderWord, has_weights, return_slices_log2
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import NO_ROW
from cute_ep.layouts.maps.scales import TRANSPOSED
from cute_ep.reference.results import stay, write_rows
from cute_ep.testing.verify import POISON, SPARE_ROWS, expert_rows, poison
from cute_ep.testing.workloads import RankInputs, make_inputs

from .deployments import InputSet

GUARD = 256
"""Bytes before, between and behind tensors, of which each begins at a multiple."""
POISON_WORD = int.from_bytes(bytes([POISON] * 8), "little", signed=True)

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Segment:
    """Tensors of one rank that one operation writes.

    Attributes:
        expected: bytes that must be there; POISON unless `view` of it has been written to.
        mask: 0xFF where a byte is defined or must be untouched, 0 elsewhere.
        wrong: bits that a comparison has found wrong since the beginning.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes, self._places, end = shapes, {}, GUARD
        for name, (shape, dtype) in shapes.items():
            self._places[name] = end
            end = align_up(end + prod(shape) * dtype.itemsize, GUARD) + GUARD
        self.nbytes = end
        self.actual, self.expected = (poison(torch.empty(end, dtype=torch.uint8, device=device)) for _ in range(2))
        self.mask, self.wrong = torch.full_like(self.actual, 0xFF), torch.zeros_like(self.actual)
        self._words = [one.view(torch.int64) for one in (self.actual, self.expected, self.mask, self.wrong)]

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """A tensor in `actual`, `expected`, `mask` or `wrong`."""
        (shape, dtype), at = self.shapes[name], self._places[name]
        return memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def compare(self, scratch: torch.Tensor, counter: torch.Tensor) -> None:
        """Enqueue on the current stream: add the number of wrong bytes to `counter`, and poison everything.

        Args:
            scratch: [>= nbytes] uint8, overwritten.
        """
        actual, expected, mask, wrong = self._words
        found = scratch[: self.nbytes]
        words = found.view(torch.int64)
        torch.bitwise_xor(actual, expected, out=words)
        words &= mask
        wrong |= words
        counter += found.count_nonzero()
        actual.fill_(POISON_WORD)

    def untouched(self) -> bool:
        """Whether all bytes are POISON."""
        return bool((self._words[0] == POISON_WORD).all())

    def describe_wrong(self) -> list[str]:
        """For each tensor with wrong bytes, their number, the first element, and its bits; the number of guards'."""
        found, inside = [], torch.zeros_like(self.wrong, dtype=torch.bool)
        for name, (shape, dtype) in self.shapes.items():
            at, size = self._places[name], prod(shape) * dtype.itemsize
            inside[at : at + size] = True
            bad = self.wrong[at : at + size].nonzero().flatten()
            if bad.numel():
                element, index = int(bad[0]) // dtype.itemsize, []
                first = slice(at + element * dtype.itemsize, at + (element + 1) * dtype.itemsize)
                both = (self.expected ^ self.wrong)[first], self.expected[first]
                there, must = (bytes(reversed(one.tolist())).hex() for one in both)
                for extent in reversed(shape):
                    element, place = divmod(element, extent)
                    index.append(place)
                found.append(
                    f"{name}{index[::-1]} = 0x{there}, must be 0x{must}, first of {bad.numel()} of {size} bytes"
                )
        beside = int(((self.wrong != 0) & ~inside).sum())
        return found + ([f"{beside} bytes beside the tensors"] if beside else [])


class Batch:
    """An input set with its memory on the ranks of this process.

    Attributes:
        segments: per rank "dispatch" and each combine mode of the input set.
        arguments: per rank those of dispatch, without `out`.
        rows: per rank made-up expert outputs, with poisoned rows behind them.
        late_weights: per rank those for exact combine, or None.
    """

    def __init__(self, cfg: EPConfig, devices: Mapping[int, torch.device], given: InputSet, seed: int) -> None:
        """`devices`: of the ranks of this process."""
        self.given, self.cfg = given, cfg
        oracle = next(iter(devices.values()))
        inputs = [_changed(one, given) for one in make_inputs(cfg, given.tokens, given.routing, seed)]
        xs, ids, weights = (
            [getattr(one, name).to(oracle) for one in inputs] for name in ("x", "topk_ids", "router_weights")
        )
        scales = [2.0 ** (1 + rank) / 3 for rank in range(cfg.world_size)] if given.input_scale else None
        ready = [reference.quantize(x, cfg.format, 1.0) for x in xs] if given.prequantized else None
        early = weights if given.weights_at == "dispatch" else [None] * cfg.world_size
        expected = reference.dispatch(cfg, xs, ids, scales, early, ready)
        rows = [_filled(one, given.bits) for one in expert_rows(expected, cfg.hidden, seed)]
        by_mode = {"exact": weights, "partial": early, "unweighted": None}
        sums = {
            mode: reference.combine(cfg, rows, expected, by_mode[mode], mode, dtype)
            for mode, dtype in given.modes.items()
        }
        self.arguments: dict[int, dict[str, torch.Tensor | None]] = {}
        self.rows: dict[int, torch.Tensor] = {}
        self.late_weights: dict[int, torch.Tensor | None] = {}
        self.segments: dict[int, dict[str, Segment]] = {}
        self.buffers: dict[int, DispatchBuffers] = {}
        self._slices: dict[int, torch.Tensor] = {}
        for rank, device in devices.items():
            arguments = {"x": xs[rank], "topk_ids": ids[rank], "router_weights": early[rank]}
            if ready is not None:
                arguments |= ready[rank]._asdict()
                arguments["x"] = arguments.pop("payload")
            if scales is not None:
                arguments["input_scale"] = torch.tensor([scales[rank]])
            self.arguments[rank] = {name: t if t is None else t.to(device) for name, t in arguments.items()}
            self.late_weights[rank] = weights[rank].to(device) if given.weights_at == "combine" else None
            count = rows[rank].shape[0]
            self.rows[rank] = poison(torch.empty(count + SPARE_ROWS, cfg.hidden, dtype=torch.bfloat16, device=device))
            self.rows[rank][:count].copy_(rows[rank])
            segment = _dispatch_segment(cfg, rank, expected[rank], device)
            tensors = dict.fromkeys(buffer_shapes(cfg, 0))
            tensors |= {name: segment.view(segment.actual, name) for name in segment.shapes}
            self.buffers[rank] = DispatchBuffers(**tensors)
            own = 0 if cfg.skip_a2a else rank
            self._slices[rank] = segment.view(segment.expected, "headers")[own, HeaderWord.RETURNS]
            self.segments[rank] = {"dispatch": segment}
            for mode, made in sums.items():
                out = Segment({mode: (tuple(made[rank].shape), made[rank].dtype)}, device)
                out.view(out.expected, mode).copy_(made[rank])
                self.segments[rank][mode] = out

    def out(self, rank: int, mode: str) -> torch.Tensor:
        """Where a combine writes."""
        segment = self.segments[rank][mode]
        return segment.view(segment.actual, mode)

    def compare(
        self, rank: int, modes: Iterable[str], slices: int, scratch: torch.Tensor, counter: torch.Tensor
    ) -> None:
        """Enqueue on the current stream the comparison of a dispatch and of combines, and poison what they wrote.

        Args:
            slices: what dispatch returned as `return_slices_log2`.
            scratch: [>= `scratch_bytes`] uint8, overwritten.
            counter: wrong bytes are added to it.
        """
        self._slices[rank].fill_(slices)
        for name in ("dispatch", *modes):
            self.segments[rank][name].compare(scratch, counter)

    def scratch_bytes(self, rank: int) -> int:
        return max(segment.nbytes for segment in self.segments[rank].values())


def _filled(tensor: torch.Tensor, bits: int | None) -> torch.Tensor:
    """The tensor, or one of that shape whose every 16 bits are `bits`."""
    return tensor if bits is None else torch.full_like(tensor.view(torch.int16), bits).view(tensor.dtype)


def _changed(one: RankInputs, given: InputSet) -> RankInputs:
    """The inputs with what `given.twice` and `given.bits` say."""
    ids = one.topk_ids.clone()
    count = int(ids.shape[0] * given.twice)
    ids[:count, -1] = ids[:count, 0]
    return RankInputs(_filled(one.x, given.bits), ids, _filled(one.router_weights, given.bits))


def _dispatch_segment(cfg: EPConfig, rank: int, want: Dispatched, device: torch.device) -> Segment:
    """Memory for one rank's dispatch output with SPARE_ROWS more than arrive, and what must be in it.

    Undefined are, as `cute_ep.testing.verify.check_dispatched` has it: header words that others set, `row_map` beyond
    a source's tokens, and weights of entries that have no row here.
    """
    blocks = cfg.block_rows is not None
    capacity = cfg.max_rows if blocks else align_up(int(want.num_rows) + SPARE_ROWS, cfg.alignment)
    shapes = {name: shape for name, shape in buffer_shapes(cfg, capacity).items() if shape is not None}
    segment = Segment(shapes, device)
    for name in ("headers", "row_map", "weights"):
        segment.view(segment.mask, name).view(torch.uint8).zero_()
    if cfg.is_rank_major:
        segment.view(segment.expected, "row_expert_ids").fill_(NO_ROW)
    for name in shapes.keys() - {"headers", "row_map", "weights"}:
        value, place = getattr(want, name), segment.view(segment.expected, name)
        if stay(cfg, name, zeroed=cfg.zero_padding):
            write_rows(cfg, name, place, value.to(device), want.src_info)
        elif name == "scales" and cfg.scales_as == TRANSPOSED:
            place[:, : value.shape[1]].copy_(value)
        else:
            place[: value.shape[0]].copy_(value)

    def define(name: str, at: tuple, value: torch.Tensor, bits: int = -1) -> None:
        segment.view(segment.expected, name)[at] = value.to(device)
        segment.view(segment.mask, name).view(torch.int32)[at] = bits

    for source in range(cfg.peers):
        tokens = int(want.headers[source, HeaderWord.TOKENS])
        define("headers", (source, HeaderWord.TOKENS), want.headers[source, HeaderWord.TOKENS])
        if tokens:
            messages = want.headers[source, HeaderWord.MESSAGES]
            define("headers", (source, HeaderWord.MESSAGES), messages, has_weights(-1))
        define("row_map", (source, slice(tokens)), want.row_map[source, :tokens])
        if want.weights is not None:
            mine = (want.row_map[source, :tokens] >= 0).nonzero(as_tuple=True)
            at = (source, *(index.to(device) for index in mine))
            define("weights", at, want.weights[source, :tokens][mine])
    own = 0 if cfg.skip_a2a else rank
    segment.view(segment.mask, "headers").view(torch.int32)[own, HeaderWord.RETURNS] = return_slices_log2(-1)
    return segment
