"""Rows move in one way, `move` with the atoms of `kernels/device/atoms.py`: what else reads or writes memory, orders it
or is PTX stands here by file and function, with its reason.

A word of the DSL that is neither in FREE nor listed fails, and so does one that a file would import by itself. Not
seen are elements of an `array` or a `shared_array` that code takes by index.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .sources import dotted, files, functions, nodes

FREE = {
    *("jit", "kernel", "Tensor", "TensorSSA", "Pointer", "Layout", "AddressSpace.gmem", "AddressSpace.smem"),
    *("make_rmem_tensor", "recast_tensor", "make_layout", "local_tile", "logical_divide", "size", "assume"),
    *("math.fma", "math.max", "math.min"),
    *("arch.block_idx", "arch.grid_dim", "arch.thread_idx", "arch.globaltimer"),
    *("arch.barrier", "arch.sync_threads", "arch.sync_warp"),
    *("arch.griddepcontrol_launch_dependents", "arch.griddepcontrol_wait"),
    *("arch.vote_all_sync", "arch.vote_any_sync", "arch.vote_ballot_sync", "arch.match_sync"),
    *("arch.shuffle_sync", "arch.shuffle_sync_bfly", "arch.shuffle_sync_down", "arch.shuffle_sync_up"),
    *("arch.warp_reduction_max", "arch.warp_redux_sync", "arch.lanemask_gt", "arch.lanemask_lt"),
    *("arch.clz", "arch.exp2", "arch.fmax", "arch.fmin", "arch.mul_hi", "arch.popc", "arch.rcp_approx"),
    *("cutlass.Constexpr", "cutlass.const_expr", "cutlass.range", "cutlass.range_constexpr"),
    *("cutlass.max", "cutlass.min", "cutlass.select_"),
}
"""Words of the DSL, those of `cute` without that name, that touch registers, lanes or barriers, no memory."""
LISTED = {
    # the mover, and what it moves
    "device/atoms.py plain": ("make_copy_atom copy", "an atom"),
    "device/atoms.py send": ("make_copy_atom copy", "an atom"),
    "device/atoms.py _fetch": ("make_copy_atom copy", "an atom"),
    "device/atoms.py bulk": ("arch.get_dyn_smem arch.inline_ptx", "an atom"),
    "device/atoms.py _move_inside": (".fill", "what registers get of vectors beyond the row"),
    "device/atoms.py _poll": ("arch.load", "a poll of a word"),
    "device/atoms.py _load": ("arch.inline_ptx", "polls and streamed loads of a vector"),
    "device/memory.py pointer": ("make_ptr", "global memory"),
    "device/memory.py array": ("make_tensor", "global memory"),
    "device/memory.py pair_at": ("make_tensor", "global memory"),
    "device/memory.py _turns": ("make_tensor", "a thread's part of a row"),
    "device/block.py shared_array": ("arch.get_dyn_smem make_ptr recast_ptr make_tensor", "shared memory"),
    "device/block.py shared_share": (
        "arch.get_dyn_smem make_ptr make_tensor",
        "a lane's part of a row in shared memory",
    ),
    "codec/payload.py exchange": ("make_tensor", "a lane's part of a row in shared memory"),
    # signals, polls, releases and counters
    "device/sync.py signal": ("arch.store", "a release"),
    "device/sync.py load_flag": ("arch.load", "an acquire"),
    "device/sync.py store_ll": ("arch.store", "an LL word"),
    "device/sync.py wait_two_ll": ("arch.load", "polls of LL words"),
    "device/sync.py _poll": ("arch.load", "a poll"),
    "device/sync.py not_aborted": ("arch.load", "a poll of the abort word"),
    "device/sync.py report": ("arch.load arch.store arch.fence_acq_rel_sys", "a status record and the abort word"),
    "device/sync.py block_all": ("nvvm.barrier nvvm.BarrierReduction.AND", "the DSL's barrier has no reduction"),
    "device/sync.py twin_all": ("arch.inline_ptx", "a barrier that has a number and reduces"),
    "device/sync.py grid_barrier": ("arch.atomic_add", "a counter, whose increment releases"),
    "device/sync.py take_ticket": ("arch.atomic_add", "a counter"),
    "device/sync.py reset_counter": ("arch.store", "a counter"),
    "device/sync.py count_exit": (
        "arch.atomic_add arch.store arch.fence_acq_rel_gpu",
        "a counter, after a failure a fence",
    ),
    "device/context.py complete": ("arch.store", "an epoch word"),
    "device/opening.py _completed": (".load", "two epoch words at once"),
    "device/slices.py draw": ("arch.inline_ptx", "a ticket of a CTA: an atomic of shared memory that counts around"),
    "combine/consume.py _end_span": ("arch.atomic_add", "a counter in shared memory, whose increment releases"),
    "combine/ring.py prepare": ("arch.mbarrier_init arch.mbarrier_init_fence", "barriers of stages"),
    "combine/ring.py put": ("arch.mbarrier_wait arch.mbarrier_arrive_and_expect_tx", "barriers of stages"),
    "combine/ring.py take": ("arch.mbarrier_wait", "a barrier of a stage"),
    "combine/ring.py leave": ("arch.mbarrier_arrive", "a barrier of a stage"),
    "combine/runs.py put": ("arch.fence_proxy", "rows that came by stores are copied by `bulk`"),
    "combine/send.py prepare": ("arch.cp_async_commit_group", "what `fetch` has begun"),
    "combine/send.py _carry_spans": ("arch.cp_async_commit_group arch.cp_async_wait_group", "what `fetch` has begun"),
    "dispatch/prefetch.py fetch": ("arch.cp_async_commit_group", "what `fetch` has begun"),
    "dispatch/prefetch.py wait": ("arch.cp_async_wait_group", "what `fetch` has begun"),
    "dispatch/route.py _count_before": ("arch.atomic_add", "a histogram in shared memory"),
    "local/count_routes.py _count_entries": ("arch.atomic_add", "a histogram in shared memory"),
    "local/count_routes.py _count_ranks": ("arch.atomic_add", "a histogram in shared memory"),
    "mail/await_mail.py kernel": ("arch.store", "a round word"),
    "mail/await_mail.py _word": ("arch.load", "a word of a header that another engine brings"),
    "mail/place.py rounds": ("arch.load", "a round word"),
    "mail/place.py finish": ("arch.store", "a round word"),
    "mail/place.py tell": ("arch.store", "a word for the host"),
    "mail/signal_mail.py kernel": ("arch.load", "a round word"),
    # single words
    "device/scale_rows.py store_scale_word": ("arch.store", "a word of scale factors"),
    "device/scale_rows.py zero_scale_rows": ("arch.store", "one or two words of scale factors"),
    "dispatch/recv.py _tell_source": (".store", "token and slot of a row at once"),
    "dispatch/send.py _global_scale": ("arch.load", "a number"),
    "hooks.py scale": ("arch.load", "a number"),
    "mail/place.py batch": ("arch.load", "a number"),
    # arithmetic that the DSL has no word for
    "codec/fp8.py clamp_pair": ("arch.inline_ptx", "minimum of two bfloat16 at once, with the sign of one"),
    "device/arith.py add": ("arch.inline_ptx", "rounded on its own, never part of an fma"),
    "device/arith.py multiply": ("arch.inline_ptx", "the same"),
    "device/arith.py opaque": ("arch.inline_ptx", "hides a value from the compiler"),
    "device/arith.py unit_amax": ("arch.inline_ptx", "maximum of two bfloat16 at once"),
    # the host
    "build.py compile_variant": ("cutlass compile GPUArch GenerateLineInfo KeepCUBIN KeepPTX", "compiles the kernels"),
}
"""File and function -> its words, and why they stand there."""


ACCESSES = ("load", "store", "fill")
"""Methods of tensors that read or write them."""
METHODS = {"self.load", "self.prefetch.load", "self.runs.load"}
"""Of roles, which have the same names."""
ADVICE = """is not known to touch registers, lanes or barriers only. Such a word belongs into FREE; rows are moved by
`move`; what reads or writes other memory, or orders it, belongs into LISTED with its reason."""


def is_register(node: ast.expr) -> bool:
    """Whether a tensor, or a part or view of one, is named as one of registers."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and dotted(node.func) == "cute.recast_tensor":
            node = node.args[0]
        else:
            return False
    return re.match("r[A-Z]", node.id) is not None


