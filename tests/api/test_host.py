"""Numbers of a GPU reach the host by page-locked memory, behind which the host waits for one stream."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api import host
from cute_ep.api.errors import EPError


class OnGpu(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU, and cannot be copied but into another tensor."""

    device = torch.device("cuda", 3)

    def _refused(self, *_: object, **__: object) -> None:
        raise AssertionError("a copy to pageable memory")

    tolist = cpu = item = numpy = to = _refused


@pytest.mark.parametrize("values", [[3, -1, 1 << 30], [], 7, [[1, 2], [3, 4]]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_of_a_gpu(values: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.tensor(values, dtype=dtype)
    assert host.host_list(given) == values
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))

    @contextmanager
    def current(one: object) -> Any:
        assert one is stream
        done.append("stream")
        yield

    class Locked(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
            assert non_blocking and source.device == OnGpu.device
            done.append("copied")
            return torch.Tensor.copy_(self, source.as_subclass(torch.Tensor))

        def tolist(self) -> Any:
            done.append("read")
            return self.as_subclass(torch.Tensor).tolist()

    def memory(shape: torch.Size, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind).as_subclass(Locked)

    monkeypatch.setattr(host, "host_memory", memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device == OnGpu.device else None)
    monkeypatch.setattr(torch.cuda, "stream", current)
    assert host.host_list(given.as_subclass(OnGpu)) == values
    assert done == ["stream", "copied", "waited", "read"]


@pytest.mark.parametrize("captures", [False, True])
def test_what_waits_for_a_gpu_is_refused_during_a_capture(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert host.is_capturing(OnGpu.device) == captures and not host.is_capturing(torch.device("cpu"))
    host.refuse_capture(torch.device("cpu"), "close")
    with pytest.raises(EPError, match=r"^close: waits for the GPU") if captures else nullcontext():
        host.refuse_capture(OnGpu.device, "close")


def test_a_gpu_that_has_failed_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fails)
    host.refuse_capture(OnGpu.device, "close")
