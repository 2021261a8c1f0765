"""The layer: route, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import cute_ep.ops
from cute_ep.api.config import EPConfig, check_config, is_integer
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.gates import Gate
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import OUTPUT_TYPES
from cute_ep.layouts.maps.formats import BF16
from cute_ep.nn.connections import Connected
from cute_ep.nn.gates import add_bias, apply, gate_named
from cute_ep.nn.router import Router
from cute_ep.ops.registry import communicator_of

INNER_MULTIPLE = 8
"""A row of bfloat16 must be a multiple of 16 bytes, for grouped matmuls and for the SwiGLU kernel."""
MODES = ("exact", "partial")


class MoELayer(Connected):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a group, each a process.

    Each rank has all of the router and of the shared expert, and its own `local_experts` of the experts: expert e is
    local expert e % local_experts of rank e // local_experts. Every rank makes the same calls in the same order, also
    without tokens, and backward passes too (docs/layer.md).

    Matmuls are `torch.nn.functional.grouped_mm` in bfloat16. On GPUs of compute capability 9.x and 10.x torch 2.10 runs
    a kernel for it; on others it reads the offsets on the host and loops over experts, and cannot be captured.

    Attributes:
        router, shared: the modules given.
        gate_up: [local_experts, columns, hidden] parameter; columns is 2 * inner, gate rows and then up rows, or inner
            for gates that have one column.
        down: [local_experts, hidden, inner] parameter.
        gate_up_bias, down_bias: [local_experts, columns] and [local_experts, hidden] parameters, or None.
        capacity: as given; may be changed between calls.

    Args:
        cfg: the group; `dispatch_format` bf16, without `fused_shared_expert` and `skip_a2a`.
        inner: elements between the two matmuls of an expert, a multiple of 8.
        router: a module from [T, hidden] to (topk_ids, router_weights), as `Router` returns them; None: `Router` with
            its defaults.
        gate: a name, "swiglu", "swiglu_clamped" (gpt-oss), "geglu_tanh" or "relu2", or a `cute_ep.Gate`.
        bias: whether experts have biases.
        shared: a module from [T, hidden] to [T, hidden], such as `GatedMLP`, whose output is added.
        mode: of combine. "partial" is faster and rounds once more per rank.
        capacity: rows to allocate for the experts; None: as many as any routing can bring, `cfg.max_rows`. More rows
            than that are lost: outputs are NaN, and `synchronize` raises.
        device, dtype: of the parameters. Those of another type than bfloat16 are cast in every call.

    Raises:
        EPConfigError: an argument breaks its rule.
    """

    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        cfg: EPConfig,
        inner: int,
        *,
        router: torch.nn.Module | None = None,
        gate: str | Gate = "swiglu",
        bias: bool = False,
        shared: torch.nn.Module | None = None,
        mode: CombineMode = "exact",
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_config(cfg)
        super().__init__(cfg)
        if cfg.dispatch_format != BF16.name:
            raise EPConfigError(
                f"dispatch_format = {cfg.dispatch_format!r}: must be {BF16.name} for a layer, whose experts multiply "
                "bfloat16; for quantised experts call EPCommunicator.dispatch and your own grouped matmul"
            )
        for name, why in (
            ("fused_shared_expert", "give the layer `shared` instead"),
            ("skip_a2a", "every rank gives its own tokens to a layer"),
        ):
            if getattr(cfg, name):
                raise EPConfigError(f"{name} = True: must be False for a layer, {why}")
        if not (is_integer(inner) and inner > 0 and inner % INNER_MULTIPLE == 0):
            raise EPConfigError(f"inner = {inner!r}: must be a positive multiple of {INNER_MULTIPLE}")
        if mode not in MODES:
            raise EPConfigError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
        if capacity is not None and not (is_integer(capacity) and capacity >= 0):
            raise EPConfigError(f"capacity = {capacity!r}: must be an integer that is not negative, or None")
        self.inner, self.mode, self.capacity, self.gate = int(inner), mode, capacity, gate_named(gate)
        where = {"device": device, "dtype": dtype}
        if router is None:
            router = Router(cfg.hidden, cfg.num_experts, cfg.top_k, **where)
        if isinstance(router, Router):
            for name in ("hidden", "num_experts", "top_k"):
                if getattr(router, name) != getattr(cfg, name):
                    rule = f"must be cfg.{name} = {getattr(cfg, name)}"
                    raise EPConfigError(f"router.{name} = {getattr(router, name)}: {rule}")
        self.router, self.shared = router, shared
        experts, columns = cfg.local_experts, self.gate.columns * self.inner
        self.gate_up = torch.nn.Parameter(torch.empty(experts, columns, cfg.hidden, **where))
        self.down = torch.nn.Parameter(torch.empty(experts, cfg.hidden, self.inner, **where))
        for name, width in (("gate_up_bias", columns), ("down_bias", cfg.hidden)):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(experts, width, **where)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts' weights from torch's default generator, of standard deviation fan_in ** -0.5; zero their
        biases. Seed ranks differently for that, or their experts begin equal. Leaves `router` and `shared` alone."""
        with torch.no_grad():
            self.gate_up.normal_(std=self.cfg.hidden**-0.5)
            self.down.normal_(std=self.inner**-0.5)
            for bias in (self.gate_up_bias, self.down_bias):
                if bias is not None:
                    bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of each token's experts, and the shared expert's output.

        Args:
            x: [..., hidden] bfloat16, float16 or float32 on the layer's device, at most `cfg.max_tokens_per_rank`
                tokens; travels as bfloat16.

        Returns:
            A tensor like `x`.

        Raises:
            EPInputError: `x` breaks its rule. Nothing was launched.
            EPConfigError, EPError: the layer is not connected, and cannot be now (`connect`).
            EPTimeout: an earlier call's wait had timed out.
        """
        self._check_tokens(x)
        tokens = x.reshape(-1, self.cfg.hidden)
        topk_ids, router_weights = self.router(tokens)
        out = self.experts(tokens, topk_ids, router_weights)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view(x.shape)

    def experts(self, x: Tensor, topk_ids: Tensor, router_weights: Tensor) -> Tensor:
        """Dispatch, the experts and combine, for a routing of your own. Differentiable in tokens, router weights and
        the experts' parameters.

        Args:
            x: [T, hidden], as of `forward`.
            topk_ids: [T, top_k] int32 or int64; -1 masks an entry.
            router_weights: [T, top_k] of a floating type.

        Returns:
            [T, hidden] of the type of `x`; zero where a token has only masked entries.

        Raises:
            EPInputError, EPConfigError, EPError, EPTimeout: as `forward`.
        """
        self._check_tokens(x)
        routed = (x.shape[0], self.cfg.top_k)
        if x.dim() != 2:
            raise EPInputError(f"x.shape = {tuple(x.shape)}: must be [tokens, hidden]; use x.flatten(0, -2)")
        for name, tensor in (("topk_ids", topk_ids), ("router_weights", router_weights)):
            if tuple(tensor.shape) != routed:
                raise EPInputError(f"{name}.shape = {tuple(tensor.shape)}: must be {routed}, [tokens, top_k]")
        comm = self._connected_name()
        given = x.to(torch.bfloat16), topk_ids, router_weights.float(), comm
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            batch = cute_ep.ops.dispatch(*given, capacity=self.capacity)
        else:  # this one clears no rows
            batch = cute_ep.ops.dispatch_into(*given, communicator_of(comm).allocate(self.capacity))
        rows = self.compute(batch.tokens, batch.row_offsets)
        return cute_ep.ops.combine(rows, batch, self.mode, dtype=x.dtype)

    def compute(self, rows: Tensor, row_offsets: Tensor) -> Tensor:
        """This rank's experts alone, without communication.

        Args:
            rows: [N, hidden] bfloat16, by expert.
            row_offsets: [local_experts + 1] int32 on the device; expert e has rows [row_offsets[e], row_offsets[e + 1])

        Returns:
            [N, hidden] bfloat16; rows behind the last one hold anything.
        """
        between = self._matmul(rows, row_offsets, self.gate_up)
        out = self._matmul(apply(self.gate, between, row_offsets, self.gate_up_bias), row_offsets, self.down)
        return out if self.down_bias is None else add_bias(out, row_offsets, self.down_bias)

    def _matmul(self, rows: Tensor, row_offsets: Tensor, weight: Tensor) -> Tensor:
        """rows @ weight[e].T for the rows of each expert."""
        return F.grouped_mm(rows, weight.to(rows.dtype).transpose(1, 2), offs=row_offsets[1:])

    def expert_names(self) -> list[str]:
        """Names of the parameters that each rank has its own of."""
        return [name for name in ("gate_up", "down", "gate_up_bias", "down_bias") if getattr(self, name) is not None]

    def expert_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that each rank has its own of."""
        return (getattr(self, name) for name in self.expert_names())

    def place(self) -> torch.device:
        """Where the experts' parameters are."""
        return self.gate_up.device

    def _check_tokens(self, x: Tensor) -> None:
        """EPInputError unless they are tokens that the layer can take."""
        cfg = self.cfg
        if not isinstance(x, Tensor):
            raise EPInputError(f"x = {type(x).__name__}: must be a torch.Tensor")
        if x.dim() < 2 or x.shape[-1] != cfg.hidden:
            raise EPInputError(f"x.shape = {tuple(x.shape)}: must be [..., hidden = {cfg.hidden}]")
        if x.dtype not in OUTPUT_TYPES:
            raise EPInputError(f"x.dtype = {x.dtype}: must be one of {', '.join(map(str, OUTPUT_TYPES))}")
        if x.device != self.place():
            raise EPInputError(f"x.device = {x.device}: must be {self.place()}, where the layer's parameters are")
        if torch.compiler.is_compiling():
            return  # a number that changes from call to call: dispatch checks it
        tokens = x.numel() // cfg.hidden
        if tokens > cfg.max_tokens_per_rank:
            raise EPInputError(
                f"x.shape = {tuple(x.shape)}: {tokens} tokens must not exceed max_tokens_per_rank = "
                f"{cfg.max_tokens_per_rank}; split the batch, on all ranks, or use a larger number in EPConfig"
            )

    def extra_repr(self) -> str:
        cfg = self.cfg
        state = "not connected" if self._comm is None else "connected"
        return (
            f"hidden {cfg.hidden}, inner {self.inner}, {cfg.local_experts} of {cfg.num_experts} experts, "
            f"{cfg.max_tokens_per_rank} tokens per rank, {self.mode}, {state}"
        )


