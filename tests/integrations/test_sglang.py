"""SGLang's dispatcher on CPU ranks: what it promises SGLang, what it refuses, and the plugin that puts it in place."""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import tomllib
import weakref
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.integrations.common import pools
from cute_ep.runtime import process_connection
from tests.integrations.groups import ThreadGroup, connect
from tests.integrations.test_version import import_beside
from tests.integrations.upstream import differences, installed
from tests.processes import ROOT, WITHOUT_GPU, run_ranks

ADAPTER = "cute_ep.integrations.sglang"
SIZES = {"router_topk": 2, "num_experts": 4, "num_local_experts": 4, "hidden_size": 64}
GIVEN = {"params_dtype": torch.bfloat16, "use_fp8_dispatch": False, "activation_scale_block_size": 128}


@pytest.mark.slow
def test_two_processes_against_a_dense_layer(tmp_path: Path) -> None:
    run_ranks("tests.integrations.sglang_worker", 2, tmp_path / "store", environment=[WITHOUT_GPU] * 2)


@pytest.fixture
def sglang() -> Iterator[dict[str, Any]]:
    """The modules of SGLang's stubs."""
    with installed("sglang", ADAPTER) as made:
        yield made


def setting(value: object) -> SimpleNamespace:
    return SimpleNamespace(get=lambda: value)


class Lone:
    """A dispatcher of the only rank, for decode batches of at most 8 tokens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, tokens: int = 8, ranks: int = 1, packed: bool = False
    ) -> None:
        self.module = importlib.import_module(f"{ADAPTER}.dispatcher")
        monkeypatch.setattr(process_connection, "connect_checked", connect)
        monkeypatch.setattr(pools.SHARED, "_pools", {})
        self.group = ThreadGroup(0, 1, threading.Barrier(1), [None])
        names = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_DEEPEP_V2_NUM_SMS"
        settings = dict(zip(names, (setting(tokens), setting(0)), strict=True))
        monkeypatch.setattr(self.module, "envs", SimpleNamespace(**settings))
        monkeypatch.setattr(self.module, "get_is_extend_in_batch", lambda: False)
        monkeypatch.setattr(self.module, "get_parallel", lambda: SimpleNamespace(attn_dp_size=2, attn_cp_size=1))
        formats = SimpleNamespace(tma_aligned=True, ue8m0=packed)
        monkeypatch.setattr(self.module, "get_deepep_v2_fp8_scale_format", lambda: formats)

    def make(self, **changes: Any) -> Any:
        return self.module.CuteEPDispatcher(self.group, **{**SIZES, **GIVEN, **changes})

    def dispatch(self, dispatcher: Any, tokens: int) -> Any:
        ids = torch.arange(2, dtype=torch.int32).expand(tokens, 2).contiguous()
        return dispatcher.dispatch(
            torch.ones(tokens, dispatcher.cfg.hidden).bfloat16(),
            self.module.StandardTopKOutput(torch.ones(tokens, 2), ids, ids),
        )


def test_it_takes_the_place_of_sglangs_dispatcher(sglang: dict[str, Any]) -> None:
    replaced = sglang["sglang.srt.layers.moe.token_dispatcher.deepep_v2"].DeepEPv2Dispatcher
    base = sglang["sglang.srt.layers.moe.token_dispatcher.base"].BaseDispatcher
    ours = importlib.import_module(f"{ADAPTER}.dispatcher").CuteEPDispatcher
    assert issubclass(ours, base) and not differences(ours, base) and not differences(ours, replaced)
    wanted, found = (list(inspect.signature(one.__init__).parameters) for one in (replaced, ours))
    assert found == wanted
    assert all(hasattr(ours, name) for name in vars(replaced) if not name.startswith("_"))


@pytest.mark.parametrize("fp8", [False, True])
def test_padding_is_left_alone(sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """As by DeepEP V2: zeros would be most of what a decode step writes."""
    cfg = Lone(monkeypatch).make(use_fp8_dispatch=fp8, hidden_size=256).cfg
    assert cfg.row_alignment == 128 and not cfg.zero_padding


@pytest.mark.parametrize(
    ("changes", "rank", "rule"),
    [
        ({"params_dtype": torch.float16}, {}, "--dtype = torch.float16: must be bfloat16"),
        ({"num_local_experts": 3}, {}, "--ep-num-redundant-experts"),
        ({}, {"tokens": 0}, "TOKENS_PER_RANK = 0: must be an integer in"),
        ({}, {"tokens": 1 << 20}, "TOKENS_PER_RANK = 1048576: must be an integer in"),
        ({"use_fp8_dispatch": True, "activation_scale_block_size": 32}, {}, "size = 32: must be 128 on this GPU"),
        ({"use_fp8_dispatch": True}, {}, "hidden_size = 64: must be a multiple of 128"),
        (
            {"use_fp8_dispatch": True, "hidden_size": 256},
            {"packed": True},
            "hidden_size = 256: must be a multiple of 512",
        ),
    ],
    ids=["type", "experts", "no tokens", "many tokens", "block", "hidden", "packed"],
)
def test_what_cannot_be_served_is_refused_at_once(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict, rank: dict, rule: str
) -> None:
    with pytest.raises(EPConfigError, match=rule):
        Lone(monkeypatch, **rank).make(**changes)


def test_more_tokens_than_there_is_room_for_name_the_variable(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = Lone(monkeypatch)
    rule = r"hidden_states.shape\[0\] = 9: must not exceed SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK = 8"
    with pytest.raises(EPInputError, match=rule):
        lone.dispatch(lone.make(), 9)


def test_calls_come_in_pairs_and_combine_takes_final_rows_only(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A combine that was refused can be made again."""
    lone = Lone(monkeypatch)
    dispatcher, given = lone.make(), lone.module.DeepEPv2CombineInput
    layout = sglang["sglang.srt.layers.moe.token_dispatcher.base"].RoutewiseLayout.EXPANDED
    with pytest.raises(EPError, match="there was no dispatch"):
        dispatcher.combine(given(torch.ones(128, 64).bfloat16(), None))
    rows = lone.dispatch(dispatcher, 3).hidden_states
    with pytest.raises(EPError, match="has not been combined"):
        lone.dispatch(dispatcher, 3)
    with pytest.raises(EPInputError, match="routewise_layout: must be None"):
        dispatcher.combine(given(rows, None, layout))
    assert torch.equal(dispatcher.combine(given(rows, None)), torch.full((3, 64), 2.0).bfloat16())


