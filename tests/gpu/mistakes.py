"""Mistakes in the protocol: what each changes in the sources, and which schedule finds it."""

from __future__ import annotations

from tests.edits import Edit

from .mail_mistakes import MAIL_MUTANTS
from .mutant import Mutant

UNCHANGED = "UNCHANGED"
"""The sources as they are, with the kernels of the library: finds nothing on any of the schedules."""


_ACKNOWLEDGE = {
    "kernels/dispatch/kernel.py": "ctx.acknowledge(rounds.received, control)",
    "kernels/combine/kernel.py": "ctx.acknowledge(rounds.received, control)",
}
_AWAITED = "self.wait_consumed(self.epoch - 2)"
_AFTER_COMBINE_WAIT = "alive = ctx.wait_all_ranks(rounds.sent if self.receive else None)\n"
_SPAN_STORED = """\
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
"""
_SPAN_SIGNALED = """\
            if ctx.warp == 0:
                self._signal_span(ctx, opaque(item))
"""
_SPAN_ENDS, _SPAN_ENDS_EARLY = _SPAN_STORED + _SPAN_SIGNALED, _SPAN_SIGNALED + _SPAN_STORED


def _wait_for(epoch: str) -> tuple[Edit, ...]:
    """Senders wait for another round to be consumed."""
    return (Edit("kernels/device/context.py", _AWAITED, _AWAITED.replace("self.epoch - 2", epoch)),)


def _acknowledge_if(condition: str) -> tuple[Edit, ...]:
    return tuple(
        Edit(file, signal, f"if cutlass.const_expr({condition}):\n            {signal}")
        for file, signal in _ACKNOWLEDGE.items()
    )


