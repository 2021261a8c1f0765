"""Signatures that adapters rely on, read from releases of the libraries that they adapt.

    pip download --no-deps --only-binary=:all: -d DIR vllm==0.33.0
    python -m tests.integrations.upstream vllm DIR/vllm-0.33.0-*.whl
    python -m tests.integrations.upstream vllm CHECKOUT 0.33.0        # a folder that holds the package, and its version

writes `upstream/vllm.json` beside this file: the version, and of each name in `WANTED` a stub, as lines of Python.
Nothing is imported from the release. Run it on a newer release, and the diff of the JSON is what changed; a name that
is gone is an error, and so is a module. A stub has

- of a class its bases, its decorators, its fields and members, and the signatures of `__init__` and public methods;
- of a function its signature;
- of anything else its value.

Defaults that are no constants are `...`. `installed` makes modules of the stubs, so tests of an adapter run where its
library is not installed: abstract methods are abstract, and calls check their arguments and raise NotImplementedError.
`differences` compares an adapter's methods with those that they override.
"""

from __future__ import annotations

import abc
import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
import types
import typing
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tests.integrations.wanted import WANTED

FOLDER = Path(__file__).with_suffix("")

"""Of each framework the names by module. `Class.name` takes only such methods and fields of a class, also private
ones, and attributes that its methods set."""

KEPT = ("dataclass", "dataclasses.dataclass", "abstractmethod", "property", "staticmethod", "classmethod")
"""Decorators that stubs have; others change no signature."""

Text = Callable[[str], "str | None"]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


# ---- from a release to stubs


def read(framework: str, source: Path, version: str | None = None) -> dict[str, typing.Any]:
    """What the JSON file of a framework says: `release`, `version` and `modules`.

    Args:
        source: a wheel, or a folder that holds the package.
        version: of a folder; a wheel's name has it.

    Raises:
        LookupError: the release lacks wanted names, all of which the message has.
    """
    files: Text
    if source.is_dir():
        files = lambda name: path.read_text() if (path := source / name).is_file() else None  # noqa: E731
    else:
        version = source.name.split("-")[1]
        wheel = zipfile.ZipFile(source)
        names = set(wheel.namelist())
        files = lambda name: wheel.read(name).decode() if name in names else None  # noqa: E731
    if version is None:
        raise LookupError(f"{source}: a folder needs a version")
    modules: dict[str, dict[str, list[str]]] = {}
    missing: list[str] = []
    for module, wanted in WANTED[framework].items():
        file = module.replace(".", "/")
        text = files(f"{file}.py")
        text = files(f"{file}/__init__.py") if text is None else text
        found = {} if text is None else dict(_definitions(ast.parse(text).body))
        modules[module] = {}
        for name, members in _by_class(wanted).items():
            if name not in found:
                missing.append(f"{module}.{name}")
                continue
            stub = _stub(found[name], members, lambda gone, own=f"{module}.{name}": missing.append(f"{own}.{gone}"))  # type: ignore[misc]
            modules[module][name] = _lines(stub)
    if missing:
        raise LookupError(f"{source.name} has no {', '.join(missing)}")
    return {"release": source.name, "version": version, "modules": modules}


def _lines(stub: ast.stmt) -> list[str]:
    """A stub's text, a line for each field and each signature."""
    text = ast.unparse(ast.fix_missing_locations(stub))
    return [line for line in re.sub(r":\n +\.\.\.$", ": ...", text, flags=re.MULTILINE).splitlines() if line]


def _by_class(wanted: Iterable[str]) -> dict[str, list[str]]:
    """Names, with the members that are wanted of them; none: all."""
    found: dict[str, list[str]] = {}
    for name in wanted:
        owner, _, member = name.partition(".")
        found.setdefault(owner, []).extend([member] if member else [])
    return found


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    """(name, definition) of a module's or a class's statements, also under `if` and `try`; of a name with several the
    last."""
    for one in body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {ast.unparse(decorator).rpartition(".")[2] for decorator in one.decorator_list}
            if not names & {"setter", "deleter", "overload"}:
                yield one.name, one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            yield from ((target.id, one) for target in targets if isinstance(target, ast.Name))
        elif isinstance(one, ast.If | ast.Try):
            handlers = [part for handler in getattr(one, "handlers", []) for part in handler.body]
            yield from _definitions([*one.body, *handlers, *one.orelse])


def _stub(found: Definition, members: list[str], gone: Callable[[str], None]) -> ast.stmt:
    """The definition without what it computes; of a class, the members, or if there are none what is public."""
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return _signature(found)
    if not isinstance(found, ast.ClassDef):
        return found
    own = dict(_definitions(found.body))
    for name in members:
        if name not in own and not _sets(found, name):
            gone(name)
    decorators = [one for one in found.decorator_list if _kept(one)]
    parameters = ast.AnnAssign if decorators else ()  # private fields of a dataclass are those of its constructor
    public = [name for name, one in own.items() if not name.startswith("_") or isinstance(one, parameters)]
    chosen = [*(name for name in own if name in members), *(name for name in members if name not in own)]
    chosen = chosen or [*(["__init__"] if "__init__" in own else []), *public]
    body: list[ast.stmt] = []
    for name in chosen:
        one = own.get(name)
        if one is None:
            body.append(ast.parse(f"{name}: object").body[0])
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            body.append(_signature(one))
        elif isinstance(one, ast.AnnAssign):
            body.append(ast.AnnAssign(one.target, one.annotation, _constant(one.value), one.simple))
        elif isinstance(one, ast.Assign):
            body.append(ast.Assign(one.targets, _constant(one.value), lineno=1))
    return ast.ClassDef(found.name, found.bases, [], body or [ast.Pass()], decorators)


