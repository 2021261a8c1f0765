"""`cute-ep info`: the machine, its GPUs and links, libraries, and the memory of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep.aot import library
from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.bench import machine
from cute_ep.cli.info import memory_parts
from cute_ep.cli.main import main
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime import launcher, nvlink, symmetric
from cute_ep.runtime.rails import network
from cute_ep.tuning.file import tuning_file


def test_info_prints_the_memory_of_a_preset_and_refuses_others(tmp_path, capsys: pytest.CaptureFixture) -> None:
    assert main(["info", "--preset", "deepseek-v3", "--library", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "448 MiB" in out and "14 GiB" in out and "│ total " in out
    for tokens, size in ((128, "7 MiB"), (4096, "224 MiB")):
        assert main(["info", "--max-tokens", str(tokens), "--library", str(tmp_path)]) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if "received in one call" in line)
        assert size in row, row
    assert main(["info", "--preset", "nobody"]) == 2
    assert main(["info", "--format", "bf16,fp8"]) == 2
    assert main(["info", "--library", str(tmp_path / "missing")]) == 2


def test_the_parts_of_memory_add_up_and_have_names_in_words() -> None:
    """None is the name of a region in the code."""
    for fmt in FORMATS:
        for ranks in (1, 4):
            cfg = EPConfig(7168, 256, 8, 4096, ranks, fmt)
            parts = memory_parts(cfg)
            assert sum(parts.values()) == memory_bytes(cfg) and min(parts.values()) >= 0
            assert not any(name in " ".join(parts).split() for name in cfg.arena.regions if "_" in name)


def test_info_as_json_is_the_same_on_standard_output_and_in_a_file(
    tmp_path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    """Without a file nothing else is printed, so that another program can read it; with one the tables are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "package")
    words = ["info", "--preset", "qwen3-30b", "--format", "fp8", "--max-tokens", "128", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    file = tmp_path / "info.json"
    assert main([*words, str(file)]) == 0
    assert "symmetric memory of one rank" in capsys.readouterr().out
    written = json.loads(file.read_text())
    for one in (printed, written):
        assert one["machine"].pop("command").startswith("cute-ep info") and one["machine"].pop("date")
        for gpu in one["gpus"]:
            gpu.pop("free_bytes")
    assert printed == written
    assert len(printed["gpus"]) == torch.cuda.device_count() == len(printed["peer_access"])
    folders = [(one["folder"], one["variants"], one["stale"]) for one in printed["libraries"]]
    assert folders == [(str(tmp_path / "package"), 0, 0), (str(tmp_path / "cache" / "cute_ep"), 0, 0)]
    cfg = EPConfig(2048, 128, 8, 128, 4, "fp8")
    memory = printed["memory"]["by_ranks"]["4"]
    assert memory["total"] == memory_bytes(cfg) and memory["regions"]["messages"] == 0
    assert memory["regions"]["lamport_messages"] == cfg.arena.lamport_messages.nbytes


def test_info_shows_devices_memory_and_who_reaches_whom(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    for name, fake in {
        "device_count": lambda: 2,
        "get_device_properties": lambda index: facts,
        "get_device_name": lambda device: facts.name,
        "mem_get_info": lambda index: (100 * 10**9 + index * 10**9, 140 * 10**9),
        "can_device_access_peer": lambda device, peer: device < peer,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(machine, "link_matrix", lambda: [["X", "NV18"], ["NV6", "X"]])
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    monkeypatch.setattr(machine, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(nvlink, "clique_of", lambda device: "ab.1" if device.index else None)
    refused = {symmetric.Kind.FABRIC: "CUDA driver: NOT_PERMITTED"}
    monkeypatch.setattr(symmetric, "refusal", lambda kind, device: None if device.index else refused.get(kind))
    monkeypatch.setattr(machine, "nvshmem_found", lambda: ("3.4.5", "/lib/one.so"))
    monkeypatch.setattr(network, "slow_network", lambda: "TCP sockets")
    monkeypatch.setattr(launcher, "missing", lambda: "it was not compiled")
    assert main(["info", "--library", str(tmp_path), "--json", str(tmp_path / "info.json")]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│ cuda:" in line]
    assert rows == [
        ["cuda:0", "NVIDIA H200", "sm_90", "132", "130 GiB", "93.1 GiB"],
        ["cuda:1", "NVIDIA H200", "sm_90", "132", "130 GiB", "94.1 GiB"],
        ["cuda:0", "the machine", "no: CUDA driver: NOT_PERMITTED", "yes", "yes"],
        ["cuda:1", "ab.1", "yes", "yes", "yes"],
        ["cuda:0", "-", "yes NV18"],
        ["cuda:1", "no NV6", "-"],
    ]
    assert "driver 580.1" in out and "NCCL 2.28.9" in out and "NVSHMEM 3.4.5 (/lib/one.so)" in " ".join(out.split())
    assert "TCP sockets" in out and "launcher: Python (it was not compiled)\n" in out
    written = json.loads((tmp_path / "info.json").read_text())
    assert written["slow_network"] == "TCP sockets" and written["launcher_missing"] == "it was not compiled"
    assert written["machine"]["gpus"] == {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200"}
    assert written["peer_access"] == [[None, True], [False, None]] and written["links"][1] == ["NV6", "X"]
    refusals = {"fabric handles": "CUDA driver: NOT_PERMITTED", "file descriptors": None, "CUDA IPC": None}
    assert written["sharing"][0] == {"clique": None, "refusals": refusals} and written["sharing"][1]["clique"] == "ab.1"
    assert [gpu["free_bytes"] for gpu in written["gpus"]] == [100 * 10**9, 101 * 10**9]


def test_tables_that_were_tuned_here_are_counted_or_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for damage, said in ((None, f"0 in {tuning_file()}"), ("{", "remove the file")):
        if damage is not None:
            tuning_file().parent.mkdir()
            tuning_file().write_text(damage)
        assert main(["info", "--library", str(tmp_path)]) == 0
        (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("tables of cute-ep tune: ")]
        assert said in line
