"""`register` on stubs of vLLM: the name, what makes a layer for it, and that other backends get what they got."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from cute_ep.api.errors import EPConfigError
from tests.integrations.test_version import ROOT, import_beside
from tests.integrations.upstream import differences, installed
from tests.integrations.vllm_parts import CONFIG, import_adapter

COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator"


class Parts:
    """vLLM's modules, of which those that `register` wraps do what vLLM's do, as far as it matters."""

    def __init__(self, stubs: dict[str, ModuleType]) -> None:
        self.parallel: Any = stubs["vllm.config.parallel"]
        self.base: Any = stubs[COMMUNICATOR]
        self.utils: Any = stubs[f"{CONFIG}.all2all_utils"]
        self.kernel: Any = stubs[f"{CONFIG}.modular_kernel"]
        self.config: Any = stubs[f"{CONFIG}.config"]
        self.early: Any = ModuleType("vllm.early")  # has imported the factory by name
        config = self.parallel.ParallelConfig
        config.__dataclass_fields__ = {"all2all_backend": SimpleNamespace(type=None)}
        config.use_sequence_parallel_moe = property(lambda self: self.all2all_backend == "allgather_reducescatter")
        config.use_batched_dp_moe = property(lambda self: self.all2all_backend == "deepep_low_latency")
        self.config.FusedMoEParallelConfig.use_all2all_kernels = property(lambda self: self.all2all_kernels)

        def init(
            self: Any, cpu_group: Any, device: Any = None, device_group: Any = None, unique_name: str = "",
            global_ranks: Any = None, global_world_size: Any = None, use_all2all: bool = False,
        ) -> None:  # fmt: skip
            self.all2all_backend, self.use_all2all = device, use_all2all  # a test tells the backend by the device
            self.all2all_manager = None

        def make(
            moe: Any, quant_config: Any, routing_tables: Any = None, allow_new_interface: bool = False,
            use_monolithic: bool = False, all2all_manager: Any = None, input_dtype: Any = None,
        ) -> Any:  # fmt: skip
            return "vLLM's", moe, quant_config, allow_new_interface, use_monolithic, all2all_manager, input_dtype

        self.base.DeviceCommunicatorBase.__init__ = init
        self.utils.maybe_make_prepare_finalize = self.early.maybe_make_prepare_finalize = make
        self.vllm: Any = stubs["vllm.config.vllm"]
        self.compilation: Any = stubs["vllm.config.compilation"]
        compiled = SimpleNamespace(cudagraph_mode=self.compilation.CUDAGraphMode.NONE)
        self.current = SimpleNamespace(additional_config={"cute_ep": {"mode": "exact"}}, compilation_config=compiled)
        self.vllm.get_current_vllm_config = lambda: self.current

        def check(self: Any) -> None:
            self.checked = self.parallel_config.all2all_backend
            if getattr(self, "refused", False):
                raise ValueError
            assert not self.parallel_config.use_ubatching or self.checked in ("deepep_low_latency", "nixl_ep")

        self.vllm.VllmConfig.__post_init__ = check

    def communicator(self, backend: str, **more: Any) -> Any:
        """A device communicator of a group of two."""
        group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
        return self.base.DeviceCommunicatorBase(group, backend, group, **({"use_all2all": True} | more))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    with installed("vllm", "cute_ep.integrations.vllm") as stubs:
        adapter = import_adapter(stubs, monkeypatch)
        made = Parts(stubs)
        sys.modules["vllm.early"] = made.early
        adapter.register()
        adapter.register()
        yield made


def moe(backend: str = "cute_ep", experts: int = 8, **parallel: Any) -> Any:
    """A layer's sizes."""
    own = SimpleNamespace(
        **({"all2all_backend": backend, "use_all2all_kernels": True, "dp_size": 2, "sp_size": 1} | parallel)
    )
    sizes = {"num_experts": experts, "hidden_dim": 256, "experts_per_token": 2, "max_num_tokens": 16}
    return SimpleNamespace(moe_parallel_config=own, **sizes)


def test_vllm_finds_register_by_its_entry_point(parts: Parts) -> None:
    (value,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "vllm.general_plugins"
    ].values()
    module, _, name = value.partition(":")
    assert getattr(sys.modules[module], name).__module__ == "cute_ep.integrations.vllm.registration"


def test_the_names_are_values_once(parts: Parts) -> None:
    names = get_args(parts.parallel.All2AllBackend)
    assert names[-2:] == ("cute_ep", "cute_ep_batched") and len(set(names)) == len(names) and "deepep_v2" in names
    config = parts.parallel.ParallelConfig
    assert config.__annotations__["all2all_backend"] == parts.parallel.All2AllBackend


