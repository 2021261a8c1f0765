"""Servers of frameworks under load, on two GPUs: `python -m tests.gpu.servers vllm --out FILE` plays two rounds of 200
requests to servers with cute_ep and with the framework's own exchange, compares what they say, and prints what matters.
`--help` has the rest. It ends with 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.integrations.server_models import MODELS
from tests.integrations.server_plan import MODES, Plan
from tests.integrations.server_process import ServerError
from tests.integrations.server_runs import print_summary, say

LIBRARY = Path(__file__).parents[2] / "build" / "library"
FRAMEWORKS = {"sglang": "tests.integrations.sglang_server", "vllm": "tests.integrations.vllm_server"}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the result, as JSON")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--requests", type=int, default=200, help="of a round (default: %(default)s)")
    parser.add_argument("--idle", type=float, nargs="+", default=[60, 5], help="seconds between rounds, by model")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for a model's servers to start")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="compiled kernels (default: build/library)")
    parser.add_argument("--options", type=shlex.split, default=[], help="more words for each server, in one string")
    parser.add_argument("--logs", type=Path, help="folder to keep models and servers' logs in")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"requests = {args.requests}: must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and servers are ended, in their own groups
    framework = importlib.import_module(FRAMEWORKS[args.framework])
    result: dict[str, Any] = {"framework": args.framework, "requests": args.requests}
    with tempfile.TemporaryDirectory() as temporary:
        for number, kind in enumerate(args.models):
            folder = (args.logs or Path(temporary)) / kind
            folder.mkdir(parents=True, exist_ok=True)
            idle = args.idle[min(number, len(args.idle) - 1)]
            plan = Plan(
                kind,
                folder,
                args.library,
                modes=args.modes,
                count=args.requests,
                idle=idle,
                start_timeout=args.start_timeout,
                options=args.options,
            )
            try:
                made = framework.run(plan)
                print_summary(made)
            except ServerError as failed:
                say(f"{kind}: {failed}")
                made = {"wrong": [str(failed)]}
            result[kind] = {"idle_s": idle, **made}
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [one for kind in args.models for one in result[kind]["wrong"]]
    say("all good" if not wrong else f"{len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
