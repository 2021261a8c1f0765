"""How a launch begins: it finds its place, waits for the end of the launch before, and reads its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext, DispatchContext
from cute_ep.kernels.device.divide import remainder
from cute_ep.kernels.device.memory import DeviceRegion, array, pair_at
from cute_ep.kernels.device.slices import packed_cta
from cute_ep.kernels.device.sync import load_flag
from cute_ep.kernels.device.twins import twin, twins_log2
from cute_ep.layouts.maps.arena import regions_of
from cute_ep.layouts.maps.arguments import CombineArgs, DispatchArgs, Grid, Group
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_RANKS


@dataclass(frozen=True)
class Rounds:
    """Rounds of a launch's phase that the rank had completed before it: those sent, and those received."""

    sent: Int64
    received: Int64


def open_dispatch(args: DispatchArgs, peers: Region, receive: bool) -> tuple[DispatchContext, Rounds]:
    """The context of a launch of dispatch, and the rounds before it."""
    return _open(DispatchContext, args, peers, args.grid.packed, False, receive)


def open_combine(args: CombineArgs, peers: Region, send: bool, receive: bool) -> tuple[CombineContext, Rounds]:
    """The context of a launch of combine, and the rounds before it."""
    return _open(CombineContext, args, peers, Int32(0), send, receive)


Opened = TypeVar("Opened", DispatchContext, CombineContext)


def _open(
    context: type[Opened], args: DispatchArgs | CombineArgs, peers: Region, packed: Int32, looks: bool, receive: bool
) -> tuple[Opened, Rounds]:
    """`context`: the class, which says where its phase's words are; looks: whether it needs `Context.consumed`."""
    arena = regions_of(args.arena, DeviceRegion)
    flags = getattr(arena, context.FLAGS)
    place = _find_place(args.group, args.grid, arena.peers, flags, looks, packed, context.TWINS)
    tid, cta, ctas, peer_base, consumed = place
    rounds = _completed(arena.state.address(args.group.arena, int(context.EPOCHS)))
    epoch = (rounds.received if receive else rounds.sent) + 1
    at = {"tid": tid, "cta": cta, "ctas": ctas, "epoch": epoch, "peer_base": peer_base, "consumed": consumed}
    records = args._asdict() | {"arena": arena}
    return context(**at, sPeers=shared_array(peers, Int64), **records), rounds


@cute.jit
def _find_place(
    group: Group,
    grid: Grid,
    peers: Region,
    flags: Region,
    looks: cutlass.Constexpr,
    packed: Int32,
    twins: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32, Int64, Int64]:
    """Start reading the peer table, read peer `tid`'s word of `flags` if it `looks`, and wait for the end of the launch
    before. `packed` as in `Grid`, `twins` as `Context.TWINS`."""
    tid = cute.arch.thread_idx()[0]
    if cutlass.const_expr(twins):
        tid = remainder(tid, THREADS)
    gPeers = array(peers.address(group.arena), Int64, group.ranks)
    peer_base, consumed = Int64(0), Int64(0)
    if tid < group.ranks:
        peer_base = gPeers[tid]
        if cutlass.const_expr(looks):
            consumed = load_flag(flags.address(group.arena, tid))
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    if cutlass.const_expr(twins):
        log2 = twins_log2(grid.warps)
        cta, ctas = (cta << log2) + twin(), ctas << log2
    cute.arch.griddepcontrol_wait()
    if grid.pdl != 0:
        cute.arch.griddepcontrol_launch_dependents()
    return tid, cutlass.select_(packed != 0, packed_cta(cta, ctas), cta), ctas, peer_base, consumed


def _completed(word: Int64) -> Rounds:
    """The two epoch words of a phase, of which this is the address of the first: one access."""
    words = pair_at(word, Int64).load()
    return Rounds(words[0], words[1])


def peer_table(regions: RegionMap) -> Region:
    """Shared memory for the peers' arena addresses."""
    return regions.add("peers", 8, MAX_RANKS)
