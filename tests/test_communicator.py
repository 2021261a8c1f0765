"""The CUDA communicator's host side without a GPU: what it launches, with which arguments, and what it raises.

The driver and torch.cuda are replaced by recorders; tensors live on the CPU. Argument names are compared with the
parameters of the kernels' sources, so a kernel and its caller cannot drift apart.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig, memory_bytes
from cute_ep.api.dispatched import DispatchBuffers, tensors_of
from cute_ep.api.errors import EPConfigError, EPError, EPInputError, EPTimeout
from cute_ep.distributed import (
    DistributedEPCombine,
    DistributedEPDispatch,
    DistributedEPDispatchFP8,
    DistributedEPDispatchMXFP4,
    DistributedEPDispatchNVFP4,
)
from cute_ep.layouts.maps.arena import BLANK, message_map, segment_words
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import OutputType, Phase, division_magic
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED, scale_map
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, DISPATCH_KERNELS, NO_HOOKS, Hooks, Variant
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime import communicator as module
from cute_ep.runtime import connection, driver, status
from cute_ep.runtime.communicator import Communicator, load_kernels
from cute_ep.tuning.builtin import built_in
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

CFG = EPConfig(hidden=128, num_experts=8, top_k=2, max_tokens_per_rank=16, world_size=2, dispatch_format="nvfp4")
SHARED = replace(CFG, fused_shared_expert=True)
ALONE = replace(CFG, skip_a2a=True)
HOOKS = Hooks("a:epilogue", "a:weights", "a:scale")

SEND_ONLY = {"x", "scales", "given_row_scales", "topk_ids", "topk_ids_wide", "router_weights", "global_scale", "tokens"}
SEND_ONLY |= {"packed", "message_pieces", "return_pieces"}
RECEIVE_ONLY = {"out_tokens", "out_row_scales", "row_offsets", "row_counts", "scales_offsets", "expert_ids"}
RECEIVE_ONLY |= {"src_info", "num_rows", "row_map", "headers", "weights", "capacity", "has_tiles"}
SCALE_ARGUMENTS = {"out_scales", "scale_inner", "scale_middle", "scale_outer", "scale_step", "scale_words"}
SCALE_ARGUMENTS |= {"scale_alignment"}
GIVE_BACK_ONLY = {"row_map", "headers", "weights"}
REDUCE_ONLY = {"out", "out_type", "topk_ids", "topk_ids_wide", "router_weights", "epilogue_data", "tokens"}
REDUCE_ONLY |= {"return_pieces"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    variant: Variant
    grid: int
    arguments: dict[str, int]
    names: frozenset[str]
    stream: int
    early: bool

    @property
    def missing(self) -> set[str]:
        """Parameters that the caller left to be 0."""
        return set(self.names) - set(self.arguments)


LAUNCHES: list[Launch] = []


@cache
def parameters(kernel: str) -> frozenset[str]:
    """Names of the parameters of a kernel of the group, from its source."""
    from cute_ep.kernels.combine import CombineArgs
    from cute_ep.kernels.dispatch import DispatchArgs

    return frozenset(field.name for field in dataclasses.fields(CombineArgs if "combine" in kernel else DispatchArgs))


class RecordingKernel:
    def __init__(self, entry: SimpleNamespace) -> None:
        self.variant: Variant = entry.variant
        self.constants: dict[str, int] = {}

    def bind(self, constants: Mapping[str, int]) -> None:
        assert set(constants) <= parameters("dispatch") | parameters("combine")
        names = parameters(self.variant.kernel)
        self.constants |= {name: value for name, value in constants.items() if name in names}

    def bound(self, constants: Mapping[str, int]) -> RecordingKernel:
        other = copy.copy(self)
        other.constants = dict(self.constants)
        other.bind(constants)
        return other

    def launch(self, grid: int, arguments: Mapping[str, int], stream: int, *, early: bool = False) -> None:
        names = parameters(self.variant.kernel)
        assert not set(arguments) & set(self.constants)
        arguments = self.constants | dict(arguments)
        assert set(arguments) <= names, f"{self.variant.symbol} has no {set(arguments) - names}"
        assert all(type(value) is int for value in arguments.values())
        LAUNCHES.append(Launch(self.variant, grid, arguments, names, stream, early))

    def unload(self) -> None:
        pass


class PlainHostMemory:
    def __init__(self, words: int) -> None:
        self.words = (ctypes.c_uint32 * words)()
        self.address = ctypes.addressof(self.words)

    def free(self) -> None:
        self.gone, self.words = self.words, type(self.words)(*self.words)


class PlainArena:
    def __init__(self, address: int) -> None:
        self.address = address
        self.stored: dict[int, list[int]] = {}

    def store(self, offset: int, words: list[int]) -> None:
        self.stored[offset] = list(words)


class EveryVariant:
    """A library that has whatever is asked for, as `Library.find` names it."""

    def find(self, kernel: str, arch: str, fmt: str | None = None, hooks: Hooks = NO_HOOKS) -> SimpleNamespace:
        return SimpleNamespace(variant=Variant(kernel, arch, fmt, hooks.of_kernel(kernel)))


Make = Callable[..., Communicator]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes rank `rank` of a configuration, its peers absent."""
    pytest.importorskip("cutlass")
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    cuda = SimpleNamespace(
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        current_device=lambda: None,
        synchronize=lambda device=None: None,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(module, "current_stream", lambda ordinal: cuda.current_stream(ordinal).cuda_stream)
    monkeypatch.setattr(module, "Kernel", RecordingKernel)
    monkeypatch.setattr(status, "HostMemory", PlainHostMemory)
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    LAUNCHES.clear()

    def one(cfg: EPConfig = CFG, rank: int = 0, hooks: Hooks = NO_HOOKS, *, shared: bool = False) -> Communicator:
        device = torch.device("cpu")
        return Communicator(
            cfg,
            rank,
            device,
            PlainArena(4096 * (1 + rank)),
            [4096 * (1 + rank)] if cfg.skip_a2a else [4096 * (1 + peer) for peer in range(cfg.world_size)],
            kernels=load_kernels(cfg, device, EveryVariant(), hooks),
            hooks=hooks,
            max_ctas=64,
            tuning=built_in(cfg, 64),
            shared_device=shared,
            group=None,
            release=lambda communicator: communicator.free(),
        )

    yield one


@pytest.fixture
def rank(make: Make) -> Communicator:
    """Rank 0 of two in NVFP4."""
    return make()


def arguments(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 8, (tokens, 2), dtype=torch.int32)
    return torch.randn(tokens, 128).bfloat16(), ids, torch.rand(tokens, 2)


def expert_rows(batch) -> torch.Tensor:
    return torch.zeros(batch.src_info.shape[0], 128, dtype=torch.bfloat16)


def launched() -> list[str]:
    return [launch.variant.kernel for launch in LAUNCHES]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- what is launched


def test_fused_calls(rank: Communicator) -> None:
    x, ids, weights = arguments()
    scale = torch.tensor([2.0])
    out = rank.allocate()
    dispatched = rank.dispatch(x, ids, weights, scale, out)
    rows = expert_rows(out)
    for mode in ("exact", "partial"):
        result = rank.combine(rows, dispatched, mode=mode)
        assert result.shape == x.shape
    assert launched() == ["dispatch", "combine_exact", "combine_partial"]
    assert [launch.missing for launch in LAUNCHES] == [set()] * 3, "a fused launch sets every parameter"
    sent = LAUNCHES[0].arguments
    assert sent["tokens"] == 5
    wanted = [built_in(CFG, 64).shape(name, 5, 64).pieces for name in ("dispatch", "combine")]
    assert [1 << sent["message_pieces"], 1 << sent["return_pieces"]] == wanted
    assert dispatched.return_pieces == sent["return_pieces"]
    assert (sent["x"], sent["global_scale"]) == (x.data_ptr(), scale.data_ptr())
    assert (sent["scales"], sent["given_row_scales"]) == (0, 0)
    assert sent["out_scales"] == out.scales.data_ptr()
    assert sent["capacity"] == out.tokens.shape[0] == CFG.max_rows
    for launch, partial in zip(LAUNCHES, (False, False, True), strict=True):
        assert launch.arguments.items() >= CFG.arena.arguments(partial=partial).items()
    combined = LAUNCHES[2].arguments
    assert (combined["row_map"], combined["headers"]) == (out.row_map.data_ptr(), out.headers.data_ptr())
    assert (combined["tokens"], combined["return_pieces"]) == (5, dispatched.return_pieces)
    assert combined["router_weights"] == weights.data_ptr()
    assert (combined["rows"], combined["out"]) == (rows.data_ptr(), result.data_ptr())


def test_no_rows_have_an_address_that_may_be_read(rank: Communicator) -> None:
    """In both halves, and a sum of lost rows reads row 0."""
    dispatched = rank.dispatch(*arguments())
    rows = expert_rows(dispatched)[:0]
    assert rows.data_ptr() == 0
    rank.combine(rows, dispatched, mode="partial")
    rank.combine_wait(rank.combine_async(rows, dispatched, mode="partial"))
    assert [launch.arguments["rows"] for launch in LAUNCHES[1:]] == [rank.arena.address] * 3
    assert all(launch.arguments["capacity"] == 0 for launch in LAUNCHES[1:])


def test_more_rows_than_dispatch_had_room_for_are_not_read(rank: Communicator) -> None:
    batch = rank.dispatch(*arguments(), out=rank.allocate(8))
    for count in (3, 8, 100):
        rank.combine(torch.zeros(count, 128, dtype=torch.bfloat16), batch)
        assert LAUNCHES[-1].arguments["capacity"] == min(count, 8)


def test_a_batch_is_of_this_configuration_and_its_buffers_may_be_used_again(make: Make, rank: Communicator) -> None:
    first = rank.dispatch(*arguments())
    again = rank.dispatch(*arguments(), out=first)
    assert again.tokens is first.tokens and again.topk_ids is not first.topk_ids
    other = make(replace(CFG, max_tokens_per_rank=8)).dispatch(*arguments())
    more = make(replace(CFG, num_experts=2 * CFG.num_experts)).dispatch(*arguments())
    before = len(LAUNCHES)
    for batch, rule in (
        (other, "batch of another communicator"),
        (more, "batch of another communicator"),
        (replace(other, origin=None), r"dispatched\.row_map\.shape"),
        (replace(more, origin=None), r"dispatched\.row_offsets\.shape"),
        (first.tokens, "must be what dispatch returned"),
    ):
        for call in (rank.combine, rank.combine_async):
            with pytest.raises(EPInputError, match=rule):
                call(expert_rows(first), batch)
    assert len(LAUNCHES) == before


def test_arguments_of_other_types(make: Make, rank: Communicator) -> None:
    """A list is no tensor, wherever one is wanted, and half a row no capacity."""
    x, ids, weights = arguments()
    batch, plain, hooked = rank.dispatch(x, ids, weights), make(replace(CFG, dispatch_format="bf16")), make(hooks=HOOKS)
    before = len(LAUNCHES)
    for call, rule in (
        (lambda: rank.dispatch([1.0], ids), "x = list: must be a torch.Tensor"),
        (lambda: rank.dispatch(x, [1]), "topk_ids = list"),
        (lambda: rank.dispatch(x, ids, [1.0]), "router_weights = list"),
        (lambda: hooked.dispatch(x, ids, [1.0]), "router_weights = list"),
        (lambda: plain.dispatch(x, ids, scales=[1.0]), "scales = list: must be None, bf16 has no scale factors"),
        (lambda: rank.dispatch(x, ids, scales=[1.0]), "x"),
        (lambda: rank.dispatch(x, ids, out=[1.0]), "out = list: must be a DispatchBuffers"),
        (lambda: rank.combine([1.0], batch), "rows = list"),
        (lambda: rank.combine(expert_rows(batch), [1.0]), "dispatched = list"),
        (lambda: rank.combine(expert_rows(batch), batch, out=[1.0]), "out = list: must be a torch.Tensor"),
        (lambda: rank.combine(expert_rows(batch), batch, dtype=float), "dtype = <class 'float'>: must be one of"),
        (lambda: rank.allocate(-1), "capacity = -1: must be an integer that is not negative"),
        (lambda: rank.allocate(True), "capacity = True: must be an integer that is not negative"),
        (lambda: rank.allocate(2.5), "capacity = 2.5"),
    ):
        with pytest.raises(EPInputError, match=rule):
            call()
    assert len(LAUNCHES) == before


def test_what_hooks_read_is_on_the_device(make: Make, rank: Communicator) -> None:
    """And there is a hook that reads it."""
    batch = rank.dispatch(*arguments())
    hooked = make(hooks=HOOKS)
    sums, far = hooked.dispatch(*arguments()), torch.zeros(3, device="meta")
    before = len(LAUNCHES)
    for one, dispatched, mode, data, rule in (
        (rank, batch, "exact", torch.zeros(3), "exact combine has no epilogue here"),
        (hooked, sums, "unweighted", torch.zeros(3), "unweighted combine has no epilogue here"),
        (hooked, sums, "exact", far, r"epilogue_data\.device"),
        (hooked, sums, "exact", torch.zeros(4, 4).T, r"epilogue_data\.stride"),
        (hooked, sums, "exact", 3.0, "epilogue_data = float"),
        (hooked, sums, "exact", torch.zeros(9, dtype=torch.bfloat16)[1:], "must be a multiple of 16 bytes"),
    ):
        with pytest.raises(EPInputError, match=rule):
            one.combine(expert_rows(dispatched), dispatched, mode=mode, epilogue_data=data)
    with pytest.raises(EPInputError, match=r"input_scale\.device"):
        hooked.dispatch(*arguments(), input_scale=far)
    assert len(LAUNCHES) == before


def test_group_arguments(make: Make) -> None:
    """All ranks are one group."""
    make(rank=1).dispatch(*arguments())
    given = LAUNCHES[0].arguments
    assert (given["rank"], given["ranks"]) == (1, 2)
    assert (given["experts"], given["first_expert"], given["all_experts"], given["local_experts"]) == (8, 0, 8, 4)
    assert (given["top_k"], given["max_tokens"], given["hidden"]) == (2, 16, 128)
    assert (given["timeout_ns"], given["arena"]) == (60_000_000_000, 8192)
    assert given.items() >= CFG.arena.arguments().items()
    for count in ("ranks", "local_experts", "top_k"):
        assert given[f"{count}_magic"] == division_magic(given[count])


def test_split_calls_pass_both_halves_everything_once(rank: Communicator) -> None:
    x, ids, weights = arguments()
    first = rank.dispatch_async(x, ids, weights)
    second = rank.dispatch_async(x, ids, weights)
    dispatched = rank.dispatch_wait(first)
    pending = rank.combine_async(torch.zeros(64, 128, dtype=torch.bfloat16), dispatched, "partial")
    rank.combine_wait(pending)
    rank.dispatch_wait(second)
    names = ["dispatch_async"] * 2 + ["dispatch_wait", "combine_async_partial", "combine_wait_partial", "dispatch_wait"]
    assert launched() == names
    assert LAUNCHES[0].missing == RECEIVE_ONLY | SCALE_ARGUMENTS
    assert LAUNCHES[2].missing == SEND_ONLY
    assert LAUNCHES[3].missing == REDUCE_ONLY
    assert LAUNCHES[4].missing == GIVE_BACK_ONLY
    assert LAUNCHES[4].arguments["return_pieces"] == LAUNCHES[0].arguments["return_pieces"], "as the header said"


def test_weights_at_combine_are_those_that_count(rank: Communicator) -> None:
    """Others than those of dispatch, fused and split."""
    x, ids, weights = arguments()
    batch, other = rank.dispatch(x, ids, weights), torch.rand(5, 2)
    rows = expert_rows(batch)
    for given, used in ((None, weights), (other, other)):
        rank.combine(rows, batch, given)
        rank.combine_wait(rank.combine_async(rows, batch), given)
        assert [LAUNCHES[index].arguments["router_weights"] for index in (-3, -1)] == [used.data_ptr()] * 2


def test_no_tokens(rank: Communicator) -> None:
    dispatched = rank.dispatch(*arguments(0))
    assert rank.combine(torch.zeros(8, 128, dtype=torch.bfloat16), dispatched).shape == (0, 128)
    assert LAUNCHES[0].arguments["tokens"] == 0 and LAUNCHES[0].grid >= 1


@pytest.mark.parametrize(
    ("fmt", "layout"), [(f, l) for f, one in FORMATS.items() for l in one.scale_layouts or (None,)]
)
def test_sizes_and_strides_of_every_format(make: Make, fmt: str, layout: str | None) -> None:
    """The kernels know sizes and strides, not formats; each send kernel is the one of its format."""
    cfg, record = replace(CFG, dispatch_format=fmt, scale_layout=layout, row_alignment=16), FORMATS[fmt]
    rank = make(cfg)
    batch = rank.dispatch(*arguments())
    pending = rank.dispatch_async(*arguments())
    rank.dispatch_wait(pending)
    assert [launch.variant.format for launch in LAUNCHES] == [fmt, fmt, None]
    for launch in LAUNCHES:
        given = launch.arguments
        assert given["segment_words"] == segment_words(record)
        assert (given["payload_bytes"], given["scale_bytes"]) == (record.payload_bytes(128), record.scale_bytes(128))
        message = message_map(record.payload_bytes(128), record.scale_bytes(128), record.row_scale_bytes)
        assert (given["scales_at"], given["row_scale_at"]) == (message.scales.offset, message.row_scale.offset)
        assert (given["row_scale_bytes"], given["row_alignment"]) == (record.row_scale_bytes, 16)
    for launch in (LAUNCHES[0], LAUNCHES[2]):
        given = launch.arguments
        assert given["has_tiles"] == (layout in (ATOM, TRANSPOSED)), "rows of 16 are a multiple of 4"
        if layout is None:
            assert {given[name] for name in SCALE_ARGUMENTS} == {0}
            continue
        places = scale_map(layout, record.scale_bytes(128), given["capacity"])
        strides = ("inner", "middle", "outer", "step", "words")
        assert [given[f"scale_{name}"] for name in strides] == [getattr(places, name) for name in strides]
        assert given["scale_alignment"] == (128 if layout == ATOM else 16)
        assert (given["scales_offsets"] != 0) == (layout == ATOM)
    given = LAUNCHES[0].arguments
    for name, tensor in (
        ("out_scales", batch.scales),
        ("out_row_scales", batch.row_scales),
        ("out_tokens", batch.tokens),
    ):
        assert given.get(name, 0) == address(tensor)
    assert given["row_counts"] == batch.row_counts.data_ptr()


@pytest.mark.parametrize("fmt", [name for name, record in FORMATS.items() if record.scale])
def test_quantised_rows_travel_through_the_kernels_that_only_move(make: Make, fmt: str) -> None:
    rank = make(replace(CFG, dispatch_format=fmt))
    x, ids, weights = arguments()
    ready = reference.quantize(x, fmt)
    given = {"x": ready.payload, "scales": ready.scales, "row_scales": ready.row_scales}
    rank.dispatch(topk_ids=ids, router_weights=weights, **given)
    rank.dispatch_wait(rank.dispatch_async(topk_ids=ids, **given))
    assert [(v.kernel, v.format) for v in (launch.variant for launch in LAUNCHES)] == [
        ("dispatch", "bf16"),
        ("dispatch_async", "bf16"),
        ("dispatch_wait", None),
    ]
    for launch in LAUNCHES[:2]:
        sent = launch.arguments
        assert (sent["x"], sent["scales"]) == (ready.payload.data_ptr(), ready.scales.data_ptr())
        assert sent["given_row_scales"] == address(ready.row_scales)
        assert sent["payload_bytes"] == FORMATS[fmt].payload_bytes(128)
    with pytest.raises(EPInputError, match="x"):
        rank.dispatch(x, ids, scales=ready.scales, row_scales=ready.row_scales)
    with pytest.raises(EPInputError, match=r"scales\.shape"):
        rank.dispatch(ready.payload, ids, scales=ready.scales[:4], row_scales=ready.row_scales)
    with pytest.raises(EPInputError, match="input_scale = tensor: must be None"):
        rank.dispatch(topk_ids=ids, input_scale=torch.ones(1), **given)
    wrong = None if FORMATS[fmt].row_scale else torch.ones(5).bfloat16()
    with pytest.raises(EPInputError, match="row_scales = "):
        rank.dispatch(ready.payload, ids, scales=ready.scales, row_scales=wrong)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda scales: scales[:4], r"row_scales\.shape = \(4,\): must be \(5\)"),
        (lambda scales: scales[:, None], r"row_scales\.shape = \(5, 1\)"),
        (lambda scales: scales.half(), r"row_scales\.dtype = torch.float16: must be torch.bfloat16"),
        (lambda scales: scales.to("meta"), r"row_scales\.device"),
        (lambda scales: scales.repeat_interleave(2)[::2], r"row_scales\.stride"),
    ],
    ids=["fewer", "column", "type", "device", "stride"],
)
def test_row_scales_of_quantised_rows(make: Make, change: Callable, rule: str) -> None:
    rank = make(replace(CFG, dispatch_format="nvfp4_row"))
    x, ids, _ = arguments()
    ready = reference.quantize(x, "nvfp4_row")
    for call in (rank.dispatch, rank.dispatch_async):
        with pytest.raises(EPInputError, match=rule):
            call(ready.payload, ids, scales=ready.scales, row_scales=change(ready.row_scales))
    assert not LAUNCHES


