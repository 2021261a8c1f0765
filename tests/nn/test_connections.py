"""Layers find their communicators by name: they are copied, saved, moved and used again without one."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_ep import EPCommunicator, EPConfig, connect_local
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.nn import MoELayer, connect, connections, disconnect
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime import process_connection
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

from .layers import INNER, config

CFG = config(1)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    disconnect()
    yield
    disconnect()


@pytest.fixture
def layer() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(CFG, INNER)


def tokens() -> torch.Tensor:
    return torch.randn(5, CFG.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()


def saved_and_loaded(module: MoELayer) -> MoELayer:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "connected"])
def test_copies_compute_the_same(layer: MoELayer, again: Callable[[MoELayer], MoELayer], used: bool) -> None:
    """In a communicator that is open already, if there is one; the first layer keeps its own."""
    if used:
        layer(tokens())
    other = again(layer)
    assert torch.equal(other(tokens()), layer(tokens()))
    assert other.communicator is layer.communicator and len(connections.opened()) == 1


def test_copies_hold_no_name(layer: MoELayer) -> None:
    """One of another process, or of a communicator that is closed, would stand for nothing."""
    want = layer(tokens())
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved_and_loaded(layer)]
    assert [one._comm for one in copies] == [None] * 3
    disconnect()
    assert all(torch.equal(one(tokens()), want) for one in copies)


def test_a_copy_has_parameters_of_its_own(layer: MoELayer) -> None:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.down.zero_()
        assert not other(tokens()).any() and layer(tokens()).any()


def test_a_first_call_connects_and_layers_of_equal_configurations_share(layer: MoELayer) -> None:
    assert "not connected" in repr(layer) and not connections.opened()
    model = torch.nn.Sequential(layer, MoELayer(CFG, 2 * INNER), MoELayer(config(1, top_k=2), INNER))
    model(tokens())
    assert "not connected" not in repr(model)
    first, second, third = (one.communicator for one in model)
    assert first is second is not third and connections.opened() == [first, third]


def test_connect_opens_what_is_missing_and_closes_that_only(layer: MoELayer) -> None:
    layer(tokens())
    model = torch.nn.Sequential(layer, MoELayer(config(1, top_k=2), INNER))
    with connect(model) as opened:
        assert [one.cfg.top_k for one in opened.communicators] == [2]
        model(tokens())
        opened.synchronize()
    assert not layer.communicator.closed
    with pytest.raises(EPError, match=r"its communicator was closed; call cute_ep\.nn\.connect\(model\)"):
        model(tokens())
    connect(model)
    model(tokens())


@pytest.mark.parametrize("end", [disconnect, lambda: connections.opened()[0].close()], ids=["disconnect", "close"])
def test_a_layer_whose_communicator_is_gone_says_so_until_it_is_connected(layer: MoELayer, end: Callable) -> None:
    before = layer(tokens())
    end()
    for _ in range(2):
        with pytest.raises(EPError, match=r"MoELayer: its communicator was closed"):
            layer(tokens())
    connect(layer)
    assert torch.equal(layer(tokens()), before)


def test_a_communicator_of_yours_is_used_and_yours_to_keep(layer: MoELayer) -> None:
    (ep,) = connect_local(CFG, ["cpu"])
    layer.attach(ep)
    layer(tokens())
    assert layer.communicator is ep and not connections.opened()
    assert ep._dispatches.sent == 1


def test_a_communicator_of_another_configuration_is_refused(layer: MoELayer) -> None:
    (ep,) = connect_local(config(1, top_k=2), ["cpu"])
    with pytest.raises(EPConfigError, match=r"^communicator\.cfg\.top_k = 2: must be 3, as of the layer$"):
        layer.attach(ep)


def test_a_communicator_elsewhere_is_refused() -> None:
    (ep,) = connect_local(CFG, ["cpu"])
    with pytest.raises(EPConfigError, match=r"communicator\.device = cpu: must be meta, .*\.to\('cpu'\) first"):
        MoELayer(CFG, INNER, device="meta").attach(ep)


def test_a_layer_that_moves_looks_for_another_communicator(layer: MoELayer) -> None:
    layer(tokens())
    assert layer.float()._comm is not None, "where it is has not changed"
    layer.to("meta")
    assert layer._comm is None
    layer.to_empty(device="cpu")
    for one in (layer, layer.router):
        one.reset_parameters()
    assert layer(tokens()).isfinite().all()


def test_several_ranks_need_a_process_group() -> None:
    layer = MoELayer(config(2), INNER)
    said = re.escape("cfg.world_size = 2: needs a process group of as many ranks, one process each; start them with")
    for call in (lambda: layer(tokens()), lambda: connect(layer)):
        with pytest.raises(EPConfigError, match=said):
            call()


class Group:
    """Stands for a process group of two ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