@pytest.mark.parametrize(
    ("backend", "sizes", "wanted"),
    [
        ("cute_ep", (2, 2, True), True),
        ("cute_ep_batched", (2, 2, True), True),
        ("cute_ep", (1, 2, True), False),
        ("cute_ep", (2, 1, True), False),
        ("cute_ep", (2, 2, False), False),
        ("allgather_reducescatter", (1, 1, False), True),
        ("moonep", (2, 2, True), False),
    ],
)
def test_tokens_are_shared_out_as_for_other_backends(parts: Parts, backend: str, sizes: tuple, wanted: bool) -> None:
    config = parts.parallel.ParallelConfig()
    config.all2all_backend = backend
    config.tensor_parallel_size, config.data_parallel_size, config.enable_expert_parallel = sizes
    assert config.use_sequence_parallel_moe is wanted


@pytest.mark.parametrize(
    ("backend", "sizes", "wanted"),
    [
        ("cute_ep_batched", (1, 2, True), True),
        ("cute_ep_batched", (2, 1, True), False),
        ("cute_ep_batched", (1, 2, False), False),
        ("cute_ep", (1, 2, True), False),
        ("deepep_low_latency", (1, 1, False), True),
    ],
)
def test_the_batched_backend_has_few_tokens_and_batched_experts(
    parts: Parts, backend: str, sizes: tuple, wanted: bool
) -> None:
    parts.communicator(backend)
    config, layer = parts.parallel.ParallelConfig(), object.__new__(parts.config.FusedMoEParallelConfig)
    config.all2all_backend = layer.all2all_backend = backend
    config.tensor_parallel_size, config.data_parallel_size, config.enable_expert_parallel = sizes
    layer.all2all_kernels = sizes[1] > 1 and sizes[2]
    assert config.use_batched_dp_moe is wanted
    if backend in ("cute_ep", "cute_ep_batched"):
        assert layer.use_batched_activation_format is wanted


def test_the_device_communicator_gets_our_manager(parts: Parts) -> None:
    assert type(parts.communicator("cute_ep_batched").all2all_manager).__name__ == "CuteEPAll2AllManager"
    made = parts.communicator("cute_ep")
    assert type(made.all2all_manager).__name__ == "CuteEPAll2AllManager"
    assert made.all2all_manager.world_size == 2 and not made.use_all2all
    for other in (parts.communicator("deepep_v2"), parts.communicator("cute_ep", use_all2all=False)):
        assert other.all2all_manager is None
    assert parts.communicator("deepep_v2").use_all2all


def test_elastic_groups_are_refused(parts: Parts) -> None:
    with pytest.raises(EPConfigError, match="without --enable-elastic-ep"):
        parts.communicator("cute_ep", global_ranks=[0, 1])


@pytest.mark.parametrize("where", ["utils", "early"])
def test_layers_are_ours(parts: Parts, where: str) -> None:
    manager = parts.communicator("cute_ep").all2all_manager
    parts.utils.get_ep_all2all_manager = lambda: manager
    make = getattr(parts, where).maybe_make_prepare_finalize
    layer = make(moe=moe(sp_size=2), quant_config=None, allow_new_interface=True)
    assert type(layer).__name__ == "CuteEPStandard" and layer.num_dispatchers() == 2
    assert layer._options.mode == "exact" and layer._sp_size == 2
    cfg = layer._cfg
    assert (cfg.hidden, cfg.num_experts, cfg.top_k, cfg.max_tokens_per_rank, cfg.world_size) == (256, 8, 2, 16, 2)
    assert make(moe(), None, all2all_manager=manager)._manager is manager
    assert not layer._graphs
    for mode in (None, "piecewise"):  # not decided yet, or some
        parts.current.compilation_config.cudagraph_mode = mode
        assert make(moe(), None)._graphs
    batched = make(moe("cute_ep_batched"), None)
    assert type(batched).__name__ == "CuteEPBatched" and batched._options.mode == "exact"
    assert batched._cfg.block_rows == 32


@pytest.mark.parametrize("one", [moe("deepep_v2"), moe(use_all2all_kernels=False, dp_size=1)], ids=["other", "alone"])
def test_other_layers_are_vllms(parts: Parts, one: Any) -> None:
    parts.communicator("cute_ep")
    made = parts.utils.maybe_make_prepare_finalize(one, "quant", use_monolithic=True, input_dtype="type")
    assert made == ("vLLM's", one, "quant", False, True, None, "type")


