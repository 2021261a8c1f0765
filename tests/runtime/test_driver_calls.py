"""`driver_calls` in the release of cuda-python that is found here; `python -m tests.bindings` runs this in others.

What it uses of cuda-python is read from its source, so nothing is forgotten. No test needs a driver.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda.bindings
import pytest

from cute_ep.api.errors import EPError
from cute_ep.runtime import driver_calls

from .stub_driver import CASES, COMPILER, NAME, build

ROOT = Path(__file__).parents[2]
TREE = ast.parse(Path(driver_calls.__file__).read_text())
DRIVER = driver_calls.driver
OTHERS = {"ctypes", "self", "status", "name"}
"""What else has attributes in that file: `status` is a CUresult, `name` a str."""


# ---- what the file uses


def chains(tree: ast.AST) -> Iterator[tuple[ast.expr, tuple[str, ...]]]:
    """(innermost expression, names of attributes of it, of those, ...), longest ones only."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names, root = [], node
            while isinstance(root, ast.Attribute):
                names.append(root.attr)
                root = root.value
            yield root, tuple(reversed(names))


def driver_name(node: ast.AST | None) -> str | None:
    """ "X" of `driver.X`."""
    of_driver = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "driver"
    return node.attr if of_driver else None


def variables(function: ast.AST) -> dict[str, str]:
    """Variables of a function that hold a structure: made in it, or said to be one."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and driver_name(node.value.func):
            found |= {to.id: driver_name(node.value.func) for to in node.targets if isinstance(to, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = driver_name(node.annotation)
        elif isinstance(node, ast.arg):
            found[node.arg] = driver_name(node.annotation)
    return {name: kind for name, kind in found.items() if kind and kind.startswith("CU")}


NAMES = {names[:2] for root, names in chains(TREE) if isinstance(root, ast.Name) and root.id == "driver"}
"""(name,) or (class, member) of `driver`."""
FIELDS: set[tuple[str, str]] = set()
"""(structure, "field.of.it")."""
UNKNOWN: set[str] = set()
"""Attributes of something that is none of these."""
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]
for function in FUNCTIONS:
    held = variables(function)
    for root, names in chains(function):
        owner = root.id if isinstance(root, ast.Name) else ast.unparse(root)
        if owner in held:
            FIELDS.add((held[owner], ".".join(names)))
        elif owner not in (*OTHERS, "driver"):
            UNKNOWN.add(f"{owner}.{'.'.join(names)}")
STRUCTURES = sorted({structure for structure, _ in FIELDS})


def test_the_source_is_understood() -> None:
    """All attributes are of cuda-python's module, of its structures, or of OTHERS."""
    assert not UNKNOWN
    memory = {"CUipcMemHandle", "CUmemAccessDesc", "CUmemAllocationProp", "CUmemFabricHandle"}
    assert memory | {"CUlaunchAttribute", "CUlaunchConfig"} == set(STRUCTURES)
    assert len(NAMES) > 30 and ("cuLaunchKernelEx",) in NAMES and ("CUresult", "CUDA_SUCCESS") in NAMES


# ---- what cuda-python has


def test_the_release_is_the_one_that_was_asked_for(pytestconfig: pytest.Config) -> None:
    """The first on the path, also where the environment has another one."""
    wanted = pytestconfig.getoption("--cuda-bindings")
    assert (
        cuda.bindings.__version__
        == importlib.metadata.version("cuda-bindings")
        == (wanted or cuda.bindings.__version__)
    )
    assert Path(DRIVER.__file__).parent == Path(cuda.bindings.__file__).parent


@pytest.mark.parametrize("names", sorted(NAMES), ids=".".join)
def test_every_function_enum_and_constant_is_there(names: tuple[str, ...]) -> None:
    found: Any = DRIVER
    for name in names:
        found = getattr(found, name)
    if names[0].startswith("cu"):
        assert callable(found)
    elif names[0].startswith("CU_") or len(names) > 1:
        assert isinstance(found, int) and (len(names) == 1 or found.name == names[1])
    else:
        assert isinstance(found, type)


DESCRIPTOR = DRIVER.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = DRIVER.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
PLACES = DRIVER.CUmemLocationType
PINNED, OTHER = (DRIVER.CUmemAllocationType(number) for number in (1, 0))
SERIALIZATION = DRIVER.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
VALUES = {
    ("CUlaunchConfig", "gridDimX"): (2**31 - 1, 1),
    ("CUlaunchConfig", "gridDimY"): (65535, 2),
    ("CUlaunchConfig", "gridDimZ"): (65535, 3),
    ("CUlaunchConfig", "blockDimX"): (1024, 4),
    ("CUlaunchConfig", "blockDimY"): (1024, 5),
    ("CUlaunchConfig", "blockDimZ"): (64, 6),
    ("CUlaunchConfig", "sharedMemBytes"): (0, 227 << 10),
    ("CUlaunchConfig", "hStream"): (0, 2**47 - 1),
    ("CUlaunchConfig", "numAttrs"): (1, 0),
    ("CUlaunchAttribute", "id"): (DRIVER.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_IGNORE, SERIALIZATION),
    ("CUlaunchAttribute", "value.programmaticStreamSerializationAllowed"): (0, 1),
    ("CUmemAllocationProp", "type"): (OTHER, PINNED),
    ("CUmemAllocationProp", "requestedHandleTypes"): (FABRIC, DESCRIPTOR),
    ("CUmemAllocationProp", "location.type"): (
        PLACES.CU_MEM_LOCATION_TYPE_HOST_NUMA,
        PLACES.CU_MEM_LOCATION_TYPE_DEVICE,
    ),
    ("CUmemAllocationProp", "location.id"): (2**31 - 1, 3),
    ("CUmemAccessDesc", "location.type"): (
        PLACES.CU_MEM_LOCATION_TYPE_HOST_NUMA,
        PLACES.CU_MEM_LOCATION_TYPE_DEVICE,
    ),
    ("CUmemAccessDesc", "location.id"): (2**31 - 1, 3),
    ("CUmemAccessDesc", "flags"): (
        DRIVER.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
        DRIVER.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    ),
}
"""By structure and field, numbers to set."""
CLUSTER = {("CUlaunchAttribute", f"value.clusterDim.{axis}") for axis in "xyz"}
HANDLES = {("CUipcMemHandle", "getPtr"), ("CUmemFabricHandle", "getPtr")}
BY_HAND = {("CUlaunchConfig", "attrs"), *HANDLES, *CLUSTER}
"""Fields of which a test tells more."""


