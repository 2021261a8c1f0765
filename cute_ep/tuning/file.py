"""The tables that `cute-ep tune` has measured on this machine, in the user's cache.

They take the place of the built-in ones where GPU, CTAs, ranks and shape are those that they were measured for.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import cute_ep
from cute_ep.aot.library import cache_folder
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RowOrder
from cute_ep.tuning.builtin import built_in
from cute_ep.tuning.launch_shape import FAMILIES, Entry, Tuning, has_pipelines, has_twins


@dataclass(frozen=True)
class Setting:
    """What a table was measured for: GPUs, CTAs that a rank may have, ranks that exchange messages, shape, format of
    dispatched rows (None for combine, whose rows come home in one format) and their order, and whether CTAs may have
    twins (dispatch) or pipelines (combine)."""

    gpu: str
    gpus: int
    ctas: int
    ranks: int
    hidden: int
    experts: int
    top_k: int
    format: str | None
    order: RowOrder = EXPERT_MAJOR  # not in every file
    fills_sms: bool = False  # not in every file

    @classmethod
    def of(cls, family: str, cfg: EPConfig, gpu: str, gpus: int, ctas: int, *, ring_bytes: int = 0) -> Setting:
        """The setting of a family's table for `cfg` on `gpus` GPUs called `gpu`, with so many CTAs a rank, which have
        `ring_bytes` as of `built_in`."""
        fmt, fills_sms = None, has_pipelines(cfg, ring_bytes)
        if family == "dispatch":
            fmt, fills_sms = cfg.dispatch_format, has_twins(ctas, ring_bytes)
        return cls(gpu, gpus, ctas, cfg.peers, cfg.hidden, cfg.num_experts, cfg.top_k, fmt, cfg.row_order, fills_sms)


Tables = dict[Setting, tuple[Entry, ...]]


def tuning_file() -> Path:
    """The user's tables."""
    return cache_folder() / "tuning.json"


def read_tables() -> Tables:
    """What `tuning_file()` holds; nothing where there is none, or one of another version of this package.

    Raises:
        EPConfigError: the file is damaged; the message names it.
    """
    path = tuning_file()
    try:
        content = json.loads(path.read_text())
        if content["version"] != cute_ep.__version__:
            return {}
        tables = {_setting(row["setting"]): tuple(Entry(**one) for one in row["entries"]) for row in content["tables"]}
        for table in tables.values():
            Tuning(table, table)
        return tables
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise EPConfigError(f"{path}: no tables ({type(error).__name__}: {error}); remove the file") from None


def _setting(row: dict) -> Setting:
    """Some files have an order of null for combine, measured with rows by expert."""
    return Setting(**{name: value for name, value in row.items() if (name, value) != ("order", None)})


def write_tables(tables: Tables) -> None:
    """Add tables to `tuning_file()`, in place of those of the same settings; readers see all or nothing."""
    path = tuning_file()
    rows = [
        {"setting": asdict(setting), "entries": [asdict(entry) for entry in entries]}
        for setting, entries in (read_tables() | tables).items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"version": cute_ep.__version__, "tables": rows}, indent=1) + "\n")
    draft.replace(path)


def find_tuning(cfg: EPConfig, gpu: str, gpus: int, ctas: int, *, ring_bytes: int = 0) -> Tuning:
    """The user's tables for `cfg` on `gpus` GPUs called `gpu`, with so many CTAs a rank; those of `built_in`, with
    its `ring_bytes`, where there are none."""
    tables = read_tables()
    settings = {family: Setting.of(family, cfg, gpu, gpus, ctas, ring_bytes=ring_bytes) for family in FAMILIES}
    built = built_in(cfg, ctas, ring_bytes=ring_bytes)
    return replace(built, **{family: tables[one] for family, one in settings.items() if one in tables})
