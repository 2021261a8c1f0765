"""Arguments of FlashInfer's interfaces: what they are called, their rules, and how rows travel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep import EPConfigError, EPInputError
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.api.types import FormatName
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import FLOATS, Names, as_rows, require

PARAMS: Names = {
    "hidden": "params.hidden_size",
    "num_experts": "params.num_experts",
    "top_k": "params.top_k",
    "max_tokens_per_rank": "params.max_tokens_per_rank",
    "world_size": "bootstrap.world_size",
    "timeout_s": "config.timeout_s",
    "block_rows": "params.max_tokens_per_rank",
}


class Arguments(NamedTuple):
    """What the interface that was called names the arguments of dispatch and combine, and sizes and options."""

    rows: str = "hidden_states"
    scales: str = "hidden_states_scale"
    ids: str = "topk_ids"
    weights: str = "topk_weights"
    most: str = "max_tokens_per_rank"
    output: str = "expert_output"
    sizes: Names = PARAMS

    def check(
        self,
        given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
        stride: int,
        limits: tuple[int, int],
        device: torch.device,
    ) -> None:
        """EPInputError unless rows, scales, ids and weights can be sent, `stride` rows a source; `limits`: the most
        rows, and entries of a token."""
        rows, scales, ids, weights = given
        most, top_k = limits
        checks.integer(self.most, stride, 1, most)
        checks.given(self.rows, rows, shape=(None, None), device=device)
        tokens = rows.shape[0]
        require(tokens <= stride, "{}.shape[0] = {}: must not exceed {} = {}", self.rows, tokens, self.most, stride)
        entries = tokens, top_k
        checks.given(self.ids, ids, shape=entries, dtype=checks.ID_TYPES, device=device)
        if weights is not None:
            checks.given(self.weights, weights, shape=entries, dtype=FLOATS, device=device)
        if scales is not None:
            checks.given(self.scales, scales, shape=(tokens, None), device=device)

    def as_sent(
        self, payload: torch.Tensor, scale: torch.Tensor | None, hidden: int
    ) -> tuple[FormatName, torch.Tensor, torch.Tensor | None]:
        """The format that has rows of this size, and rows and scale factors in its types. EPInputError: none has."""
        size = payload.shape[1] * payload.itemsize
        factors = 0 if scale is None else scale.shape[1] * scale.itemsize
        if scale is None and payload.itemsize == 2 and size <= 2 * hidden:
            wide = payload.view(torch.bfloat16)
            if size < 2 * hidden:
                wide = torch.nn.functional.pad(wide, (0, hidden - payload.shape[1]))
            return "bf16", as_rows(wide), None
        if size == hidden and factors in (0, hidden // 32):
            empty = (len(payload), hidden // 32)
            bits = payload.new_zeros(empty, dtype=torch.uint8) if scale is None else _bytes(scale)
            return "mxfp8", as_rows(payload).view(torch.float8_e4m3fn), bits
        kinds: dict[int, FormatName] = {hidden // 32: "mxfp4", hidden // 16: "nvfp4"}
        if 2 * size == hidden and scale is not None and factors in kinds:
            return kinds[factors], as_rows(payload).view(torch.uint8), _bytes(scale)
        raise EPInputError(
            f"{self.rows}, {self.scales}: have {size} and {factors} bytes a row: must be as dispatch documents them "
            f"for rows of {hidden} elements"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return with_plain_strides(tensor.contiguous()).view(torch.uint8)


def group_of(group: dist.ProcessGroup | None, rank: int, size: int, names: str) -> dist.ProcessGroup:
    """The process group of the ranks, the default one for None. EPConfigError: it is not of this rank and size, which
    arguments of these names have."""
    if group is None:
        rule = "process_group = None: needs a default group, call torch.distributed.init_process_group first"
        require(dist.is_initialized(), rule, error=EPConfigError)
        group = dist.group.WORLD
    checks.group("process_group", group)
    found, rule = (group.rank(), group.size()), "{} = {}, {}: must be those of the process group, {}, {}"
    require(found == (rank, size), rule, names, rank, size, *found, error=EPConfigError)
    return group
