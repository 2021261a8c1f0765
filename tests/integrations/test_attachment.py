"""Attaching models of transformers: arguments, lifetimes, copies, and batches of unusual sizes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from cute_ep import Dispatched, EPConfigError, EPError, EPInputError
from cute_ep.api.buffers import tensors_of
from cute_ep.integrations.transformers import Attachment, attach, attachment
from cute_ep.integrations.transformers.exchange import Exchange
from tests.integrations.models import EXPERTS, build, distance, text, trained


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def exchanges(one: Attachment) -> list[Any]:
    return list(one._exchanges.values())


def close_to_eager(model: Any, ids: torch.Tensor, ranks: int, max_tokens: int) -> None:
    with torch.no_grad():
        wanted = model(ids).logits
        with attach(model, devices=["cpu"] * ranks, max_tokens=max_tokens):
            assert distance(model(ids).logits, wanted) <= 2**-6


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_any_number_of_tokens_on_any_number_of_ranks(ranks: int, tokens: int) -> None:
    """Fewer tokens than ranks, 6 experts on 8 ranks."""
    close_to_eager(build("mixtral"), text(1, tokens), ranks, max_tokens=11)


def test_no_tokens() -> None:
    experts = experts_of(build("mixtral"))
    with attach(experts, devices=["cpu"] * 2, max_tokens=4):
        x = torch.zeros(0, 64, requires_grad=True)
        weights = torch.zeros(0, 2, requires_grad=True)
        out = experts(x, torch.zeros(0, 2, dtype=torch.int64), weights)
        assert out.shape == (0, 64) and out.dtype == torch.float32
        out.sum().backward()
        assert x.grad is not None and weights.grad is not None


def test_more_tokens_than_announced_connect_again_and_graphs_keep_their_ranks() -> None:
    model, ids = build("mixtral"), text(1, 4)
    wanted = trained(model, ids)[1]
    with attach(model, devices=["cpu"] * 2, max_tokens=4) as one:
        logits = model(ids).logits
        (before,) = exchanges(one)
        assert before.cfg.max_tokens_per_rank == 2
        with torch.no_grad():
            model(text(1, 6))
            (after,) = exchanges(one)
            assert after is not before and after.cfg.max_tokens_per_rank == 4
            model(text(2, 9))
            assert exchanges(one)[0].cfg.max_tokens_per_rank == 9
        model.zero_grad()
        logits.float().square().mean().backward()  # by the ranks of then
        for name, parameter in model.named_parameters():
            if name in wanted:
                assert distance(parameter.grad, wanted[name]) <= 2**-4, name
        gone, communicators = weakref.ref(before), before.communicators
        del before, logits
        gc.collect()
        one._pool.sweep()  # as the next pass would
        assert gone() is None and all(communicator.closed for communicator in communicators)


def test_more_tokens_than_any_communicator_takes() -> None:
    experts = experts_of(build("mixtral"))
    with attach(experts, devices=["cpu"], max_tokens=4), pytest.raises(EPInputError, match=r"shape\[0\] = 32769: must"):
        experts(torch.zeros(32769, 64), torch.zeros(32769, 2, dtype=torch.int64), torch.zeros(32769, 2))


def test_layers_of_one_shape_share_ranks() -> None:
    model = build("mixtral")
    with attach(model, devices=["cpu"] * 2, max_tokens=18) as one, torch.no_grad():
        model(text())
        assert len(exchanges(one)) == 1


@pytest.mark.parametrize("gradients", [True, False])
def test_masked_entries_as_transformers_writes_them(gradients: bool) -> None:
    """The id of a masked entry is the number of experts, here also that of an expert that 4 ranks pad with. So mask
    all that are no expert's."""
    experts = experts_of(build("mixtral"))
    ids = torch.tensor([
        [0, EXPERTS], [EXPERTS, EXPERTS], [5, 2], [-1, 3], [EXPERTS + 1, 1], [-2, 4], [2**32 + 3, 0],
        [2**63 - 1, -(2**63)], [2**31 - 1, -(2**31)],
    ])  # fmt: skip
    x = torch.randn(len(ids), 64).bfloat16().float().requires_grad_(gradients)
    weights = torch.rand(ids.shape).requires_grad_(gradients)
    masked = (ids < 0) | (ids >= EXPERTS)
    with torch.set_grad_enabled(gradients):
        wanted = experts(x, ids.clamp(0, EXPERTS - 1), weights * ~masked)
        with attach(experts, devices=["cpu"] * 4, max_tokens=9):
            before = ids.clone()
            out = experts(x, ids, weights)
            assert torch.equal(ids, before) and not out[1].any()
            assert distance(out, wanted) <= 2**-8
            if gradients:
                out.square().sum().backward()
                assert not weights.grad[masked].any() and weights.grad[~masked].all()
                assert not x.grad[1].any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_router_weights_of_other_types_int32_ids_and_strided_tensors(kind: torch.dtype) -> None:
    experts = experts_of(build("mixtral"))
    x = torch.randn(64, 6).bfloat16().float().t()
    weights, ids = torch.rand(6, 6).topk(2)
    weights = weights.to(kind).t().contiguous().t().requires_grad_()
    with torch.no_grad():
        wanted = experts(x, ids, weights.float())
    with attach(experts, devices=["cpu"] * 2, max_tokens=6):
        out = experts(x, ids.int(), weights)
        again = experts(x, ids.int(), weights)
        assert distance(out, wanted) <= 2**-8 and torch.equal(out, again)
        first = out.detach().clone()
        experts(x * 2, ids, weights)
        assert torch.equal(out, first)
        out.sum().backward()
        assert weights.grad.dtype == kind and weights.grad.abs().sum() > 0


