"""`Buffer`, with the calls of DeepEP V1: it checks arguments and options, and leaves the work to the two modes.

All work runs on the caller's current stream, so `async_finish` overlaps nothing by itself: the event that a call
returns is recorded behind its kernels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig, memory_bytes
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.integrations.connections import Connections
from cute_ep.integrations.deep_ep.calls import (
    Rows,
    absent,
    begin,
    check_experts,
    check_payload,
    current_stream,
    finished,
    require,
    without_gradients,
)
from cute_ep.integrations.deep_ep.events import Config, EventHandle, EventOverlap
from cute_ep.integrations.deep_ep.low_latency import LowLatency
from cute_ep.integrations.deep_ep.normal import (
    GivenLayout,
    Handle,
    NormalMode,
    Route,
    first_rows,
    joined,
    prefix_matrix,
    routes_of,
)


class Buffer(LowLatency):
    """One rank's end of DeepEP V1's interface, a process per rank, all on one machine.

    Communicators are connected when a call first needs one, so the first call of each kind is collective and waits on
    the host: make it before capturing a CUDA graph. Calls compute no gradients and drop those of their arguments, as
    DeepEP's do.

    Args:
        group: an initialised process group; each rank has a GPU of its own, or none has one.
        num_nvl_bytes, num_rdma_bytes: kept as attributes. Memory is allocated when it is needed, whatever they say.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, explicitly_destroy: without
            effect; every buffer has both modes, and only `destroy` gives memory back.
        enable_shrink: must be False.
        comm: must be None.

    Attributes:
        rank, group_size, group: this process's rank in the group, how many there are, the group.
        num_sms: SMs that kernels of normal mode may take, of communicators connected from then on.

    Raises:
        EPConfigError: `group`, `comm` or `enable_shrink` cannot be served.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object | None = None,
    ) -> None:
        if group is None or comm is not None:
            raise EPConfigError("group: must be a torch.distributed process group, and comm None (there is no MPI)")
        if enable_shrink:
            raise EPConfigError("enable_shrink = True: must be False, a group keeps all its ranks")
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        connections = Connections(group)
        super().__init__(connections)
        self.rank, self.group_size = connections.rank, connections.size
        self._normal = NormalMode(connections, lambda: Buffer.num_sms)

    def destroy(self) -> None:
        """Give all memory back; collective. Later calls would connect again."""
        self._connections.close()

    # ---- facts

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 rows are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number."""
        if new_num_sms % 2:
            raise EPInputError(f"new_num_sms = {new_num_sms}: must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """What the current stream has been given so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that a bfloat16 communicator of low-latency mode takes with 8 experts per token, for information."""
        experts = min(8, num_experts)
        return memory_bytes(EPConfig(hidden, num_experts, experts, num_max_dispatch_tokens_per_rank, num_ranks))

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that calls run on: the current one. EPError: there is no GPU."""
        return current_stream(self._connections.device)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A config, which no call has a use for."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # ---- normal mode

    @without_gradients
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """What `dispatch` must be told about a routing.

        Args:
            topk_idx: [T, K] int64 expert ids, -1 masks.

        Returns:
            [R] int32 tokens by rank; None; [E] int32 entries by expert; [T, R] bool, whether a token goes to a rank;
            the event.

        Raises:
            EPInputError: the experts do not fit the ranks, or `topk_idx` is no matrix.
        """
        begin(previous_event, async_finish, allocate_on_comm_stream)
        check_experts(num_experts, self.group_size)
        require(topk_idx.dim() == 2, "topk_idx.dim() = {}: must be 2", topk_idx.dim())
        routes = GivenLayout.of(topk_idx, num_experts, self.group_size)
        return routes.by_rank, None, routes.by_expert, routes.goes, finished(async_finish)

    @without_gradients
    def dispatch(
        self,
        x: Rows,
        handle: tuple | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Send each token once to every rank that has one of its experts. The host waits for all ranks' numbers of
        tokens, except with `num_worst_tokens` or with a handle.

        Args:
            x: [T, hidden] bfloat16, or (float8_e4m3fn [T, hidden], scale factors [T, n] float32 or int32 of any
                strides, n <= hidden / 128), which travel unchanged.
            handle: what an earlier dispatch of as many tokens returned: they go the same ways again. None of the layout
                and top-k arguments is read then.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from `get_dispatch_layout`. Tokens go where
                `is_token_in_rank` says, whatever entries they have.
            topk_idx: [T, K] int64 expert ids, -1 masks; beside `topk_weights`, or neither.
            topk_weights: [T, K] float32.
            expert_alignment: multiple to which numbers in the returned list are rounded up.
            num_worst_tokens: rows to return whatever arrives, the same on all ranks, at least R times the tokens of any
                rank.
            num_tokens_per_rdma_rank, config: without effect.

        Returns:
            Rows [n, hidden] by source rank, then token, as `x`; [n, K] int64 local expert ids, -1 elsewhere; [n, K]
            float32 weights, 0 there; entries of each local expert; the handle; the event. With `num_worst_tokens` ids
            behind the last row are -1, and the list is empty. With a handle all but rows and event are None.

        Raises:
            EPInputError: an argument breaks its rule.
            EPTimeout: a rank does not come.
        """
        begin(previous_event, async_finish, allocate_on_comm_stream)
        payload, scales = x if isinstance(x, tuple) else (x, None)
        check_payload(payload, scales)
        tokens = payload.shape[0]
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "topk_idx: must be None with a handle")
            route = _handle(handle).route
            own = route.routes.ids.size(0)
            require(tokens == own, "x.shape[0] = {}: must be {}, as of the handle", tokens, own)
            rows, factors, _ = self._normal.dispatch(payload, scales, None, route)
            return rows if factors is None else (rows, factors), None, None, None, None, finished(async_finish)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise EPInputError(
                "num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: must be what get_dispatch_layout "
                "returned, without a handle"
            )
        require((topk_idx is None) == (topk_weights is None), "topk_idx, topk_weights: must both be given, or neither")
        shape = (tokens, self.group_size)
        require(is_token_in_rank.shape == shape, "is_token_in_rank.shape: must be {}", shape)
        experts = num_tokens_per_expert.shape[0]
        check_experts(experts, self.group_size)
        room, most = num_worst_tokens, -(-num_worst_tokens // self.group_size)
        if num_worst_tokens:
            require(topk_idx is not None, "num_worst_tokens = {}: must be 0 without topk_idx", room)
            rule = "num_worst_tokens = {}: must be at least {} * {} tokens"
            require(tokens <= most, rule, room, self.group_size, tokens)
        known = GivenLayout.known(is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert, topk_idx)
        words = joined(num_tokens_per_rank, num_tokens_per_expert, tokens) if known is None else known.counts
        counting = self._normal.counting(words.size(0))
        counting.exchange(words)
        prefix, received = prefix_matrix(counting.table), []
        if not num_worst_tokens:
            counts = counting.wait(experts)
            room, most, received = counts.arriving, counts.tokens, counts.padded(expert_alignment)
        routes, of = (known, experts) if known is not None else routes_of(is_token_in_rank, topk_idx, experts)
        route, sent = Route(routes, of, most, room), topk_weights
        if topk_weights is not None and routes.ids.shape != topk_weights.shape:
            sent = torch.nn.functional.pad(topk_weights, (0, routes.ids.shape[1] - topk_weights.shape[1]))
        rows, factors, batch = self._normal.dispatch(payload, scales, sent, route, exact=not num_worst_tokens)
        ids = weights = None
        if topk_idx is not None:
            ids, weights = self._normal.entries(batch, room, topk_idx.shape[1])
        made = Handle(prefix, None, None, first_rows(batch.src_info, room).select(1, 0), is_token_in_rank, None)
        made.route = route
        got = rows if factors is None else (rows, factors)
        return got, ids, weights, received, made, finished(async_finish)

    @without_gradients
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows home and add them up over ranks, without weights: in float32, rounded once.

        Args:
            x: [n, hidden] bfloat16, in the order of the dispatch's rows.
            handle: what that dispatch returned.
            topk_weights: [n, K] float32 to add up as well; None: there are none.
            bias: up to two [T, hidden] bfloat16 to add.
            config: without effect.

        Returns:
            [T, hidden] bfloat16; [T, K] float32, or None; the event.

        Raises:
            EPInputError: an argument breaks its rule.
        """
        begin(previous_event, async_finish, allocate_on_comm_stream)
        route = _handle(handle).route
        require(x.dtype == torch.bfloat16, "x.dtype = {}: must be torch.bfloat16", x.dtype)
        require(len(x) == route.rows, "x.shape[0] = {}: must be {}, the rows of the dispatch", len(x), route.rows)
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        out = self._normal.combine(x.contiguous(), route, biases)
        weights = None if topk_weights is None else self._normal.combine_weights(topk_weights, route)
        return out, weights, finished(async_finish)

    # ---- what there is not

    internode_dispatch, internode_combine = absent("internode_dispatch"), absent("internode_combine")
    get_local_buffer_tensor = absent("get_local_buffer_tensor")
    low_latency_update_mask_buffer = absent("low_latency_update_mask_buffer")
    low_latency_query_mask_buffer = absent("low_latency_query_mask_buffer")
    low_latency_clean_mask_buffer = absent("low_latency_clean_mask_buffer")


def _handle(handle: tuple) -> Handle:
    if not isinstance(handle, Handle):
        raise EPInputError(f"handle = {type(handle).__name__}: must be what dispatch returned, not a copy of its parts")
    return handle
