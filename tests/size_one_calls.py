"""Calls of one rank whose tensors have dimensions of one element, on any device: what is tried with `odd_strides`.

A call takes its tensors by name, and returns what it computed and wrote. Those that begin with `out` are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS, DispatchBuffers, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.ops import calls as ops
from cute_ep.ops import register
from cute_ep.reference.decode import dequantize
from cute_ep.runtime.local_ops import fused_silu, quantize
from cute_ep.runtime.routes import count_routes
from cute_ep.runtime.sums import sum_rows
from tests.changed_batches import changed
from tests.runtime.test_routes import PARTS

Made = dict[str, torch.Tensor | None]
Call = Callable[[Any], Made]
Open = Callable[[EPConfig], EPCommunicator]
"""Connects the only rank of a configuration."""


def bf16(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The same random numbers each time."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)


def given_to(ep: EPCommunicator, tokens: int, *, ready: bool = False) -> Made:
    """What a dispatch is given: every tensor that it may have; `ready`: rows that are quantised."""
    cfg, device = ep.cfg, ep.device
    x = bf16(tokens, cfg.hidden, device)
    ids = torch.arange(tokens * cfg.top_k, device=device, dtype=torch.int32).view(tokens, cfg.top_k) % cfg.num_experts
    made: Made = {"x": x, "topk_ids": ids, "router_weights": bf16(tokens, cfg.top_k, device).float()}
    if ready:
        own = reference.quantize(x, cfg.dispatch_format)
        return {**made, "x": own.payload, "scales": own.scales, "row_scales": own.row_scales}
    return {**made, "input_scale": torch.full((1,), 2.0, device=device) if cfg.format.global_scale else None}


def cleared(buffers: DispatchBuffers) -> Made:
    """Its tensors as `out.` and their name, zeroed."""
    return {f"out.{name}": None if one is None else one.zero_() for name, one in tensors_of(buffers).items()}


def buffers_of(tensors: Mapping[str, Any]) -> DispatchBuffers:
    return DispatchBuffers(**{name: tensors[f"out.{name}"] for name in BUFFERS})


def round_trip(
    opened: Open, cfg: EPConfig, tokens: int, mode: Any, *, ready: bool = False, halves: bool = False
) -> tuple[Call, Made]:
    """A dispatch into buffers with room for what comes, and a combine into memory of the caller."""
    ep = opened(cfg)
    given = given_to(ep, tokens, ready=ready)
    capacity = None if cfg.block_rows else tokens * (1 + cfg.fused_shared_expert)
    given |= cleared(ep.allocate(capacity))
    room = 0 if given["out.tokens"] is None else len(given["out.tokens"])
    given["rows"] = bf16(room, cfg.hidden, ep.device)
    extents = (cfg.top_k, cfg.hidden) if mode == "unweighted" else (cfg.hidden,)
    given["out"] = torch.zeros(tokens, *extents, dtype=torch.bfloat16, device=ep.device)

    def call(tensors: Any) -> Made:
        sent = {name: tensors.get(name) for name in ("router_weights", "input_scale", "scales", "row_scales")}
        out, rows, result = buffers_of(tensors), tensors["rows"], tensors["out"]
        if halves:
            batch = ep.dispatch_wait(ep.dispatch_async(tensors["x"], tensors["topk_ids"], **sent), out)
            ep.combine_wait(ep.combine_async(rows, batch, mode), out=result)
        else:
            batch = ep.dispatch(tensors["x"], tensors["topk_ids"], out=out, **sent)
            ep.combine(rows, batch, mode=mode, out=result)
        ep.synchronize()
        made: Made = {**tensors_of(batch), "sums": result}
        if mode == "exact":
            made["late"] = ep.combine(rows, batch, tensors["router_weights"], mode="exact")
            ep.synchronize()
        return made

    return call, given


def by_hand(opened: Open, cfg: EPConfig) -> tuple[Call, Made]:
    """A batch put together from tensors, and one that is derived with others."""
    ep = opened(cfg)
    given = given_to(ep, 1)
    batch = ep.dispatch(given["x"], given["topk_ids"], given["router_weights"])  # type: ignore[arg-type]
    ep.synchronize()
    kept = {f"batch.{name}": one for name, one in tensors_of(batch).items()}
    given = {"topk_ids": given["topk_ids"], "router_weights": given["router_weights"], **kept}
    given["rows"] = bf16(len(batch.tokens), cfg.hidden, ep.device)

    def call(tensors: Any) -> Made:
        parts = {name: tensors[f"batch.{name}"] for name in BUFFERS}
        ids, weights = tensors["topk_ids"], tensors["router_weights"]
        own = {"rank": 0, "topk_ids": ids, "router_weights": weights, "return_slices_log2": batch.return_slices_log2}
        made = Dispatched.of_tensors(parts, **own)
        again = made.derived(row_map=parts["row_map"], topk_ids=ids, weights=parts["weights"], router_weights=weights)
        outs = {f"{name} {mode}": ep.combine(tensors["rows"], one, mode=mode)  # type: ignore[arg-type]
                for name, one in (("made", made), ("derived", again)) for mode in ("exact", "partial")}  # fmt: skip
        ep.synchronize()
        return {**outs, "lost": made.any_lost()}

    return call, given


def as_ops(opened: Open, cfg: EPConfig) -> tuple[Call, Made]:
    """Dispatch and combine as torch ops, with gradients."""
    ep = opened(cfg)
    name, given = register(ep), given_to(ep, 1)
    given["kept alive"] = None

    def call(tensors: Any) -> Made:
        x, weights = (tensors[one].detach().requires_grad_() for one in ("x", "router_weights"))
        batch = ops.dispatch(x, tensors["topk_ids"], weights, name)
        out = ops.combine(batch.tokens, batch, "exact")
        out.backward(torch.ones_like(out))
        ep.synchronize()
        return {"out": out.detach(), "x.grad": x.grad, "weights.grad": weights.grad}

    call.kept = ep  # type: ignore[attr-defined]
    return call, given


def quantized(fmt: str, device: torch.device) -> tuple[Call, Made]:
    record = FORMATS[fmt]
    scale = torch.full((1,), 2.0, device=device) if record.global_scale else None
    given: Made = {"x": bf16(1, record.multiple, device), "input_scale": scale}

    def call(tensors: Any) -> Made:
        got = quantize(tensors["x"], fmt, tensors["input_scale"])  # type: ignore[arg-type]
        return got._asdict()

    return call, given


def decoded(fmt: str, device: torch.device) -> tuple[Call, Made]:
    record = FORMATS[fmt]
    rows = reference.quantize(bf16(1, record.multiple, device), fmt)
    scale = torch.full((1,), 2.0, device=device) if record.global_scale else None
    given: Made = {**rows._asdict(), "global_scale": scale}

    def call(tensors: Any) -> Made:
        held = QuantizedRows(*(tensors[name] for name in QuantizedRows._fields))
        return {"rows": dequantize(held, fmt, 1.0 if scale is None else tensors["global_scale"])}  # type: ignore[arg-type]

    return call, given


def activated(fmt: str, layout: str | None, device: torch.device) -> tuple[Call, Made]:
    """One row of one group, into memory of the caller."""
    record = FORMATS[fmt]
    grouped: dict[str, torch.Tensor] = {"row_offsets": torch.tensor([0, 1], dtype=torch.int32, device=device)}
    if layout == "atom128x4":
        grouped["scales_offsets"] = torch.zeros(1, dtype=torch.int32, device=device)
    if record.global_scale:
        grouped["input_scales"] = torch.full((1,), 2.0, device=device)
    x, bias = bf16(1, 2 * record.multiple, device), bf16(1, 2 * record.multiple, device)
    out = fused_silu(x, fmt=fmt, scale_layout=layout, bias=bias, **grouped)  # type: ignore[call-overload]
    held = (
        {"out": out} if isinstance(out, torch.Tensor) else {f"out.{name}": one for name, one in out._asdict().items()}
    )
    given: Made = {"x": x, "bias": bias, **grouped, **{name: one.zero_() for name, one in held.items()}}

    def call(tensors: Any) -> Made:
        named = {name: tensors[name] for name in ("bias", *grouped)}
        memory = tensors["out"] if "out" in held else SwigluRows(tensors["out.payload"], tensors["out.scales"])
        fused_silu(tensors["x"], fmt=fmt, scale_layout=layout, out=memory, **named)  # type: ignore[call-overload]
        return {name: tensors[name] for name in held}

    return call, given


def counted(device: torch.device) -> tuple[Call, Made]:
    given: Made = {"topk_ids": torch.tensor([[3]], device=device), "weights": bf16(1, 1, device)}

    def call(tensors: Made) -> Made:
        found = count_routes(tensors["topk_ids"], 4, 2, weights=tensors["weights"])
        return {name: getattr(found, name) for name in PARTS}

    return call, given


def summed(opened: Open) -> tuple[Call, Made]:
    ep = opened(EPConfig(8, 1, 1, 1, 1))
    given = given_to(ep, 1)
    batch = ep.dispatch(given["x"], given["topk_ids"], given["router_weights"])  # type: ignore[arg-type]
    ep.synchronize()
    held: Made = {"rows": bf16(1, 8, ep.device), "row_map": batch.row_map, "headers": batch.headers}

    def call(tensors: Any) -> Made:
        sums, derived = sum_rows(
            tensors["rows"], changed(batch, **{name: tensors[name] for name in ("row_map", "headers")})
        )
        return {"sums": sums, "row_map": derived.row_map}

    return call, held


def by_reference(cfg: EPConfig, device: torch.device) -> tuple[Call, Made]:
    """The reference's functions on a token of the only rank."""
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    given: Made = {"x": bf16(1, cfg.hidden, device), "topk_ids": ids, "router_weights": ids.float() + 2}
    given["rows"] = bf16(cfg.alignment, cfg.hidden, device)

    def call(tensors: Any) -> Made:
        x, ids, weights, rows = ([tensors[name]] for name in ("x", "topk_ids", "router_weights", "rows"))
        (batch,) = batches = reference.dispatch(cfg, x, ids, None, weights)
        modes: tuple[Any, ...] = ("exact", "partial", "unweighted")
        sums = {mode: reference.combine(cfg, rows, batches, mode=mode)[0] for mode in modes}
        return {**tensors_of(batch), **sums, **reference.quantize(tensors["x"], cfg.dispatch_format)._asdict()}

    return call, given


