"""Ranks over nodes without a GPU: nodes on the CPU, emulated mail, and rounds compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.variants import MAIL_KERNELS
from cute_ep.runtime import status
from cute_ep.runtime.mail import MailParts, RankMail
from cute_ep.runtime.nodes import NodesCommunicator, node_config
from cute_ep.runtime.rails.peers import PeerStores
from cute_ep.runtime.status import Status
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_dispatched, poisoned_buffers
from cute_ep.testing.workloads import make_inputs
from tests.plain_memory import PlainHostMemory
from tests.reference.ranks import at_once, check_filled, poisoned, processes, rows_for

from .emulated_mail import Emulated

SHAPES = [(2, 1), (2, 2), (3, 1)]
"""(nodes, ranks of each)."""
TOKENS = 5
"""Most tokens that a rank is given."""


def config(nodes: int, ranks: int, **changes: object) -> EPConfig:
    given = {"hidden": 128, "num_experts": 3 * nodes * ranks, "top_k": 3, "max_tokens_per_rank": TOKENS + 2}
    return EPConfig(**(given | changes), world_size=nodes * ranks, ranks_per_node=ranks)  # type: ignore[arg-type]


@contextmanager
def connected(cfg: EPConfig, *, landings_apart: bool = False) -> Iterator[list[NodesCommunicator]]:
    """All ranks of `cfg`: each node's communicators would be those of processes, so their calls wait.
    `landings_apart` as of `Status`."""
    with ExitStack() as undo:
        undo.enter_context(pytest.MonkeyPatch.context()).setattr(status, "HostMemory", PlainHostMemory)
        nodes = [undo.enter_context(processes(node_config(cfg))) for _ in range(cfg.nodes)]
        rails: list[list[RankMail]] = [[] for _ in range(cfg.peers)]
        made, held = [], []
        for rank in range(cfg.world_size):
            peer, _ = cfg.place(rank)
            rail_ranks = tuple(range(peer, cfg.world_size, cfg.peers))
            records = Status(rank, rail_ranks, landings_apart=landings_apart)
            abort = torch.zeros(1, dtype=torch.int64)
            parts = MailParts(
                cfg=cfg,
                rank=rank,
                memory=torch.zeros(cfg.mail.nbytes, dtype=torch.uint8),
                kernels={name: Emulated(name) for name in MAIL_KERNELS},
                status=records.address,
                abort=abort.data_ptr(),
                max_ctas=4,
            )
            mail = RankMail(parts, PeerStores())
            rails[peer].append(mail)
            held.append(abort)
            node = nodes[cfg.node(rank)][peer]
            made.append(NodesCommunicator(node, mail, records, release=lambda _: None))
        for rail in rails:
            for mail in rail:
                mail.introduce([one.base for one in rail])
        yield made


def on_all(made: list[NodesCommunicator], call) -> list:
    done = at_once(range(len(made)), call)
    for one in done:
        if isinstance(one, EPError):
            raise one
    return done


def batch_of(cfg: EPConfig, seed: int, frame: int | None) -> tuple[list, list]:
    tokens = [(3 * rank + seed) % (TOKENS + 1) for rank in range(cfg.world_size)]
    given = make_inputs(cfg, tokens, ("uniform", "repeated", "masked", "one_expert")[seed % 4], seed)
    columns = [[getattr(one, name) for one in given] for name in ("x", "topk_ids", "router_weights")]
    return given, reference.dispatch(cfg, columns[0], columns[1], None, columns[2], frame=frame)


def fused_round(cfg: EPConfig, made: list[NodesCommunicator], number: int) -> None:
    """A dispatch and a combine, by turns planned or not, with frames of several lengths, in poisoned memory."""
    frame = (None, TOKENS, TOKENS + 1)[number % 3]
    given, want = batch_of(cfg, number, frame)
    rows = rows_for(want, cfg, number)
    sums = reference.combine(cfg, rows, want)

    def work(rank: int) -> torch.Tensor:
        out = poisoned_buffers(made[rank], int(want[rank].num_rows))  # type: ignore[arg-type]
        arguments = vars(given[rank]) | {"frame": frame, "out": out}
        ep = made[rank]
        batch = ep.plan_dispatch(**arguments).launch() if number % 2 else ep.dispatch(**arguments)
        check_dispatched(batch, want[rank], cfg, rank)
        if number % 2:
            return ep.plan_combine(rows[rank], batch).launch()
        return ep.combine(rows[rank], batch, out=torch.empty_like(sums[rank]))

    for rank, one in enumerate(on_all(made, work)):
        assert_bits(one, sums[rank], f"round {number}, sums of rank {rank}")


def dispatched(cfg: EPConfig, made: list[NodesCommunicator]) -> tuple[list, list, list, list]:
    """A batch that all ranks have dispatched: what each was given, what must come of it, the batches, and experts'
    rows."""
    given, want = batch_of(cfg, 3, None)
    batches = on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank])))
    return given, want, batches, rows_for(want, cfg, 1)


def two_halves(cfg: EPConfig, made: list[NodesCommunicator], turn: int) -> None:
    """Two dispatches and then two combines outstanding, and a third one once the first has been received."""
    rounds = [batch_of(cfg, 2 * turn + number, TOKENS + number) for number in range(2)]
    rows = [rows_for(want, cfg, turn) for _, want in rounds]

    def work(rank: int) -> list[torch.Tensor]:
        ep = made[rank]
        sent = [
            ep.dispatch_async(**vars(given[rank]), frame=TOKENS + number) for number, (given, _) in enumerate(rounds)
        ]
        batches = [ep.dispatch_wait(pending, poisoned(ep)) for pending in sent]
        for number, batch in enumerate(batches):
            check_filled(cfg, batch, rounds[number][1][rank], f"round {number}, rank {rank}")
        back = [ep.combine_async(rows[number][rank], batch) for number, batch in enumerate(batches)]
        first = ep.combine_wait(back[0], dtype=torch.float32)
        back.append(ep.combine_async(rows[0][rank], batches[0]))
        return [first, ep.combine_wait(back[1]), ep.combine_wait()]

    done = on_all(made, work)
    types = (torch.float32, torch.bfloat16, torch.bfloat16)
    for which, (number, dtype) in enumerate(zip((0, 1, 0), types, strict=True)):
        sums = reference.combine(cfg, rows[number], rounds[number][1], dtype=dtype)
        for rank, one in enumerate(done):
            assert_bits(one[which], sums[rank], f"turn {turn}, {which}, rank {rank}")
