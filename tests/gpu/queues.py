"""Programs with more streams than CUDA has queues for them, unless it is told otherwise when a process begins. Behind a
kernel that waits for a peer another rank's would not start."""

from __future__ import annotations

import os
import subprocess
import sys

from .mutants import ROOT


def run_with_queues(module: str, *words: object, timeout_s: float = 240) -> None:
    """Run `python -m tests.gpu.MODULE WORDS` with as many queues as a GPU has, 32; AssertionError if it fails."""
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command = [sys.executable, "-m", f"tests.gpu.{module}", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