def _sets(found: ast.ClassDef, name: str) -> bool:
    """Whether a method stores to `self.name`."""
    return any(
        isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one) == f"self.{name}"
        for one in ast.walk(found)
    )


def _kept(decorator: ast.expr) -> bool:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) in KEPT


def _constant(value: ast.expr | None) -> typing.Any:
    """The value if a stub can have it, otherwise an ellipsis; None stays None."""
    try:
        _ = value is None or ast.literal_eval(value)
    except ValueError:
        return ast.Constant(...)
    return value


def _signature(found: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    found.body = [ast.Expr(ast.Constant(...))]
    found.decorator_list = [one for one in found.decorator_list if _kept(one)]
    found.args.defaults = [_constant(one) for one in found.args.defaults]
    found.args.kw_defaults = [_constant(one) for one in found.args.kw_defaults]
    return found


# ---- from stubs to modules


def load(framework: str) -> dict[str, typing.Any]:
    """The framework's JSON file."""
    return json.loads((FOLDER / f"{framework}.json").read_text())


def build(known: Mapping[str, typing.Any]) -> dict[str, types.ModuleType]:
    """Modules of stubs by name, with the packages that they are in; the outermost has `__version__`. Bases that have no
    stub are left out, and a value that is made of what has none is None."""
    made: dict[str, types.ModuleType] = {}
    for module in known["modules"]:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = types.ModuleType(name)
                made[name].__path__ = []  # type: ignore[attr-defined]
                if end > 1:
                    setattr(made[name.rpartition(".")[0]], parts[end - 1], made[name])
        made[parts[0]].__version__ = known["version"]  # type: ignore[attr-defined]
    shared: dict[str, typing.Any] = {**vars(typing), "abc": abc, "enum": enum, "torch": torch}
    shared |= {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod, "Callable": Callable}
    shared |= {"dataclasses": dataclasses, "dataclass": dataclasses.dataclass}
    shared |= {name: getattr(enum, name) for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "auto")}
    for module, stubs in known["modules"].items():
        for name, lines in stubs.items():
            shared[name] = _made("\n".join(lines), name, module, shared)
            setattr(made[module], name, shared[name])
    return made


def _made(text: str, name: str, module: str, shared: Mapping[str, typing.Any]) -> typing.Any:
    """What a stub defines, given those before it."""
    (one,) = ast.parse(text).body
    if isinstance(one, ast.Assign | ast.AnnAssign):
        with suppress(NameError):
            return eval(ast.unparse(one.value), dict(shared)) if one.value is not None else None
        return None
    for inner in ast.walk(one):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.body = ast.parse("pass" if inner.name == "__init__" else "raise NotImplementedError").body
    if isinstance(one, ast.ClassDef):
        bases = [ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in one.bases]
        one.bases = [ast.Name(base) for base in bases if base in shared]
    space = dict(shared) | {"__name__": __name__}  # where dataclasses look for annotations
    exec("from __future__ import annotations\n" + ast.unparse(one), space)
    space[name].__module__ = module
    return space[name]


@contextmanager
def installed(framework: str, *adapters: str) -> Iterator[dict[str, types.ModuleType]]:
    """Inside, imports find the framework's stubs, which this yields by module, and import these adapters anew."""

    def loaded() -> dict[str, types.ModuleType]:
        ours = framework, *adapters
        return {name: one for name, one in sys.modules.items() if any(f"{name}.".startswith(f"{own}.") for own in ours)}

    before, made = loaded(), build(load(framework))
    for name in before:
        del sys.modules[name]
    sys.modules.update(made)
    try:
        yield made
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def differences(adapter: type, base: type) -> list[str]:
    """What callers of `base` would stumble over in a subclass: methods that `adapter` overrides without taking the same
    parameters, by position and by name. More parameters, and those that have a default in `base`, need defaults."""
    found = []
    for name, theirs in inspect.getmembers(base, inspect.isfunction):
        ours = inspect.getattr_static(adapter, name)
        if ours is inspect.getattr_static(base, name) or name == "__init__":
            continue
        want, have = (list(inspect.signature(one).parameters.values()) for one in (theirs, ours))
        same = [(one.name, one.kind) for one in have[: len(want)]] == [(one.name, one.kind) for one in want]
        optional = [one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in have]
        needed = [one.default is one.empty for one in want] + [False] * (len(have) - len(want))
        if not same or any(not (one or other) for one, other in zip(optional, needed, strict=True)):
            found.append(f"{name}{inspect.signature(ours)}: must take {inspect.signature(theirs)}")
    return found


def main(framework: str, source: str, version: str | None = None) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(read(framework, Path(source), version), indent=1)
    (FOLDER / f"{framework}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
