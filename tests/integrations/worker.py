"""A rank of expert parallel models in a process of its own: `python -m tests.integrations.worker STORE RANK WORLD
MODELS`, on GPUs if there are. MODELS is a folder with saved models, each named as its type."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from cute_ep.api.errors import EPConfigError
from cute_ep.integrations.common import checks, pools
from cute_ep.integrations.transformers import close, experts
from tests.integrations.models import distance, text, trained
from tests.processes import join_group

ROUNDING = 2.0**-8
LAYERS = 2


def local(one: Any) -> torch.Tensor:
    """A rank's part of a sharded tensor."""
    return one.to_local() if hasattr(one, "to_local") else one


def send_all_to_the_first_rank(model: Any) -> None:
    """Every token of the first layer to its first experts, so that other ranks have no rows."""
    experts = model.model.layers[0].mlp.experts
    forward = experts.forward
    experts.forward = lambda x, ids, weights: forward(
        x, torch.arange(ids.shape[1], device=x.device).expand_as(ids).contiguous(), weights
    )


def check(folder: Path, rank: int, sizes: dict[str, int], *, same_batch: bool, **options: str) -> None:
    """Logits and gradients are those of transformers' own implementation, with all batches as large as each other, with
    one of a token, with more tokens than before, and with no rows for some ranks; `generate` gives the same tokens.
    `options`: of `from_pretrained`, for the plan of cute_ep."""
    made = {}
    for name in ("all_to_all", "cute_ep"):
        config = DistributedConfig(**sizes, ep_implementation=name)
        given = {"distributed_config": config, "dtype": torch.float32} | (options if name == "cute_ep" else {})
        model = AutoModelForCausalLM.from_pretrained(folder, **given).eval()
        results = []
        for length in ((5, 5), (9, 1), (3, 12)):
            ids = text(2, length[0 if same_batch else rank % 2]).to(model.device)
            logits, gradients = trained(model, ids)
            results.append((local(logits), {name: local(one) for name, one in gradients.items()}))
        with torch.no_grad():
            results.append((model.generate(text(2, 4).to(model.device), max_new_tokens=3, do_sample=False), {}))
        send_all_to_the_first_rank(model)
        logits, gradients = trained(model, text(2, 4).to(model.device))
        results.append((local(logits), {name: local(one) for name, one in gradients.items()}))
        made[name] = results
    for number, (got, wanted) in enumerate(zip(made["cute_ep"], made["all_to_all"], strict=True)):
        where = f"{folder.name}, {sizes}, pass {number}"
        assert distance(got[0], wanted[0]) <= 4 * LAYERS * ROUNDING, where
        assert got[1].keys() == wanted[1].keys(), where
        scale = max([one.norm().item() for one in wanted[1].values()], default=0.0)
        for name, gradient in wanted[1].items():
            off = distance(got[1][name], gradient, 1e-2 * scale)
            assert off <= 4 * LAYERS * ROUNDING, f"{where}: {name} is off by {off}"


def main(store: Path, rank: int, world: int, models: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    join_group(store, rank, world)
    checks.LEAST_TOKENS = 1  # so that more tokens than before connect again
    with mock.patch.object(experts, "run", wraps=experts.run) as by_rows:
        for folder in sorted(models.iterdir()):
            both = {"experts_implementation": "cute_ep"}  # is for `attach`, and has no effect here
            check(folder, rank, {"fsdp_size": world, "ep_size": world}, same_batch=False, **both)
            if AutoConfig.from_pretrained(folder).base_model_tp_plan:
                check(folder, rank, {"tp_size": world, "ep_size": world}, same_batch=True)
    assert by_rows.called
    unknown = mock.patch.object(experts, "check_experts", side_effect=EPConfigError("unknown"))
    with unknown as asked:  # experts that compute themselves
        check(models / "gpt_oss", rank, {"fsdp_size": world, "ep_size": world}, same_batch=False)
    assert asked.called
    assert pools.SHARED
    close()
    assert not pools.SHARED
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
