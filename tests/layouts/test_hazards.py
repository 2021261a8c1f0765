"""What CuTe does with requests it does not test, shown on the DSL itself in a child process, and our refusal.

When one of the first kind fails, the DSL has changed: drop the guard or adapt it.
"""

import signal
import subprocess
import sys

import pytest

from cute_ep.layouts.algebra.algebra import (
    Layout,
    LayoutError,
    blocked_product,
    complement,
    composition,
    logical_divide,
    logical_product,
)

L = Layout.parse

PREAMBLE = """
import cutlass.cute as cute
from cutlass._mlir import ir

def L(shape, stride=None):
    return cute.make_layout(shape) if stride is None else cute.make_layout(shape, stride=stride)

def run(make):
    with ir.Context(), ir.Location.unknown():
        with ir.InsertionPoint(ir.Module.create().body):
            return make()

"""


def raw(expression):
    """(exit status, printed text) of the DSL's own answer, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + expression], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip()


WRONG = [
    (
        "cute.composition(L((8, 8), (8, 1)), L(8, 6))",
        "(2,4):(48,1)",
        lambda: composition(L("(8,8):(8,1)"), L("8:6")),
        "at 2 is 33, not 1: the stride of 8:6 leaves 6, no divisor of the extent 8",
    ),
    (
        "cute.composition(L((4, 6, 8), (2, 3, 5)), L(6, 3))",
        "(2,3):(6,3)",
        lambda: composition(L("(4,6,8):(2,3,5)"), L("6:3")),
        "at 2 is 7, not 3",
    ),
    (
        "cute.composition(L((2, 2), (1, 10)), L((2, 2), (1, 1)))",
        "(2,2):(1,1)",
        lambda: composition(L("(2,2):(1,10)"), L("(2,2):(1,1)")),
        "carry into the next leaf",
    ),
    (
        "cute.composition(L((8, 12), (12, 1)), (2,))",
        "(2):(12)",
        lambda: composition(L("(8,12):(12,1)"), (2,)),
        "does not fit the modes",
    ),
    (
        "cute.complement(L((2, 3), (1, 1)), 24)",
        "(0,8):(2,3)",
        lambda: complement(L("(2,3):(1,1)"), 24),
        "leaf 3:1 starts inside",
    ),
    (
        "cute.complement(L((3, 2), (2, 3)), 24)",
        "(2,0,4):(1,6,6)",
        lambda: complement(L("(3,2):(2,3)"), 24),
        "leaf 2:3 starts inside",
    ),
    (
        "cute.logical_divide(L((6, 4), (4, 1)), L(4))",
        "(4,(2,4)):(4,(16,1))",
        lambda: logical_divide(L("(6,4):(4,1)"), 4),
        "the stride of 6:4 leaves 4, no divisor of the extent 6",
    ),
    (
        "cute.logical_divide(L(((8, 3), 2), ((1, 10), 30)), (L(3), None))",
        "((3,(3,3)),2):((1,(3,10)),30)",
        lambda: logical_divide(L("((8,3),2):((1,10),30)"), (3, None)),
        "refused by CuTe",
    ),
    (
        "cute.logical_divide(L(72), L((4, 6), (1, 6)))",
        "((4,6),2):((1,6),36)",
        lambda: logical_divide(L("72:1"), L("(4,6):(1,6)")),
        "no layout beside it has offset 4 below 72",
    ),
    (
        "cute.complement(L((2, 2), (1, 3)), 6)",
        "1:0",
        lambda: complement(L("(2,2):(1,3)"), 6),
        "no layout beside it has offset 2 below 6",
    ),
    (
        "cute.logical_divide(L(12), L((2, 2), (1, 3)))",
        "((2,2),2):((1,3),6)",
        lambda: logical_divide(L("12:1"), L("(2,2):(1,3)"), partial=True),
        "no layout beside it has offset 2 below 12",
    ),
]


@pytest.fixture(scope="module")
def cute_answers():
    """What the DSL prints for every expression above, from one child process."""
    status, printed = raw("\n".join(f"print(run(lambda: str({case[0]})))" for case in WRONG))
    assert status == 0
    return dict(zip([case[0] for case in WRONG], printed.splitlines(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "answer", "ours", "reason"), WRONG, ids=[case[0] for case in WRONG])
def test_cute_answers_wrongly_without_an_error(cute_answers, expression, answer, ours, reason):
    assert cute_answers[expression] == answer


@pytest.mark.parametrize(("expression", "answer", "ours", "reason"), WRONG, ids=[case[0] for case in WRONG])
def test_we_refuse_what_cute_answers_wrongly(expression, answer, ours, reason):
    with pytest.raises(LayoutError, match=reason):
        ours()


CRASHES = [
    (
        "run(lambda: cute.composition(cute.complement(L((2, 3), (1, 1)), 24), L(4)))",
        signal.SIGFPE,
        lambda: composition(complement(L("(2,3):(1,1)"), 24), 4),
    ),
    (
        "run(lambda: cute.logical_product(L((2, 3), (1, 1)), L(4)))",
        signal.SIGFPE,
        lambda: logical_product(L("(2,3):(1,1)"), 4),
    ),
    (
        "run(lambda: cute.blocked_product(L((2, 3), (1, 1)), L((2, 2))))",
        signal.SIGFPE,
        lambda: blocked_product(L("(2,3):(1,1)"), Layout((2, 2))),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "death", "ours"), CRASHES, ids=[case[0] for case in CRASHES])
def test_cute_kills_the_process(expression, death, ours):
    assert raw(expression)[0] == -death


@pytest.mark.parametrize(("expression", "death", "ours"), CRASHES, ids=[case[0] for case in CRASHES])
def test_we_refuse_what_kills_the_process(expression, death, ours):
    with pytest.raises(LayoutError):
        ours()


@pytest.mark.slow
def test_a_cute_layout_that_outlives_its_context_kills_the_process():
    """Why nothing but Python ints leaves `eager`; ours are plain values, usable forever."""
    assert raw("kept = run(lambda: L((4, 8)))\nrun(lambda: str(cute.coalesce(kept)))")[0] == -signal.SIGSEGV
