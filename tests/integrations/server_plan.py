"""What servers of all frameworks have in common: an installed cute_ep, an environment, and what is asked of them."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.server_load import Api, draw_requests
from tests.integrations.server_models import VOCABULARY, save_model
from tests.integrations.server_process import ServerError
from tests.integrations.server_runs import Case, Outcome, play_cases, say

ROOT = Path(__file__).parents[2]
OURS = "cute_ep"
MODES = "eager", "graphs"
RANKS = 2
BATCH = 512
"""Tokens of a rank's step, at most."""
BOUND = 0.2
"""How far rounding moves a log probability, between two servers: each in bfloat16 is half of it from float32
(`test_server_models.py`)."""
TOP = 8
"""Likeliest tokens to tell of at each place."""


def install(folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Make a package count as installed in a folder for PYTHONPATH, by metadata with its entry points: by group, what
    each name stands for."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_plugin(folder: Path) -> None:
    """`install` cute_ep."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install(folder, "cute-ep", project["version"], project["entry-points"])


def environment_of(plugins: Path, library: Path) -> dict[str, str]:
    """More environment of any server.

    Args:
        plugins: a folder of `install`.
        library: of compiled kernels.
    """
    cache = plugins / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "cute_ep").exists():
        (cache / "cute_ep").symlink_to(library.resolve(), target_is_directory=True)
    path = [str(plugins), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "NO_COLOR": "1",
    }


def await_settled(left: Callable[[], Mapping[str, float]]) -> None:
    """ServerError: ten seconds after a round some of what `left` counts, requests that run or wait, is not zero."""
    end = time.monotonic() + 10
    while any((now := left()).values()):
        if time.monotonic() > end:
            raise ServerError(f"requests are left after a round: {now}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Plan:
    """A model in servers that are asked the same.

    Attributes:
        kind: of `server_models.MODELS`.
        folder: empty, for the model and logs.
        library: folder of compiled kernels.
        modes: of the servers of each exchange.
        count: requests of a round.
        idle: seconds between the two rounds.
        start_timeout: seconds for servers to start, all at once.
        options: more words for each server.
    """

    kind: str
    folder: Path
    library: Path
    modes: Sequence[str] = MODES
    count: int = 200
    idle: float = 60
    start_timeout: float = 300
    options: Sequence[str] = ()

    @property
    def model(self) -> Path:
        """Folder of the model."""
        return self.folder / self.kind

    @property
    def plugins(self) -> Path:
        """Folder for `install`."""
        return self.folder / "plugins"

    def play(
        self,
        api: Api,
        exchanges: Sequence[str],
        words: Callable[[str, str, int], Sequence[str]],
        environment: Callable[[str], Mapping[str, str]],
        settled: Callable[[int], None],
        timeout: float = 60,
    ) -> Outcome:
        """Install cute_ep, make the model, and play the requests to a server of each exchange in each mode.

        Args:
            words: the command of a server, by exchange, mode and port.
            environment: more of it, by exchange.
            settled, timeout: as of `Case` and `play_cases`.
        """
        install_plugin(self.plugins)
        save_model(self.kind, self.model)

        def case(exchange: str, mode: str) -> Case:
            def command(port: int) -> list[str]:
                return [*words(exchange, mode, port), *self.options]

            return Case(f"{exchange} {mode}", command, environment(exchange), settled=settled)

        cases = [case(exchange, mode) for exchange in exchanges for mode in self.modes]
        say(f"{self.kind}: {len(cases)} servers start")
        requests = draw_requests(VOCABULARY, count=self.count)
        times = {"idle": self.idle, "start_timeout": self.start_timeout, "timeout": timeout}
        return play_cases(cases, api, requests, self.folder, **times)
