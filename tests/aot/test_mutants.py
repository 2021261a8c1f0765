"""A mistake that no GPU is sure to show is in the machine code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cute_ep.layouts.maps.variants import Variant
from tests.gpu import mutants

from .conftest import disassemble
from .test_machine_code import posts

KERNEL = "combine_wait_exact"


def test_a_relaxed_post_of_consumed_is_seen(sass: Callable[[Variant], list[str]], tmp_path: Path) -> None:
    """`posts` counts a release less than in the kernel as it is, where there is one."""
    assert posts(sass(Variant(KERNEL, "sm_90a")))[0] == 1
    source, library = tmp_path / "source", tmp_path / "library"
    source.mkdir()
    mutants.make_tree("WEAK_ACK", source)
    words = ["-m", "cute_ep", "build", "--arch", "sm_90a", "--kernel", KERNEL, "--out", str(library)]
    process = mutants.start(source, words)
    assert process.wait() == 0, process.communicate()
    (cubin,) = library.glob("sm_90a/*.cubin")
    releases, relaxed, _ = posts(disassemble(cubin))
    assert (releases, relaxed) == (0, 1)
