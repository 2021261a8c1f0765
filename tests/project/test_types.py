"""Types of the code that documents print, and of what a type checker must refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_code_in_documents_has_the_types_that_it_claims_and_wrong_code_is_refused(tmp_path: Path) -> None:
    """The blocks of a document one after the other, as they stand."""
    pytest.importorskip("mypy")
    package = tmp_path / "cute_ep"
    shutil.copytree(ROOT / "cute_ep", package, ignore=shutil.ignore_patterns("library", "__pycache__"))
    for document in ("README.md", "docs/use.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
        (tmp_path / f"{Path(document).stem.lower()}_blocks.py").write_text("\n".join(blocks))
    (tmp_path / "wrong.py").write_text(
        "import torch\nfrom cute_ep import EPConfig, connect_local, fused_silu\n"
        "ep = connect_local(EPConfig(8, 8, 2, 4, 1), ['cpu'])[0]\n"
        "reveal_type(ep.dispatch_wait(ep.dispatch_async(torch.ones(1), torch.ones(1))))\n"
        "reveal_type(fused_silu(torch.ones(1), fmt='fp8'))\n"
        "EPConfig(8, 8, 2, 4, 1, 'fp9')\n"
        "ep.combine(torch.ones(1), ep.dispatch(torch.ones(1), torch.ones(1)), mode='exakt')\n"
        "fused_silu(torch.ones(1), fmt='nvfp4_row')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "cache"]
    # whether names exist is seen where the blocks run
    files = ["--disable-error-code", "name-defined", "readme_blocks.py", "use_blocks.py", "wrong.py"]
    done = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True)
    found = [line.partition(": ") for line in done.stdout.splitlines() if "_blocks.py" in line]
    assert not found, done.stdout
    told: dict[int, str] = defaultdict(str)
    for line in done.stdout.splitlines():
        if line.startswith("wrong.py:"):
            told[int(line.split(":")[1])] += line
    assert 'Revealed type is "cute_ep.api.dispatched.Dispatched"' in told[4]
    assert "cute_ep.api.row_tensors.SwigluRows" in told[5]
    assert all("error" in told[line] for line in (6, 7, 8)), done.stdout