class GatedMLP(torch.nn.Module):
    """A dense expert that every rank computes for its own tokens, to be a layer's `shared`.

    Attributes:
        gate_up: [columns, hidden] parameter, as of `MoELayer`.
        down: [hidden, inner] parameter.

    Args:
        hidden, inner: sizes, multiples of 8.
        gate, device, dtype: as of `MoELayer`.

    Raises:
        EPConfigError: an argument breaks its rule.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        gate: str | Gate = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        for name, size in (("hidden", hidden), ("inner", inner)):
            if not (is_integer(size) and size > 0 and size % INNER_MULTIPLE == 0):
                raise EPConfigError(f"{name} = {size!r}: must be a positive multiple of {INNER_MULTIPLE}")
        self.gate = gate_named(gate)
        where = {"device": device, "dtype": dtype}
        self.gate_up = torch.nn.Parameter(torch.empty(self.gate.columns * inner, hidden, **where))
        self.down = torch.nn.Parameter(torch.empty(hidden, inner, **where))
        with torch.no_grad():
            self.gate_up.normal_(std=hidden**-0.5)
            self.down.normal_(std=inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] of the type of `x`, computed in the type of the parameters."""
        between = F.linear(x.to(self.gate_up.dtype), self.gate_up)
        return F.linear(apply(self.gate, between), self.down).to(x.dtype)