MUTANTS = {
    # senders do not wait before they overwrite: round n+2 returns before a late rank has read n
    "NO_CONSUMED_WAIT": Mutant("combines", _wait_for("Int64(0)")),
    # a combine's look at the flags, before it waits for them, is content with two rounds less: the same
    "EARLY_LOOK": Mutant(
        "combines",
        (Edit("kernels/device/context.py", "self.consumed >= due", "self.consumed >= due - 2"),),
    ),
    # a receiving launch signals its own round as consumed, not the last completed one: the same
    "ACK_OWN_ROUND": Mutant(
        "combines",
        tuple(
            Edit(file, signal, signal.replace("received", "received + int(self.receive)"))
            for file, signal in _ACKNOWLEDGE.items()
        ),
    ),
    # a sending launch signals "consumed" after its wait for "consumed": the third `dispatch_async` waits for itself
    "ACK_AFTER_WAIT": Mutant(
        "split",
        (
            *_acknowledge_if("not self.send"),
            Edit(
                "kernels/dispatch/kernel.py",
                "            alive = self._send_half(ctx, rounds.sent if self.receive else None)\n",
                "            alive = self._send_half(ctx, rounds.sent if self.receive else None, rounds.received)\n",
            ),
            Edit(
                "kernels/dispatch/kernel.py",
                "    def _send_half(self, ctx: DispatchContext, sent: Int64 | None) -> Boolean:\n",
                "    def _send_half(self, ctx: DispatchContext, sent: Int64 | None, received: Int64) -> Boolean:\n",
            ),
            Edit(
                "kernels/dispatch/kernel.py",
                "        alive = self.route_role.run(ctx, sent)\n",
                "        alive = self.route_role.run(ctx, sent)\n"
                "        ctx.acknowledge(received, control_cta(ctx.grid.send_ctas))\n",
            ),
            Edit(
                "kernels/combine/kernel.py",
                _AFTER_COMBINE_WAIT,
                _AFTER_COMBINE_WAIT + "        ctx.acknowledge(rounds.received, control)\n",
            ),
        ),
    ),
    # only launches that receive signal "consumed": the same
    "ACK_ON_RECEIVE": Mutant("split", _acknowledge_if("self.receive")),
    # receivers wait for flag == n, not flag >= n: the flag has moved on
    "EQUAL": Mutant(
        "split",
        (
            Edit(
                "kernels/device/sync.py",
                "def _has_arrived(seen: Int64, epoch: Int64, tagged: bool) -> Boolean:\n",
                "def _has_arrived(seen: Int64, epoch: Int64, tagged: bool, phase=None) -> Boolean:\n"
                "    if phase in (Phase.MESSAGE, Phase.RETURN):\n"
                "        return seen == epoch\n",
            ),
            Edit(
                "kernels/device/sync.py",
                "    arrived = _has_arrived(seen, epoch, tagged)\n    if not arrived:",
                "    arrived = _has_arrived(seen, epoch, tagged, awaited.phase)\n    if not arrived:",
            ),
            Edit(
                "kernels/device/sync.py",
                "arrived = _has_arrived(seen, epoch, tagged)\n                polls += 1",
                "arrived = _has_arrived(seen, epoch, tagged, awaited.phase)\n                polls += 1",
            ),
        ),
    ),
    # senders wait for n-1, not n-2: the second `dispatch_async` waits for the first `dispatch_wait`
    "WAIT_PREVIOUS": Mutant("split", _wait_for("self.epoch - 1")),
    # combine reads the header from the arena, not from the batch: it is a later dispatch's
    "ARENA_HEADER": Mutant(
        "two ahead",
        (
            Edit(
                "kernels/combine/schedule.py",
                "            move(plain, vectors_at(ctx.batch.headers, ctx.lane), [rHeader])\n",
                "            for word in cutlass.range_constexpr(len(HeaderWord)):\n"
                "                at = ctx.base + ctx.arena.table.at(ctx.epoch & 1, ctx.lane, word)\n"
                '                LL = cute.arch.load(pointer(at, Int64), Int64, sem="relaxed", scope="sys")\n'
                "                rHeader[word] = Uint32(LL)\n",
            ),
            Edit(
                "kernels/combine/schedule.py",
                "from cute_ep.kernels.device.memory import vectors_at",
                "from cute_ep.kernels.device.memory import pointer",
            ),
        ),
    ),
    # a span's flags are signaled before its warps have stored all of it
    "EARLY_FLAG": Mutant("combines", (Edit("kernels/combine/send.py", _SPAN_ENDS, _SPAN_ENDS_EARLY),)),
    # entries of the next span overwrite those that the warps are reading
    "ONE_STAGE": Mutant(
        "combines",
        (
            Edit(
                "kernels/combine/entries.py",
                "shared_array(staged, Uint32)[stage, None]",
                "shared_array(staged, Uint32)[0, None]",
            ),
            Edit(
                "kernels/combine/entries.py",
                "            place = stage, token * ctx.top_k + ctx.lane\n",
                "            place = 0, token * ctx.top_k + ctx.lane\n",
            ),
        ),
    ),
    # every round uses the same slots: round n+1 overwrites n's table
    "ONE_PARITY": Mutant(
        "split",
        (
            Edit(
                "layouts/maps/arena.py",
                "return region_arguments(self._partial if partial else self.regions)",
                "found = region_arguments(self._partial if partial else self.regions)\n"
                "        regions = self.table, self.entries, self.weights, self.messages, self.returns\n"
                "        regions += self.lamport_messages, self.lamport_returns\n"
                "        names = [region.name for region in regions]\n"
                "        return found._replace(**{name: getattr(found, name)._replace(stride0=0) for name in names})",
            ),
        ),
    ),
    # readers leave lamport words as they are: rows of round n-2 are taken
    "NO_CLEAR": Mutant(
        "turns",
        (Edit("kernels/device/atoms.py", "    fill(SENTINEL, target)\n", ""),),
    ),
    # dispatch rounds that ranks tell each other have one word: the next round's comes before the reader has looked
    "ONE_PAIR": Mutant(
        "combines",
        (
            Edit("kernels/combine/pairs.py", "return_rounds, sEpoch[0] & 1, ", "return_rounds, 0, "),
            Edit("kernels/combine/pairs.py", "return_rounds, ctx.epoch & 1, ", "return_rounds, 0, "),
        ),
    ),
    # ranks do not compare them: rows of another batch are waited for in vain, or summed
    "UNPAIRED": Mutant(
        "crossed",
        (
            Edit(
                "kernels/combine/pairs.py",
                "        if differs:\n",
                "        differs = Boolean(False)\n        if differs:\n",
            ),
        ),
    ),
    # a launch that only sends leaves out its own rank, which will wait for its messages
    "DIRECT_SPLIT": Mutant(
        "split",
        (
            Edit(
                "kernels/dispatch/kernel.py",
                "DispatchSend(codec, hooks.input_scale, ahead, direct, shared)",
                "DispatchSend(codec, hooks.input_scale, ahead, codec.fmt.scale is None, shared)",
            ),
        ),
    ),
    # a rank waits for its own messages, which nobody sends
    "OWN_AWAITED": Mutant(
        "combines",
        (Edit("kernels/dispatch/row_copy.py", "        if not (lamport | own):\n", "        if not lamport:\n"),),
    ),
    # a rank takes its own tokens from the slots of its messages
    "OWN_SLOT": Mutant(
        "turns",
        (
            Edit(
                "kernels/dispatch/row_copy.py",
                "cutlass.select_(self._is_own(ctx, source), given_row(ctx, row_slice.token), message)",
                "cutlass.select_(self._is_own(ctx, source), message, message)",
            ),
        ),
    ),
    # the first consumer at a span's end signals its flags, others have not stored their segments
    "PIPED_EARLY_FLAG": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/consume.py",
                "        last = (from_lane(before, 0) + 1) % CONSUMERS == 0\n",
                "        last = from_lane(before, 0) % CONSUMERS == 0\n",
            ),
        ),
    ),
    # runs of own tokens are dealt out by the counter of spans: some of either are left out
    "PIPED_ONE_COUNTER": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/piped_schedule.py",
                "self.take(ctx, ctx.ranks - 1, Int32(0))",
                "self.take(ctx, Int32(0), Int32(0))",
            ),
        ),
    ),
    # their own counter begins where that of the round before last ended
    "PIPED_RUNS_GO_ON": Mutant(
        "combines on few SMs",
        (Edit("kernels/combine/schedule.py", "ctx.ranks * COUNTERS", "(ctx.ranks - 1) * COUNTERS"),),
    ),
    # a launch reads its rounds, and x, before the launch that starts it early has ended
    "EARLY_READ": Mutant(
        "combines",
        (Edit("kernels/device/opening.py", "    cute.arch.griddepcontrol_wait()\n", ""),),
    ),
    # receiving warps of a CTA wait for each other before each slice, of which they have different numbers
    "RECEIVE_BARRIER": Mutant(
        "two ahead on few SMs",
        (
            Edit(
                "kernels/dispatch/recv.py",
                "                alive = self._take(ctx, item.source, row_slice)\n",
                "                cute.arch.sync_threads()\n"
                "                alive = self._take(ctx, item.source, row_slice)\n",
            ),
        ),
        hangs=True,
    ),
    # sums of other ranks are added without a wait for them
    "PIPED_UNAWAITED": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/runs.py",
                "return (owner >= 0) & (owner != ctx.rank)",
                "return (owner > 99) & (owner != ctx.rank)",
            ),
        ),
    ),
    # a pipeline that could add up draws a span, and waits for its run instead of sending it
    "PIPED_HELD_SPAN": Mutant(
        "combines on few SMs",
        (Edit("kernels/combine/produce.py", "if ~arrived & (item < spans):", "if drains & (item < spans):"),),
    ),
    # of a long span only the first chunk is signaled
    "PIPED_ONE_FLAG": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/produce.py", "chunk_of(last + (CHUNK - 1)) - chunk_of(first)", "Int32(first < slices)"
            ),
        ),
    ),
    # the own sum is the first one, also behind two lower ranks
    "PIPED_OWN_FIRST": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/runs.py",
                "        return without_lowest(below) != Uint32(0)\n",
                "        return without_lowest(below) > Uint32(1 << 31)\n",
            ),
        ),
    ),
    # senders guess from its tokens whether a source gets Lamport rows back, instead of reading its header
    "FLAGS_BY_TOKENS": Mutant(
        "two ahead on few SMs",
        (Edit("kernels/combine/schedule.py", "are_flagged(returns) != 0", "tokens > 1024"),),
    ),
    # the slices that are drawn begin where those of the round before ended: some are taken by nobody
    "DRAWS_GO_ON": Mutant(
        "senders join",
        (
            Edit(
                "kernels/dispatch/kernel.py",
                "                    reset_counter(ctx.state_word(StateWord.DISPATCH_SLICES))\n",
                "                    pass\n",
            ),
        ),
    ),
    # and with those that warps begin with: some are taken twice
    "DRAWS_FROM_NONE": Mutant(
        "senders join",
        (
            Edit(
                "kernels/dispatch/recv_schedule.py",
                "item_of(item_stride(ctx.ctas - ctx.grid.send_ctas), from_lane(asked, 0))",
                "item_of(Int32(0), from_lane(asked, 0))",
            ),
        ),
    ),
    # the last slices, which are drawn in parts, are drawn as often as whole ones
    "PARTS_NOT_DRAWN": Mutant(
        "senders join",
        (
            Edit(
                "kernels/dispatch/recv_schedule.py",
                "number < drawn_items(self._items(), self._split(ctx))",
                "number < self._items()",
            ),
        ),
    ),
    # a CTA of the route role forgets the entries of its earlier spans
    "SPANS_NOT_ADDED": Mutant(
        "senders join",
        (Edit("kernels/dispatch/route.py", "            sHistogram[key] = self._count_of(key)\n", ""),),
    ),
    # twins have one barrier, which lets either of them go when half of its threads have come
    "TWINS_ONE_BARRIER": Mutant(
        "two ahead on few SMs",
        (Edit("kernels/device/twins.py", "barrier_id=twin_barrier()", "barrier_id=3"),),
    ),
    # and the same shared memory
    "TWINS_ONE_MEMORY": Mutant(
        "two ahead on few SMs",
        (
            Edit(
                "kernels/device/twins.py", "return twin() * self.map.nbytes + self.offset", "return Int32(self.offset)"
            ),
        ),
    ),
    # bulk copies are not ordered behind the flags: no GPU need show it
    "PIPED_NO_FENCE": Mutant(
        "combines on few SMs",
        (
            Edit(
                "kernels/combine/runs.py",
                '        cute.arch.fence_proxy("async.global")  # copies read what other ranks have stored\n',
                "",
            ),
        ),
        promised=False,
    ),
    # "consumed" does not order the clearing before it: no GPU has shown it, tests/aot sees it in machine code
    "WEAK_ACK": Mutant(
        "combines of few",
        (
            Edit(
                "kernels/device/context.py",
                "signal(self.consumed_flags.address(self.peer_base, self.rank), received)",
                "word = pointer(self.consumed_flags.address(self.peer_base, self.rank), Int64)\n"
                '            cute.arch.store(word, received, sem="relaxed", scope="sys")',
            ),
        ),
        promised=False,
    ),
}
"""Name, as in `tests/protocol/ep_protocol.pml` -> mistake within a node."""
MUTANTS |= MAIL_MUTANTS


def expected(name: str) -> tuple[str, ...]:
    """The verdicts that a mutant may have."""
    if name == UNCHANGED:
        return ("survived",)
    if MUTANTS[name].hangs:
        return ("hung",)
    return ("found",) if MUTANTS[name].promised else ("found", "survived")
