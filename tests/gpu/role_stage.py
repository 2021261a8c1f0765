"""One rank of a group, on a GPU that it shares with ranks whose part a test plays: it writes their memory and that of
the rank, launches a call, or a half of one, on the rank, and reads all of it again.

`Stage` needs a GPU. What is drawn here is drawn on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.rounds import Rounds
from cute_ep.api.row_tensors import QuantizedRows, payload_columns, payload_dtype, scale_dtype
from cute_ep.runtime import driver_calls
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import on_device
from cute_ep.testing.workloads import make_rank_inputs
from cute_ep.tuning.launch_shape import has_pipelines, most_lamport_tokens

from .arena_images import Image
from .role_model import Rows, Sent

SINGLE = "single"
"""A routing besides ROUTINGS: all entries of all tokens are one expert of rank 1."""


class Stage:
    """Memory of all ranks, and the launches of one.

    Attributes:
        me: the rank that launches.
        found: [ranks] what `compare` has read.
    """

    def __init__(self, communicators: Sequence[Communicator], me: int) -> None:
        self.communicators, self.me = communicators, me
        self.rank, self.cfg, self.device = communicators[me], communicators[me].cfg, communicators[me].device
        self.stream = torch.cuda.Stream(self.device)
        size = int(self.cfg.arena.allocation)
        self.staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.found: list[torch.Tensor] = []

    def images(self) -> list[Image]:
        """All ranks' allocations with nothing but POISON."""
        arenas = [one.arena.address for one in self.communicators]
        return [Image(self.cfg, rank, arenas) for rank in range(len(arenas))]

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        with on_device(self.device):
            driver_calls.copy(to, source, nbytes, self.stream.cuda_stream)
        self.stream.synchronize()

    def _address(self, rank: int) -> int:
        """Of a rank's allocation."""
        return self.communicators[rank].arena.address - int(self.cfg.arena.begin(rank))

    def write(self, images: Sequence[Image]) -> None:
        """Have the allocations hold these contents, while nothing runs."""
        torch.cuda.synchronize(self.device)
        for image in images:
            self.staging.copy_(image.content)
            self._copy(self._address(image.rank), self.staging.data_ptr(), len(self.staging))

    def poke(self, offset: int, content: torch.Tensor) -> None:
        """Write a few bytes of the launching rank's allocation, also while its kernel runs."""
        self.staging[: len(content)].copy_(content)
        self._copy(self._address(self.me) + offset, self.staging.data_ptr(), len(content))

    def compare(self, images: Sequence[Image], when: str) -> None:
        """Compare every byte of all allocations as they are now. AssertionError: one differs."""
        __tracebackhide__ = True
        self.found = []
        for image in images:
            self._copy(self.staging.data_ptr(), self._address(image.rank), len(self.staging))
            self.found.append(self.staging.clone())
            image.check(self.found[-1], when)

    def check(self, images: Sequence[Image], when: str) -> None:
        """`compare` once the rank's kernel has ended. EPTimeout: it waited in vain."""
        __tracebackhide__ = True
        self.rank.synchronize()
        self.compare(images, when)

    @property
    def lamport_home(self) -> int:
        """Most tokens of the rank whose rows come home as Lamport rows."""
        return most_lamport_tokens(self.rank.max_ctas, has_pipelines(self.cfg, self.rank.ring_bytes))

    @property
    def is_running(self) -> bool:
        """Whether the rank has work."""
        return not self.rank.stream.query()

    def check_notices(self, images: Sequence[Image], before: Sequence[Image], seed: int) -> None:
        """That `compare` would notice a byte that is expected otherwise, in each allocation: one that the launch has
        changed, and one that it must not touch."""
        generator = torch.Generator().manual_seed(seed)
        for image, old, found in zip(images, before, self.found, strict=True):
            for changed in (True, False):
                those = ((image.content != old.content) == changed) & ~image.undefined
                offsets = those.nonzero().flatten()
                assert len(offsets) or changed, "every launch leaves something alone"
                if len(offsets):
                    at = int(offsets[torch.randint(len(offsets), (1,), generator=generator)])
                    image.content[at] ^= 1
                    with pytest.raises(AssertionError, match=rf"1 bytes differ.*\n  \+{at:#x} "):
                        image.check(found, "mutated")
                    image.content[at] ^= 1

    @contextmanager
    def sent_only(self, phase: str) -> Iterator[None]:
        """A sending half of this block has no receiving half."""
        yield
        self.rounds(phase).count_received()

    def rounds(self, phase: str) -> Rounds:
        """What the host counts of a phase's rounds: `count_sent` lets a receiving half come that nobody has sent."""
        return self.rank._dispatches if phase == "dispatch" else self.rank._combines