A, B, DEFAULT = Group(), Group(), Group()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """(process group, options) of every communicator of two ranks that layers have opened."""
    calls = []

    def connect_rank(check: Callable[[], None], cfg: EPConfig, group: Any, **options: Any) -> EPCommunicator:
        check()
        calls.append((None if group is DEFAULT else group, options))
        return connect_local(cfg, ["cpu"] * cfg.world_size)[0]

    monkeypatch.setattr(process_connection, "connect_checked", connect_rank)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", DEFAULT)
    monkeypatch.setattr(connections, "_is_registered", lambda group: group in (None, A, B))  # None is the default group
    monkeypatch.setattr(ReferenceCommunicator, "shares_device", False)
    return calls


def layers(count: int) -> list[MoELayer]:
    return [MoELayer(config(2), INNER) for _ in range(count)]


def move(layer: MoELayer) -> MoELayer:
    """Away and back, so that its next call looks for a communicator."""
    return layer.to("meta").to_empty(device="cpu")


def groups(opened: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    return [group for group, _ in opened]


def test_a_group_of_other_processes_is_refused(opened: list, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with pytest.raises(EPConfigError, match="must have this process, global rank 3, as one of its own"):
        connect(*layers(1), other)
    assert not opened


def test_layers_share_a_communicator_of_their_group_only(opened: list) -> None:
    one, two, three = layers(3)
    connect(one, A)
    connect(two, B)
    connect(three, A)
    assert groups(opened) == [A, B]
    assert three.communicator is one.communicator is not two.communicator


def test_a_layer_that_was_not_connected_joins_equal_ones_of_one_group(opened: list) -> None:
    one, two = layers(2)
    connect(one, A)
    assert copy.deepcopy(one)._connected_name() == one._connected_name()
    with (
        connect(two, B),
        pytest.raises(EPConfigError, match=r"2 process groups have layers of .*connect\(model, gro"),
    ):
        copy.deepcopy(one)._connected_name()
    assert MoELayer(config(2), INNER)._connected_name() == one._connected_name() and groups(opened) == [A, B]


@pytest.mark.parametrize("group", [A, None], ids=["a group", "the default group"])
def test_a_layer_that_moves_stays_in_its_group(opened: list, group: Any) -> None:
    """With its options; equal layers of another group make no difference."""
    layer, other = layers(2)
    connect(layer, group, sms=8)
    connect(other, B)
    assert move(layer).communicator is not other.communicator and groups(opened) == [group, B]
    disconnect()
    assert move(layer).communicator and opened[2] == opened[0]


def test_a_destroyed_group_is_forgotten(opened: list) -> None:
    (layer,) = layers(1)
    connect(layer, Group())  # torch does not know it any more when the layer is called
    disconnect()
    assert move(layer).communicator and opened[1] == (None, {"sms": None})


def test_another_number_of_sms_opens_another_communicator(opened: list) -> None:
    every = layers(4)
    for layer, sms in zip(every, (None, 8, 8, None), strict=True):
        connect(layer, A, sms=sms)
    first, second, third, fourth = (layer.communicator for layer in every)
    assert first is fourth is not second is third and groups(opened) == [A] * 2


def test_libraries_and_tunings_of_one_rank_open_none(opened: list) -> None:
    """Ranks may give different ones, and must open communicators together."""
    one, two = layers(2)
    connect(one, A)
    connect(two, A, library="elsewhere", tuning=Tuning((Entry(MANY, 10, 0, 1),), (Entry(MANY, 10, 0, 1),)))
    assert one.communicator is two.communicator and len(opened) == 1


def test_after_a_failed_round_layers_say_what_to_do(opened: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed on this rank only: a rank that opened another communicator would wait for the others."""
    one, two = layers(2)
    connect(one, A)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceCommunicator, "failed", property(lambda _: True))
        for call in (lambda: connect(one, A), lambda: connect(two, A), two._connected_name):
            with pytest.raises(EPError, match=r"a round failed; call cute_ep\.nn\.disconnect\(\) first, on all ranks"):
                call()
        disconnect()
    connect(two, A)
    assert groups(opened) == [A, A]


def test_sms_are_left_to_nccl_unless_a_number_is_given(opened: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "sms_beside_nccl", lambda device: 124)
    one, two = layers(2)
    connect(one, A)
    connect(two, B, sms=132)
    assert [options["sms"] for _, options in opened] == [124, 132]


def test_compiled_code_does_not_connect(layer: MoELayer) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"MoELayer is not connected: call cute_ep\.nn\.connect\(model\)"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(tokens())


def test_modes_of_a_module_and_hooks_work(layer: MoELayer) -> None:
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    want = layer.eval()(tokens())
    assert torch.equal(layer.train()(tokens()), want) and seen == [(5, CFG.hidden)] * 2
