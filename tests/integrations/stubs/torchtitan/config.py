"""`torchtitan.config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


class Configurable:
    """Its nested `Config` builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self) -> Any:
            return self._owner(config=self)  # type: ignore[attr-defined]

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            assert "__slots__" in vars(cls.Config)
            cls.Config._owner = cls  # type: ignore[attr-defined]


OVERRIDES: dict[str, Callable] = {}
"""Factories by the path that `--override.imports` takes."""


def override(*, target: type, description: str = "") -> Callable:
    """A factory of configurations in place of those of type `target`."""
    assert issubclass(target, Configurable.Config)

    def register(factory: Callable) -> Callable:
        OVERRIDES[f"{factory.__module__}.{factory.__name__}"] = factory
        return factory

    return register


def derive(source: Any, target_cls: type, **deltas: Any) -> Any:
    """A configuration of another class, with the fields that both have."""
    names = {field.name for field in fields(target_cls)}  # type: ignore[arg-type]
    if unknown := set(deltas) - names:
        raise ValueError(f"unknown fields {unknown}")
    shared = {field.name: getattr(source, field.name) for field in fields(source) if field.name in names}
    return target_cls(**shared | deltas)