def words(source: str) -> Iterator[tuple[str, str]]:
    """(function, word) of words of the DSL that are not FREE, and of ACCESSES of tensors that are no registers."""
    found = list(nodes(source))
    inner = {id(node.value) for _, node in found if isinstance(node, ast.Attribute)}
    for function, node in found:
        name = dotted(node) if id(node) not in inner else ""
        if name.split(".")[0] in ("cute", "cutlass", "llvm", "nvvm"):
            word = name.removeprefix("cute.")
            if word not in FREE:
                yield function, word
        elif isinstance(node, ast.Attribute) and node.attr in ACCESSES and not is_register(node.value):
            if name not in METHODS:
                yield function, f".{node.attr}"


def test_every_access_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for name, source in files():
        for function, word in words(source):
            found.setdefault(f"{name} {function}", set()).add(word)
    listed = {name: set(known.split()) for name, (known, _) in LISTED.items()}
    for name, used in found.items():
        for word in used - listed.get(name, set()):
            raise AssertionError(f"{name}: {word} {ADVICE}")
    stale = {name: known - found.get(name, set()) for name, known in listed.items()}
    assert not {name: words for name, words in stale.items() if words}, "are listed, but not used there"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("cute.arch.inline_ptx('')", "arch.inline_ptx"),
        ("cute.arch.load(place, Uint32)", "arch.load"),
        ("cute.arch.atomic_max(place, value)", "arch.atomic_max"),
        ("cute.arch.cp_async_bulk_commit_group()", "arch.cp_async_bulk_commit_group"),
        ("cute.copy(atom, a, b)", "copy"),
        ("partial(cute.autovec_copy, a)", "autovec_copy"),
        ("llvm.inline_asm(None, [], '', '')", "llvm.inline_asm"),
        ("nvvm.ldmatrix(a)", "nvvm.ldmatrix"),
        ("ptx = cute.arch", "arch"),
        ("getattr(cute, 'copy')", "cute"),
        ("cutlass.cute.arch.load(place, Uint32)", "cutlass.cute.arch.load"),
        ("cute.make_tensor(place, layout)", "make_tensor"),
        ("gX[0, None].store(rX.load())", ".store"),
        ("value = pair_at(word, Int64).load()", ".load"),
        ("gX.fill(0)", ".fill"),
        ("gX[rI[0], None].store(value)", ".store"),
        ("self.gX.store(value)", ".store"),
    ],
)
def test_a_word_would_be_seen(code: str, word: str) -> None:
    assert list(words(f"class C:\n    def f(self):\n        return (lambda: {code.split(' = ')[-1]})\n")) == [
        ("f", word)
    ]


