"""The calls of `flashinfer.comm.MoeAlltoAll` over `CuteEPCommunication`, for code that holds that class
(docs/flashinfer.md). What it takes as a list of payloads are a token's row, its scale factors, ids and weights here."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams

from cute_ep import EPConfigError, EPError
from cute_ep.api.config import is_integer
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import Names, demand, named_config, require
from cute_ep.integrations.flashinfer.communication import Arguments, CuteEPCommunication, group_of
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.runtime.group_pool import own_device

SIZES: Names = {
    "hidden": "hidden_size",
    "max_tokens_per_rank": "max_num_tokens",
    "world_size": "mapping.moe_ep_size",
    "block_rows": "max_num_tokens",
}
ARGUMENTS = Arguments(
    "input_payloads[0]",
    "the scale factors of input_payloads",
    "token_selected_experts",
    "the router weights of input_payloads",
    "runtime_max_tokens_per_rank",
    "payload",
    SIZES,
)
ORDER = "hidden states, their scale factors if any, token_selected_experts, router weights if any"
"""What `input_payloads` are."""


class MoeAlltoAll:
    """One rank's dispatch and combine, in place of FlashInfer's class of this name. What is said of
    `CuteEPCommunication` holds here, too, also of errors; the first dispatch of rows of another size is collective.
    Arguments that are not named here have no effect.

    Args:
        mapping: FlashInfer's Mapping, of which `moe_ep_rank` and `moe_ep_size` are read.
        max_num_tokens: most tokens of a rank in a call.
        hidden_size: elements of a row; None: those of the first dispatch, which then connects.
        mnnvl_config: its `comm_backend` has the process group of the ranks; None: the default group.
        eplb_stats_num_experts, enable_rank_mask: must be 0, False (EPConfigError).
    """

    eplb_gathered_stats = None

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        rule = "eplb_stats_num_experts = {}: must be 0, statistics are not gathered"
        demand(not eplb_stats_num_experts, rule, eplb_stats_num_experts)
        demand(not enable_rank_mask, "enable_rank_mask = True: must be False, all ranks take part")
        rule = "mapping = {}: must be FlashInfer's Mapping, with {}"
        for name in ("moe_ep_rank", "moe_ep_size"):
            demand(hasattr(mapping, name), rule, type(mapping).__name__, name)
        self.ep_rank, self.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        sizes = 128 if hidden_size is None else hidden_size, num_experts, top_k, max_num_tokens, self.ep_size
        named_config(SIZES, sizes, error=EPConfigError, block_rows=max_num_tokens, row_order=RANK_MAJOR)
        backend_group = getattr(getattr(mnnvl_config, "comm_backend", None), "_group", None)
        self._group = group_of(backend_group, self.ep_rank, self.ep_size, "mapping.moe_ep_rank, mapping.moe_ep_size")
        self._made: dict[int, CuteEPCommunication] = {}
        self._round: tuple[CuteEPCommunication, int] | None = None
        if hidden_size is not None:
            self._communication(hidden_size, "hidden_size")

    @torch.no_grad()
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Send each token once to every rank that has one of its experts.

        Args:
            token_selected_experts: [T, top_k] int32 or int64. -1 and `invalid_token_expert_id`, if it is no expert's,
                mask an entry. Copied.
            input_payloads: hidden states, scale factors, `token_selected_experts` itself, and router weights, in this
                order, as of `CuteEPCommunication.dispatch`; only hidden states are needed.
            runtime_max_tokens_per_rank: rows for each source, the same on all ranks, at least T.
            invalid_token_expert_id: what ids become where this rank has not the expert, or no token the row; None: -1.
            expert_id_payload_index: where `input_payloads` has `token_selected_experts`; None: looked for.
            eplb_local_stats, active_rank_mask: must be None.

        Returns:
            A new tensor for each payload, [ep_size, runtime_max_tokens_per_rank, columns] of its type, rows as of
            `CuteEPCommunication.dispatch`. Ids are of the whole model; weights are 0 where ids are invalid.
        """
        for one in self._made.values():
            one.raise_found()
        if self._round is not None:
            raise EPError("dispatch: the one before must have its combine first, or be given up with give_up()")
        checks.absent(eplb_local_stats=eplb_local_stats, active_rank_mask=active_rank_mask)
        checks.given("token_selected_experts", token_selected_experts, shape=(None, self.top_k), dtype=checks.ID_TYPES)
        scales_at, ids_at, weights_at = self._places(token_selected_experts, input_payloads, expert_id_payload_index)
        rows, most = input_payloads[0], runtime_max_tokens_per_rank
        scales = None if scales_at is None else input_payloads[scales_at]
        weights = None if weights_at is None else input_payloads[weights_at]
        invalid = -1 if invalid_token_expert_id is None else invalid_token_expert_id
        require(is_integer(invalid), "invalid_token_expert_id = {!r}: must be an integer or None", invalid)
        limits = self.max_num_tokens, self.top_k
        ARGUMENTS.check((rows, scales, token_selected_experts, weights), most, limits, own_device())
        communication = self._communication(_elements(rows, scales), "elements of a row of input_payloads[0]")
        ids = token_selected_experts
        if not -1 <= invalid < self.num_experts:
            ids = ids.masked_fill(ids == invalid, -1)
        got = communication.dispatch(rows, ids, weights, hidden_states_scale=scales, max_tokens_per_rank=most)
        self._round = communication, most
        ids = got.topk_ids.masked_fill(got.topk_ids < 0, invalid)
        came = {0: got.hidden_states, scales_at: got.hidden_states_scale, ids_at: ids, weights_at: got.topk_weights}
        return [came[place].to(sent.dtype).view(self.ep_size, most, -1) for place, sent in enumerate(input_payloads)]

    @torch.no_grad()
    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: Any = None,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `CuteEPCommunication.combine`, of `payload`, [ep_size, runtime_max_tokens_per_rank, hidden], to `output`,
        in bfloat16 only. `runtime_max_tokens_per_rank` must be that of the dispatch, `output_scales` and
        `active_rank_mask` None, `use_low_precision` False."""
        require(output_dtype in (None, torch.bfloat16), "output_dtype = {}: must be torch.bfloat16", output_dtype)
        require(not use_low_precision, "use_low_precision = True: must be False, rows come home in bfloat16")
        checks.absent(output_scales=output_scales, active_rank_mask=active_rank_mask)
        communication, shape = self._outstanding("combine", runtime_max_tokens_per_rank)
        checks.given("payload", payload, shape=shape)
        if output is not None:
            checks.given("output", output, dtype=torch.bfloat16)
        total = communication.combine(payload, output=output)
        self._round = None
        return total

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """New memory for experts to write to, [ep_size, runtime_max_tokens_per_rank, hidden_size] bfloat16, sizes as in
        the dispatch. Combine copies no payload, so any other memory does as well."""
        communication, shape = self._outstanding("get_combine_payload_tensor", runtime_max_tokens_per_rank)
        require(hidden_size == shape[2], "hidden_size = {}: must be {}, as in the dispatch", hidden_size, shape[2])
        require(dtype == torch.bfloat16, "dtype = {}: must be torch.bfloat16, rows come home in it", dtype)
        return torch.empty(shape, dtype=dtype, device=communication.device)

    def give_up(self) -> None:
        """As of `CuteEPCommunication`; FlashInfer's class has no such call."""
        self._round = None
        for one in self._made.values():
            one.give_up()

    def synchronize(self) -> None:
        """As of `CuteEPCommunication`; FlashInfer's class has no such call."""
        for one in self._made.values():
            one.synchronize()

    def destroy(self) -> None:
        """Give up the communicators, which close with the last object of the process group; then collective.
        FlashInfer's class has no such call: without it they stay open."""
        self._round = None
        for one in self._made.values():
            one.destroy()

    def _communication(self, hidden: int, name: str) -> CuteEPCommunication:
        """That for rows of so many elements, called `name`; connects where the group has none, then collective."""
        if hidden not in self._made:
            bootstrap = BootstrapConfig(world_size=self.ep_size, rank=self.ep_rank, process_group=self._group)
            params = MoEEpCommParams(self.num_experts, self.top_k, self.max_num_tokens, hidden)
            names = ARGUMENTS._replace(sizes={**SIZES, "hidden": name})
            self._made[hidden] = CuteEPCommunication(bootstrap, params, names=names)
        return self._made[hidden]

    def _outstanding(self, call: str, tokens: int) -> tuple[CuteEPCommunication, tuple[int, int, int]]:
        """The dispatch that waits for its combine, and the shape of rows that it takes."""
        if self._round is None:
            raise EPError(f"{call}: there must be a dispatch first")
        communication, most = self._round
        require(tokens == most, "runtime_max_tokens_per_rank = {}: must be {}, as in the dispatch", tokens, most)
        return communication, (self.ep_size, most, communication.params.hidden_size)

    def _places(
        self, ids: torch.Tensor, payloads: list[torch.Tensor], index: int | None
    ) -> tuple[int | None, int | None, int | None]:
        """Where `payloads` has scale factors, ids and weights, by ORDER."""
        given = isinstance(payloads, list | tuple)
        require(given, "input_payloads = {}: must be a list of {}", type(payloads).__name__, ORDER)
        require(len(payloads) > 0, "input_payloads = []: must be {}", ORDER)
        for place, one in enumerate(payloads):
            checks.given(f"input_payloads[{place}]", one)
        own = ids.dtype, ids.shape, ids.data_ptr()
        same = [place for place, one in enumerate(payloads) if place and (one.dtype, one.shape, one.data_ptr()) == own]
        rule = "expert_id_payload_index = {}: must be that of token_selected_experts"
        require(index is None or index in same, rule, index)
        at = index if index is not None else same[0] if same else len(payloads)
        before, after = list(range(1, at)), list(range(at + 1, len(payloads)))
        rule = "input_payloads: has {} tensors: must be {}"
        require(len(before) <= 1 and len(after) <= 1, rule, len(payloads), ORDER)
        for place in after:
            one = payloads[place]
            good = one.is_floating_point() and one.shape == ids.shape
            rule = "input_payloads[{}]: is {} {}: must be router weights {} of a floating type"
            require(good, rule, place, one.dtype, tuple(one.shape), tuple(ids.shape))
        return before[0] if before else None, at if same else None, after[0] if after else None


def _elements(rows: torch.Tensor, scales: torch.Tensor | None) -> int:
    """Of a row whose columns may be bytes of two elements."""
    columns = rows.shape[-1]
    if rows.itemsize > 1 or rows.dtype == torch.float8_e4m3fn:
        return columns
    bytes_of_8 = scales is None or scales.shape[-1] * scales.itemsize * 32 == columns
    return columns if bytes_of_8 else 2 * columns
