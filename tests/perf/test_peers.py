"""Other libraries: their processes, what ends badly, where they are installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from perf import nvshmem, peer_packages, peer_worker, peers, plots
from perf.cases import MAIN, Shape
from perf.peer_list import FAMILIES, LIBRARIES, NEW_NCCL, PEERS, column_of


def test_without_gpus_every_peer_is_a_note() -> None:
    found = peers.run_peers(0)
    assert found["rows"] == [] and len(found["notes"]) == len(PEERS)
    assert all(": failed: needs at least 2 GPUs" in note for note in found["notes"])
    code = "import sys, perf.peers, perf.peer_worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(("named", "count"), [("2,3", 2), ("GPU-1f", 1), ("0,", 1), ("", 0), (None, 3)])
def test_only_gpus_that_processes_see_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, count: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor number in 0 1 2; do echo GPU $number: one; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert peers.gpu_count() == count


def test_a_missing_module_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = peers.run_peers(4, names=("deepep_normal",))
    assert found["notes"] == ["deepep_normal: failed: no module deep_ep"]


WORKER = """
import faulthandler, json, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
names, rank, folder = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3])
def at(peer, what="pair, timing"):
    (folder / f"rank{rank}.new").write_text(f"{peer}: {what}")
    (folder / f"rank{rank}.new").replace(folder / f"rank{rank}.at")
def row(peer):
    values = {"peer": peer, "operation": "pair", "graph": True, "ahead": True, "error": None, "format": "bf16"}
    if rank == 0:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(values) + chr(10))
def stuck():
    time.sleep(60)
def wait_for_row():
    while not (folder / "rows.jsonl").exists() or not (folder / "rows.jsonl").stat().st_size:
        time.sleep(0.01)
"""
BOTH = ("nccl_ag_rs", "nccl_all_to_all")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets every worker run some code instead, after WORKER, with budgets of seconds."""
    monkeypatch.setattr(peers, "START_S", 10.0)
    monkeypatch.setattr(peers, "BUDGETS_S", dict.fromkeys(PEERS, 4.0))  # python must start within less

    def run(code: str) -> None:
        def command(names: list, rank: int, world: int, port: int, shape: Shape, tokens: object, folder: Path) -> list:
            return [sys.executable, "-c", WORKER + code, ",".join(names), str(rank), str(folder)]

        monkeypatch.setattr(peers, "worker_command", command)

    return run


@pytest.mark.parametrize(
    ("code", "count", "notes", "left"),
    [
        ("for name in names: at(name); row(name)", 2, [], ()),
        (
            "at(names[0]); row(names[0]); sys.exit(wait_for_row() or 'ValueError: bad' if rank else 0)",
            1,
            ["nccl_ag_rs: failed: rank 1 ended with 1 at pair, timing: ValueError: bad"],
            BOTH[1:],
        ),
        (
            "sys.exit((sys.stderr.write('OSError: no libmlx5') and 3))",
            0,
            [f"{name}: failed: OSError: no libmlx5" for name in BOTH],
            (),
        ),
    ],
    ids=["ends", "fails", "missing"],
)
def test_a_peer_that_ends_badly_keeps_its_rows(
    workers: Callable[[str], None], code: str, count: int, notes: list[str], left: tuple[str, ...]
) -> None:
    workers(code)
    found, said, rest = peers.run_workers(BOTH, 2, MAIN, (1,))
    assert (len(found), said, tuple(rest)) == (count, notes, left)


def test_a_peer_that_hangs_says_where_and_costs_no_other_its_turn(
    workers: Callable[[str], None], tmp_path: Path
) -> None:
    workers("at(names[0]); row(names[0]); stuck() if names[0] == 'nccl_ag_rs' else None")
    saved: list[int] = []
    found = peers.run_peers(
        2, names=BOTH, save=lambda so_far: saved.append(len(so_far["rows"])), logs=tmp_path / "logs"
    )
    assert [row["peer"] for row in found["rows"]] == list(BOTH) and saved == [1, 2, 2]
    (note,) = found["notes"]
    assert (
        note == "nccl_ag_rs: failed: stopped after 4 s with 1 results; rank 0, 1: pair, timing, in stuck (<string>:15)"
    )
    assert "stuck" in (tmp_path / "logs" / "nccl_ag_rs-rank1.log").read_text()


