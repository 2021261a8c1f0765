"""`cute-ep demo`: a layer through dispatch and combine agrees with a dense one, and a wrong layer is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_ep import reference
from cute_ep.cli import demo_layer as demo
from cute_ep.cli.common import one_thread_on_a_cpu
from cute_ep.cli.main import main
from cute_ep.layouts.maps.formats import FORMATS


def test_the_demo_runs_on_the_cpu_and_all_formats_agree(tmp_path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 20)
    assert main(["demo", str(text), "--devices", "cpu:2", "--preset", "qwen3-30b", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "2 x 64 bytes" in out and "1024 (token, expert) pairs" in out
    for word in (
        "gate|up",
        "swiglu",
        "combine partial",
        *FORMATS,
        "expert weights",
        "tokens received",
        "sizes are reduced",
        "all formats agree",
    ):
        assert word in out
    assert main(["demo", str(tmp_path / "missing.txt"), "--devices", "cpu:2"]) == 2
    given = ["--hidden", "256", "--experts", "96", "--top-k", "2", "--tokens", "16"]
    assert main(["demo", str(text), "--devices", "cpu:3", *given]) == 0
    assert "hidden 256, 96 SwiGLU experts" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [torch.zeros_like, lambda sums: sums * torch.nan], ids=["zeros", "NaN"])
def test_the_demo_fails_where_the_layer_is_wrong(
    broken: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = reference.sum_source
    monkeypatch.setattr(reference, "sum_source", lambda *given, **named: broken(right(*given, **named)))
    assert main(["demo", "--devices", "cpu:2", "--experts", "8", "--top-k", "2", "--tokens", "16"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "bf16 exact: rms error" in out and "must be at most 1%" in out and "all formats agree" not in out


def test_the_layer_of_the_demo_agrees_with_the_dense_one() -> None:
    """The layer through dispatch and combine is within bfloat16's and NVFP4's roundings of the float64 layer."""
    from cute_ep.api.presets import Preset
    from cute_ep.runtime.connection import connect_local

    shape, devices = Preset("tiny", 128, 128, 8, 2), ["cpu"] * 2
    batches = demo.text_batches(b"To be, or not to be, that is the question. " * 4, shape, 2, 48, seed=3)
    assert len({tuple(row.tolist()) for row in batches[0].topk_ids}) > 4
    assert torch.allclose(batches[0].router_weights.sum(dim=1), torch.ones(48))
    for fmt in FORMATS:
        cfg = demo.as_linear(demo.EPConfig(128, 8, 2, 48, 2, fmt))
        experts = demo.make_experts(cfg, shape, devices, seed=0)
        wanted = demo.dense_layer(cfg, batches, experts)
        assert 0.2 < torch.cat(wanted).std() < 2
        with one_thread_on_a_cpu(devices):
            results, times = demo.run_layer(connect_local(cfg, devices), batches, experts, ("exact", "partial"))
        assert set(times.seconds) == {
            "dispatch",
            "row offsets",
            "decode rows",
            "gate|up",
            "swiglu",
            "down",
            "combine exact",
            "combine partial",
        }
        for mode in results:
            largest, rms = demo.relative_errors(results[mode], wanted)
            limit = demo.rms_limit(cfg)
            assert limit / 8 < rms < limit and largest < 2 * limit, (fmt, mode)


def test_demo_shares_weights_when_memory_is_short() -> None:
    from cute_ep.api.presets import Preset

    weights = demo.ExpertWeights(Preset("tiny", 16, 16, 4, 1), range(4), torch.device("cpu"), sets=3, seed=1)
    assert weights.sets == 3 and weights.nbytes == 3 * 3 * 16 * 16 * 2
    assert weights.of(3)[0].data_ptr() == weights.of(0)[0].data_ptr() != weights.of(1)[0].data_ptr()


def test_the_demo_refuses_an_empty_text(tmp_path, capsys: pytest.CaptureFixture) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert main(["demo", str(empty), "--devices", "cpu:2"]) == 2
    assert "must have at least one for each of 2 ranks" in capsys.readouterr().err