def test_all_tokens_to_one_expert_and_an_expert_twice() -> None:
    experts = experts_of(build("mixtral"))
    x, weights = torch.randn(7, 64).bfloat16().float(), torch.rand(7, 2)
    for ids in (torch.full((7, 2), 3), torch.tensor([[0, 1]]).expand(7, 2)):
        with torch.no_grad():
            experts.config._experts_implementation = "batched_mm"
            wanted = experts(x, ids, weights)
            with attach(experts, devices=["cpu"] * 4, max_tokens=7):
                assert distance(experts(x, ids, weights), wanted) <= 2**-8


@pytest.mark.parametrize("frozen", ["experts", "router", "all but the router"])
def test_parts_without_gradients(frozen: str) -> None:
    """The others get theirs."""
    model, ids = build("mixtral"), text()
    for name, parameter in model.named_parameters():
        kind = "experts" if ".experts." in name else "router" if ".gate." in name else "other"
        parameter.requires_grad_(kind == "router" if frozen == "all but the router" else kind != frozen)
    model.set_experts_implementation("rounded on 2")
    wanted = trained(model, ids)[1]
    with attach(model, devices=["cpu"] * 2, max_tokens=18):
        got = trained(model, ids)[1]
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert distance(got[name], gradient) <= 1e-4, name