def test_bf16_rows_need_no_second_kernel(make: Make) -> None:
    loaded = load_kernels(replace(CFG, dispatch_format="bf16"), torch.device("cpu"), EveryVariant(), NO_HOOKS)
    assert set(loaded) == {*DISPATCH_KERNELS, *COMBINE_KERNELS}
    with pytest.raises(EPInputError, match="bf16 has no scale factors"):
        make(replace(CFG, dispatch_format="bf16")).dispatch(*arguments()[:2], scales=torch.ones(5, 8))


def test_types_of_sums(rank: Communicator) -> None:
    batch = rank.dispatch(*arguments())
    rows = expert_rows(batch)
    types = {torch.bfloat16: OutputType.BF16, torch.float16: OutputType.FP16, torch.float32: OutputType.F32}
    for dtype, number in types.items():
        assert rank.combine(rows, batch, dtype=dtype).dtype == dtype
        assert LAUNCHES[-1].arguments["out_type"] == number
        out = torch.empty(5, 128, dtype=dtype)
        assert rank.combine_wait(rank.combine_async(rows, batch), out=out) is out
        assert LAUNCHES[-1].arguments["out_type"] == number
        assert LAUNCHES[-1].arguments["out"] == out.data_ptr()
    with pytest.raises(EPInputError, match=r"dtype = torch.int32: must be one of torch.bfloat16, torch.float16"):
        rank.combine(rows, batch, dtype=torch.int32)
    with pytest.raises(EPInputError, match=r"out\.shape"):
        rank.combine(rows, batch, out=torch.empty(5, 64))


