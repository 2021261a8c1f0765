"""Which ranks go together: on one machine or in one NVLink domain."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.runtime import places
from cute_ep.runtime.places import Place, Seat, check_places, domains, equal_parts

from .as_threads import RANKS
from .fake_machine import CFG, PLACES


def test_ranks_of_one_configuration_and_machine_on_gpus_of_their_own_go_together() -> None:
    for rank in range(RANKS):
        check_places(rank, PLACES)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (
            {"cfg": replace(CFG, top_k=1)},
            r"^top_k = 2 on rank\(s\) \[0, 1\], 1 on rank\(s\) \[2\]: must be the same on all ranks$",
        ),
        (
            {"machine": "other"},
            r"^rank 2 and rank 0 are on different machines: must be on one, or in one NVLink domain$",
        ),
        ({"gpu": "GPU-1"}, "rank 1 and rank 2 are both on GPU GPU-1: each must call torch.cuda.set_device"),
    ],
    ids=["another configuration", "another machine", "the same GPU"],
)
def test_other_places_are_refused(changed: dict, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        check_places(0, [*PLACES[:2], replace(PLACES[2], **changed)])


def test_the_ranks_of_a_node_are_on_one_machine() -> None:
    """Two nodes may be on one, or on one each; on the CPU all are on one."""
    cfg = EPConfig(128, 8, 2, 16, 4, ranks_per_node=2)
    several = [Place(cfg, f"machine {rank // 2}", f"GPU-{rank}") for rank in range(4)]
    for one in (several, [replace(place, machine="machine 0") for place in several]):
        for rank in range(4):
            check_places(rank, one)
    mixed = [*several[:3], replace(several[3], machine="other")]
    check_places(0, mixed)
    with pytest.raises(
        EPConfigError,
        match=r"^rank 3 and rank 2 are on different machines: must be on one, or .* domain, as ranks of node 1$",
    ):
        check_places(2, mixed)
    with pytest.raises(
        EPConfigError, match=r"^rank 2 and rank 0 are on different machines: must be on one on the CPU$"
    ):
        check_places(0, [replace(place, gpu=None) for place in several])


def test_the_ranks_of_a_node_may_be_on_machines_of_one_nvlink_domain() -> None:
    """Also where a node is a part of the domain; a machine's ranks need none."""
    cfg = EPConfig(128, 8, 2, 16, 4, ranks_per_node=2)
    one = [Place(cfg, f"machine {rank}", f"GPU-{rank}", "clique 0") for rank in range(4)]
    two = [replace(place, clique=f"clique {rank // 2}") for rank, place in enumerate(one)]
    apart = [replace(place, machine="machine") for place in two]
    for found in (one, two, apart):
        check_places(0, found)
    unknown = [*one[:1], replace(one[1], clique=None), *one[2:]]
    for found in ([*one[:1], replace(one[1], clique="clique 1"), *one[2:]], unknown):
        with pytest.raises(EPConfigError, match=r"^rank 1 and rank 0 are on different machines: must be on one, or in"):
            check_places(0, found)


# ---- how many ranks make a node


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("abc", 1),
        ("a", 1),
        ("a" * 32, 32),
        ("a" * 72, 24),
        ("a" * 36 + "b" * 36, 18),
        ("a" * 64, 32),
        ("a" * 37, 1),
    ],
    ids=lambda one: f"{len(one)} in {len(set(one))}" if isinstance(one, str) else "",
)
def test_domains_with_as_many_ranks_each_are_nodes_or_several_of_at_most_32(named: str, found: int) -> None:
    assert equal_parts(named) == found


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        (
            "aab",
            r"^ranks \[0, 1\] are on one machine, or in one NVLink domain, and ranks \[2\] in another: must be as",
        ),
        (
            "abab",
            r"^ranks \[0\], \[1\], \[2\], \[3\] are on machines, or in NVLink domains, in turns: the ranks of one",
        ),
    ],
)
def test_other_domains_make_no_nodes(named: str, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        equal_parts(named)


def test_a_domain_is_a_clique_where_all_its_ranks_have_fabric_handles(caplog: pytest.LogCaptureFixture) -> None:
    """Else its machines; one that is within a machine needs none, and nothing is said of it."""
    several = [Seat(f"machine {rank // 4}", "clique") for rank in range(72)]
    assert set(domains(several)) == {"clique"} and equal_parts(domains(several)) == 24
    assert equal_parts(domains([Seat("machine", "clique", "no") for _ in range(4)])) == 4 and not caplog.records
    one_has_none = [*several[:5], several[5]._replace(refusal="NOT_PERMITTED"), *several[6:]]
    assert equal_parts(domains(one_has_none)) == 4
    (said,) = (one.getMessage() for one in caplog.records)
    assert said.startswith("the 18 machines of an NVLink domain are taken as nodes") and "rank 5: NOT_PERM" in said
    unknown = [seat._replace(clique=None) for seat in several]
    assert equal_parts(domains(unknown)) == 4
    assert domains([*several[:4], *unknown[4:8]]) == ["clique"] * 4 + ["machine 1"] * 4


# ---- this process


@pytest.mark.parametrize("clique", [None, "c.1"])
def test_a_place_and_a_seat_have_the_clique_of_the_gpu(monkeypatch: pytest.MonkeyPatch, clique: str | None) -> None:
    """Fabric handles are tried only where there is one; without a GPU nothing is asked."""
    tried: list[object] = []
    monkeypatch.setattr(places, "clique_of", lambda device: clique)
    monkeypatch.setattr(places, "machine", lambda: "here")
    monkeypatch.setattr(places, "refusal", lambda *given: tried.append(given) or "no")
    assert (Seat.own(), Place.of(CFG, None)) == (Seat("here"), Place(CFG, "here", None)) and not tried
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Place.of(CFG, torch.device("cuda", 2)) == Place(CFG, "here", "1234", clique)
    assert Seat.own() == Seat("here", clique, clique and "no")
    assert tried == ([] if clique is None else [(places.Kind.FABRIC, torch.device("cuda", 2))])
