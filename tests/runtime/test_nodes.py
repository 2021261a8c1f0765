"""The communicator over nodes, its mail and its rail of copies, with emulated kernels and nodes on the CPU."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.mail import Channel
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs
from tests.heedless_rail import Heedless
from tests.reference.ranks import at_once, rows_for

from .emulated_nodes import SHAPES, TOKENS, batch_of, config, connected, dispatched, fused_round, on_all, two_halves

CHANGES = {
    "bf16": {},
    "fp8": {"dispatch_format": "fp8"},
    "padded": {"dispatch_format": "nvfp4_row", "row_alignment": 64},
    "blocks": {"dispatch_format": "mxfp6_e2m3", "block_rows": 128},
    "rank_major": {"row_order": "rank_major"},
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_are_those_of_the_reference(nodes: int, ranks: int, changes: str) -> None:
    cfg = config(nodes, ranks, **CHANGES[changes])
    with connected(cfg) as made:
        for number in range(6):
            fused_round(cfg, made, number)
        on_all(made, lambda rank: made[rank].synchronize())


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_halves_of_two_rounds_may_be_outstanding(nodes: int, ranks: int) -> None:
    cfg = config(nodes, ranks, dispatch_format="mxfp8")
    with connected(cfg) as made:
        for turn in range(3):
            two_halves(cfg, made, turn)


def test_a_frame_waits_for_who_has_not_read_the_one_before() -> None:
    """A rank that is a round ahead does not write its frame while another one reads."""
    cfg = config(2, 1)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        on_all(made, lambda rank: made[rank].dispatch_async(**vars(given[rank])))
        mail = made[0].mail
        free = mail.memory[mail.map.free.at(Channel.FRAMES) :][:16].view(torch.int64)
        header = mail.memory[mail.map.routes.at(0) :][:4].view(torch.int32)
        assert free.tolist() == [0, 1] and int(header) == 1
        free[1] = 0
        seen: list[int] = []

        def read() -> None:
            seen.append(int(header))
            free[1] = 1

        late = threading.Timer(0.3, read)
        late.start()
        on_all(made, lambda rank: made[rank].dispatch_async(**vars(given[rank])))
        late.join()
        assert seen == [1] and int(header) == 2


@pytest.mark.parametrize("late", [0, 1], ids=["own node first", "other node first"])
def test_who_does_not_come_is_named(late: int) -> None:
    cfg = config(2, 1, timeout_s=0.2)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 2, None)
        ep = made[1 - late]
        ep.dispatch_async(**vars(given[1 - late]))
        said = rf"FRAME of rank {late}: its frame of dispatch round 1 has not come"
        with pytest.raises(EPTimeout, match=said):
            ep.synchronize()
        assert ep.failed
        with pytest.raises(EPTimeout, match=said):
            ep.dispatch(**vars(given[1 - late]))


def test_old_mail_of_a_rank_that_has_given_up_is_no_new_mail() -> None:
    """Its engine goes on: the frame comes again, with the header of its round."""
    cfg, engine = config(2, 1, timeout_s=0.5), Heedless()
    with connected(cfg) as made:
        engine.prepare([one.mail for one in made])
        given, _ = batch_of(cfg, 3, None)
        on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank])))
        torch.frombuffer((ctypes.c_int64 * 1).from_address(made[0].mail.parts.abort), dtype=torch.int64).fill_(1)
        at_once(range(2), lambda rank: send_again(made[rank], given[rank], TOKENS + 2))
        with pytest.raises(
            EPTimeout, match=r"FRAME of rank 0: its frame of dispatch round 2 .*its last mail is of round 1"
        ):
            made[1].synchronize()


def send_again(ep: NodesCommunicator, given: RankInputs, frame: int) -> None:
    ep.mail.send_frame(reference.quantize(given.x, "bf16"), given.topk_ids, given.router_weights, frame)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_has_given_up_sends_nothing_more(failed: int) -> None:
    """Its peers time out and name it; sums that were sent before still come."""
    cfg = config(2, 1, timeout_s=0.5)
    with connected(cfg) as made:
        given, want, batches, rows = dispatched(cfg, made)
        sent = on_all(made, lambda rank: made[rank].combine_async(rows[rank], batches[rank]))
        abort = made[failed].mail.parts.abort
        torch.frombuffer((ctypes.c_int64 * 1).from_address(abort), dtype=torch.int64).fill_(1)
        other = 1 - failed
        assert_bits(made[other].combine_wait(sent[other]), reference.combine(cfg, rows, want)[other], "sums")
        at_once(range(2), lambda rank: send_again(made[rank], given[rank], TOKENS + 2))
        with pytest.raises(
            EPTimeout, match=rf"FRAME of rank {failed}: its frame of dispatch round 2 .* piece 0 is of round 1"
        ):
            made[other].synchronize()


def test_frames_that_differ_are_told() -> None:
    cfg = config(2, 1, timeout_s=5)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 3, None)
        at_once(range(2), lambda rank: send_again(made[rank], given[rank], TOKENS + rank))
        for rank in range(2):
            with pytest.raises(EPTimeout, match=f"has {TOKENS + 1 - rank} rows, and here {TOKENS + rank}"):
                made[rank].synchronize()


def test_an_id_out_of_range_is_told_by_its_own_rank_alone() -> None:
    cfg = config(2, 1)
    with connected(cfg) as made:
        x = torch.ones(2, cfg.hidden).bfloat16()
        ids = [torch.zeros(2, cfg.top_k, dtype=torch.int32) for _ in range(2)]
        ids[1][1, 2] = cfg.num_experts
        on_all(made, lambda rank: made[rank].dispatch(x, ids[rank]))
        made[0].synchronize()
        with pytest.raises(EPInputError, match=r"rank 1: topk_ids.flatten\(\)\[5\] = 6: must be -1 or in \[0, 6\)"):
            made[1].synchronize()


def test_what_nodes_do_not_bring_is_refused_before_anything_is_sent() -> None:
    cfg = config(2, 1)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        batches = on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank])))
        rows = torch.zeros(batches[0].tokens.shape[0], cfg.hidden).bfloat16()
        for mode in ("exact", "unweighted"):
            with pytest.raises(EPInputError, match=f"^mode = '{mode}': must be 'partial' over 2 nodes in one process$"):
                made[0].combine(rows, batches[0], mode=mode)
            with pytest.raises(EPInputError, match=f"^mode = '{mode}': must be 'partial' over 2 nodes in one process$"):
                made[0].combine_async(rows, batches[0], mode)
        with pytest.raises(EPInputError, match=r"^frame = 1: "):
            made[0].dispatch(torch.ones(2, cfg.hidden).bfloat16(), torch.zeros(2, 3, dtype=torch.int32), frame=1)
        with pytest.raises(EPInputError, match=r"^dispatched.frame = 5: must be 7, that of dispatch"):
            made[0].combine(rows, replace(batches[0], frame=TOKENS))
        with pytest.raises(EPInputError, match=r"^dispatched.topk_ids: must be those of dispatch over nodes"):
            made[0].combine(rows, batches[0].derived(topk_ids=batches[0].topk_ids.clone()))
        none = dict.fromkeys(BUFFERS) | {name: getattr(batches[0], name) for name in READ_BY_COMBINE}
        of_tensors = Dispatched.of_tensors(
            none, rank=0, topk_ids=batches[0].topk_ids, router_weights=None, return_slices_log2=0, weighted=True
        )
        with pytest.raises(EPInputError, match=r"^dispatched.frame_ids"):
            made[0].combine(rows, of_tensors)
        plain = on_all(made, lambda rank: made[rank].dispatch(given[rank].x, given[rank].topk_ids))
        with pytest.raises(EPInputError, match="give router_weights to dispatch, ones"):
            made[0].combine(rows, plain[0])


def test_an_error_in_the_middle_of_a_call_leaves_no_call_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device may count different rounds then."""
    cfg = config(2, 1)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        monkeypatch.setattr(made[0].mail, "unpack", lambda *frames: 1 / 0)
        failed, _ = at_once(range(2), lambda rank: tried(made[rank], given[rank]))
        assert failed == "ZeroDivisionError" and made[0].failed and not made[1].failed
        with pytest.raises(EPError, match=r"^rank 0: a call was interrupted while it was launched"):
            made[0].dispatch(**vars(given[0]))


