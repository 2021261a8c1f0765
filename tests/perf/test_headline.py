"""The README's first numbers."""

from __future__ import annotations

import pytest

from perf.cases import MAIN
from perf.headline import headline
from perf.peer_list import CHAINED

from .example import example_run


def case(operation: str, tokens: int, p50_us: float, **others: object) -> dict:
    about = {"shape": MAIN.text, "routing": "uniform", "format": "bf16"}
    return about | {"operation": operation, "tokens": tokens, "p50_us": p50_us} | others


def peer(name: str, operation: str, tokens: int, p50_us: float, **others: object) -> dict:
    return {"peer": name, "format": "bf16", "operation": operation, "tokens": tokens, "p50_us": p50_us} | others


def run_of_all_kinds() -> dict:
    run = example_run()
    run["cases"] = [
        *(case("pair", tokens, time) for tokens, time in ((1, 10.0), (128, 40.0), (4096, 900.0))),
        *(case("pair_exact", tokens, time) for tokens, time in ((1, 12.0), (4096, 1600.0))),
        case(CHAINED, 1, 12.0, host_us=30.0),
        case(CHAINED, 4096, 905.0, host_us=30.0),
    ]
    run["sweep"] = [
        case(operation, tokens, time, sms=sms)
        for sms, share in ((8, 3.0), (24, 1.0), (132, 0.5))
        for operation, tokens, time in (
            ("dispatch", 128, 60 * share),
            ("combine_partial", 128, 40 * share),
            ("dispatch", 4096, 1100 * share),
        )
    ]
    run["orders"] = [case("pair", 1, 9.0, order="rank_major"), case("pair", 128, 1.0, order="blocks")]
    run["peers"] = [
        peer("nccl_ag_rs", "pair", 1, 15.0),
        peer("nccl_ag_rs_windows", "pair", 1, 14.0),
        peer("deepep_low_latency", "pair", 1, 50.0),
        peer("nccl_ag_rs", "pair", 4096, 1200.0),
        peer("deepep_normal", "pair", 4096, 1800.0),
        peer("deepep_normal", "dispatch", 128, 70.0),
        peer("deepep_normal", "combine", 128, 50.0),
        peer("deepep_normal_tuned", "dispatch", 128, 65.0),
        peer("deepep_normal_tuned", "combine", 128, 52.5),
        peer("nccl_ag_rs", CHAINED, 1, 20.0, host_us=45.0),
        peer("deepep_low_latency", CHAINED, 1, 44.0, host_us=25.0),
        peer("deepep_low_latency", "pair", 1, 1.0) | {"format": "fp8"},
    ]
    return run


def test_pairs_stand_beside_the_fastest_library_of_each_condition() -> None:
    """On few SMs halves are added; without a graph the longer of two times counts; of other formats nothing."""
    text = headline(run_of_all_kinds())
    table = (
        "| tokens per rank | 24 SMs | fastest other | all SMs | `rank_major` | fastest other "
        "| no graph | fastest other |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| 1 |  |  | 10.0 | 9.0 | 14.0 (NCCL) | 30.0 | 44.0 (DeepEP) |\n"
        "| 128 | 100.0 | 117.5 (DeepEP) | 40.0 |  |  |  |  |\n"
        "| 4096 |  |  | 900.0 |  | 1200.0 (NCCL) | 905.0 |  |\n"
    )
    assert (
        text.startswith("A dispatch and a combine on 2 x NVIDIA H200, in us: BF16 tokens of 7168 elements")
        and table in text
    )
    assert "On few SMs" in text and "as `rank_major` does" in text and "Without a graph the longer" in text
    assert "takes 1600 us with 4096 tokens on all SMs, so it loses to NCCL." in text


def test_conditions_that_were_not_measured_have_no_columns() -> None:
    run = run_of_all_kinds()
    pairs = [one for one in run["cases"] if one["operation"] == "pair"]
    text = headline(run | {"sweep": [], "orders": [], "cases": pairs})
    assert "| tokens per rank | all SMs | fastest other |\n" in text
    assert not any(words in text for words in ("few SMs", "rank_major", "Without a graph", "exact"))
    assert headline(run | {"peers": []}) == "" == headline(run | {"cases": [], "sweep": [], "orders": []})


@pytest.mark.parametrize(("theirs", "lost"), [(99.0, True), (99.01, False), (100.0, False), (101.0, False)])
def test_exact_pairs_lose_where_they_are_slower_by_a_hundredth(theirs: float, lost: bool) -> None:
    run = run_of_all_kinds()
    run["cases"] = [case(operation, 4096, 100.0) for operation in ("pair", "pair_exact")]
    run["peers"] = [peer("nccl_ag_rs", "pair", 4096, theirs)]
    assert ("so it loses to NCCL" in headline(run)) == lost
