"""`Buffer`, with the calls of DeepEP V1: it checks arguments and options, and leaves the work to the two modes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_ep import EPInputError, memory_bytes
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import demand, require, roomy_config
from cute_ep.integrations.common.kinds import Kinds, kind_of
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.calls import Config, EventHandle, EventOverlap, Rows, without_gradients
from cute_ep.integrations.deep_ep.layout import GivenLayout, Layout, check_layout, routes_of, tokens_by_node
from cute_ep.integrations.deep_ep.low_latency import NAMES, LowLatency
from cute_ep.integrations.deep_ep.normal import Bias, NormalMode, rows_and_entries
from cute_ep.integrations.deep_ep.route import Handle, Route
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS_PER_RANK, MAX_TOP_K
from cute_ep.runtime.counts import ENDS, memory_of_ends

HANDLE = "what dispatch returned, not a copy of its parts"
RANKS_PER_NODE = 8
"""Of DeepEP's nodes."""


class Buffer(LowLatency):
    """One rank's end of DeepEP V1's interface, a process per rank, each with a GPU of its own or none. Arguments,
    results and orders of rows are DeepEP's where a call says nothing else; options that it does not name have no
    effect. All work runs on the caller's current stream; a call's event is recorded behind its kernels. The first call
    of each kind connects: it is collective and waits on the host. Calls compute no gradients. docs/adapters.md says how
    wrong arguments and ids are told; a rank that does not come is an EPTimeout.

    `comm` must be None, `enable_shrink` False (EPConfigError). `rank` and `group_size` are this process's rank in the
    group and how many there are. `num_sms`: SMs for kernels of normal mode, of communicators connected from then on.
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
        rule = "group: must be a torch.distributed process group, and comm None (there is no MPI)"
        demand(group is not None and comm is None, rule)
        demand(not enable_shrink, "enable_shrink = True: must be False, a group keeps all its ranks")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        super().__init__(group)
        self.rank, self.group_size = self._pool.rank, self._pool.size
        self._normal = NormalMode(self._pool, lambda device: Buffer.num_sms, self._words)
        self._kinds = Kinds()

    def destroy(self) -> None:
        """Give all memory back; collective. Earlier hooks and handles are of no use then; later calls connect again."""
        self._halves.forget()
        self._pool.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 rows are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number of SMs that the GPU has."""
        checks.sms("new_num_sms", new_num_sms, error=EPInputError)
        require(new_num_sms is not None and new_num_sms % 2 == 0, "new_num_sms = {}: must be even", new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """What the current stream has been given so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that a bfloat16 communicator of low-latency mode takes with top-8; for information. More ranks than a
        node may have are counted on nodes of 8."""
        checks.integer("num_experts", num_experts, 1, MAX_EXPERTS)
        most = num_max_dispatch_tokens_per_rank
        checks.integer("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS_PER_RANK)
        names = {**NAMES, "hidden": "hidden", "world_size": "num_ranks"}
        sizes = hidden, num_experts, min(8, num_experts), most, num_ranks
        nodes = RANKS_PER_NODE if checks.is_integer(num_ranks) and num_ranks > MAX_RANKS else None
        return memory_bytes(roomy_config(names, sizes, ranks_per_node=nodes))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A config, which no call has a use for."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @without_gradients
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """What `dispatch` must be told about a routing: of [T, K] int64 expert ids, -1 masks, [R] int32 tokens by rank;
        over nodes [nodes] int32 tokens by node, else None; [E] int32 entries by expert; [T, R] bool, whether a token
        goes to a rank; the event."""
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        kind = (kind_of(topk_idx), num_experts) if type(num_experts) is int else None
        if kind not in self._kinds:
            calls.check_experts(num_experts, self.group_size)
            checks.given("topk_idx", topk_idx, shape=(None, None), dtype=checks.ID_TYPES, device=self._pool.device)
            checks.integer("topk_idx.shape[1]", topk_idx.shape[1], 1, min(MAX_TOP_K, num_experts))
            self._kinds.add(kind)
        routes, goes = GivenLayout.of(topk_idx, num_experts, self.group_size)
        by_node = tokens_by_node(goes, self._normal.ranks_per_node)
        return routes.by_rank, by_node, routes.by_expert, goes, calls.finished(async_finish)

    @without_gradients
    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
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
            handle: of an earlier dispatch of as many tokens, which go the same ways again; no layout is read.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`; the second decides.
            topk_idx: [T, K], -1 masks; beside `topk_weights`, or neither.
            num_worst_tokens: rows to return whatever arrives, alike on all ranks, at least R times any rank's tokens.

        Returns:
            Rows [n, hidden] by source rank, then token, as `x`; [n, K] int64 local expert ids, -1 elsewhere, also
            behind the last row; [n, K] float32 weights, 0 there; entries of each local expert, rounded up (none with
            `num_worst_tokens`); the handle; the event. With a handle all but rows and event are None.
        """
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        mode, device, ranks, room = self._normal, self._pool.device, self.group_size, num_worst_tokens
        if handle is not None:
            sent = payload, scales = calls.check_payload(x, device)
            tokens = payload.shape[0]
            checks.most("x.shape[0]", tokens)
            require(topk_idx is None and topk_weights is None, "topk_idx: must be None with a handle")
            route = checks.kind("handle", handle, Handle, HANDLE).route
            own = route.routes.ids.shape[0]
            require(tokens == own, "x.shape[0] = {}: must be {}, as of the handle", tokens, own)
            buffers, factors = mode.dispatch((*sent, None), route, route.rows)
            (rows,) = route.by_source(buffers, ("tokens",), route.rows)
            return calls.paired(rows, factors), None, None, None, None, calls.finished(async_finish)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            names = "num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert"
            raise EPInputError(f"{names}: must be what get_dispatch_layout returned, without a handle")
        layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx
        known = GivenLayout.known(layout, ranks)
        checks.integer("expert_alignment", expert_alignment)
        checks.integer("num_worst_tokens", room, 0, ranks * MAX_TOKENS_PER_RANK)
        # with a layout that is known, what was found of such tensors is true of these
        kind = None
        if known is not None:
            kind = known.sizes.given, topk_idx is None, room, kind_of(x), kind_of(topk_weights)
        if kind not in self._kinds:
            self._check_dispatch(x, layout, topk_weights, room, known=known is not None)
        sent = payload, scales = x if isinstance(x, tuple) else (x, None)
        tokens, experts = payload.shape[0], num_tokens_per_expert.shape[0]
        routes, of = (known, experts) if known is not None else routes_of(layout, mode.nodes)
        route = Route(routes, of, max(tokens, room // ranks), room, own=known is None)
        if kind not in self._kinds:
            mode.config(payload.shape[1], route, scaled=scales is not None)  # checks sizes
            self._kinds.add(kind)
        weights = None if topk_weights is None else topk_weights.contiguous()
        if weights is not None and routes.ids.shape != weights.shape:
            weights = torch.nn.functional.pad(weights, (0, routes.ids.shape[1] - weights.shape[1]))
        counting, received, early, whole = mode.counting(routes.words), [], None, (*sent, weights)
        most = None if room else mode.room(whole, route)
        out = None if most is None else most.carve()
        ends = None if out is None else out.memory.carving
        if ends is None:
            ends = memory_of_ends(ranks, device)
        exchange = counting.exchange(routes.sent, experts, ends=ends, told=not room)
        if not room:
            if most is not None and out is not None:
                early = mode.send_early(whole, route, most, out)
            counts = exchange.wait()
            route.rows, route.tokens, received = counts.arriving, counts.tokens, counts.padded(expert_alignment)
        mode.place(route, counting)
        buffers, factors = mode.dispatch(whole, route, route.rows, exact=not room, early=early)
        if topk_idx is None:
            (rows,), ids, weights = route.by_source(buffers, ("tokens",), route.rows), None, None
        else:
            rows, ids, weights = rows_and_entries(buffers, route, topk_idx.shape[1])
        if out is not None and buffers is not out:  # sent again: what was carved first may go
            kept, ends = ends, memory_of_ends(ranks, device)
            ends.tensor(ENDS).copy_(kept.tensor(ENDS))
        made = Handle(route, ends, is_token_in_rank)
        return calls.paired(rows, factors), ids, weights, received, made, calls.finished(async_finish)

    def _check_dispatch(
        self, x: Rows, layout: Layout, topk_weights: torch.Tensor | None, room: int, *, known: bool
    ) -> None:
        """EPInputError unless `dispatch` takes these; a layout that is `known` need not be checked."""
        ranks, device, (_, goes, _, topk_idx) = self.group_size, self._pool.device, layout
        tokens = calls.check_payload(x, device)[0].shape[0]
        checks.most("x.shape[0]", tokens)
        if not known:
            check_layout(layout, ranks, self._normal.nodes, device)
        require(tokens == len(goes), "x.shape[0] = {}: must be {}, as of is_token_in_rank", tokens, len(goes))
        require((topk_idx is None) == (topk_weights is None), "topk_idx, topk_weights: must both be given, or neither")
        if topk_idx is not None and topk_weights is not None:
            checks.given("topk_weights", topk_weights, shape=topk_idx.shape, dtype=torch.float32, device=device)
        if room:
            require(topk_idx is not None, "num_worst_tokens = {}: must be 0 without topk_idx", room)
            rule = "num_worst_tokens = {}: must be at least {} * {} tokens"
            require(tokens <= room // ranks, rule, room, ranks, tokens)

    @without_gradients
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows home and add them up over ranks, without weights: in float32, rounded once. `x` is [n, hidden]
        bfloat16, in the order of the dispatch's rows, `topk_weights` [n, K] float32 to add up as well, `bias` up to two
        [T, hidden] bfloat16 to add. Returns [T, hidden] bfloat16; [T, K] float32, or None; the event."""
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        route = checks.kind("handle", handle, Handle, HANDLE).route
        home = self._normal.bring_home(x, route, bias, topk_weights, (route.rows, None))
        return *home, calls.finished(async_finish)


calls.refuse(Buffer, "internode_dispatch internode_combine get_local_buffer_tensor low_latency_update_mask_buffer")
calls.refuse(Buffer, "low_latency_query_mask_buffer low_latency_clean_mask_buffer")
