"""Every experts class that transformers' interface serves, on its own: outputs and all gradients."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from transformers.integrations.moe import use_experts_implementation

from cute_ep.api.errors import EPConfigError
from cute_ep.api.gates import Gate
from cute_ep.integrations.transformers import attach, exchange
from cute_ep.integrations.transformers.exchange import Exchange
from cute_ep.integrations.transformers.experts import KNOWN_FLAGS, FoundGate, Shards, find_gate, grouped_linear
from cute_ep.runtime.local_ops import fused_silu
from tests.integrations.models import EXPERTS, distance

ROUNDING = 2.0**-8
TOKENS, SLOTS = 10, 3
NAMES: dict[str, Any] = dict(
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    mlp_hidden_act="relu2",
    hidden_size=64,
    moe_hidden_size=64,
    moe_latent_size=None,
    intermediate_size=32,
    moe_intermediate_size=32,
    expert_ffn_hidden_size=32,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    moe_num_experts=EXPERTS,
    swiglu_alpha=1.702,
    swiglu_limit=1.5,
    mlp_gate_softcap=2.0,
    mlp_up_softcap=2.0,
    mlp_softcap=2.0,
    gate_softcap=2.0,
    up_softcap=2.0,
    post_norm_eps=1e-6,
    experts_implementation="eager",
)
"""What the classes read of a configuration."""


def classes() -> list[tuple[str, str]]:
    """(module, name) of every class with the decorator of the experts interface."""
    folder = Path(transformers.__file__).parent / "models"
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(folder.glob("*/modeling_*.py"))
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.MULTILINE)
    ]


def make(module: str, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """An experts module with random weights."""
    made = getattr(importlib.import_module(module), name)(transformers.PreTrainedConfig(**NAMES))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return made.to(dtype)


MIXTRAL = ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
DEEPSEEK_V4 = ("transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts")
GEMMA4 = ("transformers.models.gemma4.modeling_gemma4", "Gemma4TextExperts")
NEMOTRON = ("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts")


def arguments(module: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that bfloat16 has, ids, router weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    x = torch.randn(TOKENS, hidden, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(SLOTS)
    return x.to(dtype).requires_grad_(), ids, weights.to(dtype).requires_grad_()


def step(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """[output, gradients of x, weights and all parameters]."""
    read = (x, weights, *module.parameters())
    for one in read:
        one.grad = None
    out = module(x, ids, weights)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out.dtype))
    assert all(one.grad is not None for one in read)
    return [out.detach(), *(one.grad.clone() for one in read)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("module", "name"), classes(), ids=[name for _, name in classes()])
def test_outputs_and_gradients_are_the_classes_own(module: str, name: str) -> None:
    """Each within its roundings to bfloat16, of which the gradient of x has two, and in exact mode the same bits on 1,
    2 and 4 ranks; those of a norm behind the experts are sums over ranks. Partial mode rounds sums once more."""
    experts = make(module, name)
    given = arguments(experts)
    wanted, got = step(experts, *given), []
    for ranks in (1, 2, 4):
        with attach(experts, devices=["cpu"] * ranks, max_tokens=TOKENS, mode="exact"):
            got.append(step(experts, *given))
            with torch.no_grad():
                assert torch.equal(experts(*given), got[-1][0])
    for one in got:
        for number, (mine, own) in enumerate(zip(one, wanted, strict=True)):
            assert distance(mine, own) <= (2 if number == 1 else 1) * ROUNDING, number
    with attach(experts, devices=["cpu"] * 2, max_tokens=TOKENS):
        for number, (mine, exact) in enumerate(zip(step(experts, *given), got[1], strict=True)):
            assert distance(mine, exact) <= ROUNDING and torch.equal(mine, exact) == (number > 1), number
    shared = 1 if getattr(experts, "has_post_expert_norm", False) else 0
    for one in got[1:]:
        last = len(one) - shared
        assert all(torch.equal(mine, first) for mine, first in zip(one[:last], got[0][:last], strict=True))
        assert all(distance(mine, first) < 1e-6 for mine, first in zip(one[last:], got[0][last:], strict=True))


def test_all_flags_of_the_decorator_are_known() -> None:
    """It gives each to every class; an older transformers has fewer."""
    flags = {name for name in inspect.signature(use_experts_implementation).parameters if name.startswith("has_")}
    found = {flag for module, name in classes() for flag in vars(make(module, name)) if flag.startswith("has_")}
    assert found == flags <= KNOWN_FLAGS


@pytest.mark.parametrize(("module", "name"), [MIXTRAL, GPT_OSS])
def test_bfloat16_experts_give_the_bits_of_grouped_experts(module: str, name: str) -> None:
    """With router weights in float32 transformers' "grouped_mm" multiplies and adds in float32 and in the same order.
    Its experts' outputs are rounded to bfloat16, as ours."""
    experts = make(module, name, torch.bfloat16)
    x, ids, weights = arguments(experts)
    x = x.detach().bfloat16().requires_grad_()
    experts.config._experts_implementation = "grouped_mm"
    wanted = experts(x, ids, weights)
    for ranks in (1, 2, 4):
        with attach(experts, devices=["cpu"] * ranks, max_tokens=TOKENS, mode="exact"):
            assert torch.equal(experts(x, ids, weights), wanted)