def owner_of(structure: Any, field: str) -> tuple[Any, str]:
    """("a.b.c" of a structure) its a.b, "c"."""
    *path, name = field.split(".")
    for step in path:
        structure = getattr(structure, step)
    return structure, name


def test_every_field_has_values_here() -> None:
    assert VALUES.keys() | BY_HAND == FIELDS


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_field_has_the_value_that_was_set(structure: str) -> None:
    """Also once all others were set."""
    made = getattr(DRIVER, structure)()
    fields = {field: values for (owner, field), values in VALUES.items() if owner == structure}
    for turn in range(2):
        for field, values in fields.items():
            owner, name = owner_of(made, field)
            setattr(owner, name, values[turn])
        assert {field: int(getattr(*owner_of(made, field))) for field in fields} == {
            field: int(values[turn]) for field, values in fields.items()
        }


def test_a_launch_has_the_attributes_that_it_was_given() -> None:
    """Copies of them: this one changes after it was given. (Setting none again is a double free in 12.9.0.)"""
    one, config = DRIVER.CUlaunchAttribute(), DRIVER.CUlaunchConfig()
    one.id, one.value.programmaticStreamSerializationAllowed = SERIALIZATION, 1
    config.attrs = [one]
    one.value.programmaticStreamSerializationAllowed = 0
    del one
    (kept,) = config.attrs
    assert (int(kept.id), kept.value.programmaticStreamSerializationAllowed) == (int(SERIALIZATION), 1)


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_launch_has_the_attributes_of_its_cluster(cluster: int) -> None:
    """The last one is left out of launches that do not start early."""
    config = driver_calls.launch_config(48, cluster)
    *first, early = config.attrs
    assert (config.blockDimY, config.sharedMemBytes, int(early.id)) == (1, 48, int(SERIALIZATION))
    dimensions = [one.value.clusterDim for one in first]
    assert [(one.x, one.y, one.z) for one in dimensions] == [(cluster, 1, 1)] * (cluster > 1)


def test_a_handle_of_another_process_goes_there_and_back() -> None:
    content = bytes((5 + 11 * i) % 256 for i in range(driver_calls.HANDLE_BYTES))
    handle = driver_calls.handle_of(content)
    assert isinstance(handle, DRIVER.CUipcMemHandle) and len(content) == 64
    assert driver_calls.handle_bytes(handle) == content
    assert driver_calls.handle_bytes(DRIVER.CUipcMemHandle()) == bytes(64)


def test_a_result_is_unwrapped_or_an_error_with_the_name_of_its_status() -> None:
    success, failure = DRIVER.CUresult.CUDA_SUCCESS, DRIVER.CUresult.CUDA_ERROR_LAUNCH_FAILED
    assert driver_calls.check((success,)) is None and driver_calls.check((success, 5)) == 5
    with pytest.raises(EPError, match=r"^CUDA driver: CUDA_ERROR_LAUNCH_FAILED$"):
        driver_calls.check((failure, None))


# ---- what a driver is told


def test_without_a_driver_calls_raise_a_runtime_error() -> None:
    """Of which the releases have different kinds."""
    try:
        ctypes.CDLL(NAME)
    except OSError:
        with pytest.raises(RuntimeError):
            driver_calls.current_context()
    else:
        pytest.skip("there is a driver")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What a driver in C that notes its calls was told, by case, and what the calls returned."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    command = [sys.executable, "-m", "tests.runtime.stub_driver", str(folder)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("name", CASES)
def test_calls_reach_a_driver_with_their_arguments(told: dict[str, list], name: str) -> None:
    assert told[name] == [CASES[name].result, list(CASES[name].notes)]


def test_every_call_has_a_case() -> None:
    public = {
        name
        for name, one in vars(driver_calls).items()
        if inspect.isfunction(one) and one.__module__ == driver_calls.__name__
    }
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[build.__module__])))
        if isinstance(node, ast.Attribute)
    }
    through_others = {"check_length", "handle_type", "memory_properties"}
    assert public - used == {"check", "handle_bytes", "handle_of", "launch_config", *through_others}, "tested above"
