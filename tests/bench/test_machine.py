"""What a machine is: devices named on a command line, in words, and their links."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.bench import machine
from cute_ep.bench.machine import describe_devices, parse_devices
from cute_ep.cli.main import main


def test_devices_of_the_cpu_and_names_that_are_none() -> None:
    assert parse_devices("cpu") == ["cpu"] * 4 and parse_devices("cpu:2") == ["cpu"] * 2
    for text in ("cpu:0", "cpu:x", "cpu:33", "tpu:0", "cuda:x", "cuda:99", ""):
        with pytest.raises(EPConfigError, match="devices = "):
            parse_devices(text)


@pytest.mark.parametrize(
    ("gpus", "experts", "devices"),
    [
        (4, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, 8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, 6, ["cuda:0", "cuda:1", "cuda:2"]),
        (4, 7, ["cuda:0"]),
        (1, 8, ["cuda:0"] * 4),
    ],
)
def test_auto_takes_gpus_that_divide_the_experts(
    gpus: int, experts: int | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as do; one GPU is that of all virtual ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert parse_devices("auto", experts) == devices


@pytest.mark.parametrize("text", ["auto", "virtual:2"])
def test_a_machine_without_gpus_has_none_to_take(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    begins = "" if text == "auto" else f"devices = '{text}': "
    with pytest.raises(EPConfigError, match=f"^{begins}there is no CUDA GPU on this machine"):
        parse_devices(text)
    assert parse_devices("auto", 6, or_cpu=True) == ["cpu"] * 4


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a command line can tell."""
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_devices_in_words_are_ranks_and_gpus(two_gpus: None) -> None:
    two = ["cuda:0", "cuda:1"]
    assert describe_devices(two) == "2 ranks on 2 GPUs (NVIDIA H200)"
    assert describe_devices(two, 16) == "2 ranks on 2 GPUs (NVIDIA H200), 16 SMs per rank"
    assert describe_devices(["cuda:1"] * 3) == "3 ranks on 1 GPU (NVIDIA H200)"
    assert describe_devices(["cpu"]) == "1 rank of the reference backend on the CPU"


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize("sms", [-1, 0, 133])
def test_sms_that_no_rank_can_have_are_refused_before_anything_is_measured(
    command: str, sms: int, two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A measurement would raise something else here."""
    monkeypatch.setattr(machine, "environment", lambda devices, command_line: {})
    assert main([command, "--sms", str(sms)]) == 2
    assert f"sms = {sms}: must be in [1, 132], the SMs of cuda:0" in capsys.readouterr().err


def test_links_between_gpus_are_those_of_nvidia_smi(monkeypatch) -> None:
    topology = (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV18\t0-31\t0\n"
        "GPU1\tNV18\t X \t0-31\t0\n\nLegend:\n\n  X    = Self\n"
    )
    monkeypatch.setattr(machine, "_output", lambda *command: topology.strip())
    assert machine.link_matrix() == [["X", "NV18"], ["NV18", "X"]]
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.link_matrix() is None and machine.driver_version() is None


def test_the_state_of_every_gpu_has_clocks_power_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "1980 MHz, 3201 MHz, 312.40 W, 700.00 W, 41\n345 MHz, 3201 MHz, 76.11 W, 700.00 W, 28"
    monkeypatch.setattr(machine, "_output", lambda *command: answer)
    busy, idle = machine.gpu_state()
    assert set(busy) == set(machine.GPU_STATE)
    assert (busy["clocks.sm"], busy["power.draw"], idle["temperature.gpu"]) == ("1980 MHz", "312.40 W", "28")
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.gpu_state() == []


def test_a_record_names_what_took_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a package that is there twice the one that is imported; nothing of what is missing."""
    for folder, version in (("first", "9.8.7"), ("second", "1.2.3")):
        info = tmp_path / folder / "rich-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rich\nVersion: {version}\n")
    monkeypatch.setattr(machine, "PACKAGES", (*machine.PACKAGES, "no-such-package"))
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    found = machine.environment(["cpu"], "python -m pytest")
    assert found["packages"]["rich"] == "9.8.7" and "no-such-package" not in found["packages"]
    assert found["packages"]["torch"] == found["torch"] == torch.__version__
    assert {"cuda-python", "cuda-bindings", "numpy"} <= found["packages"].keys()
    assert found["nccl"] is None or torch.distributed.is_nccl_available()
    json.dumps(found)