# ---- what ranks send


def blanked(content: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Bytes [T, bytes] with ones in every seventh row, and in one of 64 words of every third."""
    width = content.shape[1]
    words = torch.rand(len(content), -(-width // 4), generator=generator) < 1 / 64
    words[1::3], words[2::3], words[3::7] = False, False, True
    return torch.where(words.repeat_interleave(4, dim=1)[:, :width], 0xFF, content)


def expert_rows(rows: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """Bits [rows, hidden], int16, of bfloat16: large numbers that cancel each other between small ones, so that a sum
    depends on its order; every fourth row has any bytes."""
    large = torch.randint(5, (rows, hidden), generator=generator)
    drawn = torch.randn(rows, hidden, generator=generator)
    drawn = torch.where(large < 3, (large - 1.0) * 2.0**20, drawn).bfloat16().view(torch.int16)
    content = torch.randint(256, (rows, 2 * hidden), generator=generator, dtype=torch.uint8)
    drawn[::4] = blanked(content, generator).view(torch.int16)[::4]
    return drawn


def random_rows(cfg: EPConfig, tokens: int, seed: int) -> QuantizedRows:
    """Rows of a format with any bytes; of bf16 the payload alone."""
    fmt, generator = cfg.format, torch.Generator().manual_seed(seed)

    def draw(columns: int, dtype: torch.dtype) -> torch.Tensor:
        content = torch.randint(256, (tokens, columns * dtype.itemsize), generator=generator, dtype=torch.uint8)
        return blanked(content, generator).view(dtype)

    scales = None if fmt.scale is None else draw(fmt.scale_bytes(cfg.hidden) // fmt.scale_itemsize, scale_dtype(fmt))
    row_scales = draw(1, torch.bfloat16).flatten() if fmt.row_scale else None
    return QuantizedRows(draw(payload_columns(fmt, cfg.hidden), payload_dtype(fmt)), scales, row_scales)


def tokens_with_blanks(cfg: EPConfig, rank: int, tokens: int, seed: int) -> torch.Tensor:
    """[T, hidden] bfloat16, some of whose words are ones when they are encoded, in formats that can have such."""
    x, element = make_rank_inputs(cfg, rank, tokens, "uniform", seed).x, cfg.format.element
    if element.bits == 16:
        content = x.view(torch.uint8).view(tokens, 2 * cfg.hidden)
        return blanked(content, torch.Generator().manual_seed(seed)).view(torch.bfloat16)
    if element.bits < 8:
        x[1::3, : cfg.hidden // 2] = -element.largest
        x[2::3, cfg.hidden // 64 * 32 :] = -element.largest
    return x


def draw_routes(cfg: EPConfig, rank: int, tokens: int, routing: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] int64 expert ids and [T, K] float32 weights, ones for every second token."""
    made = make_rank_inputs(cfg, rank, tokens, "uniform" if routing == SINGLE else routing, seed)
    if routing == SINGLE:
        made.topk_ids.fill_(cfg.local_experts + 1)
    made.router_weights[::2] = 1
    return made.topk_ids.long(), made.router_weights


def draw_sent(
    cfg: EPConfig, source: int, tokens: int, routing: str, seed: int, log2: tuple[int, int]
) -> tuple[Sent, QuantizedRows]:
    """What a rank sends, rows of any bytes, with weights from every other rank; log2: of the slices of a message and of
    a returned row."""
    ids, weights = draw_routes(cfg, source, tokens, routing, seed)
    rows = random_rows(cfg, tokens, 100 * seed + source)
    return Sent(ids, weights if (seed + source) % 2 else None, Rows.of(rows), *log2), rows