def test_registers_and_methods_are_no_accesses() -> None:
    code = "rX.store(rY[None, 0].load())\nself.prefetch.load(ctx)\ncute.recast_tensor(rX, Uint32).load()\n"
    assert not list(words(code))


# ---- names of the DSL that have no prefix


IMPORTS = {
    "build.py": {"cutlass.base_dsl.compiler.DumpDir"},
    "device/atoms.py": {
        *(f"cutlass.cute.nvgpu.{name}" for name in ("CopyR2GOp", "CopyUniversalOp", "MemoryOrder", "MemoryScope")),
        *(f"cutlass.cute.nvgpu.cpasync.{name}" for name in ("CopyG2SOp", "LoadCacheMode")),
    },
    "device/sync.py": {"cutlass._mlir.dialects.nvvm"},
}
"""By file: what it imports of the DSL beside types of numbers."""


def imports(source: str) -> Iterator[str]:
    """What a file imports of the DSL, but for `cutlass`, `cutlass.cute as cute` and types of numbers."""
    for _, node in nodes(source):
        if isinstance(node, ast.Import):
            for one in node.names:
                plainly = (one.name, one.asname) in (("cutlass", None), ("cutlass.cute", "cute"))
                if one.name.split(".")[0] == "cutlass" and not plainly:
                    yield f"{one.name} as {one.asname}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for one in node.names:
                is_type = module == "cutlass" and one.name[:1].isupper() and one.asname is None
                if (module.split(".")[0] == "cutlass" or one.name in ("cute", "cutlass", "llvm")) and not is_type:
                    yield f"{module}.{one.name}" + (f" as {one.asname}" if one.asname else "")


