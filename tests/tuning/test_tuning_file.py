"""Tables that were measured here: the file that they are in, for what they hold, and who looks for them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import cute_ep
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.launch import RING_BYTES
from cute_ep.runtime import connection
from cute_ep.tuning import file as tuning_file
from cute_ep.tuning.builtin import TABLE_CTAS, built_in
from cute_ep.tuning.file import read_tables, write_tables
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

from .launch_tables import CFG, MINE, find, setting


def test_tables_come_back_from_the_file(file: Path) -> None:
    assert read_tables() == {} and find() == built_in(CFG, TABLE_CTAS)
    built = built_in(CFG, TABLE_CTAS)
    write_tables({setting(): built.dispatch, setting("combine"): MINE})
    assert read_tables() == {setting(): built.dispatch, setting("combine"): MINE}
    write_tables({setting(): MINE})
    assert read_tables() == {setting(): MINE, setting("combine"): MINE}, "others stay"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no draft is left"


@pytest.mark.parametrize("order", ["absent", None])
def test_tables_of_files_without_an_order_are_of_rows_by_expert(order: str | None, file: Path) -> None:
    write_tables({setting("combine"): MINE})
    content = json.loads(file.read_text())
    for row in content["tables"]:
        del row["setting"]["order"]
        row["setting"] |= {} if order == "absent" else {"order": order}
    file.write_text(json.dumps(content))
    assert read_tables() == {setting("combine"): MINE}
    assert find().combine == MINE != find(replace(CFG, row_order="rank_major")).combine


def test_tables_hold_for_what_they_were_measured_with() -> None:
    write_tables({setting(): MINE, setting("combine", replace(CFG, top_k=4)): MINE})
    built = built_in(CFG, TABLE_CTAS)
    assert find() == Tuning(MINE, built.combine)
    assert find(replace(CFG, max_tokens_per_rank=8, timeout_s=1.0)).dispatch == MINE
    assert find(replace(CFG, top_k=4)) == Tuning(built.dispatch, MINE)
    nvfp4 = replace(CFG, top_k=4, dispatch_format="nvfp4")
    assert find(nvfp4) == Tuning(built_in(nvfp4, TABLE_CTAS).dispatch, MINE), "rows come home as bfloat16"
    for other in (
        {"hidden": 4096},
        {"num_experts": 128},
        {"world_size": 8},
        {"dispatch_format": "fp8"},
        {"skip_a2a": True},
        {"row_order": "rank_major"},
    ):
        cfg = replace(CFG, **other)
        assert find(cfg) == built_in(cfg, TABLE_CTAS), other
    assert find(gpu="NVIDIA B200") == find(gpus=1) == built
    assert find(ctas=32) == built_in(CFG, 32)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"version": "VERSION"}', '{"version": "VERSION", "tables": [[]]}'],
    ids=["empty", "cut off", "a list", "a number", "no version", "no tables", "a table that is a list"],
)
def test_a_damaged_file_is_named_and_not_overwritten(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text.replace("VERSION", cute_ep.__version__))
    with pytest.raises(EPConfigError, match=re.escape(f"{file}: ") + ".*remove the file"):
        find()
    with pytest.raises(EPConfigError, match=re.escape(str(file))):
        write_tables({setting(): MINE})
    assert file.read_text() == text.replace("VERSION", cute_ep.__version__)


@pytest.mark.parametrize(
    ("field", "value"),
    [("pieces", 3), ("pieces", "2"), ("tokens", MANY), ("extra", 1), ("grid", None)],
    ids=["3 slices", "slices as text", "tokens that do not ascend", "an unknown field", "no grid"],
)
def test_a_table_that_no_kernel_could_run_is_damage_unless_of_another_version(
    file: Path, field: str, value: object
) -> None:
    write_tables({setting(): MINE})
    content = json.loads(file.read_text())
    content["tables"][0]["entries"][0][field] = value
    file.write_text(json.dumps(content))
    with pytest.raises(EPConfigError, match=re.escape(str(file))):
        read_tables()
    content["version"] = "0.0.1"
    file.write_text(json.dumps(content))
    assert read_tables() == {} and find() == built_in(CFG, TABLE_CTAS), "another version's file does not count"
    write_tables({setting(): MINE})
    assert read_tables() == {setting(): MINE}


# ---- communicators


@pytest.mark.parametrize("given", [None, Tuning(MINE, MINE)], ids=["from the file", "given"])
def test_all_ranks_read_the_file_once_and_not_where_a_tuning_is_given(
    given: Tuning | None, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read() -> dict:
        reads.append(1)
        return {setting("combine"): MINE}

    monkeypatch.setattr(tuning_file, "read_tables", read)
    ranks = connection.connect_local(CFG, [f"cuda:{index}" for index in range(4)], tuning=given)
    wanted = given or Tuning(built_in(CFG, TABLE_CTAS).dispatch, MINE)
    assert [rank.tuning for rank in ranks] == [wanted] * 4
    assert len(reads) == (given is None)


def test_ranks_have_the_tables_measured_with_as_many_ctas(gpus: None) -> None:
    """Of the SM budget, and of the ranks that share a GPU, with a budget or without."""
    few, half = (Entry(MANY, 30, 0, 1),), (Entry(MANY, 60, 0, 1),)
    write_tables({setting(ctas=32, ring=RING_BYTES): few, setting(): MINE, setting(gpus=3, ctas=62): half})
    for sms, ctas, table, ring in ((32, 32, few, RING_BYTES), (132, TABLE_CTAS, MINE, 0), (64, 64, None, RING_BYTES)):
        built = built_in(CFG, ctas, ring_bytes=ring)
        ranks = connection.connect_local(CFG, [f"cuda:{index}" for index in range(4)], sms=sms)
        assert [rank.tuning for rank in ranks] == [replace(built, dispatch=table or built.dispatch)] * 4
    whole, budget = built_in(CFG, TABLE_CTAS).dispatch, built_in(CFG, 62, ring_bytes=RING_BYTES).dispatch
    for sms, tables in ((None, [half, half, whole, whole]), (62, [budget] * 4)):
        ranks = connection.connect_local(CFG, ["cuda:0", "cuda:0", "cuda:1", "cuda:2"], sms=sms)
        assert [rank.tuning.dispatch for rank in ranks] == tables


def test_tables_of_few_tokens_are_not_those_of_deployments_with_pipelines(gpus: None) -> None:
    """`cute-ep tune` connects for the most tokens that it measures; combine has no pipelines for few."""
    few = replace(CFG, max_tokens_per_rank=128)
    write_tables({setting("combine", few, ctas=24, ring=RING_BYTES): MINE})
    assert find(few, ctas=24, ring=RING_BYTES).combine == MINE
    assert find(ctas=24, ring=RING_BYTES) == built_in(CFG, 24, ring_bytes=RING_BYTES)
    assert find(ctas=24).combine == MINE, "nor has it where CTAs may not fill SMs"