def test_rows_themselves(rank: Communicator) -> None:
    """Unweighted: one row an entry, sent as in exact mode; nobody needs weights."""
    x, ids, _ = arguments()
    batch = rank.dispatch(x, ids)
    rows = expert_rows(batch)
    assert rank.combine(rows, batch, mode="unweighted").shape == (5, 2, 128)
    out = rank.combine_wait(rank.combine_async(rows, batch, "unweighted"), dtype=torch.float32)
    assert (out.shape, out.dtype) == ((5, 2, 128), torch.float32)
    assert launched()[1:] == ["combine_unweighted", "combine_async_exact", "combine_wait_unweighted"]
    assert all(LAUNCHES[index].arguments["router_weights"] == 0 for index in (1, 3))
    with pytest.raises(EPInputError, match="must be None in unweighted mode"):
        rank.combine(rows, batch, torch.ones(5, 2), "unweighted")
    with pytest.raises(EPInputError, match="exact combine needs them, give them to dispatch or combine"):
        rank.combine(rows, batch)


def test_shared_expert(make: Make) -> None:
    rank = make(SHARED)
    batch = rank.dispatch(*arguments())
    rank.combine(expert_rows(batch), batch)
    later = rank.dispatch_wait(rank.dispatch_async(*arguments(3)))
    rank.combine_wait(rank.combine_async(expert_rows(later), later))
    shared = [[launch.arguments.get(f"shared_{name}") for name in ("groups", "first", "rows")] for launch in LAUNCHES]
    assert shared == [[1, 0, 5]] * 2 + [[1, 0, 3]] * 2 + [[1, None, None], [1, 0, 3]], "give-back has no shared row"
    assert batch.row_counts.shape == (5,) and batch.row_offsets.shape == (6,)
    with pytest.raises(EPInputError, match="no sum that a fused shared expert could be added to"):
        rank.combine(expert_rows(batch), batch, mode="unweighted")


