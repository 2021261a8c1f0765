"""`cute-ep verify`: which cases it takes, where it runs, and what a difference looks like."""

from __future__ import annotations

import json

import pytest
import torch

from cute_ep import reference
from cute_ep.cli import verify
from cute_ep.cli.main import main
from cute_ep.layouts.maps.formats import FORMATS


def test_verify_covers_every_format_size_and_routing() -> None:
    """Without --quick: each in every format; the largest batch has one routing a format, a different one each."""
    cases = list(verify.cases_of(verify.SHAPES[0], 4, verify.TOKENS, verify.ROUTINGS))
    assert len(cases) == len(set(cases)) and {case.split for case in cases} == {False, True}
    small = {(case.fmt, case.tokens[0], case.routing) for case in cases if case.tokens[0] < verify.LARGEST}
    sizes = [size for size in (*verify.TOKENS, verify.OPTION_TOKENS) if size < verify.LARGEST]
    assert small >= {(fmt, size, routing) for fmt in FORMATS for size in sizes[:-1] for routing in verify.ROUTINGS}
    large = [case.routing for case in cases if case.tokens[0] >= verify.LARGEST]
    assert len(large) == len(FORMATS) and set(large) == set(verify.ROUTINGS)
    assert verify.formats_of(2880) == [fmt for fmt in FORMATS if FORMATS[fmt].block < 128]


def test_verify_takes_every_format_size_routing_and_option_and_writes_a_report(
    tmp_path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(verify, "QUICK_SHAPES", ((128, 12, 3), (96, 12, 3)))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (0, 7))
    monkeypatch.setattr(verify, "OPTION_TOKENS", 9)
    report = tmp_path / "verify.json"
    assert main(["verify", "--devices", "cpu:3", "--json", str(report)]) == 0
    # 9 and 5 formats: 2 sizes by 2 routings; 5 options but 3 for bf16, fused and split
    wanted = (9 + 5) * 4 + 2 * (8 * 5 + 3 + 4 * 5 + 3)
    assert f"all {wanted} cases are bit-exact" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert len(content["cases"]) == wanted and content["machine"]["devices"] == ["cpu"] * 3
    assert content["machine"]["command"].startswith("cute-ep verify")
    assert {(case["fmt"], case["options"]) for case in content["cases"] if case["hidden"] == 128} == {
        (fmt, name)
        for fmt, one in FORMATS.items()
        for name, some in verify.OPTIONS.items()
        if one.scale or not some.scaled
    }


def test_verify_takes_the_cpu_where_there_is_no_gpu_and_says_so_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(verify, "QUICK_SHAPES", ((96, 12, 3),))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (3,))
    monkeypatch.setattr(verify, "OPTIONS", {verify.PLAIN: verify.Options()})
    assert main(["verify"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "4 ranks of the reference backend on the CPU, since this machine has no CUDA GPU"
    assert "bit-exact" in others[-1]


def test_verify_fails_at_a_difference_and_says_where_it_is(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(verify, "QUICK_SHAPES", ((128, 12, 3),))
    monkeypatch.setattr(verify, "QUICK_TOKENS", (5,))
    monkeypatch.setattr(verify, "OPTIONS", {verify.PLAIN: verify.Options()})
    truth = reference.combine
    monkeypatch.setattr(reference, "combine", lambda *args, **named: [out * 2 for out in truth(*args, **named)])
    assert main(["verify", "--devices", "cpu:2"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "rank 0 combine exact" in out and "18 of 18 cases differ" in out
