"""Random deployments: the configuration, where its ranks are, how they are launched, and its input sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.types import ROW_IDS
from cute_ep.bench.machine import parse_devices
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import RANK_MAJOR, ROW_ALIGNMENTS
from cute_ep.layouts.maps.scales import ATOM_ROWS
from cute_ep.testing.workloads import ROUTINGS
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning, slices_for

SMS_OF_WAITERS = 96
"""SMs of one GPU that all kernels which wait for each other may hold together. The rest is for kernels that stand
between them on other streams: without it those wait for the waiters, and the waiters for them."""
GPU_ROW_BYTES, CPU_ROW_BYTES = 1 << 26, 1 << 17
"""Most bytes of the rows of all ranks of one input set."""
TIMEOUT_S = 20.0
INPUT_SETS = 5
WIDTHS = (512, 1024, 1408, 2048, 2880, 4096, 7168)
NANS = (-1, 0x7FC0, 0x7F80, -0x80, -0x8000)
"""As bfloat16: all bits set, as in a word that has not arrived, a quiet NaN, the infinities, -0."""
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class InputSet:
    """One batch on all ranks.

    Attributes:
        tokens: of each rank.
        routing: one of `cute_ep.testing.workloads.ROUTINGS`.
        twice: share of the tokens whose first expert is their last one, too.
        weights_at: "dispatch" or "combine", whose call is given the router weights, or "nowhere".
        input_scale: whether each rank gives a global scale.
        prequantized: whether rows are quantised before they are dispatched.
        bits: every 16 bits of tokens, weights and expert outputs, as a signed number; None: random ones.
        modes: combine modes that the configuration and the weights allow, with the type of their output.
    """

    tokens: tuple[int, ...]
    routing: str
    twice: float
    weights_at: str
    input_scale: bool
    prequantized: bool
    modes: dict[str, torch.dtype]
    bits: int | None = None


@dataclass(frozen=True)
class Deployment:
    """One group of ranks and what is done with it.

    Attributes:
        number: with the seed of a run it determines everything else.
        devices: one a rank.
        sms: as in `connect_local`.
        streams: whether dispatches and combines are on two streams.
        graphs: whether some rounds are replays of CUDA graphs.
    """

    number: int
    cfg: EPConfig
    devices: tuple[str, ...]
    sms: int | None
    streams: bool
    graphs: bool
    inputs: tuple[InputSet, ...]

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    def kinds(self) -> list[str]:
        """What its rounds are counted under."""
        cfg = self.cfg
        sharing = Counter(self.devices)
        found = [f"format {cfg.dispatch_format}", f"{len(self.devices)} ranks on {len(sharing)} devices"]
        found += [f"scales {cfg.scales_as}"] if cfg.scales_as else []
        options = {
            "shared expert": cfg.fused_shared_expert,
            "skip_a2a": cfg.skip_a2a,
            f"experts of rows as {cfg.row_ids}": cfg.is_rank_major,
            "two streams": self.streams,
            "few and many tokens": cfg.max_tokens_per_rank > LAMPORT_TOKENS,
        }
        return found + [name for name, has in options.items() if has]


def device_sets(argument: str) -> list[tuple[str, ...]]:
    """Devices of the ranks that deployments choose from. "auto": with a rank a GPU, virtual ranks and mixtures of both
    on all GPUs; else the one that `cute_ep.bench.machine.parse_devices` understands."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if argument != "auto" or not gpus:
        return [tuple(parse_devices(argument))]
    last = gpus[-1:]
    sets = [last * count for count in (1, 2, 4, 8)]
    if len(gpus) > 1:
        sets += [gpus, gpus, gpus, gpus * 2, gpus * 2, gpus[:2] + gpus[:1]]  # most often, a rank a GPU
    return [tuple(one) for one in sets]


def draw_deployment(seed: int, number: int, sets: Sequence[tuple[str, ...]]) -> tuple[Deployment, Random]:
    """Deployment `number` of a run, and what draws its rounds."""
    random = Random(f"{seed}/{number}")
    devices = random.choice(list(sets))
    on_gpu = devices[0] != "cpu"
    cfg = _config(random, len(devices), GPU_ROW_BYTES if on_gpu else CPU_ROW_BYTES)
    most = max(Counter(devices).values())
    streams = on_gpu and most == 1 and random.random() < 0.3
    waiters = most * (1 + streams)
    sms = SMS_OF_WAITERS // waiters if on_gpu and waiters > 1 else None
    if on_gpu and random.random() < 0.3:
        sms = min(sms or SMS_OF_WAITERS, random.choice((1, 2, 8, 16, 24, 48, 66, 96)))
    inputs = tuple(_inputs(random, cfg) for _ in range(INPUT_SETS))
    return Deployment(number, cfg, devices, sms, streams, on_gpu and random.random() < 0.6, inputs), random