@pytest.mark.parametrize("number", [0, 1])
def test_skip_a2a(make: Make, number: int) -> None:
    """Every rank is a group of its own: one peer, its own experts, its share of the shared expert's tokens."""
    rank = make(replace(ALONE, fused_shared_expert=True), number)
    batch = rank.dispatch(*arguments(5))
    given = LAUNCHES[0].arguments
    assert (given["rank"], given["ranks"], given["ranks_magic"]) == (0, 1, 0)
    assert given.items() >= rank.cfg.arena.arguments().items()
    assert (given["experts"], given["first_expert"], given["all_experts"], given["local_experts"]) == (
        4,
        4 * number,
        8,
        4,
    )
    first, count = ((0, 3), (3, 2))[number]
    assert (given["shared_groups"], given["shared_first"], given["shared_rows"]) == (1, first, count)
    assert batch.row_map.shape == (1, 16, 2) and batch.headers.shape == (1, 4)
    assert rank.arena.stored == {given["peers_at"]: [given["arena"]]} and len(rank._status.memory.words) == 12
    rank._status.memory.words[4:8] = [Phase.EXPERT_ID, 3, 8, 9]
    assert not rank.failed
    with pytest.raises(EPInputError, match=r"topk_ids.flatten\(\)\[3\] = 9: must be -1 or in \[0, 8\)"):
        rank.synchronize()


def test_tuning_may_be_set_between_calls(rank: Communicator) -> None:
    """Pieces of both directions are chosen at dispatch; combine keeps those of its dispatch, and where whole rows come
    home at most half of the CTAs send."""
    few = Entry(8, 40, 0.25, 8, packed=True)
    tables = (few, Entry(MANY, 10, 0, 1)), (Entry(8, 40, 0, 16), Entry(MANY, 9, 0, 1))
    rank.tuning = Tuning(*tables)
    batch = rank.dispatch(*arguments())
    rank.tuning = Tuning((Entry(8, 20, 0.5, 4), Entry(MANY, 10, 0, 1)), (Entry(8, 30, 0.8, 2), Entry(MANY, 9, 0, 1)))
    rank.combine(expert_rows(batch), batch, mode="partial")
    tuned = rank.dispatch(*arguments())
    rank.combine(expert_rows(tuned), tuned)
    rank.dispatch_wait(rank.dispatch_async(*arguments(9)))
    rank.dispatch(*arguments(0))
    roles = [(launch.grid, *(launch.arguments[name] for name in ("send_ctas", "receive_from"))) for launch in LAUNCHES]
    fused, halves = [(40, 10, 10), (30, 24, 24), (20, 10, 10), (30, 15, 15)], [(10, 10, 10), (10, 0, 0)]
    assert roles == [*fused, *halves, (10, 10, 0)], "no tokens: as many as there may be"
    chained = [launch.arguments["chained"] for launch in LAUNCHES]
    assert chained == [int(launch.grid <= 32) for launch in LAUNCHES], "two of them fit into 64 CTAs"
    behind = [launch.early for launch in LAUNCHES[1:]]
    assert behind == [first and then for first, then in pairwise(chained)] and not LAUNCHES[0].early
    assert [launch.arguments.get("packed") for launch in LAUNCHES] == [1, None, 0, None, 0, None, 0]
    pieces = [launch.arguments.get("message_pieces") for launch in LAUNCHES]
    assert pieces == [3, None, 2, None, 0, None, 0]
    pieces = [launch.arguments.get("return_pieces") for launch in LAUNCHES]
    assert pieces == [4, 4, 1, 1, 0, None, 0]


def test_a_launch_starts_early_behind_one_that_leaves_it_room(rank: Communicator) -> None:
    """Of the 64 CTAs that are resident together each takes at most half."""
    for grid in (40, 32, 32, 33, 32):
        rank.tuning = Tuning((Entry(MANY, grid, 0, 1),), (Entry(MANY, grid, 0, 1),))
        rank.dispatch(*arguments())
    got = [(launch.grid, launch.arguments["chained"], launch.early) for launch in LAUNCHES]
    assert got == [(40, 0, False), (32, 1, False), (32, 1, True), (33, 0, False), (32, 1, False)]


def test_fewer_ctas_send_whole_rows(rank: Communicator) -> None:
    """Half of them at most, but of those that send partial sums as many as the table says."""
    rank.tuning = Tuning((Entry(MANY, 40, 0, 1),), (Entry(MANY, 40, 0.75, 1),))
    batch = rank.dispatch(*arguments())
    for mode in ("exact", "unweighted", "partial"):
        rank.combine(expert_rows(batch), batch, mode=mode)
    roles = [[launch.arguments[name] for name in ("send_ctas", "receive_from")] for launch in LAUNCHES[1:]]
    assert roles == [[20, 20], [20, 20], [30, 30]]


def test_slots_of_partial_sums_lie_side_by_side(make: Make) -> None:
    """Which they would in exact mode, too, had tokens as many slots as there are ranks."""
    cfg = replace(CFG, top_k=3)
    rank, wide, narrow = make(cfg), cfg.arena.arguments(), cfg.arena.arguments(partial=True)
    assert wide != narrow
    x, _, _ = arguments()
    batch = rank.dispatch(x, torch.zeros(5, 3, dtype=torch.int32), torch.ones(5, 3))
    rows = expert_rows(batch)
    for mode in ("exact", "unweighted", "partial"):
        rank.combine(rows, batch, mode=mode)
        rank.combine_wait(rank.combine_async(rows, batch, mode))
    for launch in LAUNCHES:
        partial = launch.variant.kernel.endswith("partial")
        assert launch.arguments.items() >= (narrow if partial else wide).items(), launch.variant.kernel
    assert sum(launch.variant.kernel.endswith("partial") for launch in LAUNCHES) == 3


