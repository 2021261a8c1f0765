"""What SGLang's servers are told and how their answers are read; `tests/gpu/servers.py` runs them."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.integrations.server_load import Request, Said
from tests.integrations.server_plan import OURS, RANKS
from tests.integrations.sglang_experts import run_experts
from tests.integrations.sglang_server import (
    DEFAULT,
    EXCHANGES,
    EXPERTS,
    REPLACED,
    Generate,
    environment_of,
    install_experts,
    misplaced,
    words_of,
)
from tests.integrations.upstream import installed


def piece(*tokens: int) -> dict:
    """One of `/generate`, with all that was said so far."""
    top = [[-0.5, token, None] for token in (*tokens[:1], 7)]
    told = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "output_top_logprobs": [top] * len(tokens),
    }
    return {"output_ids": list(tokens), "meta_info": told}


def test_the_last_piece_of_an_answer_has_all() -> None:
    path, body = Generate().call(Request((3, 4), 5, True))
    assert path == "/generate" and (body["input_ids"], body["stream"]) == ((3, 4), True)
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    assert Generate().read([piece(5), piece(5, 6)]) == Said([5, 6], [-0.5] * 2, [{5: -0.5, 7: -0.5}] * 2)


def test_servers_on_gpus_differ_in_their_exchange_only(tmp_path: Path) -> None:
    ours, theirs = (words_of(Path("model"), backend, "graphs", 1) for backend in (OURS, DEFAULT))
    assert [EXCHANGES[DEFAULT] if word == EXCHANGES[OURS] else word for word in ours] == theirs
    eager = words_of(Path("model"), OURS, "eager", 1)
    assert "disabled" == eager[eager.index("--cuda-graph-backend-decode") + 1]
    ours, theirs = (environment_of(backend, tmp_path, tmp_path) for backend in (OURS, DEFAULT))
    assert {name for name in ours if ours[name] != theirs[name]} == {"SGLANG_PLUGINS"} and ours[
        "SGLANG_PLUGINS"
    ] == OURS


@pytest.mark.parametrize("name", [OURS, DEFAULT])
@pytest.mark.parametrize("times", [0, RANKS])
def test_a_log_tells_whose_dispatchers_a_server_has(tmp_path: Path, name: str, times: int) -> None:
    (tmp_path / "log").write_text(f"[12:00] {REPLACED} x\n" * times)
    wrong = misplaced(f"{name} eager", tmp_path / "log")
    assert wrong == ([] if (times > 0) == (name == OURS) else [f"{name} eager: {times} processes use the plugin"])


def test_experts_in_torch_count_as_a_plugin(tmp_path: Path) -> None:
    install_experts(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (point,) = found.entry_points.select(group="sglang.srt.plugins")
    assert point.name == EXPERTS and point.value == "tests.integrations.sglang_experts:plugin"


def test_experts_in_torch_take_each_experts_rows() -> None:
    """Experts 1 + n of [one row, none, two rows], aligned to 2: silu(x) * x, times n."""
    with installed("sglang", "cute_ep.integrations.sglang") as made:
        output = made["sglang.srt.layers.moe.token_dispatcher.deepep_v2"].DeepEPv2DispatchOutput
        rows = torch.tensor([[1.0], [float("nan")], [2.0], [3.0]]).bfloat16()
        ends, ones = torch.tensor([1, 2, 4]), torch.ones(4)
        given = output(rows, None, None, ones, ends, is_expanded=True, use_masked_gemm=True, expert_alignment=2)

        class Layer:
            w13_weight = torch.ones(3, 2, 1).bfloat16()
            w2_weight = torch.tensor([1.0, 2.0, 3.0]).bfloat16()[:, None, None]

        got = run_experts(Layer, given).hidden_states[:, 0].float()
        want = [x * torch.tensor(x).sigmoid().mul(x).item() * n for x, n in ((1, 1), (2, 3), (3, 3))]
        assert got[1].isnan()
        torch.testing.assert_close(got[[0, 2, 3]], torch.tensor(want), rtol=0.02, atol=0)
