"""Measures for `perf.kernel_turns`, with the packages of the checkout in which it runs: `... LIBRARY ORDER`, the
order of rows.

Each line of its input is [format, tokens of a rank, SMs or null, operations, samples] as JSON; it answers with a line,
{operation: p50 in us}. Ranks and inputs of a case are kept until it ends. It must run with older checkouts, so it uses
little of them.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace

from cute_ep.bench.machine import parse_devices
from cute_ep.bench.measure import make_sets, measure
from cute_ep.runtime.connection import connected
from perf.cases import MAIN


def main() -> None:
    """Answer until the input ends."""
    library, order = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    devices, kept = parse_devices("auto", MAIN.num_experts), {}
    with ExitStack() as stack:
        for line in sys.stdin:
            fmt, tokens, sms, operations, samples = json.loads(line)
            if (fmt, tokens, sms) not in kept:
                cfg = MAIN.config(fmt, len(devices), tokens)
                if order != "expert_major":
                    cfg = replace(cfg, row_order=order)
                ranks = stack.enter_context(connected(cfg, devices, sms=sms, library=library))
                kept[fmt, tokens, sms] = ranks, make_sets(cfg, devices, tokens, "uniform")
            found = measure(*kept[fmt, tokens, sms], operations, samples)
            print(json.dumps({case["operation"]: case["p50_us"] for case in found}), file=answers, flush=True)


if __name__ == "__main__":
    main()