def calls(opened: Open, device: torch.device) -> dict[str, Callable[[], tuple[Call, Made]]]:
    """All calls by name: each makes (what to call, its tensors)."""
    made: dict[str, Callable[[], tuple[Call, Made]]] = {"count_routes": lambda: counted(device)}
    made["sum_rows"] = lambda: summed(opened)
    for name, fmt in FORMATS.items():
        smallest = EPConfig(fmt.multiple, 1, 1, 1, 1, name, 30, row_alignment=fmt.row_alignment)
        for layout in fmt.scale_layouts or (None,):
            made[f"fused_silu-{name}-{layout}"] = lambda name=name, layout=layout: activated(name, layout, device)
            cfg = EPConfig(fmt.multiple, 1, 1, 1, 1, name, 30, scale_layout=layout)  # type: ignore[arg-type]
            made[f"round-{name}-{layout}"] = lambda cfg=cfg: round_trip(opened, cfg, 1, "exact")
            if fmt.scale:
                made[f"quantised-{name}-{layout}"] = lambda cfg=cfg: round_trip(opened, cfg, 1, "exact", ready=True)
        if fmt.row_scale:
            made = {key: one for key, one in made.items() if not key.startswith(f"fused_silu-{name}")}
        if fmt.scale:
            made[f"quantize-{name}"] = lambda name=name: quantized(name, device)
        made[f"dequantize-{name}"] = lambda name=name: decoded(name, device)
        made[f"reference-{name}"] = lambda cfg=smallest: by_reference(cfg, device)
        made[f"halves-{name}"] = lambda cfg=smallest: round_trip(opened, cfg, 1, "partial", halves=True)
    plain = {"hidden": 8, "num_experts": 1, "top_k": 1, "max_tokens_per_rank": 3, "world_size": 1, "timeout_s": 30}
    for mode in ("exact", "partial", "unweighted"):
        cfg = EPConfig(**plain)  # type: ignore[arg-type]
        made[f"{mode} of three tokens"] = lambda cfg=cfg, mode=mode: round_trip(opened, cfg, 3, mode)
    options = {
        "blocks": {"block_rows": 1},
        "rank-major": {"row_order": "rank_major"},
        "shared": {"fused_shared_expert": True},
    }
    for key, change in options.items():
        cfg = EPConfig(**{**plain, "max_tokens_per_rank": 1, **change})  # type: ignore[arg-type]
        made[key] = lambda cfg=cfg, key=key: round_trip(opened, cfg, 1, "partial" if key == "rank-major" else "exact")
    made["batches by hand"] = lambda: by_hand(opened, EPConfig(**{**plain, "max_tokens_per_rank": 1}))  # type: ignore[arg-type]
    made["ops"] = lambda: as_ops(opened, EPConfig(**{**plain, "max_tokens_per_rank": 1}))  # type: ignore[arg-type]
    return made
