"""Imports go one way: layouts, then kernels, then cute_ep, and inside each from room to room in the order of ROOMS.
Read from the sources, so no module needs to run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cute_ep

ROOT = Path(__file__).parents[2]
ROOMS = (
    "cute_ep.layouts.maps",
    "cute_ep.layouts.tiles",
    "cute_ep.layouts",
    "cute_ep.kernels.device",
    "cute_ep.kernels.hooks",
    "cute_ep.kernels.codec",
    "cute_ep.kernels.dispatch",
    "cute_ep.kernels.combine",
    "cute_ep.kernels.local",
    "cute_ep.kernels.mail",
    "cute_ep.kernels",
    "cute_ep.torch_internals",
    "cute_ep.adjoints",
    "cute_ep.api",
    "cute_ep.aot",
    "cute_ep.tuning",
    "cute_ep.reference",
    "cute_ep.runtime",
    "cute_ep.ops",
    "cute_ep.nn",
    "cute_ep.testing",
    "cute_ep.bench",
    "cute_ep.cli",
    "cute_ep.distributed",
    "cute_ep.integrations",
    "cute_ep",
)
"""Each may import itself and those before it."""
BUILD_FILE = "cute_ep/aot/build.py"
"""The one file of the runtime that may import kernels or the DSL."""
TORCH_STACK = {"torch", "cuda", "rich"}
ADAPTED = {"flashinfer", "megatron", "sglang", "torchtitan", "transformers", "vllm"}
"""Other libraries, each imported by `cute_ep.integrations.<its name>` only."""
BROUGHT = {"pydantic": "vllm"}
"""Libraries that come with one of these, and may be imported where that one may."""
ADAPTERS = "cute_ep.integrations"
CONTRACT: dict[str, set[str]] = {
    "adjoints": {"inner_products", "ones_for", "weighted"},
    "api.carving": {"Carving"},
    "api.config": {"LONGEST_S", "is_integer", "is_number"},
    "api.config_rules": {"in_words"},
    "api.host": {"host_list", "refuse_capture"},
    "api.rounds": {"MAX_OUTSTANDING"},
    "api.row_tensors": {"ID_TYPES", "with_plain_strides"},
    "api.tensors": {"check_apart", "check_tensor", "check_written", "overlap"},
    "api.types": {"CombineMode", "FormatName"},
    "api.validate": {"check_devices"},
    "api.validate_combine": {"OUTPUT_TYPES"},
    "distributed": {"DistributedEPCombine", "DistributedEPDispatch"},
    "layouts.maps.arena": {"HeaderWord"},
    "layouts.maps.formats": {"BF16", "FORMATS", "FP8", "VECTOR_BYTES"},
    "layouts.maps.record": {"align_up"},
    "layouts.maps.routing": {
        *("BEYOND", "MAX_EXPERTS", "MAX_RANKS", "MAX_TOKENS_PER_RANK", "MAX_TOP_K", "NO_ROW", "Phase", "RANK_MAJOR"),
        *("ROW_ALIGNMENTS", "max_rows", "shared_slice"),
    },
    "nn.gates": {"add_bias", "plain"},
    "ops": {"Batch", "combine", "dispatch", "register"},
    "ops.batches": {"PlainBatch"},
    "ops.calls": {"dispatch_rows"},
    "ops.counting": {"OP", "count_rows"},
    "ops.row_weights": {"SCALAR_HIDDEN", "WeightedRows", "dispatch_weighted", "weighted_rows"},
    "ops.library": {"FORWARD_OPS"},
    "ops.registry": {"communicator_of", "is_open"},
    "reference.routes": {"NO_EXPERT"},
    "runtime.counts": {"ENDS", "CountExchange", "Counting", "ReceiveCounts", "memory_of_ends", "with_ends"},
    "runtime.gpus": {"check_gpu", "sm_budget", "sms_beside_nccl"},
    "runtime.group_pool": {"GroupPool", "Pools", "own_device"},
    "runtime.labels": {"label_rows", "mark_entries"},
    "runtime.local_pool": {"CALLING", "LocalPool"},
    "runtime.pool": {"Hold", "Opening"},
    "runtime.routes": {"RouteCounts", "count_routes"},
    "runtime.sums": {"sum_rows"},
    "torch_internals": {
        "AsyncCollectiveTensor",
        "all_to_all_single",
        "count_dispatch_modes",
        "set_gradients",
        "versions_of",
    },
}
"""What adapters may use of the rest of `cute_ep` beside its public names, by module; the docstring of
`cute_ep/integrations/__init__.py` says what it is."""


def sources() -> list[str]:
    found = [path for folder in ("cute_ep", "kernels", "layouts") for path in (ROOT / folder).rglob("*.py")]
    inside = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(path for path in inside if not path.startswith(("cute_ep/kernels/", "cute_ep/layouts/")))


def module_of(path: str) -> str:
    """The dotted name of a file, a package's for its __init__.py."""
    parts = Path(path).with_suffix("").parts
    return ".".join([*(() if parts[0] == "cute_ep" else ("cute_ep",)), *parts]).removesuffix(".__init__")


