"""`connect_local`: which devices and options it takes, what each rank gets of its GPU, and what is given back when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime import connection
from cute_ep.runtime.parts import RankParts
from cute_ep.tuning.builtin import built_in
from tests.connecting import replace_names
from tests.fake_gpu import HOOKS

PLAIN = SimpleNamespace(address=0, free=None)


# ---- devices and options


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        pytest.param(["gpu0", "gpu1"], "must be a list of names", id="no devices of torch"),
        pytest.param([None, None], "must be a list of names", id="no names"),
        pytest.param(["cpu"], "devices = 1 entries: must be world_size = 2", id="too few"),
        pytest.param(["cuda:0", "cpu"], "must be all CUDA or all cpu", id="of two kinds"),
        pytest.param(["cuda:0", "cuda:99"], "cuda:99 is not here, the machine has 4 CUDA GPUs", id="not here"),
    ],
)
def test_devices_that_no_group_can_have_are_refused(gpus: None, devices: list, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), devices)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_gpus_are_refused_where_torch_finds_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EPConfigError, match=r"torch finds no CUDA GPU here; .* give \[\"cpu\"\] \* 2"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), [device] * 2)


def test_the_reference_backend_has_no_hooks() -> None:
    with pytest.raises(EPConfigError, match="there are none on the reference backend"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), ["cpu"] * 2, hooks=HOOKS)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"sms": 0}, "sms = 0: must be an integer from 1 to the number of SMs"),
        ({"sms": 2.5}, "sms = 2.5: must be an integer from 1 to the number of SMs"),
        ({"sms": True}, "sms = True: must be an integer from 1 to the number of SMs"),
        ({"library": "nowhere"}, "library = 'nowhere': must be a folder"),
        ({"tuning": "fast"}, "tuning = str: must be a Tuning"),
    ],
    ids=["no SMs", "half an SM", "a truth", "no folder", "no Tuning"],
)
def test_wrong_options_are_refused_on_every_device(gpus: None, device: str, options: dict, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), [device] * 2, **options)


def test_sms_are_no_more_than_the_gpu_has(gpus: None) -> None:
    with pytest.raises(EPConfigError, match=r"sms = 133: must be in \[1, 132\], the SMs of cuda:0"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), ["cuda:0"] * 2, sms=133)


def test_the_reference_backend_takes_options_of_a_gpu(tmp_path: Path) -> None:
    cfg = EPConfig(128, 8, 2, 16, 2)
    ranks = connection.connect_local(cfg, ["cpu"] * 2, sms=8, library=tmp_path, tuning=built_in(cfg, 16))
    assert [rank.rank for rank in ranks] == [0, 1]


def test_cuda_without_a_number_is_the_current_device(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.torch.cuda, "current_device", lambda: 2)
    made: list[str] = []
    replace_names(monkeypatch, {"make_arena": lambda cfg, rank, device, take: made.append(str(device)) or PLAIN})
    connection.connect_local(EPConfig(128, 8, 2, 16, 2), ["cuda", "cuda:1"])
    assert made == ["cuda:2", "cuda:1"]


# ---- what ranks get


@pytest.mark.parametrize(
    ("devices", "sms", "ctas", "stages"),
    [
        pytest.param([0, 1, 2, 3], None, [264] * 4, [], id="a GPU each"),
        pytest.param([0, 1, 2, 3], 132, [264] * 4, [], id="a GPU each, all SMs"),
        pytest.param([0, 1, 2, 3], 16, [16] * 4, [0, 1, 2, 3], id="a GPU each, few SMs"),
        pytest.param([0, 1, 2, 3], 131, [131] * 4, [], id="a GPU each, an SM less than all"),
        pytest.param([0, 1, 2, 3], 108, [108] * 4, [0, 1, 2, 3], id="a GPU each, 24 SMs less than all"),
        pytest.param([0, 1, 2, 3], 107, [107] * 4, [0, 1, 2, 3], id="a GPU each, 25 SMs less than all"),
        pytest.param([0, 0, 0, 0], None, [31] * 4, [], id="one GPU"),
        pytest.param([0, 0, 0, 0], 16, [16] * 4, [0, 1, 2, 3], id="one GPU, few SMs"),
        pytest.param([0, 0, 0, 0], 132, [31] * 4, [0, 1, 2, 3], id="one GPU, a budget of all SMs"),
        pytest.param([0, 1, 0, 0], None, [41, 264, 41, 41], [], id="three on one GPU, one on another"),
        pytest.param([0, 1, 0, 0], 130, [41, 130, 41, 41], [0, 2, 3], id="of which only the one leaves few SMs"),
    ],
)
def test_ranks_that_share_a_gpu_share_its_ctas_and_leave_sms_free(
    gpus: None, devices: list, sms: int | None, ctas: list, stages: list
) -> None:
    """GPUs of 132 SMs, which hold two CTAs each: all of a GPU to one rank, else at most one CTA on an SM, 8 without.
    Ranks with a budget have memory for stages of pipelines if they leave as many."""
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{index}" for index in devices], sms=sms)
    assert [rank.max_ctas for rank in ranks] == ctas
    assert [rank.rank for rank in ranks if rank.ring_bytes] == stages
    assert [rank.shared_device for rank in ranks] == [devices.count(index) > 1 for index in devices]
    few = [108 <= count < 132 for count in ctas]
    assert [rank.pairs for rank in ranks] == few, "who leaves few SMs free leaves whole TPCs"


def test_a_gpu_without_clusters_has_no_pairs(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_names(monkeypatch, {"has_clusters": lambda device: False})
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{index}" for index in range(4)], sms=124)
    assert [rank.pairs for rank in ranks] == [False] * 4


def test_a_rank_has_at_least_one_cta(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_names(monkeypatch, {"resident_ctas": lambda device: 3})
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), ["cuda:0"] * 4)
    assert [rank.max_ctas for rank in ranks] == [1] * 4


def test_local_kernels_are_loaded_once_per_gpu_before_a_rank_is_made(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks share it."""
    done: list[object] = []
    replace_names(monkeypatch, {"load_local_kernels": lambda devices, library: done.append(list(devices))})
    replace_names(monkeypatch, {"Communicator": lambda *args, **options: done.append("rank") or PLAIN})
    connection.connect_local(EPConfig(128, 8, 2, 16, 4), ["cuda:1", "cuda:0", "cuda:1", "cuda:1"])
    assert done == [[1, 0], *["rank"] * 4]