def test_peers_that_do_not_start_are_all_noted(workers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    workers("stuck()")
    monkeypatch.setattr(peers, "START_S", 3.0)
    found, notes, rest = peers.run_workers(BOTH, 2, MAIN, (1,))
    assert found == [] and tuple(rest) == () and len(notes) == 2
    assert all("stopped after 3 s with 0 results; rank 0, 1: starting, in stuck" in note for note in notes)


def test_what_was_not_taken_as_the_rest_is_noted() -> None:
    row = {"peer": "nccl_ag_rs", "operation": "dispatch", "graph": True, "ahead": True, "error": None}
    row |= {"format": "bf16"}
    assert "1 of 1 results with a relative error" in peers.caveats([row | {"error": float("nan")}])[0]
    eager = row | {"operation": "pair_chained", "graph": False}
    assert peers.caveats([row, eager]) == []
    assert peers.caveats([row | {"format": "fp8", "error": 0.06}]) == []
    notes = peers.caveats([row | {"graph": False}, eager | {"ahead": False, "error": 0.06}])
    assert [note.split(": ")[1][:14] for note in notes] == ["1 of 2 results"] * 3


def test_the_budgets_of_peers_on_torch_and_one_wheel_fit_into_a_command() -> None:
    """Of 600 seconds, with two starts of 10; peers that compile have their own command until they are cached."""
    small = [peer for peer in PEERS.values() if not LIBRARIES[peer.library].new_nccl]
    small = [peer for peer in small if not LIBRARIES[peer.library].compiles]
    assert sum(peer.budget_s for peer in small) + 2 * 10 <= 400


def test_worker_says_that_its_library_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed")
    command = peers.worker_command(("deepep_normal",), 0, 1, peers.free_port(), MAIN, (1,), tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == peers.NOT_PRESENT, done.stderr


def test_versions_of_peers_are_those_of_the_modules_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert peer_worker.versions_of(["torch", "no_such_module"]) == {"nccl": "2.28.9", "torch": version("torch")}


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an nvcc, which CUDA_HOME names."""
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PYTHONPATH", "before")
    return tmp_path / "cuda"


def test_libraries_find_their_packages_and_nccl(toolkit: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    root = packages / "new_nccl" / "nvidia" / "nccl"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "libnccl.so.2").touch()
    (packages / "deepep_v2").mkdir()
    found = peer_packages.environment_of("deepep_v2", packages)
    assert found["PYTHONPATH"].split(":") == [str(packages / "deepep_v2"), "before"]
    assert found["LD_PRELOAD"] == str(root / "lib" / "libnccl.so.2") and found["EP_NCCL_ROOT_DIR"] == str(root)
    assert found["CUDA_HOME"] == str(toolkit) and found["EP_DISABLE_GIN"] == "1"
    engines = peer_packages.environment_of("nccl_engines", packages)
    assert engines["NCCL_CTA_POLICY"] == "ZERO" and not {"PYTHONPATH", "CUDA_HOME"} & engines.keys()
    assert peer_packages.environment_of("nccl", packages) == {}


@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nccl_new", f"no {NEW_NCCL} in a folder --packages"),
        ("flashinfer", "no module flashinfer"),
        ("nccl_ep", f"no {NEW_NCCL} in a folder --packages"),
    ],
)
def test_what_a_library_lacks_is_its_note(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names = [peer for peer, one in PEERS.items() if one.library == name]
    assert peers.run_peers(2, names=names)["notes"] == [f"{peer}: failed: {message}" for peer in names]


def test_without_nvcc_what_compiles_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(peer_packages.shutil, "which", lambda name: None)
    monkeypatch.setattr(peer_packages, "TOOLKIT", tmp_path / "none")
    assert peers.run_peers(2, names=["flashinfer_one_sided"])["notes"][0].startswith(
        "flashinfer_one_sided: failed: no nvcc"
    )


def test_the_processes_of_a_library_get_its_variables(
    workers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of what this process has; versions that differ have the library's name."""
    code = "import os; at(names[0]); row(os.environ['WHO'] + os.environ['NCCL_DEBUG']); "
    workers(code + "(folder / 'versions.json').write_text(json.dumps({'nccl': os.environ['WHO'], 'torch': '2'}))")
    monkeypatch.setenv("WHO", "nobody")
    monkeypatch.setattr(peers, "environment_of", lambda name, packages: {"WHO": name})
    monkeypatch.setattr(peers, "caveats", lambda rows: [])
    found = peers.run_peers(2, names=["nccl_ag_rs", "nccl_ag_rs_new"])
    assert [row["peer"] for row in found["rows"]] == ["ncclWARN", "nccl_newWARN"]
    assert found["versions"] == {"nccl": "nccl", "torch": "2", "nccl (nccl_new)": "nccl_new"}
    added = peers.run_peers(2, names=["nccl_ag_rs_new"], versions={"nccl": "nccl"})
    assert added["versions"] == found["versions"]


def test_wheels_are_printed_as_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perf.peers", "--wheels"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"pip install --no-deps --target DIR/new_nccl {NEW_NCCL}"
    assert "pip install --no-deps --target DIR/deepep tokenspeed-deepep==1.2.1.post20251110" in lines


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_an_implementation(name: str) -> None:
    assert callable(getattr(import_module(f"perf.{LIBRARIES[PEERS[name].library].works}"), name))
    assert column_of(name) in plots.PEER_STYLES and PEERS[name].library in {
        one for own in FAMILIES.values() for one in own
    }
    assert PEERS[column_of(name)].column in ("", column_of(name)), "a column is called as its first peer"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_the_mlx5_stub_has_the_symbols_that_nvshmem_asks_for(tmp_path: Path) -> None:
    library = nvshmem.ctypes.CDLL(str(nvshmem.compile_stub(tmp_path)))
    for words in nvshmem.MLX5_SYMBOLS.values():
        assert all(getattr(library, f"mlx5dv_{word}")() == -1 for word in words.split())
