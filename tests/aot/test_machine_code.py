"""What the compiler made of the kernels, for every variant and architecture. Needs no GPU."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from cute_ep.aot.library import LibraryEntry
from cute_ep.kernels.build import SEGMENTS
from cute_ep.kernels.combine.recv import SLOTS_IN_FLIGHT
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT
from cute_ep.layouts.maps.formats import E2M1, E2M3, E3M2, E4M3, FORMATS, Format
from cute_ep.layouts.maps.launch import CTAS_PER_SM, PIPED_THREADS, WIDE_THREADS
from cute_ep.layouts.maps.variants import (
    COMBINE_KERNELS,
    COUNT_KERNEL,
    DISPATCH_KERNELS,
    GATE_KERNELS,
    LABEL_KERNEL,
    LOCAL_KERNELS,
    MAIL_KERNELS,
    MARK_KERNEL,
    PIPED_KERNELS,
    QUANTIZE_KERNEL,
    RANK_MAJOR_SUFFIX,
    SEND_KERNELS,
    TELL_KERNEL,
    Variant,
    variants,
)
from cute_ep.runtime.gpus import KEPT_BYTES

from .conftest import RESIDUAL, WANTED

THREADS = 512
REGISTER_FILE = 65536
SHARED_BYTES = {"sm_90a": 228 * 1024, "sm_100a": 228 * 1024, "sm_103a": 228 * 1024, "sm_120a": 100 * 1024}
"""Shared memory of an SM (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the system takes from every CTA."""

MAX_THREADS, THREADS_REQUIRED = b"\x04\x05\x0c\x00", b"\x04\x10\x0c\x00"
"""In a cubin, what is before the three sizes of a CTA (EIATTR_MAX_THREADS, EIATTR_REQNTID of nvdisasm)."""

WITHOUT_PAYLOAD = ("await_frames", "await_sums", "unpack_frames", "signal_mail")
"""Of MAIL_KERNELS: they move words and entries."""

POLL = re.compile(r"\bLDG\.E\.128\.STRONG\.SYS\b")

Sass = Callable[[Variant], list[str]]

ALL = pytest.mark.parametrize("variant", WANTED, ids=lambda v: f"{v.arch}-{v.symbol}")
GROUP = pytest.mark.parametrize(
    "variant",
    [v for v in WANTED if v.kernel in (*DISPATCH_KERNELS, *COMBINE_KERNELS, *PIPED_KERNELS)],
    ids=lambda v: f"{v.arch}-{v.symbol}",
)


@ALL
def test_two_ctas_fit_on_an_sm(library: dict[Variant, LibraryEntry], variant: Variant) -> None:
    """`CTAS_PER_SM` is a promise of residency: kernels spin on each other. A CTA of a piped kernel has an SM for
    itself, and leaves as much shared memory to its stages as the host counts with."""
    entry = library[variant]
    if variant.kernel in PIPED_KERNELS:
        assert 0 < entry.registers <= REGISTER_FILE // PIPED_THREADS
        assert entry.smem_bytes + RESERVED_SHARED_BYTES <= KEPT_BYTES
        return
    assert 0 < entry.registers <= REGISTER_FILE // (THREADS * CTAS_PER_SM)
    assert CTAS_PER_SM * (entry.smem_bytes + RESERVED_SHARED_BYTES) <= SHARED_BYTES[variant.arch]


@GROUP
def test_ctas_have_as_many_threads_as_are_launched(library: dict[Variant, LibraryEntry], variant: Variant) -> None:
    """The driver refuses more. Those of piped kernels have just as many, other CTAs may fill an SM."""
    image, piped = library[variant].read(), variant.kernel in PIPED_KERNELS
    assert (MAX_THREADS + struct.pack("<3I", WIDE_THREADS, 1, 1) in image) != piped
    assert (THREADS_REQUIRED + struct.pack("<3I", PIPED_THREADS, 1, 1) in image) == piped


@ALL
def test_no_spills(library: dict[Variant, LibraryEntry], sass: Sass, variant: Variant) -> None:
    assert library[variant].spill_bytes == 0
    assert not [line for line in sass(variant) if re.search(r"\b(STL|LDL)\b", line)]


@ALL
def test_payload_moves_16_bytes_at_a_time(sass: Sass, variant: Variant) -> None:
    if variant.kernel in (COUNT_KERNEL, TELL_KERNEL, LABEL_KERNEL, MARK_KERNEL, *WITHOUT_PAYLOAD):
        pytest.skip("moves no payload")
    load = r"\b(LDG\.E(\.EF)?|LDGSTS\.E\.BYPASS)\.128\b"
    if variant.kernel in PIPED_KERNELS:
        assert [line for line in sass(variant) if re.search(r"\bUBLKCP\b", line)], "whole rows"
        load = r"\bLDS\.128\b"
    loads = [line for line in sass(variant) if re.search(load, line)]
    stores = [line for line in sass(variant) if re.search(r"\bSTG\.E\.128\b", line)]
    assert len(loads) >= 2, "at least two loads in flight"
    assert stores


@ALL
def test_peer_written_memory_is_read_coherently(sass: Sass, variant: Variant) -> None:
    """No load through the non-coherent path: peers write while the kernel runs."""
    assert not [line for line in sass(variant) if re.search(r"\bLDG\S*\.(CONSTANT|NC)\b", line)]


def what_separates_polls(lines: list[str]) -> list[str]:
    """Branches, and checks of what was polled, between 16-byte polls."""
    polls = [place for place, line in enumerate(lines) if POLL.search(line)]
    return [line for line in lines[polls[0] : polls[-1]] if re.search(r"\b(BRA|VIMNMX3?|IMNMX)\b", line)]


@GROUP
def test_polls_of_several_vectors_stand_side_by_side(sass: Sass, variant: Variant) -> None:
    """Else each waits for the one before."""
    polls = [line for line in sass(variant) if POLL.search(line)]
    if "_async" in variant.kernel:
        assert not polls, "it receives nothing"
        return
    assert len(polls) == (SLOTS_IN_FLIGHT if variant.kernel.startswith("combine") else LOADS_IN_FLIGHT)
    assert not what_separates_polls(sass(variant))


def test_polls_behind_a_branch_or_a_check_are_seen() -> None:
    poll = "@P2 LDG.E.128.STRONG.SYS R20, desc[UR8][R56.64]"
    assert not what_separates_polls([poll, "IMAD.MOV.U32 R20, RZ, RZ, R40", poll, "@P1 BRA `(.L_x_1)"])
    for between in ("@!P1 BRA `(.L_x_1)", "VIMNMX3.U32 R42, R12, R13, R14, !PT", "VIMNMX.U32 R42, R15, R42, !PT"):
        assert what_separates_polls([poll, between, poll]) == [between]


def encoded_format(variant: Variant) -> Format | None:
    """The format to which a variant encodes rows, None when it does not."""
    return FORMATS[variant.format] if variant.format else None


def has_fp4_instruction(variant: Variant) -> bool:
    return variant.arch != "sm_90a"


@ALL
def test_e2m1_instruction(sass: Sass, variant: Variant) -> None:
    """The hardware conversion where 4-bit rows are made and where it exists (sm_100 and later)."""
    fmt = encoded_format(variant)
    wanted = fmt is not None and fmt.element is E2M1 and has_fp4_instruction(variant)
    assert any("E2M1" in line for line in sass(variant)) == wanted


@ALL
def test_e4m3_instruction(sass: Sass, variant: Variant) -> None:
    """For e4m3 elements and e4m3 scale factors, and for the elements that are made from e4m3 codes: e2m3, and on Hopper
    e2m1."""
    fmt = encoded_format(variant)
    wanted = fmt is not None and (
        {E4M3, E2M3} & {fmt.element, fmt.scale} or (fmt.element is E2M1 and not has_fp4_instruction(variant))
    )
    assert any(re.search(r"F2FP\S*\.E4M3\.F32", line) for line in sass(variant)) == bool(wanted)


@ALL
def test_e5m2_instruction(sass: Sass, variant: Variant) -> None:
    """For e3m2 elements, which are made from e5m2 codes."""
    fmt = encoded_format(variant)
    wanted = fmt is not None and fmt.element is E3M2
    assert any(re.search(r"F2FP\S*\.E5M2\.F32", line) for line in sass(variant)) == wanted


@ALL
def test_exponential_is_the_approximate_instruction(sass: Sass, variant: Variant) -> None:
    """`reference.swiglu_bound` promises its error; no other kernel has one."""
    assert any("MUFU.EX2" in line for line in sass(variant)) == (variant.kernel in GATE_KERNELS)


FENCE = re.compile(r"\bMEMBAR\.\S*SYS\b")
ACQUIRE = re.compile(r"\bCCTL\.IVALL\b")
FLAG_STORE = re.compile(r"\bSTG?\.E\.64\.STRONG\.SYS\b")
FLAG_LOAD = re.compile(r"\bLDG?\.E\.64\.STRONG\.SYS\b")
SYSTEM = re.compile(r"\b(LD|ST)G?\.E\.(?:(U?\d+)\.)?STRONG\.SYS\b")
PAYLOAD_STORE = re.compile(r"^(?!.*(STRONG\.GPU|\.64\.STRONG)).*\b(STG|ST)\b")
PAYLOAD_LOAD = re.compile(r"^(?!.*(STRONG\.GPU|\.64\.STRONG)).*\bLDG\.E\.(128|(128\.)?STRONG\.SYS)\b")
WEAK_VECTOR = re.compile(r"\b(LD|ST)G?\.E\.128(?!\.STRONG)\b")
BARRIER = re.compile(r"\bBAR\.SYNC\b")
COUNT = re.compile(r"\bATOMS\.ADD\b")
MEETING = re.compile(r"\b(RED|ATOMG)\.E\.ADD\.64\b")
ANY_STORE = re.compile(r"\b(STG|ST|RED|ATOMG)\b")
STORE_OR_BARRIER = re.compile(r"\b(STG|ST|RED|ATOMG|BAR)\b")
ANY_LOAD = re.compile(r"\bLDG\b")


def stops_at(lines: Iterable[str], wanted: re.Pattern, stop: re.Pattern) -> bool:
    """Whether one of the lines is wanted before one is to stop at."""
    for line in lines:
        if wanted.search(line):
            return True
        if stop.search(line):
            return False
    return False


def is_released(code: list[str], index: int) -> bool:
    """Whether the store at an index has a system fence directly before."""
    return stops_at(reversed(code[:index]), FENCE, STORE_OR_BARRIER)


def posts(code: list[str]) -> tuple[int, int, list[str]]:
    """(releases, relaxed posts, those of either kind that follow a store of payload with no system fence between).

    A post is a strong system store of 64 bits, a release one with a fence directly before. Relaxed ones, LL words,
    publish no other store, so in the order of the code none lies between payload and flag. Payload are weak stores and
    Lamport words, whose strength orders nothing.
    """
    releases, relaxed, bad = 0, 0, []
    for index, line in enumerate(code):
        if FLAG_STORE.search(line):
            if is_released(code, index):
                releases += 1
            else:
                relaxed += 1
            if stops_at(reversed(code[:index]), PAYLOAD_STORE, FENCE):
                bad.append(line)
    return releases, relaxed, bad


def waits(code: list[str]) -> tuple[int, int, list[str]]:
    """(acquiring polls, relaxed polls, relaxed ones that a load of payload follows with no acquiring poll between).

    A poll is a strong system load of 64 bits, an acquiring one with `CCTL.IVALL` directly after, which drops what the
    L1 holds. Relaxed ones read LL words: what they found is the value itself, and nothing is known about any
    payload. Looks at Lamport words count as loads of payload here: the same code reads rows that have a flag.
    """
    polls = [index for index, line in enumerate(code) if FLAG_LOAD.search(line)]
    acquiring = {index for index in polls if stops_at(code[index + 1 :], ACQUIRE, ANY_LOAD)}
    bad = []
    for poll in set(polls) - acquiring:
        end = min((index for index in acquiring if index > poll), default=len(code))
        if any(PAYLOAD_LOAD.search(line) for line in code[poll:end]):
            bad.append(code[poll])
    return len(acquiring), len(polls) - len(acquiring), bad


@GROUP
def test_launches_wait_for_the_one_before(sass: Sass, variant: Variant) -> None:
    """Before anything is read but the peer table, which no launch writes, and flags by combines that send; and before
    anything is stored. Only then the next launch may start."""
    code = sass(variant)
    (waited,) = (index for index, line in enumerate(code) if re.search(r"\bACQBULK\b", line))
    (released,) = (index for index, line in enumerate(code) if re.search(r"\bPREEXIT\b", line))
    loads = [line for line in code[:waited] if ANY_LOAD.search(line)]
    flags = [line for line in loads if FLAG_LOAD.search(line)]
    dispatches, sends, _ = halves(variant)
    assert waited < released and len(loads) - len(flags) <= 1 and len(flags) == (sends and not dispatches)
    assert waits(code[:waited])[0] == len(flags), "they acquire"
    assert not [line for line in code[:released] if ANY_STORE.search(line)]


def halves(variant: Variant) -> tuple[bool, bool, bool]:
    """(dispatches, sends, receives)."""
    sends = not variant.kernel.startswith(("dispatch_wait", "combine_wait"))
    return variant.kernel in DISPATCH_KERNELS, sends, "_async" not in variant.kernel


@GROUP
def test_posts_release_and_waits_acquire(sass: Sass, variant: Variant) -> None:
    """Flags are released and acquired; relaxed are LL words, of the routing table and of the rounds that combine
    compares, where they are sent or read."""
    dispatches, sends, receives = halves(variant)
    releases, relaxed_posts, bad_posts = posts(sass(variant))
    acquiring, relaxed_polls, bad_waits = waits(sass(variant))
    assert not bad_posts and not bad_waits
    piped = variant.kernel in PIPED_KERNELS
    # no word of a partial sum is SENTINEL; a pipeline's post stands once more out of line, for lanes that are apart
    escapes = piped or dispatches or not variant.kernel.endswith("partial")
    assert releases == 1 + sends * (1 + escapes), "consumed; message_ready or return_ready, of chunks and of SENTINEL"
    assert relaxed_posts >= 4 if dispatches and sends else relaxed_posts == sends, "the table; the dispatch round"
    adds = piped and receives and "unweighted" not in variant.kernel  # pipelines look, wait and compare, too
    looks = receives * (3 if dispatches else 1) + 2 * adds + (sends and not dispatches)
    meets = dispatches and receives
    assert acquiring == 2 * (sends + receives + meets + adds) + looks, (
        "consumed, a slice, CTAs that meet, a run: once before the loop and once in it; consumed, early; behind "
        "payload, scales or row scale that are SENTINEL"
    )
    assert relaxed_polls >= 4 if dispatches and receives else relaxed_polls == 2 * (receives + adds), (
        "words of the table, of an entry; the dispatch round, once before the loop and once in it"
    )


@GROUP
def test_chunks_have_a_barrier_before_their_flag(sass: Sass, variant: Variant) -> None:
    """One post of a kernel that sends: no payload is stored between the CTA's barrier and it, or in pipelines between
    the atomic by which consumers count."""
    code, meeting = sass(variant), COUNT if variant.kernel in PIPED_KERNELS else BARRIER
    released = [index for index, line in enumerate(code) if FLAG_STORE.search(line) and is_released(code, index)]
    behind = [index for index in released if stops_at(reversed(code[:index]), meeting, PAYLOAD_STORE)]
    assert len(behind) == halves(variant)[1]


@GROUP
def test_words_are_whole(sass: Sass, variant: Variant) -> None:
    """One 64-bit access holds value and epoch of an LL word: the compiler is free to narrow a relaxed load of which
    it sees only half used. Lamport words are moved 128 bits at a time, scale factors that were not made here 32."""
    dispatches, sends, receives = halves(variant)
    widths: dict[str, Counter] = {"LD": Counter(), "ST": Counter()}
    for line in sass(variant):
        if found := SYSTEM.search(line):
            widths[found[1]][found[2] or "32"] += 1
    given = dispatches and sends and (FORMATS[variant.format].scale is None or FORMATS[variant.format].row_scale)
    assert set(widths["ST"]) == {"64"} | ({"128"} if sends else set()) | ({"32"} if given else set())
    assert set(widths["LD"]) - {"32"} == {"64"} | ({"128"} if receives else set())
    assert widths["LD"]["32"] == (5 if dispatches and receives else 0), "two words of scales a lane, twice; a row scale"


@GROUP
def test_rows_travel_in_words_that_may_be_looked_at(sass: Sass, variant: Variant) -> None:
    """What peers poll is stored and loaded in strong accesses. Weak 16-byte ones are left, in a kernel that only sends,
    for records of the status (with a fence behind), in one that only receives, for the shared expert's row and the
    residual of the hook, behind a flag for sums of two segments, behind the meeting of the CTAs for scale factors."""
    dispatches, sends, receives = halves(variant)
    code = sass(variant)
    weak = [(index, found[1]) for index, line in enumerate(code) if (found := WEAK_VECTOR.search(line))]
    if sends and not receives:
        assert all(stops_at(code[index + 1 :], FENCE, ANY_STORE) for index, kind in weak if kind == "ST")
    if receives and not sends:
        meeting = max((index for index, line in enumerate(code) if MEETING.search(line)), default=len(code))
        loads = [code[index] for index, kind in weak if kind == "LD" and index < meeting]
        places, settled = 0, 0  # where sums are finished; loads of sums of two segments
        if not dispatches and not variant.kernel.endswith("unweighted"):
            places = 1
            if variant.kernel.endswith("partial") and SEGMENTS.get(variant.arch) == 2:
                places, settled = 3, 4
        assert len(loads) == settled + places * (1 + (variant.hooks == RESIDUAL)), loads


def exit_fences(code: list[str]) -> tuple[bool, bool]:
    """Whether a device-scope fence stands directly before, and whether one stands after, the last atomic add: the one
    with which a CTA counts itself out. Where the compiler does not know that one thread does, there are two to the same
    address, the first for fewer than a whole warp."""
    adds = [index for index, line in enumerate(code) if re.search(r"\bATOMG\.E\.ADD\b", line)][-2:]
    to = [re.search(r"\[R\d+\S*\]", code[index]) for index in adds]
    last = min(at for at, place in zip(adds, to, strict=True) if place and to[-1] and place[0] == to[-1][0])
    before = False
    for line in reversed(code[:last]):
        if re.search(r"\bMEMBAR\.\S*GPU\b", line):
            before = True
        if before or re.search(r"\b(STG|ST|RED|ATOMG|BAR)\b", line):
            break
    return before, any(re.search(r"\bMEMBAR\.\S*GPU\b", line) for line in code[last:])


@pytest.mark.parametrize(
    "variant", [v for v in WANTED if v.kernel in DISPATCH_KERNELS], ids=lambda v: f"{v.arch}-{v.symbol}"
)
def test_barriers_of_dispatch_are_those_of_twins(sass: Sass, variant: Variant) -> None:
    """By a number, for THREADS threads: half of a wide CTA would never come to any other one."""
    bars = [line for line in sass(variant) if re.search(r"\bBAR\.", line)]
    assert bars and all(re.search(rf" R\d+, {THREADS:#x}\b", line) for line in bars), bars


@GROUP
def test_announcement_is_ordered_before_its_withdrawal(sass: Sass, variant: Variant) -> None:
    """Kernels that publish fence before they count themselves out, the others do not pay for it."""
    publishes = variant.kernel.removesuffix(RANK_MAJOR_SUFFIX) in ("dispatch", "dispatch_wait")
    assert exit_fences(sass(variant)) == (publishes, True)


def test_the_checks_see_a_missing_fence() -> None:
    post, store, fence = "STG.E.64.STRONG.SYS [R2], R4", "STG.E.128 [R8], R12", "MEMBAR.ALL.SYS"
    assert posts([store, fence, post]) == (1, 0, [])
    assert posts([post, post, store, fence, post]) == (1, 2, [])
    assert posts([fence, store, post]) == (0, 1, [post])
    assert posts([store, fence, post, post]) == (1, 1, [])
    row, word = "STG.E.128.STRONG.SYS [R8], R12", "@P1 STG.E.STRONG.SYS [R8], R12"
    assert [SYSTEM.search(line)[2] for line in (row, word, post)] == ["128", None, "64"]
    assert [bool(WEAK_VECTOR.search(line)) for line in (row, store)] == [False, True]
    assert posts([row, post]) == (0, 1, [post]) and posts([word, post]) == (0, 1, [post])
    assert posts([fence, row, word, post]) == (0, 1, [post]) and posts([row, word, fence, post]) == (1, 0, [])
    poll, load, acquire = "LDG.E.64.STRONG.SYS R4, [R2]", "LDG.E.128 R8, [R10]", "CCTL.IVALL"
    assert waits([poll, acquire, poll, acquire, load]) == (2, 0, [])
    assert waits([poll, load, acquire]) == (0, 1, [poll])
    assert waits([poll, "LDG.E R3, [R6]", poll, acquire, load]) == (1, 1, [])
    assert waits([poll, fence, acquire, load]) == (1, 0, [])
    assert waits([poll, "LDG.E R3, [R6]", fence, acquire, load]) == (0, 1, [poll])
    for look in ("LDG.E.128.STRONG.SYS R8, [R10]", "@P1 LDG.E.STRONG.SYS R8, [R10]"):
        assert waits([poll, look, poll, acquire]) == (1, 1, [poll]) and waits([poll, poll, acquire, look]) == (1, 1, [])
    leave, narrow = "ATOMG.E.ADD.STRONG.GPU PT, R0, [R2], R11", "MEMBAR.ALL.GPU"
    assert exit_fences([store, narrow, leave, narrow]) == (True, True)
    assert exit_fences([narrow, store, leave]) == (False, False)


def test_kernel_names_are_covered() -> None:
    """And every kernel that has formats is one that encodes."""
    encoding = {*SEND_KERNELS, QUANTIZE_KERNEL, *GATE_KERNELS}
    others = {*DISPATCH_KERNELS, *COMBINE_KERNELS, *PIPED_KERNELS, *LOCAL_KERNELS, *MAIL_KERNELS}
    assert {v.kernel for v in variants()} == encoding | others
    assert {v.kernel for v in variants() if v.format} == encoding
    assert {v.format for v in variants()} == {None, *FORMATS}