# ---- what is given back


@pytest.mark.parametrize("failed", [None, 0, 2], ids=["none failed", "rank 0 failed", "rank 2 failed"])
def test_memory_is_freed_with_the_last_rank(gpus: None, monkeypatch: pytest.MonkeyPatch, failed: int | None) -> None:
    """Once no device works any more: then none of its kernels writes to a peer's, whether or not a wait timed out."""
    done: list[str] = []

    def make(what: str, rank: int, **more: object) -> SimpleNamespace:
        return SimpleNamespace(address=4096 * rank, free=lambda: done.append(f"{what} {rank}"), **more)

    def rank(parts: RankParts, *args: object, release: Callable, **options: object) -> SimpleNamespace:
        return make("rank", parts.rank, failed=parts.rank == failed, release=release)

    replace_names(monkeypatch, {"make_arena": lambda cfg, rank, device, take: make("arena", rank)})
    replace_names(monkeypatch, {"Communicator": rank})
    replace_names(monkeypatch, {"unload_kernels": lambda kernels, device: done.append(f"kernels {device.index}")})
    monkeypatch.setattr(connection.torch.cuda, "synchronize", lambda device: done.append(f"wait {device.index}"))
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{index}" for index in range(4)])
    for index in (1, 3, 0):
        ranks[index].release(ranks[index])
    assert not done
    ranks[2].release(ranks[2])
    freed = [f"rank {rank}" for rank in (3, 2, 1, 0)]
    freed += [f"{what} {rank}" for rank in (3, 2, 1, 0) for what in ("arena", "kernels")]
    assert done == [*(f"wait {index}" for index in range(4)), *freed]


@pytest.mark.parametrize("last", ["arena", "rank"])
def test_what_was_made_is_freed_in_reverse_order_when_connecting_fails(
    gpus: None, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Ranks before what they are made of: arenas and kernels."""
    freed = []

    def make(what: str, rank: int) -> SimpleNamespace:
        if what == last and rank == 2:
            raise EPError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY")
        return SimpleNamespace(address=4096 * rank, free=lambda: freed.append(f"{what} {rank}"))

    replace_names(monkeypatch, {"make_arena": lambda cfg, rank, device, take: make("arena", rank)})
    replace_names(monkeypatch, {"Communicator": lambda parts, *args, **options: make("rank", parts.rank)})
    replace_names(monkeypatch, {"unload_kernels": lambda kernels, device: freed.append(f"kernels {device.index}")})
    with pytest.raises(EPError, match="OUT_OF_MEMORY"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{rank}" for rank in range(4)])
    parts = [f"{what} {rank}" for rank in (3, 2, 1, 0) for what in ("arena", "kernels")]
    assert freed == (parts[3:] if last == "arena" else ["rank 1", "rank 0", *parts])