CLAMPED, OF_MINIMAX = Gate(limit=1.5), Gate(alpha=1.702, limit=1.5, offset=1)
OF_GPT_OSS = replace(OF_MINIMAX, limit=make(*GPT_OSS).limit)
"""In an older transformers the limit is not the configuration's."""
SPECIAL: dict[str, FoundGate | None] = {
    **dict.fromkeys(["DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts"], FoundGate(CLAMPED, False)),
    "HYV4VLExperts": FoundGate(CLAMPED, False),
    "MiniMaxM3VLExperts": FoundGate(OF_MINIMAX, False),
    "OpenAIPrivacyFilterExperts": FoundGate(OF_GPT_OSS, False),
    "GptOssExperts": FoundGate(OF_GPT_OSS, True),
    **dict.fromkeys(["DiffusionGemmaTextExperts", "Gemma4TextExperts"], FoundGate(Gate("gelu_tanh"), False)),
    "NemotronHExperts": FoundGate(Gate("relu2"), False),
    **dict.fromkeys(["Inkling2Experts", "Inkling2LoopExperts"]),
}
"""Classes whose gate is not plain SwiGLU, with the numbers of `NAMES`; None: not one of `fused_silu`. An older
transformers lacks some."""


def test_gates_are_recognised() -> None:
    found = {name: find_gate(make(module, name)) for module, name in classes()}
    wanted = {name: gate for name, gate in SPECIAL.items() if name in found}
    assert {name: gate for name, gate in found.items() if gate != FoundGate(Gate(), False)} == wanted


