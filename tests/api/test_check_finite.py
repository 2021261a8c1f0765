"""`check_finite`: dispatches that look for NaN and infinities. The round goes on, and `synchronize` names the token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.distributed import DistributedEPDispatch
from cute_ep.layouts.maps.formats import E4M3, E8M0, FORMATS
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from tests.fake_gpu import Launches

from .one_rank import ONE_RANK, inputs_of, random

NAN, INF = torch.nan, torch.inf
LARGEST = 3.3895313892515355e38
RANKS = EPConfig(128, 6, 2, 16, 3)


def broken(tokens: int, **places: float) -> torch.Tensor:
    """Random tokens with other values in some: t4_7=NAN is element 7 of token 4."""
    x = random(tokens, ONE_RANK.hidden)
    for name, value in places.items():
        token, element = map(int, name[1:].split("_"))
        x[token, element] = value
    return x


def told(ep: EPCommunicator, words: str | None) -> None:
    """What `synchronize` says of the check, once; None: nothing."""
    if words is not None:
        with pytest.raises(EPInputError) as caught:
            ep.synchronize()
        since = " (calls since check_finite was set, first call 1)"
        assert str(caught.value) == f"rank {ep.rank}: {words}{since}"
    ep.synchronize()


# ---- what is found

VALUES: dict[str, tuple[dict[str, float], str | None]] = {
    "a NaN": ({"t4_7": NAN}, "token 4 of dispatch call 1 has a NaN"),
    "an infinity": ({"t4_7": INF}, "token 4 of dispatch call 1 has an infinity"),
    "a negative infinity": ({"t0_0": -INF}, "token 0 of dispatch call 1 has an infinity"),
    "both in a token": ({"t2_0": INF, "t2_127": NAN}, "token 2 of dispatch call 1 has a NaN"),
    "the first of several": ({"t4_7": NAN, "t3_1": INF, "t1_127": NAN}, "token 1 of dispatch call 1 has a NaN"),
    "the last element": ({"t4_127": NAN}, "token 4 of dispatch call 1 has a NaN"),
    "the largest numbers": ({"t0_0": LARGEST, "t1_1": -LARGEST}, None),
    "subnormal numbers": ({"t0_0": 1e-40, "t1_1": -1e-40}, None),
}


@pytest.mark.parametrize(("places", "words"), VALUES.values(), ids=list(VALUES))
def test_the_first_broken_token_is_named(lone_rank: EPCommunicator, places: dict, words: str | None) -> None:
    _, ids, _ = inputs_of()
    lone_rank.check_finite = True
    lone_rank.dispatch(broken(5, **places), ids)
    told(lone_rank, words)


QUANTISED = [
    *((fmt, "payload", 0xFF) for fmt in ("fp8", "fp8_pow2", "mxfp8")),
    *((fmt, "scales", NAN) for fmt in ("fp8", "fp8_pow2")),
    *((fmt, "scales", INF) for fmt in ("fp8", "fp8_pow2")),
    *((fmt, "scales", 0xFF) for fmt in ("mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")),
    *((fmt, "scales", 0x7F) for fmt in ("nvfp4", "nvfp4_row")),
    *(("nvfp4_row", "row_scales", value) for value in (NAN, INF)),
]


@pytest.mark.parametrize("native", [False, True], ids=["bits", "torch's types"])
@pytest.mark.parametrize(("fmt", "part", "value"), QUANTISED)
def test_rows_that_come_quantised_are_looked_at_too(fmt: str, part: str, value: float, native: bool) -> None:
    cfg = EPConfig(128, 6, 2, 16, 1, fmt)
    x, ids, _ = inputs_of(cfg)
    rows = reference.quantize(x, fmt)
    (ep,) = connect_reference(cfg)
    ep.check_finite = True
    changed = QuantizedRows(*(None if one is None else one.clone() for one in rows))
    for given in (rows, changed):
        if given is changed:
            tensor = getattr(changed, part)
            (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)[3] = value
        scales = given.scales
        if native and (own := {E8M0: torch.float8_e8m0fnu, E4M3: torch.float8_e4m3fn}.get(FORMATS[fmt].scale)):
            scales = scales.view(own)
        ep.dispatch(given.payload, ids, scales=scales, row_scales=given.row_scales)
        what = "an infinity" if value == INF else "a NaN"
        told(ep, f"token 3 of dispatch call 2 has {what}" if given is changed else None)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_byte_of_a_round_changes_and_no_rank_waits(fmt: str) -> None:
    """Rank 1 has a NaN: its round is that of a group without the check, and the other ranks hear nothing."""
    given = [inputs_of(RANKS, tokens) for tokens in (5, 4, 0)]
    given[1][0][2, 9] = NAN
    batches: list[list[Any]] = []
    for check in (False, True):
        ranks = connect_reference(EPConfig(128, 6, 2, 16, 3, fmt))
        for ep in ranks:
            ep.check_finite = check
        batches.append([ep.dispatch(*one, out=_zeros(ep)) for ep, one in zip(ranks, given, strict=True)])
        for ep in ranks:
            told(ep, "token 2 of dispatch call 1 has a NaN" if check and ep.rank == 1 else None)
        clean = [inputs_of(RANKS, tokens) for tokens in (5, 4, 0)]
        for ep, one in zip(ranks, clean, strict=True):
            ep.dispatch(*one)
        for ep in ranks:
            told(ep, None)
    for plain, checked in zip(*batches, strict=True):
        for name, want in tensors_of(plain).items():
            if want is not None:
                assert_bits(getattr(checked, name), want, name)


def _zeros(ep: EPCommunicator) -> Any:
    out = ep.allocate()
    for tensor in tensors_of(out).values():
        if tensor is not None:
            tensor.view(torch.uint8).zero_()
    return out


# ---- which calls look


def in_halves(ep: EPCommunicator, x: torch.Tensor, ids: torch.Tensor) -> None:
    ep.dispatch_wait(ep.dispatch_async(x, ids))


def as_an_op(ep: EPCommunicator, x: torch.Tensor, ids: torch.Tensor) -> None:
    ops = pytest.importorskip("cute_ep.ops", exc_type=ImportError)  # torch may be too old for it
    ops.dispatch(x, ids, None, ops.register(ep))


def as_a_differentiable_op(ep: EPCommunicator, x: torch.Tensor, ids: torch.Tensor) -> None:
    as_an_op(ep, x.clone().requires_grad_(), ids)


CALLS: dict[str, Callable[[EPCommunicator, torch.Tensor, torch.Tensor], Any]] = {
    "dispatch": lambda ep, x, ids: ep.dispatch(x, ids),
    "halves": in_halves,
    "plan": lambda ep, x, ids: ep.plan_dispatch(x, ids).launch(),
    "op": as_an_op,
    "differentiable op": as_a_differentiable_op,
    "list of ranks": lambda ep, x, ids: DistributedEPDispatch([ep])([x], [ids]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_every_kind_of_dispatch_looks(call: Callable) -> None:
    (ep,) = connect_reference(ONE_RANK)
    x, ids, _ = inputs_of()
    ep.check_finite = True
    call(ep, x, ids)
    told(ep, None)
    call(ep, broken(5, t1_1=NAN), ids)
    told(ep, "token 1 of dispatch call 2 has a NaN")


def test_a_call_looks_once_right_before_its_launch(make_rank: Callable, launches: Launches) -> None:
    """What is planned is looked at when it is launched, as it is then."""
    ep = make_rank(ONE_RANK)
    x, ids, _ = inputs_of()
    ep.check_finite = True
    seen, look = [], ep._finite.look
    ep._finite.look = lambda given: (seen.append(len(launches)), look(given))
    plan = ep.plan_dispatch(x, ids)
    assert seen == []
    x[4, 4] = NAN
    plan.launch()
    assert seen == [0] and len(launches) == 1
    told(ep, "token 4 of dispatch call 1 has a NaN")


def test_the_first_of_several_calls_is_named_and_empty_ones_count(lone_rank: EPCommunicator) -> None:
    _, ids, _ = inputs_of()
    lone_rank.check_finite = True
    for x in (random(5, 128), random(0, 128), broken(5, t3_3=INF), broken(5, t0_0=NAN)):
        lone_rank.dispatch(x, ids[: len(x)])
    told(lone_rank, "token 3 of dispatch call 3 has an infinity")


def test_it_is_off_until_it_is_set_and_off_again_afterwards(lone_rank: EPCommunicator) -> None:
    _, ids, _ = inputs_of()
    assert lone_rank.check_finite is False
    lone_rank.dispatch(broken(5, t0_0=NAN), ids)
    told(lone_rank, None)
    assert lone_rank._finite is None
    for on, words in (
        (True, "token 0 of dispatch call 1 has a NaN"),
        (False, None),
        (True, "token 0 of dispatch call 2 has a NaN"),
    ):
        lone_rank.check_finite = on
        assert lone_rank.check_finite is on
        lone_rank.dispatch(broken(5, t0_0=NAN), ids)
        told(lone_rank, words)


@contextmanager
def default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": default_device,
    "none": nullcontext,
}


@pytest.mark.parametrize("around_call", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("around_set", MODES.values(), ids=list(MODES))
def test_torchs_modes_change_nothing(lone_rank: EPCommunicator, around_set: Callable, around_call: Callable) -> None:
    x, (_, ids, _) = broken(5, t2_2=NAN), inputs_of()
    out = lone_rank.allocate()
    with around_set():
        lone_rank.check_finite = True
    with around_call():
        lone_rank.dispatch(x, ids, out=out)
        told(lone_rank, "token 2 of dispatch call 1 has a NaN")


# ---- beside other errors


def test_a_wrong_id_of_the_same_call_is_told_in_the_same_message() -> None:
    (ep,) = connect_reference(ONE_RANK)
    _, ids, _ = inputs_of()
    ids[1, 0] = 99
    ep.check_finite = True
    ep.dispatch(broken(5, t2_2=NAN), ids)
    rule = r"rank 0: topk_ids.flatten\(\)\[2\] = 99: must be .*; token 2 of dispatch call 1 has a NaN"
    with pytest.raises(EPInputError, match=rule):
        ep.synchronize()
    told(ep, None)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_what_is_neither_true_nor_false_is_refused(lone_rank: EPCommunicator, value: Any) -> None:
    with pytest.raises(EPInputError, match=re.escape(f"check_finite = {value!r}: must be True or False")):
        lone_rank.check_finite = value


def test_it_cannot_be_set_behind_close(lone_rank: EPCommunicator) -> None:
    lone_rank.close()
    with pytest.raises(EPError, match="closed"):
        lone_rank.check_finite = True


def test_it_cannot_be_set_while_a_graph_is_captured(lone_rank: EPCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(lone_rank, "device", torch.device("cuda", 0))
    with pytest.raises(EPError, match="check_finite: must be set before a CUDA graph is captured"):
        lone_rank.check_finite = True
    assert lone_rank.check_finite is False
