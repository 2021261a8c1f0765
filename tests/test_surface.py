"""What both backends show a caller alike: one interface, and the same answers to torch's modes, to gradients, and to
arguments that are not what they should be. The GPU is that of `tests.test_communicator`: launches are recorded."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

import cute_ep
from cute_ep import EPCommunicator, EPConfig, connect_local, fused_silu, quantize
from cute_ep.api.dispatched import tensors_of
from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.api.types import CombineMode, FormatName, ScaledFormat, ScaleLayout, SwigluFormat
from cute_ep.distributed import DistributedEPCombine, DistributedEPDispatch
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime import driver
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.verify import POISON
from tests.test_communicator import CFG, Make, make, replace_driver

__all__ = ["make"]  # a fixture

ROOT = Path(__file__).parents[1]
ALONE = replace(CFG, world_size=1, dispatch_format="bf16")
BACKENDS = ("GPU", "CPU")


@pytest.fixture(params=BACKENDS)
def rank(request: pytest.FixtureRequest) -> EPCommunicator:
    """The only rank of its group, on either backend."""
    if request.param == "CPU":
        return connect_local(ALONE, ["cpu"])[0]
    return request.getfixturevalue("make")(ALONE)


def arguments(cfg: EPConfig = ALONE, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, cfg.num_experts, device="cpu").topk(cfg.top_k).indices
    return random(tokens, cfg.hidden), ids.int(), torch.rand(tokens, cfg.top_k, device="cpu")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cpu").bfloat16()


# ---- one interface


@pytest.mark.parametrize("backend", [Communicator, ReferenceCommunicator])
def test_calls_are_those_of_the_interface(backend: type) -> None:
    calls = {name for name, value in vars(EPCommunicator).items() if name[0] != "_" and callable(value)}
    assert {"dispatch", "combine_wait", "plan_dispatch", "synchronize", "close", "allocate"} <= calls
    for name in calls:
        mine, wanted = inspect.signature(getattr(backend, name)), inspect.signature(getattr(EPCommunicator, name))
        assert list(mine.parameters) == list(wanted.parameters), name
        assert len(inspect.getdoc(getattr(backend, name)) or "") > 40, name
    assert "topk_ids: [T, top_k] int32 or int64" in (inspect.getdoc(backend.dispatch) or "")


def test_names_are_those_of_the_tables() -> None:
    assert get_args(FormatName) == tuple(FORMATS)
    assert get_args(ScaledFormat) == tuple(name for name, fmt in FORMATS.items() if fmt.scale)
    assert get_args(SwigluFormat) == tuple(name for name in get_args(ScaledFormat) if not FORMATS[name].row_scale)
    assert set(get_args(ScaleLayout)) == {layout for fmt in FORMATS.values() for layout in fmt.scale_layouts}
    assert get_args(CombineMode) == COMBINE_MODES


def test_repr_of_a_rank(make: Make) -> None:
    on_gpu, (on_cpu,) = make(), connect_local(ALONE, ["cpu"])
    on_gpu.device = torch.device("cuda", 3)
    size = cute_ep.memory_bytes(CFG) / 2**20
    sizes = (
        f"hidden {CFG.hidden}, {CFG.num_experts} experts, top-{CFG.top_k}, {CFG.max_tokens_per_rank} tokens per rank"
    )
    assert repr(on_gpu) == f"<Communicator rank 0 of 2 on cuda:3: nvfp4, {sizes}, {size:.0f} MiB; open>"
    assert repr(on_cpu) == f"<ReferenceCommunicator rank 0 of 1 on cpu: bf16, {sizes}; open>"
    on_cpu.close()
    assert repr(on_cpu).endswith("; closed>") and on_cpu.closed


def test_repr_of_a_batch(rank: EPCommunicator) -> None:
    batch = rank.dispatch(*arguments(), out=rank.allocate(24))
    assert repr(batch) == f"Dispatched(rank 0, 5 tokens, room for 24 rows of {ALONE.hidden} bfloat16 on cpu)"
    assert repr(rank.allocate(8)) == f"DispatchBuffers(room for 8 rows of {ALONE.hidden} bfloat16 on cpu)"
    quantised = repr(connect_local(replace(ALONE, dispatch_format="fp8"), ["cpu"])[0].allocate(8))
    assert "rows of 128 float8_e4m3fn with scales in float32" in quantised


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())])
def test_a_rank_is_not_copied(rank: EPCommunicator, take: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(1, 1)
    for value in (rank, {"ep": rank}):
        model.ep = value  # type: ignore[assignment]
        with pytest.raises(EPError, match=r"rank 0 of 1 .*: it is one end of memory.*Connect again"):
            take(model if take is not copy.copy else rank)


# ---- gradients and modes


def test_what_requires_a_gradient_is_refused(rank: EPCommunicator) -> None:
    """Before anything is sent: the rank is usable afterwards."""
    x, ids, weights = arguments()
    rule = r"\.requires_grad = True: must be False while gradients are enabled.*torch\.no_grad\(\)"
    for argument in (x, weights):
        argument.requires_grad_()
        for call in (rank.dispatch, rank.dispatch_async, rank.plan_dispatch):
            with pytest.raises(EPInputError, match=("x" if argument is x else "router_weights") + rule):
                call(x, ids, weights)
        argument.requires_grad_(False)
    batch = rank.dispatch(x, ids, weights)
    rows = torch.zeros(batch.src_info.shape[0], ALONE.hidden).bfloat16()
    wanted = rank.combine(rows, batch)
    with pytest.raises(EPInputError, match="rows" + rule):
        rank.combine(rows.clone().requires_grad_(), batch)
    with pytest.raises(EPInputError, match="router_weights" + rule):
        rank.combine(rows, batch, weights.clone().requires_grad_())
    weights.requires_grad_()
    with pytest.raises(EPInputError, match="router_weights" + rule):
        rank.combine(rows, batch)
    with torch.no_grad():
        again = rank.combine(rows, rank.dispatch(x.requires_grad_(), ids, weights))
    assert not again.requires_grad and again.shape == wanted.shape


def test_gradients_are_refused_by_local_operations() -> None:
    x = torch.randn(4, 256).bfloat16().requires_grad_()
    for call in (lambda: quantize(x, "fp8"), lambda: fused_silu(x), lambda: fused_silu(x, fmt="fp8")):
        with pytest.raises(EPInputError, match=r"x\.requires_grad = True.*torch\.no_grad\(\)"):
            call()
        with torch.no_grad():
            call()
        with torch.inference_mode():
            call()
    with pytest.raises(EPInputError, match=r"input_scale\.requires_grad"):
        quantize(x.detach(), "nvfp4", torch.ones(1, requires_grad=True))


def test_an_out_that_may_not_be_overwritten(rank: EPCommunicator) -> None:
    x, ids, weights = arguments()
    with torch.inference_mode():
        buffers, inference = rank.allocate(), torch.empty_like(x)
        rank.dispatch(x, ids, weights, out=buffers)
    with pytest.raises(EPInputError, match=r"out\.tokens\.is_inference\(\) = True: must be False outside of"):
        rank.dispatch(x, ids, weights, out=rank_copy(buffers))
    batch = rank.dispatch(x, ids, weights)
    rows = torch.zeros(batch.src_info.shape[0], ALONE.hidden).bfloat16()
    for out, message in (
        (torch.nn.Parameter(torch.empty_like(x)), r"out = Parameter: must be a tensor of its own"),
        (torch.nn.Parameter(torch.empty_like(x), requires_grad=False), r"out = Parameter"),
        (torch.empty_like(x).requires_grad_(), r"out\.requires_grad = True: must be False, the call overwrites it"),
        (inference, r"out\.is_inference\(\) = True"),
    ):
        for mode in (torch.enable_grad(), torch.no_grad()):
            with mode, pytest.raises(EPInputError, match=message):
                rank.combine(rows, batch, out=out)
    with torch.inference_mode():
        assert rank.combine(rows, batch, out=inference) is inference
    silu = torch.randn(4, 256).bfloat16()
    with pytest.raises(EPInputError, match="out = Parameter"):
        fused_silu(silu, out=torch.nn.Parameter(torch.empty(4, 128).bfloat16()))


def test_a_bad_out_stops_no_other_rank() -> None:
    """The call that gave it raises; then the round goes on."""
    cfg = replace(ALONE, world_size=2)
    ranks = connect_local(cfg, ["cpu"] * 2)
    given = [arguments(cfg) for _ in ranks]
    with torch.inference_mode():
        buffers = ranks[0].allocate()
    with pytest.raises(EPInputError, match=r"out\.tokens\.is_inference"):
        ranks[0].dispatch(*given[0], out=buffers)
    batches = [ep.dispatch(*one) for ep, one in zip(ranks, given, strict=True)]
    rows = [batch.tokens[: int(batch.num_rows)].clone() for batch in batches]
    with pytest.raises(EPInputError, match="out = Parameter"):
        ranks[0].combine(rows[0], batches[0], out=torch.nn.Parameter(torch.empty_like(given[0][0])))
    sums = [ep.combine(row, batch) for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    for ep, total, (x, _, weights) in zip(ranks, sums, given, strict=True):
        ep.synchronize()
        torch.testing.assert_close(total.float(), x.float() * weights.sum(1, keepdim=True), rtol=2**-7, atol=1e-5)


def test_modes_may_differ_between_ranks() -> None:
    """A rank in inference mode gets its rows from the call of one that is not in it."""
    cfg = replace(ALONE, world_size=2)
    ranks, given = connect_local(cfg, ["cpu"] * 2), [arguments(cfg) for _ in range(2)]
    with torch.inference_mode():
        first = ranks[0].dispatch(*given[0])
    batches = [first, ranks[1].dispatch(*given[1])]
    rows = [batch.tokens[: int(batch.num_rows)].clone() for batch in batches]
    with torch.inference_mode():
        total = ranks[0].combine(rows[0], batches[0])
    assert not ranks[1].combine(rows[1], batches[1]).is_inference() and total.is_inference()
    x, _, weights = given[0]
    torch.testing.assert_close(total.float(), x.float() * weights.sum(1, keepdim=True), rtol=2**-7, atol=1e-5)


def rank_copy(buffers: Any) -> Any:
    """The same tensors in another object, which no communicator has seen."""
    return type(buffers)(**{name: value for name, value in vars(buffers).items() if name != "use"})


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp8", "nvfp4_row"])
def test_modes_change_nothing_on_the_cpu(mode: str, fmt: FormatName) -> None:
    """Bytes and types of a round, of `quantize` and of `fused_silu` are those without the mode."""
    cfg = replace(ALONE, dispatch_format=fmt, world_size=2)

    def everything() -> list[torch.Tensor]:
        torch.manual_seed(3)
        given = [arguments(cfg) for _ in range(2)]
        ranks = connect_local(cfg, ["cpu"] * 2)
        batches = [ep.dispatch(*one) for ep, one in zip(ranks, given, strict=True)]
        rows = [random(int(batch.num_rows), cfg.hidden) for batch in batches]
        made = []
        for combine in COMBINE_MODES:
            made += [ep.combine(row, b, mode=combine) for ep, row, b in zip(ranks, rows, batches, strict=True)]
        for batch in batches:
            made += [batch.tokens[: int(batch.num_rows)].view(torch.uint8), batch.row_map, batch.src_info[:1]]
        if fmt != "bf16":
            made += [part for part in quantize(given[0][0], fmt) if part is not None]
        if fmt in get_args(SwigluFormat):
            made += list(fused_silu(random(4, 256), fmt=fmt))
        for batch in batches:
            made.append(cute_ep.dequantize(batch, fmt)[: int(batch.num_rows)])
        return [*made, fused_silu(random(4, 256))]

    wanted = everything()
    with MODES[mode]():
        got = everything()
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype and not one.requires_grad
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# ---- types of arguments


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_ids_of_64_bits_and_scales_in_torchs_types(fmt: FormatName) -> None:
    """The same bytes come out."""
    cfg = replace(ALONE, dispatch_format=fmt)
    x, ids, weights = arguments(cfg)
    ids[0, 0] = -1
    rows = quantize(x, fmt)
    named = {"mxfp8": torch.float8_e8m0fnu, "mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}[fmt]
    payload = rows.payload
    if payload.dtype == torch.uint8 and hasattr(torch, "float4_e2m1fn_x2"):
        payload = payload.view(torch.float4_e2m1fn_x2)
    outputs = []
    for given in ((rows.payload, ids, rows.scales), (payload, ids.long(), rows.scales.view(named))):
        (ep,) = connect_local(cfg, ["cpu"])
        out = ep.allocate()
        for tensor in tensors_of(out).values():
            assert tensor is None or tensor.view(torch.uint8).fill_(POISON) is not None
        batch = ep.dispatch(*given[:2], weights, out=out, scales=given[2])
        back = cute_ep.dequantize(batch, fmt).bfloat16()
        outputs.append([*vars(batch).values(), ep.combine(back, batch), ep.combine(back, batch, mode="partial")])
        ep.synchronize()
    for one, other in zip(*outputs, strict=True):
        if isinstance(one, torch.Tensor) and one is not ids:
            assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_an_id_that_does_not_fit_32_bits_is_reported() -> None:
    """And counts as its lower half."""
    x, ids, weights = arguments()
    wide = ids.long()
    wide[2, 1] += 1 << 32
    sums = []
    for given in (ids, wide):
        (ep,) = connect_local(ALONE, ["cpu"])
        batch = ep.dispatch(x, given, weights)
        sums.append(ep.combine(batch.tokens, batch))
    assert torch.equal(*sums)
    with pytest.raises(EPInputError, match=rf"topk_ids\.flatten\(\)\[{2 * ALONE.top_k + 1}\] = "):
        ep.synchronize()


def test_batches_of_sequences_are_to_be_flattened(rank: EPCommunicator) -> None:
    x, ids, weights = arguments(tokens=6)
    with pytest.raises(EPInputError, match=r"x\.shape = \(2, 3, 128\): .*flatten .*: x\.flatten\(0, 1\)"):
        rank.dispatch(x.view(2, 3, 128), ids, weights)
    with pytest.raises(EPInputError, match=r"topk_ids\.shape = .*topk_ids\.flatten\(0, 1\)"):
        rank.dispatch(x, ids.view(2, 3, 2), weights)
    with pytest.raises(EPInputError, match=r"x\.shape = \(6, 3\): must be \(any, 128\)$"):
        rank.dispatch(x[:, :3].contiguous(), ids, weights)


# ---- other messages


def test_numpy_integers_are_integers() -> None:
    cfg = EPConfig(np.int64(128), 8, np.int32(2), 4, 1, timeout_s=np.float32(2), row_alignment=np.int64(8))
    assert cfg == EPConfig(128, 8, 2, 4, 1, timeout_s=2.0, row_alignment=8)
    assert all(type(value) in (int, float, str, bool, type(None)) for value in vars(cfg).values())
    assert connect_local(cfg, ["cpu"])[0].allocate(np.int64(9)).tokens.shape[0] == 16
    with pytest.raises(EPConfigError, match=r"top_k = np\.True_"):
        replace(cfg, top_k=np.True_)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cpu", r"devices = 'cpu': must be a list, one per rank, such as \[.cpu.\] \* 2"),
        (torch.device("cuda"), r"devices = 'cuda': .*\[.cuda.\] \* 2"),
        ([0, 1], r"devices = \[0, 1\]: must be a list of names.*\[.cpu.\] \* 2$"),
        (["gpu", "gpu"], r"devices = \['gpu', 'gpu'\]: must be a list of names"),
        (None, r"devices = NoneType: must be a list of names"),
        (["cpu"], r"devices = 1 entries: must be world_size = 2"),
    ],
)
def test_devices_are_named(devices: Any, message: str) -> None:
    with pytest.raises(EPConfigError, match=message):
        connect_local(replace(ALONE, world_size=2), devices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"library": 5}, r"library = '5': must be a folder"),
        ({"hooks": None}, r"hooks = NoneType: must be Hooks, without arguments for none"),
        ({"hooks": cute_ep.Hooks(epilogue="a:b")}, r"hooks = .*: must be Hooks\(\), there are none on the reference"),
    ],
)
def test_options_are_what_they_should_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EPConfigError, match=message):
        connect_local(ALONE, ["cpu"], **options)


@pytest.mark.parametrize("call", [cute_ep.memory_bytes, lambda cfg: connect_local(cfg, ["cpu"])])
def test_a_configuration_is_one(call: Callable[[Any], Any]) -> None:
    for cfg, name in ((None, "NoneType"), ({"hidden": 128}, "dict")):
        with pytest.raises(EPConfigError, match=rf"cfg = {name}: must be an EPConfig"):
            call(cfg)


def test_lists_of_all_ranks() -> None:
    ranks = connect_local(ALONE, ["cpu"])
    for given, message in (
        (None, r"communicators = NoneType: must be a list of all ranks"),
        ([], r"communicators = no ranks"),
        (ranks[0], r"communicators = ReferenceCommunicator: must be a list"),
        (iter(ranks), r"communicators = list_iterator: must be a list"),
        ([ALONE], r"communicators\[0\] = EPConfig: must be a communicator"),
    ):
        with pytest.raises(EPConfigError, match=message):
            DistributedEPDispatch(given)
    x, ids, weights = arguments()
    dispatch, combine = DistributedEPDispatch(ranks), DistributedEPCombine(ranks)
    with pytest.raises(EPInputError, match=r"input_tokens = Tensor: must be a list with one entry per rank"):
        dispatch(x, [ids], [weights])
    with pytest.raises(EPInputError, match=r"len\(input_scales\) = 2: must be the number of ranks, 1"):
        dispatch([x], [ids], [weights], [1.0, 1.0])
    with pytest.raises(EPInputError, match=r"outs = Tensor: must be a list"):
        combine([x], dispatch([x], [ids], [weights]), outs=x)


# ---- ranges


def test_launches_are_ranges_of_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is on; nothing is recorded, and the lock is free, before and afterwards."""
    replace_driver(monkeypatch, lambda *_: (driver.driver.CUresult.CUDA_SUCCESS,))
    kernel = driver.Kernel(SimpleNamespace(params=(), entry="cute_ep_dispatch_bf16_0", smem_bytes=0, read=bytes))
    monkeypatch.setattr(driver, "record_function", None)
    kernel.launch(1, {}, 7)
    monkeypatch.undo()
    replace_driver(monkeypatch, lambda *_: (driver.driver.CUresult.CUDA_SUCCESS,))
    with torch.profiler.profile() as profile:
        kernel.launch(1, {}, 7)
        kernel.launch(1, {}, 7)
    kernel.launch(1, {}, 7)
    assert [(event.key, event.count) for event in profile.key_averages()] == [("cute_ep.dispatch_bf16", 2)]