@pytest.mark.parametrize(
    ("one", "options", "message"),
    [
        (moe(use_all2all_kernels=False), {}, "--enable-expert-parallel"),
        (moe(), {"use_monolithic": True}, "--moe-backend triton"),
        (moe(experts=7), {}, "num_experts = 7: must be a multiple of the 2"),
    ],
    ids=["no experts", "monolithic", "experts"],
)
def test_layers_that_do_not_fit_name_the_option(parts: Parts, one: Any, options: dict, message: str) -> None:
    manager = parts.communicator("cute_ep").all2all_manager
    with pytest.raises(EPConfigError, match=message):
        parts.utils.maybe_make_prepare_finalize(one, None, all2all_manager=manager, **options)


@pytest.mark.parametrize("backend", ["cute_ep", "cute_ep_batched", "nixl_ep"])
@pytest.mark.parametrize("use_ubatching", [False, True], ids=["whole", "micro"])
def test_both_may_have_micro_batches(parts: Parts, backend: str, use_ubatching: bool) -> None:
    config = parts.vllm.VllmConfig()
    config.parallel_config = SimpleNamespace(all2all_backend=backend, use_ubatching=use_ubatching)
    config.__post_init__()
    assert config.parallel_config.all2all_backend == backend
    assert config.checked == ("deepep_low_latency" if use_ubatching and backend != "nixl_ep" else backend)


def test_a_backend_keeps_its_name_where_vllm_refuses_the_configuration(parts: Parts) -> None:
    config = parts.vllm.VllmConfig()
    config.parallel_config = SimpleNamespace(all2all_backend="cute_ep", use_ubatching=True)
    config.refused = True
    with pytest.raises(ValueError):
        config.__post_init__()
    assert config.parallel_config.all2all_backend == "cute_ep"


def test_experts_keep_all_sms(parts: Parts) -> None:
    assert parts.communicator("cute_ep").all2all_manager.max_sms_used() == 0


def test_wrapped_calls_have_the_arguments_that_ours_read_and_hand_on(parts: Parts) -> None:
    parts.communicator("cute_ep")
    ours = parts.base.DeviceCommunicatorBase.__init__, parts.utils.maybe_make_prepare_finalize
    with installed("vllm") as stubs:
        base: Any = stubs[COMMUNICATOR]
        utils: Any = stubs[f"{CONFIG}.all2all_utils"]
        theirs = base.DeviceCommunicatorBase.__init__, utils.maybe_make_prepare_finalize
    for own, other, read in zip(ours, theirs, (WRAPPED_INIT, WRAPPED_MAKE), strict=True):
        assert read <= inspect.signature(other).parameters.keys()
        kinds = {one.kind for one in inspect.signature(own, follow_wrapped=False).parameters.values()}
        assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def test_callers_of_vllms_classes_can_call_ours(parts: Parts) -> None:
    from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    base = parts.kernel.FusedMoEPrepareAndFinalizeModular
    assert not CuteEPStandard.__abstractmethods__
    assert differences(CuteEPStandard, base) == []
    assert differences(CuteEPAll2AllManager, CuteEPAll2AllManager.__base__) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cute_ep": {"modes": "exact"}}, "must be one of mode, static_rows, timeout_s, sms"),
        ({"cute_ep": {"mode": "unweighted"}}, "must be 'partial' or 'exact'"),
    ],
    ids=["unknown", "mode"],
)
def test_options_are_checked(parts: Parts, given: dict, message: str) -> None:
    from cute_ep.integrations.vllm.manager import Options

    with pytest.raises(EPConfigError, match=message):
        Options.of(given)
    assert Options.of({"other": 1}) == Options() and Options.of({"cute_ep": {"sms": 16}}).sms == 16


def test_experts_without_modular_kernels_are_refused(parts: Parts) -> None:
    manager = parts.communicator("cute_ep").all2all_manager
    with pytest.raises(EPConfigError, match="use another --all2all-backend"):
        manager.dispatch_router_logits(None, None, False)


WRAPPED_INIT, WRAPPED_MAKE = {"cpu_group", "global_ranks"}, {"moe", "all2all_manager", "use_monolithic"}
NEED = "must be at least 0.33.0 and below 0.33.1: pip install 'vllm>=0.33.0,<0.33.1'"


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1", "0.34.0"])
def test_versions_that_were_not_checked_are_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / "vllm.py").write_text(f"__version__ = '{found}'")
    done = import_beside(tmp_path, "cute_ep.integrations.vllm")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: vllm = {found}: {NEED}"