def test_words_of_the_dsl_keep_their_prefix() -> None:
    found = {name: set(imports(source)) for name, source in files()}
    assert {name: imported for name, imported in found.items() if imported} == IMPORTS


@pytest.mark.parametrize(
    "line",
    [
        "from cutlass.cute.arch import inline_ptx",
        "from cutlass.cute.arch import load as read",
        "from cutlass._mlir.dialects import llvm",
        "from cutlass.cute import copy",
        "from cutlass import *",
        "from cutlass import cute as c",
        "import cutlass.cute.arch as arch",
        "import cutlass.cute as c",
        "from cute_ep.kernels.device.atoms import cute as c",
    ],
)
def test_an_import_would_be_seen(line: str) -> None:
    assert list(imports(f"def f():\n    {line}\n"))


# ---- what PTX outside of the mover does


REGISTERS = {"reg", "mov", "add", "mul", "max", "min", "setp", "selp"}
"""Instructions that touch registers only."""
BEYOND = {"device/slices.py draw": {"atom"}, "device/sync.py twin_all": {"barrier"}}
"""Others, by the file and function that `LISTED` gives a reason for."""


def instructions(source: str) -> Iterator[tuple[str, str]]:
    """(function, instruction) of PTX, without what follows an instruction's first dot; "?" for PTX that is no string
    of the function."""
    for function in functions(source):
        bound = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and dotted(node.func).endswith(".inline_ptx"):
                name = dotted(node.args[0]) if node.args else ""
                named = [one.value or node for one in bound if name and name in map(dotted, targets(one))]
                for ptx in named or node.args[:1] or [node]:
                    yield from ((function.name, one) for one in opcodes(ptx))


def targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def opcodes(ptx: ast.expr) -> Iterator[str]:
    """Of a string, or format string."""
    if isinstance(ptx, ast.Constant | ast.JoinedStr):
        parts = ptx.values if isinstance(ptx, ast.JoinedStr) else [ptx]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "?" for part in parts)
        for statement in text.split(";"):
            begin = re.match(r"[\s{}]*(?:@!?\w+\s+)?\.?([\w?]+)", statement)
            if begin is not None:
                yield begin[1]
    else:
        yield "?"


def test_ptx_outside_of_the_atoms_touches_registers() -> None:
    found: dict[str, set[str]] = {}
    for name, source in files():
        for function, instruction in instructions(source):
            found.setdefault(f"{name} {function}", set()).add(instruction)
    others = {name: used for name, used in found.items() if not name.startswith("device/atoms.py")}
    assert others.keys() <= LISTED.keys()
    assert {name: used - REGISTERS for name, used in others.items() if used - REGISTERS} == BEYOND


@pytest.mark.parametrize(
    ("ptx", "instruction"),
    [
        ("'ld.global.b32 {$w0}, [{$r0}];'", "ld"),
        ("'{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; @!p st.shared.b32 [{$r0}], 0; }'", "st"),
        ("'mov.b32 {$w0}, 0; atom.shared.add.u32 {$w0}, [{$r0}], 1;'", "atom"),
        ("'multimem.red.relaxed.sys.global.add.f32 [{$r0}], {$r1};'", "multimem"),
        ("'ldmatrix.sync.aligned.m8n8.x1.shared.b16 {$w0}, [{$r0}];'", "ldmatrix"),
        ("f'{operation}.global.b32 {{$w0}}, [{{$r0}}];'", "?"),
        ("f'{{ prefetch.global.L2 [{{$r{number}}}]; }}'", "prefetch"),
        ("PTX", "?"),
        ("ptx=PTX", "?"),
    ],
)
def test_an_instruction_would_be_seen(ptx: str, instruction: str) -> None:
    given = "cute.arch.inline_ptx(ptx)"
    bound = (
        f"ptx = {ptx}\n    {given}",
        f"ptx = 'mov.b32 {{$w0}}, 0;'\n    ptx += {ptx.removeprefix('ptx=')}\n    {given}",
    )
    for code in (f"cute.arch.inline_ptx({ptx})", *bound):
        found = {one for _, one in instructions(f"def f(operation, number):\n    {code}\n")}
        assert found - REGISTERS == {instruction}