# ---- types


def test_printed_code_has_right_types(tmp_path: Path) -> None:
    """The blocks of a document one after the other, as they stand, and what their types must be."""
    pytest.importorskip("mypy")
    package = tmp_path / "cute_ep"
    shutil.copytree(ROOT / "cute_ep", package, ignore=shutil.ignore_patterns("library", "__pycache__"))
    shutil.copytree(ROOT / "layouts", package / "layouts")
    for document in ("README.md", "docs/use.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
        (tmp_path / f"{Path(document).stem.lower()}_blocks.py").write_text("\n".join(blocks))
    (tmp_path / "wrong.py").write_text(
        "import torch\nfrom cute_ep import EPConfig, connect_local, fused_silu\n"
        "ep = connect_local(EPConfig(8, 8, 2, 4, 1), ['cpu'])[0]\n"
        "reveal_type(ep.dispatch_wait(ep.dispatch_async(torch.ones(1), torch.ones(1))))\n"
        "reveal_type(fused_silu(torch.ones(1), fmt='fp8'))\n"
        "EPConfig(8, 8, 2, 4, 1, 'fp9')\n"
        "ep.combine(torch.ones(1), ep.dispatch(torch.ones(1), torch.ones(1)), mode='exakt')\n"
        "fused_silu(torch.ones(1), fmt='nvfp4_row')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "cache"]
    # whether names exist is seen where the blocks run
    files = ["--disable-error-code", "name-defined", "readme_blocks.py", "use_blocks.py", "wrong.py"]
    done = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True)
    found = [line.partition(": ") for line in done.stdout.splitlines() if "_blocks.py" in line]
    assert not found, done.stdout
    told: dict[int, str] = defaultdict(str)
    for line in done.stdout.splitlines():
        if line.startswith("wrong.py:"):
            told[int(line.split(":")[1])] += line
    assert 'Revealed type is "cute_ep.api.dispatched.Dispatched"' in told[4]
    assert "cute_ep.api.dispatched.SwigluRows" in told[5]
    assert all("error" in told[line] for line in (6, 7, 8)), done.stdout
