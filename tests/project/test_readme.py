"""The README's code runs as printed, what it states as numbers is what the code computes, and tests that documents name
exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from cute_ep.api.buffers import buffer_shapes
from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import ARCHITECTURES
from cute_ep.runtime import local_ops
from tests.processes import ROOT, run_code, run_torchrun

DOCS = ROOT / "docs"
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_layer_of_the_guide_runs_and_the_rest_of_its_code_is_python(tmp_path: Path) -> None:
    """The layer of docs/use.md runs as printed, the rest of its code is Python."""
    layer, *others = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.DOTALL)
    done = run_code(layer, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(others) == 1
    for code in others:
        compile(code, "docs/use.md", "exec")


def test_every_file_and_name_of_the_tour_exists() -> None:
    """Every file, and in it every class and function that it names."""
    tour = (ROOT / "docs" / "tour.md").read_text()
    files = re.findall(r"`([\w/]+\.py)`", tour)
    assert len(files) > 30 and all((ROOT / file).exists() for file in files)
    named = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", tour)
    assert len(named) > 25
    for file, name in named:
        for part in name.split("."):
            assert re.search(rf"^\s*(def|class) {part}\b", (ROOT / file).read_text(), re.MULTILINE), (file, name)


def test_files_that_the_lessons_name_are_there() -> None:
    files = re.findall(r"`([\w/]+\.py)`", (DOCS / "lessons.md").read_text())
    assert len(files) > 15 and all((ROOT / file).exists() for file in files)


def test_lessons_that_others_name_are_there() -> None:
    """Code and documents point at a lesson by its heading."""
    headings = re.findall(r"^## (.*)$", (DOCS / "lessons.md").read_text(), re.MULTILINE)
    pages = [
        *DOCS.glob("*.md"),
        *(path for folder in ("layouts", "kernels", "cute_ep") for path in (ROOT / folder).rglob("*.py")),
    ]
    named = [name for page in pages for name in re.findall(r'lessons\.md[`)]+,\s+"([^"]+)"', page.read_text())]
    assert len(named) > 4
    for name in named:
        assert " ".join(name.split()) in headings, name


@pytest.mark.slow
def test_the_first_example_runs(tmp_path: Path) -> None:
    """As printed, on two ranks."""
    (example,) = BLOCKS
    assert len([line for line in example.splitlines() if line.strip()]) <= 22
    (tmp_path / "script.py").write_text(example)
    said = run_torchrun(["--standalone", "--nproc-per-node", "2", "script.py"], tmp_path)
    lines = re.findall(r"rank \d: every token came home", said)  # ends of lines may come later: print writes twice
    assert sorted(lines) == [f"rank {rank}: every token came home" for rank in range(2)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "tokens", "hidden"),
    [(4, 256, 8, 128, 7168), (4, 256, 8, 4096, 7168), (1, 8, 4, 1024, 2048), (8, 384, 6, 2048, 2880)],
)
def test_the_rule_of_memory_is_near_what_the_code_computes(
    fmt: str, ranks: int, experts: int, top_k: int, tokens: int, hidden: int
) -> None:
    """Within a tenth, of configurations of models."""
    (rule,) = re.findall(r"`(\(2 \* R .*?)`", (DOCS / "reference.md").read_text(), re.DOTALL)
    record = FORMATS[fmt]
    hidden = -(-hidden // record.multiple) * record.multiple
    row = record.payload_bytes(hidden) + record.scale_bytes(hidden) + record.row_scale_bytes
    for other in ({}, {"skip_a2a": True}, {"row_order": "rank_major"}):
        cfg = EPConfig(hidden, experts, top_k, tokens, ranks, fmt, **other)  # type: ignore[arg-type]
        names = {"R": cfg.peers, "K": top_k, "T": tokens, "H": hidden, "row_bytes": row}
        assert eval(rule, {}, names) == pytest.approx(memory_bytes(cfg), rel=0.1)


def test_the_numbers_of_memory_are_what_the_code_computes() -> None:
    """MiB for the three formats at 128 and at 4096 tokens, large ones to two digits; and the largest output buffer."""
    small, large = ([config(fmt, tokens) for fmt in ("bf16", "fp8", "nvfp4")] for tokens in (128, 4096))
    mib = [memory_bytes(cfg) / 2**20 for cfg in small]
    words = " ".join(TEXT.split())
    assert ", ".join(f"{size:.0f}" for size in mib) + " MiB (`bf16`, `fp8`, `nvfp4`) for 128 tokens" in words
    assert ", ".join(f"{round(memory_bytes(cfg) / 2**20, -1):.0f}" for cfg in large) + " MiB for 4096" in words
    rows = large[0].max_rows
    text = (DOCS / "reference.md").read_text()
    assert f"{rows} rows, {rows * 2 * 7168 / 2**30:.2f} GiB" in text


def config(fmt: str, tokens: int) -> EPConfig:
    """The deployment that the numbers are of."""
    return EPConfig(7168, 256, 8, tokens, 4, fmt)


def test_options_of_swiglu_that_are_named_exist() -> None:
    text = (DOCS / "reference.md").read_text()
    for name in ("interleaved", "gate", "bias", "scales_offsets", "scale_layout"):
        assert name in inspect.signature(local_ops.fused_silu).parameters and re.search(rf"[`(]{name}[=`]", text), name


def test_table_says_what_each_format_is() -> None:
    section = (DOCS / "reference.md").read_text().partition("## NaN and infinities")[0]
    rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
    assert list(rows)[1:] == list(FORMATS)
    element = {
        "bf16": "bfloat16",
        "e4m3": "8-bit e4m3",
        "e2m1": "4-bit e2m1",
        "e2m3": "6-bit e2m3",
        "e3m2": "6-bit e3m2",
    }
    for fmt in FORMATS.values():
        _, _, payload, scales, _, places, alignment, _ = (cell.strip() for cell in rows[fmt.name].split("|"))
        assert payload == element[fmt.element.name]
        assert places == ", ".join(f"`{name}`" for name in fmt.scale_layouts)
        assert alignment == str(fmt.row_alignment)
        assert (scales == "none") == (fmt.scale is None)
        assert ("per tensor" in scales, "per row" in scales) == (fmt.global_scale, fmt.row_scale)
    for fmt, multiple in {
        "bf16": 8,
        "fp8": 128,
        "nvfp4": 32,
        "mxfp4": 32,
        "mxfp8": 32,
        "mxfp6_e2m3": 64,
        "mxfp6_e3m2": 64,
    }.items():
        FORMATS[fmt].check_hidden(multiple)
        for less in range(1, multiple):
            with pytest.raises(ValueError, match="hidden = "):
                FORMATS[fmt].check_hidden(less)
    assert all(arch in TEXT for arch in ARCHITECTURES) and all(f"`{fmt}`" in TEXT for fmt in FORMATS)


def cells_of(name: str) -> list[str]:
    """The cells of docs/reference.md behind a name, which may stand beside others; not those about NaN."""
    before, _, rest = (DOCS / "reference.md").read_text().partition("## NaN and infinities")
    lines = (before + rest.partition("\n## ")[2]).splitlines()
    rows = [line.strip("|").split("|") for line in lines if line[:1] == "|"]
    (row,) = (row for row in rows if name in row[0].strip().split(", "))
    return [cell.strip() for cell in row[1:]]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("hidden", [896, 7168, 96])
def test_tables_of_shapes_and_bytes(fmt: str, hidden: int) -> None:
    """What dispatch returns, and bytes of a row."""
    if hidden % FORMATS[fmt].multiple:
        return
    record, words = FORMATS[fmt], -(-hidden // (64 if fmt.startswith("nvfp4") else 128))
    tokens, first, linear = cells_of(fmt)
    assert "for `nvfp4_row` `row_scales` [C] bfloat16." in " ".join((DOCS / "reference.md").read_text().split())
    row_scales = "[C] bfloat16" if fmt == "nvfp4_row" else "None"
    for layout, scales in {None: first, "linear": linear}.items():
        cfg = EPConfig(hidden, 16, 2, 128, 4, fmt, scale_layout=layout if record.scale else None)
        letters = {"C": 1000, "H": hidden, "G": cfg.groups, "W": words, "B": (1000 + 128 * cfg.groups) // 128}
        shapes = buffer_shapes(cfg, 1000)
        for name, cell in {"tokens": tokens, "scales": scales, "row_scales": row_scales}.items():
            extents, _, kind = cell.rpartition(" ")
            want = None if cell == "None" else (tuple(eval(extents, {}, letters)), getattr(torch, kind))
            assert shapes[name] == want, (name, layout)
    sizes = eval(cells_of(f"`{fmt}`")[2], {}, {"H": hidden})
    assert sizes == (record.payload_bytes(hidden), record.scale_bytes(hidden), record.row_scale_bytes)


@pytest.mark.parametrize("page", ["docs/protocol.md", "docs/reference.md", "README.md"])
def test_named_tests_exist(page: str) -> None:
    for name in re.findall(r"`(tests/[^`\s]*)`", (ROOT / page).read_text()):
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "perf/results/README.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    source = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", source.read_text()):
        assert "://" in target or (source.parent / target).exists(), target
