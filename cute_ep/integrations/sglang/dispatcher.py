"""The dispatcher of one layer in SGLang's format DEEPEP_V2, expanded: a row per (token, expert), expert after expert,
each expert's rows padded to 128. SGLang's runner multiplies rows by the weights that come with them. Here those are
ones and combine multiplies, in float32: rows are rounded once less, and no weights need to be gathered by row."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPConfigError, EPError
from cute_ep.api.types import FormatName
from cute_ep.integrations.common import checks, pools, versions
from cute_ep.integrations.common.blocks import PACKED, columns_first, packed_exponents
from cute_ep.integrations.common.checks import FLOATS, as_rows, demand, named_config, of_type, require
from cute_ep.integrations.common.constants import ONES
from cute_ep.integrations.common.early import early_room
from cute_ep.integrations.common.kinds import Kinds, kind_of
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK, max_rows

versions.require("sglang", (0, 5, 23), (0, 5, 24))

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.dp_attention import get_is_extend_in_batch  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import (  # noqa: E402
    DeepEPv2CombineInput,
    DeepEPv2DispatchOutput,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.moe.utils import get_deepep_v2_fp8_scale_format  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

ALIGNMENT = 128
"""Rows of an expert are padded to a multiple of this, as DeepGEMM reads them."""
TIMEOUT_S = 300.0
"""How long a rank waits for others: in a first pass they may be compiling."""
LIMIT = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
NAMES = {"hidden": "hidden_size", "top_k": "router_topk", "max_tokens_per_rank": LIMIT, "world_size": "group.size()"}
WORDS = pools.Words("topk_output.topk_ids", LIMIT)


class CuteEPDispatcher(BaseDispatcher):
    """Moves a layer's tokens to their experts and back, in place of SGLang's DeepEPv2Dispatcher.

    Layers of equal sizes share a communicator. All work runs on the current stream. One dispatch may await its combine.
    docs/adapters.md says how wrong arguments and ids are told; a rank that does not come is an EPTimeout. All ranks
    must have set SGLang's variables alike. With `use_fp8_dispatch` rows are quantised as they are sent, with a scale
    factor for each `activation_scale_block_size` elements. EPConfigError: an argument or a variable cannot be served.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        router_topk: int,
        num_experts: int,
        num_local_experts: int,
        hidden_size: int,
        params_dtype: torch.dtype,
        use_fp8_dispatch: bool,
        activation_scale_block_size: int = 128,
    ) -> None:
        super().__init__()
        checks.group("group", group)
        ranks, tokens = group.size(), envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        demand(params_dtype == torch.bfloat16, "--dtype = {}: must be bfloat16", params_dtype)
        if num_local_experts * ranks != num_experts:
            rule = "choose --ep-num-redundant-experts so that all ranks have as many"
            each = f"num_experts = {num_experts}: must be {num_local_experts} on each of {ranks} ranks"
            raise EPConfigError(f"{each}; {rule}")
        checks.integer("num_local_experts", num_local_experts, error=EPConfigError)
        checks.integer(LIMIT, tokens, 1, MAX_TOKENS_PER_RANK, error=EPConfigError)
        self._sms: int | None = envs.SGLANG_DEEPEP_V2_NUM_SMS.get() or None  # 0: SGLang sets no limit
        checks.sms("SGLANG_DEEPEP_V2_NUM_SMS", self._sms)
        fmt = _format(use_fp8_dispatch, activation_scale_block_size, hidden_size)
        self.cfg = named_config(
            NAMES, (hidden_size, num_experts, router_topk, tokens, ranks), error=EPConfigError,
            dispatch_format=fmt, timeout_s=TIMEOUT_S, row_alignment=ALIGNMENT,
            scale_layout="linear" if use_fp8_dispatch else None, zero_padding=False,
        )  # fmt: skip
        self._group, self._block = group, activation_scale_block_size
        self._packed = use_fp8_dispatch and fmt != "fp8"
        self._kinds = Kinds()  # of dispatches
        self._communicator: EPCommunicator | None = None
        self._batch: Dispatched | None = None
        self._rows = 0  # that the dispatch has returned
        self._row_bytes, self._most_rows = hidden_size * (1 if use_fp8_dispatch else 2), self.cfg.max_rows

    def prebuild(self) -> None:
        """Connect, with all ranks; SGLang calls it for the first layer when it starts. Else the first dispatch does."""
        self._connected()

    def dispatch(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput) -> DeepEPv2DispatchOutput:
        """Send tokens to their experts, and receive those of this rank's experts. In an extend batch the host waits for
        the ranks' numbers of rows: no graph can capture it. A decode batch has room for all rows that may come, and
        waits for nothing. EPError: the dispatch before has had no combine (`give_up`).

        Args:
            hidden_states: [T, hidden_size] bfloat16.
            topk_output: [T, router_topk] expert ids, int32 or int64, -1 masks, and weights of a floating type;
                unchanged until the combine has run. An id out of range masks too, and a later call tells it.

        Returns:
            `hidden_states` [N, hidden_size], bfloat16 or float8_e4m3fn; padding, and rows behind the last one, hold
            anything.
            `hidden_states_scale`: None, or [N, hidden_size / 128] float32, and where DeepGEMM reads UE8M0 [N,
            hidden_size / (4 * block)] int32, four exponents each, neighbours along N.
            `psum_num_recv_tokens_per_expert`: [local experts] int32, where each expert's rows end, without padding;
            zeros if more rows came than there was room for. `topk_weights`: [N] float32 ones. `topk_ids`: None.
        """
        ranks, cfg = pools.pool_of(self._group), self.cfg
        WORDS.raise_found(ranks)
        if self._batch is not None:
            raise EPError("dispatch: the batch of the dispatch before has not been combined; or drop it with give_up()")
        routed = getattr(topk_output, "topk_ids", None), getattr(topk_output, "topk_weights", None)
        kind = kind_of(hidden_states), kind_of(routed)
        self._kinds.once(kind, self._check, hidden_states, topk_output, ranks.device)
        tokens, communicator = hidden_states.shape[0], self._connected()
        ids = topk_output.topk_ids.contiguous()  # not narrowed, since the kernel checks them
        weights = of_type(topk_output.topk_weights, torch.float32).contiguous()
        masked, together, counts = not get_is_extend_in_batch(), 0, None
        if masked:
            together = self._tokens_of_all(tokens)
            room = max_rows(together * cfg.top_k, cfg.local_experts, ALIGNMENT)
        else:
            exchange, routes = ranks.begin_counts(ids, cfg, self._sms)
            ids = routes.ids
            room, counts = early_room(exchange, ALIGNMENT, self._most_rows, self._row_bytes)
        out = DispatchBuffers.carve(communicator.cfg, communicator.device, room)
        batch = communicator.dispatch(as_rows(hidden_states), ids, weights, out=out)
        if counts is not None:
            room = counts().rows(ALIGNMENT)
        # the runner may free rows and scale factors
        self._batch, self._rows = batch.without_rows(), room
        received = batch.buffers.first("tokens", room)
        scales = None if batch.scales is None else batch.buffers.first("scales", room)
        if scales is not None and self._packed:
            scales = columns_first(packed_exponents(scales))
        sent, place = tokens * cfg.world_size * cfg.top_k, received.device
        begins, numbers = batch.buffers.first_of(("row_offsets", "row_counts"), cfg.local_experts)
        return DeepEPv2DispatchOutput(
            hidden_states=received,
            hidden_states_scale=scales,
            topk_ids=None,
            topk_weights=torch.ones(room, dtype=torch.float32, device=place) if masked else ONES.first(room, place),
            psum_num_recv_tokens_per_expert=begins + numbers,
            is_expanded=True,
            use_masked_gemm=masked,
            expected_m=sent // cfg.num_experts + 1 if masked else 0,
            masked_max_m=min(align_up(together, ALIGNMENT), cfg.world_size * cfg.max_tokens_per_rank),
            total_expanded=room if masked else 0,
            expert_alignment=ALIGNMENT,
            activation_scale_block_size=self._block,
        )

    def _check(self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput, device: torch.device) -> None:
        """EPInputError unless dispatch takes them."""
        cfg, most = self.cfg, self.cfg.max_tokens_per_rank
        checks.given("hidden_states", hidden_states, shape=(None, cfg.hidden), dtype=torch.bfloat16, device=device)
        tokens = hidden_states.shape[0]
        require(tokens <= most, "hidden_states.shape[0] = {}: must not exceed {} = {}; raise it", tokens, LIMIT, most)
        for name, types in (("topk_ids", checks.ID_TYPES), ("topk_weights", FLOATS)):
            given, rule = getattr(topk_output, name, None), "topk_output = {}: must be StandardTopKOutput"
            require(given is not None, rule, type(topk_output).__name__)
            checks.given(f"topk_output.{name}", given, shape=(tokens, cfg.top_k), dtype=types, device=device)

    def combine(self, combine_input: DeepEPv2CombineInput) -> torch.Tensor:
        """Bring the experts' outputs home and sum them with the router weights: on each expert's rank in float32,
        rounded, then over ranks in float32, rounded.

        Takes `hidden_states` [N, hidden_size] bfloat16, in the order of the dispatch's rows, and no `routewise_layout`;
        weights are not read. Returns [T, hidden_size] bfloat16: NaN for every token with a row on a rank that had no
        room for all its rows.
        """
        WORDS.raise_found(pools.pool_of(self._group))
        batch = self._batch
        if batch is None:
            raise EPError("combine: there was no dispatch")
        checks.kind("combine_input", combine_input, DeepEPv2CombineInput, "DeepEPv2CombineInput")
        rule = "combine_input.routewise_layout: must be None, the model has to finish its rows first"
        require(combine_input.routewise_layout is None, rule)
        communicator, rows = self._communicator, combine_input.hidden_states
        if communicator is None or communicator.closed:
            raise EPError("combine: the ranks were closed after the dispatch; drop its batch with give_up()")
        shape, place = (self._rows, self.cfg.hidden), communicator.device
        checks.given("combine_input.hidden_states", rows, shape=shape, dtype=torch.bfloat16, device=place)
        total = communicator.combine(as_rows(rows), batch, mode="partial")
        self._batch = None
        return total

    def give_up(self) -> None:
        """Forget a dispatch that gets no combine, on all ranks, as where a request was aborted in between."""
        self._batch = None

    def _connected(self) -> EPCommunicator:
        """The communicator; the first call is collective."""
        if self._communicator is None or self._communicator.closed:
            self._communicator = pools.pool_of(self._group).get(self.cfg, self._sms, names=NAMES)
        return self._communicator

    def _tokens_of_all(self, tokens: int) -> int:
        """The most that all ranks together may send in a decode batch of which this one sends `tokens`. Ranks that
        share a batch (a TP group without attention DP or CP) have the same number, or parts that differ by one."""
        ranks, parallel = self.cfg.world_size, get_parallel()
        most = ranks * self.cfg.max_tokens_per_rank
        alone = parallel.attn_dp_size == parallel.attn_cp_size == 1 and parallel.tp_size == ranks
        if not alone or parallel.tp_group is None or parallel.tp_group.device_group is not self._group:
            return most
        return min(most, max(1, tokens * ranks + ranks - 1))


def _format(fp8: bool, block: int, hidden: int) -> FormatName:
    """The format whose rows DeepGEMM reads on this GPU."""
    if not fp8:
        return "bf16"
    packed = get_deepep_v2_fp8_scale_format().ue8m0
    formats: dict[int, FormatName] = {128: "fp8_pow2", 32: "mxfp8"} if packed else {128: "fp8"}
    rule, known = "activation_scale_block_size = {}: must be {} on this GPU", " or ".join(map(str, formats))
    demand(block in formats, rule, block, known)
    multiple = FORMATS[formats[block]].block * (PACKED if packed else 1)
    demand(hidden % multiple == 0, "hidden_size = {}: must be a multiple of {}", hidden, multiple)
    return formats[block]