# ---- what the driver is given


def replace_driver(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., tuple]) -> list[int]:
    """A driver that loads every kernel; returns the list of what they may have of shared memory."""
    done, allowed = driver.driver.CUresult.CUDA_SUCCESS, []

    def allow(function: int, attribute: driver.driver.CUfunction_attribute, value: int) -> tuple:
        allowed.append(value)
        return (done,)

    for name in ("cuCtxGetCurrent", "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"):
        monkeypatch.setattr(driver.driver, name, lambda *_: (done, 0))
    monkeypatch.setattr(driver.driver, "cuFuncSetAttribute", allow)
    monkeypatch.setattr(driver.driver, "cuLaunchKernelEx", launch)
    return allowed


def test_parameters_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound ones stay, the others are those of the call, or 0; each in its width and place."""
    launches, shapes = [], []

    def launch(config: driver.driver.CUlaunchConfig, function: int, address: int, extra: int) -> tuple[int]:
        count = len(entry.params)
        pointers = (ctypes.c_void_p * count).from_address(address)
        widths = [ctypes.c_int64 if kind == "i64" else ctypes.c_int32 for _, kind in entry.params]
        launches.append([width.from_address(at).value for width, at in zip(widths, pointers, strict=True)])
        shapes.append((config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream), config.numAttrs))
        return (driver.driver.CUresult.CUDA_SUCCESS,)

    params = (("arena", "i64"), ("rank", "i32"), ("x", "i64"), ("tokens", "i32"))
    entry = SimpleNamespace(params=params, entry="kernel", smem_bytes=48, read=bytes)
    allowed = replace_driver(monkeypatch, launch)
    kernel = driver.Kernel(entry)
    assert allowed == [48], "shared memory that a launch may ask for"
    kernel.bind({"arena": 1 << 40, "rank": -1, "other": 9})
    for grid, arguments in enumerate(({"x": 1 << 50, "tokens": 7}, {"tokens": -2}, {"rank": 5}), 1):
        kernel.launch(grid, arguments, 1000 + grid, early=grid == 2)
    kernel.bound({"tokens": 6, "other": 1}).launch(4, {"x": 3, "tokens": 8}, 1004)
    kernel.launch(5, {"x": 2, "tokens": 9}, 1005)
    assert shapes == [(grid, 512, 48, 1000 + grid, int(grid == 2)) for grid in (1, 2, 3, 4, 5)]
    own = [(1 << 50, 7), (0, -2), (0, 0), (3, 6), (2, 9)]
    assert launches == [[1 << 40, -1, *both] for both in own], "a bound kernel changes no other one"


def test_a_thread_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the kernel's, once; other failures are raised."""
    done = driver.driver.CUresult.CUDA_SUCCESS
    current, launches = [0], []

    def launch(*_: object) -> tuple:
        launches.append(current[0])
        return (done if current[0] == 5 else driver.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    def enter(context: int) -> tuple:
        current[0] = context
        return (done,)

    replace_driver(monkeypatch, launch)
    monkeypatch.setattr(driver.driver, "cuCtxGetCurrent", lambda: (done, 5))
    monkeypatch.setattr(driver.driver, "cuCtxSetCurrent", enter)
    kernel = driver.Kernel(SimpleNamespace(params=(), entry="kernel", smem_bytes=0, read=bytes))
    kernel.launch(1, {}, 7)
    kernel.launch(1, {}, 7)
    assert launches == [0, 5, 5]
    failed = driver.driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
    monkeypatch.setattr(driver.driver, "cuLaunchKernelEx", lambda *_: (failed,))
    with pytest.raises(EPError, match="CUDA_ERROR_LAUNCH_FAILED"):
        kernel.launch(1, {}, 7)


def test_synchronize_waits_for_every_stream(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the current one alone where no other was given work, else for the device."""
    waits: list[object] = []
    streams = [SimpleNamespace(cuda_stream=raw, synchronize=lambda raw=raw: waits.append(raw)) for raw in (7, 8)]
    rank, current = make(), [streams[0]]
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device=None: waits.append("device"))
    x, ids, weights = arguments()
    rank.synchronize()
    batch = rank.dispatch(x, ids, weights)
    rank.synchronize()
    assert waits == [7, 7]
    current[0] = streams[1]
    rank.combine(expert_rows(batch), batch)
    current[0] = streams[0]
    rank.synchronize()
    rank.synchronize()
    assert waits[2:] == ["device", 7]


def test_ranks_that_share_a_gpu_have_streams_of_their_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch waits for what the caller's stream was given before, and all that it reads or writes stays until it has
    run."""
    waits: list[tuple[int, int]] = []
    kept: set[tuple[int, int]] = set()
    own = SimpleNamespace(cuda_stream=8, wait_stream=lambda other: waits.append((other.cuda_stream, len(LAUNCHES))))
    monkeypatch.setattr(module.torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.add((tensor.data_ptr(), stream.cuda_stream))
    )
    rank = make(shared=True)
    (x, ids, weights), scale, out, sums = arguments(), torch.tensor([2.0]), rank.allocate(), torch.zeros(5, 128)
    rows = expert_rows(out)
    buffers = [tensor for tensor in tensors_of(out).values() if tensor is not None]
    batch = [ids, weights, out.row_map, out.headers, out.weights]

    def keeps(result: object, *tensors: torch.Tensor) -> object:
        assert kept == {(tensor.data_ptr(), 8) for tensor in tensors}
        kept.clear()
        return result

    fused = keeps(rank.dispatch(x, ids, weights, scale, out), x, ids, weights, scale, *buffers)
    keeps(rank.combine(rows, fused, out=sums), rows, sums, *batch)
    pending = keeps(rank.dispatch_async(x, ids, weights, scale), x, ids, weights, scale)
    split = keeps(rank.dispatch_wait(pending, out), *buffers)
    sent = keeps(rank.combine_async(rows, split), rows, *(tensor for tensor in batch if tensor is not weights))
    keeps(rank.combine_wait(sent, out=sums), rows, sums, *batch)
    assert waits == [(7, before) for before in range(6)]
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: own)
    keeps(rank.dispatch(x, ids, weights, scale, out))
    assert len(waits) == 6 and [launch.stream for launch in LAUNCHES] == [8] * 7


def test_a_rank_that_has_its_gpu_works_on_the_callers_stream(rank: Communicator) -> None:
    rank.dispatch(*arguments())
    assert [launch.stream for launch in LAUNCHES] == [7]


@pytest.mark.parametrize("cfg", [CFG, SHARED, ALONE])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_arena(monkeypatch: pytest.MonkeyPatch, cfg: EPConfig, rank: int) -> None:
    """Every express word is BLANK and every other byte 0 before the first round, wherever the arena begins."""
    memory = {}

    def fill(address: int, byte: int, count: int) -> tuple[int]:
        memory[0][address - 4096 : address - 4096 + count] = bytes([byte]) * count
        return (driver.driver.CUresult.CUDA_SUCCESS,)

    def allocate(nbytes: int) -> tuple[int, int]:
        memory[0] = bytearray(b"\xa5" * nbytes)
        return driver.driver.CUresult.CUDA_SUCCESS, 4096

    cuda = SimpleNamespace(device=lambda _: nullcontext(), current_stream=lambda _: None, synchronize=lambda _: None)
    monkeypatch.setattr(driver, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(driver.driver, "cuMemAlloc", allocate)
    monkeypatch.setattr(driver.driver, "cuMemsetD8", fill)
    arena = connection._make_arena(cfg, rank, torch.device("cuda", 0))
    assert arena.nbytes == len(memory[0]) == memory_bytes(cfg)
    begin = arena.address - 4096
    assert begin == (0 if cfg.skip_a2a else cfg.arena.begin(rank))
    assert not any(memory[0][:begin]) and not any(memory[0][begin + cfg.arena.nbytes :])
    words = torch.frombuffer(memory[0][begin : begin + cfg.arena.nbytes], dtype=torch.uint32)
    blank = torch.zeros(len(words), dtype=torch.bool)
    for name in ("express_returns", "express_messages"):
        region = cfg.arena.regions[name]
        assert region.offset % 4 == region.nbytes % 4 == 0
        blank[region.offset // 4 : (region.offset + region.nbytes) // 4] = True
    assert torch.equal(words == BLANK, blank) and torch.equal(words == 0, ~blank)


# ---- plans, lists, hooks


def test_a_plan_checks_now_and_launches_later(rank: Communicator) -> None:
    x, ids, weights = arguments()
    with pytest.raises(EPInputError, match="topk_ids"):
        rank.plan_dispatch(x, ids[:2])
    plan = rank.plan_dispatch(x, ids, weights)
    assert not LAUNCHES
    batch = plan.launch()
    assert launched() == ["dispatch"]
    with pytest.raises(EPInputError, match="mode = 'sum'"):
        rank.plan_combine(expert_rows(batch), batch, mode="sum")
    combine = rank.plan_combine(expert_rows(batch), batch, mode="partial")
    assert len(LAUNCHES) == 1
    assert combine.launch().shape == (5, 128)
    assert launched() == ["dispatch", "combine_partial"]
    rank.dispatch_async(x, ids)
    with pytest.raises(EPInputError, match="1 split round"):
        rank.plan_dispatch(x, ids)


def test_lists_launch_when_all_arguments_are_good(make: Make) -> None:
    ranks = [make(rank=0), make(rank=1)]
    columns = [list(column) for column in zip(arguments(), arguments(3), strict=True)]
    operation, combine = DistributedEPDispatchNVFP4(ranks), DistributedEPCombine(ranks)
    for bad, rule in (
        ({"topk_ids": columns[1][:1]}, r"len\(topk_ids\) = 1: must be the number of ranks, 2"),
        ({"topk_ids": [columns[1][0]] * 2}, r"topk_ids\.shape"),
        ({"outs": [None]}, r"len\(outs\) = 1"),
    ):
        names = dict(zip(("input_tokens", "topk_ids", "router_weights"), columns, strict=True))
        with pytest.raises(EPInputError, match=rule):
            operation(**names | bad)
    assert not LAUNCHES
    outs = [one.allocate() for one in ranks]
    scales = [torch.tensor([2.0]), torch.tensor([3.0])]
    batches = operation(*columns, scales, outs)
    assert [launch.arguments["rank"] for launch in LAUNCHES] == [0, 1]
    assert [launch.arguments["global_scale"] for launch in LAUNCHES] == [scale.data_ptr() for scale in scales]
    assert [batch.tokens is out.tokens for batch, out in zip(batches, outs, strict=True)] == [True] * 2
    sums = combine([expert_rows(batch) for batch in batches], batches, dtype=torch.float32)
    assert [one.shape for one in sums] == [(5, 128), (3, 128)] and launched()[2:] == ["combine_exact"] * 2


def test_lists_of_quantised_rows_and_of_what_hooks_read(make: Make) -> None:
    cfg = replace(CFG, dispatch_format="nvfp4_row")
    ranks = [make(cfg, rank, HOOKS) for rank in range(2)]
    counts, columns = (5, 3), [list(column) for column in zip(arguments(), arguments(3), strict=True)]
    payloads, scales = ([torch.zeros(n, width, dtype=torch.uint8) for n in counts] for width in (64, 8))
    row_scales = [torch.ones(count, dtype=torch.bfloat16) for count in counts]
    operation, combine = DistributedEPDispatchNVFP4(ranks), DistributedEPCombine(ranks)
    batches = operation(payloads, *columns[1:], scales=scales, row_scales=row_scales)
    data = [torch.zeros(count, 128) for count in counts]
    combine([expert_rows(batch) for batch in batches], batches, epilogue_data=data)
    for name, given, some in (
        ("scales", scales, LAUNCHES[:2]),
        ("given_row_scales", row_scales, LAUNCHES[:2]),
        ("epilogue_data", data, LAUNCHES[2:]),
    ):
        assert [launch.arguments[name] for launch in some] == [one.data_ptr() for one in given]
    for bad, rule in (({"scales": scales[:1]}, r"len\(scales\)"), ({"row_scales": [None]}, r"len\(row_scales\)")):
        with pytest.raises(EPInputError, match=f"{rule} = 1: must be the number of ranks, 2"):
            operation(payloads, *columns[1:], **{"scales": scales, "row_scales": row_scales} | bad)
    with pytest.raises(EPInputError, match=r"len\(epilogue_data\) = 1"):
        combine([expert_rows(batch) for batch in batches], batches, epilogue_data=data[:1])
    assert len(LAUNCHES) == 4


def test_lists_are_of_one_format_and_all_ranks(make: Make) -> None:
    served = {
        DistributedEPDispatch: {"bf16"},
        DistributedEPDispatchFP8: {"fp8", "fp8_pow2"},
        DistributedEPDispatchMXFP4: {"mxfp4", "mxfp8"},
        DistributedEPDispatchNVFP4: {"nvfp4", "nvfp4_row", "mxfp4", "mxfp8"},
    }
    for fmt in FORMATS:
        ranks = [make(replace(CFG, dispatch_format=fmt), rank) for rank in range(2)]
        for operation, formats in served.items():
            if fmt in formats:
                operation(ranks)
            else:
                with pytest.raises(EPConfigError, match=f"dispatch_format = '{fmt}': {operation.__name__} serves"):
                    operation(ranks)
        for some, rule in (
            ([], "communicators = no ranks: must be a list"),
            (ranks[:1], "communicators = 1: must be world_size = 2"),
            (ranks[::-1], r"communicators of ranks \[1, 0\]: must be all ranks of one group, in order"),
            ([ranks[0], make(replace(ranks[1].cfg, top_k=1), 1)], r"\[0, 1\]: must be all ranks of one group"),
        ):
            with pytest.raises(EPConfigError, match=rule):
                DistributedEPCombine(some)


def test_hooks_choose_kernels_and_open_types(make: Make) -> None:
    rank = make(hooks=HOOKS)
    x, ids, weights = arguments()
    scale, residual = torch.tensor([7], dtype=torch.int64), torch.ones(5, 128)
    batch = rank.dispatch(x, ids, weights.bfloat16(), scale)
    for mode in ("exact", "partial"):
        rank.combine(expert_rows(batch), batch, mode=mode, epilogue_data=residual)
    rank.combine(expert_rows(batch), batch, mode="unweighted")
    hooks = [launch.variant.hooks for launch in LAUNCHES]
    sums = [replace(HOOKS, input_scale=None), Hooks(epilogue=HOOKS.epilogue)]
    assert hooks == [replace(HOOKS, epilogue=None), *sums, NO_HOOKS]
    assert LAUNCHES[0].arguments["router_weights"] == LAUNCHES[1].arguments["router_weights"] != 0
    assert LAUNCHES[0].arguments["global_scale"] == scale.data_ptr()
    assert LAUNCHES[1].arguments["epilogue_data"] == residual.data_ptr()
    rank.combine_wait(rank.combine_async(expert_rows(batch), batch), epilogue_data=residual)
    assert LAUNCHES[-1].arguments["epilogue_data"] == residual.data_ptr()
    assert [launch.variant.hooks for launch in LAUNCHES[-2:]] == [NO_HOOKS, sums[0]], "only who adds up has them"
    plain = make()
    rule = r"router_weights\.dtype = torch.bfloat16: must be torch.float32; use router_weights\.float\(\)"
    with pytest.raises(EPInputError, match=rule):
        plain.dispatch(x, ids, weights.bfloat16())
    with pytest.raises(EPInputError, match=r"input_scale = torch.int64 tensor"):
        plain.dispatch(x, ids, weights, scale)


@pytest.mark.parametrize("name", ["dispatch", "plan_dispatch", "dispatch_async"])
def test_both_backends_take_the_same_tokens(name: str) -> None:
    ours, theirs = (get_type_hints(getattr(one, name)) for one in (Communicator, ReferenceCommunicator))
    assert ours.pop("return") and theirs.pop("return") and ours == theirs


def test_a_number_as_global_scale(rank: Communicator) -> None:
    rank.dispatch(*arguments(), 2.0)
    assert LAUNCHES[0].arguments["global_scale"] != 0
    for value in (0.0, -1.0, float("nan"), 2.0**101, True):
        with pytest.raises(EPInputError, match=r"input_scale = .*: must be a number in"):
            rank.dispatch(*arguments(), value)


# ---- what is raised


def test_order_of_halves(rank: Communicator) -> None:
    x, ids, weights = arguments()

    def refused(*calls: tuple[str, Callable[[], object]]) -> None:
        for message, call in calls:
            with pytest.raises(EPInputError, match=message):
                call()

    first, second = (rank.dispatch_async(x, ids, weights) for _ in range(2))
    refused(
        ("2 are outstanding", lambda: rank.dispatch_async(x, ids)),
        ("2 split round", lambda: rank.dispatch(x, ids)),
        ("round 2 of dispatch: must be round 1, the oldest", lambda: rank.dispatch_wait(second)),
    )
    batch = rank.dispatch_wait(first)
    refused(("and not received before", lambda: rank.dispatch_wait(first)))
    rows = expert_rows(batch)
    sums = [rank.combine_async(rows, batch) for _ in range(2)]
    refused(
        ("2 are outstanding", lambda: rank.combine_async(rows, batch)),
        ("2 split round", lambda: rank.plan_combine(rows, batch)),
        ("round 2 of combine: must be round 1, the oldest", lambda: rank.combine_wait(sums[1])),
    )
    rank.combine_wait(sums[0])


def test_what_another_rank_was_given_is_refused(make: Make) -> None:
    """Its ids and weights are not those of the rows that this rank would find."""
    ranks = [make(rank=0), make(rank=1)]
    sent = [rank.dispatch_async(*arguments()) for rank in ranks]
    with pytest.raises(EPInputError, match="must be what dispatch_async of this communicator, rank 0, returned"):
        ranks[0].dispatch_wait(sent[1])
    batches = [rank.dispatch_wait(pending) for rank, pending in zip(ranks, sent, strict=True)]
    rows = expert_rows(batches[0])
    for call in (ranks[0].combine, ranks[0].combine_async):
        with pytest.raises(EPInputError, match=r"batch of another communicator \(its rank 1\)"):
            call(rows, batches[1])
        with pytest.raises(EPInputError, match=r"dispatched\.rank = 1: must be 0, the rank that combines"):
            call(rows, replace(batches[1], origin=None))
    with pytest.raises(EPInputError, match="pending = PendingDispatch: must be what combine_async of this"):
        ranks[0].combine_wait(sent[0])
    ranks[0].combine(rows, batches[0])


def test_what_another_communicator_was_given_is_refused(make: Make) -> None:
    """Though of the same rank and round."""
    here, there = make(), make()
    sent = [one.dispatch_async(*arguments()) for one in (here, there)]
    with pytest.raises(EPInputError, match="must be what dispatch_async of this communicator"):
        here.dispatch_wait(sent[1])
    batches = [one.dispatch_wait(pending) for one, pending in zip((here, there), sent, strict=True)]
    sent = [one.combine_async(expert_rows(batch), batch) for one, batch in zip((here, there), batches, strict=True)]
    with pytest.raises(EPInputError, match="must be what combine_async of this communicator"):
        here.combine_wait(sent[1])
    here.combine_wait(sent[0])


def test_a_plan_keeps_its_batch(rank: Communicator) -> None:
    """Until it is launched it needs what only its addresses name."""
    batch = rank.dispatch(*arguments())
    needed = [weakref.ref(getattr(batch, name)) for name in ("topk_ids", "row_map", "headers", "weights")]
    plan = rank.plan_combine(expert_rows(batch), batch, mode="partial")
    at = batch.row_map.data_ptr()
    del batch
    gc.collect()
    assert all(tensor() is not None for tensor in needed)
    plan.launch()
    assert LAUNCHES[-1].arguments["row_map"] == at


def test_bad_rows_are_named(rank: Communicator) -> None:
    batch = rank.dispatch(*arguments())
    rows = expert_rows(batch)
    before = len(LAUNCHES)
    for bad, rule in (
        (rows[:, :64], r"rows\.shape"),
        (rows.float(), r"rows\.dtype"),
        (rows.to("meta"), r"rows\.device"),
        ([1.0], r"rows"),
    ):
        with pytest.raises(EPInputError, match=rule):
            rank.combine(bad, batch)
    assert len(LAUNCHES) == before


@pytest.mark.parametrize("name", ["x", "rows", "out"])
def test_rows_begin_at_a_vector(make: Make, name: str) -> None:
    """What kernels move by 16 bytes may not begin 2 bytes behind such a place."""
    rank = make(replace(CFG, dispatch_format="bf16"))
    x, ids, weights = arguments()
    batch = rank.dispatch(x, ids, weights)
    call = {
        "x": lambda one: rank.dispatch(one, ids, weights),
        "rows": lambda one: rank.combine(one, batch),
        "out": lambda one: rank.combine(x, batch, out=one),
    }[name]
    raw = torch.empty(x.numel() + 16, dtype=torch.bfloat16)
    begin = -raw.data_ptr() % 16 // 2
    good, bad = (raw[begin + shift :][: x.numel()].view(x.shape) for shift in (0, 1))
    call(good)
    before = len(LAUNCHES)
    with pytest.raises(EPInputError, match=rf"^{name}\.data_ptr\(\) = .*: must be a multiple of 16 bytes"):
        call(bad)
    assert len(LAUNCHES) == before


def test_a_plan_waits_for_split_rounds(rank: Communicator) -> None:
    """A fused launch would receive the round that was sent before."""
    batch = rank.dispatch(*arguments())
    plans = rank.plan_dispatch(*arguments()), rank.plan_combine(expert_rows(batch), batch)
    pending = rank.dispatch_async(*arguments()), rank.combine_async(expert_rows(batch), batch)
    before = len(LAUNCHES)
    for plan in plans:
        with pytest.raises(EPInputError, match="outstanding"):
            plan.launch()
    assert len(LAUNCHES) == before
    rank.dispatch_wait(pending[0])
    rank.combine_wait(pending[1])
    assert [type(plan.launch()) for plan in plans] == [type(batch), torch.Tensor]


def test_a_shared_expert_has_no_rows_to_hand_out(make: Make) -> None:
    """Which the sending half says: nobody could receive that round."""
    rank = make(SHARED)
    batch = rank.dispatch(*arguments())
    for call in (rank.combine, rank.combine_async):
        with pytest.raises(EPInputError, match="mode = 'unweighted'"):
            call(expert_rows(batch), batch, mode="unweighted")
    assert rank.combine(expert_rows(batch), batch).shape == (5, 128)


def test_a_timeout_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(EPTimeout("MESSAGE", 2, (0, 3), ("a", "b"))))
    assert (error.phase, error.rank, error.missing, error.details) == ("MESSAGE", 2, (0, 3), ("a", "b"))
    assert "rank 2 gave up waiting in phase MESSAGE for rank(s) [0, 3]" in str(error)


def test_the_cpu_has_no_hooks() -> None:
    with pytest.raises(EPConfigError, match="there are none on the reference backend"):
        connection.connect_local(CFG, ["cpu"] * 2, hooks=HOOKS)


def test_buffers_are_checked_once(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = module.check_buffers

    def counted(cfg: EPConfig, out: DispatchBuffers, device: torch.device) -> None:
        checked.append(id(out))
        check(cfg, out, device)

    monkeypatch.setattr(module, "check_buffers", counted)
    one, two = rank.allocate(16), rank.allocate(16)
    for out in (one, two, one, two):
        rank.dispatch(*arguments(), out=out)
    assert checked == [id(one), id(two)]
    wrong = replace(one, num_rows=one.num_rows.float())
    for _ in range(2):
        with pytest.raises(EPInputError, match=r"out\.num_rows"):
            rank.dispatch(*arguments(), out=wrong)


def test_kernels_are_bound_to_the_callers_buffers_once(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """To each of several, for each kernel that receives; buffers of one call only take part in its launch."""
    bound: list[int] = []
    real = RecordingKernel.bound

    def counted(kernel: RecordingKernel, constants: Mapping[str, int]) -> RecordingKernel:
        bound.append(constants["out_tokens"])
        return real(kernel, constants)

    monkeypatch.setattr(RecordingKernel, "bound", counted)
    one, two = rank.allocate(), rank.allocate()
    for out in (one, two, None, one, two):
        batch = rank.dispatch(*arguments(), out=out)
        assert LAUNCHES[-1].arguments["out_tokens"] == batch.tokens.data_ptr()
        assert len(bound) == max(0, len(LAUNCHES) - 3), "when they come again"
    for _ in range(2):
        rank.dispatch_wait(rank.dispatch_async(*arguments()), one)
        assert LAUNCHES[-1].arguments["out_tokens"] == one.tokens.data_ptr()
    assert bound == [out.tokens.data_ptr() for out in (one, two, one)]


def test_batches_that_a_communicator_made_are_not_checked_again(
    make: Make, rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def count(name: str, real: Callable) -> Callable:
        def counted(*words: object, **how: bool) -> object:
            if how != {"checked": True}:
                checked.append(name)
            return real(*words, **how)

        return counted

    for name in ("check_batch", "combine_weights"):
        monkeypatch.setattr(module, name, count(name, getattr(module, name)))
    batch = rank.dispatch(*arguments())
    rank.combine(expert_rows(batch), batch)
    rank.combine_wait(rank.combine_async(expert_rows(batch), batch, "partial"))
    assert checked == []
    later = rank.dispatch(*arguments())
    rank.combine(expert_rows(batch), batch)
    rank.combine(expert_rows(later), later)
    assert checked == []
    rebuilt = replace(make().dispatch(*arguments()), origin=None)
    rank.combine(expert_rows(rebuilt), rebuilt)
    assert checked == ["check_batch", "combine_weights"]
    assert vars(batch).keys() - {"use", "as_made"} == {field.name for field in dataclasses.fields(batch)}
    for part, rule in (
        ({"router_weights": batch.router_weights.double()}, r"router_weights\.dtype"),
        ({"row_map": batch.row_map[:1]}, r"dispatched\.row_map\.shape"),
    ):
        with pytest.raises(EPInputError, match=rule):
            rank.combine(expert_rows(batch), replace(batch, **part))
    with pytest.raises(EPInputError, match=r"router_weights\.shape"):
        rank.combine(expert_rows(batch), batch, batch.router_weights[:2])


def test_the_batch_that_was_made_last_may_go(rank: Communicator) -> None:
    batch = rank.dispatch(*arguments())
    rows, gone = expert_rows(batch), weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    for call in (rank.combine, rank.combine_async):
        with pytest.raises(EPInputError, match="dispatched = NoneType: must be what dispatch returned"):
            call(rows, None)


def test_buffers_have_whole_groups(make: Make) -> None:
    rank = make(replace(CFG, row_alignment=16))
    out = rank.allocate(100)
    assert out.tokens.shape[0] == 112
    cut = replace(out, tokens=out.tokens[:100], src_info=out.src_info[:100])
    with pytest.raises(EPInputError, match=r"out.tokens.shape\[0\] = 100: must be a multiple of row_alignment = 16"):
        rank.dispatch(*arguments(), out=cut)
    with pytest.raises(EPInputError, match=r"out\.row_counts"):
        rank.dispatch(*arguments(), out=replace(out, row_counts=out.row_counts[:-1]))


@pytest.mark.parametrize("name", ["tokens", "scales", "headers"])
def test_buffers_are_aligned(make: Make, name: str) -> None:
    rank = make(replace(CFG, dispatch_format="nvfp4"))
    out = rank.allocate(16)
    tensor = getattr(out, name)
    raw = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    shifted = raw[-raw.data_ptr() % 16 + 8 :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    with pytest.raises(EPInputError, match=rf"out\.{name}.*16"):
        rank.dispatch(*arguments(), out=replace(out, **{name: shifted}))


def test_timeout_of_the_own_launch_counts_ctas(rank: Communicator) -> None:
    rank._status.memory.words[:4] = [Phase.GRID, 0, 264, 200]
    with pytest.raises(EPTimeout, match="GRID: 200 of 264 receiving CTAs came together"):
        rank.synchronize()


def test_timeout_is_raised_by_every_later_call(rank: Communicator) -> None:
    rank._status.memory.words[4:8] = [Phase.MESSAGE, 3, 9, 8]
    assert rank.failed
    for call in (rank.synchronize, rank.allocate, lambda: rank.dispatch(*arguments())):
        with pytest.raises(EPTimeout, match="MESSAGE of rank 1, index 3: expected epoch 9, saw 8") as caught:
            call()
        assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("MESSAGE", 0, (1,))
    assert not LAUNCHES


def test_status_of_a_closed_rank_is_what_it_was(make: Make) -> None:
    """Its memory belongs to others by then."""
    for failed in (False, True):
        rank = make()
        rank._status.memory.words[:4] = [Phase.GRID, 0, 264, 200] if failed else [0] * 4
        rank.close()
        rank._status.memory.gone[:] = [0 if failed else 1] * len(rank._status.memory.gone)
        assert rank.failed == failed


def test_input_error_is_raised_once_and_stops_nothing(rank: Communicator) -> None:
    rank._status.memory.words[8:12] = [Phase.EXPERT_ID, 3, 8, 2**32 - 2]
    rank.dispatch(*arguments())
    assert not rank.failed
    with pytest.raises(EPInputError, match=r"topk_ids.flatten\(\)\[3\] = -2: must be -1 or in \[0, 8\)"):
        rank.synchronize()
    rank.synchronize()
    rank._status.memory.words[12:16] = [Phase.ROW_CAPACITY, 0, 64, 70]
    with pytest.raises(EPInputError, match="rank 0: out holds 64 rows, but those that arrived take 70"):
        rank.synchronize()
    rank._status.memory.words[8:16] = [Phase.EXPERT_ID, 3, 8, 9, Phase.ROW_CAPACITY, 0, 64, 70]
    with pytest.raises(EPInputError, match=r"flatten\(\)\[3\] = 9: must be .*; out holds 64 rows"):
        rank.synchronize()
    rank.synchronize()


def test_closed(rank: Communicator) -> None:
    plan = rank.plan_dispatch(*arguments())
    rank.close()
    rank.close()
    for call in (
        plan.launch,
        lambda: rank.dispatch(*arguments()),
        lambda: rank.plan_dispatch(*arguments()),
        rank.allocate,
        rank.synchronize,
    ):
        with pytest.raises(EPError, match="rank 0: the communicator is closed"):
            call()
