"""A rank of SGLang's dispatcher in a process of its own: `python -m tests.integrations.sglang_worker STORE RANK WORLD`,
on GPUs if there are. With SGLang's own classes if it is installed, otherwise with stubs of them. On GPUs SGLang's own
Triton kernels then permute rows for DeepGEMM and back; torch stands for DeepGEMM's matmuls."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.integrations.common import pools
from cute_ep.integrations.common.pools import close
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, make_inputs
from perf.stand_ins import allow_sglang
from tests.integrations.upstream import installed
from tests.processes import join_group

ADAPTER = "cute_ep.integrations.sglang"
HIDDEN, INNER, EXPERTS, SLOTS, MOST = 512, 64, 8, 3, 16
ALIGNMENT = 128
SIZES = (MOST, MOST), (0, 5), (MOST, 1), (0, 0), (5, 4)
"""Tokens of the two ranks."""
FORMATS = {  # what SGLang asks for: FP8 rows, elements a scale factor, exponents as scale factors
    "bf16": (False, 128, False),
    "fp8": (True, 128, False),
    "fp8_pow2": (True, 128, True),
    "mxfp8": (True, 32, True),
}


class Layer(NamedTuple):
    """Experts with weights of -1, 0 and 1, so that float32 matmuls of small integers are exact in any order: up
    [E, HIDDEN, INNER], down [E, INNER, HIDDEN]."""

    up: torch.Tensor
    down: torch.Tensor

    def expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """[n, HIDDEN] float32 rows to bfloat16 ones."""
        inner = (rows @ self.up[number].float()).relu().bfloat16()
        return (inner.float() @ self.down[number].float()).bfloat16()


def layer(device: torch.device) -> Layer:
    random = torch.Generator().manual_seed(5)
    shapes = (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN)
    return Layer(*(torch.randint(-1, 2, shape, generator=random).to(device) for shape in shapes))


def inputs(routing: str, tokens: tuple[int, ...], most: int, seed: int) -> list:
    """By rank (rows, expert ids, weights). Rows are integers in [-7, 7] with a 7 in each block of 32, which all formats
    keep: scale factors are 2^-6."""
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, most, len(tokens))
    random, made = torch.Generator().manual_seed(seed), []
    for one in make_inputs(cfg, tokens, routing, seed):
        x = torch.randint(-7, 8, one.x.shape, generator=random)
        x[:, ::32] = 7
        made.append((x.bfloat16(), one.topk_ids, one.router_weights))
    return made


def dense(own: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ranks: int) -> torch.Tensor:
    """Every expert for every token, and the weighted sums as combine is documented to round them: float32 on each rank,
    bfloat16, float32 over ranks, bfloat16."""
    made = torch.stack([own.expert(number, x.float()) for number in range(EXPERTS)]).float()
    total = torch.zeros(x.shape, device=x.device)
    for rank in range(ranks):
        share = torch.zeros(x.shape, device=x.device)
        for slot in range(SLOTS):
            expert, here = ids[:, slot].long(), ids[:, slot] // (EXPERTS // ranks) == rank
            rows = made[expert.clamp(min=0), torch.arange(len(x), device=x.device)]
            share = torch.where(here[:, None], share + rows * weights[:, slot, None], share)
        total += share.bfloat16().float()
    return total.bfloat16()


def float_rows(output: Any) -> torch.Tensor:
    """The rows' values, [..., N, HIDDEN] float32."""
    rows, scale = output.hidden_states, output.hidden_states_scale
    if scale is None:
        assert rows.dtype == torch.bfloat16
        return rows.float()
    assert rows.dtype == torch.float8_e4m3fn
    if scale.dtype == torch.int32:
        assert scale.stride()[-2:] == (1, rows.shape[-2]) or len(rows) == 0
        shifts = torch.arange(0, 32, 8, device=scale.device)
        scale = torch.exp2(((scale[..., None] >> shifts & 255).flatten(-2) - 127).float())
    block = output.activation_scale_block_size
    assert scale.dtype == torch.float32 and scale.shape == (*rows.shape[:-1], HIDDEN // block)
    return (rows.float().unflatten(-1, (-1, block)) * scale[..., None]).flatten(-2)


def run_experts(own: Layer, first: int, output: Any, *, distinct: bool) -> torch.Tensor:
    """What a runner of the format computes, by its contract: an expert's rows begin where those before end, rounded up
    to the alignment; the weights that come with the rows multiply them. Rows of nobody become NaN."""
    room, ends = len(output.hidden_states), output.psum_num_recv_tokens_per_expert.tolist()
    assert output.is_expanded and output.topk_ids is None and output.expert_alignment == ALIGNMENT
    assert output.topk_weights.shape == (room,) and output.topk_weights.dtype == torch.float32
    assert output.psum_num_recv_tokens_per_expert.dtype == torch.int32 and room % ALIGNMENT == 0
    begin, rows = 0, float_rows(output)
    out = torch.full((room, HIDDEN), float("nan"), dtype=torch.bfloat16, device=rows.device)
    for number, end in enumerate(ends):
        assert begin <= end <= room
        if output.use_masked_gemm and distinct:
            assert end - begin <= output.masked_max_m
        out[begin:end] = own.expert(first + number, rows[begin:end])
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    assert begin <= room and output.total_expanded == (room if output.use_masked_gemm else 0)
    if not output.use_masked_gemm:
        assert begin == room, "an extend batch has no rows behind the last expert's"
    for one in (output.hidden_states, output.hidden_states_scale):
        if one is not None:
            one.set_(one.new_empty(0))  # SGLang's runner frees them like this
    return out.mul_(output.topk_weights[:, None])


def run_deep_gemm(own: Layer, first: int, output: Any) -> Any:
    """Combine's input: what SGLang's runner makes of the rows for DeepGEMM, and of the experts' outputs afterwards."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig, deep_gemm

    config, steps = MoeRunnerConfig(activation="silu"), {}
    given = deep_gemm.pre_permute_deepep_v2_to_deep_gemm(output, None, config, steps)
    rows, local = float_rows(given), range(len(output.psum_num_recv_tokens_per_expert))
    out = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16, device=rows.device)
    if given.use_masked_gemm:
        here = [(number, slice(count)) for number, count in enumerate(given.masked_m.tolist())]
    else:
        here = [given.m_indices == number for number in local]
    for number, where in zip(local, here, strict=True):
        out[where] = own.expert(first + number, rows[where])
    return deep_gemm.post_permute_deep_gemm_to_deepep_v2(deep_gemm.DeepGemmRunnerOutput(out), None, config, steps)


class Rank:
    """Dispatchers of this process, and what they ask SGLang."""

    def __init__(self, rank: int, world: int, device: torch.device, dispatcher: Any, *, runner: bool) -> None:
        self.rank, self.world, self.device, self.module, self.runner = rank, world, device, dispatcher, runner
        self.layer, self.extend, self.most, self.packed, self.alone = layer(device), False, MOST, False, False
        self.told: list[str] = []  # what combine has raised
        setting = lambda value: SimpleNamespace(get=value)  # noqa: E731
        dispatcher.TIMEOUT_S = 30.0
        dispatcher.envs = SimpleNamespace(
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting(lambda: self.most),
            SGLANG_DEEPEP_V2_NUM_SMS=setting(lambda: 0),
        )
        dispatcher.get_is_extend_in_batch = lambda: self.extend
        dispatcher.get_parallel = self.parallel
        dispatcher.get_deepep_v2_fp8_scale_format = lambda: SimpleNamespace(tma_aligned=True, ue8m0=self.packed)

    def parallel(self) -> Any:
        """One TP group that shares a batch, or ranks with batches of their own (attention DP)."""
        group = SimpleNamespace(device_group=dist.group.WORLD)
        return SimpleNamespace(
            attn_dp_size=1 if self.alone else self.world, attn_cp_size=1, tp_size=self.world, tp_group=group
        )

    def dispatcher(self, fmt: str) -> Any:
        fp8, block, self.packed = FORMATS[fmt]
        shape = SLOTS, EXPERTS, EXPERTS // self.world, HIDDEN
        made = self.module.CuteEPDispatcher(dist.group.WORLD, *shape, torch.bfloat16, fp8, block)
        assert made.cfg.dispatch_format == fmt
        return made

    def pass_through(self, dispatcher: Any, given: tuple, *, distinct: bool) -> torch.Tensor:
        x, ids, weights = (one.to(self.device) for one in given)
        topk = self.module.StandardTopKOutput(weights, ids, weights)
        output = dispatcher.dispatch(hidden_states=x, topk_output=topk)
        assert output.use_masked_gemm != self.extend and (not self.extend or output.masked_max_m == 0)
        first, self.ends = self.rank * EXPERTS // self.world, output.psum_num_recv_tokens_per_expert
        runner = self.runner and (distinct or self.extend)  # for a decode batch a token's experts must be distinct
        made = run_deep_gemm(self.layer, first, output) if runner else None
        rows = run_experts(self.layer, first, output, distinct=distinct)
        made = made or self.module.DeepEPv2CombineInput(rows, None)
        try:
            return dispatcher.combine(combine_input=made)
        except EPInputError as error:  # of the dispatch, if the host has heard of it by now
            self.told.append(str(error))
            return dispatcher.combine(combine_input=made)

    def check(self, dispatcher: Any, routing: str, tokens: tuple[int, ...], seed: int) -> None:
        given = inputs(routing, tokens, self.most, seed)
        got = self.pass_through(dispatcher, given[self.rank], distinct=routing != "repeated")
        want = dense(self.layer, *(one.to(self.device) for one in given[self.rank]), self.world)
        assert_bits(got, want, f"{dispatcher.cfg.dispatch_format}, {routing}, {tokens}, extend {self.extend}")

    def check_all(self) -> None:
        """Both kinds of batches, in turns, so that each call follows another kind: every format with every routing and
        with all numbers of tokens, and these with every routing in half of the formats."""
        seed, most = 0, pools.EARLY_BYTES
        for number, fmt in enumerate(FORMATS):
            dispatcher = self.dispatcher(fmt)
            assert dispatcher.cfg.max_rows * dispatcher._row_bytes <= most
            pools.EARLY_BYTES = 0 if number % 2 else most  # or the host waits before rows are sent, as of more of them
            dispatcher.prebuild()
            for turn, routing in enumerate(ROUTINGS):
                for tokens in SIZES[(number + turn) % 2 :: 2]:
                    alike = abs(tokens[0] - tokens[1]) <= 1
                    for self.extend, self.alone in ((True, False), (False, False), (False, True))[: 2 + alike]:
                        self.check(dispatcher, routing, tokens, seed := seed + 1)
        pools.EARLY_BYTES = most

    def check_room_for_a_shared_batch(self) -> None:
        """Parts that differ by one token, all of them to one expert: from the smaller part 129 tokens are derived, one
        more than a multiple of the alignment. And all entries to one rank."""
        self.most, self.extend, self.alone = 128, False, True
        for routing, tokens in (("one_expert", (64, 65)), ("one_expert", (65, 64)), ("one_rank", (128, 128))):
            self.check(self.dispatcher("bf16"), routing, tokens, 9)

    def check_lost_rows(self) -> None:
        """Ranks whose batches are not as large as each other's, though they say that they share one: rows that find no
        room are NaN at home, none are given to the runner, and the next call that knows says what happened."""
        assert not self.told
        self.most, self.extend, self.alone, tokens = 512, False, True, (0, 512)
        dispatcher, given = self.dispatcher("bf16"), inputs("one_expert", tokens, 512, 3)
        got = self.pass_through(dispatcher, given[self.rank], distinct=False)
        goes = (given[self.rank][1] // (EXPERTS // self.world) == 0).any(dim=1)
        assert torch.equal(got.isnan().all(dim=1).cpu(), goes) and bool(self.ends.any()) == (self.rank == 1)
        try:
            self.module.WORDS.synchronize(pools.pool_of(dist.group.WORLD))
        except EPInputError as error:
            self.told.append(str(error))
        assert len(self.told) == (self.rank == 0) and all(f"{self.module.LIMIT}: left room" in one for one in self.told)


def inside(library: Any, call: Callable[[Any], None]) -> None:
    with library:
        call(importlib.import_module(f"{ADAPTER}.dispatcher"))


def main(store: str, rank: int, world: int) -> None:
    device = join_group(Path(store), rank, world) or torch.device("cpu")
    real = importlib.util.find_spec("sglang") is not None
    if real:
        allow_sglang()

    def run(dispatcher: Any) -> None:
        one = Rank(rank, world, device, dispatcher, runner=real and device.type == "cuda")
        one.check_all()
        one.check_room_for_a_shared_batch()
        one.check_lost_rows()

    inside(nullcontext() if real else installed("sglang", ADAPTER), run)
    close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