@pytest.mark.parametrize("extend", [False, True], ids=["decode", "extend"])
def test_the_runner_can_free_rows(sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch, extend: bool) -> None:
    """By `set_`: where gradients are only off, a view would keep the memory of what it is a view of."""
    lone = Lone(monkeypatch, tokens=512)
    monkeypatch.setattr(lone.module, "get_is_extend_in_batch", lambda: extend)
    with torch.no_grad():
        output = lone.dispatch(lone.make(hidden_size=128, use_fp8_dispatch=True), 300)
    for one in (output.hidden_states, output.hidden_states_scale):
        memory = weakref.ref(one.untyped_storage())
        assert one.untyped_storage() is memory() and (one.untyped_storage().nbytes() > one.nbytes) == extend
        one.set_(one.new_empty(0))
        assert memory() is None


def test_layers_of_equal_sizes_share_a_communicator(sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    layers = lone.make(), lone.make(), lone.make(router_topk=1)
    for one in layers:
        one.prebuild()
    first, second, other = (one._connected() for one in layers)
    assert first is second and first is not other
    pools.close()
    assert first.closed and not layers[0]._connected().closed


@pytest.mark.parametrize(
    ("named", "replaces"),
    [("", False), ("other", False), ("cute_ep", True), ("other, cute_ep", True)],
    ids=["nothing", "another", "it", "both"],
)
def test_the_plugin_replaces_the_class_when_it_is_named(
    sglang: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    named: str,
    replaces: bool,
) -> None:
    """And says so where only warnings are shown, as before SGLang has set up its logs."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sglang["sglang.srt.environ"].envs, "SGLANG_PLUGINS", setting(named), raising=False)
    hooks, made = sglang["sglang.srt.plugins.hook_registry"], []
    monkeypatch.setattr(hooks.HookRegistry, "register", lambda *given: made.append(given))
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    (point,) = (EntryPoint(name, value, "sglang.srt.plugins") for name, value in points.items())
    assert point.name == "cute_ep"
    point.load()()
    assert [one.getMessage().split()[1] for one in caplog.records] == ["replaces"] * replaces
    if not replaces:
        assert not made
        return
    ((target, ours, kind),) = made
    module, _, name = target.rpartition(".")
    assert hasattr(sglang[module], name) and kind is hooks.HookType.REPLACE
    assert ours is importlib.import_module(f"{ADAPTER}.dispatcher").CuteEPDispatcher


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("__version__ = '0.5.22'", "0.5.22"),
        ("__version__ = '0.5.24'", "0.5.24"),
        ("raise ModuleNotFoundError('gone')", "not installed"),
    ],
)
def test_another_version_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "sglang.py").write_text(text)
    done = import_beside(tmp_path, f"{ADAPTER}.dispatcher")
    need = "must be at least 0.5.23 and below 0.5.24: pip install 'sglang>=0.5.23,<0.5.24'"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: sglang = {found}: {need}"
