"""torchtitan 0.3.0's FSDP with torch before 2.13, which lacks names that it imports, and modules whose parameters have
meshes of their own: those are sharded by themselves first. Compiled models cannot be sharded like this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

OLDER = not hasattr(fsdp, "DataParallelMeshDims")
"""Whether `adapt` has anything to do."""


class Placed(NamedTuple):
    placement: Any
    mesh_info: Any


def adapt() -> None:
    """Before modules of torchtitan that shard models are imported."""
    fsdp.DataParallelMeshDims = Placed  # type: ignore[attr-defined, misc, assignment]
    _fsdp_common.ShardPlacementResult = Placed  # type: ignore[attr-defined, misc, assignment]
    torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    mesh_info: Callable[..., Any] = _fsdp_init._get_mesh_info
    _fsdp_init._get_mesh_info = lambda mesh, _=None: mesh_info(mesh)  # type: ignore[attr-defined]
    from torchtitan.distributed import fsdp as titan

    shard = titan.fully_shard

    def fully_shard(module: nn.Module, *, mesh: Any, shard_placement_fn: Any = None, **options: Any) -> Any:
        for child in list(module.modules()) if shard_placement_fn is not None else []:
            own = [shard_placement_fn(one) for one in child.parameters(recurse=False)]
            if own and own[0].mesh_info.mesh != mesh:
                to = own[0]
                shard(child, mesh=to.mesh_info.mesh, shard_placement_fn=lambda _, to=to: to.placement, **options)
        return shard(module, mesh=mesh, **options)

    titan.fully_shard = fully_shard