def draw_tuning(random: Random) -> Tuning:
    """Any launch shapes."""

    def entry(tokens: int) -> Entry:
        return Entry(
            tokens,
            random.choice((1, 2, 3, 8, 33, 128, MANY)),
            random.choice((0, 1 / 8, 1 / 4, 1 / 2, 7 / 8)),
            random.choice(slices_for(tokens)),
            random.random() < 0.3,
            random.choice((1, 8, MANY)),
            random.choice((2, 4, 34)),
            random.random() < 0.3,
        )

    few = sorted({random.choice((1, 16, 64, 256)), LAMPORT_TOKENS})
    tables = [tuple(entry(tokens) for tokens in (*few, MANY)) for _ in range(2)]
    return Tuning(*tables)


def _config(random: Random, ranks: int, row_bytes: int) -> EPConfig:
    """`row_bytes` bounds ranks * max_tokens_per_rank * top_k * hidden * 2, but for one token of the narrowest row."""
    fmt = FORMATS[random.choice(sorted(FORMATS))]
    local = random.choice((1, 2, 3, 4, 8, 16, 32))
    top_k = min(local * ranks, random.choice((1, 2, 2, 3, 4, 4, 6, 8, 8, 17, 32)))
    least = random.choice((1, 1, 65, 300, LAMPORT_TOKENS, LAMPORT_TOKENS + 1))
    unit = fmt.multiple
    room = row_bytes // (2 * ranks * top_k)  # tokens x elements
    widths = [unit * random.choice((1, 2, 3, 5, 11)), *(width for width in WIDTHS if not width % unit)]
    fitting = [width for width in widths if width * least <= room] or [unit]
    hidden = random.choice(fitting)
    most = max(1, room // hidden)
    tokens = min(most, least + random.choice((0, 1, 15, 63, 250)))
    alignments = [None, *(rows for rows in ROW_ALIGNMENTS if rows % fmt.row_alignment == 0)]
    cfg = EPConfig(
        hidden=hidden,
        num_experts=local * ranks,
        top_k=top_k,
        max_tokens_per_rank=tokens,
        world_size=ranks,
        dispatch_format=fmt.name,
        timeout_s=TIMEOUT_S,
        scale_layout=random.choice([None, *fmt.scale_layouts]),
        row_alignment=random.choice(alignments) if random.random() < 0.5 else None,
        fused_shared_expert=random.random() < 0.25,
        skip_a2a=random.random() < 0.1,
        zero_padding=random.random() < 0.7,
    )
    if random.random() < 0.3 and not cfg.fused_shared_expert:
        cfg = replace(cfg, row_order=RANK_MAJOR, row_ids=random.choice(ROW_IDS))
    if random.random() < 0.5 and local * top_k <= 16 and not cfg.fused_shared_expert:
        rows = cfg.peers * tokens * top_k  # enough for any routing
        cfg = replace(cfg, row_alignment=None, block_rows=align_up(max(2, rows), ATOM_ROWS))
    return cfg


def _inputs(random: Random, cfg: EPConfig) -> InputSet:
    most = cfg.max_tokens_per_rank

    def count() -> int:
        return random.choice((0, 1, most, most, min(most, LAMPORT_TOKENS), random.randint(0, most)))

    tokens = [count()] * cfg.world_size if cfg.skip_a2a else [count() for _ in range(cfg.world_size)]
    places = ("dispatch", "dispatch", "dispatch", "combine", "nowhere")
    weights_at = random.choice(places[:4] if cfg.fused_shared_expert else places)  # a sum needs some
    modes = {
        "exact": weights_at != "nowhere" and not cfg.is_rank_major,
        "partial": weights_at == "dispatch" or cfg.is_rank_major,
        "unweighted": not cfg.fused_shared_expert and not cfg.is_rank_major,
    }
    prequantized = random.random() < 0.2 and cfg.format.scale is not None
    return InputSet(
        tokens=tuple(tokens),
        routing=random.choice(list(ROUTINGS)),
        twice=random.choice((0, 0, 0.3)),
        weights_at=weights_at,
        input_scale=cfg.format.global_scale and not prequantized and random.random() < 0.5,
        prequantized=prequantized,
        modes={mode: random.choice(DTYPES) for mode, allowed in modes.items() if allowed},
        bits=random.choice(NANS) if random.random() < 0.05 else None,
    )
