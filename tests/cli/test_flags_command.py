"""`cute-ep flags`: what ranks wrote when they gave up, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.cli.main import main
from cute_ep.runtime.connection import connected


def test_flags_of_ranks_that_gave_up_name_the_one_that_did_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cfg = EPConfig(64, 6, 2, 8, 3, "bf16", timeout_s=1)
    given = torch.ones(2, 64).bfloat16(), torch.tensor([[0, 5], [2, 3]]), torch.ones(2, 2)
    files = [str(tmp_path / f"{rank}.json") for rank in (2, 0, 1)]
    with connected(cfg, ["cpu"] * 3) as ranks:
        for one in ranks:
            one.dispatch(*given)
        for one in (ranks[0], ranks[2]):
            one.dispatch(*given)
        for one in (ranks[0], ranks[2]):
            with pytest.raises(EPTimeout) as caught:
                one.synchronize()
            assert caught.value.flags == one.flags()
            caught.value.flags.write(tmp_path / f"{one.rank}.json")
        assert main(["flags", *files[:2]]) == 0
        told = capsys.readouterr().out
        needs = "  dispatch round 2 needs rank 1: calls[1]: round 1, must be 2: it has not made this call"
        assert [line for line in told.splitlines() if "needs" in line] == [needs, needs]
        assert told.index("rank 0 has completed 2 dispatches sent") < told.index("rank 2 has completed")
        assert told.endswith("look first at rank 1, for which rank(s) [0, 2] wait: there are no flags of it here\n")
        ranks[1].flags().write(files[2])
        assert main(["flags", *files]) == 0
        assert "look first at rank(s) [1]: they have completed the fewest rounds" in capsys.readouterr().out
    assert main(["flags", str(tmp_path / "none.json")]) == 2
    assert "none.json: must be a file of Flags.write" in capsys.readouterr().err
