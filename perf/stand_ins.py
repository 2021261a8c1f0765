"""Imports of an installed SGLang that end where packages are missing that its dispatchers and runners only name. What
is measured or tested is its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

PACKAGES = ("IPython", "compressed_tensors", "gguf", "sgl_kernel")
"""Stand-ins where these are not installed: notebooks, quantised models, compiled kernels."""
MODELS = ("sglang.srt.configs", "sglang.srt.utils.hf_transformers", "sglang.srt.utils.hf_transformers_utils")
"""Of SGLang itself, what describes models to transformers and torchvision. Modules of the first are its own."""


class StandIn(ModuleType):
    """A module or package that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


class StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for some modules, and for what is in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(f"{MODELS[0]}.") or not any(f"{name}.".startswith(f"{own}.") for own in self.names):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [f"{folder}/{name.rpartition('.')[2]}" for folder in path or ()]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def allow_sglang() -> None:
    """From now on this process can import SGLang's dispatchers and runners."""
    sys.meta_path.insert(0, StandIns([*MODELS, *(name for name in PACKAGES if find_spec(name) is None)]))
