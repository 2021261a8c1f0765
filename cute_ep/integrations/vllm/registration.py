"""Makes `cute_ep` and `cute_ep_batched` values of vLLM's `--all2all-backend`. vLLM 0.33 has no call for that, so parts
of it are wrapped; with another backend they do what they did. All else of vLLM that asks for the backend's name does
what it does for one that it does not name."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

from vllm.config import parallel, vllm
from vllm.distributed.device_communicators import base_device_communicator

from cute_ep import EPConfigError

BACKEND = "cute_ep"
BATCHED = "cute_ep_batched"
BACKENDS = BACKEND, BATCHED
WITH_UBATCHES = "deepep_low_latency"
"""A backend that vLLM gives micro-batches, and of which its `VllmConfig.__post_init__` asks nothing else."""


def register() -> None:
    """Add both backends to vLLM in this process; may be called again. Loads no kernels and touches no device."""
    if BACKEND in get_args(parallel.All2AllBackend):
        return
    _accept_name()
    # both take tokens that tensor parallel ranks have shared out; the batched one has few tokens by default
    _extend(parallel.ParallelConfig, "use_sequence_parallel_moe", _shares_out_tokens)
    _extend(parallel.ParallelConfig, "use_batched_dp_moe", _is_batched)
    _allow_ubatches()
    _make_manager()


def _accept_name() -> None:
    """Have the configuration, and so the command line, take the names."""
    from pydantic.dataclasses import rebuild_dataclass

    names = Literal[(*get_args(parallel.All2AllBackend), *BACKENDS)]  # type: ignore[valid-type]
    parallel.All2AllBackend = names
    config = parallel.ParallelConfig
    config.__annotations__["all2all_backend"] = names
    config.__dataclass_fields__["all2all_backend"].type = names
    rebuild_dataclass(config, force=True)


def _extend(config: Any, name: str, answer: Callable[[Any], bool]) -> None:
    """Have a property of a configuration give `answer` where the backend is one of ours."""
    before = getattr(config, name)

    def extended(self: Any) -> bool:
        return answer(self) if self.all2all_backend in BACKENDS else before.fget(self)

    setattr(config, name, property(extended, doc=before.__doc__))


def _shares_out_tokens(config: Any) -> bool:
    return config.enable_expert_parallel and min(config.tensor_parallel_size, config.data_parallel_size) > 1


def _is_batched(config: Any) -> bool:
    return config.all2all_backend == BATCHED and config.enable_expert_parallel and config.data_parallel_size > 1


def _allow_ubatches() -> None:
    """Have vLLM's check of micro-batches, an assertion with a list of backends, see one of that list."""
    config: Any = vllm.VllmConfig
    before = config.__post_init__

    @functools.wraps(before)
    def check(self: Any) -> None:
        own = self.parallel_config
        name = own.all2all_backend
        if name in BACKENDS and own.use_ubatching:
            own.all2all_backend = WITH_UBATCHES
        try:
            before(self)
        finally:
            if name in BACKENDS:
                own.all2all_backend = name

    config.__post_init__ = check


def _make_manager() -> None:
    """Have a device communicator's base make our manager; subclasses then choose none."""
    base = base_device_communicator.DeviceCommunicatorBase
    before, signature = base.__init__, inspect.signature(base.__init__)

    @functools.wraps(before)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        before(self, *arguments, **named)
        if not (self.use_all2all and self.all2all_backend in BACKENDS):
            return
        given = signature.bind(self, *arguments, **named).arguments
        if given.get("global_ranks") is not None:  # of groups that torch.distributed does not know
            raise EPConfigError(f"all2all_backend = {self.all2all_backend!r}: must be used without --enable-elastic-ep")
        from cute_ep.integrations.vllm.manager import CuteEPAll2AllManager

        _make_layers()
        self.use_all2all = False
        self.all2all_manager = CuteEPAll2AllManager(given["cpu_group"])

    base.__init__ = init


def _make_layers() -> None:
    """Have vLLM make our layers. The modules that it concerns import what only workers need."""
    from vllm.model_executor.layers.fused_moe import all2all_utils, config

    name = "maybe_make_prepare_finalize"
    before = getattr(all2all_utils, name)
    if before.__module__ == __name__:
        return
    signature = inspect.signature(before)
    batched = "use_batched_activation_format"
    _extend(
        config.FusedMoEParallelConfig, batched, lambda own: own.all2all_backend == BATCHED and own.use_all2all_kernels
    )

    def make(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        moe, manager = given["moe"], given.get("all2all_manager")
        own = moe.moe_parallel_config
        if own.all2all_backend not in BACKENDS or not (own.use_all2all_kernels or own.dp_size > 1):
            return before(*arguments, **named)
        rule = f"all2all_backend = {own.all2all_backend!r}: "
        if not own.use_all2all_kernels:
            raise EPConfigError(rule + "start vLLM with --enable-expert-parallel")
        if given.get("use_monolithic"):
            remedy = "choose others, such as --moe-backend triton"
            raise EPConfigError(f"{rule}these experts route tokens themselves; {remedy}")
        return _layer(moe, all2all_utils.get_ep_all2all_manager() if manager is None else manager)

    for module in [one for key, one in sys.modules.items() if key.startswith("vllm.")]:
        if vars(module).get(name) is before:
            setattr(module, name, make)


def _layer(moe: Any, manager: Any) -> Any:
    """The layer for a FusedMoEConfig."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.vllm import get_current_vllm_config

    from cute_ep.integrations.vllm.batched import CuteEPBatched
    from cute_ep.integrations.vllm.manager import Options
    from cute_ep.integrations.vllm.standard import CuteEPStandard

    if moe.num_experts % manager.world_size:
        raise EPConfigError(
            f"num_experts = {moe.num_experts}: must be a multiple of the {manager.world_size} expert parallel ranks; "
            "with --enable-eplb add redundant experts (num_redundant_experts in --eplb-config)"
        )
    config = get_current_vllm_config()
    sizes = moe.hidden_dim, moe.num_experts, moe.experts_per_token, moe.max_num_tokens
    options = Options.of(config.additional_config)
    shared_by = moe.moe_parallel_config.sp_size
    if moe.moe_parallel_config.all2all_backend == BATCHED:
        return CuteEPBatched(manager, sizes, options, sp_size=shared_by)
    graphs = config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    return CuteEPStandard(manager, sizes, options, sp_size=shared_by, graphs=graphs)
