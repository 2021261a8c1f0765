"""Addresses are computed in `kernels/device/memory.py` and by regions (`layouts/maps/record.py`): what other files of
kernels compute with one is listed here.

An address is what its declaration says: an `Address` of an argument record, or an `Int64` parameter, field or result
whose name is not in NUMBERS; a pointer of the DSL; an offset in an arena or in shared memory. A local name is one where
the function binds it to one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from cute_ep.layouts.maps import arguments, local_arguments, mail_arguments

from .sources import files, functions, nodes

MEMORY = "device/memory.py"
NUMBERS = {
    *("consumed", "due", "epoch", "received", "seen", "sent"),  # rounds
    *("index", "num_bytes", "pitch", "source_turn", "stride0", "step", "to_turn", "turn"),  # distances
    *("time_ns", "timeout_ns"),
}
"""Parameters and fields of 64 bits that are no addresses."""
NUMBER_CALLS = {"_poll", "_row", "_scale_word_offset", "load_flag", "now_ns", "rounds"}
"""Functions whose results of 64 bits are no addresses."""
POINTERS = {"element", "get_dyn_smem", "make_ptr", "of_twin", "pointer", "recast_ptr", "toint"}
"""Calls that give pointers, or addresses and offsets in shared memory."""
REGIONS = {"address", "along", "at", "beside"}
"""Methods of `Region`."""
SAME = {"Int64", "align_up", "from_lane", "max", "min", "opaque", "select_"}
"""Calls whose result is an address where one of the arguments is one."""
OFFSETS = {"aside", "begin", "iterator", "nbytes", "offset", "place"}
"""Attributes that are pointers, or offsets in an arena or in shared memory."""
LISTED = {
    "combine/ring.py put": "halves of an address: a header travels as words of 32 bits",
    "device/atoms.py bulk": "a pointer to a byte of shared memory",
    "device/block.py shared_array": "a pointer to a region of shared memory",
    "device/block.py shared_share": "a pointer to a byte of shared memory",
    "device/twins.py of_twin": "a region of shared memory, of which each twin has one",
    "dispatch/scale_tiles.py _message_of": "an offset, which is kept in vectors",
    "mail/put_mail.py _copy": "whether addresses are multiples of a vector",
}
"""File and function -> what is computed, beside MEMORY."""


def annotation(node: ast.expr | None) -> str:
    return ast.unparse(node) if node is not None else ""


def holds_address(kind: str) -> bool:
    """Whether an annotation is that of an address; a number of any width is `Int32 | Int64 | int`."""
    return kind in ("Address", "Int64", "Int64 | Int32", "Int64 | None")


def declared() -> tuple[dict[str, dict[str, str]], dict[str, set[str]]]:
    """Of records, and classes of kernels: annotations of their fields, by name; of functions: those of results, which
    are several where functions have the same name."""
    fields: dict[str, dict[str, str]] = {}
    for module in (arguments, local_arguments, mail_arguments):
        for name, record in vars(module).items():
            if isinstance(record, type) and issubclass(record, tuple):
                kinds = record.__annotations__.items()
                fields[name] = {field: getattr(kind, "__forward_arg__", str(kind)) for field, kind in kinds}
    results: dict[str, set[str]] = {}
    for _, source in files():
        for _, node in nodes(source):
            if isinstance(node, ast.FunctionDef):
                results.setdefault(node.name, set()).add(annotation(node.returns))
            if isinstance(node, ast.ClassDef):
                own = fields.setdefault(node.name, {})
                for base in node.bases:
                    own.update(fields.get(ast.unparse(base), {}))
                for one in node.body:
                    if isinstance(one, ast.AnnAssign):
                        own[ast.unparse(one.target)] = annotation(one.annotation)
                    elif isinstance(one, ast.FunctionDef) and any(
                        getattr(mark, "id", "") == "property" for mark in one.decorator_list
                    ):
                        own[one.name] = annotation(one.returns)
    return fields, {name: kinds for name, kinds in results.items() if name not in NUMBER_CALLS}


FIELDS, RESULTS = declared()
ALWAYS = {
    name
    for name in {name for kinds in FIELDS.values() for name in kinds} - NUMBERS
    if all(holds_address(kinds[name]) for kinds in FIELDS.values() if name in kinds)
}
"""Fields that are addresses in all records and classes that have them."""


class Names:
    """What the names of a function are: `kinds` of its parameters, `addresses`, and `tables` of these."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.kinds: dict[str, str] = {}
        self.addresses: set[str] = set()
        self.tables = {"sHome", "sHomes", "sPeers"}
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                self.kinds[node.arg] = annotation(node.annotation)
                if holds_address(self.kinds[node.arg]) and node.arg not in NUMBERS:
                    self.addresses.add(node.arg)
        known = -1
        while known != len(self.addresses) + len(self.tables):
            known = len(self.addresses) + len(self.tables)
            for node in ast.walk(function):
                self._bind_all(node)

    def _bind_all(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
            for one in node.iter.elts:
                self._bind(node.target, one)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            for place, one in enumerate(target.elts):
                if isinstance(value, ast.Tuple):
                    self._bind(one, value.elts[place])
                elif isinstance(value, ast.GeneratorExp):
                    self._bind(one, value.elt)
                elif isinstance(one, ast.Name) and one.id not in NUMBERS and self._result(value, place):
                    self.addresses.add(one.id)
        elif isinstance(target, ast.Name):
            if self.is_address(value):
                self.addresses.add(target.id)
            if self._is_table(value):
                self.tables.add(target.id)

    def _result(self, value: ast.expr, place: int) -> bool:
        """Whether a call gives a tuple that has an address in a place."""
        tuples = [kind for kind in RESULTS.get(called(value), ()) if kind.startswith("tuple[")]
        parts = [kind.removeprefix("tuple[").removesuffix("]").split(", ") for kind in tuples]
        return any(place < len(one) and holds_address(one[place]) for one in parts)

    def _is_table(self, node: ast.expr) -> bool:
        """Whether an array of 64-bit words: of the peers' arenas, of mails."""
        if called(node) not in ("array", "shared_array") or not isinstance(node, ast.Call):
            return False
        of_rounds = getattr(node.args[0], "attr", "") in NUMBERS
        return not of_rounds and any(getattr(one, "id", "") == "Int64" for one in node.args)

    def kind(self, node: ast.expr) -> str:
        """The annotation of a parameter, or of a field of one; "" where it has none. A constant is a number."""
        if isinstance(node, ast.Name):
            return "int" if node.id.isupper() else self.kinds.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return FIELDS.get(self.kind(node.value), {}).get(node.attr, "")
        return ""

    def is_address(self, node: ast.expr) -> bool:
        """Whether an expression is an address."""
        if isinstance(node, ast.Name):
            return node.id in self.addresses
        if isinstance(node, ast.Attribute):
            kind = self.kind(node)
            if node.attr in OFFSETS and kind in ("", "Int32", "Int64"):
                return True
            known = kind or "Address" * (node.attr in ALWAYS and not self.kind(node.value))
            return holds_address(known) and node.attr not in NUMBERS
        if isinstance(node, ast.Subscript):
            name = getattr(node.value, "attr", getattr(node.value, "id", ""))
            return name in self.tables or self._is_table(node.value)
        if isinstance(node, ast.Call):
            name = called(node)
            if name in SAME:
                return any(self.is_address(one) for one in node.args)
            return name in POINTERS | REGIONS or any(map(holds_address, RESULTS.get(name, ())))
        if isinstance(node, ast.NamedExpr):
            return self.is_address(node.value)
        if isinstance(node, ast.IfExp):
            return self.is_address(node.body) or self.is_address(node.orelse)
        if isinstance(node, ast.BinOp):
            return self.is_address(node.left) or self.is_address(node.right)
        return False


def called(node: ast.expr) -> str:
    """Name of the function, or method, that a call calls."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", ""))
    return ""


ADVICE = """is computed with an address. Take it from a region (at, along, beside), row_address or part_at; or give
LISTED the reason. A number of 64 bits belongs into NUMBERS."""


def arithmetic(source: str) -> Iterator[tuple[str, str]]:
    """(function, expression) of what is computed with addresses."""
    for function in functions(source):
        names = Names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and names.is_address(node):
                yield function.name, ast.unparse(node)
            if isinstance(node, ast.AugAssign) and (names.is_address(node.target) or names.is_address(node.value)):
                yield function.name, ast.unparse(node)


def test_what_is_computed_with_addresses_is_listed() -> None:
    found = {
        f"{name} {function}": expression
        for name, source in files()
        if name != MEMORY
        for function, expression in arithmetic(source)
    }
    for function, expression in found.items():
        assert function in LISTED, f"{function}: {expression} {ADVICE}"
    assert not LISTED.keys() - found.keys(), "functions that compute nothing with addresses, or no longer exist"


@pytest.mark.parametrize(
    "expression",
    [
        "ctx.base + 4",
        "ctx.base - 4",
        "4 * ctx.base",
        "args.x + n",
        "n + ctx.sPeers[peer]",
        "sPeers[0] + n",
        "array(args.mails, Int64, n)[0] + n",
        "region.at(1) + n",
        "region.offset - n",
        "sCounts.iterator + n",
        "opaque(ctx.base) + n",
        "row_address(data, 1, 16) + n",
        "ctx.state_word(word) + 8",
        "header.target & 15",
        "(ctx.base if n else 0) + n",
    ],
)
def test_an_expression_would_be_seen(expression: str) -> None:
    found = list(arithmetic(f"def f():\n    return {expression}\n"))
    assert found
    assert {name for name, _ in found} == {"f"}


@pytest.mark.parametrize(
    "body",
    [
        "home = ctx.base; home += 4",
        "home = other = ctx.base; n = other + 4",
        "offset = n; offset += ctx.base",
        "home = ctx.base; next = home; n = next + 4",
        "next = home; n = next - 4; home = ctx.base",
        "n, home = 4, ctx.base; n = home + n",
        "source, left = self._source(args); n = source + left",
        "sMails = array(args.mails, Int64, 4); n = sMails[0] + 4",
        "n = [at + 4 for at in (ctx.base, other)]",
        "n = (home := ctx.base) + 4",
    ],
)
def test_a_local_would_be_seen(body: str) -> None:
    assert list(arithmetic(f"def f():\n    {body}\n"))


@pytest.mark.parametrize("parameter", ["home: Int64", "a, *, home: Int64 | Int32", "home: Int64 | None"])
def test_a_parameter_would_be_seen(parameter: str) -> None:
    assert list(arithmetic(f"def f({parameter}):\n    return home + 4\n"))


def test_a_field_is_what_its_record_says() -> None:
    """`rows` of one record is an address, of another a number."""
    assert list(arithmetic("def f(args: SumArgs):\n    return args.rows + 4\n"))
    assert list(arithmetic("def f(ctx: CombineContext):\n    return ctx.rows.data + 4\n"))
    assert not list(arithmetic("def f(args: RowsArgs):\n    return args.rows + 4\n"))


@pytest.mark.parametrize("expression", ["ctx.epoch - 1", "args.pitch * 2", "place.rounds(word) & 1", "n + 4"])
def test_a_number_is_no_address(expression: str) -> None:
    assert not list(arithmetic(f"def f(n: Int32 | Int64 | int):\n    return {expression}\n"))
