"""One batch on every rank, enqueued in rounds that nothing interrupts and compared on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_ep import reference
from cute_ep.api.buffers import tensors_of
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, HeaderWord
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.verify import expert_rows, poison, poisoned_buffers
from cute_ep.testing.workloads import make_inputs

FEW, MANY = LAMPORT_TOKENS, LAMPORT_TOKENS + 1
"""The most tokens whose rows travel through the Lamport regions, and the fewest whose rows do not."""


class Workload:
    """One batch on every rank: inputs, outputs to write and what they must become."""

    def __init__(self, communicators: Sequence[Communicator], tokens: Sequence[int], routing: str, seed: int) -> None:
        cfg = communicators[0].cfg
        inputs = make_inputs(cfg, tokens, routing, seed)
        oracle = communicators[0].device
        xs, ids, weights = (
            [getattr(one, name).to(oracle) for one in inputs] for name in ("x", "topk_ids", "router_weights")
        )
        self.expected = reference.dispatch(cfg, xs, ids, None, weights)
        rows = expert_rows(self.expected, cfg.hidden, seed)
        self.arguments, self.buffers, self.rows, self.outs = [], [], [], []
        for rank, communicator in enumerate(communicators):
            device = communicator.device
            self.arguments.append((xs[rank].to(device), ids[rank].to(device), weights[rank].to(device)))
            self.buffers.append(poisoned_buffers(communicator, int(self.expected[rank].num_rows)))
            padded = torch.zeros(self.buffers[rank].tokens.shape[0], cfg.hidden, dtype=torch.bfloat16, device=device)
            padded[: rows[rank].shape[0]].copy_(rows[rank])
            self.rows.append(padded)
            self.outs.append(poison(torch.empty_like(self.arguments[rank][0])))
        self.sums = {mode: reference.combine(cfg, rows, self.expected, weights, mode) for mode in ("exact", "partial")}
        self.wanted = [self._wanted(rank, communicator.device) for rank, communicator in enumerate(communicators)]
        self.defined = [self._defined(rank, communicator.device) for rank, communicator in enumerate(communicators)]

    def _wanted(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """What each output of one rank must become, on its device."""
        wanted = tensors_of(self.expected[rank])
        wanted |= {mode: sums[rank] for mode, sums in self.sums.items()}
        return {name: tensor.to(device) for name, tensor in wanted.items() if tensor is not None}

    def _defined(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Of outputs that the contract does not define as a whole, the bytes that it does."""
        row_map, headers = self.expected[rank].row_map, self.expected[rank].headers
        tokens = headers[:, HeaderWord.TOKENS, None, None]
        entries = torch.arange(row_map.shape[1], device=row_map.device)[None, :, None] < tokens
        words = torch.zeros_like(headers, dtype=torch.bool)
        words[:, HeaderWord.TOKENS] = True
        defined = {"row_map": entries.expand_as(row_map), "weights": entries & (row_map >= 0), "headers": words}
        return {name: tensor.repeat_interleave(4, dim=-1).to(device) for name, tensor in defined.items()}

    def run(self, rank: int, communicator: Communicator, mode: str) -> None:
        """Enqueue one dispatch and one combine."""
        dispatched = communicator.dispatch(*self.arguments[rank], out=self.buffers[rank])
        communicator.combine(self.rows[rank], dispatched, mode=mode, out=self.outs[rank])

    def count_mismatches(self, rank: int, mode: str, counter: torch.Tensor) -> None:
        """Enqueue on the current stream: add the number of wrong bytes to `counter`, then poison the outputs."""
        buffers = vars(self.buffers[rank]) | {mode: self.outs[rank]}
        for name, expected in self.wanted[rank].items():
            if name in buffers:
                actual = buffers[name][: expected.shape[0]]
                wrong = actual.view(torch.uint8) != expected.view(torch.uint8)
                counter += (wrong & self.defined[rank][name] if name in self.defined[rank] else wrong).sum()
                poison(actual)


def warmed_counters(
    communicators: Sequence[Communicator], batches: Sequence[Workload], rounds: int = 1
) -> list[torch.Tensor]:
    """One mismatch counter a round, at zero, for each rank, after one use of every torch kernel that counts.

    CUDA loads a kernel at its first launch and waits for the device to be idle: forever, when a rank's kernel spins
    there for a rank that the same host thread has yet to launch. The counters lie 128 bytes apart, since torch chooses
    kernels by alignment, too.
    """
    counters = [torch.zeros(rounds, 16, dtype=torch.int64, device=c.device)[:, 0] for c in communicators]
    for rank, counter in enumerate(counters):
        for batch in batches:
            for mode in ("exact", "partial"):
                batch.count_mismatches(rank, mode, counter[0])
        counter.zero_()
    for communicator in communicators:
        torch.cuda.synchronize(communicator.device)
    return counters


def on_stream(communicator: Communicator) -> torch.cuda.StreamContext:
    return torch.cuda.stream(communicator.stream)


def synchronize(communicators: Sequence[Communicator]) -> None:
    for communicator in communicators:
        communicator.synchronize()


def check_rounds(communicators: Sequence[Communicator], batches: Sequence[Workload], order: Sequence[int]) -> None:
    """One round for each number of a batch in `order`, all enqueued without waiting for any."""
    counters = warmed_counters(communicators, batches, len(order))
    for number, index in enumerate(order):
        mode = ("exact", "partial")[number % 3 == 0]
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                batches[index].run(rank, communicator, mode)
                batches[index].count_mismatches(rank, mode, counters[rank][number])
    synchronize(communicators)
    wrong = torch.stack([counter.cpu() for counter in counters])
    assert not wrong.any(), f"(rank, round) with wrong bytes: {wrong.nonzero().tolist()}"