def test_a_second_derivative_is_refused() -> None:
    model = build("mixtral")
    with attach(model, devices=["cpu"], max_tokens=18):
        loss = model(text()).logits.square().mean()
        (grad,) = torch.autograd.grad(loss, [experts_of(model).down_proj], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


def test_detaching_restores_and_closes() -> None:
    model, ids = build("mixtral"), text()
    model.set_experts_implementation("batched_mm")
    one = attach(model, devices=["cpu"] * 2, max_tokens=18)
    logits = model(ids).logits
    communicators = exchanges(one)[0].communicators
    one.detach()
    one.detach()
    assert model.config._experts_implementation == "batched_mm" and all(rank.closed for rank in communicators)
    with pytest.raises(
        EPError, match=r"the ranks of this forward pass are closed: make its backward pass before detach\(\)"
    ):
        logits.sum().backward()
    attach(model, devices=["cpu"], max_tokens=18).detach()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_of_a_model_are_detached_in_any_order(order: tuple[int, int]) -> None:
    """They share a configuration, which is given back with the last, as it was chosen last."""
    model, ids = build("mixtral"), text()
    model.set_experts_implementation("batched_mm")
    experts = [layer.mlp.experts for layer in model.model.layers]
    parts = [attach(one, devices=["cpu"] * 2, max_tokens=18) for one in experts]
    model(ids)
    first, last = order
    parts[first].detach()
    assert model.config._experts_implementation == "cute_ep"
    with pytest.raises(EPError, match="is not attached"):
        model(ids)
    model.set_experts_implementation("grouped_mm")
    again = attach(experts[first], devices=["cpu"], max_tokens=18)
    model(ids)
    for one in (again, parts[last]):
        one.detach()
    assert model.config._experts_implementation == "grouped_mm"
    model(ids)


def test_detaching_after_another_model_with_the_same_configuration_has_gone() -> None:
    first = build("mixtral")
    before, config = first.config._experts_implementation, first.config
    attached = [attach(first, devices=["cpu"], max_tokens=18)]
    second = type(first)(config).eval()
    attached.append(attach(second, devices=["cpu"], max_tokens=18))
    del first
    gc.collect()
    attached[1].detach()
    assert config._experts_implementation == before
    second(text())


def test_detaching_leaves_an_implementation_that_was_chosen_since() -> None:
    model = build("mixtral")
    with attach(model, devices=["cpu"], max_tokens=18):
        model.set_experts_implementation("batched_mm")
    assert model.config._experts_implementation == "batched_mm"


def test_a_model_that_nobody_has_takes_its_ranks_with_it() -> None:
    model = build("mixtral")
    communicators: list[Any] = []
    one = attach(model, devices=["cpu"] * 2, max_tokens=18)
    model(text()).logits.sum().backward()
    communicators += exchanges(one)[0].communicators
    gone = weakref.ref(model)
    before = len(attachment._LAYERS)
    del model
    gc.collect()
    assert gone() is None and len(attachment._LAYERS) == before - 2
    assert not any(rank.closed for rank in communicators), "the collector waits for no kernel"
    attach(build("mixtral"), devices=["cpu"], max_tokens=18).detach()
    assert all(rank.closed for rank in communicators)
    one.detach()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, weakref.ref]]]:
    """The tensors of each dispatch's first rank, as long as they exist, without the collector."""
    seen, dispatch = [], Exchange.dispatch

    def watched(self: Exchange, *given: Any) -> list[Dispatched]:
        made = dispatch(self, *given)
        seen.append({name: weakref.ref(one) for name, one in tensors_of(made[0]).items() if one is not None})
        return made

    monkeypatch.setattr(Exchange, "dispatch", watched)
    gc.disable()
    yield seen
    gc.enable()


def test_outputs_that_are_dropped_leave_nothing(batches: list[dict[str, weakref.ref]]) -> None:
    """The graph is no cycle: all memory of a pass goes with its output."""
    experts = experts_of(build("mixtral"))
    with attach(experts, devices=["cpu"] * 2, max_tokens=4):
        x = torch.randn(4, 64, requires_grad=True)
        out = experts(x, torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))
        assert batches[0]["row_map"]() is not None
        del out
        assert [name for name, one in batches[0].items() if one() is not None] == []


def test_checkpointing_keeps_no_rows(batches: list[dict[str, weakref.ref]]) -> None:
    experts = experts_of(build("mixtral"))
    with attach(experts, devices=["cpu"] * 2, max_tokens=4):
        x, weights = torch.randn(4, 64, requires_grad=True), torch.rand(4, 2, requires_grad=True)
        ids = torch.randint(4, (4, 2))
        out = checkpoint(experts, x, ids, weights, use_reentrant=False)
        assert batches[0]["tokens"]() is None and batches[0]["row_map"]() is not None
        out.sum().backward()
        got, x.grad = x.grad, None
        experts(x, ids, weights).sum().backward()
        assert torch.equal(x.grad, got)