def tried(ep: NodesCommunicator, given: RankInputs) -> str:
    try:
        ep.dispatch(**vars(given))
    except ArithmeticError as error:
        return type(error).__name__
    return ""


def test_what_keeps_no_rows_keeps_none() -> None:
    cfg = config(2, 1)
    with connected(cfg) as made:
        given, want = batch_of(cfg, 1, None)
        batches = on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank])).without_rows())
        for one in batches:
            assert one.tokens.untyped_storage().nbytes() < 1024
        rows = rows_for(want, cfg, 1)
        sums = on_all(made, lambda rank: made[rank].combine(rows[rank], batches[rank]))
        for rank, one in enumerate(reference.combine(cfg, rows, want)):
            assert_bits(sums[rank], one, f"rank {rank}")


def test_nodes_that_combine_other_batches_are_told() -> None:
    """Each its own, and the others'; nothing is summed."""
    cfg = config(2, 1, timeout_s=5)
    with connected(cfg) as made:
        given, want = batch_of(cfg, 3, None)
        rows = rows_for(want, cfg, 1)
        batches = [on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank]))) for _ in range(2)]
        at_once(range(2), lambda rank: made[rank].combine(rows[rank], batches[rank][rank]))
        for rank in range(2):
            words = (
                f"combine round 1 has the batch of dispatch round {rank + 1} here, but rank {1 - rank} rows of dispatch"
            )
            with pytest.raises(EPError, match=f"{words} round {2 - rank}: all"):
                made[rank].synchronize()
