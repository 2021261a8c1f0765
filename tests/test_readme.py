"""The README's code runs as printed, and what it states as numbers is what the code computes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cute_ep.config import EPConfig, memory_bytes
from cute_ep.layouts.arena import message_bytes
from cute_ep.layouts.formats import FORMATS
from cute_ep.layouts.variants import ARCHITECTURES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def block(word: str) -> str:
    (found,) = (code for code in BLOCKS if word in code)
    return found


def test_example_runs(tmp_path: Path) -> None:
    code = block("connect_local")
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "tokens", "hidden"),
    [(4, 256, 8, 128, 7168), (4, 256, 8, 4096, 7168), (1, 1, 1, 1, 32), (7, 21, 3, 129, 2880), (32, 1024, 32, 11, 96)],
)
def test_memory_formula(fmt: str, ranks: int, experts: int, top_k: int, tokens: int, hidden: int) -> None:
    names: dict[str, Any] = {}
    exec(block("def arena_bytes"), names)
    cfg = EPConfig(hidden, experts, top_k, tokens, ranks, fmt)
    message = message_bytes(cfg.format, hidden)
    printed = names["arena_bytes"](R=ranks, L=experts // ranks, K=top_k, T=tokens, H=hidden, message=message)
    assert printed == memory_bytes(cfg)


def test_table_names_every_format_and_architecture() -> None:
    header, *rows = [line for line in TEXT.splitlines() if (line.startswith("|") and "sm_90a" in line) or "| `" in line]
    assert all(arch in header for arch in ARCHITECTURES)
    assert {fmt for fmt in FORMATS if any(row.startswith(f"| `{fmt}`") for row in rows)} == set(FORMATS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/seed_map.md", "docs/protocol.md"])
def test_links_lead_somewhere(page: str) -> None:
    source = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", source.read_text()):
        assert "://" in target or (source.parent / target).exists(), target