def test_copies_pickles_and_saved_models_work_once_they_are_attached(tmp_path: Path) -> None:
    model, ids = build("mixtral"), text()
    with attach(model, devices=["cpu"] * 2, max_tokens=18), torch.no_grad():
        wanted = model(ids).logits
        model.save_pretrained(tmp_path)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(EPError, match=r"MixtralExperts: is not attached to ranks \(.*\); call .*attach\(model"):
                other(ids)
            with attach(other, devices=["cpu"] * 2, max_tokens=18):
                assert torch.equal(other(ids).logits, wanted)
            assert distance(other(ids).logits, wanted) <= 2**-6 and other.config._experts_implementation == "grouped_mm"
        assert torch.equal(model(ids).logits, wanted)
        loaded = type(model).from_pretrained(tmp_path)
        assert loaded.config._experts_implementation != "cute_ep"
        assert distance(loaded(ids).logits, wanted) <= 2**-6
        loaded = type(model).from_pretrained(tmp_path, experts_implementation="cute_ep")
        with pytest.raises(EPError, match="is not attached"):
            loaded(ids)
        with attach(loaded, devices=["cpu"] * 2, max_tokens=18):
            assert torch.equal(loaded(ids).logits, wanted)


def test_weights_that_are_loaded_later_are_used() -> None:
    model, other, ids = build("mixtral"), build("mixtral"), text()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        with attach(model, devices=["cpu"] * 2, max_tokens=18):
            model(ids)
            model.load_state_dict(other.state_dict())
            got = model(ids).logits
        assert distance(got, other(ids).logits) <= 2**-6


def test_inference_mode_and_then_training() -> None:
    model, ids = build("mixtral"), text()
    with attach(model, devices=["cpu"] * 2, max_tokens=18):
        with torch.inference_mode():
            wanted = model(ids).logits
        assert torch.equal(trained(model, ids)[0], wanted)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_defaults_of_torch_change_nothing(kind: str, default: Any) -> None:
    """Neither of types nor of devices, also in the first call, which recognises the gate."""
    experts = experts_of(build(kind, torch.bfloat16))
    x, (weights, ids) = torch.randn(5, 64).bfloat16(), torch.rand(5, EXPERTS).topk(2)
    outs = []
    for change in (False, True):
        with attach(experts, devices=["cpu"] * 2, max_tokens=5) as one, torch.no_grad():
            try:
                if change and default == "meta":
                    torch.set_default_device(default)
                elif change:
                    torch.set_default_dtype(default)
                outs.append(experts(x, ids, weights))
            finally:
                torch.set_default_device(None)
                torch.set_default_dtype(torch.float32)
            assert attachment._LAYERS[experts].gates != [None] and exchanges(one)
    assert torch.equal(*outs)


def test_a_module_around_a_model() -> None:
    """Its experts are found; the model's configuration says so."""
    model, ids = build("mixtral"), text()
    with attach(nn.ModuleDict({"inner": model}), devices=["cpu"] * 2, max_tokens=18) as one, torch.no_grad():
        model(ids)
        assert model.config._experts_implementation == "cute_ep" and exchanges(one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": []}, r"len\(devices\) = 0: must be in \[1, 32\]"),
        ({"devices": "cpu"}, r"devices = 'cpu': must be a list, one per rank, such as \[\"cpu\"\] \* 2"),
        ({"devices": None}, "devices = NoneType: must be a list of names"),
        ({"devices": ["gpu"]}, r"devices = \['gpu'\]: must be a list of names"),
        ({"max_tokens": 0}, r"max_tokens = 0: must be an integer in \[1, 32768\]"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5"),
        ({"model": nn.Linear(2, 2)}, "model = Linear: has no experts"),
        ({"model": "mixtral"}, "model = str: has no experts"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": nn.Linear(2, 2), "devices": ["cpu"], "max_tokens": 1, **changes}
    with pytest.raises(EPConfigError, match=message):
        attach(given.pop("model"), **given)


def test_a_model_is_attached_once() -> None:
    model = build("mixtral")
    with attach(model, devices=["cpu"], max_tokens=1):
        with pytest.raises(
            EPConfigError, match=r"model\.layers\.0\.mlp\.experts: is attached already, detach it first"
        ):
            attach(model, devices=["cpu"], max_tokens=1)
        assert model.config._experts_implementation == "cute_ep"