@pytest.mark.parametrize(("module", "name"), [MIXTRAL, GPT_OSS, DEEPSEEK_V4, GEMMA4, NEMOTRON])
def test_inference_in_bfloat16_uses_the_fused_gate(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """It rounds once where modules round more often, but for relu squared, so that it is nearer to float32."""
    experts = make(module, name, torch.bfloat16)
    x, ids, weights = arguments(experts)
    asked = []
    monkeypatch.setattr(
        "cute_ep.integrations.transformers.experts.fused_silu",
        lambda *given, **named: asked.append(named) or fused_silu(*given, **named),
    )
    with torch.no_grad():
        own = experts(x.bfloat16(), ids, weights)
        with attach(experts, devices=["cpu"] * 2, max_tokens=TOKENS, mode="exact"):
            got = experts(x.bfloat16(), ids, weights)
        true = experts.float()(x, ids, weights)
    assert len(asked) == 2 and all((one["bias"] is not None) == experts.has_bias for one in asked)
    assert torch.equal(got, own) == (not experts.has_gate) and distance(got, true) <= distance(own, true)


@pytest.mark.parametrize(("module", "name"), [MIXTRAL, GPT_OSS, NEMOTRON])
def test_room_for_more_rows_than_come_changes_no_bit(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Inference as with a device for each rank, in passes that count rows and in those that do not."""
    experts = make(module, name, torch.bfloat16)
    x, ids, weights = arguments(experts, torch.bfloat16)
    dispatch, rooms, outs = Exchange.dispatch, [], []
    monkeypatch.setattr(Exchange, "dispatch", lambda *given: rooms.append(given[-1]) or dispatch(*given))
    with attach(experts, devices=["cpu"] * 4, max_tokens=TOKENS) as one, torch.no_grad():
        one.exchange(x.shape[1], EXPERTS, SLOTS, TOKENS).waits = False
        for most in (ids.numel() - 1, ids.numel()):
            monkeypatch.setattr(exchange, "UNCOUNTED_ENTRIES", most)
            outs.append(experts(x, ids, weights))
    assert sum(rooms[0]) == ids.numel() and rooms[1] == [ids.numel()] * 4
    assert torch.equal(*outs) and outs[0].any()


def test_experts_that_compute_something_unknown_are_refused() -> None:
    experts = make(*MIXTRAL)
    experts.has_second_gate = True
    with pytest.raises(EPConfigError, match=r"model\.has_second_gate = True: must be one of has_bias, has_gate"):
        attach(experts, devices=["cpu"], max_tokens=1)
    experts.has_second_gate = False
    attach(experts, devices=["cpu"], max_tokens=1).detach()


def test_experts_that_are_split_over_processes_are_refused() -> None:
    """An older transformers shows it only by the number of experts, which it sets to that of the process."""
    experts = make(*MIXTRAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        experts.gate_up_proj = nn.Parameter(distribute_tensor(experts.gate_up_proj.data, mesh, [Shard(0)]))
        attach(experts, devices=["cpu"], max_tokens=1).detach()
        experts.num_experts = EXPERTS // 2
        with pytest.raises(EPConfigError, match="model: is split over processes already"):
            attach(experts, devices=["cpu"], max_tokens=1)
    finally:
        dist.destroy_process_group()


def test_quantised_experts_are_refused() -> None:
    experts = make(*MIXTRAL)
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(EPConfigError, match=r"model\.down_proj\.dtype = torch\.float8_e4m3fn"):
        attach(experts, devices=["cpu"], max_tokens=1)


def test_inner_widths_that_neither_kernels_nor_grouped_matmuls_take() -> None:
    """36 elements are no multiple of 16 bytes."""
    experts = make(*MIXTRAL)
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(torch.randn(EXPERTS, *of)) for of in ((72, 64), (64, 36)))
    experts = experts.bfloat16()
    x, ids, weights = arguments(experts)
    with torch.no_grad():
        own = experts(x.bfloat16(), ids, weights)
        with attach(experts, devices=["cpu"] * 2, max_tokens=TOKENS):
            assert distance(experts(x.bfloat16(), ids, weights), own) <= 2 * ROUNDING


@pytest.mark.parametrize("transposed", [False, True])
def test_widths_that_grouped_matmuls_do_not_take(transposed: bool) -> None:
    """5 and 6 elements are no multiples of 16 bytes; no rows, and a group without any."""
    weight = torch.randn(3, 5, 6) if not transposed else torch.randn(3, 6, 5)
    x, offsets = torch.randn(7, 6), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    out = grouped_linear(x, weight, offsets[1:], transposed)
    for group, (start, end) in enumerate([(0, 2), (2, 2), (2, 6)]):
        one = weight[group] if transposed else weight[group].T
        torch.testing.assert_close(out[start:end], x[start:end] @ one)
    assert grouped_linear(x[:0], weight, offsets[1:] * 0, transposed).shape == (0, 5)


def test_copies_on_other_devices_are_kept_until_the_parameter_changes() -> None:
    """The meta device stands for another GPU."""
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(4, 2))
    shards = Shards([2, 2], [torch.device("cpu"), torch.device("meta")])
    with torch.no_grad():
        first = shards.of(module, "w")
        assert first[0].data_ptr() == module.w.data_ptr() and first[1].is_meta
        assert shards.of(module, "w")[1] is first[1]
        module.w.mul_(2)
        second = shards.of(module, "w")
        assert second[1] is not first[1] and shards.of(module, "w")[1] is second[1]
        module.w = nn.Parameter(torch.randn(4, 2))
        assert shards.of(module, "w")[1] is not second[1]
    assert all(one.requires_grad for one in shards.of(module, "w"))
    with pytest.raises(EPConfigError, match=r"w\.shape\[0\] = 3: must be the number of experts, 4"):
        module.w = nn.Parameter(torch.randn(3, 2))
        shards.of(module, "w")
