"""A communication backend of `flashinfer.moe_ep` over cute_ep (docs/flashinfer.md). Dispatch is one of rank-major rows
in blocks, `[source rank, position]`; combine, in partial mode, adds a token's rows over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from flashinfer import moe_ep

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPConfig, EPConfigError, EPError, EPInputError
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.api.types import FormatName
from cute_ep.integrations.common import checks, pools
from cute_ep.integrations.common.checks import FLOATS, Names, as_rows, demand, named_config, require
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.runtime.labels import mark_entries

NAME = "cute_ep"
FORMATS: dict[str | None, FormatName] = {
    None: "bf16",
    "BF16": "bf16",
    "FP8PerTensor": "mxfp8",
    "DeepSeekFp8": "mxfp8",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}
"""What rows of a `QuantFormat` travel as; quantised rows and their scale factors travel unchanged."""
Sent = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
"""Rows, their scale factors, ids and weights."""
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

    def check(self, given: Sent, stride: int, limits: tuple[int, int], device: torch.device) -> None:
        """EPInputError unless these can be sent, `stride` rows a source. `limits`: most rows, entries of a token."""
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


OWN = Arguments()


@dataclass(frozen=True)
class CuteEPConfig:
    """Options of `CuteEPCommunication`: give it to `create_communication`, or to `SplitConfig(comm=...)`. `sms`: SMs
    that kernels may take from others; None: all. `timeout_s`: seconds that a rank waits for another one."""

    sms: int | None = None
    timeout_s: float = 60.0
    backend_name: str = NAME


class CuteEPCommunication(moe_ep.MoEEpCommunication):
    """One rank's dispatch and combine, a process per rank, each with a GPU of its own or none.

    Everything runs on the caller's current stream, and nothing waits on the host. The constructor is collective, and so
    is the first dispatch in another format than `params.dispatch_format`. Calls compute no gradients. docs/adapters.md
    says how wrong arguments and ids are told; a rank that does not come is an EPTimeout, also of all later calls.
    EPError: a call has not the one before that it needs, or the object was destroyed.

    `bootstrap.process_group` None is the default group; `params.dtype` must be bfloat16 or None; `config` must be the
    same on all ranks. EPConfigError: a size or option breaks a rule, or the group is not that of `bootstrap`.
    ValueError, EPError: as of FlashInfer's base class and of `cute_ep.connect`.
    """

    supports_cuda_graph = True

    def __init__(
        self,
        bootstrap: moe_ep.BootstrapConfig,
        params: moe_ep.MoEEpCommParams,
        config: CuteEPConfig | None = None,
        *,
        names: Arguments = OWN,
    ) -> None:
        super().__init__(bootstrap, params)
        self.config = CuteEPConfig() if config is None else config
        self._names, self._words, self._destroyed = names, pools.Words(names.ids, names.most), False
        self._round: tuple[EPCommunicator, Dispatched] | None = None  # which waits for its combine
        given = "bootstrap.rank, bootstrap.world_size"
        self._group = group_of(bootstrap.process_group, bootstrap.rank, bootstrap.world_size, given)
        rule = "params.dtype = {}: must be torch.bfloat16 or None, experts return it"
        demand(params.dtype in (None, torch.bfloat16), rule, params.dtype)
        narrow = -(1 << 31), (1 << 31) - 1
        checks.integer("params.invalid_expert_id", params.invalid_expert_id, *narrow, error=EPConfigError)
        wanted = getattr(params.dispatch_format, "name", None)
        rule, known = "params.dispatch_format = {}: must be None or one of {}", ", ".join(map(str, FORMATS))
        demand(wanted in FORMATS, rule, wanted, known)
        self._config("bf16")
        self._config(FORMATS[wanted])
        checks.sms("config.sms", self.config.sms)
        self._pool = pools.pool_of(self._group, self)
        try:
            self._connect(FORMATS[wanted])
        except BaseException:
            self.destroy()
            raise

    @classmethod
    def is_platform_supported(cls) -> bool:
        """True: without a GPU the reference backend computes the same. The constructor finds out what GPUs lack."""
        return True

    @torch.no_grad()
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> moe_ep.MoEEpDispatchResult:
        """Send each token once to every rank that has one of its experts.

        Args:
            hidden_states: [T, n] rows, and `hidden_states_scale` [T, m], which both travel unchanged. A row has 2 *
                hidden_size bytes (bfloat16; fewer are padded), hidden_size (8-bit elements) or hidden_size / 2 (4-bit
                ones); its scale factors have hidden_size / 32 bytes (MXFP8, MXFP4, float32 per 128 elements),
                hidden_size / 16 (NVFP4), or there are none (bfloat16, 8-bit elements).
            topk_ids: [T, top_k] int32 or int64; -1 and `params.invalid_expert_id` mask an entry. Copied.
            topk_weights: [T, top_k] of a floating type, travel as float32.
            max_tokens_per_rank: rows for each source, the same on all ranks, at least T; None: `params` has it.
            eplb_local_stats: must be None.

        Returns:
            New tensors of ep_size * tokens_per_rank rows. Row `source * tokens_per_rank + i` is the i-th of the
            source's tokens that come here, in their order. Ids are int32: global where the expert is of this rank,
            `invalid_expert_id` elsewhere, and in all of a row that no token has; weights are 0 there. Such a row's
            hidden states and scale factors may be anything.
        """
        self.raise_found()
        if self._round is not None:
            raise EPError("dispatch: the one before must have its combine first, or be given up with give_up()")
        checks.absent(", statistics are not gathered", eplb_local_stats=eplb_local_stats)
        names, params, scale = self._names, self.params, hidden_states_scale
        limits = params.max_tokens_per_rank, params.top_k
        stride = params.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        names.check((hidden_states, scale, topk_ids, topk_weights), stride, limits, self.device)
        kind, payload, scales = names.as_sent(hidden_states, scale, params.hidden_size)
        ids = topk_ids.clone(memory_format=torch.contiguous_format)  # not narrowed, since the kernel checks them
        invalid = params.invalid_expert_id
        if invalid != -1:
            ids.masked_fill_(ids == invalid, -1)
        weights = None if topk_weights is None else topk_weights.float().contiguous()
        communicator = self._connect(kind)
        out = DispatchBuffers.carve(communicator.cfg, communicator.device, stride * self.ep_size)
        batch = communicator.dispatch(payload, ids, weights, scales=scales, out=out)
        self._round, factors = (communicator, batch.without_rows()), None
        if scale is not None and batch.scales is not None:
            width = scale.shape[1] * scale.itemsize
            factors = batch.scales[:, :width].contiguous().view(scale.dtype)
        first = self.ep_rank * communicator.cfg.local_experts
        experts, of_entries = mark_entries(batch, first, invalid, weights=weights is not None)
        return moe_ep.MoEEpDispatchResult(
            hidden_states=batch.tokens.view(hidden_states.dtype)[:, : hidden_states.shape[1]].contiguous(),
            topk_ids=experts,
            topk_weights=of_entries,
            tokens_per_rank=stride,
            hidden_states_scale=factors,
        )

    @torch.no_grad()
    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Bring each row home and add a token's rows up: in float32, by ascending rank, rounded once.

        Args:
            expert_output: [ep_size * tokens_per_rank, hidden] or [ep_size, tokens_per_rank, hidden] bfloat16, each row
                weighted and reduced over this rank's experts. Rows that no token has are not read.
            output: [T, hidden] bfloat16, float16 or float32, overwritten, zero for masked tokens; None: in bfloat16.
        """
        self.raise_found()
        if self._round is None:
            raise EPError("combine: there must be a dispatch first")
        communicator, batch = self._round
        name, hidden, count = self._names.output, self.params.hidden_size, batch.tokens.shape[0]
        checks.given(name, expert_output, dtype=torch.bfloat16, device=self.device)
        shapes = (count, hidden), (self.ep_size, count // self.ep_size, hidden)
        if expert_output.shape not in shapes:
            raise EPInputError(f"{name}.shape = {tuple(expert_output.shape)}: must be {shapes[0]} or {shapes[1]}")
        rows = as_rows(expert_output).view(count, hidden)
        if output is not None:
            checks.output("output", output, (batch.topk_ids.shape[0], hidden), self.device, **{name: rows})
        total = communicator.combine(rows, batch, mode="partial", out=output)
        self._round = None
        return total

    def raise_found(self) -> None:
        """EPInputError of what is known by now to be wrong with earlier calls' input; waits for nothing."""
        self._words.raise_found(self._pool)

    def give_up(self) -> None:
        """Forget a dispatch, if there is one, that gets no combine; on all ranks, since a combine waits for all."""
        self._round = None

    @property
    def device(self) -> torch.device:
        """Where tensors of calls are: the current GPU of the constructor, or the CPU if there is none."""
        return self._pool.device

    def synchronize(self) -> None:
        """Wait for this rank's work, and raise what was found wrong: EPInputError of expert ids, EPTimeout of ranks."""
        self._words.synchronize(self._pool)

    def destroy(self) -> None:
        """Give up the communicators, which close with the last object of the process group; then collective."""
        self._round, self._destroyed = None, True
        pools.release(self._group, self)

    def _connect(self, kind: FormatName) -> EPCommunicator:
        if self._destroyed:
            raise EPError("the communication was destroyed: make another one, on all ranks")
        return self._pool.get(self._config(kind), self.config.sms, names=self._names.sizes)

    def _config(self, kind: FormatName) -> EPConfig:
        params, most = self.params, self.params.max_tokens_per_rank
        sizes = params.hidden_size, params.num_experts, params.top_k, most, self.ep_size
        return named_config(
            self._names.sizes, sizes, error=EPConfigError, dispatch_format=kind, block_rows=most, row_order=RANK_MAJOR,
            scale_layout=None if kind == "bf16" else "linear", timeout_s=self.config.timeout_s,
        )  # fmt: skip


def register() -> None:
    """Make "cute_ep" a communication backend of `flashinfer.moe_ep`; may be called again."""
    moe_ep.register_communication(NAME)(CuteEPCommunication)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return with_plain_strides(tensor.contiguous()).view(torch.uint8)


def group_of(group: dist.ProcessGroup | None, rank: int, size: int, names: str) -> dist.ProcessGroup:
    """The process group of the ranks, the default one for None. EPConfigError: it is not of this rank and size."""
    if group is None:
        rule = "process_group = None: needs a default group, call torch.distributed.init_process_group first"
        demand(dist.is_initialized(), rule)
        group = dist.group.WORLD
    checks.group("process_group", group)
    found, rule = (group.rank(), group.size()), "{} = {}, {}: must be those of the process group, {}, {}"
    demand(found == (rank, size), rule, names, rank, size, *found)
    return group
