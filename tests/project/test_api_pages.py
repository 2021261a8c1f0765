"""The pages of the API reference, which `make docs` fills from docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import cute_ep

PAGES = Path(__file__).parents[2] / "docs" / "api"


def test_every_public_name_is_on_one_page() -> None:
    found = [
        name
        for page in sorted(PAGES.glob("*.rst"))
        for name in re.findall(r"^\.\. auto\w+:: cute_ep\.(\w+)(?:\(\))?$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(set(found) & set(cute_ep.__all__)) == sorted(cute_ep.__all__)
    assert len(found) == len(set(found))
