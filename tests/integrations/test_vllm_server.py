"""What vLLM's servers are told and how their answers are read; `tests/gpu/test_servers.py` runs them."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from tests.integrations.server_load import Request, Said
from tests.integrations.server_plan import OURS, install_plugin
from tests.integrations.vllm_server import DEFAULT, Completions, words_of


def piece(*tokens: int) -> dict:
    """One of `/v1/completions`, of a stream or whole."""
    tops = [{f"token_id:{token}": -0.5, "token_id:7": -1.5} for token in tokens]
    logprobs = {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": tops}
    return {"choices": [{"token_ids": list(tokens), "logprobs": logprobs}]}


def test_pieces_of_an_answer_become_one() -> None:
    api = Completions("tiny")
    path, body = api.call(Request((3, 4), 5, True))
    assert path == "/v1/completions" and (body["prompt"], body["max_tokens"], body["stream"]) == ((3, 4), 5, True)
    last: dict = {"choices": [{"token_ids": [], "logprobs": None}]}
    said = api.read([piece(5), piece(6, 8), last])
    assert said == Said([5, 6, 8], [-0.5] * 3, [{token: -0.5, 7: -1.5} for token in (5, 6, 8)])


def test_the_plugin_counts_as_installed(tmp_path: Path) -> None:
    install_plugin(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (point,) = found.entry_points.select(group="vllm.general_plugins")
    assert (found.metadata["Name"], point.name, point.value) == ("cute-ep", OURS, "cute_ep.integrations.vllm:register")


def test_servers_differ_in_their_backend_only() -> None:
    ours, theirs = (words_of(Path("model"), backend, "graphs", 1) for backend in (OURS, DEFAULT))
    at = ours.index("--additional-config")
    assert [theirs[ours.index(OURS)], theirs] == [
        DEFAULT,
        [DEFAULT if one == OURS else one for one in ours[:at] + ours[at + 2 :]],
    ]
    eager = words_of(Path("model"), OURS, "eager", 1)
    assert "--enforce-eager" in eager and "cudagraph" not in " ".join(eager) and "cudagraph" in " ".join(ours)
