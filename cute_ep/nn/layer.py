"""The layer: route, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

import cute_ep.ops
from cute_ep.api.buffers import check_capacity
from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.config_rules import check_config
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.gates import Gate
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import check_input_scale
from cute_ep.api.validate_combine import OUTPUT_TYPES
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, max_rows
from cute_ep.nn.connections import Connected, connected_in
from cute_ep.nn.gates import add_bias, apply, gate_named
from cute_ep.nn.mlp import INNER_MULTIPLE
from cute_ep.nn.router import Router
from cute_ep.nn.side_stream import Beside, SideStream, side_stream_of
from cute_ep.ops.bypass import needs_op
from cute_ep.runtime.decode import decode_rows

MODES = ("partial", "exact")


class MoELayer(Connected):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a group, each a process.

    Each rank has all of the router and of the shared expert, and its own `local_experts` of the experts: expert e is
    local expert e % local_experts of rank e // local_experts. Every rank makes the same calls in the same order, also
    without tokens, and backward passes too (docs/layer.md).

    Matmuls are `torch.nn.functional.grouped_mm` in bfloat16. On GPUs of compute capability 9.x and 10.x torch 2.10 runs
    a kernel for it; on others it reads the offsets on the host and loops over experts, and cannot be captured.

    With another `dispatch_format` than bf16 the layer is for inference: tokens are quantised, travel so, and experts
    compute on what arrived, decoded to bfloat16. Parameters and state dicts are the same in all formats.

    Attributes:
        cfg: as given, but that scale factors are in layout linear.
        router, shared, overlap_shared: as given; `overlap_shared` may be changed between calls.
        gate_up: [local_experts, columns, hidden] parameter; columns is 2 * inner, gate rows and then up rows, or inner
            for gates that have one column.
        down: [local_experts, hidden, inner] parameter.
        gate_up_bias, down_bias: [local_experts, columns] and [local_experts, hidden] parameters, or None.
        capacity, input_scale: as given; may be changed between calls, on all ranks alike.

    Args:
        cfg: the group, expert-major without blocks, `fused_shared_expert`, `skip_a2a` and a `scale_layout` other than
            linear.
        inner: elements between the two matmuls of an expert, a multiple of 8.
        router: a module from [T, hidden] to (topk_ids, router_weights), as `Router` returns them; None: `Router` with
            its defaults.
        gate: a name, "swiglu", "swiglu_clamped" (gpt-oss), "geglu_tanh" or "relu2", or a `cute_ep.Gate`.
        bias: whether experts have biases.
        shared: a module from [T, hidden] to [T, hidden], such as `GatedMLP`, whose output is added.
        overlap_shared: whether `shared` computes on a side stream of the communicator, beside dispatch, the experts and
            combine, forward and backward, also in a CUDA graph. The bits are the same. It stays on the layer's stream
            in compiled code, under torch's dispatch modes, for tensor subclasses, and if it contains a layer of this
            package. False is for modules that use memory of their own which work on other streams uses too, or that
            make collectives where no SMs are left to them. Under DDP torch may warn once that the stream of
            `AccumulateGrad` does not match: it waits there, and nothing is wrong.
        mode: of combine. "exact" sends more and rounds once a token, wherever experts are; "partial" once more per
            rank.
        capacity: rows to allocate for the experts; None: as many as any routing can bring, `cfg.max_rows`, or less
            behind a `Router`, which repeats no expert of a token. If more come, all rows of the rank are lost: outputs
            of their tokens are NaN, and `synchronize` raises.
        input_scale: G of docs/numerics.md for all tokens, with `dispatch_format` nvfp4; None: 1.
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
        overlap_shared: bool = True,
        mode: CombineMode = "partial",
        capacity: int | None = None,
        input_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_config(cfg)
        if cfg.scale_layout not in (None, "linear"):
            raise EPConfigError(f"scale_layout = {cfg.scale_layout!r}: must be linear or None for a layer")
        super().__init__(cfg if cfg.format.scale is None else replace(cfg, scale_layout="linear"))
        for name, must, why in (
            ("fused_shared_expert", False, "give the layer `shared` instead"),
            ("skip_a2a", False, "every rank gives its own tokens to a layer"),
            ("row_order", EXPERT_MAJOR, "its matmuls take the rows of an expert together"),
            ("block_rows", None, "its matmuls take rows that follow one another"),
        ):
            if (value := getattr(cfg, name)) != must:
                raise EPConfigError(f"{name} = {value!r}: must be {must!r} for a layer, {why}")
        if cfg.format.scale is None and not cfg.zero_padding:
            raise EPConfigError("zero_padding = False: must be True for a layer with gradients, sums over all rows")
        if not (is_integer(inner) and inner > 0 and inner % INNER_MULTIPLE == 0):
            raise EPConfigError(f"inner = {inner!r}: must be a positive multiple of {INNER_MULTIPLE}")
        if not isinstance(overlap_shared, bool):
            raise EPConfigError(f"overlap_shared = {overlap_shared!r}: must be True or False")
        if mode not in MODES:
            raise EPConfigError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
        try:
            check_capacity(cfg, capacity)
            check_input_scale(cfg.format, input_scale)
        except EPInputError as error:
            raise EPConfigError(str(error)) from None
        self.inner, self.mode, self.capacity, self.gate = int(inner), mode, capacity, gate_named(gate)
        self.input_scale = input_scale
        where = {"device": device, "dtype": dtype}
        if router is None:
            router = Router(cfg.hidden, cfg.num_experts, cfg.top_k, **where)
        if isinstance(router, Router):
            for name in ("hidden", "num_experts", "top_k"):
                if getattr(router, name) != getattr(cfg, name):
                    rule = f"must be cfg.{name} = {getattr(cfg, name)}"
                    raise EPConfigError(f"router.{name} = {getattr(router, name)}: {rule}")
        self.router, self.shared, self.overlap_shared = router, shared, overlap_shared
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

    def forward(self, x: Tensor, frame: int | None = None) -> Tensor:
        """The weighted sum of each token's experts, and the shared expert's output.

        Args:
            x: [..., hidden] bfloat16, float16 or float32 on the layer's device, at most `cfg.max_tokens_per_rank`
                tokens; travels as bfloat16, or in the layer's format.
            frame: as of `cute_ep.ops.dispatch`.

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
        routed = tokens, topk_ids, router_weights, self._capacity_behind_router(), frame
        if self.shared is None:
            return self._experts(*routed).view(x.shape)
        side = self._side_stream(tokens)
        if side is None:
            return (self._experts(*routed) + self.shared(tokens)).view(x.shape)
        with Beside(side, tokens) as beside:
            batch = self._dispatch(*routed)
            shared = beside.run(self.shared)  # after dispatch is launched, for which other ranks wait
            out = self._combine(batch, x.dtype)
        return (out + shared).view(x.shape)

    def experts(self, x: Tensor, topk_ids: Tensor, router_weights: Tensor, frame: int | None = None) -> Tensor:
        """Dispatch, the experts and combine, for a routing of your own. In format bf16 differentiable in tokens, router
        weights and the experts' parameters.

        Args:
            x, frame: [T, hidden], as of `forward`.
            topk_ids: [T, top_k] int32 or int64; -1 masks an entry.
            router_weights: [T, top_k] of a floating type.

        Returns:
            [T, hidden] of the type of `x`; zero where a token has only masked entries.

        Raises:
            EPInputError, EPConfigError, EPError, EPTimeout: as `forward`.
        """
        return self._experts(x, topk_ids, router_weights, self.capacity, frame)

    def _experts(
        self, x: Tensor, topk_ids: Tensor, router_weights: Tensor, capacity: int | None, frame: int | None
    ) -> Tensor:
        """`experts`, with room for so many rows."""
        return self._combine(self._dispatch(x, topk_ids, router_weights, capacity, frame), x.dtype)

    def _dispatch(
        self, x: Tensor, topk_ids: Tensor, router_weights: Tensor, capacity: int | None, frame: int | None
    ) -> cute_ep.ops.Batch:
        """The first part of `experts`, with room for so many rows."""
        self._check_tokens(x)
        routed = (x.shape[0], self.cfg.top_k)
        if x.dim() != 2:
            raise EPInputError(f"x.shape = {tuple(x.shape)}: must be [tokens, hidden]; use x.flatten(0, -2)")
        for name, tensor in (("topk_ids", topk_ids), ("router_weights", router_weights)):
            if not isinstance(tensor, Tensor):
                more = ", ones for a plain sum" if name == "router_weights" else ""
                raise EPInputError(f"{name} = {type(tensor).__name__}: must be a torch.Tensor{more}")
            if tuple(tensor.shape) != routed:
                raise EPInputError(f"{name}.shape = {tuple(tensor.shape)}: must be {routed}, [tokens, top_k]")
        self._check_gradients(x, router_weights)
        comm = self._connected_name()
        given = x.to(torch.bfloat16), topk_ids, router_weights.float(), comm
        scale = self._scale_on_device()
        return cute_ep.ops.dispatch(*given, input_scale=scale, capacity=capacity, frame=frame)

    def _combine(self, batch: cute_ep.ops.Batch, dtype: torch.dtype) -> Tensor:
        """The second part of `experts`."""
        rows = self.compute(self.decode(batch), batch.row_offsets)
        return cute_ep.ops.combine(rows, batch, mode=self.mode, dtype=dtype)

    def decode(self, batch: cute_ep.ops.Batch | Dispatched) -> Tensor:
        """The rows that `compute` takes, of a batch that this layer's communicator dispatched with its `input_scale`.

        Returns:
            [N, hidden] bfloat16, `cute_ep.dequantize` of the rows rounded once more; in format bf16 the batch's own
            tensor. Rows behind the last one hold anything.
        """
        scale = self._scale_on_device()
        return decode_rows(self.cfg.format, batch.tokens, batch.scales, batch.row_scales, scale)

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

    def _side_stream(self, tokens: Tensor) -> SideStream | None:
        """Where the shared expert computes; None: on the stream of the others."""
        if not self.overlap_shared or needs_op(x=tokens) or tokens.device.type != "cuda":
            return None
        assert self.shared is not None
        if next(connected_in(self.shared), None) is not None:
            return None  # its calls come behind this layer's
        return side_stream_of(self.communicator)

    def _capacity_behind_router(self) -> int | None:
        """`capacity`, or instead of None what tokens that name no expert twice can bring."""
        cfg = self.cfg
        if self.capacity is not None or type(self.router) is not Router:
            return self.capacity
        entries = min(cfg.top_k, cfg.local_experts)
        return max_rows(cfg.world_size * cfg.max_tokens_per_rank * entries, cfg.groups, cfg.alignment)

    def _scale_on_device(self) -> Tensor | None:
        """[1] float32 `input_scale`, written by the device, so also in a graph; None for none."""
        if self.input_scale is None:
            return None
        return torch.full((1,), self.input_scale, dtype=torch.float32, device=self.place())

    def _check_gradients(self, x: Tensor, router_weights: Tensor) -> None:
        """EPInputError where a gradient is wanted that the format has not."""
        if self.cfg.dispatch_format == BF16.name or not torch.is_grad_enabled():
            return
        given = {"x": x, "router_weights": router_weights} | {name: getattr(self, name) for name in self.expert_names()}
        for name, tensor in given.items():
            if tensor.requires_grad:
                raise EPInputError(
                    f"{name}.requires_grad = True: must be False in a layer with dispatch_format "
                    f"{self.cfg.dispatch_format}, which is for inference; call it under torch.no_grad(), or train a "
                    f"layer with {BF16.name} and load its state dict"
                )

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
            f"{cfg.max_tokens_per_rank} tokens per rank in {cfg.dispatch_format}, {self.mode}, {state}"
        )
