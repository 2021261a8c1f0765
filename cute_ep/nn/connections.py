"""Communicators of layers. A module holds the name of one, never the communicator, so it can be copied and saved."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import differing
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.api.interface import EPCommunicator
from cute_ep.ops.registry import communicator_of, is_open, register
from cute_ep.runtime.gpus import sms_beside_nccl
from cute_ep.runtime.group_pool import Pools, own_device
from cute_ep.runtime.local_pool import CALLING, LocalPool
from cute_ep.runtime.places import check_member
from cute_ep.runtime.pool import Opening, Pool, all_sms
from cute_ep.torch_internals import Movable
from cute_ep.tuning.launch_shape import Tuning

LOG = logging.getLogger(__name__)


POOLS = Pools()
"""Of groups in which layers are; `ops` keeps none of their communicators alive."""
_ALONE: dict[torch.device, LocalPool] = {}
"""Of layers that are a group by themselves."""


class _Origin(NamedTuple):
    """What a layer was given to `connect` with: the process group, None for the default one, and options."""

    group: weakref.ref[dist.ProcessGroup] | None
    options: dict[str, Any]


class Connected(Movable):
    """A module that makes calls of a communicator. Layers of equal configurations, devices and groups share one.

    Copies, also those from pickle, begin without; their first call looks for an open one again.

    Attributes:
        cfg: the group's configuration.
    """

    def __init__(self, cfg: EPConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._comm: str | None = None
        self._origin: _Origin | None = None  # also for calls after the module has moved

    def place(self) -> torch.device:
        """Where the module computes."""
        raise NotImplementedError

    @property
    def communicator(self) -> EPCommunicator:
        """The one that the module has, for `synchronize` and calls by hand. EPError: none, or it was closed."""
        return communicator_of(self._connected_name())

    def attach(self, communicator: EPCommunicator) -> None:
        """Use this communicator from now on. `connect` calls it; call it yourself to share one that you opened.

        Args:
            communicator: kept alive by you, for as long as the module is called.

        Raises:
            EPConfigError: its configuration or device is not the module's.
            EPInputError: as `cute_ep.ops.register`.
        """
        for name, (given, own) in differing([communicator.cfg, self.cfg]).items():
            raise EPConfigError(f"communicator.cfg.{name} = {given!r}: must be {own!r}, as of the layer")
        if communicator.device != self.place():
            raise EPConfigError(
                f"communicator.device = {communicator.device}: must be {self.place()}, where the layer's parameters "
                f"are; move the layer with .to({str(communicator.device)!r}) first"
            )
        self._comm = register(communicator)

    def _connected_name(self) -> str:
        """The name for ops; the first call outside of compiled code may open a communicator, as `connect` does."""
        if torch.compiler.is_compiling():
            if self._comm is None:
                raise EPError(
                    f"{type(self).__name__} is not connected: call cute_ep.nn.connect(model) before compiled code runs"
                )
            return self._comm
        if self._comm is None:
            communicator, _ = _find_or_open(self.cfg, self.place(), *self._group_and_options())
            self.attach(communicator)
            assert self._comm is not None
        if not is_open(self._comm):
            raise EPError(
                f"{type(self).__name__}: its communicator was closed; call cute_ep.nn.connect(model), on all ranks"
            )
        return self._comm

    def _group_and_options(self) -> tuple[dist.ProcessGroup | None, dict[str, Any]]:
        """Those of `connect`, unless the group was destroyed since."""
        if self._origin is not None:
            given, options = self._origin
            group = None if given is None else given()
            if given is None or (group is not None and _is_registered(group)):
                return group, options
        return _group_of_equals(self.cfg, self.place()), {}

    @contextmanager
    def moving(self) -> Iterator[None]:
        before = self.place()
        yield
        if self.place() != before:
            self._comm = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_comm": None, "_origin": None}


class Connections:
    """The communicators that one `connect` opened; as a context manager it closes them.

    Attributes:
        communicators: in the order of the modules.
    """

    def __init__(self, communicators: Sequence[EPCommunicator]) -> None:
        self.communicators = tuple(communicators)

    def synchronize(self) -> None:
        """`EPCommunicator.synchronize` of each: waits, and raises what was found wrong."""
        for communicator in self.communicators:
            communicator.synchronize()

    def close(self) -> None:
        """Close them, on all ranks; may be called again. Calls of their layers are errors until `connect`."""
        for pool in _pools():
            pool.close(self.communicators)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    module: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    sms: int | None = None,
    library: Path | str | None = None,
    tuning: Tuning | None = None,
) -> Connections:
    """Open a communicator for each configuration of the layers in a module, and give it to them.

    Collective over `group`: all ranks call it with the same layers, after the module is where it computes. Layers of
    equal configurations share a communicator of the group, also with layers connected before, unless `sms` is given and
    it was opened with another; `library` and `tuning` count where one is opened. A layer that was not connected does
    this in its first call outside of compiled code and of CUDA graph capture: for the group of equal layers that are
    connected, else for the default one. After `EPTimeout` call `disconnect` first, on all ranks.

    With `world_size` 1 there needs to be no process group; the communicator is on the layer's device.

    Args:
        module: contains a `MoELayer`, or is one.
        group, library, tuning: as of `cute_ep.connect`.
        sms: as there; None: with several processes all but 8 of the GPU's, which NCCL kernels of FSDP or DDP need.

    Returns:
        What was opened now.

    Raises:
        EPConfigError: no layer is in the module, there is no process group, a layer is not on this process's device, or
            as `cute_ep.connect`.
        EPError: a round of a communicator that layers have open failed.
        VariantMissing, EPError: as `cute_ep.connect`.
    """
    layers = list(connected_in(module))
    if not layers:
        raise EPConfigError(f"module = {type(module).__name__}: must be or contain a MoELayer")
    check_member(group)
    options = {"sms": sms, "library": library, "tuning": tuning}
    origin = _Origin(None if group is None or group is dist.group.WORLD else weakref.ref(group), options)
    opened_now = []
    for layer in layers:
        communicator, is_new = _find_or_open(layer.cfg, layer.place(), group, options)
        opened_now += [communicator] * is_new
        layer.attach(communicator)
        layer._origin = origin
    return Connections(opened_now)


def disconnect() -> None:
    """Close all communicators of layers, also those that first calls opened, on all ranks; before
    `destroy_process_group`."""
    POOLS.close()
    for pool in list(_ALONE.values()):
        pool.close()


def opened() -> list[EPCommunicator]:
    """What `connect` and first calls have opened, pool by pool."""
    return [one for pool in _pools() for one in pool.communicators]


def _pools() -> list[Pool]:
    return [*POOLS, *_ALONE.values()]


def connected_in(module: torch.nn.Module) -> Iterator[Connected]:
    """The layers in a module, in the order of its registration."""
    return (one for one in module.modules() if isinstance(one, Connected))


def _find_or_open(
    cfg: EPConfig, device: torch.device, group: dist.ProcessGroup | None, options: dict[str, Any]
) -> tuple[EPCommunicator, bool]:
    """A communicator for layers, and whether it was opened now.

    Ranks decide alike whether to open one: they give equal `sms`, but may have different libraries and tunings.
    """
    if cfg.world_size == 1:
        with CALLING:  # threads find what another one opens
            if device not in _ALONE:
                _ALONE[device] = LocalPool([device])
            return _in_pool(_ALONE[device], cfg, device, _nothing, all_sms, **options)
    if not dist.is_initialized():
        raise EPConfigError(
            f"cfg.world_size = {cfg.world_size}: needs a process group of as many ranks, one process each; start "
            "them with torchrun and call torch.distributed.init_process_group first, or use world_size = 1"
        )
    check = partial(_check_place, cfg, device)
    return _in_pool(POOLS.of(group or dist.group.WORLD), cfg, device, check, sms_beside_nccl, **options)


def _in_pool(
    pool: Pool,
    cfg: EPConfig,
    device: torch.device,
    check: Callable[[], None],
    opening: Opening,
    *,
    sms: int | None = None,
    **options: Any,
) -> tuple[EPCommunicator, bool]:
    """`_find_or_open` in a pool; check, opening: of `Pool.open`."""
    found = pool.find(cfg, sms, layer_on=device)
    is_new = found is None
    if found is None:
        if any(one.cfg == cfg for one in pool.communicators):
            check()  # before ranks meet: the others may have found theirs, and do not come
        if pool.capturing():
            raise EPError("a layer is not connected: call cute_ep.nn.connect(model) before a CUDA graph is captured")
        found = pool.open(cfg, sms, opening, check, **options)
        LOG.info("connected %r", found.first)
    if found.first.failed:
        raise EPError(f"{found.first!r}: a round failed; call cute_ep.nn.disconnect() first, on all ranks")
    return found.first, is_new


def _nothing() -> None:
    pass


def _group_of_equals(cfg: EPConfig, device: torch.device) -> dist.ProcessGroup | None:
    """Whose open communicator a layer that was never connected can use; None: there is none. EPConfigError: several
    groups have one."""
    groups = [pool.group for pool in POOLS if pool.find(cfg, layer_on=device) is not None]
    if len(groups) > 1:
        raise EPConfigError(
            f"{len(groups)} process groups have layers of {cfg}: must be one for a layer that was not connected; call "
            "cute_ep.nn.connect(model, group), on all ranks"
        )
    return groups[0] if groups else None


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows a process group."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _check_place(cfg: EPConfig, device: torch.device) -> None:
    """EPConfigError unless a rank of several can be on a device."""
    if device != (here := own_device()):
        raise EPConfigError(
            f"device = {device}: must be {here}, the current device, for a layer of {cfg.world_size} ranks; move the "
            "layer there, or call torch.cuda.set_device with the layer's device"
        )
