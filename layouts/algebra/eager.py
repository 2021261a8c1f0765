"""Runs CuTe's own layout functions on plain Python layouts, outside any kernel and without a GPU.

The DSL builds its layouts as MLIR values in a module, inside a context, and a value that outlives them kills the
process. This file is the only one that makes them: it lowers `(shape, stride)` tuples, runs one operation, and raises
the answer back to tuples of Python ints before the module goes. Making a context takes about twenty times as long as
an operation, so each thread keeps one.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, requires
from typing import SupportsInt, TypeAlias

from cute_ep.layouts.algebra.layout import IntTuple, Layout

DSL_PACKAGE = "nvidia-cutlass-dsl"
_OPEN = threading.local()
Operand: TypeAlias = "int | Layout | tuple[Operand, ...] | None"


def dsl_install() -> str:
    """The command that installs the DSL, in the version that this package's metadata asks for; in any version where
    the package has no metadata, since it runs from a folder."""
    try:
        needed = requires("cute-ep") or []
    except PackageNotFoundError:
        needed = []
    found = (one.partition(";")[0].strip() for one in needed if one.startswith(DSL_PACKAGE))
    return f"pip install {next(found, DSL_PACKAGE)}"


@lru_cache(maxsize=8192)
def evaluate(operation: str, *operands: Operand, **options: IntTuple) -> tuple[int | tuple, int | tuple]:
    """Runs `cutlass.cute.<operation>(*operands, **options)` and returns `(shape, stride)` of its result.

    Operands are ints, `None`, layouts, and tuples of these; options are ints or tuples of ints. Answers are cached.

    Raises ImportError when the DSL is not installed; what the DSL itself raises passes through. This function
    checks nothing: the guards are in `algebra`.
    """
    try:
        import cutlass.cute as cute
        from cutlass._mlir import ir
    except ImportError as missing:
        raise ImportError(f"the layout algebra needs the CuTe DSL: {dsl_install()}") from missing

    def lower(operand: Operand) -> object:
        if isinstance(operand, tuple):
            return tuple(lower(item) for item in operand)
        if isinstance(operand, Layout):
            return cute.make_layout(operand.shape, stride=operand.stride)
        return operand

    if not hasattr(_OPEN, "context"):
        _OPEN.context = ir.Context()
    with _OPEN.context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            result = getattr(cute, operation)(*(lower(operand) for operand in operands), **options)
            return _python_ints(result.shape), _python_ints(result.stride)


def _python_ints(value: SupportsInt | tuple) -> int | tuple:
    if isinstance(value, tuple):
        return tuple(_python_ints(item) for item in value)
    return int(value)
