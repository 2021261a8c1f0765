"""The model that explains times by ceilings and bytes."""

from __future__ import annotations

import pytest

from cute_ep.bench.measure import CONDITIONS
from perf import model
from perf.runs import read_kept
from tests.perf.example import CEILINGS, example_run, synthetic


def test_a_fit_recovers_the_constants_of_the_model() -> None:
    run = example_run() | {"cases": synthetic(overhead=7.5, link=0.62, memory=0.44)}
    fits = model.fit_model([run, run])
    assert set(fits) == {("dispatch", "bf16"), ("dispatch", "fp8"), ("combine_exact", None), ("combine_partial", None)}
    for fit in fits.values():
        assert (fit.overhead_us, fit.link, fit.memory) == pytest.approx((7.5, 0.62, 0.44), rel=0.02)


def test_a_fit_has_no_negative_overhead() -> None:
    fit = model.fit_constants([(10.0, 0.0, 10.0, 12.0), (20.0, 0.0, 25.0, 27.0)])
    assert fit.overhead_us == 0 and 0.8 <= fit.link <= 1
    assert model.fit_constants([(0.0, 0.0, 5.0, 7.0)]).overhead_us == pytest.approx(5.0)


def test_the_model_predicts_a_pair_from_its_launches() -> None:
    cases = synthetic()
    fits = model.fit_model([example_run() | {"cases": cases}])
    for one in cases:
        assert model.predict(one, fits, CEILINGS) == pytest.approx(one["p50_us"], rel=0.01)
    assert model.predict(cases[0] | {"format": "mxfp4"}, fits, CEILINGS) is None
    text = model.errors_table(cases, fits, CEILINGS)
    assert text.count("+0%") + text.count("-0%") == len(cases)
    graphs = sum(one["operation"] not in ("pair_chained", *CONDITIONS) for one in cases)
    text = model.summary_table(example_run() | {"cases": cases}, fits)
    launches = sum(one["operation"] in model.LAUNCHES for one in cases)
    assert f"| fitted | {launches} | {launches} | 0% | 0% |" in text
    assert f"| not fitted | {graphs - launches} | {graphs - launches} | 0% | 0% |" in text


def test_ranks_that_share_a_gpu_are_another_machine() -> None:
    alone, shared = example_run(), example_run()
    shared["machine"] = shared["machine"] | {"devices": ["cuda:0", "cuda:0"]}
    shared["cases"] = synthetic(overhead=50.0)
    assert model.page(alone, [alone, shared]) == model.page(alone, [alone])
    assert "| 50." in model.page(shared, [alone, shared])
    assert model.predictions_text({"shared": shared}, {"shared": model.fit_for(shared, [alone, shared])}) == ""


def test_other_machines_scale_with_their_nominal_rates() -> None:
    there = model.ceilings_elsewhere(CEILINGS, "NVIDIA H200", "B200")
    assert there is not None and there.push == 2 * CEILINGS.push and there.flag == CEILINGS.flag
    assert there.memory == pytest.approx(CEILINGS.memory * 8 / 4.8)
    assert model.ceilings_elsewhere(CEILINGS, "GeForce", "B200") is None
    eight = model.expected_case("dispatch", "bf16", 8, 64)
    assert eight["parts"][0][0] / (64 * 14336) == pytest.approx(4.63, rel=0.1)  # remote ranks of a token, top-8 of 256
    run = example_run()
    text = model.predictions_text({"run": run}, {"run": model.fit_for(run, [run])})
    assert "NVL72" in text and "8 x H200" in text


def test_predictions_are_from_the_run_on_most_gpus() -> None:
    few, many = example_run(), example_run() | {"cases": synthetic(overhead=40.0)}
    many["machine"] = many["machine"] | {"gpus": {f"cuda:{index}": "NVIDIA H200" for index in range(4)}}
    runs = {"h200x2": few, "h200x4": many}
    text = model.predictions_text(runs, {name: model.fit_model([run]) for name, run in runs.items()})
    assert "arithmetic of h200x4, in us:" in text
    assert text.split("\n\n")[1] == model.elsewhere_table(model.fit_model([many]), CEILINGS, "NVIDIA H200")
    unknown = {"x": few | {"machine": few["machine"] | {"gpus": {"cuda:0": "GeForce"}}}}
    assert model.predictions_text(unknown, {"x": model.fit_model([few])}) == ""


def test_a_sentence_says_how_well_runs_are_explained() -> None:
    """Of the cases that constants are not fitted to; nothing where there are none."""
    every = list(read_kept().values())
    text = model.summary_text((run, model.fit_for(run, every)) for run in every)
    found = [
        error
        for run in every
        for case, error in model.errors(run, model.fit_for(run, every))
        if not model.is_fitted(case)
    ]
    near = sum(error <= model.GOOD for error in found)
    assert f"within 15% for {near} of {len(found)} cases" in text and f"largest {max(found):.0%}" in text
    assert model.summary_text([]) == ""
