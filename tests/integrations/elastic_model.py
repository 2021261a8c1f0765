"""A model of DeepEP V2's dispatch and combine, by loops over all ranks' tokens; and checks against it, in which a rank
that knows `deep_ep` only takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_ep.testing.compare import assert_bits

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
F32 = torch.float32  # named everywhere: DeepEP's tests set default types and devices


@dataclass
class Case:
    """All ranks' inputs, the same on every rank.

    Attributes:
        x: by rank, [T, hidden] bfloat16, or (float8_e4m3fn, scale factors).
        ids, weights: by rank, [T, K] int64 and float32, weights 0 where ids are -1.
        experts, most, alignment: of all ranks, most tokens of a rank, alignment of an expert's rows.
    """

    x: list[Rows]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    experts: int
    most: int
    alignment: int

    @property
    def local(self) -> int:
        return self.experts // len(self.ids)

    @property
    def slots(self) -> int:
        return self.ids[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.ids[0].device

    def entries(self, rank: int) -> list[tuple[int, int, dict[int, int]]]:
        """(source, token, {slot: local expert}) of each token that has experts of a rank, by source, then token."""
        found = []
        for source, ids in enumerate(self.ids):
            for token, chosen in enumerate(ids.tolist()):
                own = {
                    slot: e - rank * self.local for slot, e in enumerate(chosen) if e >= 0 and e // self.local == rank
                }
                if own:
                    found.append((source, token, own))
        return found

    def counts(self, rank: int) -> list[int]:
        """Entries of each local expert."""
        chosen = [expert for _, _, own in self.entries(rank) for expert in own.values()]
        return [chosen.count(expert) for expert in range(self.local)]

    def expanded(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(row, source, token, slot) of each entry of a rank, by expert, source, token, slot."""
        found, begin = [], 0
        for expert in range(self.local):
            row = begin
            for source, token, own in self.entries(rank):
                for slot in (slot for slot, e in own.items() if e == expert):
                    found.append((row, source, token, slot))
                    row += 1
            begin += -(-(row - begin) // self.alignment) * self.alignment
        return found

    def output(self, source: int, token: int, slot: int, hidden: int) -> torch.Tensor:
        """What an entry's expert returns, [hidden] bfloat16."""
        generator = torch.Generator().manual_seed((source * self.most + token) * self.slots + slot)
        return torch.randn(hidden, generator=generator, dtype=F32, device="cpu").bfloat16().to(self.device)

    def local_sum(self, source: int, token: int, slots: list[int], hidden: int) -> torch.Tensor:
        """A rank's sum of a token, by ascending slot in float32, rounded to bfloat16."""
        total = torch.zeros(hidden, dtype=F32, device=self.device)
        for slot in slots:
            total = total + self.output(source, token, slot, hidden).float()
        return total.bfloat16()

    def combined(self, rank: int, hidden: int, biases: list[torch.Tensor], *, reduce: bool) -> torch.Tensor:
        """[T, hidden] bfloat16: biases, then by ascending slot the sum of each rank at the last of its slots."""
        out = torch.zeros((len(self.ids[rank]), hidden), dtype=F32, device=self.device)
        for bias in biases:
            out = out + bias.float()
        for token, chosen in enumerate(self.ids[rank].tolist()):
            for slot, expert in enumerate(chosen):
                server = expert // self.local
                own = [k for k, other in enumerate(chosen) if other >= 0 and other // self.local == server]
                if expert < 0 or (reduce and slot != own[-1]):
                    continue
                added = self.local_sum(rank, token, own, hidden) if reduce else self.output(rank, token, slot, hidden)
                out[token] += added.float()
        return out.bfloat16()


def parts(rows: Rows) -> tuple[torch.Tensor, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def check_rows(got: Rows, case: Case, at: list[tuple[int, int, int]], name: str) -> None:
    """Rows of tokens: (row, source, token)."""
    for number, one in enumerate(parts(got)):
        for row, source, token in at:
            assert_bits(one[row].contiguous(), parts(case.x[source])[number][token].contiguous(), f"{name} row {row}")


def check_by_rank(buffer: Any, case: Case, sync: bool, biases: list[torch.Tensor], **options: Any) -> None:
    """Dispatch with one row per (token, rank), again with the handle, and combine."""
    rank, ranks, slots = buffer.rank_idx, buffer.num_ranks, case.slots
    found, counts = case.entries(rank), case.counts(rank)
    stats = torch.ones(case.local, dtype=torch.int32, device=case.device)
    ids = case.ids[rank].clone()
    got, own, weights, handle, _ = buffer.dispatch(
        case.x[rank], ids, case.weights[rank], stats, num_experts=case.experts, num_max_tokens_per_rank=case.most,
        expert_alignment=case.alignment, do_cpu_sync=sync, **options,
    )  # fmt: skip
    ids.fill_(0)
    rows = len(found) if sync else ranks * case.most
    assert {len(one) for one in (*parts(got), own, weights)} == {rows} == {handle.num_recv_tokens}
    assert stats.tolist() == [1 + count for count in counts]
    check_rows(got, case, [(row, source, token) for row, (source, token, _) in enumerate(found)], f"rank {rank}")
    want_ids = torch.full((rows, slots), -1, device="cpu")
    want = torch.zeros(rows, slots, dtype=F32, device="cpu")
    head = torch.zeros(len(found), 2, dtype=torch.int32, device="cpu")
    for row, (source, token, here) in enumerate(found):
        head[row] = torch.tensor([source * case.most + token, source * slots + max(here)], device="cpu")
        for slot, expert in here.items():
            want_ids[row, slot], want[row, slot] = expert, case.weights[source][token, slot]
    assert_bits(own, want_ids.to(case.device), "ids")
    assert_bits(weights, want.to(case.device), "weights")
    assert_bits(handle.recv_src_metadata[: len(found), :2].contiguous(), head.to(case.device), "metadata")
    check_handle(handle, case, rank, sync)
    ends = torch.tensor([-(-count // case.alignment) * case.alignment for count in counts]).cumsum(0)
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends.tolist()

    own.fill_(7)
    again, own, none, same, _ = buffer.dispatch(case.x[rank], handle=handle)
    assert same is handle and none is None
    for one, other in zip(parts(got), parts(again), strict=True):
        assert_bits(one[: len(found)], other[: len(found)], "again")
    assert_bits(own, want_ids.to(case.device), "ids again")

    hidden = parts(got)[0].shape[1]
    x = torch.full((rows, hidden), torch.nan, device=case.device).bfloat16()
    for row, (source, token, here) in enumerate(found):
        x[row] = case.local_sum(source, token, sorted(here), hidden)
    strange = torch.where(own < 0, 5, weights)  # entries of other ranks are not read
    check_combine(buffer, case, x, handle, strange, biases, reduce=True)


def check_expanded(buffer: Any, case: Case, sync: bool, biases: list[torch.Tensor], **options: Any) -> None:
    """Dispatch with one row per (token, expert), again with the handle, and combine."""
    rank, ranks, slots = buffer.rank_idx, buffer.num_ranks, case.slots
    found, at, counts = case.entries(rank), case.expanded(rank), case.counts(rank)
    got, own, weights, handle, _ = buffer.dispatch(
        case.x[rank], case.ids[rank], case.weights[rank], num_experts=case.experts, num_max_tokens_per_rank=case.most,
        expert_alignment=case.alignment, do_cpu_sync=sync, do_expand=True, **options,
    )  # fmt: skip
    padded = [-(-count // case.alignment) * case.alignment for count in counts]
    a, most = case.alignment, ranks * case.most * min(slots, case.local)
    rows = sum(padded) if sync else -(-(most + (a - 1) * case.local) // a) * a
    assert own is None and {len(one) for one in (*parts(got), weights)} == {rows} == {handle.num_expanded_tokens}
    if isinstance(got, tuple) and options.get("use_tma_aligned_col_major_sf"):
        assert got[1].stride() == (1, -(-rows // 4) * 4) or got[1].shape[1] * rows < 2
    want = torch.zeros(rows, dtype=F32, device="cpu")
    head = torch.zeros(len(found), 2, dtype=torch.int32, device="cpu")
    place = torch.full((len(found), slots), -1, device="cpu")
    numbers = {(source, token): number for number, (source, token, _) in enumerate(found)}
    for row, source, token, slot in at:
        want[row] = case.weights[source][token, slot]
        place[numbers[source, token], slot] = row
    for number, (source, token, here) in enumerate(found):
        head[number] = torch.tensor([source * case.most + token, source * slots + max(here)], device="cpu")
    metadata = torch.cat([head, place.int()], dim=1).to(case.device)
    assert_bits(handle.recv_src_metadata[: len(found)], metadata, "metadata")
    check_handle(handle, case, rank, sync)
    begins = torch.tensor([0, *padded]).cumsum(0)[:-1]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == (begins + torch.tensor(counts)).tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    again, _, back, same, _ = buffer.dispatch(
        case.x[rank], topk_weights=case.weights[rank], handle=handle, do_expand=True, do_zero_padding=True, **options
    )
    assert same is handle
    for one, received in ((got, weights), (again, back)):
        check_rows(one, case, [(row, source, token) for row, source, token, _ in at], f"rank {rank}")
        assert_bits(received[: sum(padded)], want.to(case.device)[: sum(padded)], "weights")
    padding = sorted(set(range(sum(padded))) - {row for row, *_ in at})
    assert not any(part[padding].float().any() for part in parts(again))

    hidden = parts(got)[0].shape[1]
    x = torch.full((rows, hidden), torch.nan, device=case.device).bfloat16()
    for row, source, token, slot in at:
        x[row] = case.output(source, token, slot, hidden)
    check_combine(buffer, case, x, handle, weights, biases, reduce=buffer.allow_multiple_reduction)


def check_handle(handle: Any, case: Case, rank: int, sync: bool) -> None:
    """What both forms have."""
    found, counts, ranks = case.entries(rank), case.counts(rank), len(case.ids)
    sources = [source for source, _, _ in found]
    ends = [sum(source <= last for source in sources) for last in range(ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    rounded = [-(-count // case.alignment) * case.alignment for count in counts]
    assert handle.num_recv_tokens_per_expert_list == (rounded if sync else [])
    assert_bits(handle.topk_idx, case.ids[rank], "topk_idx")
    want = torch.full(case.ids[rank].shape, -1, dtype=torch.int32, device="cpu")
    seen = [0] * ranks
    for token, chosen in enumerate(case.ids[rank].tolist()):
        servers = [expert // case.local if expert >= 0 else None for expert in chosen]
        for slot, server in enumerate(servers):
            want[token, slot] = -1 if server is None else seen[server]
        for server in {one for one in servers if one is not None}:
            seen[server] += 1
    assert_bits(handle.dst_buffer_slot_idx, want.to(case.device), "dst_buffer_slot_idx")


def check_combine(
    buffer: Any, case: Case, x: torch.Tensor, handle: Any, weights: torch.Tensor, biases: list, *, reduce: bool
) -> None:
    """Sums bit for bit, for 0, 1 and 2 biases, and weights."""
    rank = buffer.rank_idx
    for count in range(3):
        given = (None, biases[0], tuple(biases))[count]
        out, total, _ = buffer.combine(x, handle, weights if count else None, given)
        want = case.combined(rank, x.shape[1], biases[:count], reduce=reduce)
        assert_bits(out + 0.0, want + 0.0, f"rank {rank}, {count} biases")
        assert (total is None) == (count == 0)
        if total is not None:
            assert_bits(total, torch.where(case.ids[rank] < 0, 0, case.weights[rank]), "weights home")
