"""The CUDA communicator's host side without a GPU: what it launches, with which arguments, and what it raises.

The driver and torch.cuda are replaced by recorders; tensors live on the CPU. Argument names are compared with the
parameters in the manifest of the compiled kernels, so a kernel and its caller cannot drift apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep import communicator as module
from cute_ep.communicator import Communicator
from cute_ep.config import EPConfig
from cute_ep.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.routing import Phase
from cute_ep.library import Library, LibraryEntry

LIBRARY = Path(__file__).parents[1] / "build" / "library"
CFG = EPConfig(hidden=64, num_experts=8, top_k=2, max_tokens_per_rank=16, world_size=2, dispatch_format="nvfp4")
LAUNCHES: list[tuple[str, int, dict[str, int]]] = []


class RecordingKernel:
    def __init__(self, entry: LibraryEntry) -> None:
        self.entry = entry

    def launch(self, grid: int, arguments: Mapping[str, int], stream: int) -> None:
        LAUNCHES.append((self.entry.variant.kernel, grid, dict(arguments)))
        assert set(arguments) == {name for name, _ in self.entry.params}, self.entry.variant.symbol

    def unload(self) -> None:
        pass


class PlainHostMemory:
    def __init__(self, words: int) -> None:
        self.words = (ctypes.c_uint32 * words)()
        self.address = ctypes.addressof(self.words)

    def free(self) -> None:
        pass


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    """Rank 0 of two, its peers absent."""
    if not (LIBRARY / "manifest.json").exists():
        pytest.skip("no compiled kernels; `make build` makes them")
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    cuda = SimpleNamespace(
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        current_device=lambda: None,
        synchronize=lambda device: None,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(module, "Kernel", RecordingKernel)
    monkeypatch.setattr(module, "HostMemory", PlainHostMemory)
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    LAUNCHES.clear()
    return Communicator(
        CFG,
        0,
        torch.device("cpu"),
        SimpleNamespace(address=4096),
        [4096, 8192],
        library=Library(LIBRARY),
        max_ctas=64,
        shared_device=False,
        release=lambda communicator: communicator.free(),
    )


def arguments(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 8, (tokens, 2), dtype=torch.int32)
    return torch.randn(tokens, 64).bfloat16(), ids, torch.rand(tokens, 2)


def test_fused_calls(rank: Communicator) -> None:
    x, ids, weights = arguments()
    scale = torch.tensor([2.0])
    out = rank.allocate()
    dispatched = rank.dispatch(x, ids, weights, scale, out)
    rows = torch.zeros(out.tokens.shape[0], 64, dtype=torch.bfloat16)
    for mode in ("exact", "partial"):
        result = rank.combine(rows, dispatched, mode=mode)
        assert result.shape == x.shape
    assert [name for name, _, _ in LAUNCHES] == ["dispatch", "combine_exact", "combine_partial"]
    sent = LAUNCHES[0][2]
    assert (sent["tokens"], sent["chunk"], sent["chunks"]) == (5, 1, 5)
    assert (sent["x"], sent["global_scale"]) == (x.data_ptr(), scale.data_ptr())
    assert sent["out_scales"] == out.scales.data_ptr()
    assert sent["capacity"] == out.tokens.shape[0] == CFG.max_rows
    combined = LAUNCHES[2][2]
    assert (combined["row_map"], combined["chunks"]) == (out.row_map.data_ptr(), 5)
    assert combined["router_weights"] == weights.data_ptr()


def test_split_calls_pass_both_halves_everything_once(rank: Communicator) -> None:
    x, ids, weights = arguments()
    first = rank.dispatch_async(x, ids, weights)
    second = rank.dispatch_async(x, ids, weights)
    dispatched = rank.dispatch_wait(first)
    pending = rank.combine_async(torch.zeros(64, 64, dtype=torch.bfloat16), dispatched, "partial")
    rank.combine_wait(pending)
    rank.dispatch_wait(second)
    names = ["dispatch_async"] * 2 + ["dispatch_wait", "combine_async_partial", "combine_wait_partial", "dispatch_wait"]
    assert [name for name, _, _ in LAUNCHES] == names
    assert LAUNCHES[0][2]["out_tokens"] == 0 and LAUNCHES[2][2]["x"] == 0


def test_no_tokens(rank: Communicator) -> None:
    dispatched = rank.dispatch(*arguments(0))
    assert rank.combine(torch.zeros(8, 64, dtype=torch.bfloat16), dispatched).shape == (0, 64)
    assert LAUNCHES[0][2]["chunks"] == 0 and LAUNCHES[0][1] >= 1


def test_order_of_halves(rank: Communicator) -> None:
    x, ids, weights = arguments()
    first = rank.dispatch_async(x, ids, weights)
    second = rank.dispatch_async(x, ids, weights)
    for message, call in (
        ("2 are outstanding", lambda: rank.dispatch_async(x, ids)),
        ("2 split round", lambda: rank.dispatch(x, ids)),
        ("next to receive is 1", lambda: rank.dispatch_wait(second)),
    ):
        with pytest.raises(EPInputError, match=message):
            call()
    rank.dispatch_wait(first)
    with pytest.raises(EPInputError, match="next to receive is 2"):
        rank.dispatch_wait(first)


def test_timeout_is_raised_by_every_later_call(rank: Communicator) -> None:
    rank._status.words[4:8] = [Phase.MESSAGE, 3, 9, 8]
    assert rank.failed
    for call in (rank.synchronize, lambda: rank.dispatch(*arguments())):
        with pytest.raises(EPTimeout, match="MESSAGE of rank 1, index 3: expected epoch 9, saw 8") as caught:
            call()
        assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("MESSAGE", 0, (1,))
    assert not LAUNCHES


def test_input_error_is_raised_once_and_stops_nothing(rank: Communicator) -> None:
    rank._status.words[8:12] = [Phase.EXPERT_ID, 3, 8, 2**32 - 2]
    rank.dispatch(*arguments())
    assert not rank.failed
    with pytest.raises(EPInputError, match=r"topk_ids.flatten\(\)\[3\] = -2: must be -1 or in \[0, 8\)"):
        rank.synchronize()
    rank.synchronize()
    rank._status.words[8:12] = [Phase.ROW_CAPACITY, 70, 64, 70]
    with pytest.raises(EPInputError, match="out holds 64 rows, but row 70 arrived"):
        rank.synchronize()


def test_closed(rank: Communicator) -> None:
    rank.close()
    rank.close()
    with pytest.raises(EPError, match="closed"):
        rank.dispatch(*arguments())