def imports(path: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import statement of a file, also those inside functions."""
    package = module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse((ROOT / path).read_text(), path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(name: str) -> int:
    """Number of the first, so innermost, room that a dotted name is in."""
    return min(number for number, room in enumerate(ROOMS) if within(name, room))


def allowed(path: str, name: str) -> bool:
    """Whether the file at `path` may import `name`."""
    folder = Path(path).parts[0]
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    if within(name, "cutlass"):
        return folder == "kernels" or path == BUILD_FILE
    if within(name, ADAPTERS) or (within(module_of(path), ADAPTERS) and within(name, "cute_ep")):
        return allowed_of_adapters(module_of(path), name)
    top = name.split(".")[0]
    if (top := BROUGHT.get(top, top)) in ADAPTED:
        return within(module_of(path), f"cute_ep.integrations.{top}")
    if not within(name, "cute_ep"):
        return folder == "cute_ep" and name.split(".")[0] in TORCH_STACK
    if folder == "cute_ep" and within(name, "cute_ep.kernels") and path != BUILD_FILE:
        return False
    return name == "cute_ep" or name == "cute_ep.__version__" or room_of(name) <= room_of(module_of(path))


def allowed_of_adapters(module: str, name: str) -> bool:
    """Whether a module may import `name`, where one of both is an adapter's: a room imports itself, `common`, and of
    the core the contract."""
    if not within(module, ADAPTERS):
        return False
    if within(name, ADAPTERS):
        return any(within(name, f"{ADAPTERS}.{room}") for room in (module.split(".")[2], "common"))
    used = name.removeprefix("cute_ep.")
    owner, _, last = used.rpartition(".")
    return used in (*CONTRACT, *cute_ep.__all__, "__version__") or last in CONTRACT.get(owner, ())


def violations(path: str) -> list[str]:
    return [f"{path}:{line} imports {name}" for line, name in imports(path) if not allowed(path, name)]


@pytest.mark.parametrize("path", sources())
def test_imports_go_one_way(path: str) -> None:
    assert not violations(path)


def test_adapters_use_all_of_their_contract() -> None:
    """And the page that says what it is names its modules."""
    rooms = [path for path in sources() if path.startswith("cute_ep/integrations/")]
    used = {name.removeprefix("cute_ep.") for path in rooms for _, name in imports(path)}
    for path in rooms:
        text = (ROOT / path).read_text()
        used |= {f"ops.{name}" for name in CONTRACT["ops"] if re.search(rf"cute_ep\.ops\.{name}\b", text)}
    assert {f"{module}.{name}" for module, names in CONTRACT.items() for name in names} <= used
    said = ast.get_docstring(ast.parse((ROOT / "cute_ep/integrations/__init__.py").read_text())) or ""
    runtime = {module.split(".")[-1] for module in CONTRACT if module.startswith("runtime.")}
    assert {module.split(".")[0] for module in CONTRACT} | runtime <= set(re.findall(r"\w+", said))


def test_adapters_leave_private_attributes_of_the_core_alone() -> None:
    def attributes(path: str) -> Iterator[ast.Attribute]:
        tree = ast.parse((ROOT / path).read_text())
        return (one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and one.attr.startswith("_"))

    def own(one: ast.Attribute) -> bool:
        return isinstance(one.value, ast.Name) and one.value.id in ("self", "cls")

    rooms = [path for path in sources() if path.startswith("cute_ep/integrations/")]
    core = [path for path in sources() if path.startswith(("cute_ep/api/", "cute_ep/runtime/", "cute_ep/reference/"))]
    theirs = {one.attr for path in rooms for one in attributes(path) if own(one)}
    private = {one.attr for path in core for one in attributes(path) if own(one)} - theirs
    assert len(private) > 50
    assert not [f"{path}: {ast.unparse(one)}" for path in rooms for one in attributes(path) if one.attr in private]


def test_nothing_lies_beside_the_rooms() -> None:
    folder = ROOT / "cute_ep" / "integrations"
    beside = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
    assert beside == {"common", "deep_ep", *ADAPTED}


def test_every_room_says_what_it_is() -> None:
    for folder in {Path(path).parent for path in sources()}:
        assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())), folder


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("layouts/maps/formats.py", "torch"),
        ("layouts/maps/formats.py", "cutlass"),
        ("layouts/maps/arena.py", "cute_ep.layouts.tiles.layout.Layout"),
        ("layouts/maps/arena.py", "cute_ep.kernels.device.block"),
        ("layouts/maps/arena.py", "cute_ep.api.config"),
        ("kernels/device/sync.py", "cute_ep.kernels.dispatch.route"),
        ("kernels/dispatch/route.py", "cute_ep.kernels.combine.send"),
        ("kernels/dispatch/send.py", "torch"),
        ("kernels/dispatch/send.py", "cute_ep.api.config"),
        ("kernels/dispatch/send.py", "layouts.formats"),
        ("cute_ep/tuning/builtin.py", "cute_ep.kernels.device.block.launch_config"),
        ("cute_ep/aot/library.py", "cutlass"),
        ("cute_ep/reference/backend.py", "cute_ep.runtime.driver.check"),
        ("cute_ep/runtime/connection.py", "cute_ep.bench.machine.parse_devices"),
        ("cute_ep/runtime/connection.py", "cute_ep.ops.register"),
        ("cute_ep/ops/library.py", "cute_ep.nn.layer"),
        ("cute_ep/ops/calls.py", "cute_ep.integrations.transformers.exchange"),
        ("cute_ep/distributed.py", "cute_ep.integrations.transformers.exchange"),
        ("cute_ep/__init__.py", "cute_ep.integrations.transformers.attach"),
        ("cute_ep/integrations/common/checks.py", "cute_ep.integrations.vllm.manager"),
        ("cute_ep/integrations/sglang/dispatcher.py", "cute_ep.integrations.vllm.manager"),
        ("cute_ep/integrations/deep_ep/normal.py", "cute_ep.runtime.arguments"),
        ("cute_ep/integrations/deep_ep/normal.py", "cute_ep.api.buffers.buffer_shapes"),
        ("cute_ep/integrations/deep_ep/normal.py", "cute_ep.api.buffers.DispatchBuffers"),
        ("cute_ep/integrations/common/checks.py", "transformers"),
        ("cute_ep/integrations/common/pools.py", "sglang.srt.environ"),
        ("cute_ep/integrations/megatron/manager.py", "torchtitan"),
        ("cute_ep/bench/tune.py", "cute_ep.cli.common"),
        ("cute_ep/api/config.py", "cute_ep.reference.formats"),
        ("cute_ep/cli/main.py", "kernels.block"),
        ("cute_ep/cli/main.py", "layouts.formats"),
        ("cute_ep/cli/main.py", "numpy"),
    ],
)
def test_the_rule_forbids(path: str, name: str) -> None:
    assert (ROOT / path).exists() and not allowed(path, name)


@pytest.mark.parametrize("path", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")))
def test_no_bare_folder_names(path: str) -> None:
    """`import kernels` works from the repository root and would load every file a second time."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(), path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        assert not [name for name in names if name.split(".")[0] in ("kernels", "layouts")], path


ABSENT: dict[str, tuple[str, ...]] = {
    "cute_ep": ("torch", "cutlass", "cuda", "rich", "transformers", "sglang"),
    "cute_ep.layouts": ("torch", "cutlass", "cuda"),
    "cute_ep.aot.library": ("torch", "cutlass", "cuda"),
    "cute_ep.api.config": ("torch", "cutlass", "cuda"),
    "cute_ep.aot.build": ("torch", "cutlass", "cuda"),
    "cute_ep.reference": ("cutlass",),
    "cute_ep.reference.backend": ("cutlass", "cute_ep.runtime.driver"),
    "cute_ep.runtime.connection": ("cutlass", "cute_ep.ops"),
    "cute_ep.ops": ("cutlass", "cute_ep.runtime", "cute_ep.reference", "cute_ep.nn"),
    "cute_ep.nn": ("cutlass",),
    "cute_ep.distributed": ("cutlass", "cute_ep.integrations", "transformers"),
    "cute_ep.integrations.common.pools": ("transformers", "cute_ep.ops"),
    "cute_ep.integrations.sglang": ("torch", "cutlass", "cuda", "sglang"),
    "cute_ep.integrations.deep_ep": ("cutlass", "cute_ep.ops"),
}
"""By module, what importing it must not import."""
EACH = """
class Asked:
    names = set()

    def find_spec(self, name, path=None, target=None):
        self.names.add(name)

for module, absent in {cases}.items():
    if not (child := os.fork()):
        sys.meta_path.insert(0, Asked())
        __import__(module)
        os.write(1, f"{{module}}: {{sorted(set(absent) & (set(sys.modules) | Asked.names))}}\\n".encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, str]:
    """By module, a list of what importing it has imported, or looked for, and must not, as text. Each is imported in a
    process of its own; those that may import torch are forked from one that has imported what takes longest."""
    text = ""
    for first in ("torch._dynamo", "re"):
        cases = {module: absent for module, absent in ABSENT.items() if ("torch" in absent) == (first == "re")}
        code = f"import os, sys, {first}\n{EACH.format(cases=cases)}"
        text += subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    return dict(line.split(": ") for line in text.splitlines())


@pytest.mark.parametrize("module", ABSENT)
def test_importing_a_module_imports_none_of_these(imported: dict[str, str], module: str) -> None:
    assert imported[module] == "[]"
